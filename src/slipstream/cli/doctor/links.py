"""The program of every rank of ``slipstream doctor links``; rank 0 prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta

from pydantic import ValidationError
from rich.console import Console
from torch.distributed.distributed_c10d import Store

from slipstream.calibration.links import measure_links
from slipstream.cli.doctor.diagnoses import as_json, draw, exit_code
from slipstream.cluster import connect
from slipstream.cluster.environment import Environment
from slipstream.errors import ClusterError, SlipstreamError
from slipstream.health.facts import ClusterFacts, HostFacts
from slipstream.health.files import HostFiles
from slipstream.health.judge import judge_cluster
from slipstream.health.read import read_host

JOIN = timedelta(seconds=60)
"""For all ranks to come, and to begin with."""
END = timedelta(minutes=30)
"""For ranks that only wait: another one of their host measures."""
LEAVE = timedelta(seconds=5)


def examine(seconds: float, columns: int, as_text: bool, verbose: bool) -> int:
    """Measure the links between the hosts of all ranks; rank 0 prints. Returns its exit code."""
    environment = connect.from_environ()
    store = connect.reach_store(environment, JOIN)
    found = _facts(environment, store)
    by_name: dict[str, HostFacts] = {}
    for facts in filter(None, found):
        by_name.setdefault(facts.host, facts)
    hosts = [*by_name.values()]
    names = [facts.host for facts in hosts]
    if len(hosts) < 2:
        raise ClusterError(
            f"all ranks are on one host, {', '.join(names)}: there is no link to measure. Start it "
            "on several hosts like a training, or on emulated ones: slipstream doctor links "
            "--nodes 4"
        )
    place = next((at for at, facts in enumerate(hosts) if found[environment.rank] is facts), None)
    code = 0
    if place is not None:
        links = measure_links(store, place, hosts, seconds)
        cluster = ClusterFacts(hosts=tuple(hosts), links=links)
    if environment.rank == 0 and place is not None:
        diagnoses = judge_cluster(cluster)
        code = exit_code(diagnoses)
        drawn = draw(f"{len(hosts)} hosts", diagnoses, names, verbose=verbose)
        if as_text:
            Console(width=columns).print(drawn)
        else:
            print(as_json(diagnoses, cluster), flush=True)
    _leave_together(environment, store)
    return code


def _facts(environment: Environment, store: Store) -> Sequence[HostFacts | None]:
    """The facts of each host from its first rank; None from the others.

    Raises:
        ClusterError: a rank does not come, all that have not are named; or a host has another
            version of slipstream, with other facts.
    """
    own = read_host(HostFiles()).model_dump_json() if environment.local_rank == 0 else ""
    store.set(f"facts/{environment.rank}", own)
    keys = [f"facts/{rank}" for rank in range(environment.world_size)]
    try:
        store.wait(keys, JOIN)
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise ClusterError(
            f"ranks {', '.join(missing)} of {environment.world_size} have not come to "
            f"{environment.master_addr}:{environment.master_port} within "
            f"{JOIN.total_seconds():.0f} s: start them, or open that port in the firewall"
        ) from None
    texts = [store.get(key).decode() for key in keys]
    try:
        return [HostFacts.model_validate_json(text) if text else None for text in texts]
    except ValidationError:
        found = (json.loads(text).get("versions", {}) for text in texts if text)
        versions = {str(versions.get("slipstream")) for versions in found}
        raise ClusterError(
            "the hosts have versions of slipstream that do not understand each other "
            f"({', '.join(sorted(versions))}): install the same one on all"
        ) from None


def _leave_together(environment: Environment, store: Store) -> None:
    """Stay until all are done: the store ends with rank 0, and launchers call a rank that leaves
    early a failure."""
    try:
        if environment.rank:
            store.wait(["done"], END)
            store.set(f"left/{environment.rank}", "")
        else:
            store.set("done", "")
            store.wait([f"left/{rank}" for rank in range(1, environment.world_size)], LEAVE)
    except RuntimeError:
        pass


if __name__ == "__main__":
    try:
        sys.exit(examine(**json.loads(sys.argv[1])))
    except SlipstreamError as error:  # a user's mistake
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
