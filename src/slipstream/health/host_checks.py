"""Checks that every host has: memory between processes, limits, load, and gloo's interface."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.health.diagnosis import Verdict, health_check
from slipstream.health.facts import HostFacts, NetworkInterface
from slipstream.testbed import format_rate

GIB = 2**30
SMALLEST_SHM = GIB
FEWEST_FILES = 1024
LARGEST_LOAD = 0.5
"""Of the CPUs; on one or two CPUs a load of 1 passes."""
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def gloo_interface(facts: HostFacts) -> NetworkInterface | None:
    """The interface that gloo listens on, None: the one that it is told to take is not there.

    Untold, torch takes the address of the host's own name, and loopback where that is none of this
    host.
    """
    if told := facts.setting(GLOO):
        return next((one for one in facts.interfaces if one.name == told.split(",")[0]), None)
    return facts.interface_of(facts.resolved) or facts.interface_of("127.0.0.1")


def gloo_address(facts: HostFacts) -> str:
    """The address that gloo listens on; empty: there is none."""
    chosen = gloo_interface(facts)
    addresses = chosen.addresses if chosen is not None else ()
    told = facts.setting(GLOO) or facts.resolved not in addresses
    return next(iter(addresses), "") if told else facts.resolved


def better_interface(facts: HostFacts, chosen: NetworkInterface | None) -> NetworkInterface | None:
    """The interface that should be taken instead; None: ``chosen`` is right, as far as is known.

    A loopback, a bridge or a tunnel reaches no other host, or not at the speed of the network; of
    two cables the one that announces more is right, but where RDMA devices carry what GPUs send.
    """
    cables = [one for one in facts.interfaces if one.up and one.addresses and one.kind is not None]
    cables = [one for one in cables if one.kind not in ("loopback", "bridge", "tunnel")]
    real = [one for one in cables if one.kind != "virtual"] or cables
    if not real:
        return None
    best = max(real, key=lambda one: (one.speed or 0.0, one.name == facts.default_route))
    if chosen is None or chosen.kind in ("loopback", "bridge", "tunnel"):
        return best
    by_rdma = facts.gpus and facts.rdma
    slower = chosen.speed and best.speed and best.speed > chosen.speed
    return best if slower and not by_rdma else None


def described(facts: HostFacts, interface: NetworkInterface) -> str:
    """An interface in words.

    Example:
        >>> eth0 = NetworkInterface(name="eth0", addresses=("10.0.0.1",), speed=1e10)
        >>> described(HostFacts(host="node0", default_route="eth0"), eth0)
        'eth0 (10.0.0.1, announces 10 Gbit/s, default route)'
    """
    parts = [*interface.addresses[:1]]
    parts += [f"announces {format_rate(interface.speed)}"] if interface.speed else []
    parts += [interface.kind] if interface.kind not in (None, "physical") else []
    parts += ["default route"] if interface.name == facts.default_route else []
    return f"{interface.name} ({', '.join(map(str, parts))})" if parts else interface.name


@health_check(
    "interface",
    reads="`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`, the address of the host's own name, "
    "`/proc/net`, `/sys/class/net`, the interface in NCCL's log",
    healthy="gloo and NCCL use the fastest interface that is up",
    effect="loopback: other hosts cannot connect; a slow or virtual one: exchanges take many times "
    "as long",
    fix="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on every host",
)
def interface(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the interface that exchanges take."""
    names = {one.name for one in facts.interfaces}
    users = {"gloo": gloo_interface(facts)}
    log = facts.nccl_log
    if log is not None and log.interface in names and "Socket" in log.networks:
        users["NCCL"] = next(one for one in facts.interfaces if one.name == log.interface)
    wrong: dict[str, NetworkInterface] = {}
    for user, chosen in users.items():
        if (better := better_interface(facts, chosen)) is not None:
            wrong[user] = better
    for variable in (GLOO, NCCL):
        if not _matches(facts.setting(variable), names):
            known = ", ".join(sorted(names - {"lo"})) or "none but lo"
            read = f"{facts.quoted(variable)}, but the interfaces are {known}"
            yield Verdict("wrong", read, f"set {variable} to one of them, or unset it")
            return
    for user, better in wrong.items():
        chosen, variable = users[user], GLOO if user == "gloo" else NCCL
        place = "no interface" if chosen is None else described(facts, chosen)
        why = f", as {facts.host} resolves to {facts.resolved}" if _by_name(facts, user) else ""
        read = f"{user} takes {place}{why}; there is {described(facts, better)}"
        fix = f"export {variable}={better.name}"
        if chosen is not None and chosen.kind == "loopback":  # on one host alone it is right
            yield Verdict("warning", read, f"{fix}, before training on several hosts")
        else:
            yield Verdict("wrong", read, fix)
    if not wrong and (chosen := users["gloo"]) is not None:
        yield Verdict("ok", f"gloo takes {described(facts, chosen)}")


