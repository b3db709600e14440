"""Parameters that come, go, change or are of an unusual kind."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse
from tests.conformance.models import WIDTH, Causal, Plug, Single, Tied


def _layer() -> nn.Linear:
    """A new layer, alike on both sides and on all ranks."""
    torch.default_generator.manual_seed(7)
    return nn.Linear(WIDTH, WIDTH)


@habit("a layer and its group added later", "not DDP")
def parameters_added(run: Loop) -> None:
    run.start()
    run.update(times=2)
    new = Plug(_layer())
    run.model.plugs.append(new)
    run.optimizer.add_param_group({"params": [*new.parameters()]})
    run.update(times=2)


@habit("a parameter replaced later", "not DDP")
def parameter_replaced(run: Loop) -> None:
    run.start()
    run.update(times=2)
    old = run.model.head.weight
    new = nn.Parameter(0.5 * old.detach().clone())
    run.model.head.weight = new
    for group in run.optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    run.update(times=2)


@habit("a parameter replaced, the optimizer forgotten", "not DDP")
def parameter_replaced_only(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.model.head.bias = nn.Parameter(run.model.head.bias.detach().clone())
    run.update(times=2)


@habit("weight_norm applied later", "not DDP")
def weight_norm(run: Loop) -> None:
    run.start()
    run.update(times=2)
    old = run.model.head.weight
    parametrizations.weight_norm(run.model.head)
    added = [*run.model.head.parametrizations.parameters()]
    for group in run.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not old]
    run.optimizer.add_param_group({"params": added})
    run.update(times=2)


@habit("weight_norm applied before")
def weight_norm_before(run: Loop) -> None:
    parametrizations.weight_norm(run.model.head)
    run.start()
    run.update(times=3)


@habit("orthogonal applied before")
def orthogonal_before(run: Loop) -> None:
    run.model.plugs.append(parametrizations.orthogonal(_layer()))
    run.start()
    run.update(times=3)


@habit("spectral_norm applied before", "whole forwards")
def spectral_norm(run: Loop) -> None:
    torch.default_generator.manual_seed(7)  # of its first vectors
    parametrizations.spectral_norm(run.model.head)
    run.start()
    run.update(times=3)


@habit("pruned later")
def pruned(run: Loop) -> None:
    """The weight is another one's product from then on; its parameter has a new name."""
    run.start()
    run.update(times=2)
    prune.l1_unstructured(run.model.head, "weight", amount=0.5)
    run.update(times=2)
    prune.remove(run.model.head, "weight")
    run.update()


@habit("load_state_dict(assign=True)", "not DDP")
def assigned(run: Loop) -> None:
    run.start()
    run.update(times=2)
    names = {id(p): name for name, p in run.model.named_parameters()}
    order = [[names[id(p)] for p in group["params"]] for group in run.optimizer.param_groups]
    state = {name: 0.5 * v for name, v in run.model.state_dict().items() if v.is_floating_point()}
    run.model.load_state_dict(state, assign=True, strict=False)
    now = dict(run.model.named_parameters())
    for group, of_group in zip(run.optimizer.param_groups, order, strict=True):
        group["params"] = [now[name] for name in of_group]
    run.update(times=2)


@habit("a parameter removed later", "unused")
def parameter_removed(run: Loop) -> None:
    run.model.plugs.append(Plug(_layer()))
    run.start(unused=True)
    run.update(times=2)
    del run.model.plugs[0]
    run.update(times=2)


@habit("frozen from the start")
def frozen(run: Loop) -> None:
    run.model.head.weight.requires_grad_(False)
    run.start()
    run.update(times=3)


@habit("frozen for a while")
def frozen_for_a_while(run: Loop) -> None:
    run.start(unused=True)
    run.update()
    run.model.head.requires_grad_(False)
    run.update()
    run.model.head.requires_grad_(True)
    run.update(times=2)


@habit("frozen between backward and step")
def frozen_before_step(run: Loop) -> None:
    """StyleGAN3 thaws a model for the backward passes of its turn alone."""
    run.start()
    for _ in range(3):
        run.model.requires_grad_(True)
        run.gradients()
        run.model.requires_grad_(False)
        run.step()
    run.model.requires_grad_(True)


@habit("thawed later", "not DDP")
def thawed(run: Loop) -> None:
    run.model.head.weight.requires_grad_(False)
    run.start(unused=True)
    run.update(times=2)
    run.model.head.weight.requires_grad_(True)
    run.update(times=2)


@habit("tied")
def tied(run: Loop) -> None:
    run.model.plugs.append(Tied(run.model))
    run.start()
    run.update(times=3)


@habit("unused for a while, or never used")
def unused_for_a_while(run: Loop) -> None:
    plug, never = Plug(_layer()), Plug(_layer())
    never.on = False
    run.model.plugs.extend([plug, never])
    run.start(unused=True)
    for on in (True, False, True, False):
        plug.on = on
        run.update()


@habit("unused on one rank", "same batches", "own batches")
def unused_on_one_rank(run: Loop) -> None:
    plug = Plug(_layer())
    run.model.plugs.append(plug)

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        plug.on = batch.rank == 0
        return mse(model, batch)

    run.start(unused=True)
    run.update(loss_of, times=3)


def _single(run: Loop, value: torch.Tensor) -> None:
    run.model.plugs.append(Single(value))
    run.start()
    run.update(times=3)


@habit("empty")
def empty(run: Loop) -> None:
    _single(run, torch.empty(0, 4))


@habit("0-dim")
def zero_dim(run: Loop) -> None:
    _single(run, torch.tensor(0.5))


@habit("complex")
def complex_(run: Loop) -> None:
    run.model  # noqa: B018 - the generator is the model's own before
    _single(run, torch.randn(WIDTH, dtype=torch.complex64))


@habit("mixed dtypes")
def mixed_dtypes(run: Loop) -> None:
    run.model  # noqa: B018
    _single(run, torch.randn(WIDTH, WIDTH, dtype=torch.float64))


@habit("not contiguous")
def not_contiguous(run: Loop) -> None:
    """Turned, and with holes in memory."""
    run.model.plugs.append(Single(torch.randn(WIDTH, WIDTH).t()))
    _single(run, torch.randn(WIDTH, 2 * WIDTH)[:, ::2])


@habit("default dtype float64")
def float64(run: Loop) -> None:
    torch.set_default_dtype(torch.float64)
    run.start()
    run.update(times=3)


@habit("a buffer with infinite values")
def infinite_buffer(run: Loop) -> None:
    run.model.plugs.append(Causal())
    run.start()
    run.update(times=3)


@habit("buffers of other sizes on one rank", "own batches", "not DDP")
def other_buffers(run: Loop) -> None:
    """Plain torch has one process, so nothing to compare with but the first rank's."""
    run.model.register_buffer("seen", torch.zeros(2))
    run.model.register_buffer("later", torch.ones(3))
    run.start()
    run.update()
    run.model.seen = torch.zeros(2 if run.plain or run.rank == 0 else 5)
    run.update(times=2)
