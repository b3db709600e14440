"""Sentences and tables of README and docs that quote results, by name; `pages` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.result import Entry, Table
from benchmarks.tables.exchanges import exchange, on_accelerator
from benchmarks.tables.planning import late_runs, published, same_bits

Results = Mapping[str, Entry]
"""All results, by the names of their files."""

PAGE = "../benchmarks/results/README.md"
SHARDED = "slipstream, default, sharded"
THIRD = f"{SHARDED}, a third replicated"
EXACT = {
    "flat": "slipstream, default",
    "direct": "slipstream, default, direct",
    "sharded": SHARDED,
    "sharded, a third replicated": THIRD,
}
"""Columns of the table of exact strategies, and rows of the results."""
MODELS = ("resnet50", "vgg16", "swin-t", "bert")
RATES = ("1gbit", "300mbit")
TERMINALS, SAID_LINES, SAID_WIDTH = 2, 8, 400
"""What is shown of the words of launchers: of how many, lines, and characters of each."""


def _to(values: Sequence[float], digits: int = 2) -> str:
    """From the least to the most.

    Example:
        >>> _to([1.0, 2.0, 1.5], 1)
        '1.0 to 2.0'
    """
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _row(entry: Entry, **wanted: object) -> Mapping[str, Any]:
    """The row with these values.

    Raises:
        ValueError: there is none, or more than one.
    """
    [found] = (r for r in entry["rows"] if all(r[key] == value for key, value in wanted.items()))
    row: Mapping[str, Any] = found
    return row


def _speed(entry: Entry, name: str) -> float:
    """Times as fast as DDP with its best buckets."""
    return 1 / float(_row(entry, name=name)["to_best_ddp"])


def _of(every: Results, benchmark: str) -> list[Entry]:
    return [entry for entry in every.values() if entry["benchmark"] == benchmark]


# Exchanges.


def sharded_gain(every: Results) -> str:
    """README: a third replicated beside an accelerator, on three models and on BERT."""
    speeds = {
        model: [_speed(every[f"accelerator-{model}-{rate}"], THIRD) for rate in RATES]
        for model in MODELS
    }
    three = [speed for model in MODELS[:3] for speed in speeds[model]]
    bert = _to(speeds["bert"])
    return (
        f"{_to(three)} times as fast on ResNet-50, VGG-16 and Swin-T, {bert} on a BERT that is "
        "mostly one embedding"
    )


def busy_cores(every: Results) -> str:
    """README: exact strategies where ranks compute on the cores that exchange."""
    found = [
        _speed(every[f"transports-{model}-{rate}"], name)
        for model in MODELS
        for rate in RATES
        for name in (SHARDED, THIRD)
    ]
    return f"{_to(found)} times as fast"


def codec_gains(every: Results) -> str:
    """README: three codecs on slow links."""
    speeds: dict[str, list[float]] = {"bf16": [], "int8": [], "powersgd": []}
    for entry in _of(every, "exchange"):
        for row in entry["rows"] if entry["rate"] in RATES else ():
            name = row["name"].removeprefix("slipstream, ")
            if name in speeds:
                speeds[name].append(1 / row["to_best_ddp"])
    half, int8, powersgd = map(_to, speeds.values())
    return f"bf16 is {half} times as fast, int8 {int8} times, PowerSGD {powersgd} times"


def one_host(every: Results) -> str:
    """README: shared memory."""
    name = "slipstream, default, shared_memory"
    bert, vgg16 = (_speed(every[f"one-host-{model}"], name) for model in ("bert", "vgg16"))
    return f"{bert:.2f} (BERT), {vgg16:.2f} (VGG-16)"


def exact_gains(every: Results) -> str:
    """docs/sharding.md: exact strategies, times as fast as the best DDP, by model."""
    found = [
        entry
        for entry in _of(every, "exchange")
        if entry["rate"] != "loopback" and {*EXACT.values()} <= {r["name"] for r in entry["rows"]}
    ]
    rows = []
    for entry in sorted(found, key=lambda e: (not on_accelerator(e), e["rate"], e["model"])):
        [best] = (r["median"] for r in entry["rows"] if r["name"].endswith("(DDP, best)"))
        who = "an accelerator" if on_accelerator(entry) else "the same cores"
        link = f"[{entry['rate']}]({PAGE}#{exchange(entry).anchor})"
        cells = [_with_quartiles(_row(entry, name=name)) for name in EXACT.values()]
        rows.append((who, entry["model"], link, f"{best:.2f} s", *cells))
    return Table(("computing", "model", "link", "best DDP", *EXACT), rows).markdown


def _with_quartiles(row: Mapping[str, Any]) -> str:
    """Times as fast as the best DDP."""
    names = ("to_best_ddp", "to_best_ddp_high", "to_best_ddp_low")
    middle, low, high = (1 / row[name] for name in names)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def sharded_rivals(every: Results) -> str:
    """docs/sharding.md: what FSDP2 and ZeRO-1 take."""
    rows = [row for entry in _of(every, "exchange") for row in entry["rows"]]
    kept = [r["to_best_ddp"] for r in rows if r["name"].startswith(("FSDP2, keep", "ZeRO-1"))]
    default, prefetch = (
        next(row["to_best_ddp"] for row in rows if row["name"] == f"FSDP2, {kind}")
        for kind in ("default", "prefetch")
    )
    return (
        f"FSDP2 that keeps parameters and ZeRO-1 take {_to(kept, 1)} times as long as DDP on gloo; "
        f"FSDP2 with its defaults {default:.1f} times, with prefetch {prefetch:.1f} times"
    )


def sharded_bounds(every: Results) -> str:
    """docs/sharding.md: how far from the longer of computing and wire."""
    rows = []
    for model in MODELS:
        for rate in RATES:
            entry = every[f"accelerator-{model}-{rate}"]
            [best] = (r for r in entry["rows"] if r["name"].endswith("(DDP, best)"))
            found = (best, *(_row(entry, name=name) for name in (SHARDED, THIRD)))
            rows.append((model, rate, *(f"{row['to_bound']:.2f}" for row in found)))
    return Table(("model", "link", "DDP, best", "sharded", "a third replicated"), rows).markdown


def peak_memory(every: Results) -> str:
    """docs/sharding.md: MiB of a rank."""
    names = {
        "sharded": SHARDED,
        "a third replicated": THIRD,
        "FSDP2": "FSDP2, keep",
        "ZeRO-1": "ZeRO-1, 8 MB",
        "`flat`": "slipstream, default",
    }
    rows = []
    for model in MODELS:
        entry = every[f"memory-{model}"]
        peaks = [_row(entry, name=name)["peak_bytes"] / 2**20 for name in names.values()]
        ddp = [r["peak_bytes"] / 2**20 for r in entry["rows"] if r["name"].startswith("DDP")]
        rows.append((model, *(f"{peak:.0f}" for peak in peaks), _to(ddp, 0)))
    return Table(("MiB", *names, "DDP"), rows).markdown


CODECS = ("bf16", "fp16", "int8", "onebit", "dgc", "powersgd", "adaptive onebit")


def codec_speeds(every: Results) -> str:
    """docs/codecs.md: times as fast as DDP, by model and link."""
    rows = []
    for rate in reversed(RATES):
        for model in ("resnet50", "vgg16", "bert"):
            found = [
                row
                for entry in _of(every, "exchange")
                if entry.get("codecs") and (entry["model"], entry["rate"]) == (model, rate)
                for row in entry["rows"]
            ]
            speeds = {r["name"].removeprefix("slipstream, "): 1 / r["to_best_ddp"] for r in found}
            hooks = [
                max(v for name, v in speeds.items() if name.startswith("torch") and kind in name)
                for kind in ("fp16", "PowerSGD")
            ]
            cells = [*(speeds[codec] for codec in CODECS), *hooks]
            rows.append((model, rate, *(f"{cell:.2f}" for cell in cells)))
    return Table(("", "", *CODECS, "torch's fp16 hook", "torch's PowerSGD hook"), rows).markdown


def codec_memory(every: Results) -> str:
    """docs/codecs.md: MiB of a rank."""
    rows = []
    for model in ("bert", "resnet50", "vgg16"):
        entry = every[f"memory-codecs-{model}"]
        peaks = {r["name"].removeprefix("slipstream, "): r["peak_bytes"] for r in entry["rows"]}
        [ddp] = (peak for name, peak in peaks.items() if name.startswith("DDP, default"))
        cells = [peaks["default"], *(peaks[codec] for codec in CODECS), ddp]
        rows.append((model, *(f"{cell / 2**20:.0f}" for cell in cells)))
    return Table(("MiB", "none", *CODECS, "DDP"), rows).markdown


def default_split(every: Results) -> str:
    """docs/gradients.md: the default beside DDP."""
    found = {
        rate: [
            _speed(every[f"{kind}-{model}-{rate}"], EXACT["flat"])
            for kind in ("accelerator", "transports")
            for model in MODELS
        ]
        for rate in RATES
    }
    return (
        f"{_to(found['1gbit'])} times as fast as DDP with the best of eight settings of its "
        f"buckets at 1 Gbit/s, and {_to(found['300mbit'])} at 300 Mbit/s, by model and by who "
        "computes"
    )


def one_host_accelerator(every: Results) -> str:
    """docs/transport.md: shared memory beside an accelerator."""
    name = "slipstream, default, shared_memory"
    return f"{_speed(every['one-host-vgg16-accelerator'], name):.2f}"


# Trainings.


def codec_losses(every: Results) -> str:
    """docs/codecs.md: what codecs do to a language model."""
    text = every["convergence-text"]
    gaps = {row["codec"]: 100 * row["gap"] for row in text["rows"]}
    usual = [gaps[name] for name in ("bf16", "fp16", "int8", "onebit", "powersgd")]
    return (
        f"after {text['steps']} updates of a language model the held-out loss is {_to(usual)} % "
        "above dense gradients for bf16, fp16, int8, onebit and PowerSGD with default settings, "
        f"and for DGC {gaps['dgc']:.1f} % above SGD with dense gradients"
    )


def early_onebit(every: Results) -> str:
    """docs/codecs.md: one bit without its dense updates."""
    gap = 100 * _row(every["convergence-text"], codec="onebit, from step 100")["gap"]
    return f"One-bit gradients from update 100 instead of 1000 lose {gap:.1f} %."


def local_gain(every: Results) -> str:
    """README: meeting rarely on slow links, by the best DDP."""
    setting = "16 steps, 4 fragments, delay 3, int4"  # chosen at 100mbit
    slow, slower, far = (
        _row(every[f"local-bert-{place}"], name="local: auto")["gain"]
        for place in ("300mbit", "100mbit", "far")
    )
    tasks = {"ResNet": "local-resnet", "GPT-2": "local-causal", "BERT": "local-masked"}
    gaps = [f"{_row(every[key], name=setting)['gap']:+.1%} ({n})" for n, key in tasks.items()]
    return (
        f"{slow:.0f} times as fast at 300 Mbit/s, {slower:.0f} times at 100 Mbit/s, {far:.0f} "
        "times on a long line that loses packets (a BERT on 4 hosts, an update computes for some "
        "0.2 s). Held-out loss with its choice at 100 Mbit/s after 800 updates against that of "
        "DDP after 800, less is better: "
        f"{', '.join(gaps)}"
    )


def prefetch_gain(every: Results) -> str:
    """README: epochs that are mostly loading."""
    rows = [
        _row(every["loading"], network="small network", variant=name)["to_plain"][1]
        for name in ("prefetch, auto", "prefetch, auto, cache")
    ]
    plain, kept = rows
    return (
        f"an epoch {plain:.1f} times as fast as with a `DataLoader` with workers, {kept:.1f} times "
        "with the cache"
    )


def soak(every: Results) -> str:
    """docs/session.md: ranks stay the same."""
    entry = every["soak"]
    return (
        f"{entry['updates']:,} updates under {len(entry['codecs'])} codecs and "
        f"{len(entry['transports'])} transports in turn, on {entry['ranks']} ranks with "
        f"{entry['overflows']} gradients made infinite ({entry['skipped']} updates skipped), leave "
        "all ranks bit-equal"
    )


# Computing.


def recompute_cost(every: Results) -> str:
    """README and docs/memory.md: the time of recomputation."""
    rows = _recomputed(every)
    return f"{_to([row['ratio'][1] for row in rows])} times the time"


def recompute_rivals(every: Results) -> str:
    """docs/memory.md: beside torch's checkpoint."""
    rows = _recomputed(every)
    kept, torchs = ([row[name][1] for row in rows] for name in ("ratio", "to_torch"))
    return (
        f"Recomputing every block takes {_to(kept)} times the time of keeping everything, and "
        f"{_to(torchs)} times that of torch's checkpoint"
    )


