"""Files of checkpoints: data alone, complete or refused.

[Note: What a file may hold]
torch's ``weights_only`` builds tensors, numbers, text and containers of these, and runs no code of
the file. Beside that a file must not grow: an archive may promise more bytes than it has, and a
pickle may hold a list that contains itself. And torch does not compare the checksums that it
writes, so that a flipped bit of a parameter would go unseen.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError
from slipstream.files.document import place_in
from slipstream.files.write import whole_file
from slipstream.pytree import plain_numbers

DEEPEST = 32
"""Containers inside one another."""
MOST_VALUES = 10_000_000
SMALL = 64 * 2**20
"""Bytes up to which a tensor may repeat its values."""
_LEAVES: tuple[type, ...] = (
    *(torch.Tensor, str, bytes, int, float, complex, bool, type(None)),
    *(torch.dtype, torch.device, torch.Size),
)
_CONTAINERS = (dict, list, tuple, set)


def write_checkpoint(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint to a file, as ``torch.save`` does, but all of it or nothing: a run that is
    killed leaves the file of before.

    Args:
        state: what ``session.checkpoint()`` returned; a rank that has a part alone writes a file of
            its own.
        path: the file.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path) as file:
        torch.save(plain_numbers(state), file)


def read_checkpoint(path: str | Path) -> Any:
    """Read a file of `write_checkpoint`, or of ``torch.save``, into the memory of the host.

    Raises:
        CheckpointError: it cannot be read, is damaged, or holds more than tensors and plain values.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_checkpoint({"model": {"weight": torch.ones(1)}}, f"{folder}/a.pt")
        ...     read_checkpoint(f"{folder}/a.pt")
        {'model': {'weight': tensor([1.])}}
    """
    try:
        _check_archive(Path(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
        _check_values(state, max(Path(path).stat().st_size, SMALL))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}; check the path") from None
    except Exception as error:  # whatever reading a damaged pickle meets
        words = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: data.pkl in it cannot be read: {type(error).__name__}: {words:.200}; a "
            "checkpoint holds tensors and plain values alone, as session.checkpoint() returns them"
        ) from None
    return state


def _check_archive(path: Path) -> None:
    """Refuse what is not whole, or would grow when it is read.

    Raises:
        CheckpointError: names the entry.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                packed = next((e for e in entries if e.compress_type != zipfile.ZIP_STORED), None)
                if packed is not None:
                    raise CheckpointError(f"{packed.filename:.80} is packed; torch.save packs none")
                if sum(entry.file_size for entry in entries) > size:
                    raise CheckpointError(f"its entries promise more than its {size} bytes")
                names = [entry.filename for entry in entries]
                if twice := next((n for n in names if names.count(n) > 1), None):
                    raise CheckpointError(f"{twice:.80} is there twice")
                if damaged := archive.testzip():
                    raise CheckpointError(f"{damaged:.80} is damaged: its checksum is another")
        except CheckpointError:
            raise
        except Exception as error:  # BadZipFile, and what else zipfile meets in damaged headers
            raise CheckpointError(
                f"no whole file of torch.save ({size} bytes): {error!s:.80}; copy or save it again"
            ) from None


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a dense tensor, which may repeat a few values without end."""
    return tensor.numel() * tensor.itemsize if tensor.layout is torch.strided else 0


def _check_values(state: Any, most: int) -> None:
    """Refuse what is endless, or no plain value; ``most``: bytes of one tensor.

    Raises:
        CheckpointError: says what.
    """
    level, count = [state], 0
    for _ in range(DEEPEST):
        huge = next((v for v in level if isinstance(v, torch.Tensor) and _size(v) > most), None)
        if huge is not None:
            what = f"a tensor of {_size(huge):,} bytes, of which the file has few"
            raise CheckpointError(f"{place_in(state, huge)}: {what}")
        inner = [value for value in level if not isinstance(value, _LEAVES)]
        strange = next((v for v in inner if not isinstance(v, _CONTAINERS)), None)
        if strange is not None:
            what = f"a {type(strange).__name__}; allowed: tensors and plain values"
            raise CheckpointError(f"{place_in(state, strange)}: {what}")
        count += sum(map(len, inner))
        if count > MOST_VALUES:
            raise CheckpointError(f"(top level): more than {MOST_VALUES:,} values")
        level = [*chain.from_iterable(map(_parts, inner))]
        if not level:
            return
    raise CheckpointError(f"{place_in(state, level[0])}: nested deeper than {DEEPEST}")


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return [*value]
