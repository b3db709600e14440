"""``Checkpoints``: save beside training, and go on from the newest one that is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slipstream.checkpoint import contents, parts, storage
from slipstream.checkpoint.attendance import Attendance
from slipstream.checkpoint.contents import AnySession, KeepsState
from slipstream.checkpoint.folder import BrokenCheckpoint, Folder, check
from slipstream.checkpoint.stopping import StopSignals
from slipstream.checkpoint.writing import Writing, advice
from slipstream.errors import CheckpointError, UsageError, warn
from slipstream.parallel.dims import gather_objects
from slipstream.strategy import Row
from slipstream.transport.consistency import agree
from slipstream.tuner.trials import checkpoints_of


class Checkpoints:
    """The checkpoints of one run in a folder.

    A checkpoint has all of ``session.checkpoint()``, the states of ``also``, and the random numbers
    of every rank. It is copied when `save` is called and written by a thread while training goes
    on, each rank its own part; it counts once it is complete.

    Args:
        folder: for this run alone; all ranks must see the same. Trials of ``slipstream tune`` and
            ``scale`` have one of their own instead.
        keep: newest ones that stay; an older one is removed once a newer one is complete.
        also: what else has a state: ``{"scheduler": scheduler}``. Each rank saves its own.
        on_signal: signals after which `step` saves on all ranks and ends the script with code
            128 + signal: ``(signal.SIGTERM,)``. One rank that gets it is enough. Handlers that the
            script has set are called, too. One that comes after the last update is no longer
            `step`'s: it does what it does to any script, once the session is closed.

    Raises:
        UsageError: ``keep`` is less than 1.

    Example:
        >>> import slipstream, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def train(updates):
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     saved = slipstream.Checkpoints(folder.name)
        ...     with slipstream.accelerate(model, optimizer) as session:
        ...         start = saved.restore(session)
        ...         for update in range(start, updates):
        ...             session.backward(session.model(torch.ones(4, 2)).square().mean())
        ...             updated = session.step()
        ...             saved.step(session, every=2)
        ...     return start
        >>> train(5), train(8)
        (0, 4)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        also: Mapping[str, KeepsState] | None = None,
        on_signal: Iterable[int] = (),
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: must be at least 1, the newest checkpoint")
        # absolute: the script may change its directory while one is written
        self._folder = Folder(checkpoints_of(Path(folder)).absolute())
        self._keep, self._also = keep, dict(also or {})
        self._signals = StopSignals(on_signal)
        self._attendance = Attendance()
        self._session: AnySession | None = None
        self._group: dist.ProcessGroup | None = None
        self._claim: IO[str] | None = None
        self._found: Sequence[Path] = ()  # when the session came, or went back
        self._restored = False
        self._seen = 0
        self._writing: Writing | None = None
        self._failed: str | None = None
        self._warned = False
        self._written = 0

    @property
    def paths(self) -> list[Path]:
        """The folders of all that are complete, the oldest first; ``slipstream.checkpoint.read``
        reads one."""
        return self._folder.complete()

    def restore(self, session: AnySession) -> int:
        """Go on from the newest checkpoint that is whole; all ranks call it, before they train, or
        later to go back: a loop over ``session.loader`` that goes on keeps its place in the data.

        One that is torn or has changed since it was written is named in a warning and renamed to
        ``broken-...``, and the one before it is taken, on all ranks the same.

        Returns:
            The number of updates so far; 0: there is no checkpoint.

        Raises:
            CheckpointError: there are some, and none of them is whole; or a rank cannot read one
                now, which may be whole; or another run uses the folder.
            ModelError: it is another model's.
            UsageError: the session cannot take it, as ``session.restore``.
        """
        self._bind(session)
        self._join()
        self._found = self._look(session.rank)
        self._restored = True
        local = session.strategy.local
        if local is not None and local.rendezvous is not None and session.updates:
            self._seen = session.common_updates
            contents.warn_of_joining(session.updates, self._also)
            return session.updates  # from the other jobs
        complaints: list[str] = []
        for path in reversed(self._found):
            complaint, saved = self._whole(session, path)
            if complaint:
                complaints.append(f"{path}: {complaint}")
                if session.rank == 0:
                    warn(
                        f"the checkpoint {path} is not whole ({complaint}); the one before it is "
                        "taken",
                    )
                continue
            contents.give_back(session, self._also, saved)
            if session.rank == 0:
                for broken in self._found[self._found.index(path) + 1 :]:
                    self._folder.set_aside(broken)
            self._seen = session.common_updates
            return session.updates
        if complaints:
            raise CheckpointError(
                f"none of the {len(complaints)} checkpoints in {self._folder.path} is whole:\n"
                + "\n".join(complaints)
                + "\nto begin anew, name another folder or move them away"
            )
        return 0

    def save(self, session: AnySession, *, wait: bool = False) -> None:
        """Save now; all ranks call it, after an update.

        Waits for the checkpoint before this one, copies the state, and returns: a thread writes it.

        Args:
            wait: return when it is complete.

        Raises:
            CheckpointError: the checkpoint before this one was not written (this one is on its
                way), or with ``wait`` this one.
            UsageError: a state has something that is no data, an accumulation window is open, or
                the folder has checkpoints that this run did not `restore`.
        """
        self._bind(session)
        if self._found and not self._restored:
            raise UsageError(
                f"{self._folder.path} has checkpoints, the newest {self._found[-1].name}, and this "
                "run has not begun with them: call restore(session) before the loop, or name "
                "another folder"
            )
        self._join()
        self._start(session)
        self._complain()
        if wait:
            self.wait()

    def step(self, session: AnySession, *, every: int) -> None:
        """Save each ``every`` updates, and after a signal of ``on_signal``; call it on all ranks
        after each ``session.step()``, also where that did not update.

        ``every`` counts ``session.common_updates``: under ``local`` also those that one rank alone
        has skipped, and with ``stretch`` those of all ranks. There nothing is saved, and no signal
        stops the ranks, once one has closed its session.

        Raises:
            SystemExit: a rank has got a signal, and the checkpoint is complete.
            CheckpointError, UsageError: as `save`.
        """
        if every < 1:
            raise UsageError(f"every={every}: must be at least 1 update")
        self._bind(session)
        if not session.between_updates:  # after a flush(): in the next window
            return
        now, before = session.common_updates, self._seen
        if now == before:
            return
        self._seen = now
        saves = now // every > before // every
        if (saves or self._signals.wanted) and not self._attendance.complete():
            return
        number = self._signals.due() if self._signals.wanted else 0
        if number:
            self._signals.forget()  # what follows says how it ended
        if number or saves:
            self.save(session, wait=bool(number))
        elif self._writing is not None and not self._writing.is_alive():
            self._join()
            if self._failed and not self._warned:  # the error comes where all ranks save
                self._warned = True
                warn(self._failed)
        if number:
            raise SystemExit(128 + number)

    def wait(self) -> None:
        """Return when what is being written is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self._join()
        self._complain()

    def close(self) -> None:
        """Wait for what is being written; ``session.close()`` does this.

        Raises:
            CheckpointError: it could not be written.
        """
        self._signals.close()
        self._join()
        self._leave()
        self._complain()

    def report_rows(self) -> Sequence[Row]:
        """Report how many were written."""
        note = f"{self._written} written, the newest {self._keep} are kept"
        return [Row("checkpoints", str(self._folder.path), note)]

    def _abandon(self) -> None:
        """Do as `close`, after an error. The threads of all ranks finish what they have begun: one
        that is gone ends them by an error."""
        self._signals.abandon()
        self._join()
        self._leave()
        if self._failed and not self._warned:
            warn(self._failed)
        self._signals.forget()  # the error ends the script

    def _leave(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            self._folder.release(claim)
        self._session = self._group = None
        self._found, self._restored = (), False

    def _bind(self, session: AnySession) -> None:
        """Belong to a session until that is closed; a collective where it is new."""
        if self._session is session:
            return
        if self._session is not None:
            raise UsageError(
                "these are the checkpoints of another session, which is open: make Checkpoints "
                "with a folder of their own for this one"
            )
        contents.check_places(session, self._also)
        self._group = session.beside(self, self._abandon)
        self._session, self._seen = session, 0
        self._found = self._look(session.rank)
        local = session.strategy.local
        if local is not None and local.stretch:
            self._attendance = ends = Attendance()
            ends.begin(session.beside(ends, ends.abandon))
        if self._signals.wanted:
            self._signals.install(session.beside(self._signals, self._signals.abandon))
            session.afterwards(self._signals.pass_on)

    def _look(self, rank: int) -> Sequence[Path]:
        """Find the checkpoints that are there, on rank 0 for all; what killed runs left goes."""
        found: Sequence[Path] = ()
        error = ""
        if rank == 0:
            try:
                self._folder.path.mkdir(parents=True, exist_ok=True)
                if self._claim is None:
                    self._claim = self._folder.claim()
                self._folder.sweep()
                found = self._folder.complete()
            except CheckpointError as failure:
                error = str(failure)
            except OSError as failure:
                error = (
                    f"rank 0 cannot use the folder {self._folder.path} for checkpoints "
                    f"({type(failure).__name__}: {failure}); name one that it can write"
                )
        (found, error), *_ = self._gather((found, error), "the checkpoints that are there")
        if error:
            raise CheckpointError(error)
        return found

    def _gather(self, value: Any, what: str) -> list[Any]:
        return [value] if self._group is None else gather_objects(value, what, self._group)

    def _whole(self, session: AnySession, path: Path) -> tuple[str, list[dict[str, Any]]]:
        """The states in a checkpoint, or why no rank takes it, in words; alike on all ranks."""
        saved: list[dict[str, Any]] = []

        def verify() -> None:
            check(path, session.rank, session.world_size)

        def load() -> None:
            saved.extend(storage.load(path))

        for step in (verify, load):
            found = self._gather(_error_of(step), "the check of a checkpoint")
            errors = [(of, f"rank {rank}: {words}") for rank, (of, words) in enumerate(found)]
            if now := [words for of, words in errors if of == "now"]:
                raise CheckpointError(
                    f"the checkpoint {path} cannot be read now ({now[0]}), and may be whole; see "
                    "that every rank can read it, and has memory for all of it, and start again, "
                    "or move it away to go on from the one before it"
                )
            if broken := [words for of, words in errors if of == "broken"]:
                return broken[0], []
        return "", saved

    def _start(self, session: AnySession) -> None:
        """Copy the state, and let a thread write it."""
        error: Exception | None = None
        kept: contents.KeptEntries = {}
        pieces: dict[str, torch.Tensor] = {}
        try:
            state, kept = contents.collected(session, self._also)
            pieces = parts.cut(state, session.rank)
        except Exception as failure:  # of any kind: the other ranks wait for this one's answer
            error = failure
        if self._group is not None:
            agree({}, self._group, error)
            contents.check_alike(session, self._also, kept, self._group)
        elif error is not None:
            raise error
        count = session.common_updates
        writer = storage.CheckpointWriter(self._folder, count, self._keep)
        with torch.device("cpu"):  # whatever the script's default device is
            staged = writer.stage(pieces)
        self._writing = Writing(staged, writer, self._group, count)
        self._writing.start()

    def _join(self) -> None:
        """Wait for the thread; remember its failure."""
        if (writing := self._writing) is None:
            return
        writing.join()
        self._writing = None
        if not writing.failures:
            self._written += 1
            return
        where = "; ".join(
            f"{'this rank' if rank is None else f'rank {rank}'}: {text}"
            for rank, text in writing.failures.items()
        )
        self._warned = False
        self._failed = (
            f"the checkpoint after update {writing.updates} was not written to "
            f"{self._folder.path} ({where}); {advice(where, self._keep)}. Those before it are as "
            "they were"
        )

    def _complain(self) -> None:
        failed, self._failed = self._failed, None
        if failed:
            raise CheckpointError(failed)


def _error_of(step: Callable[[], None]) -> tuple[Literal["", "broken", "now"], str]:
    """Whether a checkpoint is broken, or cannot be read now, and why, in words."""
    try:
        step()
    except BrokenCheckpoint as error:
        return "broken", str(error)
    except (Exception, CheckpointException) as error:  # the one of torch is no Exception
        why = "; ".join(storage.failures(error).values())
        return "now" if storage.of_the_machine(error) else "broken", why
    return "", ""