def _recomputed(every: Results) -> list[Mapping[str, Any]]:
    runs = _of(every, "recompute")
    return [row for run in runs for row in run.get("rows", ()) if row["way"] == "every block"]


def largest_batch(every: Results) -> str:
    """README: BERT-Large in 32 GiB."""
    part = every["offload"]["bytes"]
    batches = {row["name"]: row["estimated_batch"] for row in part["rows"]}
    return f"a batch of {batches['recompute']} instead of {batches['keep all']}"


def recompute_times(every: Results) -> str:
    """docs/memory.md: ways to recompute, by model."""
    runs = {run["model"]: run for run in _of(every, "recompute") if "rows" in run}
    ways = dict.fromkeys(row["way"] for run in runs.values() for row in run["rows"])
    rows = [
        (way, *(f"{_row(run, way=way)['ratio'][1]:.2f}" for run in runs.values()))
        for way in ways
        if all(any(row["way"] == way for row in run["rows"]) for run in runs.values())
    ]
    return Table(("times of keeping all", *runs), rows).markdown


def optimizer_gains(every: Results) -> str:
    """docs/fusion.md: fused steps on a CPU, by optimizer and model."""
    return _optimizers(every["optimizers"])


def optimizer_gains_cuda(every: Results) -> str:
    """docs/fusion.md: fused steps on a GPU, beside a loop over parameters."""
    return _optimizers(every["optimizers-cuda"])


