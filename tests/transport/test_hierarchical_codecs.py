"""Codecs over the hierarchical transport: plain sums inside hosts, codecs between them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.codecs import HostsCompressor
from slipstream.strategy import Gradients
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


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def where(nodes: Sequence[Sequence[int]]) -> list[int]:
    """The host of each rank."""
    hosts = {rank: host for host, node in enumerate(nodes) for rank in node}
    return [hosts[rank] for rank in sorted(hosts)]


def exchanges(nodes: Sequence[Sequence[int]], between: str) -> None:
    """Every codec, two steps each; the reference runs all ranks in each of them."""
    hosts = where(nodes)
    group, rank = dist.new_group([*range(len(hosts))]), dist.get_rank()
    if rank < len(hosts):
        with on_hosts(hosts):
            config = Gradients(transport={"kind": "hierarchical", "between": between}).transport
            transport = make_transport(config, group)
        for name, codec in CODECS.items():
            team = HostsTeam(codec, nodes)
            rails = transport.rails
            parameters = [torch.zeros(*shape) for shape in team.shapes]
            mine = HostsCompressor(codec, parameters, rails, num_flags=len(team.shapes) + 1, seed=3)
            for step in range(2):
                gradients = team.gradients(step)
                expected = team.exchange(gradients, step)[rank]
                values, flags = filled(mine, gradients[rank], rank)
                run(mine.exchange(values, flags, step), transport)
                mine.commit()
                if between == "direct":  # sums in the order of the hosts, as the reference
                    assert torch.equal(values[: team.size], expected), name
                assert torch.equal(flags, team.flags[rank]), name
            digests: list[Any] = [None] * len(hosts)
            dist.all_gather_object(digests, values[: team.size].numpy().tobytes(), group=group)
            assert len(set(digests)) == 1, name
        transport.close()
    dist.barrier()


def all_exchanges(cases: Sequence[tuple[Sequence[Sequence[int]], str]]) -> None:
    for case in cases:  # in one meeting of the ranks, which takes as long as a case
        exchanges(*case)


def test_every_codec_on_every_numbering(six: Ranks) -> None:
    cases = [(nodes, "direct") for nodes in NODES.values()]
    cases += [(NODES[name], "flat") for name in ("2 x 2, permuted", "3 x 2")]
    six.run(all_exchanges, cases)


@contextmanager
def session_of(model: torch.nn.Module, codec: object, hosts: Sequence[int]) -> Iterator[Any]:
    gradients = {"transport": "hierarchical", "codec": codec, "split": "per_gradient"}
    with on_hosts(hosts):
        made = slipstream.accelerate(model, codecs.sgd(model), None, {"gradients": gradients})
    with made as session:
        yield session


def resumed(codec: object, hosts: Sequence[int]) -> tuple[str, str, float]:
    """Five steps at once; three, a checkpoint, two in a new session; how far from no codec."""
    whole, cut, dense, again = (codecs.wide(seed) for seed in (0, 0, 0, 7))
    for model, kind in ((whole, codec), (dense, None)):
        with session_of(model, kind, hosts) as session:
            for step in range(5):
                codecs.step_of(session, step)
    with session_of(cut, codec, hosts) as session:
        for step in range(3):
            codecs.step_of(session, step)
        kept = io.BytesIO()
        torch.save((cut.state_dict(), session.optimizer.state_dict(), session.state_dict()), kept)
    kept.seek(0)
    weights, momentum, state = torch.load(kept, weights_only=True)
    again.load_state_dict(weights)
    with session_of(again, codec, hosts) as session:
        session.optimizer.load_state_dict(momentum)
        session.load_state_dict(state)
        for step in range(3, 5):
            codecs.step_of(session, step)
    off = codecs.apart(whole, dense, codecs.wide())
    return reference.digest(whole), reference.digest(again), off


def all_resumed(hosts: Sequence[int]) -> Mapping[str, tuple[str, str, float]]:
    return {name: resumed(codec, hosts) for name, codec in codecs.CODECS.items()}


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
