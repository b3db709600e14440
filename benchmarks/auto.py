"""What `auto` finds while a model trains, against every exact choice measured afterwards.

    python -m benchmarks.auto --model resnet50 --nodes 4 --rate 1gbit --json auto-resnet50.json

1. The search: the preset `auto` trains from the start; the update after which its choice stays is
   counted, and the loss of every update is kept.
2. The loss: the default strategy trains as many updates from the same start, and so does `direct`,
   which sums in another order. `auto` may differ from the default as much as `direct` does: with
   few samples in a batch norm, the last bit of a sum grows fast.
3. The grid: every transport that is exact here, `sharded` with and without a replicated third among
   them, under every split and under the one that the search has kept; and, but for `sharded`,
   without overlap, under one segment and under the default split. One training goes
   through them in turn, in an order that is shuffled every round; the first two updates after a
   change do not count, as in the search.
4. The finals: what the search has kept and the best of the grid take turns once more. The best of
   several equal choices looks better than it is, so only these rounds compare the two.

On emulated hosts with one rank each. `--ranks-on-one-host` puts all ranks on this host instead,
where the choices are others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import slipstream
from benchmarks.cases import (
    MODELS,
    SPLITS,
    Case,
    as_ranks,
    case_of,
    head_of,
    seconds_or_wire,
    share_cores,
    timed_iterations,
)
from benchmarks.iteration import LEARNING_RATE, plain, quartiles
from benchmarks.record import arguments, finish
from benchmarks.turns import joined_ranks
from slipstream.planner.search.label import label
from slipstream.session import exchanging
from slipstream.strategy import (
    AutoConfig,
    DirectConfig,
    FlatConfig,
    ShardedConfig,
    SingleConfig,
    SplitConfig,
    Strategy,
)
from slipstream.tuner.online_search import OnlineSearch
from slipstream.tuner.search_space import SHARDED, Choice, SearchSpace
from slipstream.tuner.significance import median_interval
from slipstream.tuner.turns import SETTLING

DEFAULT = Strategy()


class Watched(OnlineSearch):
    """Tells what it has settled for; or never proposes anything, and takes orders instead."""

    latest: Watched
    hold = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.updates = 0
        self.kept: tuple[Choice, int] | None = None
        self.space: SearchSpace = args[-1]
        Watched.latest = self

    def proceed(self, trace: Any) -> bool:
        if not self.hold:
            return super().proceed(trace)
        self.steps = 10**9  # gathering a trace would take time of an update
        return True

    def settle(self, choice: Choice) -> None:
        super().settle(choice)
        self.kept = choice, self.updates

    def open(self, choices: Mapping[str, Choice]) -> dict[str, Choice]:
        """Those that can be used on all ranks."""
        return {name: choice for name, choice in choices.items() if self._can_use(choice.transport)}

    def use(self, choice: Choice) -> None:
        """From the next update on."""
        self.choice, self._due = choice, (choice, False)


class Training:
    """A model under a strategy, from the same start each time; ``loss`` is the last one."""

    def __init__(self, case: Case, strategy: Strategy) -> None:
        model, self._loss_of = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        torch.manual_seed(int(os.environ["RANK"]))  # of dropout
        self.session = slipstream.accelerate(model, optimizer, strategy=strategy)
        self.loss = 0.0

    def update(self) -> None:
        """One more."""
        loss = self._loss_of(self.session.model)
        self.loss = float(loss.detach())
        self.session.backward(loss)
        self.session.step()


def losses(case: Case, strategy: Strategy, updates: int) -> list[float]:
    """The mean over ranks of the loss of every update."""
    training, seen = Training(case, strategy), []
    for number in range(updates):
        if isinstance(strategy.gradients.transport, AutoConfig):
            Watched.latest.updates = number + 1
        training.update()
        seen.append(training.loss)
    training.session.close()
    total = torch.tensor(seen, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(loss) for loss in total / dist.get_world_size()]


def grid(space: SearchSpace, kept: Choice, names: Sequence[str]) -> dict[str, Choice]:
    """Every exact choice by its label, that of the search among them."""
    splits: list[SplitConfig] = [
        with_split(SPLITS[name]).gradients.split for name in names if name != "optimal"
    ]
    whole = [one for one in space.transports if not isinstance(one, ShardedConfig)]
    parts = SHARDED if len(whole) < len(space.transports) else ()
    choices = [
        Choice(transport, split, True)
        for transport in (*whole, *parts)
        for split in (*splits, kept.split)
    ]
    choices += [
        Choice(transport, split, False)
        for transport in whole
        for split in (SingleConfig(), DEFAULT.gradients.split)
    ]
    return {named(choice): choice for choice in (*choices, kept)}


def with_split(settings: Mapping[str, object]) -> Strategy:
    """The default with another split; empty settings: the default."""
    return Strategy.load({"gradients": {"split": settings} if settings else {}})


def named(choice: Choice) -> str:
    """A choice in few words."""
    return label(DEFAULT.with_gradients(**choice._asdict()))


def variants_of(training: Training, choices: Mapping[str, Choice]) -> dict[str, Callable[[], None]]:
    """An update under each choice; the first after a change is preceded by those that settle."""
    search = Watched.latest

    def update(choice: Choice) -> None:
        if search.choice != choice:
            search.use(choice)
            for _ in range(SETTLING - 1):  # the caller does not count the next one, either
                training.update()
        training.update()

    return {name: partial(update, choice) for name, choice in choices.items()}


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes the result."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.compute == "cpu":
        share_cores(rank, world)
    case = case_of(args, world)
    with joined_ranks():
        if case.device:
            case.device.fit(plain(*case.make()), case.device.seconds)
        vars(exchanging)["OnlineSearch"] = Watched
        searching = Strategy.load("exact").with_gradients(
            transport=AutoConfig(updates=args.updates)
        )
        searched = losses(case, searching, args.updates + args.more)
        assert Watched.latest.kept is not None, "the search must have ended"
        kept, spent = Watched.latest.kept
        outcome = Watched.latest.outcome
        curves: dict[str, list[float]] = {}
        if case.device is None:  # nothing is learned on an emulated device
            for name, transport in {"default": FlatConfig(), "direct": DirectConfig()}.items():
                fixed = DEFAULT.with_gradients(transport=transport)
                curves[name] = losses(case, fixed, args.updates + args.more)
            curves["auto"] = searched
        Watched.hold = True
        training = Training(case, searching)
        for _ in range(SETTLING + Watched.latest.space.first_window):
            training.update()
        choices = grid(Watched.latest.space, kept, args.splits)
        variants = variants_of(training, Watched.latest.open(choices))
        seconds, _ = timed_iterations(variants, args.rounds, warmup=0)
        best = min(seconds, key=lambda name: median(seconds[name]))
        finals: dict[str, list[float]] = {}
        if best != named(kept):
            finalists = {name: variants[name] for name in (named(kept), best)}
            finals, _ = timed_iterations(finalists, args.finals, warmup=0)
        training.session.close()
        if rank == 0:
            found = {"kept": named(kept), "best": best, "updates": spent, "outcome": outcome}
            write(args, case, found, seconds, finals, curves)


def write(
    args: argparse.Namespace,
    case: Case,
    found: Mapping[str, Any],
    seconds: Mapping[str, Sequence[float]],
    finals: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
) -> None:
    """Print what was found; with --json write it too."""
    ratios = [1.0]
    if finals:
        pairs = zip(finals[found["kept"]], finals[found["best"]], strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]
    rows = [
        {"name": name, "quartiles": quartiles(values) if len(values) > 1 else [*values] * 3}
        for name, values in sorted(seconds.items(), key=lambda pair: median(pair[1]))
    ]
    entry: dict[str, Any] = {
        **found,
        **head_of(args, case, without_links="one host"),
        "finals": len(ratios) if finals else 0,
        "compute": args.compute,
        "compute_seconds": args.compute_seconds if case.device else None,
        "cores": "bound" if args.compute == "cpu" else "free",
        "ratio": quartiles(ratios) if len(ratios) > 1 else ratios * 3,
        "interval": median_interval(ratios) or (),
        "differences": {
            name: max(differences(curve, losses["default"])) for name, curve in losses.items()
        },
        "losses": {**losses},
        "rows": rows,
        "seconds": {**seconds},
        "final_seconds": {**finals},
    }
    finish(args.json, "auto", entry)


def differences(ones: Sequence[float], others: Sequence[float]) -> Iterator[float]:
    """Of each pair, as a part of the other."""
    return (abs(one - other) / abs(other) for one, other in zip(ones, others, strict=True))


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--compute", choices=("cpu", "accelerator"), default="cpu")
    parser.add_argument("--compute-seconds", type=seconds_or_wire, default="wire")
    parser.add_argument("--updates", type=int, default=AutoConfig().updates, help="of the search")
    parser.add_argument(
        "--more", type=int, default=10, help="updates after those, whose loss is compared, too"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--finals", type=int, default=20, help="rounds of the two finalists")
    parser.add_argument(
        "--splits", nargs="*", choices=list(SPLITS), default=list(SPLITS), help="of the grid"
    )
    parser.add_argument(
        "--ranks-on-one-host", action="store_true", dest="loopback", help="without emulated links"
    )
    args = parser.parse_args()
    if args.compute == "accelerator" and args.loopback and args.compute_seconds == "wire":
        parser.error("--compute-seconds: one host has no wire time; give the seconds")
    return as_ranks(measure, args)


if __name__ == "__main__":
    sys.exit(main())
