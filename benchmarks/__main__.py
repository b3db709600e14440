"""Take the tables again: all of them, or those whose names match a pattern.

    python -m benchmarks --list                    # what there is, and when it was taken
    python -m benchmarks 'accelerator-*' soak      # these, then the pages that show them
    python -m benchmarks scale-out --rows FILE     # one with further options: only shown

One result is one module with its options, and one JSON file under benchmarks/results. All of them
take some twelve hours; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
MODELS = ("resnet50", "vgg16", "bert", "swin-t")
RATES = {"1gbit": 5, "300mbit": 3}
"""Rounds at each."""
ROADS = "--splits default --transports flat direct sharded 'sharded, a third replicated'"
RIVALS = "--fsdp keep --zero 8"
FSDP = "--fsdp default keep prefetch --splits default --transports flat sharded --rounds 5"
GRID = "default 'by_bytes 2/1/1' 'by_bytes 16/1/1' single optimal"
HALF = "bf16 fp16", "fp16 'fp16, 4 MB'"
FEW_BITS = "int8 onebit dgc powersgd 'adaptive onebit'", "'PowerSGD, rank 4'"
CODECS: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "resnet50": {"": (HALF, FEW_BITS)},
    "vgg16": {"": (FEW_BITS,), "-half": (HALF,)},
    "bert": {"": (HALF, FEW_BITS)},
}
"""By model and end of the name: codecs and torch's hooks that have room side by side."""
ON_ROADS = " ".join(f"{codec} '{codec} / direct' '{codec} / sharded'" for codec in ("bf16", "int8"))
SIZES = "--kilobytes 256 1024 4096 16384 65536"
ALONE = (
    "loading", "balance", "large_batch", "soak", "tuner", "overhead", "shared_cores", "times",
    "operators", "tensor_parallel", "bubbles", "offload", "unequal", "checks", "kills",
    "lost_hosts", "replan", "scale_out", "tutorial",
)  # fmt: skip
"""Modules whose one result has their name."""


