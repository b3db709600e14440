"""The heartbeat: each rank says where it is, and sees whether others live; a run that hangs ends.

A thread of its own does it, with a connection of its own to the store of the process group, so that
it needs nothing of the main thread.

[Note: The end]
Whoever sees a hang writes ``alarm``; the first one counts. All ranks that live answer it with their
stacks, and the first one makes the autopsy of what it has by then, and writes ``verdict``: that it
was none after all (on a machine where threads get no core for seconds), or whom to blame. The
ranks to blame end at once, or, where they cannot, the one that looked. That breaks the process
groups of the others, so that their exchanges raise in the main thread, which gets the verdict as
its error. Who has not come out of its exchange after a while is ended, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from slipstream.checks.alarm import Alarm, AlarmKind, Alarms, AlarmVerdict
from slipstream.checks.autopsy import LEFT, Autopsy, RankCase, RankState
from slipstream.checks.limits import EXIT_CODE, STALE, STILL, interval_of
from slipstream.checks.other_ranks import OtherRanks
from slipstream.checks.own_view import OwnView, UpdateCount, last_exchanges
from slipstream.checks.slow_ranks import SlowRanks
from slipstream.checks.stacks import all_stacks
from slipstream.checks.vitals import in_words, state as state_of_process, unsent
from slipstream.cluster.connect import Cluster
from slipstream.errors import ExchangeError, HangError, SlipstreamError
from slipstream.files.write import write_whole

ANSWER_SECONDS = 3.0
"""For the answers of all ranks to an alarm."""
GRACE = 0.15
"""Share of the timeout for the main thread to come out of its exchange once others have left it."""
FIRST_SECONDS = 0.5
"""Until those end that break the exchange: the others have read the verdict by then."""
POLL_SECONDS = 0.1
"""From one look at the store to the next after an alarm."""
RAISED = "ended with"
"""What a rank has done whose own exception says more than an autopsy."""
WORDS = 200
"""Characters of an error that others get to read."""


class Heartbeat:
    """Beats until it is closed.

    Args:
        cluster: the ranks; a connection of its own is made to their store.
        name: of the session, the same on all its ranks.
        progress: how many updates are done.
        timeout: seconds within which a run that hangs ends.
        folder: gets the autopsy.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        progress: UpdateCount,
        *,
        timeout: float,
        folder: Path,
    ) -> None:
        here = cluster.environment
        rank, world_size, host = cluster.rank, cluster.world_size, here.host
        self.rank, self.world_size, self.host = rank, world_size, host
        first = rank - here.local_rank
        # These ranks may share this host: they see whether its process computes.
        self.near = range(first, first + here.local_world_size)
        self.timeout, self.folder = timeout, folder
        self.interval = interval_of(timeout) * max(1.0, world_size / 500)
        self.verdict: str | None = None
        connection: Store = cluster.store.clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"slipstream/heartbeat/{name}", connection)
        self._closing, self._known, self._told = (threading.Event() for _ in range(3))
        # A thread that waits for a GPU spins: computing is then no sign of life.
        self._spins = cluster.device.type != "cpu"
        self._own = OwnView(rank, host, progress, spins=self._spins, window=self._window)
        self._reached = time.monotonic()
        self._others = OtherRanks(self._store, rank, world_size, timeout, self._own)
        self._answered = self._asked = False
        self._alarms = Alarms(self._store)
        self._left = ""
        self._slow, self._compared = SlowRanks(), self._reached
        self._noted = False  # in the folder, as long as this rank is still
        self._say(self._own.state(self._reached))  # before anything can stop this rank
        self._threads = [
            threading.Thread(target=self._beats, name="slipstream-heartbeat", daemon=True),
            threading.Thread(target=self._watch_store, name="slipstream-store", daemon=True),
        ]
        for thread in self._threads:
            # A breakpoint in VS Code or PyCharm stops all threads but these.
            vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
            thread.start()

    # What the main thread calls.

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn an exchange that fails inside into the error that says whom it waited for.

        Raises:
            HangError: in the place of what was raised, where there is a verdict.
        """
        try:
            yield
        except RuntimeError as error:
            if not _lost_a_peer(error):
                raise
            failed, _, _ = str(error).splitlines()[0].partition(". Most often")
            verdict = self.explain(failed)
            if verdict is None:
                raise
            raise HangError(f"{failed}: {verdict}") from error

    def explain(self, reason: str) -> str | None:
        """Ask all ranks why an exchange of this one has failed; None: nobody knows better."""
        self._told.set()
        patience = 2 * ANSWER_SECONDS + 2 * self.interval
        args = reason, time.monotonic() + patience
        asking = threading.Thread(target=self._ask_all, args=args, daemon=True)
        asking.start()
        if not self._known.wait(patience):
            asking.join(ANSWER_SECONDS)
            if asking.is_alive():  # a call of the store does not return where its host is cut off
                return (
                    "the run's store has not answered, either: the host of rank 0 is down, stopped "
                    f"or cut off from {self.host}"
                )
        time.sleep(FIRST_SECONDS)  # this process may keep the store, in which others still read
        return self.verdict

    def _ask_all(self, reason: str, until: float) -> None:
        asked = -1
        while time.monotonic() < until and not self._known.wait(POLL_SECONDS):
            if asked != self._alarms.number:  # the one before was of another kind, and was none
                asked = self._alarms.number
                try:
                    self._raise_alarm("failed", reason)
                except RuntimeError:  # torch's stores raise no other
                    self.verdict = (
                        "the run's store is gone, too, which ends with rank 0 or its launcher"
                    )
                    self._known.set()

    def leave(self, _: object, error: BaseException | None, __: object) -> None:
        """End the threads; the last word of this rank stays in the store: why it leaves. The
        ``__exit__`` of a session."""
        if isinstance(error, SystemExit):  # of the interpreter, which has printed what was raised
            error = getattr(sys, "last_value", None)
        if isinstance(error, RuntimeError) and not self._told.is_set() and _lost_a_peer(error):
            self._explain_of_the_script(error)
        words = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        self._left = f"{RAISED} {words[:WORDS]}" if words else LEFT
        self._closing.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)
        with suppress(OSError):
            self._own_file.unlink(missing_ok=True)

    def _explain_of_the_script(self, error: RuntimeError) -> None:
        """Print why an exchange that no session has made failed: it ends the script."""
        failed = str(error).strip().splitlines()[0]
        if (verdict := self.explain(failed)) is not None:
            sys.stderr.write(f"slipstream.HangError: rank {self.rank}: {failed}: {verdict}\n")

    # The thread that beats.

    def _beats(self) -> None:
        while True:
            ended = self._closing.wait(self._pause)
            began = time.monotonic()
            try:
                self._beat()
                self._reached = time.monotonic()
            except RuntimeError:  # the store is gone, or does not answer
                if ended or self._left:
                    return
            if time.monotonic() - began > self._long:  # others may reach the store again later
                self._others.forget()
            if ended:
                return

    @property
    def _pause(self) -> float:
        return POLL_SECONDS if self._asked or self._answered else self.interval

    @property
    def _long(self) -> float:
        """Seconds without a beat after which the silence of others counts anew."""
        return 3 * self.interval + 1

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._reached > self._long:  # what is read now may be as old
            self._others.forget()
        if now - self._own.looked > self._long:  # this process was stopped itself
            self._others.forget()
            self._own.begin_anew()
        state = self._own.state(now, self._left)
        self._note(state)
        self._say(state)
        if (alarm := self._alarms.asked()) is not None:
            self._answer(alarm, state)
            return
        if state.ended:
            return
        if (reason := self._others.silent(now)) is not None:
            self._raise_alarm("silent", reason)
        if self.rank == 0 and now - self._compared > self._window:
            self._compared = now
            self._name_slow_ranks(state, now)
        looks = state.still > 2 * self.interval + 2 and self._others.this_rank_looks(now)
        if looks and (found := self._others.hang(state, now)) is not None:
            self._raise_alarm(*found)

    def _say(self, state: RankState) -> None:
        self._store.set(f"beat/{self.rank}", state.model_dump_json(exclude_defaults=True))

    @property
    def _window(self) -> float:
        """Seconds over which ranks are compared."""
        return max(1.0, self.timeout / 6)

    def _note(self, state: RankState) -> None:
        """Leave in the folder where this rank is, should somebody end the run from outside."""
        is_still = state.still > self.timeout * STALE and not state.ended
        if is_still == self._noted:
            return
        self._noted = is_still
        with suppress(OSError):
            if is_still:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(self._own_file, self._case(state).model_dump_json(indent=1))
            else:
                self._own_file.unlink(missing_ok=True)

    @property
    def _own_file(self) -> Path:
        return self.folder / f"rank{self.rank}.json"

    def _case(self, state: RankState) -> RankCase:
        now = time.monotonic()
        for rank in {*self.near} - {self.rank}:  # thousands of requests would be an answer too late
            with suppress(RuntimeError):
                self._others.hear(rank, now)
        neighbours, computing = {}, []
        for rank, other in self._others.last_words().items():
            if not self._own.sees(other):
                continue
            neighbours[rank] = in_words(other.pid)
            if state_of_process(other.pid) == "R":
                computing.append(rank)
        return RankCase(
            state=state,
            stacks=all_stacks(),
            exchanges=last_exchanges(now),
            unsent=unsent(),
            neighbours=neighbours,
            computing=tuple(computing),
        )

    def _name_slow_ranks(self, own: RankState, now: float) -> None:
        states = self._others.with_all(own, now)
        seconds = {state.rank: state.seconds for state in states if state.seconds > 0}
        if len(seconds) == self.world_size and not own.young:
            for words in self._slow.look(seconds, own.step or 0):
                sys.stderr.write(f"slipstream: {words}\n")

    # The autopsy.

    def _raise_alarm(self, kind: AlarmKind, reason: str) -> None:
        self._asked = self._alarms.ask(Alarm(rank=self.rank, kind=kind, reason=reason))

    def _answer(self, alarm: Alarm, state: RankState) -> None:
        """Say all to who has asked, and wait for the verdict, or find it."""
        now = time.monotonic()
        if not self._answered:
            self._answered = True
            self._alarmed_at = now
            self._alarms.tell(self._case(state))
        self._asked = alarm.rank == self.rank
        verdict = self._alarms.verdict()
        if verdict is None and self._asked:
            verdict = self._judge(alarm, now)
        if verdict is not None:
            self._learn(verdict)
        elif now - self._alarmed_at > 2 * ANSWER_SECONDS + self.interval:
            words = f"{alarm.reason}; rank {alarm.rank}, which asked why, has gone before it "
            self._learn(AlarmVerdict(words=f"{words}could say", first=(self.rank,)))

    def _judge(self, alarm: Alarm, now: float) -> AlarmVerdict | None:
        """Say how the alarm ends; None: not all have answered yet."""
        ranks = range(self.world_size)
        told = self._alarms.told(ranks)
        if len(told) < len(ranks) and now - self._alarmed_at < ANSWER_SECONDS + self.interval:
            return None
        cases = self._alarms.cases(told)
        silent: dict[int, RankState | None] = {}
        for rank in sorted({*ranks} - {*told}):
            heard = self._others.hear(rank, now)
            said = None if heard is None else heard[0]
            if said is not None and said.ended:  # its last word
                cases[rank] = RankCase(state=said)
            else:
                silent[rank] = said
        verdict = AlarmVerdict()
        if not alarm.was_none(cases, silent, self.timeout):
            autopsy = Autopsy.of(cases, silent, self.world_size, alarm.reason)
            can = [rank for rank in autopsy.blamed if rank in cases and not cases[rank].state.ended]
            first = None if alarm.kind == "failed" else tuple(can) or (self.rank,)
            verdict = AlarmVerdict(words=self._written(autopsy), first=first)
        self._alarms.judge(verdict)
        return verdict

    def _written(self, autopsy: Autopsy) -> str:
        """Write an autopsy, unless an exception says more; return its verdict, and where it is."""
        if any(case.state.ended.startswith(RAISED) for case in autopsy.cases.values()):
            return autopsy.verdict
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "autopsy.json", autopsy.model_dump_json(indent=1))
            where = f"slipstream autopsy {self.folder.resolve()} on {self.host}"
            return f"{autopsy.verdict} ({where})"
        return autopsy.verdict

    def _learn(self, found: AlarmVerdict) -> None:
        """The end of this rank: by the main thread if that comes out of its exchange, else here."""
        if not found.words:  # no hang
            self._alarms.next()
            self._answered = self._asked = False
            self._others.forget()
            return
        if self._known.is_set():
            return
        self.verdict = found.words
        self._known.set()
        if self._left:
            return
        if found.first is None:  # an exchange has failed elsewhere: this rank will see that, too
            end: Callable[[], None] = self._end_if_still
        else:
            end = partial(self._end_process, first=self.rank in found.first)
        threading.Thread(target=end, daemon=True).start()

    def _end_if_still(self) -> None:
        """End this process once its main thread is still, unless that ends itself."""
        while time.monotonic() - self._own.alive < self.timeout * STILL:
            if self._told.wait(self.interval) or self._closing.is_set():
                return
        self._end_process(first=True)

    def _end_process(self, first: bool) -> None:
        """End this process, unless its main thread does."""
        time.sleep(FIRST_SECONDS + (0.0 if first else GRACE * self.timeout))
        if self._told.is_set() or self._closing.is_set():
            return
        sys.stderr.write(f"slipstream.HangError: rank {self.rank}: {self.verdict}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(EXIT_CODE)

    def _watch_store(self) -> None:
        """End this rank where the thread that beats no longer comes back from the store, and nobody
        else: it waits for others, or in a call of the session."""
        looked = time.monotonic()
        while not self._closing.wait(self.interval):
            now = time.monotonic()
            if now - looked > 3 * self.interval + 1:  # this process was stopped itself
                self._reached = now
            looked = now
            silence = now - self._reached
            if silence < 3 * self.interval or self._left or self._known.is_set():
                continue
            own = self._own.state(now)  # the thread that beats may not look
            if silence < self.timeout * (STALE + STILL) / 2 or own.still < self.timeout * STALE:
                continue
            # a script waits for a device in any of its lines
            if not own.waits and not own.verb and not self._spins:
                continue
            self._learn(
                AlarmVerdict(
                    words=f"the run's store has not answered for {silence:.0f} s: the host "
                    f"of rank 0 is down, stopped or cut off from {self.host}; this rank is at "
                    f"{own.line or 'no line of its script'}",
                    first=(self.rank,),
                )
            )


def _lost_a_peer(error: RuntimeError) -> bool:
    """Whether an exchange failed for want of another rank: torch says so, and no more."""
    if isinstance(error, HangError):
        return False
    said = error.__cause__ if isinstance(error, ExchangeError) else error
    if isinstance(said, SlipstreamError):
        return False
    words = ("gloo", "NCCL", "of this host")  # the last of `host_pipeline`
    return isinstance(said, DistError) or any(word in str(said) for word in words)