def _optimizers(entry: Entry) -> str:
    found: dict[str, dict[str, float]] = {}
    for row in entry["rows"]:
        name, _, who = row["variant"].rpartition(", ")
        if who == "slipstream":
            model = row["case"].partition(" ")[0]
            found.setdefault(name, {})[model] = row["times_as_fast"][1]
    models = dict.fromkeys(model for speeds in found.values() for model in speeds)
    rows = [(name, *(f"{speeds[m]:.2f}" for m in models)) for name, speeds in found.items()]
    return Table(("times as fast", *models), rows).markdown


# Operators and predictions.


def operators_within(every: Results) -> str:
    """docs/comm.md: how many are as fast as the bare calls."""
    rows = every["operators"]["rows"]
    large = [row["within"] for row in rows if row["size"] == "16 MB"]
    small = [row["within"] for row in rows if row["size"] != "16 MB"]
    return (
        f"up to 1 MB {sum(small)} of {len(small)} rows are within 5 % or 20 µs of them, at 16 MB "
        f"{sum(large)} of {len(large)}"
    )


def prediction_errors(every: Results) -> str:
    """README: what-if errors."""
    run = every["prediction"]
    rows = [row for row in run["rows"] if row["what_if"] is not None]
    off = [100 * abs(row["what_if"] / row["measured"] - 1) for row in rows]
    testbeds = len(run["advice"])
    return f"{median(off):.1f} % off (median; worst {max(off):.1f} %) on {testbeds} testbeds"


