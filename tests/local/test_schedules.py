"""Any schedule of meetings trains as the plain reference does, with unequal numbers of batches."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import slipstream
from slipstream.strategy import LocalConfig, Strategy
from tests.harness.ranks import Ranks
from tests.local.reference import Reference, flat
from tests.local.test_training import batch, build, sgd

RANKS = 2
Document = dict[str, object]


def loss_on(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1]) * model.scale
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def trained(local: Document, accumulate: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """This rank's parameters, and the outer ones, after so many batches by rank."""
    model, rank = build(), torch.distributed.get_rank()
    data = [batch(rank, number) for number in range(sizes[rank])]
    strategy = {"local": local, "gradients": {"accumulate": accumulate}}
    with slipstream.accelerate(model, sgd(model), data, strategy) as session:
        for words in session.loader:
            session.backward(loss_on(model, words))
            session.step()
        own = flat(model.parameters())
        with session.evaluating():
            outer = flat(model.parameters())
    return own, outer


def expected(
    local: Document, accumulate: int, sizes: tuple[int, ...]
) -> tuple[list[Tensor], Tensor]:
    """The same of the reference, for each rank."""
    config = Strategy.load({"local": local}).local
    assert isinstance(config, LocalConfig)
    reference = Reference(build, sgd, config, RANKS)

    def loss(model: nn.Module, rank: int, update: int) -> Tensor | None:
        first = (update - 1) * accumulate
        numbers = range(first, min(first + accumulate, sizes[rank]))
        losses = [loss_on(model, batch(rank, number)) for number in numbers]
        return torch.stack(losses).mean() if losses else None

    reference.train(loss, max(sizes) // accumulate)
    own = [reference.parameters(rank) for rank in range(RANKS)]
    for number, outer in enumerate(reference.outer):
        reference.write(0, number, outer)
    return own, reference.parameters(0)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Document, int, tuple[int, ...]]:
    steps = draw(st.integers(1, 6))
    fragments = draw(st.integers(1, min(steps, 4)))
    delay = draw(st.integers(0, steps // fragments))
    local: Document = {
        "steps": steps,
        "fragments": fragments,
        "delay": delay,
        "mix": draw(st.sampled_from([0.0, 0.25])),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "codec": draw(st.sampled_from([None, {"kind": "int4", "block": 8}])),
    }
    accumulate = draw(st.integers(1, 3))
    whole = accumulate * draw(st.integers(1, 9))
    shorter = draw(st.integers(1, whole))
    sizes = (whole, shorter) if draw(st.booleans()) else (shorter, whole)
    return local, accumulate, sizes


def test_any_schedule_trains_as_the_reference() -> None:
    with Ranks(RANKS) as ranks:

        @settings(max_examples=40, deadline=None)
        @given(schedules())
        def check(drawn: tuple[Document, int, tuple[int, ...]]) -> None:
            owns, shared = expected(*drawn)
            for (own, outer), like in zip(ranks.run(trained, *drawn), owns, strict=True):
                torch.testing.assert_close(own, like, rtol=1e-8, atol=1e-10)
                torch.testing.assert_close(outer, shared, rtol=1e-8, atol=1e-10)

        check()
