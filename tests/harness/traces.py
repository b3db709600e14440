"""Traces for tests: one made by hand, and any number of random ones."""

from __future__ import annotations

from hypothesis import HealthCheck, settings, strategies as st

from slipstream.trace.event import Event, Trace

MS = 1e-3

many = settings(  # no deadline: it would measure the machine's load
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one folder serves all examples
)


def by_hand(ranks: int = 2, steps: int = 3) -> Trace:
    """Iterations of 100 ms whose numbers are easy to check; rank r starts backward 2r ms late.

    data wait 5, forward 25, backward 40, tail 15, optimizer 10, other 5 ms (on rank 0); of
    allreduce1 20 of 20 ms are hidden, of allreduce2 10 of 25.
    """
    events = []
    for rank in range(ranks):
        late = 2.0 * rank
        for step in range(2, 2 + steps):
            zero = 1000.0 + step
            spans = {
                "iteration": (0, 100),
                "data_wait": (0, 5),
                "forward": (5, 30 + late),
                "backward": (30 + late, 70),
                "allreduce1": (40, 60),
                "allreduce2": (60, 85),
                "optimizer": (85, 95),
            }
            for name, (start, end) in spans.items():
                args = {}
                if name.startswith("allreduce"):
                    args = {
                        "segment": int(name[-1]) - 1,
                        "bytes": 5_000_000,
                        "gradients": 7,
                        "collectives": 1,
                        "ready": zero + (start - 3 + late) * MS,
                    }
                events.append(Event(name, rank, step, zero + start * MS, zero + end * MS, args))
    events.sort(key=lambda event: (event.start, -event.end, event.rank))
    meta = {
        "world_size": ranks,
        "hosts": ["north", "south"] * (ranks // 2) + ["north"] * (ranks % 2),
        "model": "ResNet-50",
        "strategy": {"gradients": {"split": {"kind": "by_bytes", "megabytes": 25.0}}},
        "clock_error": [0.0] + [30e-6] * (ranks - 1),
    }
    return Trace(tuple(events), meta)


_NAMES = ["data_wait", "forward", "backward", "optimizer", "buffers", "eval"]
_NAMES += [f"allreduce{number}" for number in range(1, 4)]


@st.composite
def random_traces(draw: st.DrawFn, scale: float = 1.0) -> Trace:
    """Up to three ranks and three steps, spans anywhere, at whole multiples of ``scale``."""
    point = st.integers(0, 60)
    events = []
    for rank in range(draw(st.integers(1, 3))):
        for step in range(draw(st.integers(1, 3))):
            zero = draw(st.integers(0, 10**6))
            names = ["iteration", *draw(st.lists(st.sampled_from(_NAMES), max_size=12))]
            for name in names:
                low, high = sorted((zero + draw(point), zero + draw(point)))
                args = {"bytes": draw(point)} if name.startswith("allreduce") else {}
                if args and draw(st.booleans()):
                    args["ready"] = low * scale
                events.append(Event(name, rank, step, low * scale, high * scale, args))
    events.sort(key=lambda event: (event.start, -event.end, event.rank))
    return Trace(tuple(events), {"world_size": 3, "hosts": ["a", "b", "c"]})
