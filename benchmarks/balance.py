"""Samples of different lengths on several ranks: how evenly they compute, by how samples are dealt.

    python -m benchmarks.balance --json balance.json

Samples are the functions of the standard library, a token for each token of Python. *Predicted*:
the share of the ranks' time that is spent waiting for the slowest, if a batch takes as long as its
tokens, padding counted; "cost fitted": as `fit_cost` says, from batches that are measured first.
*Measured*: a small BERT computes them, a variant after the other in every round, another one first
each time. Ranks share the cores of this host, so for the idle share they compute each step one
after the other, as on hosts of their own; of each batch the fastest of all rounds counts. *The same
batch on every rank* shows how far that tells ranks apart. Tokens a second, without padding, are
those of all ranks together, with the exchange of gradients.

*Unequal ranks*: every rank may use a part of a core, the last one half as much as the others (a
quota of a control group, which needs root), on samples of one length. What all ranks reach together
is compared with the sum of what each reached while the others waited, without any exchange.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import sysconfig
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import BertConfig, BertForMaskedLM

import slipstream
from benchmarks.iteration import on_loopback, quartiles
from benchmarks.record import finish
from benchmarks.turns import joined_ranks
from slipstream.data.balance import BalancedBatches, LengthCost, fit_cost
from slipstream.data.packing import pack

RANKS = 4
BATCH = 16  # samples a rank, on average
LONGEST = 256  # tokens; longer functions are cut
SHORTEST = 8
SAMPLES = 2048
WORDS = 1024
QUOTA = 0.36, 0.18
"""Of a core, for each rank: so all of them need 1.3 cores together."""
PERIOD = 0.01
"""Seconds in which a rank has its quota."""
EQUAL, EQUAL_BATCH = 64, 192
"""Tokens of the samples of unequal ranks, and samples of their batches."""


class Functions(Dataset[torch.Tensor]):
    """Functions of the standard library, as numbers of their tokens.

    Args:
        shortest, longest: shorter ones are left out, longer ones cut.
    """

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        texts: list[str] = []
        for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-m]*/*.py")):
            texts += _functions(path)
            if len(texts) > 5 * SAMPLES:
                break
        words = [row for text in texts if len(row := _tokens(text)) >= shortest]
        chosen = np.random.default_rng(0).permutation(len(words))[:SAMPLES]
        rows = [words[index][:longest] for index in chosen]
        common = Counter(word for row in rows for word in row).most_common(WORDS - 2)
        number = {word: n + 2 for n, (word, _) in enumerate(common)}
        self._rows = [torch.tensor([number.get(word, 1) for word in row]) for row in rows]
        self.lengths = [len(row) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def _functions(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [ast.get_source_segment(text, node) or "" for node in found]


def _tokens(text: str) -> list[str]:
    try:
        found = tokenize.generate_tokens(io.StringIO(text).readline)
        return [token.string for token in found if token.string.strip()]
    except (tokenize.TokenError, IndentationError):
        return []


# How samples are dealt: the samples of each batch of each rank, by step.

Steps = list[list[list[int]]]


def by_rank(make: Callable[[int], Any]) -> Steps:
    """Batches of all ranks, by step."""
    return [list(parts) for parts in zip(*(list(make(rank)) for rank in range(RANKS)), strict=True)]


def at_random(lengths: Sequence[int]) -> Steps:
    """As DistributedSampler and batch_size deal them."""
    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    size = RANKS * BATCH
    updates = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    return [[update[rank::RANKS] for rank in range(RANKS)] for update in updates]


def sorted_strided(lengths: Sequence[int]) -> Steps:
    """Samples by length, every fourth one to a rank; the order of updates is shuffled."""
    order = np.argsort(lengths, kind="stable").tolist()
    size = RANKS * BATCH
    updates = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    np.random.default_rng(1).shuffle(updates)
    return [[update[rank::RANKS] for rank in range(RANKS)] for update in updates]


def as_bagua(lengths: Sequence[int]) -> Steps:
    """Bagua's LoadBalancingDistributedSampler: samples by length, in groups of one for each rank;
    the groups are shuffled, and a rank takes its place in each."""
    order = np.argsort(lengths, kind="stable")
    groups = order[: len(order) // RANKS * RANKS].reshape(-1, RANKS)
    groups = groups[np.random.default_rng(1).permutation(len(groups))]
    return [
        [groups[start : start + BATCH, rank].tolist() for rank in range(RANKS)]
        for start in range(0, len(groups) - BATCH + 1, BATCH)
    ]


def all_alike(lengths: Sequence[int]) -> Steps:
    """Every rank computes the same batch, dealt at random."""
    return [[parts[0]] * RANKS for parts in at_random(lengths)]


def balanced(lengths: Sequence[int], pads: bool, cost: LengthCost | None = None) -> Steps:
    """slipstream's."""

    def make(rank: int) -> BalancedBatches:
        return BalancedBatches(
            lengths,
            rank=rank,
            ranks=RANKS,
            batch_size=RANKS * BATCH,
            pads=pads,
            cost=cost,
            drop_last=True,
        )

    return by_rank(make)


