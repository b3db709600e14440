"""``transport: auto`` changes to ``sharded`` and back while a model trains, without a trace."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import slipstream
from slipstream.errors import UsageError
from slipstream.optim import Lamb, Lars
from slipstream.session import exchanging
from slipstream.session.session import Session
from slipstream.strategy import ByIndexConfig, ShardedConfig
from slipstream.transport.place import Place
from slipstream.tuner import online_search
from tests.harness.ranks import Ranks
from tests.harness.reference import equal

UPDATES = 24
KEPT = UPDATES + 3
AUTO = {"gradients": {"transport": {"kind": "auto", "updates": UPDATES}}}
SHARDED = {"gradients": {"transport": "sharded"}}
TURN = {  # seconds of flat, direct, sharded, and sharded with a third replicated
    "sharded": (4.0, 3.0, 1.0, 2.0),
    "replicated": (4.0, 3.0, 2.0, 1.0),
    "flat": (1.0, 2.0, 3.0, 4.0),
}
Loop = Callable[["Training"], None]


class Training:
    """A model whose search measures what a test says."""

    def __init__(
        self,
        strategy: dict[str, Any],
        kept: str = "sharded",
        optimizer: Callable[..., Optimizer] = AdamW,
        state: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5), nn.LayerNorm(5), nn.Linear(5, 1)
        )
        self.model[2].bias.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        lr = 1.0 if optimizer is Adadelta else 1e-2
        extra = {"momentum": 0.9} if optimizer is SGD else {}
        self.optimizer = optimizer(trained, lr=lr, **extra)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                exchanging, "find_place", lambda dev, group: Place.apart(dev, group.size())
            )
            self.session: Session[Any, Any] = slipstream.accelerate(
                self.model, self.optimizer, strategy=strategy
            )
        if state is not None:
            self.session.restore(state)
        self.windows = iter(TURN[kept] * 2)
        self.number = 0
        self.other: Optimizer | None = None

    def loss(self) -> torch.Tensor:
        """Of the next batch of this rank."""
        self.number += 1
        start = float(10 * self.number + self.session.rank)
        return self.model(torch.linspace(start, start + 3, 32).sin().view(4, 8)).square().mean()

    def update(self, loop: Loop | None = None) -> None:
        """Once."""
        if loop is not None:
            loop(self)
            return
        self.session.backward(self.loss())
        self.session.step()

    def train(self, updates: int, loop: Loop | None = None) -> None:
        """Update ``updates`` times."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(online_search, "iterations", lambda trace: [next(self.windows)])
            for _ in range(updates):
                self.update(loop)

    def state(self) -> dict[str, Any]:
        """Everything, whole, on every rank."""
        return copy.deepcopy(self.session.checkpoint())


def trained(
    strategy: dict[str, Any],
    kept: str = "sharded",
    optimizer: Callable[..., Optimizer] = AdamW,
    updates: int = KEPT,
    loop: Loop | None = None,
) -> tuple[dict[str, Any], dict[str, Any], bool, str]:
    """State in the session, that of the optimizer after it, whether its state was cut, a report."""
    training = Training(strategy, kept, optimizer)
    training.train(updates, loop)
    state, report = training.state(), training.session.report()
    cut = type(training.optimizer.state).__name__ == "ShardState"
    training.session.close()
    return state, training.optimizer.state_dict(), cut, report


def zeroes_in_place(training: Training) -> None:
    """An update of a script that leaves zeros as gradients."""
    training.session.backward(training.loss())
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("kept", TURN)
def test_zeros_that_a_script_leaves_are_no_hindrance_to_a_change(two: Ranks, kept: str) -> None:
    flat = {"gradients": {"transport": "flat"}}
    pairs = (two.run(trained, one, kept, AdamW, KEPT, zeroes_in_place) for one in (AUTO, flat))
    for (found, *_), (expected, *_) in zip(*pairs, strict=True):
        torch.testing.assert_close(found["model"], expected["model"])


def steps_a_second_one_behind_it(training: Training) -> None:
    """A loop over several optimizers, of which `accelerate()` has got the first."""
    if training.other is None:
        bias = training.optimizer.param_groups[0]["params"].pop()
        training.other = SGD([bias], lr=1e-2)
    training.session.backward(training.loss())
    for optimizer in (training.optimizer, training.other):
        optimizer.step()
    training.model.zero_grad()


def test_a_second_optimizer_behind_the_first_hinders_a_change(two: Ranks) -> None:
    """It has no whole gradients there, and would end the run."""
    for *_, cut, report in two.run(
        trained, AUTO, "sharded", AdamW, KEPT, steps_a_second_one_behind_it
    ):
        assert not cut
        assert "looks at gradients" in " ".join(report.split())


