"""Loops under ``fully_shard``: our reduce-scatter changes no bit on two ranks, and sends half."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import BaseModel
from rich.console import Console
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from slipstream.adapters.fsdp2 import accelerate_fsdp
from slipstream.adapters.fsdp2_checks import REFUSED, check_device
from slipstream.advisor.advise import advise
from slipstream.analysis.breakdown import breakdown
from slipstream.analysis.summary import summary
from slipstream.errors import (
    ExchangeError,
    MismatchError,
    ModelError,
    StrategyError,
    TraceError,
    UsageError,
)
from slipstream.planner.forecast import Forecast
from slipstream.report.report import html
from slipstream.strategy import HalfConfig, Strategy
from slipstream.strategy.codec import SCATTERED
from slipstream.trace import chrome
from slipstream.trace.event import exchange_order
from slipstream.trace.timeline import timeline
from tests.harness.counters import collectives, count
from tests.harness.ranks import Ranks
from tests.planner.networks import profile, ring

ROOT = Path(__file__).parents[2]
PLAIN: Mapping[str, object] = {}


class Net(nn.Module):
    """Odd sizes, a frozen layer, a head tied to the embedding; blocks computed again if asked."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6))
            for _ in range(2)
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return self.head(self.frozen(x))


def made(
    *, again: bool = False, mesh: tuple[int, ...] | None = None, **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(again=again)
    shape = mesh or (dist.get_world_size(),)
    options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.03)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randint(11, (5, 4), generator=random)
        yield x, (x + 1) % 11


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]


Loop = Callable[..., list[torch.Tensor]]


def plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4
) -> list[torch.Tensor]:
    losses = []
    for x, y in batches(steps):
        losses.append(loss_of(model, x, y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def clipping_what_adds_up(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Two passes an update, the first one now exchanged, now not; then torch's own clipping."""
    noted = []
    for number, (x, y) in enumerate(batches(8)):
        model.set_requires_gradient_sync(number % 4 != 0)
        loss_of(model, x, y).backward()
        if number % 2:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            noted.append(norm.full_tensor())
            optimizer.step()
            optimizer.zero_grad()
    return noted


def failing_once(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The second backward raises halfway on all ranks, and training goes on."""
    losses = []
    for number, (x, y) in enumerate(batches(4)):

        def fail(_: torch.Tensor, raises: bool = number == 1) -> None:
            if raises:
                raise ArithmeticError

        hook = model.blocks[0][3].register_full_backward_pre_hook(lambda _, grads: fail(grads[0]))
        losses.append(loss_of(model, x, y))
        with suppress(ArithmeticError):
            losses[-1].backward()
            optimizer.step()
        hook.remove()
        optimizer.zero_grad()
        model.reset_iter_state()
    return losses


def updating_in_backward(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Each gradient is used and dropped as soon as it is there."""
    del optimizer
    for parameter in model.parameters():
        if parameter.requires_grad:
            own = torch.optim.SGD([parameter], lr=0.1)

            def update(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
    losses = []
    for x, y in batches(3):
        losses.append(loss_of(model, x, y))
        losses[-1].backward()
    return losses


def changed_by_a_hook(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    return plainly(model, optimizer)


def divided_by_torch(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)
    return plainly(model, optimizer)


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
HABITS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "a plain loop": (plainly, {}),
    "recomputed, not resharded": (plainly, {"again": True, "reshard_after_forward": False}),
    "bf16": (plainly, {"mp_policy": BF16}),
    "computed in bf16": (
        plainly,
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ),
    "fp16, predivided": (plainly, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}),
    "accumulation and clipping": (clipping_what_adds_up, {}),
    "an exception": (failing_once, {}),
    "updates in backward": (updating_in_backward, {}),
    "a hook": (changed_by_a_hook, {}),
    "divided by torch": (divided_by_torch, {}),
}


def trained(
    habit: str, strategy: Mapping[str, object] | None, **options: Any
) -> tuple[list[torch.Tensor], int]:
    """What a loop notes, then the parameters; and the bytes of gradients that were sent."""
    loop, settings = HABITS[habit]
    model, optimizer = made(**settings, **options)
    if strategy is None:
        return [*loop(model, optimizer), *whole(model)], 0
    with accelerate_fsdp(model, optimizer, strategy) as exchange:
        noted = loop(model, optimizer)
    return [*noted, *whole(model)], exchange.sent_bytes


def both(habit: str, mesh: tuple[int, ...] | None = None) -> tuple[list[float], bool]:
    """The largest differences from torch's own run, and whether each bit is the same."""
    theirs, ours = (trained(habit, s, mesh=mesh)[0] for s in (None, PLAIN))
    assert len(theirs) > 6
    assert all(tensor.isfinite().all() for tensor in theirs)
    pairs = list(zip(theirs, ours, strict=True))
    return [float((a - b).abs().max()) for a, b in pairs], all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("habit", HABITS)
def test_two_ranks_train_bit_for_bit_as_under_torchs_own(habit: str, two: Ranks) -> None:
    assert [same for _, same in two.run(both, habit)] == [True, True]


def test_a_mesh_of_two_dimensions(two: Ranks) -> None:
    """Of HSDP, whose all-reduce between replicas is torch's."""
    habit = "accumulation and clipping"
    assert [same for _, same in two.run(both, habit, (1, 2))] == [True, True]


def test_three_ranks_add_up_in_another_order_alone(three: Ranks) -> None:
    for differences, _ in three.run(both, "a plain loop"):
        assert max(differences) < 1e-5


def on_ranks_in_another_order() -> bool:
    ours = []
    for strategy in (None, PLAIN):
        backwards = dist.new_group([1, 0], sort_ranks=False)
        mesh = DeviceMesh.from_group(backwards, "cpu", mesh=torch.tensor([1, 0]))
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ExitStack() as stack:
            if strategy is not None:
                stack.enter_context(accelerate_fsdp(model, optimizer, strategy))
            model(torch.arange(8.0).view(2, 4)).square().mean().backward()
        ours.append([p.grad.to_local() for p in model.parameters()])
    return all(map(torch.equal, *ours))


@pytest.mark.skipif(
    "sort_ranks" not in signature(dist.new_group).parameters, reason="torch sorts all groups"
)
def test_the_ranks_of_a_mesh_keep_their_order(two: Ranks) -> None:
    assert two.run(on_ranks_in_another_order) == [True, True]


def beside_groups_of_some(on: Sequence[int], made_by: Sequence[int]) -> str:
    """Ranks ``on`` share a model, and those of ``made_by`` have a group more than others."""
    group = dist.new_group(on)
    dist.new_group(made_by)
    if dist.get_rank() not in on:
        return ""
    mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor(on))
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with accelerate_fsdp(model, optimizer, PLAIN) as exchange:
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            return f"{exchange.updates} update"
    except MismatchError as error:
        return str(error)


def test_ranks_with_different_numbers_of_groups_go_on_or_are_told(three: Ranks) -> None:
    """torch would wait for half an hour."""
    assert three.run(beside_groups_of_some, [0, 1, 2], [0, 2]) == ["1 update"] * 3
    assert three.run(beside_groups_of_some, [0, 1], [0, 1]) == ["1 update"] * 2 + [""]
    *told, _ = three.run(beside_groups_of_some, [0, 1], [0, 2])
    for said in told:
        assert "differs from rank 0 in the number of process groups before accelerate_fsdp" in said


def sent(strategy: Mapping[str, object]) -> tuple[int, int, float]:
    """Bytes of four updates: as counted on the way out, as the exchange says, of the gradients."""
    model, optimizer = made()
    p = dist.get_world_size()
    shapes = [q.shape for q in model.parameters() if q.requires_grad]
    padded = sum(-(-shape[0] // p) * p * shape[1:].numel() * 4 for shape in shapes)
    with collectives() as log, accelerate_fsdp(model, optimizer, strategy) as exchange:
        plainly(model, optimizer)
        counted = [one for one in log if one.kind == "isend"]
        assert not count(log, "reduce_scatter_tensor")
    return sum(one.num_bytes for one in counted), exchange.sent_bytes, 4 * padded


@pytest.mark.parametrize(
    ("codec", "share"),
    [
        (None, 1.0),
        ("half", 0.5),
        ({"kind": "int8", "block": 8}, 0.375),
        ({"kind": "onebit", "start_step": 2, "block": 64}, 0.523),  # dense first
    ],
)
def test_each_rank_gets_its_own_part_alone(codec: object, share: float, three: Ranks) -> None:
    for counted, said, gradients in three.run(sent, {"gradients": {"codec": codec}}):
        assert counted == said
        # Blocks of the tiny model are padded, and a row has a flag.
        assert 0.99 * share <= said / (gradients * 2 / 3) <= (1.0 if share == 1 else 1.35) * share


def coded(codec: object, start: Mapping[str, Any] | None = None) -> tuple[float, dict[str, Any]]:
    model, optimizer = made()
    with accelerate_fsdp(model, optimizer, {"gradients": {"codec": codec}}):
        losses = plainly(model, optimizer, 40)
    return float(losses[0]), float(losses[-1])


@pytest.mark.parametrize(
    "codec", ["half", "int8", "int4", {"kind": "onebit", "start_step": 10, "block": 64}], ids=str
)
def test_codecs_train(codec: object, two: Ranks) -> None:
    for first, last in two.run(coded, codec):
        assert first > 2
        assert last < 0.5


CODED = {"gradients": {"codec": {"kind": "int4", "block": 8}}}


def resumed(folder: str) -> bool:
    """Whether a run that is saved and loaded halfway goes on bit for bit, with a hole in it; in a
    ``folder`` by torch's distributed checkpoints."""
    model, optimizer = made()
    with accelerate_fsdp(model, optimizer, CODED) as exchange:
        plainly(model, optimizer, 3)
        saved = exchange.state_dict()
        if folder:
            dcp_save({"exchange": exchange}, checkpoint_id=folder)
        kept = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        state = copy.deepcopy(optimizer.state_dict())
        plainly(model, optimizer, 3)
        last = whole(model)
    [state_of_this_rank] = saved.values()
    assert state_of_this_rank["updates"] == 3
    units = state_of_this_rank["units"].values()
    assert all(unit["error"].abs().sum() > 0 for unit in units)
    again, optimizer = made()
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), kept, strict=True):
            parameter.to_local().copy_(value)  # type: ignore[attr-defined]
    optimizer.load_state_dict(state)
    with accelerate_fsdp(again, optimizer, CODED) as exchange:
        if folder:
            dcp_load({"exchange": exchange}, checkpoint_id=folder)
        else:
            exchange.load_state_dict(saved)
        plainly(again, optimizer, 3)
        assert exchange.updates == 6
    return all(torch.equal(a, b) for a, b in zip(last, whole(again), strict=True))


@pytest.mark.parametrize("by_dcp", [False, True])
def test_a_saved_run_goes_on_bit_for_bit(two: Ranks, tmp_path: Path, *, by_dcp: bool) -> None:
    assert two.run(resumed, str(tmp_path) if by_dcp else "") == [True, True]


def closed() -> list[bool]:
    """Whether a closed exchange leaves torch's comms, and no hook, also after an error."""
    model, optimizer = made()
    comms = [type(m._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm) for m in [model]]
    hooks = len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    with suppress(KeyError), accelerate_fsdp(model, optimizer, {"trace": {"steps": 5}}):
        raise KeyError
    exchange = accelerate_fsdp(model, optimizer)
    exchange.close()
    exchange.close()
    group = model._get_fsdp_state()._fsdp_param_groups[0]
    with collectives() as log:
        plainly(model, optimizer, 1)
    return [
        [type(group._reduce_scatter_comm)] == comms,
        (len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == hooks,
        not count(log, "isend"),
    ]


def test_a_closed_exchange_leaves_nothing(two: Ranks) -> None:
    assert two.run(closed) == [[True] * 3] * 2


class Around(torch.optim.Optimizer):
    """An optimizer around another one that does not call its base, as Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def around_another() -> int:
    model, optimizer = made()
    around = Around(optimizer)
    with accelerate_fsdp(model, around) as exchange:
        plainly(model, around, 2)
    return exchange.updates


def test_an_optimizer_around_another_one_trains(two: Ranks) -> None:
    assert two.run(around_another) == [2, 2]


def beside_backward(strategy: Mapping[str, object], buffers: int) -> list[int]:
    """How many modules' gradients are under way where the backward of each one begins."""
    model, optimizer = made()
    net: Any = model
    net.set_reduce_scatter_max_input_buffers(buffers)
    seen: list[int] = []
    with accelerate_fsdp(model, optimizer, strategy) as exchange:
        for module in (model.blocks[1][3], model.blocks[0][3], model.blocks[0][1], model.embed):
            module.register_full_backward_pre_hook(lambda *_: seen.append(exchange.under_way))
        plainly(model, optimizer, 2)
        assert exchange.under_way == 0
    return seen[len(seen) // 2 :]


@pytest.mark.parametrize("codec", [None, "int8"])
def test_gradients_travel_beside_backward(codec: object, two: Ranks) -> None:
    coded = {"gradients": {"codec": codec}}
    late = {"gradients": {"codec": codec, "overlap": False}}
    assert two.run(beside_backward, coded, 1) == [[0, 1, 1, 1]] * 2
    assert two.run(beside_backward, coded, 2) == [[0, 1, 1, 2]] * 2
    assert two.run(beside_backward, late, 2) == [[0] * 4] * 2


def left_alone(strategy: Mapping[str, object]) -> str:
    """What the first rank is told when the other one leaves before backward."""
    model, optimizer = made(reshard_after_forward=False)
    with suppress(ZeroDivisionError), accelerate_fsdp(model, optimizer, strategy):
        loss = loss_of(model, *next(batches(1)))
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(ExchangeError) as caught:
            loss.backward()
        1 / 0  # noqa: B018 - it closes without waiting for anybody
    return str(caught.value)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_who_is_left_alone_is_told_and_does_not_hang(codec: object, two: Ranks) -> None:
    told = two.run(left_alone, {"gradients": {"codec": codec}})[0]
    assert "rank 0, the reduce-scatter of blocks.1: " in told


class Custom:
    """Not torch's own."""


def refusals() -> dict[str, str]:
    """What is said to each mistake."""
    said: dict[str, str] = {}

    def refused(name: str, kind: type[Exception], call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            said[name] = str(error)

    def opened(model: nn.Module, strategy: Any = None) -> Any:
        return accelerate_fsdp(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)

    refused("plain", ModelError, lambda: opened(nn.Linear(2, 2)))
    model: Any
    model, optimizer = made()
    settings = {"gradients": {"codec": "powersgd", "accumulate": 2}}
    refused("strategy", StrategyError, lambda: opened(model, settings))
    refused("local", StrategyError, lambda: opened(model, {"local": {"steps": 4}}))
    codec = "half" if dist.get_rank() else None
    refused("ranks", MismatchError, lambda: opened(model, {"gradients": {"codec": codec}}))
    with opened(model):
        refused("twice", ModelError, lambda: opened(model))
        model.blocks[0].set_custom_reduce_scatter(Custom())
        x, y = next(batches(1))
        refused("later", UsageError, lambda: loss_of(model, x, y))
    model, _ = made()
    model.set_allocate_memory_from_process_group_for_comm(True)
    refused("allocate", ModelError, lambda: opened(model))
    model, _ = made()
    model.set_gradient_divide_factor(3.0)
    with opened(model):
        refused("premultiplied", UsageError, lambda: plainly(model, optimizer, 1))
    model, _ = made()
    with opened(model, CODED) as exchange:
        refused("width", ModelError, lambda: model.blocks[0](torch.ones(2, 6))[0, 0].backward())
        state = exchange.state_dict()
        other = {"rank 7 of 2": {}}
        refused("state", UsageError, lambda: exchange.load_state_dict(other))
    with opened(model) as exchange:
        refused("modules", UsageError, lambda: exchange.load_state_dict(state))
    return said


def test_refusals(two: Ranks) -> None:
    for said in two.run(refusals):
        words = {
            "plain": "call fully_shard on it first",
            "strategy": "gradients.codec: powersgd cannot carry a reduce-scatter; allowed: half, ",
            "local": "FSDP2 has no rank with a whole model",
            "ranks": "differs from rank 0 in strategy",
            "twice": "close the other exchange",
            "later": "blocks.0: .* call accelerate_fsdp after them",
            "allocate": "Net: a ProcessGroupAllocReduceScatter is set on it already",
            "premultiplied": "PREMUL_SUM; allowed: SUM and AVG",
            "state": "of rank 7 of 2",
            "modules": "coded are here",
        }
        for name, pattern in words.items():
            assert re.search(pattern, said[name]), (name, said)


def test_there_is_nothing_to_do_beside_nccl() -> None:
    with pytest.raises(ModelError, match="nothing to do, as NCCL's reduce-scatter sends no more"):
        check_device(torch.device("cuda"), None, "blocks.0")
    with pytest.raises(ModelError, match="the codec half has not been tried there"):
        check_device(torch.device("cuda"), HalfConfig(), "blocks.0")


def test_the_page_says_of_each_setting_what_becomes_of_it() -> None:
    page = (ROOT / "docs/adapters.md").read_text()
    section = page.partition("## FSDP2")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section, re.MULTILINE))
    groups: Mapping[str, BaseModel] = {"gradients": Strategy().gradients}
    settings = [
        f"{name}.{inner}" if name in groups else name
        for name in Strategy.model_fields
        for inner in (type(groups[name]).model_fields if name in groups else [""])
    ]
    assert sorted(rows) == sorted(settings)
    assert {n: r.removeprefix("refused: ") for n, r in rows.items() if "refused" in r} == REFUSED
    kinds = [f"`{codec.model_fields['kind'].default}`" for codec in SCATTERED]
    assert all(kind in rows["gradients.codec"] for kind in kinds)


def traced() -> None:
    model, optimizer = made(again=True)
    with accelerate_fsdp(model, optimizer):
        plainly(model, optimizer, 5)


def test_a_trace_has_every_collective_and_what_it_keeps_waiting(two: Ranks, tmp_path: Path) -> None:
    strategy: Any = {"gradients": {"codec": "half"}, "trace": {"steps": 2, "skip": 1}}
    strategy["trace"]["folder"] = str(tmp_path)
    file = tmp_path / "strategy.json"
    file.write_text(json.dumps(strategy))
    two.run(traced, env={"SLIPSTREAM_STRATEGY": str(file)})
    trace = chrome.read(tmp_path / "trace.json")
    iterations = timeline(trace.events)
    assert [(one.rank, one.step) for one in iterations] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    for one in iterations:
        exchanges = sorted(one.exchanges, key=lambda e: e.start)
        assert [exchange_order(e.name) for e in exchanges] == [*range(1, len(exchanges) + 1)]
        kinds = [(e.name.rstrip("0123456789"), e.args["module"]) for e in exchanges]
        order = ["Net", "blocks.0", "blocks.1"]  # torch keeps the root's parameters for backward
        assert kinds[:3] == [("all_gather", name) for name in order]
        assert [name for kind, name in kinds if kind == "reduce_scatter"] == order[::-1]
        for e in exchanges:
            wire = 2 if e.name.startswith("all_gather") else 4  # by half of the ranks, and coded
            assert (e.args["sent"] * wire, e.args["dtype"]) == (e.args["bytes"], "float32")
        found = breakdown(one)
        gathers = [e for e in found.exchanges if e.event.name.startswith("all_gather")]
        assert sum(e.hidden for e in gathers) == pytest.approx(0.0, abs=1e-9)
        parts = found.parts
        assert parts.exposed >= sum(e.duration for e in gathers) * 0.999
        assert min(parts.forward, parts.backward, parts.optimizer) > 0
        assert one.samples == 5
    console = Console(width=80)
    with console.capture() as shown:
        console.print(summary(trace))
    assert "blocks.1" in shown.get()
    assert "half" in shown.get()
    with pytest.raises(TraceError, match="of torch's FSDP2"):
        Forecast.of(trace, profile({"world": ring("world", 2, 1e-4, 1e-9)}))
    assert "fully_shard" in [finding.where for finding in advise(trace)]
    assert "reduce_scatter" in html([("run", trace)])
