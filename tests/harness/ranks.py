"""Real ranks for tests: processes joined by gloo over loopback, started once a file.

    def test_sum(two):  # a fixture of tests/conftest.py
        assert two.run(sum_of_ranks) == [1, 1]     # sum_of_ranks() is a function of the test module

Every ``run`` gives the ranks a fresh process group (unless ``connect=False``) and the variables of
``torchrun`` in the environment. A rank that raises makes ``run`` raise ``RankFailure`` with every
rank's traceback; a rank that hangs or dies ends the pool, and the next ``run`` starts a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from tests.harness.marks import RANKS_RUN

context = multiprocessing.get_context("forkserver")
# A rank is a fork of a server that has imported all this once (4 s of CPU), not a new interpreter.
context.set_forkserver_preload(
    [
        "tests.harness.uncollected",  # the first
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "slipstream.session.accelerate",
        "slipstream.calibration.calibrate",
        "slipstream.ddp",
        "slipstream.comm",
        "hypothesis",
        "pytest",
        "transformers.models.bert.modeling_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.resnet.modeling_resnet",
        "tests.harness.models",
        "tests.harness.reference",
        "tests.harness.frozen",  # the last
    ]
)


class RankFailure(AssertionError):
    """At least one rank raised, died or hung; ``errors`` maps rank to its exception or a reason."""

    def __init__(self, errors: dict[int, BaseException | str], tracebacks: dict[int, str]) -> None:
        self.errors = errors
        text = "\n".join(f"--- rank {r}: {errors[r]!r}\n{tracebacks.get(r, '')}" for r in errors)
        super().__init__(text)


class Ranks:
    """A pool of ``size`` worker processes; ``run(fn, *args)`` calls ``fn(*args)`` on each."""

    def __init__(self, size: int, timeout: float = 120.0) -> None:
        self.size, self.timeout = size, timeout
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._meetings = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        connect: bool = True,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Returns of ``fn(*args)`` by rank; a ``PerRank`` among ``args`` differs between them."""
        sys.audit(RANKS_RUN)
        if not self._workers:
            self._start()
        port = free_port()
        self._meetings += 1
        meeting = f"{self._folder.name}/meeting{self._meetings}"
        for rank, (_, pipe) in enumerate(self._workers):
            own = [a.values[rank] if isinstance(a, PerRank) else a for a in args]
            pipe.send((fn, own, rank, self.size, port, meeting, connect, env or {}))
        results: dict[int, Any] = {}
        errors: dict[int, BaseException | str] = {}
        tracebacks: dict[int, str] = {}
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while pending:
            waiting: list[Any] = list(pending)
            end = time.monotonic() + (timeout or self.timeout)
            ready: list[Any] = []
            while not ready and time.monotonic() < end and not self._all_stopped(pending.values()):
                ready = wait(waiting, min(1.0, max(0.0, end - time.monotonic())))
            if not ready:
                errors |= dict.fromkeys(pending.values(), "no answer: the rank hangs")
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    ok, value, trace = pipe.recv()
                except EOFError:
                    errors[rank] = "the process died"
                    continue
                if ok:
                    results[rank] = value
                else:
                    errors[rank], tracebacks[rank] = value, trace
        if any(isinstance(e, str) for e in errors.values()):
            for process, _ in self._workers:
                process.kill()
            self.stop()
        if errors:
            raise RankFailure(errors, tracebacks)
        return [results[r] for r in range(self.size)]

    def fail(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[int, BaseException]:
        """Like ``run`` for a case in which *every* rank must raise: the exceptions by rank."""
        with pytest.raises(RankFailure) as caught:
            self.run(fn, *args, **kwargs)
        errors = caught.value.errors
        missing = set(range(self.size)) - set(errors)
        assert not missing, f"ranks {sorted(missing)} did not raise; others: {caught.value}"
        odd = {rank: error for rank, error in errors.items() if isinstance(error, str)}
        assert not odd, f"ranks without an error of their own: {odd}"
        return errors  # type: ignore[return-value]

    def _all_stopped(self, ranks: Iterable[int]) -> bool:
        """Whether a signal has stopped these processes: they will not answer, and nobody else is
        left who could wake them."""
        pids = [self._workers[rank][0].pid for rank in ranks]
        try:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        except OSError:  # one has died
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def _start(self) -> None:
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, ours in self._workers:
            ours.recv()  # limits of runs are of ranks that are there


class PerRank:
    """An argument of ``Ranks.run`` that differs between ranks."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def free_port() -> int:
    """A port to listen on later. It is below those that systems give to whoever asks for any, so
    that no other socket gets it meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    base = dict(os.environ)
    pipe.send("is there")
    while True:
        try:
            fn, args, rank, size, port, meeting, connect, env = pipe.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(base)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
        )
        os.environ.update(env)
        torch.manual_seed(0)
        try:
            if connect:  # a file: torch's TCP store asks for host names, which may take seconds
                dist.init_process_group(
                    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
                )
                dist.barrier()  # a rank that is done must not leave while another still connects
            answer = (True, fn(*args), "")
        except BaseException as error:
            answer = (False, error, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        try:
            pipe.send(answer)
        except Exception:  # an error or a value that cannot be pickled
            pipe.send((answer[0], RuntimeError(repr(answer[1])), answer[2]))
