"""Slot allocator: exact counts, little waste, memory that changes class whole."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.block import slot_bytes
from kvstore.core.clock import perf_seconds
from kvstore.tiers.buddy import Buddy
from kvstore.tiers.chunks import WASTE_MAX, chunk_order, granule_shift
from kvstore.tiers.drain import DRAIN_PATIENCE
from kvstore.tiers.slab import Slab, SlotState

KIB, MIB = 1 << 10, 1 << 20
HEADER = 256
CLASSES = [(4 * KIB, 256), (64 * KIB, 256), (64 * KIB, 320), (132 * KIB, 256), (1028 * KIB, 512)]


def fill(slab, slot, header=HEADER):
    offsets = slab.reserve(slot, header, 1 << 30)
    for offset in offsets:
        slab.publish(offset)
    return offsets


def empty(slab, offsets):
    for offset in offsets:
        slab.rest(offset)
        slab.free(offset)


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_buddy_never_loses_or_doubles_a_granule(count, steps):
    """I22: blocks taken and free cover the pool exactly, and all merge back in the end."""
    buddy, taken = Buddy(count), []
    for take, number in steps:
        if take:
            at = buddy.take(number) if number <= buddy.max_order else -1
            if at >= 0:
                assert at % (1 << number) == 0
                taken.append((at, number))
        elif taken:
            buddy.give(*taken.pop(number % len(taken)))
        covered = Counter(
            g for at, order in [*taken, *buddy.blocks()] for g in range(at, at + (1 << order))
        )
        assert set(covered) == set(range(count))
        assert max(covered.values()) == 1
    for block in taken:
        buddy.give(*block)
    assert sorted(buddy.blocks()) == sorted(Buddy(count).blocks())


@given(st.integers(1, 200), st.data())
def test_buddy_takes_exactly_what_it_is_told(count, data):
    """A block taken at an address is that block, and nothing overlapping can be taken again."""
    buddy = Buddy(count)
    taken = set()
    for _ in range(10):
        order = data.draw(st.integers(0, buddy.max_order + 1))
        at = data.draw(st.integers(0, count - 1))
        block = set(range(at, at + (1 << order)))
        aligned_inside = at % (1 << order) == 0 and at + (1 << order) <= count
        got = buddy.take_at(at, order)
        assert not got or (aligned_inside and not taken & block)
        if got:
            taken |= block
    assert buddy.free_granules == count - len(taken)


@given(st.integers(128 * KIB, 48 * MIB))
def test_chunks_waste_little(payload):
    """A class of blocks >= 128 KiB wastes at most 4 % of its chunks in a large pool."""
    shift = granule_shift(64 << 30)
    order = chunk_order(slot_bytes(payload), shift, 15)
    size = 1 << order + shift
    assert size >= MIB
    assert 1 - size // slot_bytes(payload) * payload / size <= WASTE_MAX


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(128 * KIB, 2 * MIB), min_size=1, max_size=3), st.integers(0, 2**32))
def test_models_share_a_pool_with_little_waste(payloads, seed):
    """A full pool shared by several block sizes, however interleaved, holds >= 96 % payload."""
    slab = Slab(4 << 30)
    stored, full, turn = 0, set(), seed
    while len(full) < len(payloads):
        turn = (turn * 1103515245 + 12345) % 2**31
        i = turn % len(payloads)
        got = slab.reserve(slot_bytes(payloads[i]), HEADER, 40)
        stored += len(got) * payloads[i]
        if len(got) < 40:
            full.add(i)
    slab.check_integrity()
    assert stored >= (1 - WASTE_MAX) * slab.capacity_bytes


@pytest.mark.parametrize("capacity", [64 * KIB, 100 * KIB, MIB, 10 * MIB + 5, 63 * MIB, 3 << 30])
def test_any_pool_size_is_used(capacity):
    """A pool of any size serves slots that fit it; odd sizes leave no large part unused."""
    slab = Slab(capacity)
    assert capacity - slab.capacity_bytes < max(4096, capacity // 64 + 1)
    got = slab.reserve(64 * KIB, HEADER, 1 << 20)
    assert len(got) * 64 * KIB > 0.9 * slab.capacity_bytes - 64 * KIB
    assert all(0 <= offset <= slab.capacity_bytes - 64 * KIB for offset in got)
    slab.check_integrity()


def test_slots_are_consecutive():
    """Slots of one reservation lie in a row, so that copies coalesce; freed gaps fill first."""
    slab = Slab(64 * MIB)
    offsets = slab.reserve(64 * KIB, HEADER, 100)
    assert offsets == list(range(0, 100 * 64 * KIB, 64 * KIB))
    gap = offsets[33:47]
    empty(slab, gap)
    assert slab.reserve(64 * KIB, HEADER, 14) == gap


def test_empty_chunks_serve_other_classes():
    """Memory that one class freed is there for another without any draining."""
    slab = Slab(64 * MIB)
    empty(slab, fill(slab, 64 * KIB))
    assert len(fill(slab, 1028 * KIB)) >= 60
    slab.check_integrity()


def test_drained_chunk_changes_class():
    """A class that finds no room gets a chunk once its occupants are moved, the cheapest one."""
    slab = Slab(64 * MIB)
    small = fill(slab, 64 * KIB)
    thin = [offset for offset in small if 40 * MIB <= offset < 44 * MIB]
    empty(slab, thin[::2])
    assert slab.reserve(132 * KIB, HEADER, 1) == []
    moving = slab.drain(132 * KIB, HEADER)
    assert moving == thin[1::2]
    assert slab.reserve(64 * KIB, HEADER, 1) == [], "drained memory is not handed out again"
    assert slab.drain(132 * KIB, HEADER) == moving, "asking again gives what is left"
    empty(slab, moving[:-1])
    assert slab.reserve(132 * KIB, HEADER, 1) == []
    assert slab.drain(132 * KIB, HEADER) == moving[-1:]
    empty(slab, moving[-1:])
    got = slab.reserve(132 * KIB, HEADER, 100)
    assert len(got) == 31
    assert all(40 * MIB <= offset < 44 * MIB for offset in got)
    slab.check_integrity()


def test_drain_waits_for_staging_and_resting_slots():
    """Only published blocks are named for moving; others leave by themselves."""
    slab = Slab(64 * MIB)
    first = slab.reserve(64 * KIB, HEADER, 64)
    fill(slab, 64 * KIB)
    kept = first[::16]
    empty(slab, sorted(set(first) - set(kept)))
    slab.rest(kept[1])
    assert slab.drain(132 * KIB, HEADER) == []
    assert slab.reserve(132 * KIB, HEADER, 1) == []
    slab.free(kept[1])
    empty(slab, [kept[0], *kept[2:]])
    assert len(slab.reserve(132 * KIB, HEADER, 31)) == 31


def test_drain_takes_a_larger_chunk_whole():
    """A region inside a larger chunk is freed with all of that chunk."""
    slab = Slab(128 * MIB)
    large = fill(slab, 1028 * KIB)
    empty(slab, [offset for offset in large if offset >= 64 * MIB][3:])
    moving = slab.drain(64 * KIB, HEADER) or slab.drain(64 * KIB, HEADER)
    empty(slab, moving)
    assert len(slab.reserve(64 * KIB, HEADER, 16)) == 16
    slab.check_integrity()


def test_drain_is_pointless_within_one_class():
    """With one class there is nothing to gain from moving blocks."""
    slab = Slab(64 * MIB)
    fill(slab, 64 * KIB)
    assert slab.drain(64 * KIB, HEADER) == []


def test_drain_is_not_needed_with_room():
    """Nothing is moved while the class has a slot, or memory is free."""
    slab = Slab(64 * MIB)
    slab.reserve(64 * KIB, HEADER, 3)
    assert slab.drain(64 * KIB, HEADER) == []
    assert slab.drain(132 * KIB, HEADER) == []


@pytest.mark.parametrize("how", ["cancel", "forget"])
def test_drains_end(how):
    """A drain that is called off, or not asked about for long, gives its slots back."""
    slab = Slab(64 * MIB)
    small = fill(slab, 64 * KIB)
    empty(slab, small[5:10])
    assert slab.drain(132 * KIB, HEADER) != []
    assert slab.reserve(64 * KIB, HEADER, 5) == []
    if how == "cancel":
        slab.cancel_drain(132 * KIB, HEADER)
    else:
        for _ in range(DRAIN_PATIENCE + 1):
            slab.reserve(64 * KIB, HEADER, 0)
    assert slab.reserve(64 * KIB, HEADER, 5) == small[5:10]
    slab.check_integrity()


def test_refused_chunks_are_not_given():
    """A chunk whose headers find no memory is not handed out, nor lost."""
    slab = Slab(64 * MIB, assign=lambda chunk: False)
    assert slab.reserve(64 * KIB, HEADER, 10) == []
    assert slab.free_bytes == slab.capacity_bytes
    slab.check_integrity()


def test_chunks_are_told_of():
    """Every chunk is announced before its first slot is given, and its end once."""
    alive, log = set(), []

    def assign(chunk):
        assert chunk.offset not in alive
        alive.add(chunk.offset)
        log.append(chunk)
        return True

    slab = Slab(64 * MIB, assign, lambda chunk: alive.remove(chunk.offset))
    empty(slab, fill(slab, 64 * KIB))
    fill(slab, 132 * KIB)
    assert {chunk.offset for chunk in slab.chunks()} == alive
    assert {chunk.slot_bytes for chunk in log} == {64 * KIB, 132 * KIB}


@pytest.mark.parametrize(
    "chunk",
    [
        (0, 40, 64 * KIB, 256), (0, -1, 64 * KIB, 256), (MIB, 1, 64 * KIB, 256),
        (0, 0, 0, 256), (0, 0, 100, 256), (0, 0, 4 * MIB, 256), (0, 0, 64 * KIB, 0),
        (999 * MIB, 0, 64 * KIB, 256), (0, 0, 4 * KIB, 8 * KIB), (2 * MIB, 0, 64 * KIB, 256),
    ],
)  # fmt: skip
def test_impossible_chunks_are_not_restored(chunk):
    """I11: a chunk that cannot have been one, or overlaps another, is refused."""
    slab = Slab(64 * MIB)
    assert slab.restore_chunk(2 * MIB, 0, 64 * KIB, 256)
    assert not slab.restore_chunk(*chunk)
    slab.check_integrity()


def test_a_million_slots():
    """A million slots are reserved, published and freed in seconds."""
    slab = Slab(4 << 30)
    start = perf_seconds()
    offsets = fill(slab, 4 * KIB)
    assert len(offsets) == 1 << 20
    empty(slab, offsets)
    assert perf_seconds() - start < 30
    slab.check_integrity()


class SlabMachine(RuleBasedStateMachine):
    """Compares a slab with a dictionary of slots, whatever the order of calls."""

    def __init__(self):
        super().__init__()
        self.slab = Slab(16 * MIB)
        self.slots = {}

    @rule(i=st.integers(0, len(CLASSES) - 1), count=st.integers(1, 40), publish=st.booleans())
    def reserve(self, i, count, publish):
        size, header = CLASSES[i]
        got = self.slab.reserve(size, header, count)
        assert len(got) == len(set(got)) <= count
        for offset in got:
            assert offset not in self.slots
            self.slots[offset] = [size, SlotState.STAGING]
            if publish:
                self.slab.publish(offset)
                self.slots[offset][1] = SlotState.PUBLISHED

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), count=st.integers(1, 60), free=st.booleans())
    def rest(self, data, count, free):
        offsets = sorted(self.slots)
        start = data.draw(st.integers(0, len(offsets) - 1))
        for offset in offsets[start : start + count]:
            if self.slots[offset][1] != SlotState.RESTING:
                self.slab.rest(offset)
                self.slots[offset][1] = SlotState.RESTING
            if free:
                self.slab.free(offset)
                del self.slots[offset]

    @rule(i=st.integers(0, len(CLASSES) - 1), move=st.booleans())
    def drain(self, i, move):
        for offset in self.slab.drain(*CLASSES[i]):
            assert self.slots[offset][1] == SlotState.PUBLISHED
            if move:
                empty(self.slab, [offset])
                del self.slots[offset]

    @rule(i=st.integers(0, len(CLASSES) - 1))
    def cancel(self, i):
        self.slab.cancel_drain(*CLASSES[i])

    @rule()
    def restart(self):
        """I10: the chunk map alone gives the same slots back."""
        again = Slab(16 * MIB)
        for chunk in self.slab.chunks():
            order = (chunk.size_bytes >> again.shift).bit_length() - 1
            assert again.restore_chunk(chunk.offset, order, chunk.slot_bytes, chunk.header_bytes)
            for i, state in enumerate(self.slab.states(chunk)):
                offset = chunk.offset + i * chunk.slot_bytes
                if state == SlotState.PUBLISHED:
                    again.adopt(offset)
                else:
                    self.slots[offset] = [chunk.slot_bytes, SlotState.RESTING]
        self.slab = again

    @invariant()
    def counts_are_exact(self):
        """I22: used + free + resting = capacity, and no two slots overlap."""
        slab, by_state = self.slab, Counter()
        end = 0
        for offset, (size, state) in sorted(self.slots.items()):
            assert offset >= end
            end = offset + size
            by_state[state] += size
            assert slab.state(offset) == state
        assert end <= slab.capacity_bytes
        assert slab.used_bytes == by_state[SlotState.STAGING] + by_state[SlotState.PUBLISHED]
        assert slab.resting_bytes == by_state[SlotState.RESTING]
        slab.check_integrity()


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