def replay_errors(every: Results) -> str:
    """docs/planner.md: of the strategy of the trace itself."""
    errors = every["prediction"]["errors"]
    middle, worst = (100 * errors[f"replay_{name}"] for name in ("median", "worst"))
    return f"{middle:.1f} % off (median; worst {worst:.1f} %)"


def prediction_orders(every: Results) -> str:
    """docs/planner.md: how well strategies are ranked."""
    orders = every["prediction"]["orders"].values()
    pairs = sum(order["num_told_apart"] for order in orders)
    right = sum(order["num_told_apart"] * (1 + order["tau_told_apart"]) / 2 for order in orders)
    return (
        f"Of {pairs} pairs of strategies whose measured 95 % intervals do not overlap {right:.0f} "
        f"are ranked in the right order; over all pairs Kendall's tau is "
        f"{_to([order['tau'] for order in orders])} ({_to([o['tau_again'] for o in orders])} where "
        "the same is measured again)."
    )


def scale_out_errors(every: Results) -> str:
    """docs/scale-out.md: of runs that nothing was fitted on."""
    run = every["scale-out"]
    gpus, slow, large = run["transformers"], run["slow"], run["megascale"]
    errors = ((gpus, "512"), (slow, "slow"), (large, "larger"))
    middles, worsts = (
        [f"{100 * found[f'{kind}_{name}']:.1f} %" for found, name in errors]
        for kind in ("median", "worst")
    )
    return (
        f"{middles[0]} off (median; worst {worsts[0]}) on 512 GPUs, {middles[1]} (worst "
        f"{worsts[1]}) over TCP at 200 Mbit/s, {middles[2]} (worst {worsts[2]}) on 768 to 12,288 "
        "GPUs"
    )


