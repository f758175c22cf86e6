"""LRU through runs, index and residency against LRU written block by block."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.core.space import Space

Chain = tuple[int, ...]


class NaiveLru:
    """Leaf-first LRU over single blocks: a request uses all its blocks, the oldest leaf goes."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used: dict[Chain, int] = {}
        self.children: dict[Chain, int] = {}
        self.tick = 0

    def request(self, chain: Chain) -> int:
        """Hit blocks of a request, which is stored in full before the oldest go."""
        self.tick += 1
        hit = 0
        while hit < len(chain) and chain[: hit + 1] in self.used:
            hit += 1
        for n in range(len(chain)):
            prefix = chain[: n + 1]
            if prefix not in self.used:
                self.children[prefix[:-1]] = self.children.get(prefix[:-1], 0) + 1
            self.used[prefix] = self.tick
        while len(self.used) > self.capacity:
            leaves = (block for block in self.used if not self.children.get(block))
            victim = min(leaves, key=self.used.__getitem__)
            del self.used[victim]
            self.children[victim[:-1]] -= 1
        return hit


def conversations(seed: int, requests: int) -> Iterator[Chain]:
    """Chats that grow turn by turn under a few system prompts; some are regenerated or cut."""
    rng = random.Random(seed)
    systems = [tuple(range(1000 * n, 1000 * n + rng.randrange(1, 6))) for n in range(1, 5)]
    fresh = iter(range(10_000, 1 << 30))
    chats: list[Chain] = []
    for _ in range(requests):
        if not chats or rng.random() < 0.3:
            chats.append(rng.choice(systems))
        n = min(int(rng.expovariate(0.2)), len(chats) - 1)
        chat = chats[-1 - n]
        if rng.random() < 0.15 and len(chat) > 3:
            chat = chat[: rng.randrange(2, len(chat))]
        chat += tuple(next(fresh) for _ in range(rng.randrange(0, 7)))
        chats[-1 - n] = chat
        yield chat


@pytest.mark.parametrize("capacity", [7, 40, 150, 600])
def test_lru_by_runs_is_lru_by_blocks(
    new_world: type[Any], new_space: Callable[..., Space], capacity: int
) -> None:
    """Hits and contents equal an independent block-level simulation's, request by request."""
    world, space, naive = new_world(), new_space(), NaiveLru(capacity)
    for n, chat in enumerate(conversations(capacity, 1200)):
        symbols = [block.to_bytes(16, "little") for block in chat]
        hit = world.look(space, symbols)
        world.put(space, symbols)
        world.free(space, max(0, world.index.block_count - capacity))
        assert hit == naive.request(chat), f"request {n}"
        assert world.index.block_count == len(naive.used)
    for chain in naive.used:
        symbols = [block.to_bytes(16, "little") for block in chain]
        assert world.look(space, symbols) == len(chain)
    world.check()
