"""Precision in a session: the battery, on one rank and on two, and what a user may do besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.errors import ModelError, SlipstreamError, StrategyError, UsageError
from slipstream.precision import model_precision
from slipstream.strategy import Strategy
from tests.harness.composed import composed
from tests.harness.counters import collectives
from tests.harness.models import MODELS
from tests.harness.ranks import Ranks
from tests.harness.reference import digest as bits
from tests.precision.battery import CASES, TYPES, build, here, holds, losses, same_everywhere, train

FP16 = {"dtype": "fp16", "emulate": True}
KINDS = pytest.mark.parametrize("kind", ["autocast", "half_weights"])
Case = dict[str, Any]


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "codec" not in str(c)])
def test_every_precision_holds_on_one_process(name: str) -> None:
    holds(CASES[name], "cpu")


@pytest.mark.parametrize("name", CASES)
def test_every_precision_holds_on_two_ranks(two: Ranks, name: str) -> None:
    two.run(holds, CASES[name], "cpu")


def opened(model: nn.Module, lr: float = 0.1, loader: Any = None, **config: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return slipstream.accelerate(model, optimizer, loader, config)


@pytest.mark.parametrize("name", [n for n in CASES if "plain" in n])
def test_it_learns(name: str) -> None:
    first, last = losses(CASES[name], "cpu")
    assert last < 0.5 * first


@KINDS
def test_a_model_that_is_never_called_is_refused(kind: str) -> None:
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
    with pytest.raises(ModelError, match=r"a ModuleDict has none.*in a session of its own"):
        opened(model, precision=kind)


# Against training in fp32.


def near_fp32(name: str, precision: Case) -> tuple[float, bool]:
    """How far parameters lie from those of a session in fp32, and whether ranks have the same."""
    case, trained = MODELS[name], []
    for config in (None, precision):
        torch.manual_seed(0)
        model = case.build()
        trained.append(model)
        with opened(model, precision=config, gradients={"split": "per_layer"}) as session:
            for step in range(3):
                session.backward(session.model(*case.batch(here(), step)))
                assert session.step()
    pairs = zip(*(model.parameters() for model in trained), strict=True)
    far = max(float((a - b).abs().max()) for a, b in pairs)
    return far, same_everywhere(trained[1].state_dict())


@pytest.mark.parametrize("exchange", ["half", "fp32"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "name", ["mlp", "conv_bn_channels_last", "tied", "frozen", "sparse", "unused_by_rank", "gpt2"]
)
def test_half_weights_train_as_fp32_within_their_rounding(
    two: Ranks, name: str, dtype: str, exchange: str
) -> None:
    precision = {"kind": "half_weights", "exchange": exchange, **FP16, "dtype": dtype}
    precision["loss_scale"] = {"kind": "static", "scale": 256}
    for far, same in two.run(near_fp32, name, precision):
        assert 0 < far < (0.02 if dtype == "bf16" else 0.002)
        assert same


# What travels.


def wire(precision: Case, codec: Any) -> list[int]:
    """Bytes of the exchange of 4096 weights, and of them and a flag as it was sent."""
    model = nn.Linear(64, 64, bias=False)
    with opened(model, precision=precision, gradients={"codec": codec}) as session:
        for _ in range(2):
            session.backward(session.model(torch.ones(1, 64)).sum())
            session.step()
        with collectives() as log:
            session.backward(session.model(torch.ones(1, 64)).sum())
        gradient = model.weight.grad
        assert gradient is not None
        assert gradient.dtype == torch.float32
        (segment,) = session.segments
        return [segment.wire_bytes, *(c.num_bytes for c in log if c.kind == "all_reduce")]


@pytest.mark.parametrize(
    ("settings", "codec", "width"),
    [
        ({}, None, 2),
        ({"exchange": "fp32"}, None, 4),
        ({"exchange": "fp32"}, "half", 2),
        ({}, "half", 2),
    ],
)
def test_gradients_travel_as_wide_as_they_are_told_to(
    two: Ranks, settings: Case, codec: Any, width: int
) -> None:
    for told, seen in two.run(wire, {"kind": "half_weights", **settings}, codec):
        assert (told, seen) == (4096 * width, 4097 * width)


def small_gradients(precision: Case | None, codec: Any, scale: float) -> Tensor:
    """A gradient that is 0 in fp16 unless it is scaled."""
    model = nn.Linear(4, 1, bias=False)
    by_hand = {} if precision else {"loss_scale": scale}
    with opened(model, precision=precision, gradients={"codec": codec}) as session:
        for _ in range(2):
            loss = session.model(torch.ones(1, 4)).sum() * 2.0**-26
            session.backward(loss * by_hand.get("loss_scale", 1.0), **by_hand)
            found = model.weight.grad.clone()
            assert session.step()
    return found


@pytest.mark.parametrize("codec", [None, {"kind": "half", "dtype": "fp16"}])
@pytest.mark.parametrize("kind", ["half_weights", "autocast", None])
def test_what_travels_in_fp16_keeps_the_loss_scale(
    two: Ranks, kind: str | None, codec: Any
) -> None:
    scale = {"kind": "static", "scale": 1024}
    precision = {"kind": kind, **FP16, "loss_scale": scale} if kind else None
    for gradient in two.run(small_gradients, precision, codec, 1024.0):
        assert torch.equal(gradient, torch.full((1, 4), 2.0**-26))


# What a user may do besides.


@KINDS
@pytest.mark.parametrize("dtype", TYPES)
def test_torchs_clipping_of_the_models_parameters_is_right(kind: str, dtype: str) -> None:
    precision = {
        "kind": kind,
        **FP16,
        "dtype": dtype,
        "loss_scale": {"kind": "static", "scale": 64},
    }
    model, _ = build("cpu")
    with opened(model, precision=precision) as session:
        session.backward(session.model(torch.ones(2, 6, dtype=torch.int64))["logits"].sum())
        norm = torch.nn.utils.get_total_norm(
            p.grad for p in model.parameters() if p.grad is not None
        )
        assert norm > 0.01
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01) == norm
        assert session.clip_grad_norm_(1.0) == pytest.approx(0.01, rel=1e-4)
        assert session.step()


def locally(kind: str) -> list[str]:
    """A window by hand under ``no_sync``, and one of the strategy."""
    found = []
    for accumulate in (1, 2):
        model, _ = build("cpu")
        precision = {"kind": kind, "loss_scale": {"kind": "static", "scale": 64}}
        with opened(model, precision=precision, gradients={"accumulate": accumulate}) as session:
            for step in range(4):
                x = torch.full((2, 6), step + here())
                loss = session.model(x)["logits"].square().mean()
                if accumulate == 1 and step % 2 == 0:
                    with session.no_sync():
                        session.backward(loss / 2)
                        session.step()
                else:
                    session.backward(loss / 2 if accumulate == 1 else loss)
                    session.step()
        found.append(bits(model))
    return found


@KINDS
def test_a_window_by_hand_is_that_of_the_strategy(two: Ranks, kind: str) -> None:
    for by_hand, by_strategy in two.run(locally, kind):
        assert by_hand == by_strategy


def two_losses(precision: Case) -> list[Tensor]:
    """Gradients of two losses one after the other, and of their sum."""
    found = []
    for calls in (2, 1):
        model, _ = build("cpu")
        with opened(model, precision=precision) as session:
            for _ in range(2):  # the first lays out the segments
                for number in range(calls):
                    output = session.model(torch.full((2, 6), here() + 1))["logits"]
                    losses = [output.square().mean(), output.mean()]
                    session.backward(losses[number] if calls == 2 else losses[0] + losses[1])
                weight = model.embedding.weight
                assert weight.grad is not None
                found.append(weight.grad.clone())
                session.step()
    return [(a - b).norm() / b.norm() for a, b in zip(found[:2], found[2:], strict=True)]


@KINDS
def test_losses_one_after_the_other_add_up(two: Ranks, kind: str) -> None:
    precision = {"kind": kind, **FP16, "loss_scale": {"kind": "static", "scale": 1024}}
    for far in two.run(two_losses, precision):
        assert max(far) < 0.01


def traced(folder: str) -> None:
    model, _ = build("cpu")
    trace = {"steps": 2, "skip": 1, "folder": folder}
    with opened(model, precision="half_weights", trace=trace) as session:
        assert train(session, "cpu", range(4)) == [True] * 4


def test_it_is_traced(two: Ranks, tmp_path: Path) -> None:
    two.run(traced, str(tmp_path))
    assert list(tmp_path.iterdir())


def uneven(precision: Case) -> tuple[int, bool]:
    """Rank 1 has one batch less; the last update is of rank 0's batch alone."""
    model, _ = build("cpu")
    batches = [torch.full((2, 6), step) for step in range(3 - here())]
    with opened(model, loader=batches, precision=precision) as session:
        for x in session.loader:
            session.backward(session.model(x)["logits"].square().mean())
            assert session.step()
        return session.state_dict()["steps"], same_everywhere(model.state_dict())


