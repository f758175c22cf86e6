"""The slab with chunks that keep something for themselves, and many slots moved at once."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.tiers.slab import Slab, SlotState

MIB = 1 << 20
SLOT = 65536


def test_chunks_keep_their_overhead():
    """A chunk has no more slots than fit beside what it keeps for itself."""
    seen = []
    slab = Slab(64 * MIB, lambda chunk: not seen.append(chunk), shift=16, overhead_bytes=20480)
    assert len(slab.reserve(SLOT, 4096, 5)) == 5
    (chunk,) = seen
    assert chunk.slot_count == (chunk.size_bytes - 20480) // SLOT
    assert chunk.slot_count * SLOT / chunk.size_bytes > 0.9
    assert slab.reserve(64 * MIB, 4096, 1) == []
    slab.check_integrity()


def test_smaller_chunks_are_taken_only_if_a_slot_fits():
    """Where only small memory is left, a chunk that holds its overhead and no slot is none."""
    slab = Slab(3 << 16, shift=16, overhead_bytes=20480)
    assert len(slab.reserve(SLOT, 4096, 9)) == 1
    assert len(slab.reserve(32768, 4096, 9)) == 1
    slab.check_integrity()


def test_least_order_makes_chunks_larger():
    """Chunks are of the least order where there is room, smaller ones where there is not."""
    slab = Slab(24 * MIB, shift=16, least_order=7)
    slab.reserve(4096, 64, 1)
    assert next(slab.chunks()).size_bytes == 8 * MIB
    slab = Slab(2 * MIB, shift=16, least_order=7)
    assert len(slab.reserve(4096, 64, 1)) == 1
    slab.check_integrity()


def test_many_slots_move_as_one_by_one():
    """Adopting and freeing in bulk leaves the books as single calls would."""
    slab = Slab(16 * MIB, shift=16)
    chunk = slab.restore_anywhere(6, SLOT, 4096)
    assert chunk is not None
    assert slab.resting_bytes == chunk.slot_count * SLOT
    slab.adopt_many(chunk, np.array([3, 5, 60]))
    slab.check_integrity()
    assert slab.published_count == 3
    with pytest.raises(AssertionError):
        slab.adopt_many(chunk, np.array([3]))
    slab.free_many(chunk, np.arange(10, 20))
    slab.free_many(chunk, np.arange(0))
    slab.check_integrity()
    assert slab.reserve(SLOT, 4096, 2) == [chunk.offset + i * SLOT for i in (10, 11)]
    rest = np.flatnonzero(slab.states(chunk) == SlotState.RESTING)
    slab.free_many(chunk, rest)
    assert slab.resting_bytes == 0
    slab.check_integrity()


def test_restored_chunks_lie_where_there_is_room():
    """Chunks of before find a place anywhere, until there is none of their size."""
    slab = Slab(6 * MIB, shift=20)
    found = [slab.restore_anywhere(1, SLOT, 4096) for _ in range(4)]
    assert [chunk.offset for chunk in found if chunk is not None] == [4 * MIB, 0, 2 * MIB]
    assert found[3] is None
    assert slab.restore_anywhere(9, SLOT, 4096) is None
    slab.check_integrity()


def test_heads_of_many_offsets():
    """Each offset names the chunk it lies in, or a negative number."""
    slab = Slab(16 * MIB, shift=20)
    offset = slab.reserve(SLOT, 4096, 1)[0]
    heads = slab.chunk_heads(np.array([offset, offset + SLOT, 15 * MIB]))
    assert heads[0] == heads[1] == next(slab.chunks()).offset
    assert heads[2] < 0


def test_empty_chunks_are_given_up_on_request():
    """Every wholly free chunk leaves its class when memory is short elsewhere."""
    gone = []
    slab = Slab(16 * MIB, release=gone.append, shift=20)
    places = slab.reserve(SLOT, 4096, 40)
    for place in places[16:]:
        slab.rest(place)
        slab.free(place)
    held = {chunk.offset for chunk in slab.chunks()}
    slab.dissolve_empty()
    assert {chunk.offset for chunk in slab.chunks()} < held
    assert gone
    slab.check_integrity()