FITTED = "slipstream, padded, cost fitted"
ALIKE = "the same batch on every rank"
DEALS: dict[str, tuple[Callable[[Sequence[int]], Steps], bool]] = {
    "at random, padded": (at_random, True),
    "sorted, strided, padded": (sorted_strided, True),
    "Bagua's rule, padded": (as_bagua, True),
    "slipstream, padded": (lambda lengths: balanced(lengths, pads=True), True),
    "at random, packed": (at_random, False),
    "Bagua's rule, packed": (as_bagua, False),
    "slipstream, packed": (lambda lengths: balanced(lengths, pads=False), False),
    ALIKE: (all_alike, False),
}


def predicted(
    steps: Steps, lengths: Sequence[int], pads: bool, cost: LengthCost | None
) -> tuple[float, float]:
    """The share of time that is waited, by ``cost`` or tokens, and of tokens that are padding."""

    def summed(part: Sequence[int], cost: LengthCost) -> float:
        costs = cost([lengths[index] for index in part])
        return float(len(costs) * costs.max() if pads else costs.sum())

    def all_of(cost: LengthCost) -> Any:
        return np.array([[summed(part, cost) for part in parts] for parts in steps])

    times = all_of(cost or LengthCost())
    real = sum(lengths[index] for parts in steps for part in parts for index in part)
    return 1 - times.mean(1).sum() / times.max(1).sum(), 1 - real / all_of(LengthCost()).sum()


def in_turn(model: BertForMaskedLM, batches: Sequence[Any]) -> torch.Tensor:
    """Seconds that this rank takes for each batch, while the others wait."""
    busy = torch.zeros(len(batches), dtype=torch.float64)
    for number, batch in enumerate(batches):
        for turn in range(RANKS):
            dist.barrier()
            if turn == dist.get_rank():
                busy[number] = min(seconds_of(model, batch) for _ in range(2))
    return busy


def idle_share(busy: torch.Tensor) -> float:
    """The share of time that is waited if each rank has a host of its own."""
    every = [torch.empty_like(busy) for _ in range(RANKS)]
    dist.all_gather(every, busy)
    times = torch.stack(every)
    return 1 - (times.mean(0).sum() / times.max(0).values.sum()).item()


def seconds_of(model: BertForMaskedLM, batch: Any) -> float:
    """Forward and backward of one batch."""
    start = time.perf_counter()
    model(**batch).loss.backward()
    return time.perf_counter() - start


