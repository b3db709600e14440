"""Under ``fully_shard``: to which parameters a codec owes, and which steps are updates."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from slipstream.adapters.fsdp2 import accelerate_fsdp
from slipstream.errors import ModelError, UsageError
from slipstream.trace import chrome
from tests.harness.ranks import Ranks

OWES: Any = {"gradients": {"codec": {"kind": "int4", "block": 8}}}


def made(*, recomputed: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """Two layers of the same size in one call of ``fully_shard``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    if recomputed:
        apply_activation_checkpointing(model, check_fn=lambda one: isinstance(one, nn.Linear))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        model(torch.randn(3, 4, generator=random)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def frozen_between() -> bool:
    """Whether a discriminator that is saved while its generator trains goes on bit for bit, in a
    run that loads it before it is trained, and in one that loads it while it is frozen."""
    model, optimizer = made()
    with accelerate_fsdp(model, optimizer, OWES) as exchange:
        trained(model, optimizer, 3)
        model.requires_grad_(False)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), exchange.state_dict()))
        model.requires_grad_(True)
        last = trained(model, optimizer, 3)
    ended = []
    for trains in (True, False):
        again, optimizer = made()
        model_state, optimizer_state, state = copy.deepcopy(kept)
        again.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        with accelerate_fsdp(again, optimizer, OWES) as exchange:
            again.requires_grad_(trains)
            exchange.load_state_dict(state)
            again.requires_grad_(True)
            ended.append(trained(again, optimizer, 3))
    return all(torch.equal(a, b) for end in ended for a, b in zip(last, end, strict=True))


def test_a_run_saved_while_its_parameters_are_frozen_goes_on(two: Ranks) -> None:
    assert two.run(frozen_between) == [True, True]


def owed_under_wrappers() -> list[bool]:
    """Whether what is owed is loaded into a model that is compiled, and one that is recomputed."""
    model, optimizer = made()
    with accelerate_fsdp(model, optimizer, OWES) as exchange:
        trained(model, optimizer, 2)
        kept = exchange.state_dict()
    same = []
    for again in (torch.compile(made()[0], backend="eager"), made(recomputed=True)[0]):
        with accelerate_fsdp(again, torch.optim.Adam(again.parameters()), OWES) as exchange:
            exchange.load_state_dict(kept)
            [units] = [state["units"] for state in exchange.state_dict().values()]
        [before] = [state["units"] for state in kept.values()]
        same.append(torch.equal(units["Sequential"]["error"], before["Sequential"]["error"]))
    return same


def test_a_state_is_of_the_same_modules_under_wrappers_of_torch(two: Ranks) -> None:
    assert two.run(owed_under_wrappers) == [[True, True]] * 2


def trained_in_turns() -> str:
    model, optimizer = made()
    model[2].requires_grad_(False)
    with accelerate_fsdp(model, optimizer, OWES):
        trained(model, optimizer, 2)
        model[2].requires_grad_(True)
        model[0].requires_grad_(False)
        with pytest.raises(ModelError) as caught:
            trained(model, optimizer, 1)
    return str(caught.value)


def test_what_is_owed_to_a_layer_never_goes_to_another_of_its_size(two: Ranks) -> None:
    for said in two.run(trained_in_turns):
        assert "since the pass before, 0.bias was frozen or unfrozen" in said
        assert "close() this exchange and make a new one" in said
        assert "else start_step begins anew" in said


def thawed() -> tuple[int, int, list[str], bool, str]:
    """Updates and exchanges of a new exchange that goes on from the state of one before a layer was
    thawed, what it warns of, whether it owes nothing at first; and what is said to the state of
    another model."""
    model, optimizer = made()
    model[2].requires_grad_(False)
    with accelerate_fsdp(model, optimizer, OWES) as exchange:
        trained(model, optimizer, 2)
        state = exchange.state_dict()
    model[2].requires_grad_(True)
    with accelerate_fsdp(model, optimizer, OWES) as exchange:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exchange.load_state_dict(state)
        [now] = exchange.state_dict().values()
        [unit] = now["units"].values()
        trained(model, optimizer, 1)
        [kept] = state.values()
        kept["units"]["Sequential"]["parameters"] = ["9.weight"]
        with pytest.raises(UsageError) as refused:
            exchange.load_state_dict(state)
    said = [str(one.message) for one in caught]
    return exchange.updates, unit["calls"], said, not unit["error"].any(), str(refused.value)


