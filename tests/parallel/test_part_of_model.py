"""What would take a rank's part of a model for the whole is refused, and names the right verb."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import slipstream
from slipstream.errors import ExchangeError, UsageError
from slipstream.session.session import Session
from tests.harness.ranks import Ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor": {"ranks": 2, "plan": {"1": "column", "3": "row"}}}},
    "pipeline": {"parallel": {"pipeline": {"ranks": 2, "cut": ["3"], "micro_batches": 2}}},
}
X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(1, 0, 8).view(4, 2)

S = Session[nn.Sequential, torch.optim.SGD]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers)


def opened(kind: str, **gradients: Any) -> S:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return slipstream.accelerate(
        model, optimizer, strategy={**CONFIGS[kind], "gradients": gradients}
    )


def backward(session: S) -> None:
    session.forward_backward(F.mse_loss, (X,), target=Y)


STATE, LOAD, COPY = (
    r"state_dict\(\) of a model that ranks share .* session\.checkpoint\(",
    r"load_state_dict\(\) of a model that ranks share .* session\.restore\(",
    r"a copy or a pickle .* of a model that ranks share .* session\.checkpoint\(",
)
REFUSED: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
    "state": (lambda model: model.state_dict(), STATE),
    "loaded": (lambda model: model.load_state_dict(build().state_dict()), LOAD),
    "deepcopy": (copy.deepcopy, COPY),
    "copy": (copy.copy, COPY),
    "pickle": (pickle.dumps, COPY),
    "save": (lambda model: torch.save(model, io.BytesIO()), COPY),
    "average": (AveragedModel, COPY),
    "inside another": (lambda model: copy.deepcopy([nn.Sequential(model)]), COPY),
}


def refuses(kind: str) -> None:
    session = opened(kind)
    before = session.checkpoint("model")["model"]
    for use, message in REFUSED.values():
        with pytest.raises(UsageError, match=message):
            use(session.model)
    if kind == "tensor" or dist.get_rank() == 0:  # else the layer is whole here
        for use, message in ((lambda layer: layer.state_dict(), STATE), (copy.deepcopy, COPY)):
            with pytest.raises(UsageError, match=message):
                use(session.model[3])
    session.restore({"model": before})
    session.close()
    copied = copy.deepcopy(session.model)
    copied.load_state_dict(session.model.state_dict())
    pickle.dumps(session.model)
    for name, value in copied.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_and_copies_of_a_part_are_refused(two: Ranks, kind: str) -> None:
    two.run(refuses, kind)


def clips(kind: str, accumulate: int) -> None:
    message = r"all \d gradients .* call session\.clip_grad_norm_\(max_norm\)"
    session = opened(kind, accumulate=accumulate)
    model = session.model
    backward(session)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(UsageError, match=message):
        session.step() if accumulate == 1 else (session.step(), backward(session))
    session.close()


def changes(kind: str) -> None:
    """Each on its own, which is right on every rank, one of them, none, and by the session."""
    session = opened(kind)
    model = session.model

    def assigned() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clamp(-0.1, 0.1)

    def one() -> None:
        next(p.grad for p in model.parameters() if p.grad is not None).mul_(0.5)

    for change in (assigned, one, lambda: None, lambda: session.clip_grad_norm_(0.1)):
        backward(session)
        change()
        assert session.step()
    backward(session)
    session.optimizer.zero_grad(set_to_none=False)
    backward(session)
    session.step()
    session.close()


@pytest.mark.parametrize("kind", CONFIGS)
def test_clipping_by_the_norm_of_a_part_is_refused(two: Ranks, kind: str) -> None:
    two.run(clips, kind, 1)
    two.run(clips, kind, 2)
    two.run(changes, kind)


def absent() -> None:
    with opened("pipeline") as session:
        model, rank = session.model, dist.get_rank()
        here, there = (model[0].weight, model[3].weight)[:: 1 if rank == 0 else -1]
        name = "0.weight" if rank else "3.weight"
        assert torch.isfinite(here).all()
        assert isinstance(there, nn.Parameter)
        assert there.shape == ((4, 3) if rank else (2, 4))
        assert there.grad is None
        there.register_hook(lambda gradient: gradient)
        model.requires_grad_(False)
        model.requires_grad_(True)
        other = torch.optim.AdamW(model.parameters())
        other.zero_grad()
        for use in (
            lambda: there.sum(),
            lambda: there.detach(),
            lambda: there.data,
            lambda: there.mul_(2),
            lambda: setattr(there, "data", torch.zeros(there.shape)),
            lambda: torch._foreach_norm([there]),
            lambda: torch.cat([here.flatten(), there.flatten()]),
            lambda: copy.deepcopy(there),
            lambda: pickle.dumps(there),
            lambda: nn.utils.parameters_to_vector(model.parameters()),
        ):
            with torch.no_grad(), pytest.raises(UsageError) as caught:
                use()
            assert "session.checkpoint(" in str(caught.value)
            if use.__code__.co_names[:1] != ("nn",):
                assert f"of parameter {name} were" in str(caught.value)
                assert f"but rank {1 - rank} has them" in str(caught.value)
        backward(session)
        session.step()
    assert type(there) is nn.Parameter
    assert torch.isfinite(there).all()


def test_parameters_of_other_stages_have_no_values(two: Ranks) -> None:
    two.run(absent)


class Stopped(Exception):
    pass


def fails(kind: str, error: type[BaseException]) -> None:
    """In the backward of the last layer, on the rank that has it, or on the second one."""
    session = opened(kind)
    backward(session)
    session.step()

    def stop(*_: object) -> None:
        raise error("in the middle")

    if dist.get_rank():
        session.model[3].register_full_backward_pre_hook(stop)
    try:
        with pytest.raises(error, match="in the middle"):
            backward(session)
        for verb in (
            lambda: backward(session),
            session.step,
            lambda: session.checkpoint("model"),
            lambda: session.checkpoint("optimizer"),
            lambda: session.evaluate(X),
        ):
            with pytest.raises(UsageError, match=f"out of step .* {error.__name__}: in the middle"):
                verb()
    finally:
        session.close()  # so that the other one, which waits, is told
    raise RuntimeError("done")


@pytest.mark.parametrize(
    ("kind", "error"), [*zip(CONFIGS, (Stopped, KeyboardInterrupt), strict=True)], ids=[*CONFIGS]
)
def test_a_rank_that_left_a_backward_pass_goes_no_further(
    two: Ranks, kind: str, error: type[BaseException]
) -> None:
    errors = two.fail(fails, kind, error)
    assert isinstance(errors[0], ExchangeError)
    assert str(errors[1]) == "done"


def hooked() -> None:
    """A row layer is another module, with the same hooks: those of before, of later, removed."""
    model, calls = build(), []
    plain = build()
    for net in (model, plain):
        net[3].register_forward_hook(lambda module, args, y: 2 * y)
        net[3].register_forward_pre_hook(lambda module, args: calls.append("before"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = model[3]
    with slipstream.accelerate(model, optimizer, strategy=CONFIGS["tensor"]) as session:
        assert session.model[3] is not layer
        later = session.model[3].register_forward_hook(lambda module, args, y: y + 1)
        torch.testing.assert_close(model(X), plain(X) + 1)
        later.remove()
        torch.testing.assert_close(model(X), plain(X))
        with torch.inference_mode():
            torch.testing.assert_close(model(X), plain(X))
    assert model[3] is layer
    torch.testing.assert_close(model(X), plain(X))
    assert calls == ["before"] * 8


def test_hooks_of_a_replaced_layer_stay(two: Ranks) -> None:
    two.run(hooked)


def transforms() -> None:
    with opened("tensor") as session:
        model = session.model.eval()
        expected = build()(X)
        _, pull = torch.func.vjp(model, X)
        torch.testing.assert_close(
            pull(torch.ones(4, 2)), torch.func.vjp(build(), X)[1](torch.ones(4, 2))
        )
        for use in (
            lambda: torch.func.vmap(lambda x: model(x.unsqueeze(0))[0])(X),
            lambda: torch.jit.trace(model, (X,)),
        ):
            with pytest.raises(
                UsageError, match=r"a transform of torch\.func or torch\.jit\.trace"
            ):
                use()
        torch.testing.assert_close(model(X), expected)


def test_transforms_that_follow_no_exchange_are_refused(two: Ranks) -> None:
    two.run(transforms)


class ByName(nn.Module):
    """Calls its layers by name, and reads their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(6, 4, padding_idx=1), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(input=self.embed(input=words))
        x = self.down(input=self.up(input=x).tanh())
        return x * self.down.out_features + self.embed.norm_type


def named() -> None:
    torch.manual_seed(0)
    model, words = ByName(), torch.arange(6).view(2, 3)
    expected = model(words)
    plan = {
        "embed": "vocabulary",
        "norm": {"kind": "sequence", "enter": True, "leave": True},
        "up": "column",
        "down": "row",
    }
    tensor = {"tensor": {"ranks": 2, "plan": plan}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, strategy={"parallel": tensor}):
        torch.testing.assert_close(model(words), expected)
        assert (model.down.in_features, model.up.out_features) == (4, 4)
        with pytest.raises(UsageError, match="called with x by name; allowed: its input by pos"):
            model.up(x=expected)
    assert model.down.in_features == 8


def test_layers_are_called_by_name_and_have_their_attributes(two: Ranks) -> None:
    two.run(named)