def inputs(rows: Sequence[torch.Tensor], pads: bool) -> dict[str, torch.Tensor]:
    """What BERT is given; it learns to say its own tokens, which takes as long as any task."""
    if not pads:
        packed = pack(rows)
        return {
            "input_ids": packed.tokens,
            "position_ids": packed.positions,
            "attention_mask": packed.additive_mask(torch.float32),
            "labels": packed.tokens,
        }
    tokens = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = (tokens > 0).long()
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def padded(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch, padded to its longest sample."""
    return inputs(rows, pads=True)


def epochs(loader: Any, sampler: DistributedSampler[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other, without end."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def model_of() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=LONGEST,
    )
    return BertForMaskedLM(config)


def fitted(model: BertForMaskedLM) -> LengthCost:
    """What samples cost by their lengths, from padded batches that the first rank measures."""
    shapes = [(samples, length) for length in (16, 48, 96, 160, 256) for samples in (2, 4, 8, 16)]
    seconds = torch.full((len(shapes),), torch.inf, dtype=torch.float64)
    for _ in range(0 if dist.get_rank() else 3):
        for number, (samples, length) in enumerate(shapes):
            batch = inputs(list(torch.ones(samples, length, dtype=torch.int64)), pads=True)
            seconds[number] = min(seconds[number].item(), seconds_of(model, batch))
    dist.broadcast(seconds, 0)
    return fit_cost([[length] * samples for samples, length in shapes], seconds.tolist())


@joined_ranks()
def train(steps: int, rounds: int) -> list[dict[str, Any]] | None:
    """What each rank does: all variants in turns; the rows, on the first rank."""
    rank, data = dist.get_rank(), Functions()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = slipstream.accelerate(model, optimizer)
    deals = {name: (deal(data.lengths), pads) for name, (deal, pads) in DEALS.items()}
    alone = model_of()
    cost = fitted(alone)
    deals[FITTED] = balanced(data.lengths, True, cost), True
    found: dict[str, list[float]] = {name: [] for name in deals}
    busy = {name: torch.full((steps,), torch.inf, dtype=torch.float64) for name in deals}
    names = [*deals]
    for turn in range(rounds + 1):  # the first round does not count
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dealt, pads = deals[name]
            part = dealt[:steps]
            batches = [inputs([data[i] for i in parts[rank]], pads) for parts in part]
            dist.barrier()
            begin = time.perf_counter()
            for batch in batches:
                session.backward(session.model(**batch).loss)
                session.step()
            dist.barrier()
            seconds = time.perf_counter() - begin
            busy[name] = torch.minimum(busy[name], in_turn(alone, batches))
            tokens = sum(data.lengths[i] for parts in part for own in parts for i in own)
            if turn:
                found[name].append(tokens / seconds)
    idle = {name: idle_share(seconds) for name, seconds in busy.items()}
    session.close()
    if rank:
        return None
    rows = []
    for name, (dealt, pads) in deals.items():
        waits, padding = predicted(dealt, data.lengths, pads, cost if name == FITTED else None)
        speeds = found[name]
        ratios = [ours / theirs for ours, theirs in zip(speeds, found[names[0]], strict=True)]
        rows.append(
            {
                "variant": name,
                "predicted": waits,
                "padding": padding,
                "idle": idle[name],
                "tokens_per_second": quartiles(speeds),
                "to_random": quartiles(ratios),
            }
        )
    return rows


@contextmanager
def limited(part: float) -> Iterator[None]:
    """This process may use so much of a core, by a control group of its own."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup") if second else Path("/sys/fs/cgroup/cpu")
    names = Path("/proc/self/cgroup").read_text().splitlines()
    mine = {
        kind: path
        for _, kinds, path in (n.split(":", 2) for n in names)
        for kind in kinds.split(",")
    }
    home = root / mine["" if second else "cpu"].lstrip("/")
    group, period = root / f"slipstream-balance-{os.getpid()}", round(1e6 * PERIOD)
    group.mkdir()
    try:
        if second:
            (root / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.max").write_text(f"{round(part * period)} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(f"{period}")
            (group / "cpu.cfs_quota_us").write_text(f"{round(part * period)}")
        (group / "cgroup.procs").write_text(f"{os.getpid()}")
        yield
    finally:
        (home / "cgroup.procs").write_text(f"{os.getpid()}")
        group.rmdir()


def unequal(steps: int) -> list[dict[str, Any]] | None:
    """What each rank does: alone, then together, by how samples are dealt."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows: list[dict[str, Any]] | None = [] if not rank else None
    data = Functions(EQUAL, EQUAL)
    with limited(QUOTA[rank == ranks - 1]), joined_ranks():
        model = model_of()
        size = EQUAL_BATCH
        batches = [padded([data[i] for i in range(n, n + size)]) for n in range(0, 4 * size, size)]
        model(**batches[0]).loss.backward()  # does not count
        alone = torch.zeros(1, dtype=torch.float64)
        for turn in range(ranks):
            dist.barrier()
            if turn == rank:
                tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
                alone += tokens / sum(seconds_of(model, batch) for batch in batches)
        dist.all_reduce(alone)
        for name, settings in UNEQUAL.items():
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            sampler: DistributedSampler[Any] = DistributedSampler(data, seed=3)
            loader = DataLoader(
                data, EQUAL_BATCH, sampler=sampler, collate_fn=padded, drop_last=True
            )
            with slipstream.accelerate(model, optimizer, loader, strategy=settings) as session:
                tokens_seen = torch.zeros(1, dtype=torch.float64)
                for step, batch in enumerate(epochs(session.loader, sampler)):
                    if step == 2:  # those before do not count
                        dist.barrier()
                        begin = time.perf_counter()
                    session.backward(session.model(**batch).loss)
                    session.step()
                    tokens_seen += int(batch["attention_mask"].sum()) if step >= 2 else 0
                    if step == steps + 1:
                        break
                dist.barrier()
                seconds = time.perf_counter() - begin
                dist.all_reduce(tokens_seen)
                report = session.report()
            if rows is not None:
                speeds = re.search(r"speeds ([\d.]+(, [\d.]+)+)", report)
                rows.append(
                    {
                        "variant": name,
                        "tokens_per_second": tokens_seen.item() / seconds,
                        "to_sum": tokens_seen.item() / seconds / alone.item(),
                        "speeds": speeds[1] if speeds else "",
                    }
                )
    return rows


UNEQUAL: dict[str, dict[str, Any]] = {
    "the same number of samples": {},
    "data: {balance: {}}": {"data": {"balance": {"mean": "tokens"}}},
    "data: {balance: {speeds: measured}}": {
        "data": {"balance": {"mean": "tokens", "speeds": "measured"}}
    },
}


def main() -> None:
    """Measure, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="of a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--rank-of", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        what, file = args.rank_of
        made = train(args.steps, args.rounds) if what == "equal" else unequal(args.steps)
        if made is not None:
            Path(file).write_text(json.dumps(made))
        return
    entry: dict[str, Any] = {"ranks": RANKS, "batch": BATCH, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as folder:
        for what, key in (("equal", "rows"), ("unequal", "unequal")):
            file = str(Path(folder, f"{what}.json"))
            words = ["--steps", str(args.steps), "--rounds", str(args.rounds)]
            if on_loopback([*words, "--rank-of", what, file], RANKS):
                raise SystemExit(f"{what}: a rank failed")
            entry[key] = json.loads(Path(file).read_text())
    finish(args.json, "balance", entry)


if __name__ == "__main__":
    main()
