"""Slots never overlap, whatever is taken and given back, and few slabs suffice."""

from __future__ import annotations

from hypothesis import given, strategies as st

from slipstream.memory.offload.slots import ALIGNMENT, Slots

SLAB = 2**16


@given(
    st.lists(st.tuples(st.integers(1, 3 * SLAB), st.booleans(), st.integers(0, 99)), max_size=60)
)
def test_taken_slots_do_not_overlap(steps):
    slabs, taken = [], []
    slots = Slots(slabs.append, SLAB)
    for num_bytes, give_back, which in steps:
        if give_back and taken:
            slots.give_back(taken.pop(which % len(taken)))
            continue
        slot = slots.take(num_bytes)
        assert num_bytes <= slot.num_bytes
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset + slot.num_bytes <= slabs[slot.slab]
        for other in taken:
            apart = slot.slab != other.slab
            apart |= slot.offset + slot.num_bytes <= other.offset
            assert apart or other.offset + other.num_bytes <= slot.offset
        taken.append(slot)
    assert slots.reserved_bytes == sum(slabs)


def test_a_slab_that_is_refused_takes_nothing():
    def refuse(num_bytes):
        raise MemoryError

    slots = Slots(refuse, SLAB)
    for _ in range(2):
        try:
            slots.take(1)
        except MemoryError:
            assert slots.reserved_bytes == 0


def test_changing_sizes_need_no_more_slabs():
    slabs = []
    slots = Slots(slabs.append, SLAB)
    for length in range(100, 5000, 7):
        taken = [slots.take(length) for _ in range(4)]
        for slot in taken:
            slots.give_back(slot)
    assert slabs == [SLAB]
