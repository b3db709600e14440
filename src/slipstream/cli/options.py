"""Arguments and options that several commands share, and the check of output files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from slipstream.errors import LaunchError

Script = Annotated[str, Argument(help="Python file of the training.")]
ScriptArgs = Annotated[
    list[str] | None, Argument(help="Arguments of the script, passed on untouched.")
]
StrategyOption = Annotated[
    str | None,
    Option(metavar="FILE|PRESET", envvar="SLIPSTREAM_STRATEGY", help="Strategy of the ranks."),
]
LogDir = Annotated[Path | None, Option(help="Folder of the logs. Default: slipstream-logs/TIME.")]
LinkRate = Annotated[
    str, Option(help="Rate of each emulated host's link: 300mbit, 1gbit, 2.5gbit.")
]
EmulatedRate = Annotated[
    str | None,
    Option(
        help="With --nodes: rate of each emulated host's link: 300mbit, 1gbit, 2.5gbit.",
        show_default="1gbit",
    ),
]
RanksPerNode = Annotated[int, Option(min=1, help="Ranks on each emulated host.")]
ExactOnly = Annotated[
    bool,
    Option(
        "--exact-only/--allow-lossy",
        help="Keep the mathematics, or also try codecs (half, int8, onebit, dgc with SGD, "
        "powersgd), 16-bit weights and larger batches (accumulate).",
    ),
]
Updates = Annotated[
    int | None,
    Option(min=1, help="Of the whole training: some codecs begin after the first 1000."),
]
AsJson = Annotated[bool, Option("--json", help="Print the numbers as JSON, in seconds.")]


def check_writable(option: str, file: Path | None, suffixes: Collection[str] = ()) -> None:
    """Fail before the work if its result, unless there is none, cannot be written.

    Raises:
        LaunchError: another suffix than ``suffixes``, or the place is not writable.
    """
    if file is None:
        return
    check_suffix(option, file, suffixes)
    # a file is replaced, so its folder must take another one; a device is written to
    target = Path(os.path.realpath(file)) if file.is_symlink() else file  # which is written
    place = file if os.path.exists(file) and not os.path.isfile(file) else target.parent
    if not os.path.exists(place):  # Path.exists() raises where a parent cannot be searched
        reason = f"cannot be written, as there is no folder {place}; make it"
        raise LaunchError(f"{option} {file}: {reason}, or choose another place")
    if os.path.isdir(file) or not os.access(place, os.W_OK):
        raise LaunchError(f"{option} {file}: cannot be written; choose another place")


def check_folder(option: str, folder: Path) -> None:
    """Fail before the work if a folder, which need not exist, cannot get its result.

    Raises:
        LaunchError: it is a file, or it or the first of its parents that exists is not writable.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(place) or not os.access(place, os.W_OK):
        raise LaunchError(f"{option} {folder}: cannot be written; choose another place")


def check_suffix(
    option: str, file: Path | None, suffixes: Collection[str], *, device: bool = False
) -> None:
    """Fail before the work if the name of its result, unless there is none, is of another kind.

    Args:
        device: whether a device, as /dev/stdout is, passes.

    Raises:
        LaunchError: another suffix than ``suffixes``, unless these are empty.
    """
    if file is None or not suffixes or (device and _is_device(file)):
        return
    if file.suffix.lower() not in suffixes:
        raise LaunchError(f"{option} {file}: the file name must end in {' or '.join(suffixes)}")


def _is_device(file: Path) -> bool:
    return os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file)


def check_apart(
    results: Mapping[str, Path | None], sources: Mapping[str, str | Path | None] | None = None
) -> None:
    """Fail before the work if a result would take the place of a source, or of another result.

    Raises:
        LaunchError: names both options and the file.
    """
    owner: dict[str, str] = {}
    for option, file in {**(sources or {}), **results}.items():
        if file is None:
            continue
        place = os.path.realpath(file)
        if option in results and place in owner:
            raise LaunchError(
                f"{option} {file} would overwrite the file of {owner[place]}; choose another one"
            )
        owner[place] = option
