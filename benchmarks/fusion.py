"""Kernels, fused chains and fused optimizers beside the plain code that they stand for.

    python -m benchmarks.fusion kernels --json benchmarks/results/kernels.json
    python -m benchmarks.fusion patterns --json benchmarks/results/patterns.json
    python -m benchmarks.fusion networks --json benchmarks/results/networks.json
    python -m benchmarks.fusion optimizers --json benchmarks/results/optimizers.json
    python -m benchmarks.fusion graphs --device cuda --json benchmarks/results/graphs-cuda.json
    python -m benchmarks.fusion kernels --device cuda --json benchmarks/results/kernels-cuda.json

All variants of a case take turns in one process, in an order that is shuffled every round, so that
each round is one observation of every ratio. Optimizers step the parameters of real models with
gradients that are there already; the first step, which makes the state, is left out.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.optim import Optimizer
from transformers import (
    BertConfig,
    BertModel,
    MobileNetV2Config,
    MobileNetV2Model,
    ResNetConfig,
    ResNetModel,
)

from benchmarks.iteration import quartiles
from benchmarks.record import finish
from benchmarks.turns import take_turns
from examples import models
from slipstream.fusion import (
    ChannelsLast,
    compile_blocks,
    fuse_optimizer,
    fuse_patterns,
    graph_blocks,
)
from slipstream.kernels import (
    Level,
    Objects,
    compress_by_index as compress,
    sim_ota as assign,
    window_attention,
    window_merge,
    window_partition,
)
from slipstream.kernels.compress_by_index import reference as compress_with_a_list
from slipstream.kernels.sim_ota import reference as assign_one_by_one
from slipstream.kernels.window_attention import reference as attention_one_by_one
from slipstream.kernels.window_partition import reference_merge, reference_partition
from slipstream.optim import Lamb
from slipstream.optim.lamb import step_one_by_one

Call = Callable[[], object]
Cases = Iterator[tuple[str, dict[str, Call]]]
"""Name of a case, and its variants; the first is the plain one."""


def kernels() -> Cases:
    """Sizes of the models that the kernels come from."""
    for images, objects in ((8, 20), (16, 40)):
        given = (*scene(images, objects), LEVELS)
        name = f"SimOTA: {images} images of 640 x 640, up to {objects} objects, 80 classes"
        loop, batch = partial(assign_one_by_one, *given), partial(assign, *given)
        yield name, {"loop of YOLOX": loop, "slipstream": batch}
    values = torch.randn(30_860, 20, 9)  # the points of a camera image of nuScenes
    index = torch.randint(20, (30_860,))
    by_list, by_index = (
        partial(compress_with_a_list, values, index),
        partial(compress, values, index),
    )
    name = "rows by index: 30,860 points, 20 objects, 9 values"
    yield name, {"list on the host": by_list, "slipstream": by_index}
    for side, channels in ((56, 96), (28, 192)):
        maps = torch.randn(8, side, side, channels, requires_grad=True)
        name = f"windows: 8 maps of {side} x {side} x {channels}, forward and backward"
        plain = partial(there_and_back, reference_partition, reference_merge, maps)
        fast = partial(there_and_back, window_partition, window_merge, maps)
        yield name, {"roll, view, copy": plain, "slipstream": fast}

    for windows, heads, masks in ((512, 3, 0), (512, 3, 64), (128, 6, 0), (128, 6, 16)):
        name = f"attention in {windows} windows of 7 x 7, {heads} heads"
        name += ", shifted" if masks else ""
        yield f"{name}, forward and backward", attention(windows, heads, masks, torch.float32)
        if torch.get_default_device().type == "cuda":
            name += ", bf16"
            yield f"{name}, forward and backward", attention(windows, heads, masks, torch.bfloat16)


def attention(windows: int, heads: int, masks: int, dtype: torch.dtype) -> dict[str, Call]:
    """As in the stages of a Swin-T at batch 8; q, k and v as one projection leaves them."""
    packed = torch.randn(windows, 49, 3, heads, 32, dtype=dtype, requires_grad=True)
    bias = torch.randn(heads, 49, 49, dtype=dtype, requires_grad=True)
    mask = torch.where(torch.rand(masks, 49, 49) < 0.3, -100.0, 0.0).to(dtype) if masks else None
    gradient = torch.randn(windows, 49, heads * 32, dtype=dtype)

    def run(function: Callable[..., torch.Tensor]) -> None:
        result = function(*packed.permute(2, 0, 3, 1, 4).unbind(), bias, mask)
        result.transpose(1, 2).reshape_as(gradient).backward(gradient)
        packed.grad = bias.grad = None

    def sdpa(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> torch.Tensor:
        added = (
            bias if mask is None else (bias + mask.unsqueeze(1)).repeat(windows // masks, 1, 1, 1)
        )
        return F.scaled_dot_product_attention(q, k, v, added)

    def flex(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> torch.Tensor:
        def score(found: Any, window: Any, head: Any, row: Any, column: Any) -> Any:
            found = found + bias[head, row, column]
            return found if mask is None else found + mask[window % masks, row, column]

        attended: torch.Tensor = compiled_flex(q, k, v, score_mod=score)
        return attended

    functions: dict[str, Callable[..., torch.Tensor]] = {
        "one by one": attention_one_by_one,
        "torch's SDPA": sdpa,
        "slipstream": window_attention,
    }
    if packed.is_cuda:  # on a CPU it has no backward
        compiled_flex = torch.compile(flex_attention)
        functions["torch's FlexAttention"] = flex
    return {name: partial(run, function) for name, function in functions.items()}


def there_and_back(cut: Any, join: Any, maps: torch.Tensor) -> None:
    """Into windows of 7 x 7 with a shift and back, with gradients."""
    size = (maps.shape[1], maps.shape[2])
    join(cut(maps, 7, 3), 7, size, 3).backward(maps.detach())
    maps.grad = None


LEVELS = (Level(80, 80, 8), Level(40, 40, 16), Level(20, 20, 32))


def scene(images: int, most: int) -> tuple[Any, ...]:
    """Predictions near random objects, as in the middle of a training."""
    anchors = sum(level.height * level.width for level in LEVELS)
    truths = torch.cat(
        [640 * torch.rand(images, most, 2), 8 + 200 * torch.rand(images, most, 2)], 2
    )
    valid = torch.arange(most) < torch.randint(1, most + 1, (images, 1))
    whose = torch.randint(most, (images, anchors))
    boxes = truths.gather(1, whose.unsqueeze(2).expand(-1, -1, 4))
    boxes = boxes * (0.7 + 0.6 * torch.rand(images, anchors, 4))
    objects = Objects(truths, torch.randint(80, (images, most)), valid)
    return boxes, torch.randn(images, anchors, 80) - 3, torch.randn(images, anchors) - 3, objects


class Unit(nn.Module):
    """A part of a network that the patterns find; ``shortcut`` is added where there is one."""

    def __init__(self, layer: nn.Module, activation: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.activation = layer, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(x))


class UnitWithShortcut(Unit):
    def forward(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.activation(self.layer(x) + shortcut)


class ReluDepthwise(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.layer = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        convolved: torch.Tensor = self.layer(self.relu(x))
        return convolved


def scale(channels: int) -> nn.Module:
    """A factor a channel: the least that a layer can do."""
    return nn.Conv2d(channels, channels, 1, groups=channels, bias=False)


def patterns() -> Cases:
    """Chains of ResNet-50, MobileNet-V2 and Xception, all those of a ResNet, and networks."""
    size = {
        "stage 1": (16, 64, 56, 56),
        "stage 2": (16, 128, 28, 28),
        "stage 3": (16, 256, 14, 14),
        "stage 4": (16, 512, 7, 7),
    }
    shape: tuple[int, ...]
    for stage, shape in {"stem": (16, 64, 112, 112), **size}.items():
        unit = Unit(nn.BatchNorm2d(shape[1]), F.relu)
        yield f"batch norm + relu: {stage}, {shape}", forms(unit, shape)
    for stage, (batch, channels, *sides) in size.items():
        shape = (batch, 4 * channels, *sides)
        unit = UnitWithShortcut(nn.BatchNorm2d(shape[1]), F.relu)
        yield f"batch norm + add + relu: {stage}, {shape}", forms(unit, shape, shape)
    for function in (F.relu, F.gelu):
        shape = (16, 256, 56, 56)
        unit = UnitWithShortcut(scale(shape[1]), function)  # a chain begins with a layer
        yield f"scale + add + {function.__name__}: {shape}", forms(unit, shape, shape)
    for shape in ((16, 144, 56, 56), (32, 728, 19, 19), (16, 384, 14, 14)):
        yield f"relu + depthwise convolution: {shape}", forms(ReluDepthwise(shape[1]), shape)
    if torch.get_default_device().type == "cuda":  # where kernels outlast their start
        for stage, (_, channels, *sides) in size.items():
            shape = (256, 4 * channels, *sides)
            unit = UnitWithShortcut(nn.BatchNorm2d(shape[1]), F.relu)
            yield (
                f"batch norm + add + relu: 256 images, {stage}, {shape}",
                forms(unit, shape, shape),
            )
    for name, (norms, sums) in CHAINS.items():
        number = (
            f"{sum(norms.values())} batch norm + relu, {sum(sums.values())} batch norm + add + relu"
        )
        yield f"{name}: its {number}, one after another, 8 images", all_chains(norms, sums)
    for name, build in NETWORKS.items():
        yield f"{name}: 8 images of 224 x 224", forms(build(), (8, 3, 224, 224))


Maps = dict[tuple[int, int], int]
"""How many maps of (channels, side)."""
CHAINS: dict[str, tuple[Maps, Maps]] = {
    "ResNet-18": (
        {(64, 112): 1, (64, 56): 2, (128, 28): 2, (256, 14): 2, (512, 7): 2},
        {(64, 56): 2, (128, 28): 2, (256, 14): 2, (512, 7): 2},
    ),
    "ResNet-50": (
        {(64, 112): 1, (64, 56): 6, (128, 56): 1, (128, 28): 7, (256, 28): 1, (256, 14): 11}
        | {(512, 14): 1, (512, 7): 5},
        {(256, 56): 3, (512, 28): 4, (1024, 14): 6, (2048, 7): 3},
    ),
}
"""Of transformers' ResNets: batch norms before a relu, and those before a sum and a relu."""


