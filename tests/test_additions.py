"""A codec and a transport from outside the package: what an addition touches, as the guide says.

Each is a class of settings, a class that works, and a row in a table. Everything else must take
them as it takes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.codecs.blocks import BlockCodec
from slipstream.codecs.make import CODECS, Codec
from slipstream.codecs.two_phase import TwoPhaseCompressor
from slipstream.errors import SlipstreamError, StrategyError
from slipstream.planner.forecast import Forecast
from slipstream.strategy import CodecVariant, Strategy, TransportVariant
from slipstream.trace import read
from slipstream.transport.flat import FlatTransport
from slipstream.transport.requests import Request
from slipstream.transport.transport import TRANSPORTS
from tests.harness.ranks import Ranks
from tests.planner.networks import ethernet_profile


class NibbleConfig(CodecVariant, kind="nibble", exactness="lossy"):
    """Gradients travel in steps of a sixth of the largest value of their block."""

    block: int = 64
    """Values that share a scale."""

    start_step: int = 1
    """Updates that send gradients uncompressed first."""


@dataclass(frozen=True)
class NibbleCodec(BlockCodec):
    """Whole steps between -7 and 7, a byte each, as this is a toy."""

    bits: ClassVar[int] = 8
    code: ClassVar[torch.dtype] = torch.int8
    levels: ClassVar[int] = 7

    def _encode(self, blocks: Tensor, scales: Tensor, random: Any) -> Tensor:
        torch.amax(blocks.abs(), 1, out=scales)
        scales.div_(self.levels).clamp_(min=torch.finfo(blocks.dtype).tiny)
        return (blocks / scales[:, None]).round_()

    def _steps(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes


class CountingConfig(TransportVariant, kind="counting", exactness="reordered"):
    """As ``flat``, and counts what it starts."""


class CountingTransport(FlatTransport):
    started = 0

    def __init__(self, config: CountingConfig, group: dist.ProcessGroup) -> None:
        super().__init__(slipstream.strategy.FlatConfig(), group)

    def start(self, request: Request) -> Any:
        CountingTransport.started += 1
        return super().start(request)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch)


def add(patch: pytest.MonkeyPatch) -> None:
    """The two rows."""
    patch.setitem(TRANSPORTS, CountingConfig, CountingTransport)
    made = Codec(
        lambda config, bucket: bucket.compressor(
            *(TwoPhaseCompressor, NibbleCodec(config.block)),
            feedback=True,
            start_step=config.start_step,
        ),
        lambda config, shape, dtype, _: NibbleCodec(config.block).wire_bytes(prod(shape), dtype),
    )
    patch.setitem(CODECS, NibbleConfig, made)


@pytest.mark.parametrize("text", ["nibble", "{kind: nibble, block: 128}"])
def test_a_strategy_file_names_them(text: str) -> None:
    strategy = Strategy.from_yaml(f"gradients: {{codec: {text}, transport: counting}}")
    assert isinstance(strategy.gradients.codec, NibbleConfig)
    assert isinstance(strategy.gradients.transport, CountingConfig)
    assert Strategy.from_yaml(strategy.to_yaml()) == strategy
    assert strategy.exactness == "lossy"
    with pytest.raises(StrategyError, match="block"):
        Strategy.load({"gradients": {"codec": {"kind": "nibble", "block": "many"}}})
    with pytest.raises(StrategyError, match="allowed"):
        Strategy.load({"gradients": {"codec": "nibbel"}})


def trained(gradients: dict[str, Any], folder: str = "") -> tuple[Tensor, str, int, dict[str, Any]]:
    """Parameters, report and requests after some updates, and the state of the session."""
    with pytest.MonkeyPatch.context() as patch:
        add(patch)
        CountingTransport.started = 0
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = {"steps": 3, "folder": folder} if folder else {}
        strategy = {"gradients": gradients, "trace": trace}
        with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
            for step in range(8):
                x = torch.linspace(session.rank + step, 5.0, 128).sin().view(4, 32)
                session.backward(model(x).square().mean())
                session.step()
            state, report = session.state_dict(), session.report(full=True)
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        return values, report, CountingTransport.started, state


def test_they_train_beside_all_the_rest(two: Ranks) -> None:
    plain = two.run(trained, {"split": "per_layer"})
    carried = two.run(trained, {"split": "per_layer", "transport": "counting"})
    coded = two.run(trained, {"transport": "counting", "codec": "nibble"})
    for (expected, *_), (same, report, started, _), (near, told, _, state) in zip(
        plain, carried, coded, strict=True
    ):
        assert torch.equal(same, expected)
        assert started >= 8 * 2
        assert "counting" in report
        moved = (near - expected).norm() / expected.norm()
        assert 0 < moved < 0.02
        assert "nibble" in told
        assert state["codecs"]  # error feedback is saved
    assert torch.equal(coded[0][0], coded[1][0])


@pytest.mark.usefixtures("added")
def test_what_nobody_priced_is_refused_and_not_guessed(two: Ranks, tmp_path: Any) -> None:
    two.run(trained, {"transport": "counting", "codec": "nibble"}, str(tmp_path))
    with pytest.raises(SlipstreamError, match=r"counting|nibble"):
        Forecast.of(read(tmp_path / "trace.json"), ethernet_profile(2))
