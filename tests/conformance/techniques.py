"""The rows: one value a technique. A new technique is a line here, or the suite is red."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.conformance import models
from tests.conformance.loop import Loader, Loop, Samples, mse
from tests.conformance.plain import trained
from tests.conformance.sides import InPipeline, InSession, UnderDdp
from tests.fusion.uncompiled import uncompiled


def bf16() -> Any:
    """Torch's own autocast."""
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def compiled_here() -> Iterator[None]:
    """Compiled in this process: a fork has no part in workers."""
    with mock.patch.object(inductor, "compile_threads", 1):
        yield


@contextmanager
def sharded_after_an_update() -> Iterator[None]:
    """A search that stays with ``sharded`` after one update, if it may."""
    from slipstream.session import exchanging
    from slipstream.strategy import ShardedConfig
    from slipstream.transport.place import Place
    from slipstream.tuner.online_search import OnlineSearch
    from slipstream.tuner.search_space import Choice

    class Chosen(OnlineSearch):
        windows = 0

        def install_due(self) -> None:
            self.windows += 1
            if self.windows == 2 and not self.settled and self._tries_sharded:
                self._due = self.choice, False
            super().install_due()

        def _install(self, choice: Choice, for_good: bool) -> None:
            if not for_good and self._can_use(ShardedConfig()):
                choice, for_good = Choice(ShardedConfig(), choice.split), True
                self.settle(choice)
                self._due = None
            super()._install(choice, for_good)

    with (
        mock.patch.object(exchanging, "OnlineSearch", Chosen),
        mock.patch.object(exchanging, "find_place", lambda _, g: Place.apart(_, g.size())),
    ):
        yield


@contextmanager
def searching_again_and_again() -> Iterator[None]:
    """A search of two updates that begins anew after one more, for ever."""
    from slipstream.session import compose, exchanging, tracing
    from slipstream.transport.place import Place
    from slipstream.tuner import online_search, search_space, speed_watch
    from slipstream.tuner.change import Change, UpdateTimes

    change = Change(UpdateTimes(1.0, 1.0, 1.0, 0.0), UpdateTimes(9.0, 9.0, 9.0, 8.0), 1)
    with (
        mock.patch.object(compose, "SETTLING", 0),
        mock.patch.object(tracing, "SETTLING", 0),
        mock.patch.object(speed_watch.SpeedWatch, "updated", return_value=change),
        mock.patch.object(search_space.SearchSpace, "window", return_value=1),
        mock.patch.object(online_search, "TURNS", 1),
        mock.patch.object(exchanging, "why_not_sharded", return_value="another row"),
        mock.patch.object(exchanging, "find_place", lambda _, g: Place.apart(_, g.size())),
    ):
        yield


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    # eps: without it a step of full size comes of a gradient that is nothing but rounding
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def rmsprop(model: nn.Module) -> Optimizer:
    return RMSprop(model.parameters(), lr=0.01, eps=1e-3)


class Momentum(Optimizer):
    """An optimizer of a user's own, which treats every value on its own."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                    p.add_(state["mean"], alpha=-group["lr"])


def own(model: nn.Module) -> Optimizer:
    return Momentum(model.parameters(), lr=0.05)


def lars(model: nn.Module) -> Optimizer:
    from slipstream.optim import Lars

    return Lars(model.parameters(), lr=1.0)


def lamb(model: nn.Module) -> Optimizer:
    from slipstream.optim import Lamb

    return Lamb(model.parameters(), lr=0.01)


def plain_body(kind: type[nn.Module], fast: bool) -> nn.Module:
    return kind()


def kernel_body(kind: type[nn.Module], names: tuple[str, ...], fast: bool) -> nn.Module:
    """The operation on the technique's side, its reference on the plain side."""
    import sys

    from slipstream import kernels

    found = []
    for name in names:
        public = getattr(kernels, name)
        home = sys.modules[public.__module__]
        plain = {
            "window_partition": "reference_partition",
            "window_merge": "reference_merge",
        }.get(name, "reference")
        found.append(public if fast else getattr(home, plain))
    return kind(tuple(found) if len(found) > 1 else found[0])


MLP = partial(plain_body, models.Mlp)
CONVOLUTIONS = partial(plain_body, models.Convolutions)