def all_chains(norms: Maps, sums: Maps) -> dict[str, Call]:
    """What the patterns find in a network, without what stands between."""
    found: list[tuple[int, list[Call]]] = []
    for maps, terms in ((norms, 1), (sums, 2)):
        for (channels, side), number in maps.items():
            layer = nn.BatchNorm2d(channels)
            unit = (Unit if terms == 1 else UnitWithShortcut)(layer, F.relu)
            calls = forms(unit, *[(8, channels, side, side)] * terms).values()
            found.append((number, list(calls)))

    def run(variant: int) -> None:
        for number, calls in found:
            for _ in range(number):
                calls[variant]()

    return {
        name: partial(run, variant)
        for variant, name in enumerate(("torch", "torch.compile", "slipstream"))
    }


def forms(module: nn.Module, *shapes: Sequence[int]) -> dict[str, Call]:
    """Forward and backward by torch one by one, compiled by torch, and with fused chains."""
    fused = copy.deepcopy(module)
    (row, *_) = fuse_patterns(fused).report_rows()
    compiled = torch.compile(copy.deepcopy(module))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = result_of(module(*inputs))
    gradient = torch.randn_like(out)

    def step(called: Callable[..., Any]) -> None:
        result_of(called(*inputs)).backward(gradient)
        for x in inputs:
            x.grad = None

    calls: dict[str, Any] = {
        "torch": module,
        "torch.compile": compiled,
        f"slipstream: {row.value}": fused,
    }
    return {name: partial(step, called) for name, called in calls.items()}


