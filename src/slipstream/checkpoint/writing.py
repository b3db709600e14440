"""The thread that writes a checkpoint beside training, and advice where it could not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from slipstream.checkpoint import storage


class Writing(threading.Thread):
    """Writes one checkpoint.

    Attributes:
        updates: of the run when the state was copied.
        failures: what went wrong, by rank; once the thread has ended.
    """

    def __init__(
        self,
        pieces: Mapping[str, torch.Tensor],
        writer: storage.CheckpointWriter,
        group: dist.ProcessGroup | None,
        updates: int,
    ) -> None:
        super().__init__(name=f"checkpoint after update {updates}")
        self.updates = updates
        self.failures: dict[int | None, str] = {}
        self._job: tuple[Any, ...] | None = (pieces, writer, group)

    def run(self) -> None:
        assert self._job is not None
        pieces, writer, group = self._job
        self._job = None  # a group ends with its last reference
        try:
            storage.save(pieces, writer, group)
        except BaseException as error:
            self.failures = storage.failures(error)
            if group is None or group.rank() == 0:
                shutil.rmtree(writer.temporary, ignore_errors=True)


def advice(where: str, keep: int) -> str:
    """Say what to do about a checkpoint that was not written; ``where``: the failures of ranks."""
    if "Errno 28" in where or "Errno 122" in where:
        return (
            f"free space there, or keep fewer (keep={keep}); training may go on, call save() again"
        )
    if "gloo" in where:
        return "another rank has ended: its log says why"
    return "see that every rank can write there; training may go on, call save() again"
