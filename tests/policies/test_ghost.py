"""Ghosts: caches without bytes keep to their capacities, whatever ranks their blocks."""

from __future__ import annotations

import random

import pytest

from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.policies.base import policy_names
from kvstore.policies.ghost import Ghost
from kvstore.policies.reuse_model import ReuseModel
from kvstore.policies.uses import Request, Use
from kvstore.replay.cachesim_workload import trace_space

ROOT = bytes(32)


def chain_of(numbers: list[int]) -> Chain:
    return Chain((Segment(b"".join(n.to_bytes(8, "little") for n in numbers), 8),))


def chats(space: Space, seed: int, count: int) -> list[tuple[Chain, Request]]:
    """Conversations that go on, with what residency is told of them."""
    rng, fresh, going = random.Random(seed), iter(range(1000, 1 << 30)), [[n] for n in range(3)]
    found = []
    for number in range(count):
        chat = rng.choice(going[-40:])
        if rng.random() < 0.3:
            chat = chat[: rng.randrange(1, len(chat) + 1)]
            going.append(chat)
        chat.extend(next(fresh) for _ in range(rng.randrange(1, 9)))
        chain = chain_of(chat)
        request = Request(
            space.tenant, float(number), chain.segments[0].symbols, 512 * len(chat), 100
        )
        found.append((chain, request))
    return found


@pytest.mark.parametrize(("host", "disk"), [(60, None), (60, 150), (150, 60), (100, 100)])
@pytest.mark.parametrize("policy", policy_names())
def test_no_tier_goes_over_its_capacity(policy: str, host: int, disk: int | None) -> None:
    """After every request each tier is within its capacity: no run is ever stuck in it."""
    space = trace_space(0, "a", 512)
    size = space.slot_bytes
    ghost = Ghost(policy, {"": host * size}, None if disk is None else disk * size)
    for number, (chain, request) in enumerate(chats(space, 1, 400)):
        ghost.residency.request(request)
        ghost.serve(space, ROOT, chain, float(number))
        assert ghost.residency.accounts.used(0) <= host * size
        assert ghost.residency.accounts.used(1) <= (disk or 0) * size
    ghost.index.check_integrity()
    ghost.residency.check_integrity()


def test_a_borrowed_model_is_told_by_its_owner_only() -> None:
    """A ghost ranks by another's model and does not tell it; uses follow the owner's."""
    space, model = trace_space(0, "a", 512), ReuseModel()
    ghost = Ghost("saved_time", {"": 50 * space.slot_bytes}, models=[model])
    for number, (chain, request) in enumerate(chats(space, 2, 200)):
        live = Use(number, request)
        model.on_request(live, request)
        use = ghost.residency.request(request)
        use.follow(live)
        ghost.serve(space, ROOT, chain)
        assert (use.rows, use.known, use.weight) == (live.rows, live.known, live.weight)
    assert ghost.residency.context.model(ReuseModel) is model
    assert model.block_count
    assert not ghost.residency.context.models


def test_an_emptied_ghost_can_be_used_again() -> None:
    """Nothing is left of what it had, in any of its books."""
    space = trace_space(0, "a", 512)
    ghost = Ghost("saved_time", {"": 100 * space.slot_bytes}, 200 * space.slot_bytes)
    served = chats(space, 3, 200)
    for _ in range(2):
        for chain, request in served:
            ghost.residency.request(request)
            ghost.serve(space, ROOT, chain)
        assert sum(1 for _ in ghost.empty()) > 0
        assert not ghost.index.block_count
        assert not ghost.residency.accounts.used(0)
        assert not ghost.residency.accounts.used(1)
        ghost.residency.check_integrity()