def commands() -> Iterator[tuple[str, str]]:
    """The name of each result, and the module with its options."""
    for rate, rounds in RATES.items():
        for model in MODELS:
            base = f"exchange --model {model} --rate {rate} {RIVALS} {ROADS} --no-memory"
            base = f"{base} --rounds {rounds} --warmup 1"
            yield f"accelerator-{model}-{rate}", f"{base} --compute accelerator"
            yield f"transports-{model}-{rate}", base
    yield "fsdp-resnet50-1gbit", f"exchange --model resnet50 --ddp 2 4 {FSDP} --no-memory"
    yield "fsdp2-1gbit", "fsdp2 --rate 1gbit"
    yield "fsdp2-100mbit", "fsdp2 --rate 100mbit --model tiny --updates 2 --rounds 5"
    for model in MODELS:
        yield f"memory-{model}", f"exchange --model {model} --only-memory {RIVALS} {ROADS}"
    for model, parts in CODECS.items():
        ends = (names for pairs in parts.values() for names in pairs)
        codecs, hooks = (" ".join(names) for names in zip(*ends, strict=True))
        coded = f"--ddp 4 --splits default --codecs {codecs} --hooks {hooks}"
        yield f"memory-codecs-{model}", f"exchange --model {model} --only-memory {coded}"
    for model in MODELS:
        options = f"auto --model {model} --rounds 3 --finals 10 --more 0 --splits {GRID}"
        yield f"auto-{model}-1gbit", f"{options} --compute accelerator"
        yield f"auto-{model}-1gbit-cpu", options
        slow = options.replace("--rounds 3 --finals 10", "--rounds 2 --finals 6 --rate 300mbit")
        yield f"auto-{model}-300mbit", f"{slow} --compute accelerator"
    for model in ("bert", "vgg16"):
        options = f"--model {model} --loopback --nodes 2 --splits default"
        yield f"one-host-{model}", f"exchange {options} --transports flat shared_memory"
    yield (
        "one-host-vgg16-accelerator",
        "exchange --model vgg16 --loopback --nodes 2 --splits default --transports flat "
        "shared_memory --compute accelerator --compute-seconds 0.1",
    )
    yield "transports-1gbit", "transports"
    for rate in ("1gbit", "100mbit"):
        yield f"adapters-{rate}", f"adapters --rate {rate}"
    yield "transports-8-hosts-300mbit", "transports --nodes 8 --rate 300mbit"
    for numbering in ("contiguous", "permuted"):
        yield f"allreduce-{numbering}", f"allreduce --numbering {numbering}"
    for ranks in (2, 4):
        options = f"--nodes 1 --ranks-per-node {ranks} --transports flat shared_memory {SIZES}"
        yield f"allreduce-{ranks}-ranks", f"allreduce {options}"
    for rate in RATES:
        for model, end, some in ((m, *p) for m, parts in CODECS.items() for p in parts.items()):
            codecs, hooks = (" ".join(names) for names in zip(*some, strict=True))
            coded = f"exchange --model {model} --rate {rate} --ddp 2 4 --splits default"
            coded = f"{coded} --codecs {codecs} --hooks {hooks} --rounds 5 --warmup 1 --no-memory"
            yield f"codecs-{model}-{rate}{end}", coded
    coded = "exchange --model gpt2 --rate 500mbit --ddp 4 50 --splits default"
    yield "codecs-gpt2-500mbit", f"{coded} --codecs {ON_ROADS}"
    for rate in ("100mbit", "300mbit"):
        yield f"local-bert-{rate}", f"local speed --rate {rate} --rounds 2"
    rivals = "'torchft DiLoCo, 16 steps' 'torchft DiLoCo, 16 steps, delay 4'"
    ours = "'local, 16 steps' 'local, 16 steps, 4 fragments, delay 4, int8' 'local: auto'"
    exact = "'DDP, 4 MB' 'DDP, 25 MB' 'sharded, a third replicated' int8 PowerSGD"
    coded = f"local speed --compute cpu --rate 100mbit --rounds 2 --variants {exact}"
    yield "local-bert-100mbit-cpu", f"{coded} {rivals} {ours}"
    far = "--rate 1gbit --round-trip-ms 50 --loss-percent 0.1 --rounds 2 --variants"
    coded = "'local, 16 steps, 4 fragments, delay 4, int8' 'local: auto'"
    far = f"{far} 'DDP, 4 MB' {rivals} {coded}"
    yield "local-bert-far", f"local speed {far}"
    yield "local-bert-far-set", f"local speed --keep-window {far}"
    coded = "'data parallel' " + " ".join(
        f"'{steps} steps{codec}'"
        for codec in ("", ", int8", ", int4", ", topk, momentum 0.0")
        for steps in (8, 16, 32, 64, 128)
    )
    yield "local-sensitivity", f"local loss --seeds 1 --steps 400 --variants {coded}"
    dense = "--variants 'data parallel'"
    chosen, longest = (f"16 steps, 4 fragments, delay {one}" for one in ("3, int4", "4, int8"))
    for task in ("causal", "masked", "resnet"):
        alone = " 'data parallel and outer steps'" if task == "causal" else ""
        coded = f"{dense}{alone} '{chosen}' '{longest}'"
        yield f"local-{task}", f"local loss --task {task} --steps 800 {coded}"
    for steps in (400, 1600):
        coded = f"--steps {steps} {dense} '{chosen}'"
        yield f"local-masked-{steps}", f"local loss --task masked {coded}"
    outer = "'16 steps, momentum 0.0, lr 1.0' " + " ".join(
        f"'16 steps, momentum {momentum}'" for momentum in (0.5, 0.7, 0.8, 0.9)
    )
    for task in ("causal", "masked"):
        coded = f"local loss --task {task} --steps 800 --seeds 1"
        yield f"local-outer-{task}", f"{coded} {dense} {outer}"
    others = (
        "'torch, post-local SGD, 16 steps' '8 steps' '16 steps' '32 steps' '16 steps, int8' "
        f"'16 steps, topk, momentum 0.0' '16 steps, inner_state averaged' "
        f"'{chosen}, inner_state averaged'"
    )
    coded = f"local loss --steps 800 --seeds 1 {dense} {rivals} {others}"
    yield "local-causal-others", coded
    yield "local-clock", "local_clock --rate 100mbit"
    yield "convergence-digits", "convergence --task digits"
    yield "convergence-text", "convergence --task text --ranks 2 --steps 1600"
    for task in ("digits", "text", "speed"):
        yield f"precision-{task}", f"precision --task {task}"
    for script in ALONE:
        yield script.replace("_", "-"), script
    for model in ("bert", "resnet50"):
        yield f"compiled-{model}", f"compiled --model {model}"
    for part in ("kernels", "patterns", "networks", "optimizers"):
        yield part, f"fusion {part}"
    for part in ("graphs", "kernels", "patterns", "optimizers"):
        yield f"{part}-cuda", f"fusion {part} --device cuda"
    yield "patterns-large-cuda", "fusion patterns --only '256 images' --device cuda"
    yield "networks-cuda", "fusion networks --only 'ResNet-18: 128' --device cuda"
    yield "prediction", "prediction --models bert gpt2 swin-t"
    for place, named in (("3 ranks on one host", "one-host"), ("4 emulated hosts", "four-hosts")):
        for fault in ("kill -9", "exception", "exit(0)", "exit(3)"):
            name = re.sub(r"\W+", "-", fault).strip("-")
            yield f"blame-{named}-{name}", f"blame --places '{place}' --faults '{fault}'"
    for part in ("exchanges", "residual", "ranks", "none"):
        yield f"wrong-updates-{part}", f"wrong_updates {part}"
    for setup in ("accelerate()", "DDP, watch", "FSDP2, watch"):
        name = re.split(r"\W", setup.lower())[0]
        yield f"faults-{name}", f"faults --setups '{setup}'"
    yield "network-faults", "network_faults"
    yield "time-to-loss", "time_to_loss"
    yield "tuner-codecs", "tuner --allow-lossy --rate 300mbit"
    yield "recompute-bert-large", "recompute batch"
    for model in ("bert", "gpt2", "swin"):
        yield f"recompute-{model}", f"recompute time --model {model}"