BASIC = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: ResNetModel(BASIC),
    "ResNet-50": lambda: ResNetModel(ResNetConfig()),
    "MobileNet-V2": lambda: MobileNetV2Model(MobileNetV2Config()),
}


def channels_last(model: nn.Module) -> None:
    """As ``compute: {channels_last: true}``."""
    ChannelsLast(model, torch.optim.SGD(model.parameters()))


SETTINGS: dict[str, Sequence[Callable[[nn.Module], object]]] = {
    "slipstream: chains": (fuse_patterns,),
    "slipstream: channels last": (channels_last,),
    "slipstream: channels last, chains": (channels_last, fuse_patterns),
    "slipstream: compiled blocks": (compile_blocks,),
    "slipstream: channels last, compiled blocks": (channels_last, compile_blocks),
}


def networks() -> Cases:
    """Whole networks under each setting of ``compute`` that they have a use for."""

    def step(called: Callable[..., Any], model: nn.Module, images: int) -> None:
        result_of(called(pictures[images])).sum().backward()
        model.zero_grad()

    sizes = (8, 128) if torch.get_default_device().type == "cuda" else (8,)
    pictures = {images: torch.randn(images, 3, 224, 224) for images in sizes}
    for images, (name, build) in itertools.product(sizes, NETWORKS.items()):
        torch.manual_seed(0)
        plain = build()
        inside = copy.deepcopy(plain)
        calls: dict[str, Call] = {
            "torch": partial(step, plain, plain, images),
            "torch.compile": partial(step, torch.compile(inside), inside, images),
        }
        for setting, changes in SETTINGS.items():
            model = copy.deepcopy(plain)
            for change in changes:
                change(model)
            calls[setting] = partial(step, model, model, images)
        yield f"{name}: {images} images of 224 x 224, forward and backward", calls


