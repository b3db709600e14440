"""All checks, in the order of the page, and the judgements that they make together."""

from __future__ import annotations

from slipstream.health import cluster_checks, gpu_checks, host_checks, rdma_checks
from slipstream.health.diagnosis import Diagnosis, HealthCheck, merged
from slipstream.health.facts import ClusterFacts, HostFacts

HOST_CHECKS: tuple[HealthCheck[HostFacts], ...] = (
    host_checks.interface,
    host_checks.shared_memory,
    host_checks.open_files,
    host_checks.load,
    host_checks.permissions,
    rdma_checks.rdma,
    rdma_checks.hca,
    rdma_checks.ports,
    rdma_checks.gid,
    rdma_checks.rdma_mtu,
    rdma_checks.lossless,
    rdma_checks.errors,
    rdma_checks.retries,
    rdma_checks.memlock,
    gpu_checks.peer_memory,
    gpu_checks.gdr,
    gpu_checks.pcie,
    gpu_checks.acs,
    gpu_checks.iommu,
    gpu_checks.placement,
    gpu_checks.cpus,
    gpu_checks.nccl_network,
    gpu_checks.nccl_algorithm,
)
CLUSTER_CHECKS: tuple[HealthCheck[ClusterFacts], ...] = (
    cluster_checks.reached,
    cluster_checks.links,
    cluster_checks.gloo,
    cluster_checks.mtu,
    cluster_checks.versions,
    cluster_checks.settings,
    cluster_checks.clocks,
)


def judge_host(facts: HostFacts) -> list[Diagnosis]:
    """Judge one host; the worst diagnoses come first.

    Example:
        >>> found = judge_host(HostFacts(host="node0", shm=64 * 2**20))
        >>> found[0].check, found[0].status, found[0].read
        ('shared memory', 'wrong', '/dev/shm has 64 MB')
    """
    return merged(found for one in HOST_CHECKS for found in one.diagnose(facts, (facts.host,)))


def judge_cluster(cluster: ClusterFacts) -> list[Diagnosis]:
    """Judge all hosts and the links between them; the worst diagnoses come first."""
    hosts = tuple(facts.host for facts in cluster.hosts)
    across = [found for one in CLUSTER_CHECKS for found in one.diagnose(cluster, hosts)]
    each = [
        found
        for one in HOST_CHECKS
        for facts in cluster.hosts
        for found in one.diagnose(facts, (facts.host,))
    ]
    # where gloo has connected, its interface is known by proof
    proven = {
        host for found in across if found.check == cluster_checks.gloo.name for host in found.hosts
    }
    guess = host_checks.interface.name
    each = [found for found in each if found.check != guess or not proven & {*found.hosts}]
    return merged((*across, *each))