def _by_name(facts: HostFacts, user: str) -> bool:
    return user == "gloo" and not facts.setting(GLOO) and bool(facts.resolved)


def _matches(value: str, names: set[str]) -> bool:
    """Whether a variable names an interface that is there: by prefix, after ``=`` exactly; ``^``
    excludes."""
    if not value or value.startswith("^"):
        return True
    words = tuple(word.partition(":")[0] for word in value.lstrip("=").split(","))
    return any(n in words if value.startswith("=") else n.startswith(words) for n in names)


@health_check(
    "shared memory",
    reads="the size of `/dev/shm` in `/proc/mounts`",
    healthy="1 GB or more",
    effect="64 MB, the default of Docker: workers of a DataLoader, NCCL and `shared_memory` end by "
    'a bus error or "No space left"',
    fix="docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory "
    "at /dev/shm; else mount -o remount,size=8g /dev/shm",
)
def shared_memory(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the room for memory that processes share."""
    if facts.shm is not None:
        size = f"{facts.shm / GIB:.3g} GB" if facts.shm >= GIB else f"{facts.shm / 2**20:.0f} MB"
        yield Verdict("ok" if facts.shm >= SMALLEST_SHM else "wrong", f"/dev/shm has {size}")


@health_check(
    "open files",
    reads="`Max open files` in `/proc/self/limits`",
    healthy="1024 or more",
    effect='fewer: sockets between ranks and files of workers fail with "Too many open files"',
    fix="ulimit -n 65536 in the shell that starts the ranks; LimitNOFILE= of a service",
)
def open_files(facts: HostFacts) -> Iterator[Verdict]:
    """Judge the limit of files and sockets."""
    if facts.open_files is not None:
        few = facts.open_files < FEWEST_FILES
        yield Verdict("warning" if few else "ok", f"{facts.open_files} open files allowed")


@health_check(
    "load",
    reads="`/proc/loadavg`, the CPUs that this process may use",
    healthy="less than half of the CPUs are in use before training starts",
    effect="a busy host: every rank waits for the slowest one",
    fix="end what runs there (top shows it), or train elsewhere",
)
def load(facts: HostFacts) -> Iterator[Verdict]:
    """Judge what runs beside the training."""
    if facts.load is not None:
        busy = facts.load > max(1.0, LARGEST_LOAD * facts.cpus)
        cpus = f"{facts.cpus} CPU{'s' * (facts.cpus != 1)}"
        read = f"{facts.load:.1f} processes want to run on {cpus}"
        # its figure changes from second to second: one that is well is the same for all hosts
        yield Verdict("warning", read) if busy else Verdict("ok", f"little runs on {cpus}")


@health_check(
    "permissions",
    reads="what the other checks read",
    healthy="everything may be read",
    effect="the checks that need it cannot tell",
    fix='run it as a user who may read that: sudo "$(command -v slipstream)" doctor host',
)
def permissions(facts: HostFacts) -> Iterator[Verdict]:
    """Name files that may not be read."""
    if facts.denied:
        more = len(facts.denied) - 3
        named = ", ".join(facts.denied[:3]) + (f" and {more} more" if more > 0 else "")
        yield Verdict("unknown", f"no permission to read {named}")