@dataclass(frozen=True)
class Technique:
    """A row.

    Attributes:
        name: as the table shows it.
        strategy: of ``accelerate()``; for the hook of DDP its codec.
        body: makes the model's body: ``fast`` with the technique, else plain.
        shape: of a sample.
        optimizer: made from the model.
        bound: how far a lossy technique may be from plain torch, as a part of how far training has
            moved the parameters; None: it is exact up to the order of sums.
        shares_batches: all ranks train on the same batches.
        loop: how one trains with it.
        around: holds while a row runs, on both sides.
        around_forward: holds in each forward and loss of the plain side.
        deals: samples of an update are dealt to the ranks anew.
        ends_with_last: the strategy names the model's last gradient.
        prepares: installs what is no setting of a strategy; its ``close()`` ends it.
        public: names of the package that this row stands for.
        unavailable: why no cell of this row can run here.
    """

    name: str
    strategy: Mapping[str, Any] = field(default_factory=dict)
    body: partial[nn.Module] = MLP
    shape: tuple[int, ...] = models.Mlp.shape
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    bound: float | None = None
    shares_batches: bool = False
    loop: type[Loop] = InSession
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepares: Callable[[nn.Module], Any] | None = None
    deals: bool = False
    ends_with_last: bool = False
    public: tuple[str, ...] = ()
    unavailable: str | None = None

    @property
    def accumulate(self) -> int:
        return int(self.strategy.get("gradients", {}).get("accumulate", 1))

    def strategy_for(self, model: nn.Module) -> dict[str, Any]:
        """The strategy; a split by index ends with the last gradient of this model."""
        strategy = copy.deepcopy(dict(self.strategy))
        if self.ends_with_last:
            last = sum(p.requires_grad for p in model.parameters()) - 1
            strategy["gradients"]["split"]["last"][-1] = last
        return strategy

    @property
    def plain_key(self) -> tuple[object, ...]:
        """Techniques with the same one have the same plain side."""
        made = self.body.func, self.body.args, self.shape, self.optimizer, self.accumulate
        return (*made, self.shares_batches, self.deals, self.around_forward)

    def loader(self, loop: InSession) -> DataLoader[Any]:
        """What ``accelerate()`` gets."""
        rank = 0 if self.shares_batches else loop.rank
        if self.deals and loop.loader == Loader():
            samples = Samples(s for each in range(loop.ranks) for s in loop._samples(each))
            ranks = 1 if isinstance(loop, OneProcess) else loop.ranks
            sampler: Any = DistributedSampler(samples, ranks, loop.rank)
            return DataLoader(samples, len(samples) // ranks, sampler=sampler)
        return loop._loader_of(rank)

    def prepare(self, loop: Loop) -> None:
        if self.prepares is not None:
            _prepared[id(loop)] = self.prepares(loop.model)

    def undo(self, loop: Loop) -> None:
        if self.prepares is not None:
            _prepared.pop(id(loop)).close()

    def of_one_process(self) -> dict[str, Any]:
        return _one_process[self.name]

    def run_in_one_process(self) -> None:
        """Two updates in a session of one process on the batches of all ranks, for habits that go
        on from there; before there is a process group."""
        run = OneProcess(self, 0, 2)
        model, optimizer = trained(run)
        _one_process[self.name] = {"model": model, "optimizer": optimizer}
        if self.shares_batches or self.loop is UnderDdp:
            return
        places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        before = {name: os.environ.pop(name) for name in places if name in os.environ}
        try:
            run.start()
            run.update(times=2)
            _one_process[self.name] = {
                **(saved := run.session.checkpoint()),
                # buffers of the first rank, which has seen its own batches alone
                "model": {**saved["model"], **_buffers_of(model, run.model)},
            }
            run.close()
        finally:
            os.environ.update(before)


def _buffers_of(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    return {name: state[name] for name, _ in model.named_buffers() if name in state}


class OneProcess(InSession):
    """A session without other ranks: its batches are those of all ranks in one."""

    def backward(self, loss_of: Any = None, *, scale: float = 1.0) -> None:
        if self.technique.deals:
            super().backward()
            return
        batches = [self._next(rank, self._loader_of(rank)) for rank in range(self.ranks)]
        losses = [mse(self.session.model, batch) for batch in reversed(batches)]
        self.session.backward(torch.stack(losses).mean())


_prepared: dict[int, Any] = {}
_one_process: dict[str, dict[str, Any]] = {}


def transport(name: str, kind: Any, **more: Any) -> Technique:
    return Technique(name, {"gradients": {"transport": kind}}, **more)


def codec(name: str, kind: Any, bound: float | None, **more: Any) -> Technique:
    return Technique(name, {"gradients": {"codec": kind}}, bound=bound, **more)


def split(name: str, kind: Any, **more: Any) -> Technique:
    return Technique(name, {"gradients": {"split": kind}}, **more)


def memory(name: str, **settings: Any) -> Technique:
    return Technique(name, {"memory": settings})


def chains(name: str, **settings: Any) -> Technique:
    return Technique(
        name,
        {"compute": settings},
        CONVOLUTIONS,
        models.Convolutions.shape,
        around=uncompiled,
    )


def compute(name: str, optimizer: Any = sgd, **settings: Any) -> Technique:
    return Technique(name, {"compute": settings}, optimizer=optimizer)


def kernel(kind: Any, *names: str) -> Technique:
    return Technique(
        f"kernel {names[0]}",
        body=partial(kernel_body, kind, names),
        shape=kind.shape,
        around=uncompiled,
        public=tuple(f"kernels.{name}" for name in names),
    )


def data(name: str, **settings: Any) -> Technique:
    return Technique(name, {"data": settings})


def hook(kind: Any, bound: float | None) -> Technique:
    name = kind if isinstance(kind, str) else kind["kind"]
    return codec(f"DdpCodec {name}", kind, bound, loop=UnderDdp, public=("ddp.DdpCodec",))


def _fuse_swin(model: nn.Module) -> Any:
    from slipstream.fusion import fuse_swin

    return fuse_swin(model)


ONE_BIT = {"kind": "onebit", "block": 64, "start_step": 1}
ALL_VALUES = {"kind": "dgc", "density": 1.0, "warmup_steps": 0}
MOST_VALUES = {"kind": "topk", "chunk": 8, "keep": 6}
FULL_RANK = {"kind": "powersgd", "rank": 8, "start_step": 1, "min_compression_rate": 1.0}
TWO_BY_NAME = {"kind": "by_name", "rules": [{"match": "*.bias"}, {"match": "*", "codec": "half"}]}

LINEAR = {"steps": 1, "lr": 1.0, "momentum": 0.0}
"""Meetings at every update: the mean of what ranks change is what the mean gradient changes, but
for what is not linear in gradients, such as clipping, which each rank does by itself."""

SCALE = {"kind": "dynamic", "init": 8.0}
FP16 = {"kind": "half_weights", "dtype": "fp16", "emulate": True, "loss_scale": SCALE}
"""With a loss scale; a CPU computes in fp32 and rounds."""

TECHNIQUES: tuple[Technique, ...] = (
    transport("flat", "flat"),
    transport("direct", "direct"),
    transport("hierarchical", "hierarchical"),
    transport("shared_memory", "shared_memory"),
    transport("auto", "auto"),
    transport("auto sharded", "auto", around=sharded_after_an_update),
    transport("auto again", "auto", around=searching_again_and_again),
    transport("sharded", "sharded"),
    transport("sharded adamw", "sharded", optimizer=adamw),
    transport("sharded replicated", {"kind": "sharded", "replicated": 0.3}),
    transport("sharded elementwise", {"kind": "sharded", "elementwise": True}, optimizer=own),
    codec("half", "half", 0.02),
    codec("half fp16", {"kind": "half", "dtype": "fp16"}, 0.02),
    codec("int8", {"kind": "int8", "block": 64}, 0.05),
    codec("int8 feedback", {"kind": "int8", "block": 64, "error_feedback": True}, 0.05),
    codec("int4", {"kind": "int4", "block": 8}, 0.2),
    codec("onebit", ONE_BIT, 0.9),
    codec("topk", MOST_VALUES, 0.6),
    codec("dgc", ALL_VALUES, 0.01),
    codec("powersgd", FULL_RANK, 0.05),
    codec("by_name", TWO_BY_NAME, 0.02),
    codec("adaptive", {"kind": "adaptive", "codec": "half"}, 0.02),
    split("split by_bytes", {"kind": "by_bytes", "megabytes": 0.001}),
    split("split by_percent", {"kind": "by_percent", "percents": [60, 40]}),
    split("split by_index", {"kind": "by_index", "last": [3, 15]}, ends_with_last=True),
    split("split by_layers", {"kind": "by_layers", "layers": 2}),
    split("split per_layer", "per_layer"),
    split("split per_gradient", "per_gradient"),
    split("split single", "single"),
    split("split optimal", "optimal"),
    Technique("overlap off", {"gradients": {"overlap": False}}),
    Technique("accumulate", {"gradients": {"accumulate": 2}}),
    Technique("local", {"local": LINEAR}, bound=0.5),
    Technique("local warm_up", {"local": {**LINEAR, "warm_up": 1000}}),
    Technique("local auto", {"local": {"auto": True, "warm_up": 1000}}),
    Technique("local island", {"local": LINEAR, "gradients": {"transport": "hierarchical"}}),
    Technique(
        "local stretch",
        {"local": {**LINEAR, "stretch": 2}},
        unavailable="ranks make as many updates as their speed allows, so that nothing plain is "
        "equal; tests/local holds what is promised",
    ),
    Technique(
        "local rendezvous",
        {"local": {**LINEAR, "rendezvous": "node0:29400"}},
        unavailable="its jobs have one rank each, and are started by themselves; tests/local",
    ),
    Technique("autocast", {"precision": "autocast"}, bound=0.05, around_forward=bf16),
    Technique(
        "half_weights bf16", {"precision": {"kind": "half_weights", "dtype": "bf16"}}, bound=0.1
    ),
    Technique("half_weights fp16", {"precision": FP16}, bound=0.1),
    Technique(
        "half_weights sharded",
        {
            "precision": {"kind": "half_weights", "dtype": "bf16"},
            "gradients": {"transport": "sharded"},
        },
        bound=0.1,
    ),
    memory("recompute every", recompute={"every": 1}),
    memory("recompute checkpoints", recompute={"checkpoints": ["body.blocks.*"]}),
    memory("recompute budget", recompute={"budget": 0.6}),
    memory("recompute budget_bytes", recompute={"budget_bytes": 2048}),
    memory("offload", offload={"to": "disk", "min_bytes": 1, "keep_last": 0}),
    compute("fuse_optimizer adamw", adamw, fuse_optimizer=True),
    compute("fuse_optimizer rmsprop", rmsprop, fuse_optimizer=True),
    compute("fuse_optimizer elementwise", own, fuse_optimizer="elementwise"),
    chains("fuse_bn_act", fuse_bn_act=True),
    chains("fuse_add_act", fuse_add_act=True),
    chains("fuse_relu_depthwise", fuse_relu_depthwise=True),
    Technique(
        "fuse_swin",
        body=partial(plain_body, models.Swin),
        shape=models.Swin.shape,
        prepares=_fuse_swin,
        public=("fusion.fuse_swin",),
    ),
    Technique("compile", {"compute": {"compile": True}}, around=compiled_here),
    chains("channels_last", channels_last=True),
    Technique(
        "channels_last fuse_optimizer",
        {"compute": {"channels_last": True, "fuse_optimizer": True}},
        CONVOLUTIONS,
        models.Convolutions.shape,
        adamw,
        around=uncompiled,
    ),
    Technique(
        "cuda_graph",
        {"compute": {"cuda_graph": True}},
        unavailable="records kernels of a CUDA device, and this matrix is made on a CPU; tests/gpu",
    ),
    compute("tf32", tf32=True),
    kernel(models.AddActBody, "add_act"),
    kernel(models.BatchNormActBody, "batch_norm_act"),
    kernel(models.CompressByIndexBody, "compress_by_index"),
    kernel(models.ReluDepthwiseBody, "relu_depthwise"),
    kernel(models.SimOtaBody, "sim_ota"),
    kernel(models.WindowAttentionBody, "window_attention"),
    kernel(models.WindowPartitionBody, "window_partition", "window_merge"),
    data("prefetch", prefetch={"workers": 1, "threads": True}),
    data("cache", cache={}),
    Technique("balance", {"data": {"balance": {}}}, deals=True),
    Technique(
        "tensor parallel",
        {
            "parallel": {
                "tensor": {"ranks": 2, "plan": {"*.up": "column", "*.down": "row"}},
            }
        },
        shares_batches=True,
    ),
    Technique(
        "pipeline parallel",
        {"parallel": {"pipeline": {"ranks": 2, "cut": ["body.blocks.1"], "micro_batches": 2}}},
        shares_batches=True,
        loop=InPipeline,
    ),
    Technique("trace", {"trace": {"steps": 2, "skip": 1}}),
    Technique("checks", {"checks": {"every": 1, "replay": True, "nonfinite": "skip"}}),
    Technique("checks allow", {"checks": {"timeout": None, "nonfinite": "allow"}}),
    hook("half", 0.02),
    hook({"kind": "int4", "block": 8}, 0.2),
    hook({"kind": "int8", "block": 64}, 0.05),
    hook(ONE_BIT, 0.9),
    hook(MOST_VALUES, 0.6),
    hook(ALL_VALUES, 0.01),
    hook(FULL_RANK, 0.05),
    hook(TWO_BY_NAME, 0.02),
    Technique("Lars", optimizer=lars, public=("optim.Lars",)),
    Technique("Lamb", optimizer=lamb, public=("optim.Lamb",)),
    Technique("Lamb fused", {"compute": {"fuse_optimizer": True}}, optimizer=lamb),
    transport("Lamb sharded", "sharded", optimizer=lamb),
)
