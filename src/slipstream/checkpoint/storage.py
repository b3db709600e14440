"""Write and read one checkpoint by ``torch.distributed.checkpoint``, with checksums, as data alone.

torch's index of a checkpoint (``.metadata``) is a pickle. It is read here by an unpickler that
knows the handful of classes of such an index, and refuses any other name.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slipstream.checkpoint import parts
from slipstream.checkpoint.folder import (
    BrokenCheckpoint,
    Folder,
    Sums,
    check,
    checksum,
    read_manifest,
    write_manifest,
)

INDEX = ".metadata"
_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}


@dataclass(frozen=True)
class _Written(WriteResult):
    """A result of torch's writer that also carries the checksums of the rank's files."""

    sums: Sums


class CheckpointWriter(FileSystemWriter):
    """torch's writer; the first rank gives the folder its name once all ranks have written.

    Args:
        folder: of the run.
        updates: of the run so far.
        keep: checkpoints to keep.

    Attributes:
        temporary: the folder in which it is written.
    """

    def __init__(self, folder: Folder, updates: int, keep: int) -> None:
        self.temporary = folder.temporary(updates)
        super().__init__(self.temporary)
        self._folder, self._updates, self._keep = folder, updates, keep

    def storage_meta(self) -> None:
        """Nothing: torch would note the path, under its name while it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; they are on the disk when this returns."""
        results = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        sums = {name: checksum(self.temporary / name) for name in names}
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                _Written(**{f.name: getattr(one, f.name) for f in fields(one)}, sums=sums)
                for one in results
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest, and make the checkpoint count; on the first rank."""
        sums: Sums = {}
        for of_rank in results:
            for one in of_rank[:1]:
                assert isinstance(one, _Written)
                sums |= one.sums
        super().finish(metadata, results)
        sums[INDEX] = checksum(self.temporary / INDEX)
        write_manifest(self.temporary, sums, updates=self._updates, ranks=len(results))
        self._folder.commit(self.temporary, self._updates, self._keep)


def save(
    pieces: Mapping[str, torch.Tensor], writer: CheckpointWriter, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's pieces; returns when the checkpoint of all ranks is complete.

    Args:
        pieces: in the host's memory; nobody changes them.
        writer: of this checkpoint.
        group: all ranks, for CPU tensors; None: there is one.

    Raises:
        CheckpointException: on every rank alike; says what failed on which.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    if group is not None:
        dcp_save(dict(pieces), storage_writer=writer, planner=planner, process_group=group)
        return
    # torch's save() does this, too, but warns that there is one process
    planner.set_up_planner(dict(pieces), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def failures(error: BaseException) -> dict[int | None, str]:
    """Say in words what failed, by rank; None: on this one."""
    if isinstance(error, CheckpointException):
        return {rank: words(inner) for rank, (inner, _) in error.failures.items()}
    return {None: words(error)}


def of_the_machine(error: BaseException) -> bool:
    """Whether reading failed for want of memory or by the file system, and not by what is in a
    checkpoint or is missing from it."""
    if isinstance(error, CheckpointException):
        return any(of_the_machine(inner) for inner, _ in error.failures.values())
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def words(error: BaseException) -> str:
    """Say in a line what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].partition('. This is')[0]}"


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = name in _INDEX_NAMES.get(module, ())
        if not known and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known and (module, name) != ("torch", "Size"):
            raise BrokenCheckpoint(f"{INDEX} names {module}.{name}, which no index does")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """torch's reader, but for its index, which is read as data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the whole checkpoint."""
        with (Path(self.path) / INDEX).open("rb") as file:
            return _read_index(file)


def _read_index(file: IO[bytes]) -> Metadata:
    index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise BrokenCheckpoint(f"{INDEX} holds a {type(index).__name__}")
    return index


def read(path: str | Path) -> list[dict[str, Any]]:
    """Check a checkpoint, and load the states of all ranks into the host's memory; nothing is
    communicated.

    Data alone is read: a file that somebody else has written cannot run code.

    Args:
        path: of one checkpoint, ``runs/a/update-00000200``.

    Returns:
        By rank, what it has saved: that of ``session.checkpoint(sharded=True)``, so that
        ``read(path)[0]["model"]`` is the state of the whole model; and under ``rank`` its random
        numbers and the states of ``also``.

    Raises:
        BrokenCheckpoint: it is none, or is not whole.
        OSError: it cannot be read.

    Example:
        >>> import slipstream, tempfile
        >>> from slipstream.checkpoint import read
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = slipstream.Checkpoints(folder)
        ...     with slipstream.accelerate(model, optimizer) as session:
        ...         saved.save(session)
        ...     state = read(saved.paths[-1])[0]
        >>> list(state), list(state["model"])
        (['model', 'optimizer', 'session', 'rank'], ['weight', 'bias'])
    """
    check(Path(path))
    return load(Path(path))


def load(path: Path) -> list[dict[str, Any]]:
    """Load the states of all ranks from a checkpoint that has been checked.

    Raises:
        BrokenCheckpoint: it is none.
        OSError: it cannot be read.
    """
    ranks = read_manifest(path)["ranks"]
    reader = CheckpointReader(path)
    entries = reader.read_metadata().state_dict_metadata
    pieces: dict[str, torch.Tensor] = {}
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise BrokenCheckpoint(f"{INDEX}: {key} is no tensor")
        pieces[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        # every rank reads all by itself
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp_load(pieces, storage_reader=reader, planner=planner, no_dist=True)
    return [parts.joined(pieces, rank) for rank in range(ranks)]
