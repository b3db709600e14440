"""Codecs over the hierarchical transport: plain sums inside hosts, codecs between them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.strategy import GradientsConfig
from slipstream.transport.hierarchical import HierarchicalTransport
from slipstream.transport.hosts import Rails
from slipstream.transport.transport import make_transport, run
from tests.codecs.hosts import CODECS, NODES, HostsTeam, filled
from tests.gradients import codecs
from tests.harness import reference
from tests.harness.ranks import Ranks
from tests.transport.emulated_hosts import on_hosts


@pytest.fixture(scope="module")
def six() -> Iterator[Ranks]:
    with Ranks(6) as ranks:
        yield ranks


def where(nodes: Sequence[Sequence[int]]) -> list[int]:
    """The host of each rank."""
    hosts = {rank: host for host, node in enumerate(nodes) for rank in node}
    return [hosts[rank] for rank in sorted(hosts)]


Result = tuple[bytes, list[int]]
EXCHANGED = ["bf16", "int8, stochastic, feedback", "onebit", "dgc", "powersgd"]


def exchanges(nodes: Sequence[Sequence[int]], between: str) -> list[Result]:
    """What a rank gets from every codec in two steps: values, and flags."""
    hosts, results = where(nodes), []
    group, rank = dist.new_group([*range(len(hosts))]), dist.get_rank()
    if rank < len(hosts):
        with on_hosts(hosts):
            config = GradientsConfig(
                transport={"kind": "hierarchical", "between": between}
            ).transport
            transport = make_transport(config, group)
        assert isinstance(transport, HierarchicalTransport)
        for name in EXCHANGED:
            team = HostsTeam(CODECS[name], nodes)
            compressor = team.compressors[rank]
            assert transport.rails == Rails.of(nodes, rank)
            for step in range(2):
                values, flags = filled(compressor, team.gradients(step)[rank], rank)
                run(compressor.exchange(values, flags, step), transport)
                compressor.commit()
                results.append((values[: team.size].numpy().tobytes(), flags.tolist()))
        transport.close()
    dist.barrier()
    return results


def all_exchanges(cases: Sequence[tuple[Sequence[Sequence[int]], str]]) -> list[list[Result]]:
    return [exchanges(*case) for case in cases]  # in one meeting of the ranks


def test_every_codec_on_every_numbering(six: Ranks) -> None:
    # The flat ones first: they need ranks that have made as many groups as each other.
    cases = [(NODES[name], "flat") for name in ("3 x 2", "2 x 3, permuted", "2 x 2, permuted")]
    cases += [(nodes, "direct") for nodes in NODES.values()]
    for (nodes, between), *by_rank in zip(cases, *six.run(all_exchanges, cases), strict=True):
        first, *others = by_rank[: sum(map(len, nodes))]
        assert all(other == first for other in others)
        steps = iter(first)
        for name in EXCHANGED:
            team = HostsTeam(CODECS[name], nodes)
            for step in range(2):
                expected = team.exchange(team.gradients(step), step)[0]
                values, flags = next(steps)
                if between == "direct":  # sums in the order of the hosts, as the reference
                    assert values == expected.numpy().tobytes(), (name, nodes)
                assert flags == team.flags[0].tolist(), (name, nodes)


@contextmanager
def session_of(model: nn.Module, codec: object, hosts: Sequence[int]) -> Iterator[Any]:
    gradients = {"transport": "hierarchical", "codec": codec, "split": "per_gradient"}
    with on_hosts(hosts):
        made = slipstream.accelerate(model, codecs.sgd(model), None, {"gradients": gradients})
    with made as session:
        yield session


def resumed(codec: object, hosts: Sequence[int], dense: nn.Module) -> tuple[str, str, float]:
    """Four steps at once; two, a checkpoint, two in a new session; how far from no codec."""
    whole, cut, again = (codecs.wide(seed) for seed in (0, 0, 7))
    train(whole, codec, hosts)
    with session_of(cut, codec, hosts) as session:
        for step in range(2):
            codecs.step_of(session, step)
        kept = io.BytesIO()
        torch.save((cut.state_dict(), session.optimizer.state_dict(), session.state_dict()), kept)
    kept.seek(0)
    weights, momentum, state = torch.load(kept, weights_only=True)
    again.load_state_dict(weights)
    with session_of(again, codec, hosts) as session:
        session.optimizer.load_state_dict(momentum)
        session.load_state_dict(state)
        for step in range(2, 4):
            codecs.step_of(session, step)
    off = codecs.apart(whole, dense, codecs.wide())
    return reference.digest(whole), reference.digest(again), off


def train(model: nn.Module, codec: object, hosts: Sequence[int]) -> None:
    with session_of(model, codec, hosts) as session:
        for step in range(4):
            codecs.step_of(session, step)


def all_resumed(hosts: Sequence[int]) -> Mapping[str, tuple[str, str, float]]:
    dense = codecs.wide()
    train(dense, None, hosts)
    return {name: resumed(codecs.CODECS[name], hosts, dense) for name in TRAINED}


TRAINED = ["bf16", "int8, stochastic", "onebit", "dgc", "powersgd", "mixed"]


def test_training_goes_on_bit_for_bit_alike_on_all_ranks(four: Ranks) -> None:
    first, *others = four.run(all_resumed, [0, 1, 0, 0])  # a rank alone on its host
    assert all(other == first for other in others)
    for name, (whole, again, off) in first.items():
        assert whole == again, name
        assert off < codecs.NEAR[name], name


def overflow(hosts: Sequence[int]) -> list[tuple[list[bool], str]]:
    """fp16 keeps the loss scale on its way; what overflows on one rank skips the step on all."""
    outcomes = []
    for infinite in (True, False):
        model, updated = codecs.wide(), []
        with session_of(model, {"kind": "half", "dtype": "fp16"}, hosts) as session:
            for step in range(3):
                if infinite and step == 1:
                    poison = float("inf") if dist.get_rank() == 2 else 1.0
                    updated.append(codecs.step_of(session, step, poison, loss_scale=1024.0))
                updated.append(codecs.step_of(session, step, loss_scale=1024.0))
        outcomes.append((updated, reference.digest(model)))
    return outcomes


def test_a_sum_that_overflows_skips_the_step_on_all_ranks(four: Ranks) -> None:
    first, *others = four.run(overflow, [0, 1, 0, 1])
    assert all(other == first for other in others)
    (updated, digest), (_, without) = first
    assert updated == [True, False, True, True]
    assert digest == without


def one_host(codec: object) -> tuple[list[str], str, float]:
    """Where nothing travels between hosts nothing is compressed; momentum stays where it is."""
    digests, text, momentum = [], "", 0.0
    for kind in (None, codec):
        model = codecs.wide()
        with session_of(model, kind, [0] * 4) as session:
            for step in range(2):
                codecs.step_of(session, step)
            text, momentum = session.report(), session.optimizer.param_groups[0]["momentum"]
        digests.append(reference.digest(model))
    return digests, text, momentum


def test_on_one_host_the_codec_is_off_and_the_report_says_so(four: Ranks) -> None:
    codec = {"kind": "dgc", "warmup_steps": 0}
    for (coded, dense), text, momentum in four.run(one_host, codec):
        assert coded == dense
        assert "4 ranks on 1 host" in text
        assert "codec dgc is off" in " ".join(text.split())
        assert momentum == 0.9
