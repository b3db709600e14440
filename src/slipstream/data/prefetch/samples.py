"""The user's dataset, with errors that name the sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, IterDataPipe, Subset, get_worker_info


class _Named:
    """Stands before a dataset, whose attributes it has."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        # pickle asks before there is a dataset; torch would read batches past `__getitem__`
        if name in ("_dataset", "__getitems__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class Samples(_Named, Dataset[Any]):
    """One that reads a sample at a time."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"while sample {index} of the dataset was read")
            raise


class SamplesOfBatches(Samples):
    """One that reads all samples of a batch at once, as those of ``datasets`` do."""

    def __getitems__(self, indices: Any) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            error.add_note(f"while samples {few(indices)} of the dataset were read at once")
            raise


class SamplesOfStream(_Named, IterableDataset[Any]):
    """One that is iterated over; its samples have no index, so they are counted."""

    def __iter__(self) -> Iterator[Any]:
        number = 0
        try:
            for sample in self._dataset:
                yield sample
                number += 1
        except Exception as error:
            worker = get_worker_info()
            whose = "the stream" if worker is None else f"the stream of worker {worker.id}"
            error.add_note(f"while sample {number} of {whose} was read, counted from 0")
            raise


def named(dataset: Any) -> Any:
    """A dataset whose errors name the sample, or those of the batch if it reads them at once.

    Torch's data pipes are left as they are: torch knows them by their class.
    """
    if isinstance(dataset, IterableDataset):
        return dataset if isinstance(dataset, IterDataPipe) else SamplesOfStream(dataset)
    read = dataset
    while type(read) is Subset:  # reads at once if what it is a part of does
        read = read.dataset
    return SamplesOfBatches(dataset) if hasattr(read, "__getitems__") else Samples(dataset)


def few(indices: Any) -> str:
    """The first of a batch's indices, in words."""
    listed = indices if isinstance(indices, list | tuple) else [indices]
    return ", ".join(map(str, listed[:8])) + ", ..." * (len(listed) > 8)