@KINDS
def test_a_rank_without_a_batch_stays_in_step(two: Ranks, kind: str) -> None:
    precision = {"kind": kind, **FP16, "loss_scale": {"kind": "static", "scale": 64}}
    assert two.run(uneven, precision) == [(3, True)] * 2


def test_the_scale_stays_in_a_window_and_a_loss_may_be_called_twice() -> None:
    model, _ = build("cpu")
    scale = {"kind": "dynamic", "init": 64, "incr_every_n": 1}
    config = {"precision": {"kind": "half_weights", **FP16, "loss_scale": scale}}
    with (
        composed("ModelPrecision") as made,
        opened(model, lr=1e-4, gradients={"accumulate": 2}, **config) as session,
    ):
        scales = []
        for _ in range(6):
            for _ in range(2):  # two losses of one pass
                session.backward(session.model(torch.ones(2, 6).long())["logits"].mean())
            session.step()
            scales.append(made[0].take(1.0))
    assert scales == [64, 128, 128, 256, 256, 512]


@KINDS
def test_a_static_scale_skips_too(kind: str) -> None:
    model, _ = build("cpu")
    precision = {"kind": kind, "loss_scale": {"kind": "static", "scale": 8}}
    with opened(model, precision=precision) as session:
        assert train(session, "cpu", range(3), poisoned=1) == [True, False, True]
        assert session.state_dict()["loss_scale"] == [8.0, 0, 0]