def scale_out_late(every: Results) -> str:
    """docs/scale-out.md: why the order at 512 GPUs is not the predicted one."""
    return late_runs(every["scale-out"]["transformers"])


def scale_out_slow(every: Results) -> str:
    """docs/scale-out.md: runs over TCP at 200 Mbit/s."""
    return _predicted_runs(every["scale-out"]["slow"])


def scale_out_large(every: Results) -> str:
    """docs/scale-out.md: 175 billion parameters on 768 GPUs and more."""
    return _predicted_runs(every["scale-out"]["megascale"])


def _predicted_runs(found: Mapping[str, Any]) -> str:
    return published([row for row in found["rows"] if row["kind"] == "predicted"]).markdown


def scale_out_example(every: Results) -> str:
    """docs/scale-out.md: the command, and what the terminal said."""
    found = every["scale-out"]["example"]
    return _typed(f"$ {found['command']}", *map(str.rstrip, found["said"].splitlines()))


def advice_kept(every: Results) -> str:
    """docs/advisor.md: what advice promised and brought."""
    given = [advice for advice in every["prediction"]["advice"] if advice["promised"]]
    promised, brought = ([100 * one[name] for one in given] for name in ("promised", "measured"))
    return (
        f"`advise` promised {_to(promised, 1)} % on {len(given)} of them and brought "
        f"{_to(brought, 1)} %"
    )


def auto_choices(every: Results) -> str:
    """docs/tuner.md: what `auto` kept beside an accelerator, against the best of a grid."""
    rows = []
    for entry in (e for e in _of(every, "auto") if on_accelerator(e)):
        low, middle, high = entry["ratio"]
        against = (
            f"{middle:.3f} ({low:.3f} to {high:.3f})" if entry["finals"] else "the best itself"
        )
        updates = f"{entry['updates']}"
        rows.append((entry["model"], entry["rate"], updates, entry["kept"], entry["best"], against))
    headings = (
        "model",
        "link",
        "updates",
        "kept",
        "best of the grid",
        "kept, in parts of its time",
    )
    return Table(headings, rows).markdown


def lost_hosts_commands(every: Results) -> str:
    """The commands that were given, in order."""
    return _typed(*(f"$ {command}" for command in every["lost-hosts"]["commands"]))


def lost_hosts_session(every: Results) -> str:
    """Fault by fault, what the terminals said."""
    entry = every["lost-hosts"]
    return "\n\n".join(
        f"**{row['fault']}**: {row['host']}, update {row['update']}.\n\n{_typed(*_terminals(row))}"
        for row in entry["rows"]
    )


def lost_hosts_bits(every: Results) -> str:
    """Whether the run has ended as the undisturbed one."""
    return same_bits(every["lost-hosts"])


