"""Parameters that are on their way: whoever reads one, by whatever road, gets its new value."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.errors import UsageError
from slipstream.sharding.pending import PendingParameter
from tests.harness.ranks import Ranks
from tests.harness.reference import digest
from tests.sharding.test_update import OPTIMIZERS, Model, batch, build, each, session_on, steps


def pending(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if type(p) is PendingParameter]


def saved(model: Model) -> Any:
    """The model itself, through a file."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def loss_of(model: Model) -> Callable[[Any], torch.Tensor]:
    return lambda parameters: functional_call(model, parameters, batch(0, 0))


def weight_of(model: Model) -> nn.Parameter:
    return model.head.weight


def square(weight: torch.Tensor) -> torch.Tensor:
    return weight.square().sum()


def written(model: Model) -> torch.Tensor:
    nn.init.ones_(model.head.bias)
    model.head.weight.mul_(0.5)
    return model.head.bias.sum() + model.head.weight.sum()


def compiled(model: Model) -> torch.Tensor:
    read = torch.compile(lambda: model.head.weight.sum(), backend="eager")
    return read()  # type: ignore[no-any-return]


READERS: dict[str, Callable[[Model], Any]] = {
    "operation": lambda m: m.head.weight.sum(),
    "state dict": lambda m: m.state_dict()["head.weight"].sum(),
    "list": lambda m: torch._foreach_norm(list(m.parameters()))[0],
    "data": lambda m: m.head.weight.data.sum(),
    "item": lambda m: m.head.weight[0, 0] + m.head.weight.sum(),
    "numpy": lambda m: torch.tensor(m.head.weight.detach().numpy().sum()),
    "copy": lambda m: copy.deepcopy(m).head.weight.sum(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).sum(),
    "write": lambda m: m.head.weight.data.clamp_(-0.1, 0.1).sum(),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m).module.head.weight.sum(),
    "functional": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), batch(0, 0)),
    "inference": lambda m: torch.inference_mode()(m)(batch(0, 0)).clone(),
    "attention": lambda m: m.attention(*[batch(0, 0)] * 3)[0].sum(),
    "pointer": lambda m: torch.tensor(m.head.weight.data_ptr() > 0) * m.head.weight.sum(),
    "clone": lambda m: m.head.weight.clone().sum(),
    "storage": lambda m: torch.tensor(m.head.weight.untyped_storage().tolist()).sum(),
    "file": lambda m: saved(m).head.weight.sum(),
    "write by hand": written,
    "grad of parameters": lambda m: grad(loss_of(m))(dict(m.named_parameters()))["head.weight"],
    "grad of kept parameters": lambda m: grad(square)(m.kept),
    "vjp": lambda m: vjp(square, m.kept)[1](torch.tensor(1.0))[0],
    "vmap": lambda m: vmap(square)(m.kept),
    "jacrev": lambda m: jacrev(torch.square)(m.kept[0]).sum(),
    "jacfwd": lambda m: jacfwd(torch.square)(m.kept[0]).sum(),
    "hessian": lambda m: hessian(square)(m.kept)[0].sum(),
    "grad of inputs": lambda m: grad(m)(batch(0, 0)),
    "vmap of inputs": lambda m: vmap(m)(batch(0, 0).unsqueeze(1)),
    "jvp of inputs": lambda m: jvp(m.head, (torch.ones(6),), (torch.ones(6),))[1],
    "grad of a closed-over parameter": lambda m: grad(lambda s: (s * m.kept).sum())(torch.ones(())),
    "trace": lambda m: torch.jit.trace(m, batch(0, 0))(batch(1, 0)),
    "export": lambda m: torch.export.export(m.head, (torch.ones(1, 6),)).module()(torch.ones(1, 6)),
    "fx": lambda m: make_fx(m.head)(torch.ones(1, 6))(torch.ones(1, 6)),
    "compiled reader": compiled,
    "eval": lambda m: m.eval()(batch(0, 0)) + m.train()(batch(0, 0)),
}
"""The road on which a value is read; ``kept`` is a reference from before the session."""


def read_after_a_step(reader: str) -> None:
    values = []
    for transport in ("direct", "sharded"):
        model = build()
        model.__dict__["kept"] = model.head.weight  # behind torch's registration
        update = OPTIMIZERS["adam"](model.parameters())
        with session_on(model, update, transport) as session:
            steps(session, 0, 1)
            assert bool(pending(model)) == (transport == "sharded")
            with torch.no_grad():
                values.append(READERS[reader](model))
            assert all(type(p) is not nn.Parameter or p.grad is None for p in model.parameters())
            steps(session, 1, 1)
        values.append(model.state_dict())
    assert torch.equal(values[0], values[2])
    assert all(torch.equal(values[1][key], values[3][key]) for key in values[1])


