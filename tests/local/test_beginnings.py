"""Rounds begin with the model that the script has loaded, alike on all ranks, and end for all."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import slipstream
from slipstream.errors import ExchangeError, ModelError
from slipstream.local.carrier import FixedCarrier
from tests.harness.ranks import Ranks
from tests.local.reference import flat
from tests.local.test_training import build, loss_of, sgd


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def another() -> nn.Module:
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return model


def still(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("warm_up", [0, 1])
def test_a_model_loaded_before_the_first_round_is_evaluated_and_saved(warm_up: int) -> None:
    model, other = build(), another()
    strategy = {"local": {"steps": 2, "warm_up": warm_up}}
    with slipstream.accelerate(model, still(model), None, strategy) as session:
        for update in range(warm_up):
            session.backward(loss_of(model, 0, update))
            session.step()
        model.load_state_dict(other.state_dict())
        with session.evaluating():
            assert torch.equal(flat(model.parameters()), flat(other.parameters()))
        model.load_state_dict(build().state_dict())
        model.load_state_dict(other.state_dict())
        saved = session.checkpoint()
    assert torch.equal(flat(saved["model"].values()), flat(other.state_dict().values()))
    [meeting] = saved["session"]["local"]["meetings"]
    assert meeting["outer"].sum().item() == pytest.approx(flat(other.parameters()).sum().item())


def test_a_state_of_plain_averaging_may_be_loaded_before_the_model() -> None:
    model = build()
    with slipstream.accelerate(model, sgd(model)) as session:
        for update in range(3):
            session.backward(loss_of(model, 0, update))
            session.step()
        saved = session.checkpoint()
    again = build()
    with slipstream.accelerate(again, still(again), None, {"local": {"steps": 2}}) as session:
        session.load_state_dict(saved["session"])
        again.load_state_dict(saved["model"])
        for update in range(4):
            session.backward(loss_of(again, 0, update))
            session.step()
    assert torch.equal(flat(again.parameters()), flat(model.parameters()))


def two_passes_an_update() -> Tensor:
    """Sharpness-aware minimisation by hand."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 4}}) as session:
        for update in range(4):
            session.backward(loss_of(model, session.rank, update))
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            session.backward(loss_of(model, session.rank, update))
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            session.step()
            if not update:
                with session.evaluating():
                    begun = flat(model.parameters())
        with session.evaluating():
            return torch.stack([begun, flat(model.parameters())])


def test_two_passes_an_update_begin_where_all_ranks_do(two: Ranks) -> None:
    first, second = two.run(two_passes_an_update)
    assert torch.equal(first, second)
    assert torch.equal(first[0], flat(build().parameters()))


def three_losses_of_a_graph() -> Tensor:
    """As gradient surgery (PCGrad) takes them: a meeting may be due in between."""
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 1}}) as session:
        for update in range(3):
            loss = loss_of(model, session.rank, update)
            for factor in (0.5, 2.0, 1.0):
                optimizer.zero_grad()
                session.backward(factor * loss.sin(), retain_graph=True)
            session.step()
        assert session.updates == 3
    return flat(model.parameters())


def test_no_meeting_changes_parameters_that_a_graph_still_needs(two: Ranks) -> None:
    first, second = two.run(three_losses_of_a_graph)
    assert torch.equal(first, second)


def set_at_the_end(copies: bool, local: dict[str, int]) -> None:
    """The best parameters, by ``data``, while a meeting is to end."""
    model = build()
    with (
        pytest.MonkeyPatch.context() as patch,
        slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4, **local}}) as session,
    ):
        patch.setattr(FixedCarrier, "arrived", False)  # of different speed, ranks wait
        for update in range(5):
            session.backward(loss_of(model, session.rank, update))
            session.step()
        for parameter in model.parameters():
            if copies:  # torch counts no such writes
                parameter.data.fill_(0.5)
            else:
                parameter.data = torch.full_like(parameter, 0.5)
    for parameter in model.parameters():
        assert (parameter == 0.5).all()


@pytest.mark.parametrize("local", [{"delay": 3}, {"stretch": 3}], ids=str)
@pytest.mark.parametrize("copies", [True, False])
def test_parameters_that_a_script_sets_at_the_end_stay(
    two: Ranks, copies: bool, local: dict[str, int]
) -> None:
    two.run(set_at_the_end, copies, local)


