"""Promotion by measurement: what is copied up, and what goes first."""

from __future__ import annotations

import math
from random import Random

from kvstore.policies.promotion import REMEMBERED_MIN, Promotion

MOST = 0.9
"""What a load from a copy spares of a load from host."""


def test_a_block_is_promoted_at_its_second_load() -> None:
    """A block that was loaded once may never be again; while there is room, twice is enough."""
    promotion = Promotion()
    assert promotion.loaded([1, 2, 3], 0.0, MOST) == []
    assert promotion.loaded([1, 2, 9], 1000.0, MOST) == [1, 2]
    promotion.arrived([1, 2], 1000.0)
    assert promotion.loaded([1, 2, 3], 1001.0, MOST) == [3]
    assert len(promotion) == 2


def test_nothing_is_promoted_where_nothing_is_spared() -> None:
    """Where loads from the GPU's memory are measured no faster, there are no copies."""
    promotion = Promotion()
    promotion.loaded([1], 0.0, 0.0)
    promotion.full(True)
    promotion.arrived([7], 0.0)
    assert promotion.loaded([1], 0.5, 0.0) == []
    assert promotion.loaded([1], 0.6, -1.0) == []


def test_a_copy_must_pay_before_it_goes() -> None:
    """With the memory full, a block is promoted only if it comes more often than copies leave."""
    promotion = Promotion()
    promotion.loaded([1, 2, 3], 0.0, MOST)
    promotion.arrived([1], 0.0)
    promotion.full(True)
    assert promotion.stay(20.0) == 20.0
    assert promotion.loaded([2], 20.0, MOST) == []  # 20 s since its last load, against 18
    assert promotion.loaded([2], 37.0, MOST) == [2]  # 17 s, against 33
    promotion.full(False)
    assert promotion.stay(50.0) == math.inf
    assert promotion.loaded([3], 50.0, MOST) == [3]


def test_the_coldest_go_first_and_from_the_end() -> None:
    """Least recently loaded first, of one load the deepest block first, and none that is read."""
    promotion = Promotion()
    for at, places in enumerate(([1, 2, 3], [4, 5])):
        promotion.loaded(places, float(at), MOST)
        promotion.arrived(places, float(at))
    assert list(promotion.victims((), 9.0)) == [3, 2, 1, 5, 4]
    promotion.loaded([1, 2], 5.0, MOST)
    assert list(promotion.victims((5,), 9.0)) == [3, 4, 2, 1]
    assert list(promotion.victims((), 5.0)) == [3, 5, 4]
    promotion.gone(3)
    promotion.gone(77)
    assert list(promotion.victims((), 5.0)) == [5, 4]


def test_memory_of_loads_is_bounded() -> None:
    """However many blocks are loaded once, so many and no more are remembered."""
    promotion = Promotion()
    promotion.loaded(range(10 * REMEMBERED_MIN), 0.0, MOST)
    again = promotion.loaded(range(10 * REMEMBERED_MIN), 1.0, MOST)
    assert len(again) <= REMEMBERED_MIN


def test_it_beats_taking_everything_in() -> None:
    """On loads of which a part comes again, copies spare more transfers than with every load."""
    random, capacity = Random(1), 200
    hot = [random.randrange(1 << 30) for _ in range(150)]
    loads = [
        random.choice(hot) if random.random() < 0.5 else random.randrange(1 << 30)
        for _ in range(20_000)
    ]
    costs = {name: _transfers(loads, capacity, name) for name in ("measured", "all")}
    assert costs["measured"] < 0.8 * costs["all"]
    assert costs["measured"] < len(loads)


def _transfers(loads: list[int], capacity: int, kind: str) -> int:
    """Transfers from host: loads without a copy, and copies made."""
    promotion, count = Promotion(), 0
    resident: set[int] = set()
    for now, place in enumerate(loads):
        wanted = promotion.loaded([place], float(now), MOST)
        if place in resident:
            continue
        count += 1
        if kind == "all":
            wanted = [place]
        for one in wanted:
            while len(resident) >= capacity:
                promotion.full(True)
                victim = next(promotion.victims((), float(now)))
                promotion.gone(victim)
                resident.discard(victim)
            promotion.arrived([one], float(now))
            resident.add(one)
            count += 1
    return count
