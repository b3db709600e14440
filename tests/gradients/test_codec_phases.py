"""Codecs that begin late or send less and less: laid out, and counted, for what travels now."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.gradients.report_rows import exchange_rows
from slipstream.gradients.segments import SegmentStats
from slipstream.testbed import Testbed, unavailable
from slipstream.transport.flat import FlatTransport
from slipstream.transport.requests import sent_bytes
from tests.gradients.codecs import session_of, step_of, wide
from tests.harness.scripts import said_on_hosts

CODECS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "int8": ({"kind": "int8"}, (0,)),
    "onebit": ({"kind": "onebit", "block": 64, "start_step": 2}, (0, 2)),
    "powersgd": ({"kind": "powersgd", "rank": 1, "start_step": 3}, (0, 3)),
    "dgc": (
        {"kind": "dgc", "density": 0.01, "start_step": 1, "warmup_steps": 2, "warmup": [0.1]},
        (0, 1, 3),
    ),
}
"""A codec, and the updates from which on it works in another way."""
UPDATES = 5
_no_hosts = unavailable()
SPLIT = {
    "kind": "by_bytes",
    "megabytes": 0.004,
    "first_megabytes": None,
    "last_megabytes": None,
}


def phases(codec: dict[str, Any]) -> list[dict[str, Any]]:
    """The layout of every update, what the report says, and the bytes that requests send."""
    model, seen, sent = wide(), [], [0.0]
    start, count = FlatTransport.start, dist.get_world_size()

    def counted(self, request):
        sent[0] += sent_bytes(request, count)
        return start(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatTransport, "start", counted)
        with session_of(model, codec, split=SPLIT) as session:
            step_of(session, 0)
            for step in range(1, UPDATES):
                sent[0] = 0.0
                report = session.report()
                segments = [(s.num_bytes, s.wire_bytes) for s in session.segments]
                step_of(session, step)
                seen.append({"segments": segments, "sent": sent[0], "report": report})
    return seen


@pytest.mark.parametrize(("codec", "begins"), CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("world", ["two", "four"])
def test_the_layout_is_of_the_phase_that_runs(request, world, codec, begins) -> None:
    ranks = request.getfixturevalue(world)
    dense = ranks.run(phases, None)[0][0]["segments"]
    for seen in ranks.run(phases, codec):
        for step, update in enumerate(seen, start=1):
            whole, wire = map(sum, zip(*update["segments"], strict=True))
            share = 2 * (ranks.size - 1) / ranks.size
            flags = 0.06 * share * whole if wire < whole else 0.02 * share * whole
            assert share * wire <= update["sent"] <= share * wire + flags
            later = [first for first in begins if first > step]
            if later:
                assert f"until update {later[0]}" in update["report"]
            if codec["kind"] != "int8" and step < begins[1]:
                assert update["segments"] == dense
                assert f"not yet: dense until update {begins[1]}" in update["report"]
            else:
                assert len(update["segments"]) < len(dense) or codec["kind"] == "dgc"
                assert wire < whole


def resumed(codec: dict[str, Any], at: int) -> list[torch.Tensor]:
    """Parameters of a run that goes on from a checkpoint, beside those of one that never stops."""
    whole = wide()
    with session_of(whole, codec, split=SPLIT) as session:
        for step in range(UPDATES):
            if step == at:
                state = session.state_dict()
                rest = deepcopy([whole.state_dict(), session.optimizer.state_dict()])
            step_of(session, step)
    again = wide(seed=1)
    with session_of(again, codec, split=SPLIT) as session:
        again.load_state_dict(rest[0])
        session.optimizer.load_state_dict(rest[1])
        session.load_state_dict(state)
        for step in range(at, UPDATES):
            step_of(session, step)
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    return [p.detach() for p in again.parameters()]


@pytest.mark.parametrize("codec", [codec for codec, _ in CODECS.values()], ids=CODECS)
@pytest.mark.parametrize("at", [1, 3])
def test_a_checkpoint_of_one_phase_goes_on_in_the_next(two, codec, at) -> None:
    one, other = two.run(resumed, codec, at)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


RANK = """
import json, sys, torch, torch.distributed as dist, slipstream

def sent():
    # The counters of this network namespace, which are those of the host.
    [line] = [x for x in open("/proc/self/net/dev") if x.strip().startswith("eth0:")]
    return int(line.split()[9])

def measured(codec):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    log = []
    strategy = {"gradients": {"codec": codec}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        for step in range(5):
            wire = sum(segment.wire_bytes for segment in session.segments)
            dist.barrier(group)
            before = sent()
            dist.barrier(group)
            session.backward(model(torch.randn(4, 1024)).square().mean())
            dist.barrier(group)
            log.append((wire, sent() - before))
            dist.barrier(group)
            session.step()
    return log[1:]

torch.set_num_threads(1)
dist.init_process_group("gloo")
group = dist.new_group()
print(json.dumps([measured(codec) for codec in json.loads(sys.argv[1])]), flush=True)
dist.barrier(group)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def on_hosts(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[list[tuple[int, int]]]]:
    """Bytes that are told and bytes on the link of each codec, by update and rank."""
    names = ["onebit", "dgc"]
    words = [json.dumps([CODECS[name][0] for name in names])]
    with Testbed(nodes=3, rate="1gbit") as bed:
        said = said_on_hosts(bed, RANK, tmp_path_factory.mktemp("hosts"), words, words, words)
    by_codec = zip(*map(json.loads, said), strict=True)
    return {
        name: [list(step) for step in zip(*ranks, strict=True)]
        for name, ranks in zip(names, by_codec, strict=True)
    }


@pytest.mark.skipif(_no_hosts is not None, reason=str(_no_hosts))
@pytest.mark.parametrize("name", ["onebit", "dgc"])
def test_the_bytes_that_are_told_are_those_on_the_link(
    name: str, on_hosts: dict[str, list[list[tuple[int, int]]]]
) -> None:
    for step, ranks in enumerate(on_hosts[name], start=1):
        share = [sent / (2 * 2 / 3 * wire) for wire, sent in ranks]
        assert min(share) >= 1, (step, ranks)
        assert min(share) <= 1.02, (step, ranks)  # packets that got lost are sent again
        assert (ranks[0][0] < 16 * 2**20) == (step >= CODECS[name][1][1])


def poisoned_early(codec: dict[str, Any]) -> list[bool]:
    """Whether each update counts, where the second one's gradients are infinite on one rank."""
    model = wide()
    with session_of(model, codec, split=SPLIT) as session:
        counts = [
            step_of(session, step, float("inf") if step == 1 and dist.get_rank() == 0 else 1.0)
            for step in range(UPDATES)
        ]
    assert all(p.isfinite().all() for p in model.parameters())
    return counts


@pytest.mark.parametrize("name", ["onebit", "powersgd", "dgc"])
def test_an_overflow_is_skipped_before_the_codec_begins_too(two, name) -> None:
    for counts in two.run(poisoned_early, CODECS[name][0]):
        assert counts == [True, False, True, True, True]


def test_the_report_shows_the_bytes_of_a_small_model() -> None:
    segment = SegmentStats(("weight",), num_bytes=40_000, num_collectives=1, wire_bytes=10_000)
    rows = {row.setting: row for row in exchange_rows([segment], lambda: 20_000)}
    assert (rows["segments"].value, rows["segments"].note) == ("0.038 MB in 1", "MB: 0.038")
    assert rows["codec"].value == "0.038 MB -> 0.010 MB on the wire"
    assert "4.0 times fewer; keeps 2 x 0.019 MB" in rows["codec"].note