def graphs() -> Cases:
    """A small model, whose kernels take less time than their start; on CUDA."""
    config = BertConfig(num_hidden_layers=4, hidden_size=256, num_attention_heads=4)
    model = BertModel(config, add_pooling_layer=False)
    tokens = torch.randint(config.vocab_size, (2, 64))
    graphed, compiled = copy.deepcopy(model), copy.deepcopy(model)
    graph_blocks(graphed)
    compile_blocks(compiled)

    def step(called: nn.Module) -> None:
        called(tokens).last_hidden_state.sum().backward()
        called.zero_grad()

    calls = {"torch": model, "compiled blocks": compiled, "slipstream: graphs": graphed}
    name = "BERT of 4 layers of 256, 2 x 64 tokens, forward and backward"
    yield name, {label: partial(step, called) for label, called in calls.items()}


def result_of(outputs: Any) -> torch.Tensor:
    """Of a network, or a tensor as it is."""
    result: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.pooler_output
    return result


class Lion(Optimizer):
    """An optimizer that torch has not, as users write it."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["moment"] * 0.9 + p.grad * 0.1
                p.add_(update.sign_(), alpha=-group["lr"])
                state["moment"].mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-4),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-4),
    "Lion": Lion,
    "Lamb": lambda p: Lamb(p, lr=1e-4),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": models.resnet50,
    "mobilenet_v2": lambda: MobileNetV2Model(MobileNetV2Config()),
    "bert": models.bert,
    "swin-t": models.swin_t,
}


def optimizers() -> Cases:
    """Steps of the parameters of four models."""
    for model, build in MODELS.items():
        shapes = [p.detach().to(torch.get_default_device()) for p in build().parameters()]
        values = sum(p.numel() for p in shapes) / 1e6
        for name, make in OPTIMIZERS.items():
            plain, fused = stepped(shapes, make), stepped(shapes, make)
            handle = fuse_optimizer(fused, elementwise=isinstance(fused, Lion))
            fused.step()
            (row,) = handle.report_rows()
            loop = partial(step_one_by_one, plain) if isinstance(plain, Lamb) else plain.step
            case = f"{model} ({values:.1f} million values): {row.value}, {row.note}"
            yield case, {f"{name}, torch": loop, f"{name}, slipstream": fused.step}


def stepped(shapes: list[torch.Tensor], make: Callable[[Any], Optimizer]) -> Optimizer:
    """An optimizer with gradients and a state."""
    parameters = [nn.Parameter(p.clone()) for p in shapes]
    for p in parameters:
        p.grad = 1e-3 * torch.randn_like(p)
    optimizer = make(parameters)
    optimizer.step()
    return optimizer


def rows(cases: Cases, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The seconds of every variant, and how many times as fast as the first, in pairs."""
    wait: Call = torch.cuda.synchronize if args.device == "cuda" else bool

    def turn(variants: Mapping[str, Call], name: str) -> float:
        wait()
        start = time.perf_counter()
        variants[name]()
        wait()
        return time.perf_counter() - start

    for case, variants in cases:
        if args.only not in case:
            continue
        torch._dynamo.reset()  # sizes of the cases before count against its limit of versions
        seconds = take_turns([*variants], partial(turn, variants), args.rounds, args.warmup, case)
        first = seconds[next(iter(seconds))]
        for name, spent in seconds.items():
            ratios = [a / b for a, b in zip(first, spent, strict=True)]
            yield {
                "case": case,
                "variant": name,
                "seconds": quartiles(spent),
                "times_as_fast": quartiles(ratios),
            }


PARTS: dict[str, Callable[[], Cases]] = {
    "kernels": kernels,
    "patterns": patterns,
    "networks": networks,
    "graphs": graphs,
    "optimizers": optimizers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS,))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(message=f"{args.part}: no GPU here, so this part is left out\n")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.set_default_device(args.device)
    if args.part == "graphs" and args.device == "cpu":
        parser.error("graphs: --device cuda is needed")
    cases = PARTS[args.part]()
    found = list(rows(cases, args))
    entry = {
        "part": args.part,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "a CPU",
        "threads": args.threads,
        "rounds": args.rounds,
        "rows": found,
    }
    finish(args.json, "fusion", entry)


if __name__ == "__main__":
    main()