def test_after_thawing_a_new_exchange_goes_on_from_the_state_of_the_old_one(two: Ranks) -> None:
    for updates, calls, [said], owes_nothing, refused in two.run(thawed):
        assert (updates, calls, owes_nothing) == (3, 2, True)
        assert "Sequential: since this state was saved, 2.bias, 2.weight were frozen or" in said
        assert "this state is of ['9.weight']" in refused


def made_by_dcp(folder: str) -> int:
    model, optimizer = made()
    traced = {"trace": {"steps": 2, "skip": 0, "folder": folder}}
    with accelerate_fsdp(model, optimizer, traced) as exchange:
        get_optimizer_state_dict(model, optimizer)
        assert exchange.updates == 0
        trained(model, optimizer, 2)
    return exchange.updates


def test_the_step_in_which_dcp_makes_states_is_no_update(two: Ranks, tmp_path: Path) -> None:
    assert two.run(made_by_dcp, str(tmp_path)) == [2, 2]
    spans = [(e.step, e.name) for e in chrome.read(tmp_path / "trace.json").events if e.rank == 0]
    assert [sum(one == (step, "backward") for one in spans) > 0 for step in (0, 1)] == [True, True]


def in_windows() -> int:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = made()
    prepared = accelerator.prepare_optimizer(optimizer)
    with accelerate_fsdp(model, prepared) as exchange:
        for number in range(4):  # each pass is exchanged, each second one steps
            accelerator.gradient_state._set_sync_gradients(number % 2 == 1)
            trained(model, prepared, 1)
    return exchange.updates


@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="not installed: accelerate")
def test_steps_that_accelerate_leaves_out_are_no_updates(two: Ranks) -> None:
    assert two.run(in_windows) == [2, 2]


SIGNS: Any = {"gradients": {"codec": {"kind": "onebit", "start_step": 0, "block": 64}}}


