"""Short epochs of a small training on scikit-learn's digits, by how their batches are loaded.

    python -m benchmarks.loading --json loading.json

Every variant trains the same small network on the same samples, each prepared in Python (a shift
and a normalisation of the picture, as augmentations are). They take turns: a block of epochs each,
whose first one does not count, in another order in every round. *Waited* is the part of an epoch in
which the loop waits for its next batch. A second table is of a network that computes for longer
than its samples take to prepare: there nothing should be waited for.
Rivals that are not installed are left out: ``pip install '.[bench]'``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.iteration import quartiles
from benchmarks.record import finish
from slipstream.data.cache import CachedDataset, cached
from slipstream.data.prefetch import prefetch
from slipstream.strategy import PrefetchConfig

BATCH = 32
EPOCHS = 4  # of a block, the first of which does not count
WIDTHS = {"small network": 64, "network that computes for longer": 2048}


@dataclass(frozen=True)
class Row:
    """One variant with one network; seconds of an epoch, and ratios of those of the same round."""

    network: str
    variant: str
    seconds: tuple[float, float, float]
    to_plain: tuple[float, float, float]
    to_persistent: tuple[float, float, float]
    waited: float


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 8 x 8, shifted and normalised one by one."""

    def __init__(self) -> None:
        pixels, targets = load_digits(return_X_y=True)
        self._pictures = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8)
        self._targets = [int(target) for target in targets]

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shifted = torch.roll(self._pictures[index], (index % 3 - 1, index % 5 - 2), (0, 1))
        return (shifted - shifted.mean()) / (shifted.std() + 1e-6), self._targets[index]


class Training:
    """A network, and epochs of it over a loader."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        hidden = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self._model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def epoch(self, loader: Iterable[Any]) -> tuple[float, float]:
        """Seconds, and those of them in which a batch was waited for."""
        waited, start = 0.0, time.perf_counter()
        batches, asked = iter(loader), start
        for pictures, targets in batches:
            waited += time.perf_counter() - asked
            loss = nn.functional.cross_entropy(self._model(pictures), targets)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            asked = time.perf_counter()
        end = time.perf_counter()
        return end - start, waited + end - asked


def variants(workers: int, depth: int) -> dict[str, Callable[[Dataset[Any]], Any]]:
    """Loaders by name; all shuffle."""

    def loader(data: Dataset[Any], **how: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)  # of its own: others would move it
        return DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator, **how)

    found: dict[str, Callable[[Dataset[Any]], Any]] = {
        "DataLoader, workers": lambda data: loader(data, num_workers=workers),
        "DataLoader, persistent workers": lambda data: loader(
            data, num_workers=workers, persistent_workers=True
        ),
        "DataLoader, no workers": loader,
        "prefetch, workers": lambda data: prefetch(loader(data), PrefetchConfig(workers=workers)),
        "prefetch, threads": lambda data: prefetch(
            loader(data), PrefetchConfig(workers=workers, threads=True, depth=depth)
        ),
        "prefetch, auto": lambda data: prefetch(loader(data)),
        "DataLoader, persistent workers, cache": lambda data: loader(
            cached(data), num_workers=workers, persistent_workers=True
        ),
        "prefetch, threads, cache": lambda data: prefetch(
            loader(cached(data)), PrefetchConfig(workers=workers, threads=True, depth=depth)
        ),
        "prefetch, auto, cache": lambda data: prefetch(loader(cached(data))),
    }
    return found | _others(workers, depth)


def _others(workers: int, depth: int) -> dict[str, Callable[[Dataset[Any]], Any]]:
    """Rivals that are installed."""
    found: dict[str, Callable[[Dataset[Any]], Any]] = {}
    try:
        from spdl.pipeline import PipelineBuilder
    except ImportError:
        pass
    else:

        class Spdl:
            """SPDL's pipeline in threads: indices, samples of a batch, a batch."""

            def __init__(self, data: Dataset[Any]) -> None:
                self._loader = DataLoader(data, batch_size=BATCH, shuffle=True)

            def __iter__(self) -> Iterator[Any]:
                dataset, collate = self._loader.dataset, self._loader.collate_fn

                def read(indices: list[int]) -> Any:
                    return collate([dataset[index] for index in indices])

                source: Any = self._loader.batch_sampler
                builder: Any = PipelineBuilder().add_source(source)
                pipeline = (
                    builder.pipe(read, concurrency=workers, output_order="input")
                    .add_sink(depth)
                    .build(num_threads=workers)
                )
                with pipeline.auto_stop():
                    yield from pipeline.get_iterator()

        found["SPDL, threads"] = Spdl
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return found
    found["torchdata's StatefulDataLoader, persistent workers"] = lambda data: StatefulDataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=True
    )
    return found


def measure(network: str, rounds: int, workers: int, depth: int) -> list[Row]:
    """All variants with one network, in turns."""
    data, training = Digits(), Training(WIDTHS[network])
    loaders = {name: make(data) for name, make in variants(workers, depth).items()}
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    waited: dict[str, list[float]] = {name: [] for name in loaders}
    names = [*loaders]
    for turn in track(range(rounds), network, console=Console(stderr=True)):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            block = [training.epoch(loaders[name]) for _ in range(EPOCHS)][1:]
            seconds[name].append(median(each for each, _ in block))
            waited[name].append(median(wait / each for each, wait in block))
    close(loaders)

    def over(name: str, other: str) -> tuple[float, float, float]:
        pairs = zip(seconds[other], seconds[name], strict=True)
        return quartiles([theirs / ours for theirs, ours in pairs])

    return [
        Row(
            network,
            name,
            quartiles(seconds[name]),
            over(name, names[0]),
            over(name, names[1]),
            median(waited[name]),
        )
        for name in names
    ]


def close(loaders: dict[str, Any]) -> None:
    """End what reads, then the caches that it uses."""
    datasets = [getattr(loader, "dataset", None) for loader in loaders.values()]
    while loaders:
        _, loader = loaders.popitem()
        if hasattr(loader, "close"):
            loader.close()
        del loader  # persistent workers end with their loader
    for dataset in datasets:
        if isinstance(dataset, CachedDataset):
            dataset.close()


def main() -> None:
    """Measure both networks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=1, help="processes or threads that read")
    parser.add_argument("--depth", type=int, default=8, help="batches that threads read ahead")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in WIDTHS for row in measure(name, args.rounds, args.workers, args.depth)]
    entry = {"rounds": args.rounds, "workers": args.workers, "depth": args.depth, "batch": BATCH}
    finish(args.json, "loading", {**entry, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
