"""The counter that all tiers of a store share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvstore.core.generations import Generations
from kvstore.tiers.memory import MemoryTier


def test_generations_only_grow() -> None:
    """I5: a number is handed out once; raising the counter skips, and never goes back."""
    generations = Generations()
    assert [generations.take(), generations.take(), generations.next] == [1, 2, 3]
    generations.raise_to(10)
    generations.raise_to(5)
    assert [generations.take(), generations.next] == [10, 11]
    assert Generations(0).take() == 1


def test_threads_get_numbers_of_their_own() -> None:
    """I5: no two threads get the same number."""
    generations = Generations(100)
    with ThreadPoolExecutor(4) as workers:
        taken = list(workers.map(lambda _: [generations.take() for _ in range(500)], range(8)))
    assert len({number for some in taken for number in some}) == 4000
    assert generations.next == 4100


def test_tiers_share_one_counter() -> None:
    """A clear mark taken from one tier covers what the other has published, and nothing later."""
    shared = Generations(7)
    first = MemoryTier(1 << 20, generations=shared)
    second = MemoryTier(1 << 20, generations=shared, first_generation=20)
    assert first.next_generation() == second.next_generation() == shared.next == 20
