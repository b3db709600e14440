"""Sharded training whose peers fail: an error that names the place, on all other ranks, no hang."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from slipstream.errors import ExchangeError, UsageError
from slipstream.sharding.gather import ParameterGather
from tests.harness.ranks import RankFailure, Ranks
from tests.sharding.test_reads import pending
from tests.sharding.test_update import OPTIMIZERS, batch, build, session_on, steps


def meet_before_the_last_dies() -> None:
    """A process that ends takes with it what others have not read: the last waits for them."""
    token = torch.zeros(1)
    if dist.get_rank() == 2:
        for rank in (0, 1):
            dist.recv(token, rank)
    else:
        dist.send(token, 2)


def killed(between_phases: bool) -> None:
    """The last rank dies before it sends its gradients, or after that and before its parameters."""
    model = build()
    session = session_on(model, OPTIMIZERS["adam"](model.parameters()), "sharded")
    steps(session, 0, 2)
    meet_before_the_last_dies()
    if session.rank == 2:
        if between_phases:
            ParameterGather.start = lambda _: os._exit(1)  # type: ignore[method-assign]
            steps(session, 2, 1)
        os._exit(1)
    with pytest.raises(ExchangeError) as caught:
        steps(session, 2, 2)
    session.__exit__(ExchangeError, caught.value, None)
    assert "failed: rank 2 (host" in str(caught.value), str(caught.value)
    assert not pending(model)
    if between_phases:
        for use in (model.state_dict, lambda: model(batch(0, 0))):
            with pytest.raises(UsageError, match=r"the last update of .* has not arrived"):
                use()
        model.load_state_dict(build().state_dict())
        model.state_dict()


@pytest.mark.parametrize("between_phases", [False, True])
def test_a_rank_that_dies_ends_the_others(three: Ranks, between_phases: bool) -> None:
    with pytest.raises(RankFailure) as failure:
        three.run(killed, between_phases)
    assert failure.value.errors == {2: "the process died"}, failure.value


def failing_step() -> None:
    """An optimizer that raises leaves whole parameters behind; other ranks may have gone on."""
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    shapes = [p.shape for p in model.parameters()]
    with session_on(model, update, "sharded") as session:
        session.backward(model(batch(0, session.rank)))
        update.param_groups[0]["lr"] = "fast"
        with pytest.raises((TypeError, RuntimeError)):
            session.step()
        assert [p.shape for p in model.parameters()] == shapes
        with pytest.raises(UsageError, match="update 1 was broken off"):
            steps(session, 1, 1)
    assert [p.shape for p in model.parameters()] == shapes


def test_parameters_are_whole_after_an_optimizer_that_raised(three: Ranks) -> None:
    three.run(failing_step)
