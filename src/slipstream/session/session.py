"""The result of ``accelerate()``: the verbs of a training loop.

Techniques are installed by ``compose``; what a verb does inside is in ``loop`` and ``state``.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch
from torch import nn

from slipstream.cluster.connect import Cluster
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError, warn
from slipstream.gradients.segments import SegmentStats
from slipstream.kernels.surroundings import is_compiled
from slipstream.local.open_training import OpenTraining
from slipstream.parallel.dims import ParallelDims
from slipstream.session.checkpoint_format import Part, checked, joined
from slipstream.session.checkpointing import Checkpointing
from slipstream.session.handles import Handle, HandleStack
from slipstream.session.loop import TrainingLoop
from slipstream.session.state import SessionState
from slipstream.strategy import Row, Strategy, overview
from slipstream.strategy.overview import plain_text, summary
from slipstream.trace.event import Framework

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - the field's letter for it


class Session(Generic[M, O]):
    """A model, its optimizer and its loader under a strategy; made by ``slipstream.accelerate``.

    Attributes:
        model: the user's model, unchanged.
        optimizer: the user's optimizer.
        strategy: as ``accelerate()`` got it.
        rank: this process, from 0.
        world_size: how many processes train together.
        data_rank: which share of the data this rank trains on, from 0: ``rank``, unless ranks share
            a model.
        data_size: the number of shares; shard the data by ``data_rank`` and ``data_size``.

    A context manager: leaving it closes the session, after which verbs raise UsageError.
    """

    def __init__(
        self,
        model: M,
        optimizer: O,
        strategy: Strategy,
        *,
        cluster: Cluster,
        dims: ParallelDims,
        loader: UnevenInputLoader | None,
        loop: TrainingLoop,
        state: SessionState,
        handles: HandleStack,
    ) -> None:
        self.model, self.optimizer, self.strategy = model, optimizer, strategy
        self.rank, self.world_size = cluster.rank, cluster.world_size
        self.data_rank, self.data_size = dims.data_rank, dims.data_size
        self._skipped = 0  # of a closed session
        self._cluster, self._loader, self._loop = cluster, loader, loop
        self._state, self._checkpoints = state, Checkpointing(loop, state, self.rank)
        self._closed = False
        self._afterwards: list[Callable[[], object]] = []
        self._handles = handles.pop_all()  # from here on the session undoes the installation
        at_end = SystemExit, SystemExit(), None
        atexit.register(self.__exit__, *at_end)
        self._finalizer: Any = None
        if multiprocessing.parent_process() is not None:  # it ends without atexit
            self._finalizer = Finalize(None, self.__exit__, at_end, exitpriority=0)

    def join_others(self, local: OpenTraining) -> None:
        """Join jobs that come and go, and take over a share of their data; ``accelerate()``
        does."""
        try:
            local.join(self._checkpoints.gather, self._checkpoints.restore)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self.data_rank, self.data_size = local.slot % local.at_least, local.at_least

    def loop_is_of(self, framework: Framework) -> None:
        """Note in traces whose loop this is, and what that sets by itself; adapters do."""
        self._loop.tracer.loop_is_of(framework)

    # The loop.

    @property
    def loader(self) -> UnevenInputLoader:
        """The loader; it gives the same number of batches on every rank.

        Raises:
            UsageError: ``accelerate()`` got no loader.
        """
        if self._loader is None:
            raise UsageError(
                "this session has no loader; pass it: accelerate(model, optimizer, loader)"
            )
        return self._loader

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, loss_scale: float = 1.0
    ) -> None:
        """Compute gradients of ``loss / accumulate`` and, where an update follows, average them.

        On return ``parameter.grad`` holds the average over ranks (read it, clip it; with transport
        ``sharded`` a rank has its share alone, so call `clip_grad_norm_`); inside an accumulation
        window or ``no_sync`` it holds the sum of this rank so far. Called twice before
        ``step()``, the gradients add up (with a codec other than ``half`` that is refused: it would
        encode the first ones twice). With ``data.balance`` the loss counts by what the loader's
        last batch holds of the samples, or tokens, of all ranks.

        Args:
            loss: a tensor of one element.
            retain_graph: as in ``torch.Tensor.backward``.
            loss_scale: the factor by which you multiplied ``loss``, so that small gradients survive
                in fp16; averages come out divided by it, and ``step()`` skips the update if one
                overflowed. With a loss scale in the strategy the session does both by itself.

        Raises:
            UsageError: ``loss`` is not a scalar, the scale changed inside an accumulation window,
                the strategy has one, too, or a codec has sent this update's gradients already.
            MismatchError: ranks that share layers have different first losses.
            ExchangeError: another rank is gone, or the graph changed in a way that overlap cannot
                follow.
        """
        self._must_run_plainly("backward")
        _check_loss(loss)
        if self._loop.whole.pipeline is not None:
            raise UsageError(
                "backward() of a model that is cut into stages; call "
                "session.forward_backward(loss_fn, (inputs,), target=target) instead of forward, "
                "loss and backward"
            )
        if retain_graph and self.strategy.compute.compile:
            raise UsageError(
                "backward(retain_graph=True) with compute.compile: a compiled block frees what its "
                "backward has used; add the losses up for one backward(), or leave out compile"
            )
        with self._loop.running():
            self._loop.backward(loss, retain_graph=retain_graph, loss_scale=loss_scale)

    def forward_backward(
        self,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        target: Any = None,
        *,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Forward, ``loss_fn(output, target)`` and `backward` in one call.

        The way to train a model that is cut into stages; there every rank of a pipeline passes the
        same batch and gets the same loss.

        Args:
            loss_fn: a mean over samples; a pipeline calls it on the last stage, once per
                micro-batch.
            args: of the model; a pipeline splits tensors along their first axis.
            kwargs: of the model; split as ``args``.
            target: the second argument of ``loss_fn``; split as ``args``.
            loss_scale: gradients are computed of ``loss * loss_scale``; see `backward`.

        Returns:
            The loss, unscaled, without a graph. A pipeline returns NaN for a dummy batch of the
            loader, which it does not compute.

        Raises:
            UsageError: as `backward`.
            ExchangeError: another rank is gone, or a stage has failed.

        Example:
            >>> import torch, slipstream
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
            >>> with slipstream.accelerate(model, optimizer) as session:
            ...     loss = session.forward_backward(torch.nn.functional.mse_loss, (x,), target=y)
            ...     updated = session.step()
            >>> loss.shape, updated
            (torch.Size([]), True)
        """
        self._must_run_plainly("forward_backward")
        pipeline = self._loop.whole.pipeline
        if pipeline is not None:
            with self._loop.explaining():
                return self._loop.pipeline_backward(
                    pipeline, loss_fn, args, kwargs or {}, target, loss_scale=loss_scale
                )
        loss = loss_fn(self.model(*args, **(kwargs or {})), target)
        _check_loss(loss)
        scaled = loss * loss_scale if loss_scale != 1.0 else loss
        with self._loop.running():  # not by `backward`: warnings are of the line of the script
            self._loop.backward(scaled, retain_graph=False, loss_scale=loss_scale)
        return loss.detach()

    def step(self) -> bool:
        """Update the parameters and zero the gradients; call it after every ``backward``.

        Returns:
            True when parameters were updated; False inside an accumulation window or ``no_sync``,
            and where gradients were infinite or NaN on some rank, and a loss scale is at work or
            ``checks.nonfinite`` is ``skip``: all ranks then skip the update, and codecs return to
            the state before.

        Raises:
            UsageError: there was no backward since the last step.
            NonFiniteError: gradients were infinite or NaN on some rank, on all ranks.
        """
        self._must_run_plainly("step")
        with self._loop.running():
            return self._loop.step()

    def flush(self, max_norm: float | None = None) -> bool:
        """Update now, with what an accumulation window that is not full has gathered: the mean over
        its micro-batches. For the end of an epoch whose batches are no multiple of the window, and
        before a checkpoint. All ranks must call it.

        Args:
            max_norm: clip the mean first, as ``clip_grad_norm_`` does.

        Returns:
            Whether parameters were updated: False also where no window is open.

        Raises:
            UsageError: inside ``no_sync``, or with ``max_norm`` where codec ``dgc`` sends momentum.

        Example:
            >>> import torch, slipstream
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> strategy = {"gradients": {"accumulate": 4}}
            >>> with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
            ...     for batch in [torch.ones(4, 2)] * 6:
            ...         session.backward(session.model(batch).square().mean())
            ...         updated = session.step()
            ...     updated, session.flush()
            (False, True)
        """
        self._must_run_plainly("flush")
        with self._loop.running():
            return self._loop.flush(max_norm)

    @property
    def closed(self) -> bool:
        """Whether it is closed, and the model free for another session."""
        return self._closed

    @property
    def sync_gradients(self) -> bool:
        """Whether the ``step()`` after this backward, or after the next one, updates: False inside
        an accumulation window and ``no_sync``."""
        self._must_be_open("sync_gradients")
        return self._loop.window.update_follows

    @property
    def between_updates(self) -> bool:
        """Whether no gradients wait for an update: `checkpoint` and `restore` are allowed."""
        self._must_be_open("between_updates")
        self._loop.updates.settle()
        return not self._loop.window.open or self._loop.updates.left_out

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank and add up; the next backward outside averages them,
        or else ``step()`` or ``flush()``."""
        self._must_be_open("no_sync")
        with self._loop.no_sync():
            yield

    # State.

    def state_dict(self) -> dict[str, Any]:
        """State with which a resumed run continues bit for bit, beside the states of the model and
        the optimizer: the number of updates, ready order, split, loss scale, the codecs' state, and
        the place in the data.

        That is how many batches the present pass has given (under ``data.balance`` samples), or the
        ``state_dict()`` of a loader that has one; not their order, nor random numbers: see
        `restore`.

        The same on every rank, but that a loader's own state is that of the rank, and under
        ``local`` a rank that alone has skipped an update has its own number of updates, and its own
        loss scale. Call it on every rank: the codecs' state is gathered.

        Raises:
            UsageError: inside an accumulation window, whose gradients no checkpoint holds.
            ExchangeError: another rank is gone.
        """
        self._must_be_open("state_dict")
        self._checkpoints.check_window("state_dict")
        with self._loop.explaining():
            return self._state.state(self._loop.updates.count, "session.state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``; every rank loads the same state, but for what is its own,
        on any number of ranks.

        On another number of ranks, what codecs have not sent yet is dealt out among them, with a
        warning: its sum is preserved.

        Raises:
            UsageError: the state is another version's or another model's; or gradients are there
                that no update has used.
            MismatchError: ranks load different states.
        """
        self._must_be_open("load_state_dict")
        self._checkpoints.check_restore("load_state_dict")
        self._checkpoints.check_no_gradients("load_state_dict")
        with self._loop.explaining():
            self._state.meet("session.load_state_dict")
            self._state.check(state)
            self._checkpoints.load(state)

    def checkpoint(self, *parts: Part, sharded: bool = False) -> dict[str, Any]:
        """Collect the states of model, optimizer and session, with the place in the data, for any
        number of ranks; call it on all ranks. Random numbers are not in it;
        `slipstream.Checkpoints` has them, too. Tensors are those of the model, as in torch's
        ``state_dict()``: deepcopy what is to be kept while training goes on.

        Args:
            parts: some of ``model``, ``optimizer`` and ``session``; none: all of them. The first
                two have the form of torch's own ``state_dict()`` of the whole model; ``session`` is
                `state_dict`.
            sharded: ``optimizer`` is this rank's part where ranks share the update (transport
                ``sharded``), without communication; ``model`` and ``session`` are on rank 0 alone.
                Every rank saves its own, and `restore` takes those of all ranks.

        Raises:
            UsageError: no such part, an accumulation window is open, or shares of ranks would be
                gathered after a backward pass that has failed.
            MismatchError: other ranks have called something else, where there is something to
                gather; on every rank alike.

        Example:
            >>> import slipstream
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with slipstream.accelerate(model, optimizer) as session:
            ...     saved = session.checkpoint()
            ...     session.restore(saved)
            ...     list(session.checkpoint("model")["model"])
            ['weight', 'bias']
        """
        self._must_be_open("checkpoint")
        wanted = checked(parts)
        if "session" in wanted:  # before the rest is gathered
            self._checkpoints.check_window("checkpoint")
        if not sharded:
            self._checkpoints.check_whole(wanted)
        with self._loop.explaining():
            return self._checkpoints.gather(wanted, sharded=sharded)

    def restore(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `checkpoint`; every rank passes the same, and keeps its part.

        A state may have some of the parts alone, and ``model`` may be the ``state_dict()`` of a
        plain model. The loader goes on where it was: its next pass skips the batches that the pass
        had given when the state was saved. Their order is that of the sampler: the same one again
        with ``DistributedSampler.set_epoch``, a generator that is seeded by the epoch, or
        ``data.balance``; with ``shuffle=True`` alone another one, in which samples come twice or
        never. `slipstream.Checkpoints` lets torch's samplers draw the same one.

        Args:
            state: of `checkpoint`, or, of ``checkpoint(sharded=True)``, those of all ranks of the
                run, in any order.

        Raises:
            UsageError: no such part, a rank's part is missing or there twice, or gradients are
                there that no update has used.
            ModelError: the state is another model's.
            MismatchError: ranks load different states.

        A state that training has changed since, as it is the model itself, is refused: keep
        ``copy.deepcopy(session.checkpoint())``.
        """
        self._must_be_open("restore")
        self._checkpoints.check_restore("restore")
        with self._loop.explaining():
            self._state.meet("session.restore")
            self._checkpoints.restore(joined(state))

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of the whole model, also where ranks share it or its
        updates; call it between ``backward()`` and the ``step()`` that updates (where
        `sync_gradients` is True), on all ranks. Returns the norm before clipping.

        Raises:
            UsageError: inside an accumulation window, whose gradients are sums of this rank.
        """
        self._must_be_open("clip_grad_norm_")
        self._loop.check_clip()
        with self._loop.running():
            return self._loop.whole.clip_grad_norm_(max_norm)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, without a graph. Where the model is cut into stages, every rank
        passes the same batch and gets the output."""
        self._must_be_open("evaluate")
        with self._loop.explaining():
            return self._loop.whole.evaluate(args, kwargs)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model has the parameters that evaluate best: under ``local`` the outer ones,
        which are the same on every rank; else those that it has. Nothing is exchanged.

        Example:
            >>> import torch, slipstream
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with slipstream.accelerate(model, optimizer, strategy={"local": {}}) as session:
            ...     before = model.weight.detach().clone()
            ...     session.backward(session.model(torch.ones(4, 2)).square().mean())
            ...     updated = session.step()
            ...     with session.evaluating():
            ...         bool((model.weight == before).all())
            True
        """
        self._must_be_open("evaluating")
        if self._loop.local is None:
            self._loop.updates.settle()
        else:  # an update that the script has skipped on one rank alone ends before, not inside
            self._loop.updates.leave_out()
        with self._loop.whole.evaluating():
            yield

    # Beside training, report and end.

    def beside(
        self, handle: Handle, on_error: Callable[[], object]
    ) -> torch.distributed.ProcessGroup | None:
        """Make a group of all ranks, for CPU tensors, for what runs beside training; None: there is
        one rank. All ranks must call it. ``handle`` is closed before the session is, after an error
        by ``on_error``, and has rows in the report."""
        self._must_be_open("beside")
        self._handles.add(handle, on_error=on_error)
        return self._cluster.new_group(backend="gloo")

    def afterwards(self, act: Callable[[], object]) -> None:
        """Call ``act`` when the session has ended without an error and holds nothing any more."""
        self._must_be_open("afterwards")
        self._afterwards.append(act)

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """Which gradients are exchanged together; empty on one process and before the first
        exchange."""
        return self._last_segments if self._closed else self._loop.engine.segments

    @property
    def updates(self) -> int:
        """Updates of this rank so far, those before a `restore` included; where a loop goes on."""
        self._must_be_open("updates")
        return self._loop.updates.count

    @property
    def all_updates(self) -> int:
        """Updates of all ranks together: those that are in what all of them have. Under ``local``
        the last meeting counts, so that all ranks see the same numbers at the same meetings."""
        self._must_be_open("all_updates")
        if self._loop.local is not None:
            return self._loop.local.all_updates
        return self._loop.updates.count * self.data_size

    @property
    def common_updates(self) -> int:
        """Updates as all ranks count them alike, for what they do together every so often:
        `updates`; under ``local`` those that one rank has skipped, too, and with ``stretch``
        `all_updates`. Ask between updates, not between a forward and its backward."""
        self._must_be_open("common_updates")
        local = self._loop.local
        if local is None:
            return self._loop.updates.count
        # without a meeting, where it can be: this rank alone may ask
        self._loop.updates.settle(in_forward=not local.is_awaited)
        return local.common_updates(uncounted=self._loop.updates.uncounted)

    @property
    def skipped(self) -> int:
        """Updates that were skipped because of gradients that were not finite, or by the script."""
        return self._skipped if self._closed else self._loop.updates.skipped

    def report(self, *, full: bool = False) -> str:
        """Say what was asked for and what became of it, in plain text as wide as the terminal.

        Args:
            full: every setting with its meaning, those by default too.
        """
        rows = self._handles.report_rows()
        if self.skipped:
            why = "gradients were infinite or NaN, or the script zeroed them"
            rows.append(Row("skipped", f"{self.skipped} updates", why))
        return plain_text((overview if full else summary)(self.strategy, rows))

    def close(self) -> None:
        """Restore the model and the optimizer, and write an unfinished trace; idempotent.

        Where ranks share a model or its updates, or a trace is recorded, all ranks must call it.
        Warns of gradients that no update has used.

        Raises:
            UsageError: after several backward passes, none of which was ever followed by an update.
        """
        self.__exit__(None, None, None)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a session has process groups, threads and hooks, so it cannot be copied or pickled; "
            "copy session.model, or save session.checkpoint()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Undo what ``accelerate()`` did, in reverse order; after an error without collectives."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.__exit__)
        if self._finalizer is not None:
            self._finalizer.cancel()
        loop, cluster = self._loop, self._cluster
        if error[0] is None and loop.failed:  # an error that the script has caught
            error = (UsageError, UsageError("the ranks are out of step"), None)
        broken: BaseException | None = None
        if error[0] is None:
            try:  # an update that the script has skipped at the end counts
                loop.updates.settle()
            except BaseException as failure:
                error, broken = (type(failure), failure, None), failure
        complaint = loop.complaint() if error[0] is None else None
        in_flight = loop.engine.in_flight or loop.updates.in_flight
        self._last_segments = loop.engine.segments
        self._skipped = loop.updates.skipped
        try:
            self._handles.__exit__(*error)
        finally:
            # A gloo group ends its threads when its last reference goes; threads that are still
            # there when the interpreter ends abort the process, after a run that went well.
            del loop, self._loop, self._state, self._checkpoints, self._cluster
            if not in_flight:  # freeing a group that waits for a peer hangs
                cluster.close()
        if broken is not None:
            raise broken
        if isinstance(complaint, Exception):
            raise complaint
        if complaint is not None:
            warn(complaint)
        for act in self._afterwards if error[0] is None else ():
            act()

    def _must_be_open(self, verb: str) -> None:
        if self._closed:
            raise UsageError(
                f"{verb}() after close(); call slipstream.accelerate() again for a new session"
            )

    def _must_run_plainly(self, verb: str) -> None:
        """Refuse what exchanges where Dynamo would compile the exchange, in which ranks then
        hang."""
        self._must_be_open(verb)
        if is_compiled():
            raise UsageError(
                f"session.{verb}() inside a function that torch.compile compiles: give it the "
                "model, model.compile() before accelerate(), or a function that computes the loss "
                "alone, and call the session outside of it"
            )


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        seen = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
        raise UsageError(f"backward() takes a loss of one element, not {seen}; use loss.mean()")
