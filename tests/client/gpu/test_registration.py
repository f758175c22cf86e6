"""Registration of a pool that grows and gives memory back: only what has memory, and still has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from kvstore.client.gpu.registration import Registered, Registrar

CELL = 4 << 20
CELLS = 40


class PinningDevice:
    """A GPU that remembers which memory it has pinned: `cells` as they were at that moment."""

    registers_read_only = True

    def __init__(self, base: int, cells: np.ndarray) -> None:
        self.base, self.cells = base, cells
        self.pinned: dict[int, tuple[int, np.ndarray]] = {}
        self.faults: list[str] = []
        self.lock = threading.Lock()

    def register(self, address: int, size: int, read_only: bool) -> None:
        start = address - self.base
        with self.lock:
            for other, (length, _) in self.pinned.items():
                if other < start + size and start < other + length:
                    self.faults.append("registered twice")
            here = self.cells[start // CELL : -(-(start + size) // CELL)].copy()
            self.pinned[start] = size, here

    def unregister(self, address: int) -> None:
        with self.lock:
            if self.pinned.pop(address - self.base, None) is None:
                self.faults.append("unregistered what was not registered")

    def check(self, entry: Registered) -> None:
        """What counts as registered is pinned, and what is pinned there is the pool's memory."""
        at = 0
        with self.lock:
            while at < entry.covered:
                size, cells = self.pinned[at]
                now = self.cells[at // CELL : -(-(at + size) // CELL)]
                if (cells != now).any() or (cells % 2).any():
                    self.faults.append(f"at {at} other memory is pinned")
                at += size
        if at != entry.covered:
            self.faults.append("a copy would leave what is pinned")


class World:
    """A pool of 160 MiB of address space; its memory is what its cells say."""

    def __init__(self, chunk_bytes: int) -> None:
        self.memory = np.zeros(CELLS * CELL, np.uint8)
        self.cells = np.ones(CELLS, np.uint64)
        self.device = PinningDevice(self.memory.ctypes.data, self.cells)
        self.registrar = Registrar(self.device, chunk_bytes)  # type: ignore[arg-type]

    def use(self) -> Registered:
        return self.registrar.use(self.memory, True, lambda: False, self.cells)

    def covered(self) -> int:
        """How much is registered once that has come to rest."""
        entry = self.use()
        self.registrar.let_go(entry)
        self.registrar.wait(entry)
        entry = self.use()
        self.device.check(entry)
        self.registrar.let_go(entry)
        return entry.covered // CELL

    def back(self, cells: range) -> None:
        self.cells[cells.start : cells.stop] += self.cells[cells.start : cells.stop] % 2

    def give_back(self, cell: int) -> None:
        self.cells[cell] += 1 - self.cells[cell] % 2


@pytest.fixture(params=[CELL, 3 * CELL, 64 * CELL])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.registrar.close()
    assert not made.device.pinned
    assert not made.device.faults


def test_only_what_has_memory_is_registered_and_the_rest_when_it_has(world: World) -> None:
    """Registering pins pages, and makes some where there are none; a growth goes on with it."""
    world.back(range(7))
    assert world.covered() == 7
    assert sum(size for size, _ in world.device.pinned.values()) == 7 * CELL
    assert world.covered() == 7
    world.back(range(7, 20))
    assert world.covered() == 20
    world.back(range(CELLS))
    assert world.covered() == CELLS


def test_memory_that_was_given_back_is_used_no_more(world: World) -> None:
    """The GPU still has the old pages: nothing is read from them, not even once the place has other
    memory, until it is registered anew; what a copy uses stays registered as long as it runs."""
    world.back(range(CELLS))
    assert world.covered() == CELLS
    running = world.use()
    assert running.covered == CELLS * CELL
    pinned = dict(world.device.pinned)
    world.give_back(10)
    assert world.use().covered <= 10 * CELL
    world.back(range(10, 11))
    later = world.use()
    assert later.covered <= 10 * CELL
    time.sleep(0.05)
    assert set(world.device.pinned) == set(pinned), "a copy was under way"
    for _ in range(3):
        world.registrar.let_go(running)
    assert world.covered() == CELLS


def test_any_order_of_growths_returns_and_copies(world: World) -> None:
    """While memory comes and goes and copies begin and end, a copy only ever uses what is pinned
    and is the pool's; the cells of what it copies do not change, since that is leased."""
    random, running = Random(5), []
    for _ in range(600):
        what, first = random.random(), random.randrange(CELLS)
        if what < 0.25:
            world.back(range(first, min(CELLS, first + random.randrange(1, 30))))
        elif what < 0.4 and not running:
            for cell in random.sample(range(CELLS), 3):
                world.give_back(cell)
        elif what < 0.8:
            entry = world.use()
            world.device.check(entry)
            running.append(entry)
        elif running:
            world.registrar.let_go(running.pop())
        if random.random() < 0.1:
            time.sleep(0.001)
    for entry in running:
        world.registrar.let_go(entry)
    world.back(range(CELLS))
    assert world.covered() == CELLS
