"""The cache simulation against its definitions, written out block by block."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import TraceRequest

TOKEN, PAIR = 32e-6, 1.3e-9
NEVER = 1 << 62


def chats(seed: int, count: int) -> list[TraceRequest]:
    """Conversations under a few common prompts, with partly filled last blocks."""
    rng = random.Random(seed)
    fresh, open_chats = iter(range(1000, 1 << 30)), [[n] for n in range(3)]
    requests = []
    for n in range(count):
        chat = rng.choice(open_chats[-12:])
        if rng.random() < 0.4:
            chat = chat[: rng.randrange(1, len(chat) + 1)]
            open_chats.append(chat)
        chat.extend(next(fresh) for _ in range(rng.randrange(0, 6)))
        rest = rng.choice([0, 100])
        ids = [*chat, next(fresh)] if rest else list(chat)
        requests.append(
            TraceRequest(
                timestamp=1000 * n, input_length=512 * len(chat) + rest,
                output_length=rng.randrange(1, 600), hash_ids=ids,
            )
        )  # fmt: skip
    return requests


def block_seconds(position: int, tokens: int = 512) -> float:
    """v of a block: what it costs to compute after all before it."""
    return TOKEN * tokens + PAIR * tokens * (512 * position + tokens / 2)


def belady(requests: list[TraceRequest], capacity: int) -> list[int]:
    """Hits by Belady with bypass, by ids: what is used again last goes, deeper blocks first."""
    uses: dict[int, list[int]] = {}
    for n, request in enumerate(requests):
        for hash_id in request.hash_ids[: request.full_blocks]:
            uses.setdefault(hash_id, []).append(n)
    stored: dict[int, int] = {}
    hits = []
    for n, request in enumerate(requests):
        ids = request.hash_ids[: request.full_blocks]
        hits.append(next((i for i, one in enumerate(ids) if one not in stored), len(ids)))
        stored.update({one: depth for depth, one in enumerate(ids)})
        while len(stored) > capacity:
            victim = max(
                stored, key=lambda one: (next((u for u in uses[one] if u > n), NEVER), stored[one])
            )
            del stored[victim]
    return hits


@pytest.mark.parametrize("capacity", [5, 20, 60])
def test_the_oracle_is_belady_with_bypass(capacity: int) -> None:
    """By runs, index and residency, the optimum hits what it hits block by block."""
    requests = chats(capacity, 250)
    simulation = CacheSimulation(Workload(requests), "oracle", (capacity,))
    simulation.run()
    expected = belady(requests, capacity)
    assert sum(hit.blocks for hit in simulation.hits) == sum(expected)


def test_ratios_are_what_they_are_defined_as() -> None:
    """Tokens out of all input tokens, seconds out of those of all blocks, partial ones included."""
    requests = chats(1, 200)
    workload = Workload(requests)
    simulation = CacheSimulation(workload, "lru", (40,))
    result = simulation.run()
    hits = [hit.blocks for hit in simulation.hits]
    tokens = sum(request.input_length for request in requests)
    saved = sum(block_seconds(i) for n in hits for i in range(n))
    total = sum(
        block_seconds(i, request.covered_tokens(i))
        for request in requests
        for i in range(len(request.hash_ids))
    )
    assert result.token_hit_ratio == pytest.approx(512 * sum(hits) / tokens)
    assert result.saved_ratio == pytest.approx(saved / total)
    assert workload.unique_blocks == len({i for r in requests for i in r.hash_ids})
    assert workload.capacity(0.05) == int(0.05 * workload.unique_blocks)
    assert simulation.index.block_count <= 40


def test_tenants_share_a_cache_but_no_blocks() -> None:
    """Equal ids of two tenants are other blocks; both are ranked in one order."""
    requests = [
        msgspec.structs.replace(request, tenant="ab"[n % 2])
        for n, request in enumerate(chats(2, 120))
    ]
    simulation = CacheSimulation(Workload(requests), "saved_time", (50,))
    simulation.run()
    accounts = simulation.residency.accounts
    assert accounts.tenant_used(0, "a") > 0 < accounts.tenant_used(0, "b")
    simulation.index.check_integrity()
    simulation.residency.check_integrity()


def test_hints_are_right_as_often_as_they_are_said_to_be() -> None:
    """At accuracy 1 a hint says what comes; at 0.8 a fifth of them is flipped."""
    requests = chats(3, 600)
    truth = [
        "likely" if uses and uses[-1] != NEVER else "none" for uses in Workload(requests).next_uses
    ]
    exact = [told.expect_reuse for told in Workload(requests, hints=1.0).told]
    assert exact == truth
    noisy = [told.expect_reuse for told in Workload(requests, hints=0.8).told]
    wrong = sum(a != b for a, b in zip(noisy, truth, strict=True))
    assert 0.15 < wrong / len(truth) < 0.25
    assert {told.expect_reuse for told in Workload(requests).told} == {""}


def test_what_cannot_be_simulated_is_refused() -> None:
    """No requests, impossible capacities or accuracies: one sentence with the fix."""
    with pytest.raises(InvalidRequest, match="no request; pass"):
        Workload([])
    with pytest.raises(InvalidRequest, match="hints is 2; pass 0 to 1"):
        Workload(chats(1, 3), hints=2)
    for capacities in ((), (1, 2, 3), (-1,)):
        with pytest.raises(InvalidRequest, match="capacities is"):
            CacheSimulation(Workload(chats(1, 3)), "lru", capacities)
    with pytest.raises(InvalidRequest, match="choose one of"):
        CacheSimulation(Workload(chats(1, 3)), "best", (1,))