def _terminals(row: Mapping[str, Any]) -> Iterator[str]:
    """What the host said, and the first that said something else; those together that said the
    same."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for host in sorted(row["said"], key=lambda host: host != row["host"]):
        if lines := row["said"][host]:
            hosts.setdefault(tuple(lines), []).append(host)
    for lines, named in islice(hosts.items(), TERMINALS):
        yield f"{', '.join(sorted(named))}:"
        for line in lines[:SAID_LINES]:
            yield f"  {line[:SAID_WIDTH]}{' ...' * (len(line) > SAID_WIDTH)}"
    if row["anew"]:
        yield f"(the command is given anew on {', '.join(row['anew'])})"


def tutorial_step(step: str, every: Results) -> str:
    """A command of the tutorial, and what the terminal said, or the lines that tell most of it."""
    found = every["tutorial"]["steps"][step]
    said = found["said"].splitlines()
    shown = said[TUTORIAL[step]]
    more = [f"... ({len(said) - len(shown)} lines more)"] if len(shown) < len(said) else []
    return _typed(f"$ {found['command']}", *shown, *more)


TUTORIAL = {
    "demo": slice(26),
    "launch": slice(None),
    "trace": slice(None),
    "summary": slice(26),
    "advise": slice(15),
    "doctor": slice(6, 15),
    "plan": slice(18),
    "best": slice(None),
    "best-run": slice(None),
    "tune": slice(None),
}
"""Its steps, and which lines of each are shown."""


def _typed(*lines: str) -> str:
    return "\n".join(["```", *lines, "```"])


def shared_cores(every: Results) -> str:
    """How often intervals hold where ranks share cores, and what is recommended there."""
    if "shared-cores" not in every:
        return "not measured yet"
    found = every["shared-cores"]
    tried, others, slower = (
        found[name] for name in ("recommendations", "recommended_others", "slower")
    )
    held = (found[name] for name in ("seconds_held", "ratios_held"))
    seconds, ratios = (f"{part:.0%}{'' if 0.75 <= part <= 0.9 else ', missed'}" for part in held)
    return (
        f"{seconds} of the seconds and {ratios} of the ratios lie in their interval (bar: 75 to "
        f"90 %). In {tried} rounds {others} times another strategy than the baseline was "
        f"recommended, and {slower} times it measured slower beyond the noise (bar: never). "
        f"Predicted seconds are {found['error']:.0%} off in the median, as the machine drifts, "
        f"ratios {found['ratio_error']:.0%} ([every row]({PAGE}#shared-cores-{found['date']}))"
    )


def time_to_loss(every: Results) -> str:
    """The bars of predicted times to a loss, and what they reach."""
    if "time-to-loss" not in every:
        return "not measured yet"
    entry = every["time-to-loss"]
    found = entry["figures"]
    regret = "was once not reached in its run"
    if found["regret"] is not None:
        regret = f"takes at most {found['regret']:.1%} longer than the best"
    missed = [
        words
        for kept, words in (
            ((found["tau"] or 0) >= 0.8, "the order"),
            (found["regret"] is not None and found["regret"] <= 0.1, "the first choice"),
            (0.75 <= (found["holds"] or 0) <= 0.9, "the intervals"),
        )
        if not kept
    ]
    bars = f"; missed: {', '.join(missed)}" if missed else "; all three are kept"
    tau, forecast = (found[name] or 0.0 for name in ("tau", "tau_forecast"))
    holds, ratios = (found[name] or 0.0 for name in ("holds", "holds_ratio"))
    return (
        f"Kendall's tau of predicted against measured time is {tau:.2f} over "
        f"{found['pairs']} pairs that are told apart (bar: 0.8; {forecast:.2f} where seconds are "
        "`plan`'s forecast), the "
        f"predicted first {regret} (bar: 10 %), and {holds:.0%} of the measured times lie in their "
        f"interval of 80 % (bar: 75 to 90 %), {ratios:.0%} of those over the baseline's{bars} "
        f"([every row]({PAGE}#time-to-loss-{entry['date']}))"
    )


QUOTES: Mapping[str, Callable[[Results], str]] = {
    quote.__name__.replace("_", "-"): quote
    for quote in (
        sharded_gain, busy_cores, codec_gains, one_host, exact_gains, sharded_rivals,
        sharded_bounds, peak_memory, codec_speeds, codec_memory, default_split,
        one_host_accelerator, codec_losses, early_onebit, local_gain, prefetch_gain, soak,
        recompute_cost,
        recompute_rivals, recompute_times, largest_batch, optimizer_gains, optimizer_gains_cuda,
        operators_within, prediction_errors, replay_errors, prediction_orders, advice_kept,
        scale_out_errors, scale_out_late, scale_out_slow, scale_out_large, scale_out_example,
        auto_choices, lost_hosts_commands, lost_hosts_session, lost_hosts_bits,
        time_to_loss, shared_cores,
    )
} | {f"tutorial-{step}": partial(tutorial_step, step) for step in TUTORIAL}  # fmt: skip
"""By name: ``sharded_gain`` is ``<!-- quote: sharded-gain -->``."""
