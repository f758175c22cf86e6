"""Demotion: what is evicted later lies on disk already, and what stays warm is never written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.core.space import Space
from kvstore.policies.demotion import unwritten_above

NewSpace = Callable[..., Space]
HOST, DISK = 0, 1
CAPACITY = 40


def tokens(blocks: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(16 * blocks)
    return [data[i : i + 16] for i in range(0, len(data), 16)]


class Conveyor:
    """A host pool of CAPACITY blocks over a disk, with the store's part played at once."""

    def __init__(self, world: Any, space: Space, watermark: float) -> None:
        self.world, self.space = world, space
        self.size = space.slot_bytes * space.shard_count
        mark = int(watermark * CAPACITY) * self.size
        world.residency.demote_above("", mark)
        self.written = self.lost = 0

    def put(self, symbols: list[bytes]) -> None:
        """Puts a prompt a block at a time: makes room, stores, and writes what is due."""
        world, residency = self.world, self.world.residency
        for count in range(1, len(symbols) + 1):
            over = residency.accounts.used(HOST, "") + self.size - CAPACITY * self.size
            if over > 0:
                for drop in residency.make_room(HOST, "", self.space.tenant, over):
                    self.lost += len(world.index.drop(drop.run, drop.keep, HOST).spans)
            world.put(self.space, symbols[:count])
            self.write()

    def write(self, byte_count: int = 1 << 40) -> None:
        index = self.world.index
        for run, start, stop, source, target in self.world.residency.demotions("", byte_count):
            assert (source, target) == (HOST, DISK)
            index.begin_move(run, start, stop, DISK)
            places = np.arange(self.written, self.written + stop - start).reshape(-1, 1)
            index.end_move(run, start, DISK, places)
            self.written += stop - start
        self.world.check()


@pytest.fixture
def conveyor(new_world: type[Any], new_space: NewSpace) -> Callable[..., Conveyor]:
    def make(watermark: float = 0.5) -> Conveyor:
        return Conveyor(new_world(tiers=2), new_space(0), watermark)

    return make


@settings(max_examples=60, deadline=None)
@given(
    watermark=st.sampled_from([0.0, 0.3, 0.5]),
    prompts=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 18)), max_size=30),
)
def test_nothing_is_lost_to_eviction(
    new_world: type[Any],
    new_space: NewSpace,
    watermark: float,
    prompts: list[tuple[int, int]],
) -> None:
    """With a disk that writes at once, every block that leaves host has a copy there."""
    conveyor = Conveyor(new_world(tiers=2), new_space(0), watermark)
    for seed, blocks in prompts:
        conveyor.put(tokens(blocks, seed))
    assert conveyor.lost == 0


def test_nothing_is_written_below_the_watermark(conveyor: Callable[..., Conveyor]) -> None:
    """As long as host has room, the disk is spared."""
    belt = conveyor(0.5)
    belt.put(tokens(20, 1))
    assert belt.written == 0


def test_as_much_is_written_as_comes_in(conveyor: Callable[..., Conveyor]) -> None:
    """Above the watermark one block is written for each that comes, in whole chains."""
    belt = conveyor(0.5)
    for seed in range(10):
        belt.put(tokens(10, seed))
    assert 100 - CAPACITY // 2 <= belt.written <= 110 - CAPACITY // 2


def test_the_coldest_are_written_first(
    conveyor: Callable[..., Conveyor], new_chain: Callable[..., Any]
) -> None:
    """What is used again and again stays unwritten while colder blocks are there."""
    belt = conveyor(0.5)
    warm = tokens(4, 99)
    belt.put(warm)
    for seed in range(12):
        belt.put(tokens(6, seed))
        belt.world.look(belt.space, warm)
    walk = belt.world.walk(belt.space, new_chain(warm))
    assert walk.ready_blocks == 4
    assert sum(run.resident_in(DISK) for run, _, _ in walk.path) == 0


def test_parents_come_first(conveyor: Callable[..., Conveyor]) -> None:
    """A block is never due before the ones it depends on."""
    belt = conveyor(0.0)
    stem = tokens(6, 1)
    belt.world.put(belt.space, [*stem, *tokens(3, 2)])
    belt.world.put(belt.space, [*stem, *tokens(3, 3)])
    order = []
    for run, start, stop, _, _ in belt.world.residency.demotions("", 1 << 40):
        belt.world.index.begin_move(run, start, stop, DISK)
        order.append((run.first + start, run.first + stop))
    assert order == [(0, 6), (6, 9), (6, 9)]


def test_what_could_not_be_written_is_due_again(conveyor: Callable[..., Conveyor]) -> None:
    """A failed write is tried again once more blocks come in; nothing is due twice at a time."""
    belt = conveyor(0.0)
    residency, index = belt.world.residency, belt.world.index
    belt.world.put(belt.space, tokens(6, 1))
    (demote,) = [marked(index, demote) for demote in residency.demotions("", 1 << 40)]
    assert list(residency.demotions("", 1 << 40)) == []
    index.give_up_move(demote.run, demote.start, demote.stop, DISK)
    residency.copy_lost(demote.run)
    belt.world.put(belt.space, tokens(6, 2))
    left = sum(stop - start for _, start, stop in unwritten_above(index, demote.run))
    assert left == 6
    belt.write()
    assert belt.written == 12


def marked(index: Any, demote: Any) -> Any:
    index.begin_move(demote.run, demote.start, demote.stop, DISK)
    return demote


def test_a_consumer_that_marks_nothing_ends_the_round(
    conveyor: Callable[..., Conveyor],
) -> None:
    """A disk without room cannot make the queue turn for ever."""
    belt = conveyor(0.0)
    for seed in range(5):
        belt.world.put(belt.space, tokens(6, seed))
    assert len(list(belt.world.residency.demotions("", 1 << 40))) == 1


def test_a_policy_switch_forgets_nothing(conveyor: Callable[..., Conveyor]) -> None:
    """After another policy took over, what was due is due."""
    belt = conveyor(0.5)
    for seed in range(8):
        belt.put(tokens(3, seed))
    belt.world.put(belt.space, tokens(6, 20))
    belt.world.put(belt.space, tokens(6, 21))
    belt.world.residency.set_policy("lru")
    before = belt.written
    belt.write()
    assert before + 12 <= belt.written <= before + 15