def chosen(patterns: Sequence[str]) -> dict[str, str]:
    """The commands whose names match; no pattern: all.

    Raises:
        SystemExit: a pattern matches none.
    """
    every = dict(commands())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise SystemExit(f"{pattern}: no such result; allowed: {', '.join(every)}, * and ?")
    wanted = patterns or ["*"]
    return {n: c for n, c in every.items() if any(fnmatchcase(n, p) for p in wanted)}


def taken(name: str) -> tuple[str, str]:
    """The date and the commit of a result; empty where there is none."""
    file = RESULTS / f"{name}.json"
    entry = json.loads(file.read_text()) if file.exists() else {}
    return entry.get("date", ""), entry.get("commit") or ""


def show(parts: dict[str, str]) -> None:
    """What there is, a line each."""
    drawn = Table(box=None)
    for heading in ("result", "taken", "commit", "command"):
        drawn.add_column(heading, no_wrap=True)
    for name, command in parts.items():
        drawn.add_row(name, *taken(name), command)
    Console(width=max(map(len, parts.values())) + 60).print(drawn)


def run(name: str, command: str, further: Sequence[str] = ()) -> int:
    """Take one result again, or only show it with further options; its status."""
    module, *options = shlex.split(command)
    saved = ["--json", f"benchmarks/results/{name}.json"]  # as it stands in the result
    argv = [sys.executable, "-m", f"benchmarks.{module}", *options, *(further or saved)]
    return subprocess.call(argv, cwd=RESULTS.parents[1])


def main() -> int:
    """Take what was asked for; the status of the last that failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of results, with * and ?; default: all")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    args, further = parser.parse_known_args()
    parts = chosen(args.names)
    if args.list:
        show(parts)
        return 0
    if further:
        if len(parts) != 1:
            parser.error(
                f"{' '.join(further)}: further options are for one result, not {len(parts)}"
            )
        return run(*next(iter(parts.items())), further)
    console, failed = Console(stderr=True), 0
    for number, (name, command) in enumerate(parts.items(), 1):
        console.rule(f"{number} of {len(parts)}: {name}")
        if status := run(name, command):
            console.print(f"{name}: ended with status {status}; the others go on", style="red")
            failed = status
    pages = [sys.executable, "-m", "benchmarks.pages"]
    return failed or subprocess.call(pages, cwd=RESULTS.parents[1])


if __name__ == "__main__":
    sys.exit(main())