def owed_after(strategy: Any, habit: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The parameters, and what is owed, after a loop; "clean" throws no gradients away."""
    model, optimizer = made()
    random = torch.Generator().manual_seed(dist.get_rank())
    others = torch.Generator().manual_seed(7 + dist.get_rank())
    with accelerate_fsdp(model, optimizer, strategy) as exchange:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=habit != "zeros")
            model(torch.randn(3, 4, generator=random)).square().mean().backward()
            if habit in ("two passes", "two passes, gone"):
                model(torch.randn(3, 4, generator=random)).square().mean().backward()
            optimizer.step()
            if habit == "skipped":
                optimizer.zero_grad()
            for _ in range(0 if habit in ("clean", "two passes") else 2):
                model(torch.randn(3, 4, generator=others)).mean().backward()
        [state] = exchange.state_dict().values()
    return whole(model), state["units"]["Sequential"]["error"]


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def thrown_away(habit: str) -> bool:
    clean = "two passes" if habit.startswith("two passes") else "clean"
    (theirs, owed), (ours, owed_here) = owed_after(SIGNS, clean), owed_after(SIGNS, habit)
    assert owed.any()
    return all(map(torch.equal, [*theirs, owed], [*ours, owed_here]))


@pytest.mark.parametrize("habit", ["of a generator's pass", "zeros", "skipped", "two passes, gone"])
def test_gradients_thrown_away_leave_no_trace(habit: str, two: Ranks) -> None:
    """As a discriminator's in its generator's pass, also where the state is saved behind that."""
    assert two.run(thrown_away, habit) == [True, True]


def used_by(who: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A loop whose model is stepped by the optimizer of the exchange, or by others."""
    model, optimizer = made()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=True)
    known: torch.optim.Optimizer = optimizer
    if who != "its own":
        known = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    if who == "in backward":
        for parameter in params:
            own = torch.optim.SGD([parameter], lr=0.1, foreach=True)

            def update(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
    random = torch.Generator().manual_seed(dist.get_rank())
    with accelerate_fsdp(model, known, SIGNS) as exchange:
        for _ in range(4):
            model(torch.randn(3, 4, generator=random)).square().mean().backward()
            if who == "nobody":
                with torch.no_grad():
                    for parameter in params:
                        assert parameter.grad is not None
                        parameter.add_(parameter.grad, alpha=-0.1)
            else:
                optimizer.step()
            optimizer.zero_grad()
        [state] = exchange.state_dict().values()
    return whole(model), state["units"]["Sequential"]["error"]


def used_alike(who: str) -> bool:
    (theirs, owed), (ours, owed_here) = used_by("its own"), used_by(who)
    assert owed.any()
    return all(map(torch.equal, [*theirs, owed], [*ours, owed_here]))


@pytest.mark.parametrize("who", ["another optimizer", "in backward", "nobody"])
def test_gradients_that_others_use_are_not_taken_for_thrown_away(who: str, two: Ranks) -> None:
    assert two.run(used_alike, who) == [True, True]


def met_late(late: bool) -> torch.Tensor:
    """What a rank owes after two passes of an update under HSDP; ``late``: replicas meet in the
    second one alone, and until then there is no ``.grad``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
    random = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerate_fsdp(model, optimizer, SIGNS) as exchange:
        for last in (False, True):
            model.set_requires_all_reduce(last or not late)  # type: ignore[operator]
            model(torch.randn(3, 4, generator=random)).square().mean().backward()
        optimizer.step()
        [state] = exchange.state_dict().values()
    error: torch.Tensor = state["units"]["Sequential"]["error"]
    return error


def test_gradients_that_replicas_get_later_are_not_taken_for_thrown_away(four: Ranks) -> None:
    for late, at_once in zip(four.run(met_late, True), four.run(met_late, False), strict=True):
        assert torch.equal(late, at_once)


def tensor_parallel(codec: Any, apart: bool) -> tuple[str, list[float]]:
    """What is said to a layer whose weight is split over tensor-parallel ranks and whose bias is
    not, ``apart``: each under its own ``fully_shard``; and its bias, whole, at the end."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=not apart), nn.LayerNorm(8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    for module in model if apart else ():
        fully_shard(module, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(mesh["data"].get_local_rank())
    try:
        with accelerate_fsdp(model, optimizer, {"gradients": {"codec": codec}}):
            for _ in range(3):
                model(torch.randn(4, 8, generator=random)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except ModelError as error:
        return str(error), []
    common: Any = model[2].bias
    return "", common.full_tensor().tolist()


@pytest.mark.parametrize("codec", ["int8", {"kind": "onebit", "start_step": 0, "block": 64}])
def test_blocks_do_not_mix_what_tensor_parallel_ranks_have_in_common(
    codec: Any, four: Ranks
) -> None:
    for said, _ in four.run(tensor_parallel, codec, False):
        assert "Sequential: 0.weight and 1.bias are not split alike" in said
        assert "choose the codec half or none" in said
    assert {said for said, _ in four.run(tensor_parallel, "half", False)} == {""}
    (said, first), *others = four.run(tensor_parallel, codec, True)
    assert (said, len(first)) == ("", 8)
    assert all(other == ("", first) for other in others)


def rounded_by_replicas() -> torch.Tensor:
    """What a rank owes after all had the same gradients: the errors of rounding."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codec = {"kind": "int8", "rounding": "stochastic", "error_feedback": True}
    with accelerate_fsdp(model, optimizer, {"gradients": {"codec": codec}}) as exchange:
        model(torch.randn(3, 64)).square().mean().backward()
        optimizer.step()
        [state] = exchange.state_dict().values()
    error: torch.Tensor = state["units"]["Linear"]["error"]
    return error


def test_replicas_round_by_random_streams_of_their_own(four: Ranks) -> None:
    """Else their errors would not average out."""
    first, _, its_replica, _ = four.run(rounded_by_replicas)
    assert first.any()
    assert not torch.equal(first, its_replica)