def test_without_a_loss_scale_nothing_is_checked() -> None:
    model, _ = build("cpu")
    allow = {"nonfinite": "allow"}
    with opened(model, precision="half_weights", checks=allow) as session:
        assert train(session, "cpu", range(2), poisoned=1) == [True, True]
        assert session.state_dict()["loss_scale"] is None
        session.load_state_dict({**session.state_dict(), "loss_scale": [2.0, 0, 0]})


# The overview, and mistakes.


def test_the_overview_says_what_became_of_it() -> None:
    model, _ = build("cpu")
    scale = {"kind": "static", "scale": 65536}
    precision = {"kind": "half_weights", **FP16, "float_modules": ["first"], "loss_scale": scale}
    with (
        composed("ModelPrecision") as made,
        opened(model, precision=precision, compute={"tf32": True}) as session,
    ):
        train(session, "cpu", range(2), poisoned=0)
        rows = {row.setting: row for row in made[0].report_rows()}
        report = session.report()
    assert session.report() == report  # closed
    assert rows["precision"].value == "fp16 weights"
    assert "0.000308 of 0.000484 M parameters are fp16" in rows["precision"].note
    assert rows["fp32"].note == "first, layer_norm, batch_norm"
    assert rows["loss scale"].value == "65536, 1 updates skipped"
    assert torch.cuda.is_available() or rows["tf32"].value == "inactive"
    assert all(setting in report for setting in rows)


def test_tf32_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.matmul.fp32_precision
    config = Strategy.load({"compute": {"tf32": True}})
    optimizer = torch.optim.SGD((model := nn.Linear(1, 1)).parameters())
    first, second = (
        model_precision.ModelPrecision(model, optimizer, None, config.compute) for _ in range(2)
    )
    assert first.report_rows()[0].value == "active"
    first.close()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    second.close()
    assert torch.backends.cuda.matmul.fp32_precision == before


REFUSED: dict[str, tuple[Case, list[str]]] = {
    "fp16 without instructions": (
        {"dtype": "fp16"},
        ["hundreds of times", "dtype bf16, or emulate: true"],
    ),
    "a module that is none": ({"float_modules": ["frist"]}, ["'frist'", "did you mean 'first'?"]),
    "half of a tied parameter": ({"float_modules": ["decoder"]}, ["decoder.weight", "list both"]),
}


@KINDS
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_precision, "has_fp16", lambda device: False)
    settings, words = REFUSED[name]
    model, _ = build("cpu")
    if kind == "autocast" and "tied" in name:
        opened(model, precision={"kind": kind, **settings}).close()
        return
    with pytest.raises(StrategyError) as caught:
        opened(model, precision={"kind": kind, **settings})
    assert [word for word in words if word not in str(caught.value)] == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_function_that_is_none_is_refused() -> None:
    with pytest.raises(StrategyError, match="did you mean 'gelu'"):
        opened(build("cpu")[0], precision={"kind": "autocast", "float_ops": ["gelo"]})


def test_bf16_on_a_machine_without_it_is_slow_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.precision.model_precision.has_bf16", lambda device: False)
    with pytest.warns(UserWarning, match="slower than fp32"):
        opened(build("cpu")[0], precision="autocast").close()


def test_two_loss_scales_are_refused() -> None:
    model, _ = build("cpu")
    with opened(model, precision={"kind": "autocast", **FP16}) as session:
        loss = session.model(torch.ones(2, 6).long())["logits"].mean()
        with pytest.raises(
            UsageError, match=r"loss_scale=8\.0, but the strategy has a precision\.loss_scale"
        ):
            session.backward(loss * 8, loss_scale=8.0)


def one_rank_is_wrong() -> str:
    """Only rank 1's model lacks the module."""
    model = nn.Sequential(nn.Linear(1, 1), *[nn.Tanh()] * (1 - here()))
    try:
        opened(model, precision={"kind": "half_weights", "float_modules": ["1"]})
    except SlipstreamError as error:
        return str(error)
    return ""


def test_all_ranks_hear_of_a_mistake_on_one(two: Ranks) -> None:
    assert ["matches no module" in text for text in two.run(one_rank_is_wrong)] == [True, True]