def with_a_change_on_its_way(swaps: bool) -> Tensor:
    model = build()
    local = {"steps": 4, "delay": 3}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(5):
            session.backward(loss_of(model, session.rank, update))
            session.step()
        for parameter in model.parameters() if swaps else ():  # as to evaluate an average
            own = parameter.detach().clone()
            parameter.data.mul_(0.5)
            parameter.data = own
    return flat(model.parameters())


def test_what_a_script_has_put_back_ends_with_the_change_on_its_way(two: Ranks) -> None:
    assert all(map(torch.equal, *(two.run(with_a_change_on_its_way, s) for s in (True, False))))


def by_two_optimizers() -> tuple[Tensor, Tensor]:
    """The mean of the ranks' parameters before the end, and the parameters after it."""
    model = build()
    first, second = SGD([model.scale], lr=0.1), SGD(model[1].parameters(), lr=0.1)
    local = {"steps": 4, "delay": 3}
    with slipstream.accelerate(model, first, None, {"local": local}) as session:
        for update in range(5):
            session.backward(loss_of(model, session.rank, update))
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
        mean = flat(model.parameters()) / 2
        torch.distributed.all_reduce(mean)
    return mean, flat(model.parameters())


def test_the_step_of_another_optimizer_loses_no_change_on_its_way(two: Ranks) -> None:
    for mean, found in two.run(by_two_optimizers):
        assert not torch.allclose(mean, found)


def without_an_update(updates: tuple[int, int]) -> Tensor:
    model = build()
    rank = torch.distributed.get_rank()
    local = {"steps": 2, "stretch": 2}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(updates[rank]):
            session.backward(loss_of(model, rank, update))
            session.step()
        own = flat(model.parameters())
    assert updates[rank] == 0 or torch.equal(flat(model.parameters()), own)
    return flat(model.parameters())


@pytest.mark.parametrize("updates", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_a_rank_without_an_update_ends_nobody(two: Ranks, updates: tuple[int, int]) -> None:
    first, second = two.run(without_an_update, updates)
    assert torch.equal(first, second)


def of_other_length(updates: tuple[int, int], fragments: int) -> None:
    model, rank = build(), torch.distributed.get_rank()
    local = {"steps": 4, "fragments": fragments, "delay": fragments - 1}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(updates[rank]):
            session.backward(loss_of(model, rank, update))
            session.step()


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_rank_that_closes_where_another_meets_ends_both_by_an_error(
    two: Ranks, fragments: int
) -> None:
    """gloo would abort the process that gets a message of another size."""
    found = two.fail(of_other_length, (9, 12), fragments)
    for rank, words in enumerate(["closes after update 9", "has closed its session"]):
        error = found[rank]
        assert isinstance(error, ExchangeError)
        assert words in str(error)
        assert "the same number of step() calls" in str(error)


# Updates of the first rank, and delay: it closes when the first meeting is over, while it has
# announced it, while a change travels.
ENDS = {"met": (7, 0), "announced": (5, 0), "on the way": (8, 2)}


def saved_now_and_then(folder: str, end: str, on_signal: tuple[int, ...]) -> list[str]:
    model = build()
    rank = torch.distributed.get_rank()
    updates, delay = ENDS[end]
    local = {"steps": 4, "stretch": 3, "delay": delay}
    checkpoints = slipstream.Checkpoints(folder, on_signal=on_signal)
    with (
        pytest.MonkeyPatch.context() as patch,
        slipstream.accelerate(model, sgd(model), None, {"local": local}) as session,
    ):
        patch.setattr(FixedCarrier, "arrived", False)  # ranks are ready to meet at updates 7, 14
        for update in range(updates + 8 * rank):
            session.backward(loss_of(model, rank, update))
            session.step()
            checkpoints.step(session, every=4)
        checkpoints.wait()
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("on_signal", [(), (signal.SIGUSR1,)], ids=["", "signals"])
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_goes_on_alone_saves_nothing(
    two: Ranks, tmp_path: Path, end: str, on_signal: tuple[int, ...]
) -> None:
    first, second = two.run(saved_now_and_then, str(tmp_path / "saved"), end, on_signal)
    assert first == second == (["update-00000014"] if end == "met" else [])


def test_parameters_that_share_memory_are_refused() -> None:
    """Tied by hand, as scripts of old did; meetings would change the one memory twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ModelError, match=r"0\.weight and 1\.weight have memory in common"):
        slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 2, "delay": 1}})