OPTIMIZERS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta, ASGD, Rprop)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_state_after_the_change_is_that_of_a_run_that_began_so(
    two: Ranks, optimizer: type[Optimizer]
) -> None:
    changed = two.run(trained, AUTO, "sharded", optimizer)
    began = two.run(trained, SHARDED, "sharded", optimizer)
    for (state, closed, cut, report), (expected, expected_closed, *_) in zip(
        changed, began, strict=True
    ):
        assert cut
        assert "sharded kept" in " ".join(report.split())
        assert state["session"]["transport"]["kind"] == "sharded"
        assert equal(state["model"], expected["model"])
        assert equal(state["optimizer"], expected["optimizer"])
        assert equal(closed, expected_closed)


@pytest.mark.parametrize("optimizer", [Lars, Lamb], ids=lambda kind: kind.__name__)
def test_layerwise_optimizers_change_within_the_order_of_their_sums(
    two: Ranks, optimizer: type[Optimizer]
) -> None:
    changed = two.run(trained, AUTO, "sharded", optimizer)
    began = two.run(trained, SHARDED, "sharded", optimizer)
    for (state, _, cut, _), (expected, *_) in zip(changed, began, strict=True):
        assert cut
        for name, value in state["model"].items():
            torch.testing.assert_close(value, expected["model"][name])


@pytest.mark.parametrize("kept", ["flat", "replicated"])
def test_a_change_back_or_to_another_part_changes_no_bit(two: Ranks, kept: str) -> None:
    # Each of the two turns goes through both parts on its way.
    searched = two.run(trained, AUTO, kept)
    plain = two.run(trained, {})
    for (state, closed, cut, _), (expected, expected_closed, *_) in zip(
        searched, plain, strict=True
    ):
        assert cut == (kept == "replicated")
        assert equal(state["model"], expected["model"])
        assert equal(state["optimizer"], expected["optimizer"])
        assert equal(closed, expected_closed)


def accumulating(training: Training) -> None:
    """Two micro-batches by ``no_sync``, clipped, stepped by hand."""
    with training.session.no_sync():
        training.session.backward(training.loss())
    training.session.backward(training.loss())
    training.session.clip_grad_norm_(1.0)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=training.number % 4 == 0)


def skipping(training: Training) -> None:
    """Every third update is skipped by zeroing its gradients."""
    training.session.backward(training.loss())
    if training.number % 3:
        training.session.step()
    else:
        training.optimizer.zero_grad()


def scaled(training: Training) -> None:
    """Mixed precision, with an overflow."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = training.loss()
    training.session.backward(loss * 2.0**8, loss_scale=2.0**8)
    training.session.step()


@pytest.mark.parametrize("loop", [accumulating, skipping, scaled], ids=lambda loop: loop.__name__)
def test_what_users_do_beside_it(two: Ranks, loop: Loop) -> None:
    updates = KEPT + KEPT // 2
    changed = two.run(trained, AUTO, "sharded", AdamW, updates, loop)
    began = two.run(trained, SHARDED, "sharded", AdamW, updates, loop)
    for (state, closed, cut, _), (expected, expected_closed, *_) in zip(
        changed, began, strict=True
    ):
        assert cut
        torch.testing.assert_close(state["model"], expected["model"])
        torch.testing.assert_close(state["optimizer"], expected["optimizer"])
        if loop is not accumulating:  # the norm of shards is summed in another order
            assert equal(state["model"], expected["model"])
            assert equal(closed, expected_closed)


def resumed(at: int) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """States of an undisturbed run, and of one that goes on from a checkpoint after ``at``."""
    undisturbed = Training(AUTO)
    undisturbed.train(at)
    saved = undisturbed.state()
    undisturbed.train(KEPT + 4 - at)
    expected = undisturbed.state()
    undisturbed.session.close()
    again = Training(AUTO, state=saved)
    again.number = at
    again.train(KEPT + 4 - at)
    state = again.state()
    cut = type(again.optimizer.state).__name__ == "ShardState"
    again.session.close()
    return state, expected, cut


@pytest.mark.parametrize("at", [7, UPDATES, KEPT])
def test_a_run_goes_on_from_a_checkpoint_before_at_and_after_the_change(
    two: Ranks, at: int
) -> None:
    for state, expected, cut in two.run(resumed, at):
        assert cut  # also after a search that begins anew
        assert equal(state["model"], expected["model"])
        assert equal(state["optimizer"], expected["optimizer"])


def clipping(training: Training) -> None:
    """As plain scripts clip."""
    training.session.backward(training.loss())
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.session.step()


def logging(training: Training) -> None:
    """Rank 1 alone looks at a gradient."""
    training.session.backward(training.loss())
    if training.session.rank:
        assert training.model[0].weight.grad is not None
        training.model[0].weight.grad.norm()
    training.session.step()


def with_hook(training: Training) -> None:
    """A hook of the optimizer's step may look at anything."""
    if not training.number:
        training.optimizer.register_step_pre_hook(lambda *_: None)
    training.session.backward(training.loss())
    training.session.step()


