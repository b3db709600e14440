"""NCCL's settings, from the environment and its files, and its log."""

from __future__ import annotations

import re

from slipstream.health.facts import NcclLog, NcclVariable
from slipstream.health.files import HostFiles

SYSTEM_FILE = "etc/nccl.conf"
LARGE = 2**20
"""Bytes from which a tree costs bandwidth; below it saves latency."""


def read_variables(files: HostFiles) -> dict[str, NcclVariable]:
    """Read the settings of NCCL and gloo as they apply to this process.

    The environment comes first, then the user's file (``$NCCL_CONF_FILE``, else ``~/.nccl.conf``),
    then ``/etc/nccl.conf``: the order of NCCL.
    """
    pairs = (word.partition("=") for word in files.text("proc/self/environ").split("\0"))
    environ = {name: value for name, _, value in pairs}
    user = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '/root')}/.nccl.conf"
    found = {
        name: NcclVariable(value=value)
        for name, value in environ.items()
        if name.startswith(("NCCL_", "GLOO_"))
    }
    for file in (user.lstrip("/"), SYSTEM_FILE):
        for line in files.text(file).splitlines():
            name, equals, value = line.partition("#")[0].partition("=")
            if equals and name.strip().startswith("NCCL_"):
                found.setdefault(name.strip(), NcclVariable(value=value.strip(), file=f"/{file}"))
    return dict(sorted(found.items()))


def read_nccl_log(text: str) -> NcclLog:
    """Summarize a log of NCCL: which network it took, and which algorithm.

    Algorithms are named at ``NCCL_DEBUG_SUBSYS=INIT,NET,TUNING`` only.

    Example:
        >>> log = read_nccl_log('''node0:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
        ... node0:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
        ... node0:7:9 [0] NCCL INFO AllReduce: 8388608 Bytes -> Algo TREE proto SIMPLE channel''')
        >>> log.networks, log.interface, log.trees
        (('Socket',), 'eth0', 1)
    """
    channels = re.findall(r"via NET/(\w+)/\d+(/GDRDMA)?", text)
    used = re.findall(r"(?:NET/Socket|Bootstrap) ?: Using (?:\[\d+\])?([^:\s]+):[^<\s]+<", text)
    # older versions name neither the operation nor the algorithm; trees carry all-reduces alone
    chosen = re.findall(r"(?:(\w+): )?\b(\d{1,18}) Bytes -> Algo (\w+)", text)
    large = [
        algorithm.upper()
        for operation, size, algorithm in chosen
        if operation in ("", "AllReduce") and int(size) >= LARGE
    ]
    return NcclLog(
        networks=tuple(sorted({kind + direct for kind, direct in channels})),
        interface=used[-1] if used else "",
        no_device="NET/IB : No device found" in text,
        trees=sum(algorithm in ("0", "TREE") for algorithm in large),
        rings=sum(algorithm in ("1", "RING") for algorithm in large),
    )
