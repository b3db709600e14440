"""torch's elastic agent for this node, and the meeting of all nodes at each start of their ranks.

[Note: What torch's agent leaves to us]
Nodes are lost and replaced, and the ranks of all of them start together each time. torch's agent
(2.13) does that but for four things:

- Each node counts restarts for itself: one whose ranks have failed counts, one that only sees that
  another waits does not, one that joins later begins at 0. Here they are counted in the store at
  which the nodes meet.
- The store of the ranks is opened once, by the node that is first then. So ranks would find there
  what those before them wrote, a node that joins later would wait for an address that nobody says
  again, and where the first node is replaced, the others would look for the old one's store. Here
  every start has a store of its own.
- A node whose ranks have all left with code 0 waits for the others, and does not start again with
  them. Here it does: until the ranks of all nodes have left, it counts as one that trains.
- A rank that is stopped does not see SIGTERM, and is killed after 30 s. Here it is woken up first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from slipstream.cluster._logs import RankLogs
from slipstream.cluster.listen import open_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import ElasticAgent, RunResult, WorkerGroup
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

MONITOR_INTERVAL = 0.05
"""Seconds between two looks at the ranks."""
START, FINISHED = "slipstream/start", "slipstream/finished"
"""Of one start, in the store: its number and where its ranks meet; how many nodes have finished."""
Failures = Mapping[int, Any]
"""What torch says of ranks that have failed, by rank."""


def run_ranks(
    argv: Sequence[str],
    nproc: int,
    meets: RendezvousParameters,
    max_restarts: int,
    logs: RankLogs,
    on_restart: Callable[[Failures], None],
) -> None:
    """Run the ranks of this node until those of all nodes have left with code 0.

    Args:
        argv: the program, and its arguments.
        nproc: number of ranks on this node.
        meets: of all nodes.
        max_restarts: how often the ranks of this node may fail before that is the end.
        logs: of the ranks.
        on_restart: called before the ranks are stopped to start again, with those that failed.

    Raises:
        ChildFailedError: ranks of this node have failed for good.
        RendezvousError, DistError: the nodes do not meet, or not again.
        SignalException: a signal has ended it.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    host, _, port = meets.endpoint.rpartition(":")
    fixed = meets.backend == "static"
    meeting: Any = get_rendezvous_handler(meets) if fixed else NodeMeeting(meets, logs)
    spec = WorkerSpec(
        role="default",
        local_world_size=nproc,
        entrypoint=argv[0],
        args=tuple(argv[1:]),
        rdzv_handler=meeting,
        max_restarts=max_restarts,
        monitor_interval=MONITOR_INTERVAL,
        master_addr=host.strip("[]") if fixed else None,
        master_port=int(port) if fixed else None,
        local_addr=meets.local_addr,
    )
    agent = _agent(spec, logs, None if fixed else meeting, on_restart)
    by_signal = False
    try:
        result: RunResult | None = agent.run()
        if result is None:  # torch's word for a node that was one too many, once the run is over
            raise RendezvousClosedError("the run has ended without this node")
        if result.is_failed():
            raise ChildFailedError(argv[0], result.failures)
    except SignalException:
        by_signal = True  # others may go on, with one that takes this node's place
        raise
    finally:
        if not by_signal:
            meeting.shutdown()


class NodeMeeting:
    """Nodes before each start of their ranks: torch's rendezvous, a number, and a store.

    What the agent expects of a ``RendezvousHandler``; no subclass, since torch is imported only
    when ranks start.
    """

    use_agent_store = True

    def __init__(self, meets: RendezvousParameters, logs: RankLogs) -> None:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        backend, self._store = found_backend(meets)
        self._handler = create_handler(self._store, backend, meets)
        self._logs, self._local = logs, meets.local_addr is not None
        self._ranks_meet: TCPStore | None = None
        self._now: RendezvousInfo | None = None
        self._finished = False

    def __getattr__(self, name: str) -> Any:
        """All else is torch's."""
        return getattr(self._handler, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; then they have the same number of this start, and store for it."""
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        with _no_store_of_torch():
            now = self._handler.next_rendezvous()
        if now.rank == 0:
            assert now.bootstrap_store_info is not None
            address = now.bootstrap_store_info.master_addr
            self._ranks_meet = self._open(address)
            number = self._store.add(f"slipstream/{self._handler.get_run_id()}/starts", 1) - 1
            now.store.set(START, json.dumps([number, address, self._ranks_meet.port]))
        self._logs.restart, address, port = json.loads(now.store.get(START))
        self._now, self._finished = now, False
        where = RendezvousStoreInfo(address, port)
        return RendezvousInfo(now.store, now.rank, now.world_size, where)

    def finished(self) -> bool:
        """Whether the ranks of all nodes have left with code 0; those of this node have.

        Raises:
            RendezvousClosedError: another node has given up.
        """
        from torch.distributed.elastic.rendezvous import RendezvousClosedError

        assert self._now is not None
        try:
            own = 0 if self._finished else 1
            nodes = self._now.store.add(FINISHED, own)
            self._finished = True
        except RuntimeError:  # the store is gone, and with it who could restart
            return True
        if nodes >= self._now.world_size:
            return True
        if self._handler.is_closed():
            raise RendezvousClosedError
        return False

    def _open(self, address: str) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._local:
            return open_store(address, 0)
        # The name of a host may be that of its loopback interface to itself: on all interfaces.
        return TCPStore(address, 0, is_master=True, wait_for_workers=False)


@contextmanager
def _no_store_of_torch() -> Iterator[None]:
    """Let torch's rendezvous open no store for the ranks, in which it would wait for the first
    one's."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def found_backend(meets: RendezvousParameters) -> tuple[Any, Any]:
    """Torch's backend and its store, on a host that may begin as late as any node may join: torch
    itself waits a minute."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    until = time.monotonic() + (meets.get_as_int("join_timeout") or 0)
    while True:
        try:
            return create_backend(meets)
        except RendezvousConnectionError:
            left = until - time.monotonic()
            if left < 0:
                raise
            said = f"nobody is at {meets.endpoint} yet; it has {left / 60:.0f} minutes left"
            print(f"slipstream: {said}", file=sys.stderr, flush=True)


def _agent(
    spec: Any, logs: Any, meeting: NodeMeeting | None, on_restart: Callable[[Failures], None]
) -> ElasticAgent:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        failures: Failures

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            started: dict[int, Any] = super()._start_workers(worker_group)
            context: Any = self._pcontext
            ranks = {rank: each.proc for rank, each in context.subprocess_handlers.items()}
            logs.ends.follow(ranks)
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            self.failures = result.failures
            if result.state is not WorkerState.SUCCEEDED or meeting is None or meeting.finished():
                return result
            return RunResult(WorkerState.HEALTHY)

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            on_restart(self.failures)
            super()._restart_workers(worker_group)

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            for worker in worker_group.workers:
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(worker.id, signal.SIGCONT)
            super()._stop_workers(worker_group)

    return Agent(spec, logs)
