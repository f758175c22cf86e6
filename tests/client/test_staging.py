"""Ranges of the staging segment: never two holders, never one that was not answered for."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.staging import Staging, StagingRange
from kvstore.core.clock import SystemClock

PAGE = 4096
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 6)),
        st.tuples(st.just("give back"), st.integers(0, 50)),
        st.tuples(st.just("no answer"), st.integers(0, 50)),
    ),
    max_size=60,
)


@given(pages=st.integers(1, 16), steps=STEPS)
@settings(max_examples=200, deadline=None)
def test_a_range_has_one_holder_and_an_unanswered_one_never_returns(pages, steps):
    """I5: a range whose Commit got no answer is not handed out again, nor is one in use."""
    staging = Staging(memoryview(bytearray(pages * PAGE)))
    held: list[StagingRange] = []
    lost: list[StagingRange] = []
    for what, number in steps:
        if what == "take":
            taken = staging.take(number * PAGE)
            if taken is not None:
                assert taken.offset >= 0
                assert taken.offset + taken.size <= pages * PAGE
                for other in held + lost:
                    disjoint = (
                        taken.offset + taken.size <= other.offset
                        or other.offset + other.size <= taken.offset
                    )
                    assert disjoint, f"{taken} overlaps {other}"
                held.append(taken)
        elif held:
            taken = held.pop(number % len(held))
            if what == "give back":
                staging.give_back(taken)
            else:
                lost.append(taken)
    used = sum(taken.size for taken in held + lost)
    assert staging.free_bytes == pages * PAGE - used


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8), order=st.randoms())
@settings(max_examples=100, deadline=None)
def test_gaps_grow_together(sizes, order):
    """When everything is given back, in whatever order, the whole segment is one range again."""
    staging = Staging(memoryview(bytearray(sum(sizes) * PAGE)))
    taken = [staging.take(size * PAGE) for size in sizes]
    order.shuffle(taken)
    for one in taken:
        staging.give_back(one)
    assert staging.take(sum(sizes) * PAGE) == StagingRange(0, sum(sizes) * PAGE)


def test_waiting_ends_when_another_thread_gives_back():
    """A writer that finds the segment full goes on as soon as there is room."""
    staging = Staging(memoryview(bytearray(PAGE)))
    taken = staging.take(PAGE)
    clock = SystemClock()
    timer = threading.Timer(0.05, staging.give_back, [taken])
    timer.start()
    assert staging.wait(PAGE, clock.now() + 5, clock) == taken
    timer.join()


def test_waiting_ends_at_the_deadline():
    """A writer does not wait for ever for a segment that nobody gives back."""
    staging = Staging(memoryview(bytearray(PAGE)))
    staging.take(PAGE)
    clock = SystemClock()
    assert staging.wait(PAGE, clock.now() + 0.02, clock) is None
