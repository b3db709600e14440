"""States of the optimizer that are loaded, and groups that are changed."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.habit import habit
from tests.conformance.loop import Loop
from tests.conformance.plain import trained


@habit("no habit: the straight road")
def straight_road(run: Loop) -> None:
    run.start()
    run.update(times=4)


@habit("own state of the optimizer loaded")
def own_state(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.update(times=2)


@habit("own state saved, loaded later")
def own_state_later(run: Loop) -> None:
    run.start()
    run.update()
    model = copy.deepcopy(run.model.state_dict())
    optimizer = copy.deepcopy(run.optimizer.state_dict())
    run.update(times=2)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.update(times=2)


@habit("states of a plain run loaded before")
def plain_state_before(run: Loop) -> None:
    model, optimizer = trained(run)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.start()
    run.update(times=3)


@habit("states of a plain run loaded after")
def plain_state_after(run: Loop) -> None:
    model, optimizer = trained(run)
    run.start()
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.update(times=3)


@habit("state in another memory order loaded")
def other_memory_order(run: Loop) -> None:
    model, optimizer = trained(run)
    run.start()
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(_reordered(optimizer))
    run.update(times=3)


@habit("state of the optimizer emptied", "optimizer's momentum")
def state_emptied(run: Loop) -> None:
    """As ReLoRA, Reptile and warm restarts do."""
    run.start()
    run.update(times=2)
    run.optimizer.state = defaultdict(dict)
    run.update()
    run.optimizer.state.clear()
    run.update()


def _reordered(state: dict[str, Any]) -> dict[str, Any]:
    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        # the same values, with the axes in memory the other way round
        turned = list(range(value.ndim))[::-1]
        return value.permute(turned).contiguous().permute(turned)

    each = {
        number: {name: other(value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": each}


@habit("states of another number of ranks", "session")
def other_world(run: Loop) -> None:
    run.start()
    run.load_from_other_world()
    run.update(times=3)


@habit("dict of a group replaced")
def group_dict_replaced(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.optimizer.param_groups[:] = [dict(group) for group in run.optimizer.param_groups]
    run.optimizer.param_groups[0]["lr"] *= 0.5
    run.update(times=2)


@habit("group added: parameters that were there")
def group_added(run: Loop) -> None:
    head = [*run.model.head.parameters()]
    for group in run.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is h for h in head)]
    run.start()
    run.update(times=2)
    run.optimizer.add_param_group({"params": head, "lr": 0.02})
    run.update(times=2)


@habit("state_dict() of the model loaded in the middle")
def model_loaded(run: Loop) -> None:
    run.start()
    run.update(times=2)
    halved = {
        name: 0.5 * value if value.is_floating_point() else value
        for name, value in run.model.state_dict().items()
    }
    run.model.load_state_dict(halved)
    run.update(times=2)


@habit("state_dict() of the model loaded between backward and step")
def model_state_loaded_over_gradients(run: Loop) -> None:
    before = copy.deepcopy(run.model.state_dict())
    run.start()
    run.update(times=2)
    run.gradients()
    run.model.load_state_dict(before)
    run.step()
    run.update()


@habit("weights written by vector_to_parameters", "contiguous")
def written_from_a_vector(run: Loop) -> None:
    """Afterwards they are parts of one tensor."""
    run.start()
    run.update(times=2)
    vector = nn.utils.parameters_to_vector(run.model.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * vector, run.model.parameters())
    run.update(times=2)


@habit("weights written by hand")
def weights_written(run: Loop) -> None:
    run.start()
    run.update(times=2)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.clamp_(-0.2, 0.2)
    run.update()
    for parameter in run.model.parameters():
        parameter.data = 0.5 * parameter.data
    run.update()