@pytest.mark.parametrize("loop", [clipping, logging, with_hook], ids=lambda loop: loop.__name__)
def test_sharded_stays_out_where_the_script_does_what_it_refuses(two: Ranks, loop: Loop) -> None:
    for _, _, cut, report in two.run(trained, AUTO, "sharded", AdamW, KEPT, loop):
        assert not cut
        words = " ".join(report.split())
        assert "not sharded" in words
        assert "flat kept" in words  # of two that are left


def saved_and_copied() -> list[bool]:
    """What a script gets of a gradient in the first window, and finds after `close`."""
    training = Training(AUTO)
    gradient = training.model[0].weight.grad
    answers = []
    for look in (copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), torch.Tensor.clone):
        training.session.backward(training.loss())
        gradient = training.model[0].weight.grad
        assert gradient is not None
        before = gradient.detach().numpy().copy()
        copied = look(gradient)
        answers += [type(copied) is torch.Tensor, (copied.numpy() == before).all()]
        answers.append(type(gradient) is torch.Tensor)
        training.session.step()
    return answers


def test_a_gradient_that_is_copied_or_saved_is_a_plain_tensor(two: Ranks) -> None:
    for answers in two.run(saved_and_copied):
        assert all(answers)


def left_by(end: str) -> list[bool]:
    """Whether gradients are plain, and there, after a session that ended before its step()."""
    training = Training(AUTO)
    training.update()
    training.session.backward(training.loss())
    trained = [p for p in training.model.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    if end == "saving":  # which must not count as the script's look
        training.session.checkpoint("model")
    error = (ValueError, ValueError(), None) if end == "error" else (None, None, None)
    training.session.__exit__(*error)
    left = [p.grad for p in trained]
    assert all(type(gradient) is torch.Tensor for gradient in [*before, *left])
    return [torch.equal(b, g) for b, g in zip(before, left, strict=True) if b is not None]


@pytest.mark.parametrize("end", ["close", "error", "saving"])
def test_the_end_before_a_step_leaves_gradients(two: Ranks, end: str) -> None:
    for kept in two.run(left_by, end):
        assert kept
        assert all(kept)


def zeroing(training: Training) -> None:
    """Throws an update away, by zeros in place: nothing that `sharded` would refuse."""
    training.session.backward(training.loss())
    if training.number == 2:
        training.optimizer.zero_grad(set_to_none=False)
        training.session.backward(training.loss())
    training.session.step()


def test_zeroing_is_not_a_look(two: Ranks) -> None:
    for _, _, cut, report in two.run(trained, AUTO, "sharded", AdamW, KEPT, zeroing):
        assert cut, report


def refused(settings: dict[str, Any], optimizer: Callable[..., Optimizer]) -> str:
    """What the report says of a search without ``sharded``."""
    training = Training(settings, optimizer=optimizer)
    report = training.session.report()
    training.session.close()
    return " ".join(report.split())


def lookahead(parameters: Any, lr: float) -> Optimizer:
    """An optimizer of the user's own."""

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    return Own(parameters, lr=lr)


@pytest.mark.parametrize(
    ("settings", "optimizer", "reason"),
    [
        ({"precision": {"kind": "half_weights", "dtype": "bf16"}}, SGD, "fp32 copies"),
        ({"compute": {"fuse_optimizer": True}}, AdamW, "fuse_optimizer"),
        ({"gradients": {**AUTO["gradients"], "codec": "int8"}}, SGD, "codec int8"),
        ({}, lookahead, "Own"),
    ],
    ids=["half weights", "fused optimizer", "codec", "optimizer"],
)
def test_what_it_cannot_change_to_is_said(
    two: Ranks, settings: dict[str, Any], optimizer: Callable[..., Optimizer], reason: str
) -> None:
    for report in two.run(refused, AUTO | settings, optimizer):
        assert "not sharded" in report
        assert reason in report


def late_reader() -> str:
    training = Training(AUTO)
    training.train(KEPT)
    with pytest.raises(UsageError, match="transport: direct") as found:
        training.train(1, clipping)
    training.session.__exit__(UsageError, None, None)
    return str(found.value)


def test_what_a_script_does_later_is_refused_with_the_way_out(two: Ranks) -> None:
    for text in two.run(late_reader):
        assert "session.clip_grad_norm_" in text


def with_a_gather_for_other_parameters() -> str:
    """As a prediction may count them where weights and biases are ready in another order."""
    training = Training(SHARDED)
    sharding: Any = training.session._loop.sharding
    config = ShardedConfig(gather=ByIndexConfig(last=(1, 99)), replicated=0.33)
    training.train(1)
    sharding.use(config, sharding.model._transport, training.session._loop.engine)
    training.train(2)
    report = training.session.report()
    training.session.close()
    return " ".join(report.split())


def test_all_gathers_that_do_not_fit_are_those_by_default(two: Ranks) -> None:
    for report in two.run(with_a_gather_for_other_parameters):
        assert "MB updated here" in report