def test_whoever_reads_a_parameter_gets_its_new_value(two: Ranks) -> None:
    two.run(each, read_after_a_step, [(reader,) for reader in READERS])


def read_by_threads() -> None:
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    store = dist.distributed_c10d._get_default_store()
    found: list[torch.Tensor] = []
    readers = [
        threading.Thread(target=lambda: found.append(model.head.weight.detach().clone()))
        for _ in range(4)
    ]
    with session_on(model, update, "sharded") as session:
        steps(session, 0, 1)
        session.backward(model(batch(1, session.rank)))
        if session.rank == 1:
            store.wait(["read"])  # the others' shards are not here as long
        session.step()
        if session.rank == 0:
            for reader in readers:
                reader.start()
                reader.join(0.2)  # one that reads too early ends within that, mostly
            store.set("read", "")
            for reader in readers:
                reader.join()
        last = model.head.weight.detach().clone()
        steps(session, 2, 1)
    assert all(torch.equal(values, last) for values in found)


def test_threads_that_read_wait_for_the_same_values(two: Ranks) -> None:
    two.run(read_by_threads)


def parameters_arrive_one_by_one() -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    update = torch.optim.SGD(layers.parameters(), lr=0.1)
    gather = {"kind": "sharded", "gather": "per_layer"}
    seen: list[list[str]] = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(pending(layers)))
    with session_on(layers, update, gather) as session:
        session.backward(layers(torch.ones(2, 8)).sum())
        session.step()
        seen.clear()
        assert len(pending(layers)) == 8
        layers[0].weight.shape, layers[0].weight.grad, layers[0].weight.device  # no values
        assert len(pending(layers)) == 8
        layers(torch.ones(2, 8))
        assert [len(names) for names in seen] == [6, 4, 2, 0]


def test_a_layer_waits_for_its_own_parameters_alone(two: Ranks) -> None:
    two.run(parameters_arrive_one_by_one)


def trace_of_a_layer() -> None:
    model = build()
    with session_on(model, OPTIMIZERS["adam"](model.parameters()), "sharded") as session:
        steps(session, 0, 1)
        with pytest.raises(UsageError, match="trace it again"):
            torch.jit.trace(model.head, torch.ones(1, 6))
        traced: Any = torch.jit.trace(model.head, torch.ones(1, 6))
        assert torch.equal(traced(torch.ones(1, 6)), model.head(torch.ones(1, 6)))


def test_a_trace_that_torch_would_find_fault_with_is_refused(two: Ranks) -> None:
    two.run(trace_of_a_layer)


def interrupted() -> str:
    """Control-C while a parameter is awaited: who reads it again gets the new values."""
    model = build()
    with session_on(model, OPTIMIZERS["adam"](model.parameters()), "sharded") as session:
        steps(session, 0, 1)
        sharded: Any = session._loop.sharding.model
        segment = sharded._gather._segments[0]
        works, seen = segment.works.result(), []

        class Interrupted:
            def wait(self) -> None:
                works[0].wait()
                seen.append(1)
                raise KeyboardInterrupt

        segment.waits = iter([Interrupted(), *works[1:]])
        with pytest.raises(KeyboardInterrupt):
            model.head.weight.sum()
        assert pending(model)
        weight = model.head.weight.sum().item()
        assert not pending(model)
        assert weight == session.checkpoint("model")["model"]["head.weight"].sum().item()
        assert seen == [1]
    return digest(model)


def test_an_interrupted_wait_is_taken_up_again(two: Ranks) -> None:
    assert len(set(two.run(interrupted))) == 1


def shared_memory() -> None:
    """Values that are read through another tensor, known to the model, arrive at once."""
    memory = torch.zeros(24)
    model = nn.Linear(6, 2, bias=False)
    model.weight = nn.Parameter(memory.view(4, 6)[2:])
    for module in (model, nn.Linear(6, 2)):
        if module is not model:
            module.register_buffer("alias", module.weight.detach())
        with session_on(module, OPTIMIZERS["sgd"](module.parameters()), "sharded") as session:
            session.backward(module(torch.ones(1, 6)).sum())
            session.step()
            assert not pending(module)


def test_memory_of_two_tensors_arrives_at_once(two: Ranks) -> None:
    two.run(shared_memory)
