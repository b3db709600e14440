"""Expand Slurm's two list notations, ``n[01-03,7],gpu5`` and ``2(x3),1``.

Both functions parse their argument alone, so ``scontrol`` is not needed.
"""

from __future__ import annotations

import itertools
import re

from slipstream.errors import ClusterError


def expand_hosts(nodelist: str) -> tuple[str, ...]:
    """Host names of a Slurm node list, in its order.

    Numbers have the width of their range's first number, as in Slurm.

    Raises:
        ClusterError: not a node list; names the part that cannot be parsed.

    Example:
        >>> expand_hosts("n[01-03,7],gpu5")
        ('n01', 'n02', 'n03', 'n7', 'gpu5')
        >>> expand_hosts("rack[1-2]-n[8-9]")
        ('rack1-n8', 'rack1-n9', 'rack2-n8', 'rack2-n9')
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", nodelist.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", item)  # name, ranges, name, ranges, ..., name
        if not item or re.search(r"[\[\]\s]", "".join(pieces[::2])):
            raise _unparsable(nodelist, item)
        choices = [_numbers(p, nodelist) if i % 2 else [p] for i, p in enumerate(pieces)]
        hosts.extend("".join(choice) for choice in itertools.product(*choices))
    return tuple(hosts)


def expand_counts(tasks_per_node: str) -> tuple[int, ...]:
    """Tasks of each node of a Slurm count list, in node order.

    Raises:
        ClusterError: not a count list.

    Example:
        >>> expand_counts("2(x3),1")
        (2, 2, 2, 1)
    """
    counts: list[int] = []
    for item in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not match:
            raise ClusterError(
                f"Slurm's tasks per node are {tasks_per_node!r}: {item!r} cannot be parsed; "
                "expected counts such as 4 or 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """``01-03,7`` -> ["01", "02", "03", "7"]."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise _unparsable(nodelist, part)
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _unparsable(nodelist: str, part: str) -> ClusterError:
    return ClusterError(
        f"Slurm's node list is {nodelist!r}: {part!r} cannot be parsed; expected hosts such as n1 "
        "or n[01-03,7],gpu5"
    )
