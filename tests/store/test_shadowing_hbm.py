"""Shadows of a store with copies on a GPU: what they count, say and show of that tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from daemons import SPEC, Tagged
from fake_cuda import fake_driver

import kvstore.testing.store as in_process
from kvstore.cli import shadows as shown
from kvstore.client import KVSpec
from kvstore.core.clock import ManualClock
from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.cuda.device import Device
from kvstore.metrics import Metrics
from kvstore.policies.ghost import Ghost
from kvstore.policies.ghost_hbm import HBM, Copies, HbmTier
from kvstore.policies.shadow import Setup, Shadows
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.replay.journal import replay
from kvstore.server.status_messages import status_response
from kvstore.store.assemble import assemble
from kvstore.store.journal import Journal
from kvstore.store.parts import HOST
from kvstore.testing import InProcessStore
from kvstore.tiers.hbm import HbmTier as GpuTier

MIB = 1 << 20
GRAIN_TOKENS = 128
# A digest stands for one block, of 8 KiB, or for 32 blocks of 16 KiB.
WIDE = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32",
    block_size=GRAIN_TOKENS,
)  # fmt: skip


class World:
    """A store with a GPU, on a clock that stands still unless moved, and an engine that loads."""

    def __init__(self, spec: KVSpec, size: int, staging: int = 64 * MIB) -> None:
        self.clock, self.room = ManualClock(), staging // 2
        self.tier = GpuTier(Device(driver=fake_driver()), {"": size}, buffer_bytes=1 << 18)
        sections: dict[str, Any] = {
            "tiers": {"hbm": {"staging_bytes_per_session": staging}},
            "policy": {"shadows": ["lru", "saved_time"], "shadow_capacities": [0.5, 2.0]},
        }
        self.store = InProcessStore("64MiB", hbm=self.tier, clock=self.clock, sections=sections)
        self.store.kv.parts.recorder = self.metrics = Metrics()
        self.client = self.store.client()
        self.space = self.client.attach(spec)
        self.payload = Tagged(spec)
        for n in (1, 2, 4, 8, 16) * 2:  # loads from host take their time
            self.space.report_transfer("host>hbm", n << 16, n * 1e-3)
        self.call("AttachDevice", pb.AttachDeviceRequest(device_uuid=self.tier.device_uuid))
        self.found = 0

    def call(self, method: str, request: Any) -> Any:
        answer = self.client._link.session().call(method, request, 5.0)
        self.store.settle()
        return answer

    def serve(self, tokens: list[int], seconds: float) -> None:
        """A prompt: loads what is stored of it, stores the rest, and so many seconds pass."""
        with self.space.lookup(tokens) as match:
            if match.lease is not None:
                request = pb.LoadDeviceRequest(lease_id=match.lease.id, staging_bytes=self.room)
                answer = self.call("LoadDevice", request)
                self.found += int((np.frombuffer(answer.offsets, "<i8") >= 0).sum())
        blocks = [np.frombuffer(block, np.uint8) for block in self.payload.blocks(tokens)]
        self.space.put(tokens, blocks)
        self.store.advance(seconds)

    @property
    def shadows(self) -> Shadows:
        shadows = self.store.kv.shadowing.shadows
        assert shadows is not None
        return shadows

    def close(self) -> None:
        self.store.close()
        self.tier.close()


def prompts(seed: int, count: int, grains: int = 8) -> Iterator[tuple[list[int], float]]:
    """Prompts of some grains, a few of them far more often than others, and the time after each."""
    rng = Random(seed)
    for _ in range(count):
        first = 10_000 * min(int(rng.expovariate(0.4)), 9)
        length = GRAIN_TOKENS * rng.randrange(1, grains + 1)
        yield list(range(first, first + length)), 0.1 + rng.random() * 3


@pytest.mark.parametrize(("spec", "size"), [(WIDE, MIB // 4), (SPEC, 6 * MIB)])
def test_the_shadow_of_the_live_store_has_its_copies(spec: KVSpec, size: int) -> None:
    """Followed whole, under the same policy at the same sizes, the shadow finds in copies what the
    live engine loads from copies and has promoted as many, also where a digest is of 32 blocks."""
    world = World(spec, size)
    for tokens, seconds in prompts(3, 60):
        world.serve(tokens, seconds)
        held = world.tier.usage().block_count * spec.block_size
        (copies, *_) = world.shadows.shadows[0].ghost.hbm
        assert len(copies.promotion) * GRAIN_TOKENS == held
    shadows = world.shadows
    assert shadows.share == 1
    assert shadows.current.hbm_tokens[0] == world.found * spec.block_size > 10_000
    promoted = world.metrics.value("kvstore_hbm_promoted_blocks_total")
    assert copies.promoted_blocks * GRAIN_TOKENS == promoted * spec.block_size
    assert copies.used_bytes > 0.9 * size  # it was full, so that copies had to go
    world.close()


def test_other_sizes_are_what_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half and twice the tier hbm, which have no ghost of their own, count what a ghost with so
    much does; a store of a larger one saves no less."""
    world = World(WIDE, MIB // 4)
    setup = world.store.kv.shadowing._setup
    assert setup.copies is not None
    sizes = [v.capacity for v in setup.variants if v.tier == "hbm"]
    assert sizes == [0.5, 2.0]
    alone = {}
    for size in sizes:
        copies = setup.copies.times(size)
        alone[size] = Ghost("saved_time", setup.host_bytes, hbm=[HbmTier(copies)]), [0]

    served = Shadows.serve

    def serve(self: Shadows, job: Any) -> Any:
        for ghost, tokens in alone.values():
            chain = Chain((Segment(job.request.digests, 8),))
            hit = ghost.serve(job.space, bytes(32), chain, job.request.seconds)
            tokens[0] += hit.hbm_blocks * GRAIN_TOKENS
        return served(self, job)

    monkeypatch.setattr(Shadows, "serve", serve)
    for tokens, seconds in prompts(4, 60):
        world.serve(tokens, seconds)
    estimates = world.shadows.estimates()
    for variant, tokens_found in zip(
        world.shadows.variants, world.shadows.current.hbm_tokens, strict=True
    ):
        if variant.tier == "hbm":
            assert tokens_found == alone[variant.capacity][1][0] > 0
    of_hbm = {e.variant.capacity: e for e in estimates if e.variant.tier == "hbm"}
    assert of_hbm[0.5].saved_ratio < estimates[0].saved_ratio <= of_hbm[2.0].saved_ratio
    assert of_hbm[0.5].token_hit_ratio == estimates[0].token_hit_ratio
    world.close()


def test_a_load_takes_no_more_from_copies_than_its_staging_has_room_for() -> None:
    """Half of a session's staging bounds what one load finds, in the shadow as in the store."""
    world = World(WIDE, MIB, staging=MIB)
    tokens = list(range(GRAIN_TOKENS * 100))
    for _ in range(4):
        world.serve(tokens, 1.0)
    fit = MIB // 2 // Space(1, WIDE, "default").slot_bytes
    assert world.found == fit < 100
    assert world.shadows.current.hbm_tokens[0] == world.found * GRAIN_TOKENS
    world.close()


def test_status_shows_and_says_what_copies_do() -> None:
    """A column of hits in copies where there is a tier hbm, rows of its sizes, and a sentence."""
    world = World(WIDE, MIB // 4)
    for tokens, seconds in prompts(5, 120):
        world.serve(tokens, seconds)
    view = world.store.kv.status()
    of_live, *_ = view.shadows
    assert of_live.hbm_token_hit_ratio > 0.05
    assert {s.capacity_ratio for s in view.shadows if s.tier == "hbm"} == {0.5, 2.0}
    message = status_response(view, {})
    assert message.shadows[0].hbm_token_hit_ratio == of_live.hbm_token_hit_ratio
    status = {
        "tiers": {"hbm": {}},
        "shadows": [asdict(shadow) for shadow in view.shadows],
    }
    rows = shown.rows(status)
    assert shown.columns(status)[2] == shown.OF_COPIES
    assert [row[0] for row in rows[-2:]] == ["hbm x 0.5", "hbm x 2"]
    assert rows[0][2] == f"{of_live.hbm_token_hit_ratio:.1%}"
    assert "the hbm tier" in view.what_if
    world.close()


def test_what_loads_from_copies_cost_is_known_beside_the_links() -> None:
    """Copies are told to cost no more than host, and nothing that is ranked depends on it."""
    world = World(WIDE, MIB // 4)
    for tokens, seconds in prompts(6, 20):
        world.serve(tokens, seconds)
    worth = world.store.kv.parts.residency.context.worth
    (space,) = world.store.kv.parts.spaces.values()
    assert 0 < worth.restore_seconds(space, HBM) < worth.restore_seconds(space, HOST)
    world.close()


def test_a_store_with_copies_is_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal of a store with a tier hbm leads to the same actions, copies or not."""
    lines: list[bytes] = []

    def write(line: bytes) -> bool:
        lines.append(line)
        return True

    journal = Journal(write)

    def assembled(*words: Any, **named: Any) -> Any:
        return assemble(*words, **named, journal=journal)

    monkeypatch.setattr(in_process, "assemble", assembled)
    world = World(SPEC, MIB)
    for tokens, seconds in prompts(7, 20):
        world.serve(tokens, seconds)
    journal.close()
    result = replay(map(msgspec.json.decode, lines))
    assert result.difference is None
    assert result.is_whole
    assert any(b'"set_restore",2,' in line for line in lines)
    world.close()


def test_a_sample_has_its_share_of_copies_and_common_beginnings_whole() -> None:
    """Ghosts of a share have that share of the tier, and beginnings that many have on top, but
    never more than the live tier; what is too much then goes."""
    setup = Setup("lru", {"": 1 << 30}, capacities=(2.0,), copies=Copies(1000, lambda *_: 0.9))
    one = Shadows(setup, 0.25).shadows[0]
    live, twice = one.ghost.hbm
    rooms = []
    for shared in (0, 500, 5000):
        one.allow("", 0.0, shared)
        rooms.append((live.room_bytes, twice.room_bytes))
    assert rooms == [(250, 500), (750, 1000), (1000, 2000)]


def test_a_tier_that_shrinks_gives_its_coldest_up() -> None:
    """With less room the copies that were loaded longest ago go at the next load."""
    space = Space(1, WIDE, "default")
    tier = HbmTier(Copies(8 * space.slot_bytes, lambda *_: 0.9))
    for seconds, places in enumerate([range(8), range(8), range(4)]):
        tier.load(space, list(places), float(seconds))
    assert len(tier.promotion) == 8
    tier.allow(4 * space.slot_bytes)
    assert tier.load(space, [0, 1], 9.0) == 2
    assert [tier.promotion.has(place) for place in range(8)] == [True] * 4 + [False] * 4
    assert tier.used_bytes == tier.room_bytes == 4 * space.slot_bytes
