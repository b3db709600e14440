"""What people write around a session: old verbs, windows that do not come out even, interrupts.

Each is compared with one process on the joined batch, or refused.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import slipstream
from slipstream.errors import SlipstreamError, UsageError
from tests.harness.ranks import Ranks

STRATEGIES = {"flat": {}, "sharded": {"transport": "sharded"}, "half": {"codec": "half"}}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batches(count: int = 4) -> torch.Tensor:
    """By micro-batch and rank."""
    return torch.randn(count, 2, 3, 5, generator=torch.Generator().manual_seed(1)).double()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def plain(windows: list[list[int]], skipped: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """One process: an update for each window of micro-batches, of which every rank has one."""
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = batches(1 + max(itertools.chain(*windows)))
    for window in windows:
        losses = [loss_of(model, x) for micro in window for x in data[micro]]
        torch.stack(losses).mean().backward()
        if window[0] not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def opened(gradients: dict[str, Any], **strategy: Any) -> tuple[nn.Module, Any, Any]:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"gradients": gradients, **strategy}
    return model, optimizer, slipstream.accelerate(model, optimizer, strategy=given)


def assert_equal(model: nn.Module, expected: list[torch.Tensor], lossy: bool = False) -> None:
    atol = 1e-3 if lossy else 1e-12
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=atol, atol=atol)


# The old verbs.


def old_verbs(name: str, to_none: bool) -> None:
    model, optimizer, session = opened(STRATEGIES[name])
    with session:
        for batch in batches():
            session.backward(loss_of(model, batch[dist.get_rank()]))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        assert session.report()
        assert session.state_dict()["steps"] == 4
    assert_equal(model, plain([[0], [1], [2], [3]]), lossy=name == "half")


def grad_scaler(name: str, inf_at: int) -> None:
    """torch's own loop: it skips the update of a batch whose gradients are infinite on a rank."""
    model, optimizer, session = opened(STRATEGIES[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    with session:
        for number, batch in enumerate(batches()):
            rank = dist.get_rank()
            loss = loss_of(model, batch[rank])
            if number == inf_at and rank == 1:
                loss = loss * torch.inf
            session.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    windows = [[0], [1], [2], [3]]
    assert_equal(model, plain(windows, skipped=(inf_at,)), lossy=name == "half")
    if inf_at >= 0:
        assert scaler.get_scale() < 32


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_old_verbs_after_backward_are_an_update(two: Ranks, name: str, to_none: bool) -> None:
    two.run(old_verbs, name, to_none)


def discarded(name: str, to_none: bool) -> None:
    """The script zeroes the gradients of a batch, and skips its update."""
    model, optimizer, session = opened(STRATEGIES[name])
    with session:
        for number, batch in enumerate(batches()):
            session.backward(loss_of(model, batch[dist.get_rank()]))
            if number == 1:
                optimizer.zero_grad(set_to_none=to_none)
            else:
                session.step()
        assert session.state_dict()["steps"] == 3
    assert_equal(model, plain([[0], [1], [2], [3]], skipped=(1,)), lossy=name == "half")


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_that_are_zeroed_are_no_update(two: Ranks, name: str, to_none: bool) -> None:
    two.run(discarded, name, to_none)


@pytest.mark.parametrize("inf_at", [-1, 0, 2, 3])
@pytest.mark.parametrize("name", ["flat", "half"])
def test_grad_scaler_of_torch(two: Ranks, name: str, inf_at: int) -> None:
    two.run(grad_scaler, name, inf_at)


def both_verbs() -> None:
    model, optimizer, session = opened({})
    with session:
        for batch in batches():
            session.backward(loss_of(model, batch[dist.get_rank()]))
            session.step()
            optimizer.step()  # left in the loop: there are no gradients any more
            optimizer.zero_grad()
    assert_equal(model, plain([[0], [1], [2], [3]]))


def test_old_verbs_left_behind_the_new_ones(two: Ranks) -> None:
    two.run(both_verbs)


def overflow_in_codec() -> None:
    """A codec finds the overflow: an ``optimizer.step()`` by hand must not update."""
    skip = {"nonfinite": "skip"}
    model, optimizer, session = opened({"codec": {"kind": "half", "dtype": "fp16"}}, checks=skip)
    with session:
        for number, batch in enumerate(batches()):
            loss = loss_of(model, batch[dist.get_rank()])
            session.backward(loss * 1e9 if number == 1 else loss)
            optimizer.step()
            optimizer.zero_grad()
        assert session.state_dict()["steps"] == 3
    assert_equal(model, plain([[0], [1], [2], [3]], skipped=(1,)), lossy=True)


def test_overflow_skips_a_step_by_hand(two: Ranks) -> None:
    two.run(overflow_in_codec)


def in_a_window(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    session.backward(loss_of(session.model, batch))
    optimizer.step()


def after_its_window(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    session.backward(loss_of(session.model, batch))
    session.step()
    optimizer.step()


def by_hand_first(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    for _ in range(2):
        session.backward(loss_of(session.model, batch))
        if session.sync_gradients:
            optimizer.step()
        session.step()


def clip_in_a_window(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    session.backward(loss_of(session.model, batch))
    session.clip_grad_norm_(1.0)


def clip_in_no_sync(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    with session.no_sync():
        session.backward(loss_of(session.model, batch))
        session.clip_grad_norm_(1.0)


def behind_no_sync(session: Any, batch: torch.Tensor) -> None:
    """The last pass of a window leaves its gradients on this rank."""
    session.backward(loss_of(session.model, batch))
    session.step()
    with session.no_sync():
        session.backward(loss_of(session.model, batch))


def step_behind_no_sync(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    behind_no_sync(session, batch)
    optimizer.step()


def clip_behind_no_sync(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    behind_no_sync(session, batch)
    session.clip_grad_norm_(1.0)


def clip_sums_by_torch(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    for _ in range(2):
        session.backward(loss_of(session.model, batch))
        nn.utils.clip_grad_norm_(session.model.parameters(), 1e-3)
        session.step()


def clip_sums_by_data(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    """As DINO does; torch counts no change."""
    for _ in range(2):
        session.backward(loss_of(session.model, batch))
        for parameter in session.model.parameters():
            parameter.grad.data.mul_(0.5)
        session.step()


def gradients_kept(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    for _ in range(4):
        session.backward(loss_of(session.model, batch))
        if session.sync_gradients:
            optimizer.step()
        else:
            session.step()


def with_closure(session: Any, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.step(lambda: loss_of(session.model, batch))


REFUSED: dict[str, tuple[Callable[..., None], list[str]]] = {
    "step in a window": (
        in_a_window,
        ["optimizer.step() inside an accumulation", "sync_gradients"],
    ),
    "step after a pass": (after_its_window, ["inside an accumulation window of 2"]),
    "both verbs": (by_hand_first, ["step() without a backward()", "leave one of the two out"]),
    "clip in a window": (clip_in_a_window, ["clip_grad_norm_() inside an", "sync_gradients"]),
    "clip in no_sync": (clip_in_no_sync, ["clip_grad_norm_() inside no_sync()"]),
    "step behind no_sync": (
        step_behind_no_sync,
        ["optimizer.step() inside a window whose last backward() was in no_sync()"],
    ),
    "clip behind no_sync": (clip_behind_no_sync, ["last backward() was in no_sync()"]),
    "torch clips in a window": (clip_sums_by_torch, ["0.weight was changed inside", "ends the"]),
    "data is clipped in a window": (clip_sums_by_data, ["0.weight was changed inside", "ends the"]),
    "no zero_grad()": (gradients_kept, ["still there", "optimizer.zero_grad()"]),
    "closure": (with_closure, ["optimizer.step(closure)", "without a closure"]),
}


def refusals(strategy: str) -> dict[str, str]:
    texts = {}
    for name, (misuse, _) in REFUSED.items():
        _, optimizer, session = opened({"accumulate": 2, **STRATEGIES[strategy]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is dropped at the end
            try:
                misuse(session, optimizer, batches()[0, dist.get_rank()])
            except UsageError as error:
                texts[name] = str(error)
            session.close()
    return texts


@pytest.mark.parametrize("strategy", ["flat", "sharded"])
def test_verbs_in_the_wrong_place_are_refused(two: Ranks, strategy: str) -> None:
    for texts in two.run(refusals, strategy):
        assert texts.keys() == REFUSED.keys()
        for name, (_, words) in REFUSED.items():
            assert [w for w in words if w not in texts[name]] == [], texts[name]


# Windows that do not come out even.


def flushed(name: str, epochs: int, passes: int) -> None:
    model, _, session = opened({"accumulate": 4, **STRATEGIES[name]})
    with session:
        for _ in range(epochs):
            for batch in batches(passes):
                session.backward(loss_of(model, batch[dist.get_rank()]))
                session.step()
            assert session.flush() == (passes % 4 != 0)
            assert not session.flush()
            session.state_dict()
    epoch = [list(range(passes))[i : i + 4] for i in range(0, passes, 4)]
    assert_equal(model, plain(epoch * epochs), lossy=name == "half")


@pytest.mark.parametrize(("epochs", "passes"), [(1, 2), (2, 6), (2, 4), (3, 1)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_window_is_flushed(two: Ranks, name: str, epochs: int, passes: int) -> None:
    two.run(flushed, name, epochs, passes)


def test_flush_on_one_process() -> None:
    model, _, session = opened({"accumulate": 4})
    with session:
        for batch in batches(6):
            session.backward((loss_of(model, batch[0]) + loss_of(model, batch[1])) / 2)
            session.step()
        assert session.flush()
    assert_equal(model, plain([[0, 1, 2, 3], [4, 5]]))


def test_what_close_drops_is_said() -> None:
    model, _, session = opened({"accumulate": 4})
    for batch in batches(6):
        session.backward(loss_of(model, batch[0]))
        session.step()
    with pytest.warns(UserWarning, match=r"2 of the 4 backward passes.*session\.flush\(\)"):
        session.close()


def test_a_loop_without_updates_is_refused_at_its_end() -> None:
    model, _, session = opened({})
    for batch in batches(4):
        session.backward(loss_of(model, batch[0]))
    with pytest.raises(UsageError, match=r"4 backward\(\) and no update"):
        session.close()


def test_a_loop_that_steps_in_sync_gradients_alone_is_warned() -> None:
    """There it stays False, as step() ends each pass of a window."""
    model, _, session = opened({"accumulate": 2})

    def train() -> None:
        for batch in batches(200):
            session.backward(loss_of(model, batch[0]))
            if session.sync_gradients:
                session.step()

    with pytest.warns(UserWarning, match=r"200 backward.*where session.sync_gradients is False"):
        train()
    with pytest.raises(UsageError, match=r"200 backward"):
        session.close()


def test_a_loop_that_breaks_off_in_its_first_window_is_warned() -> None:
    """As out of memory, after which a smaller batch is tried."""
    model, _, session = opened({})
    with session.no_sync():
        for batch in batches(3):
            session.backward(loss_of(model, batch[0]))
    with pytest.warns(UserWarning, match=r"no update has used, of the last backward passes; call"):
        session.close()


# What enters, leaves or changes.


def added(session: Any) -> None:
    session.model.append(nn.Linear(1, 1).double())


def grouped(session: Any) -> None:
    session.optimizer.add_param_group({"params": nn.Linear(1, 1).double().parameters()})


def replaced(session: Any) -> None:
    session.model[2].weight = nn.Parameter(session.model[2].weight.detach().clone())


def assigned(session: Any) -> None:
    state = {name: t.clone() for name, t in session.model.state_dict().items()}
    session.model.load_state_dict(state, assign=True)


def normed(session: Any) -> None:
    nn.utils.parametrizations.weight_norm(session.model[0])


def narrowed(session: Any) -> None:
    session.model.float()


def overwritten(session: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        session.model.float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def buffer_grown(session: Any) -> None:
    session.model[1].cache = torch.zeros(3)


CHANGES: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "a layer": (added, ["new: 3.weight, 3.bias", "accelerate() again"]),
    "a group": (grouped, ["group 1", "(1, 1)", "accelerate() again"]),
    "a parameter": (replaced, ["replaced: 2.weight", "or write into the parameter that is there"]),
    "assign=True": (assigned, ["replaced: 0.bias", "and 1 more"]),
    "weight_norm": (normed, ["new: 0.parametrizations.weight.original0", "gone: 0.weight"]),
    "dtype": (narrowed, ["was torch.float64", "is torch.float32"]),
    "parameters overwritten": (overwritten, ["replaced: 0.bias"]),
    "a buffer": (buffer_grown, ["buffer 1.cache", "(2,)", "(3,)", "plain attribute"]),
}


def changes(again: bool) -> dict[str, str]:
    texts = {}
    for name, (change, _) in CHANGES.items():
        model, optimizer, session = opened({})
        session.close()
        model[1].register_buffer("cache", torch.zeros(2))
        session = slipstream.accelerate(model, optimizer)
        batch = batches()[0, dist.get_rank()]
        session.backward(loss_of(model, batch))
        session.step()
        before = [p.detach().clone() for p in model.parameters()]
        change(session)
        try:
            session.backward(model(batch.to(next(model.parameters()).dtype)).square().mean())
            session.step()
        except UsageError as error:
            texts[name] = str(error)
        if name in ("a group", "a parameter"):
            for mine, theirs in zip(model.parameters(), before, strict=True):
                assert torch.equal(mine, theirs)
        session.close()
        if again and name in ("a layer", "dtype"):  # what the error advises
            optimizer = SGD(model.parameters(), lr=0.1)
            with slipstream.accelerate(model, optimizer) as session:
                session.backward(model(batch.to(next(model.parameters()).dtype)).square().mean())
                assert session.step()
    return texts


def test_what_enters_later_is_refused(two: Ranks) -> None:
    for texts in two.run(changes, True):
        assert texts.keys() == CHANGES.keys()
        for name, (_, words) in CHANGES.items():
            assert [w for w in words if w not in texts[name]] == [], texts[name]


class Norm(nn.Module):
    """Two heads behind a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 2)])
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.heads[0](h).square().mean(), self.heads[1](h).square().mean()


def two_losses(forwards: int, together: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two losses of one or of two forwards: each with its backward, or their sum."""
    model = Norm()
    optimizer = Adam(model.parameters(), lr=0.01)
    with slipstream.accelerate(model, optimizer) as session:
        for batch in batches():
            mine = batch[dist.get_rank()]
            if together:
                session.backward(sum(model(mine)))
                if forwards == 2:
                    model(mine)
            else:
                first, second = model(mine)
                session.backward(first, retain_graph=forwards == 1)
                session.backward(second if forwards == 1 else model(mine)[1])
            session.step()
        session.model.eval()
        outputs = [o.detach() for o in model(batches()[0, 0])]
    return [p.detach() for p in model.parameters()], [*model.buffers(), *outputs]


@pytest.mark.parametrize("forwards", [1, 2])
def test_two_losses_behind_a_batch_norm(two: Ranks, forwards: int) -> None:
    apart = two.run(two_losses, forwards, False)
    together = two.run(two_losses, forwards, True)
    for mine, theirs in zip(apart, together, strict=True):
        torch.testing.assert_close(mine[0], theirs[0])
    # running statistics are those of the first rank, on every rank
    for mine, theirs in zip(apart, apart[:1] * 2, strict=True):
        torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=0)


class Table(nn.Module):
    """Backward needs a buffer that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 6)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x.float()) * self.table).square().mean()


def skipped_beside_a_buffer() -> int:
    model = Table()
    optimizer = Adam(model.parameters(), lr=0.01)
    with slipstream.accelerate(model, optimizer) as session:
        for number, batch in enumerate(batches()):
            session.backward(model(batch[dist.get_rank()]))
            if number % 2:
                optimizer.zero_grad()
            else:
                session.step()
        optimizer.zero_grad()
        return session.state_dict()["steps"]


def test_a_skipped_update_leaves_buffers_to_the_next_graph(two: Ranks) -> None:
    assert two.run(skipped_beside_a_buffer) == [2, 2]


# Exceptions and interrupts.


class Failing(SGD):
    """Raises in its second step."""

    def __init__(self, *args: Any, error: type[BaseException], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.error, self.calls = error, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self.error("here")
        return super().step(closure)


def broken_step(strategy: str, error: type[BaseException]) -> str:
    model = model_of()
    optimizer = Failing(model.parameters(), lr=0.1, error=error)
    given = {"gradients": STRATEGIES[strategy]}
    session = slipstream.accelerate(model, optimizer, strategy=given)
    text = ""
    for batch in batches():
        try:
            session.backward(loss_of(model, batch[dist.get_rank()]))
            session.step()
        except error as caught:
            if isinstance(caught, SlipstreamError):
                text = str(caught)
    session.close()
    return text


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", ["flat", "half"])
def test_nothing_follows_a_broken_update(two: Ranks, strategy: str, error: type) -> None:
    expected = "update 2 was broken off"
    if error is KeyboardInterrupt:
        with pytest.raises(AssertionError, match=expected):
            two.run(broken_step, strategy, error)
    else:
        assert all(expected in text for text in two.run(broken_step, strategy, error))


def test_on_one_process_a_step_is_tried_again() -> None:
    model = model_of()
    optimizer = Failing(model.parameters(), lr=0.1, momentum=0.9, error=KeyboardInterrupt)
    with slipstream.accelerate(model, optimizer) as session:
        for number, batch in enumerate(batches()):
            session.backward((loss_of(model, batch[0]) + loss_of(model, batch[1])) / 2)
            if number == 1:
                with pytest.raises(KeyboardInterrupt):
                    session.step()
            session.step()
    assert_equal(model, plain([[0], [1], [2], [3]]))


def interrupted_exchange() -> str:
    """Rank 0 is interrupted while it waits for the exchange of its second update."""
    model, _, session = opened({})
    rank = dist.get_rank()
    text = ""
    for number, batch in enumerate(batches()):
        loss = loss_of(model, batch[rank])
        if number == 1 and rank == 0:
            wait = session._loop.engine._channel.wait

            def interrupt(wait: Callable[[], None] = wait) -> None:
                wait()
                raise KeyboardInterrupt

            session._loop.engine._channel.wait = interrupt
            with pytest.raises(KeyboardInterrupt):
                session.backward(loss)
            session._loop.engine._channel.wait = wait
            continue
        try:
            session.backward(loss)
            session.step()
        except SlipstreamError as error:
            text = str(error)
            break
        if number == 1:
            break  # the other rank has left
    session.__exit__(SystemExit, SystemExit(), None)
    return text


def test_an_interrupted_exchange_is_no_update(two: Ranks) -> None:
    texts = two.run(interrupted_exchange)
    assert "an earlier backward failed (KeyboardInterrupt" in texts[0]


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    hooks = nn.modules.module
    yield
    assert not hooks._global_parameter_registration_hooks
    assert not hooks._global_module_registration_hooks


def flushed_and_clipped(strategy: str) -> float:
    model, _, session = opened({"accumulate": 4, **STRATEGIES[strategy]})
    with session:
        for batch in batches(2):
            session.backward(loss_of(model, batch[dist.get_rank()]))
            session.step()
        before = [p.detach().clone() for p in model.parameters()]
        assert session.flush(max_norm=0.01)
        moved = [(p - q).square().sum() for p, q in zip(model.parameters(), before, strict=True)]
    return float(sum(moved) ** 0.5)


@pytest.mark.parametrize("strategy", ["flat", "sharded"])
def test_a_flush_clips_the_mean(two: Ranks, strategy: str) -> None:
    moved = two.run(flushed_and_clipped, strategy)
    assert moved == [pytest.approx(0.1 * 0.01, rel=1e-3)] * 2  # the learning rate, the norm


def test_gradients_from_before_are_refused_under_a_loss_scale() -> None:
    model, _, session = opened({})
    loss_of(model, batches()[0, 0]).backward()
    with session, pytest.raises(UsageError, match=r"0.weight has a gradient .*zero_grad\(\)"):
        session.backward(8 * loss_of(model, batches()[0, 0]), loss_scale=8.0)
