"""Growth over numbers of ranks: what must hold on any machine, and who takes over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks import scale_out
from benchmarks.pages import results
from slipstream.errors import ClusterError, StrategyError
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.model import seconds_of
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.scale_out.growth import Growth, GrowthPoint, Takeover, grow, techniques
from slipstream.planner.scale_out.shape import ScaleOutConfig
from slipstream.strategy import Strategy
from slipstream.trace import Trace
from tests.planner.networks import ring_profile
from tests.planner.scale_out.shapes import document, place, shape
from tests.planner.workloads import workload

DDP = Strategy.load("ddp")


def times(one: ScaleOutConfig, ranks: int) -> dict[str, float]:
    """Seconds of each technique."""
    growth = grow(lambda n: place(one, n), [ranks], DDP, one.fabric, lossy=True)
    return {point.technique: point.seconds for point in growth.points}


machines = st.fixed_dictionaries(
    {
        "host_gbytes": st.floats(0.1, 100),
        "inside_gbytes": st.floats(10, 500),
        "teraflops": st.floats(10, 500),
        "host_us": st.floats(0, 100),
    }
)
sizes = st.fixed_dictionaries(
    {"tensor": st.sampled_from([1, 2, 8]), "pipeline": st.sampled_from([1, 2, 4])}
)


@settings(max_examples=12, deadline=None)
@given(machine=machines, parallel=sizes, better=st.sampled_from(["host_gbytes", "teraflops"]))
def test_a_faster_machine_is_never_slower(machine, parallel, better) -> None:
    slow = times(shape(machine=machine, parallel=parallel), 64)
    faster = {**machine, better: 2 * machine[better]}
    fast = times(shape(machine=faster, parallel=parallel), 64)
    assert {"sharded", "local, 16 steps"} <= slow.keys() & fast.keys()
    for technique in slow.keys() & fast.keys():
        assert fast[technique] <= slow[technique] * (1 + 1e-9)


def test_racks_and_stragglers_never_make_anything_faster() -> None:
    plain = times(shape(), 512)
    base = "by_bytes 25 (first 1)"
    assert {base, "hierarchical", "direct", "local, 128 steps"} <= plain.keys()
    racks = times(shape(fabric={"hosts_per_rack": 4, "oversubscription": 8.0}), 512)
    late = times(shape(fabric={"jitter": 0.1}), 512)
    for name in plain.keys() & racks.keys() & late.keys():
        assert racks[name] >= plain[name]
        assert late[name] > plain[name]
    assert racks["direct"] > 1.01 * plain["direct"]
    rings = {"backend": "nccl"}  # which leave a rack once
    few = {"hosts_per_rack": 4, "oversubscription": 8.0}
    of_gpus = times(shape(machine=rings), 512)
    assert times(shape(machine=rings, fabric=few), 512) == of_gpus
    assert {"direct", "hierarchical"}.isdisjoint(of_gpus)  # GPUs have none of them
    # Those that meet rarely wait for a mean of many updates.
    waits = {name: late[name] / plain[name] for name in plain.keys() & late.keys()}
    assert waits["local, 128 steps"] < waits["local, 16 steps"] < waits[base]


@pytest.mark.parametrize("ranks", [128, 512])
def test_micro_batches_are_one_batch_each_of_an_accumulation(ranks: int) -> None:
    """All parameters are needed in the forward of the first."""
    whole = place(shape(), ranks)
    count = 8192 // ranks // 2
    one = place(shape(batch={"total": None, "per_replica": 2}), ranks)
    for settings_of in ({}, {"transport": "sharded"}):
        strategy = DDP.with_gradients(**settings_of)
        each = seconds_of(strategy.with_gradients(accumulate=count), *one)
        assert seconds_of(strategy, *whole) == pytest.approx(each, rel=0.005)


def test_direct_sends_of_a_host_share_its_card_and_those_of_a_rack_its_uplink() -> None:
    def seconds(name: str, **parts: dict[str, float]) -> float:
        work, network = place(shape(**parts), 64)
        strategy = DDP.with_gradients(transport=name, split="single")
        return seconds_of(strategy, work, network) - float(work.alone(1)[0])

    few = {"fabric": {"hosts_per_rack": 4, "oversubscription": 8.0}}
    num_bytes = sum(gradient.num_bytes for gradient in place(shape(), 64).workload.gradients)
    of_host = 8 * 2 * num_bytes * 56 / 64 / 10e9  # 8 ranks, each to 56 of 64, twice
    assert seconds("direct") == pytest.approx(of_host, rel=0.02)
    assert seconds("direct", **few) == pytest.approx(of_host * 8 * 4 / 7, rel=0.02)
    assert seconds("flat", **few) == pytest.approx(seconds("flat"))
    # small segments, many at once, wait for the same links
    work, network = place(shape(**few), 64)
    split = {"kind": "by_bytes", "megabytes": 25}
    pieces = seconds_of(DDP.with_gradients(transport="direct", split=split), work, network)
    assert pieces > 0.9 * of_host * 8 * 4 / 7


def test_replicas_that_do_not_fill_hosts_span_as_many_as_their_ranks() -> None:
    tight = {"hosts_per_rack": 4, "oversubscription": 8.0}
    parts = {"parallel": {"pipeline": 2}, "batch": {"total": 8160}}
    plain, racks = (place(shape(**parts, fabric=one), 24).network for one in ({}, tight))
    assert plain == racks  # 12 neighbours are on two hosts, in one rack


def test_one_replica_exchanges_nothing() -> None:
    one = shape(parallel={"tensor": 8}, batch={"total": 64})
    work, network = place(one, 8)
    assert work.num_ranks == network.world_size == 1
    assert seconds_of(DDP, work, network) == pytest.approx(work.alone(1)[0])


def test_the_traced_ranks_are_predicted_as_they_are_without_scale_out() -> None:
    work, network = workload(), ring_profile(hosts=4)
    recorded = simulate(work, CommPlan.of(DDP, work.gradients), network, steps=2)
    forecast = Forecast.of(
        Trace(recorded.events, recorded.meta | {"strategy": DDP.document(full=True)}), network
    )
    growth = forecast.over_ranks([4, 8])
    assert growth.at(4)[growth.base].seconds == pytest.approx(forecast.seconds(DDP))
    assert growth.at(4)[growth.base].speed_up == 1.0
    eight = growth.at(8)[growth.base]
    assert eight.speed_up == pytest.approx(2 * forecast.seconds(DDP) / eight.seconds)
    assert eight.rank_hours == pytest.approx(8 * eight.seconds / 3.6)
    with pytest.raises(ClusterError, match="9 ranks are not a multiple of 2"):
        forecast.over_ranks([9], ranks_per_node=2)


def test_a_faster_technique_takes_over_beyond_the_error_of_predictions() -> None:
    def point(ranks: int, technique: str, seconds: float) -> GrowthPoint:
        return GrowthPoint(ranks, technique, DDP, seconds, 1.0, 1.0, "reordered")

    growth = Growth(
        "base",
        (
            *(point(8, "base", 1.0), point(8, "b", 0.98), point(8, "c", 2.0)),
            *(point(16, "base", 1.2), point(16, "b", 1.01), point(16, "c", 1.0)),
            *(point(32, "base", 2.0), point(32, "b", 1.5), point(32, "c", 1.0)),
        ),
    )
    assert [one.technique for one in growth.chosen()] == ["base", "b", "c"]
    assert growth.takeovers() == [
        Takeover(16, "b", pytest.approx(1.2 / 1.01)),
        Takeover(32, "c", 1.5),
    ]


def test_only_what_keeps_the_mathematics_is_tried_unless_more_is_allowed() -> None:
    here = place(shape(), 64)
    exact, every = techniques(DDP, here), techniques(DDP, here, lossy=True)
    assert {one.exactness for some in exact.values() for one in some} == {"reordered"}
    assert [*every][: len(exact)] == [*exact]
    assert {"hierarchical", "sharded"} <= exact.keys()
    assert {"local, 16 steps"} <= every.keys() - exact.keys()
    owned = replace(here.workload, shardable=False)
    assert "sharded" not in techniques(DDP, here._replace(workload=owned))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"parallel": {"pipeline": 5}}, r"model.layers is 24, which 5 parts"),
        ({"parallel": {"interleaved": 4}}, r"parallel.interleaved is 4 with pipeline 1"),
        ({"parallel": {"tensor": 3}}, r"model.heads is 16, which parallel.tensor 3"),
        ({"batch": {"per_replica": 4}}, r"batch.*total is 8192, per_replica 4; give one"),
        ({"fabric": {"oversubscription": 4.0}}, r"fabric.*needs hosts_per_rack"),
        ({"machine": {"teraflop": 1.0}}, r"machine.teraflop: no such setting; did you mean"),
        ({"machine": {"host_gbytes": 0.0}}, r"machine.host_gbytes: got 0.0; allowed: .* > 0"),
        ({"model": {"layers": "24"}}, r"model.layers: got '24'; allowed: a whole number"),
    ],
)
def test_a_wrong_shape_names_the_place(parts, words) -> None:
    with pytest.raises(StrategyError, match=words):
        ScaleOutConfig.model_validate(document(**parts))


@pytest.mark.parametrize(
    ("parts", "ranks", "words"),
    [
        ({}, 12, "12 ranks are not a multiple of 8, the ranks of each host"),
        ({"parallel": {"tensor": 8, "pipeline": 3}}, 64, "not a multiple of 24"),
        ({"batch": {"total": 100}}, 64, "batch.total is 100, which 64 replicas on 64 ranks"),
        ({"batch": {"micro": 3}}, 64, "micro-batches of 3 do not divide"),
    ],
)
def test_ranks_that_cannot_share_the_work_are_refused(parts, ranks, words) -> None:
    with pytest.raises(StrategyError, match=words):
        place(shape(**parts), ranks)


# Public measurements.


def test_the_published_rows_are_predicted_as_the_result_says() -> None:
    found = results()["scale-out"]["transformers"]
    predicted = {row["name"]: row["predicted"] for row in found["rows"]}
    rows = scale_out.read(Path(scale_out.DATA) / "multi_node_iterations.csv")
    assert len(rows) == len(predicted) == 44
    for row in rows[::4]:
        again = scale_out._row(row, "", found["machine"])
        assert again.predicted == pytest.approx(predicted[again.name], rel=1e-6)


def test_further_rows_of_an_unknown_algorithm_say_what_they_lack(tmp_path) -> None:
    lines = (scale_out.DATA / "slow_tcp_steps.csv").read_text().splitlines()
    slow = next(line for line in lines if line.startswith("ddp,1,200m"))
    file = tmp_path / "more.csv"
    file.write_text("\n".join([lines[0], slow.replace("ddp", "other")]))
    with pytest.raises(SystemExit, match="other: no row of it at 5g"):
        scale_out.slow_steps(file)
    file.write_text("\n".join([lines[0], slow]))
    (further,) = [r for r in scale_out.slow_steps(file)["rows"] if r["kind"] == "further"]
    assert further["name"] == "ddp, 1 steps, 200mbit, run 0"


def test_the_order_of_rows_is_that_of_their_pairs() -> None:
    rows = [scale_out.Row("", "", measured, measured) for measured in (1.0, 3.0, 2.0)]
    assert scale_out.tau(rows) == 1.0
    assert scale_out.tau([replace(row, predicted=-row.measured) for row in rows]) == -1.0
