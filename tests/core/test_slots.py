"""Slots on the wire: what is decoded is what was encoded, whatever its shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidRequest
from kvstore.core.slots import FEW, decode_slots, encode_slots

runs = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 50), st.integers(1, 90)), max_size=40
)


@given(runs, st.sampled_from([1, 3, 256]))
def test_what_comes_out_is_what_went_in(parts: list[tuple[int, int, int]], step: int) -> None:
    """Few or many blocks, in one run or in many: places and generations survive the wire."""
    ramps = [(first, newest, np.arange(n, dtype=np.int64)) for first, newest, n in parts]
    none = [np.empty(0, np.int64)]
    places = np.concatenate([*none, *(first + ramp * step for first, _, ramp in ramps)])
    generations = np.concatenate([*none, *(newest + ramp for _, newest, ramp in ramps)])
    packed = encode_slots(places, generations.astype(np.uint64), step)
    got_places, got_generations = decode_slots(*packed, step)
    assert np.array_equal(got_places, places)
    assert np.array_equal(got_generations, generations)
    assert len(packed[2]) <= 4 * len(parts)


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, FEW + 1, 1024, 1025])
def test_one_run_is_one_run(count: int) -> None:
    """Neighbouring slots cost 20 bytes, however many they are."""
    ramp = np.arange(count, dtype=np.int64)
    packed = encode_slots(7 + ramp * 2, (9 + ramp).astype(np.uint64), 2)
    assert [len(part) for part in packed] == [8, 8, 4]


@pytest.mark.parametrize("bad", [(bytes(8), bytes(16), bytes(4)), (bytes(8), bytes(8), bytes(8))])
def test_packed_lengths_that_disagree(bad: tuple[bytes, bytes, bytes]) -> None:
    """Malformed slots are refused, not misread."""
    with pytest.raises(InvalidRequest, match="slots disagree"):
        decode_slots(*bad, 1)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 90)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_blocks_without_a_slot_come_back_as_such(parts: list[tuple[bool, int]], step: int) -> None:
    """Blocks that lie in no pool stay that, however the slots beside them are numbered."""
    places, generations = [], []
    for absent, count in parts:
        ramp = range(count)
        # The first slot of a pool and generation 1 follow on NO_PLACE and 0 as numbers do.
        places += [-1] * count if absent else [step - 1 + i * step for i in ramp]
        generations += [0] * count if absent else [1 + i for i in ramp]
    packed = encode_slots(np.array(places), np.array(generations, np.uint64), step)
    got_places, got_generations = decode_slots(*packed, step)
    assert got_places.tolist() == places
    assert np.array_equal(got_generations[got_places >= 0], np.array(generations)[got_places >= 0])
    assert len(packed[2]) <= 4 * len(parts)
