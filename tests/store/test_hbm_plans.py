"""Plans with copies on the engine's GPU: where tokens come from, over which links, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemons import SPEC, Tagged
from fake_cuda import fake_driver

from kvstore.client import Match
from kvstore.core.clock import ManualClock
from kvstore.core.plan import PlanStep, Slots
from kvstore.cuda.device import Device
from kvstore.mover import ARENA_OUT_LINK
from kvstore.policies.cost import LinkIdentity
from kvstore.policies.index import Span
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.store.explain import document
from kvstore.store.explain_text import explained
from kvstore.store.hbm import Near
from kvstore.store.planning import _segments, stretches
from kvstore.testing import InProcessStore
from kvstore.tiers.hbm import HbmTier

MIB = 1 << 20
BLOCK = SPEC.block_bytes
SIZE = SPEC.block_size
HOST_SECONDS, HBM_SECONDS, ARENA_SECONDS = 1e-8, 1e-9, 1e-9  # a byte
STEP_TOKEN_SECONDS = 1e-4


class World:
    """A store with a GPU, a disk, and one engine whose costs are all measured."""

    def __init__(self, token_seconds: float = STEP_TOKEN_SECONDS, **hbm: Any) -> None:
        self.clock = ManualClock()
        self.tier = HbmTier(Device(driver=fake_driver()), {"": MIB}, buffer_bytes=1 << 18)
        sections = {"tiers": {"hbm": {"staging_bytes_per_session": "1MiB", **hbm}}}
        self.store = InProcessStore("64MiB", hbm=self.tier, clock=self.clock, sections=sections)
        self.client = self.store.client()
        self.space = self.client.attach(SPEC, engine_build="e", device="g")
        uuid = self.tier.device_uuid
        self.call("AttachDevice", pb.AttachDeviceRequest(device_uuid=uuid))
        costs = self.store.kv.parts.costs
        for blocks in (1, 2, 4, 8, 16, 32) * 3:
            size = blocks * BLOCK
            self.space.report_transfer("host>hbm", size, size * HOST_SECONDS)
            self.space.report_transfer("hbm>hbm", size, size * HBM_SECONDS)
            costs.observe_transfer(LinkIdentity(ARENA_OUT_LINK, uuid), size * ARENA_SECONDS, size)
        for new in (16, 32, 64, 128, 256, 512) * 4:
            for cached in (0, 64, 512):
                seconds = 1e-3 + new * token_seconds
                self.space.report_step(seconds=seconds, prefill=[(new, cached)], clock="cpu")

    def call(self, method: str, request: Any) -> Any:
        answer = self.client._link.session().call(method, request, 5.0)
        self.store.settle()
        return answer

    def put(self, seed: int, blocks: int = 8) -> list[int]:
        tokens = list(range(seed * 1000, seed * 1000 + SIZE * blocks))
        made = [np.frombuffer(b, np.uint8) for b in Tagged().blocks(tokens)]
        assert self.space.put(tokens, made).rejected == 0
        return tokens

    def lookup(self, tokens: list[int]) -> Match:
        return self.space.lookup(tokens, request_id="r")

    def heat(self, tokens: list[int]) -> None:
        """Loads a prompt twice: now it has copies."""
        for _ in range(2):
            with self.space.lookup(tokens) as match:
                assert match.lease is not None
                request = pb.LoadDeviceRequest(lease_id=match.lease.id, staging_bytes=MIB)
                self.call("LoadDevice", request)
            self.clock.advance(1.0)

    def path(self) -> Any:
        (run,) = self.store.kv.parts.index.runs()
        return [Span(run, 0, run.ready)]

    def explained(self) -> dict[str, Any]:
        entry = self.store.kv.parts.decisions.of_request("r")
        assert entry is not None
        return document(entry)

    def close(self) -> None:
        self.store.check_integrity()
        self.store.close()
        self.tier.close()


@pytest.fixture
def make_world() -> Iterator[Any]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(**options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def steps(match: Match) -> list[tuple[str, int]]:
    return [(step.source, step.token_count) for step in match.plan.steps]


@pytest.mark.parametrize("share", ["copy", "in_place"])
def test_a_plan_says_what_comes_from_the_gpu(make_world: Any, share: str) -> None:
    """Copies on the engine's GPU are a source of their own, over links of their own."""
    world = make_world(share=share)
    short, whole = world.put(1, 8), world.put(1, 12)
    world.heat(short)
    with world.lookup(whole) as match:
        assert steps(match) == [("hbm", 8 * SIZE), ("host", 4 * SIZE)]
    found = world.explained()
    over = ["hbm>hbm"] if share == "in_place" else ["arena>staging", "hbm>hbm"]
    assert [(s["source"], s["links"]) for s in found["segments"]] == [
        ("hbm", over), ("host", ["host>hbm"]),
    ]  # fmt: skip
    text = explained(found)
    assert f"{8 * SIZE} from hbm" in text
    assert f"in hbm, over {' and '.join(over)}" in text
    assert "hbm>hbm " in text


def test_copies_make_a_load_worth_it_that_host_does_not(make_world: Any) -> None:
    """What takes longer from host than to compute is recomputed, and loaded once it has copies."""
    world = make_world(token_seconds=BLOCK / SIZE * HOST_SECONDS / 2)  # half of what a load takes
    tokens = world.put(1, 16)
    with world.space.lookup(tokens) as match:
        assert match.plan.kind == "recompute_all"
    places = world.store.kv.parts.index.places(world.path(), 0, 0).tolist()
    gpu = world.store.kv.parts.hbm.gpus[0]
    now = world.clock.now()
    gpu.promotion.loaded(places, now, 1.0)
    (session,) = world.store.kv.parts.sessions.values()
    (attachment,) = session.attachments.values()
    gpu.promote(world.path(), places, set(places), attachment)
    world.store.settle()
    world.clock.advance(1.0)
    with world.space.lookup(tokens) as match:
        assert steps(match) == [("hbm", 16 * SIZE)]
        assert "from hbm" in match.reason


def test_hits_are_counted_by_tier(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that lies on the engine's GPU is one of tier hbm, and so are the bytes restored."""
    world = make_world()
    tokens = world.put(1, 8)
    world.heat(tokens)
    heard: list[tuple[str, str, int]] = []
    recorder = world.store.kv.parts.recorder
    monkeypatch.setattr(type(recorder), "hit", lambda _, *a: heard.append(("hit", *a)))
    monkeypatch.setattr(type(recorder), "restored", lambda _, *a: heard.append(("restored", *a)))
    world.lookup(tokens).release()
    assert heard == [
        ("hit", "hbm", 8 * SIZE),
        ("restored", "host", 0),
        ("restored", "hbm", 8 * BLOCK),
    ]


def test_what_has_no_room_in_staging_is_planned_from_host(make_world: Any) -> None:
    """A load's half of the staging bounds what a plan expects of the GPU."""
    world = make_world(staging_bytes_per_session="1MiB")
    tokens = world.put(1, 100)
    world.heat(tokens)
    room = (1 << 19) // BLOCK
    with world.lookup(tokens) as match:
        assert steps(match) == [("hbm", room * SIZE), ("host", (100 - room) * SIZE)]


def test_an_engine_without_that_gpu_is_planned_as_before(make_world: Any) -> None:
    """Copies count for engines that attached the GPU; for others all is in host."""
    world = make_world()
    tokens = world.put(1, 8)
    world.heat(tokens)
    other = world.store.client().attach(SPEC, engine_build="e", device="g")
    with other.lookup(tokens) as match:
        assert steps(match) == [("host", 8 * SIZE)]
    world.tier.problem = "GPU failed"
    with world.space.lookup(tokens) as match:
        assert steps(match) == [("host", 8 * SIZE)]


def test_until_its_links_are_measured_all_is_loaded() -> None:
    """Without measurements of the GPU's own links nothing is predicted, and the reason says so."""
    tier = HbmTier(Device(driver=fake_driver()), {"": MIB})
    world = World.__new__(World)
    world.clock, world.tier = ManualClock(), tier
    world.store = InProcessStore("64MiB", hbm=tier, clock=world.clock)
    world.client = world.store.client()
    world.space = world.client.attach(SPEC)
    world.call("AttachDevice", pb.AttachDeviceRequest(device_uuid=tier.device_uuid))
    for size in (1, 2, 4, 8, 16) * 2:
        world.space.report_transfer("host>hbm", size << 16, size * 1e-3)
    tokens = world.put(1)
    world.heat(tokens)
    with world.lookup(tokens) as match:
        assert steps(match) == [("hbm", 8 * SIZE)]
        assert "not measured yet" in match.reason
        assert "arena>staging" in match.reason
    world.close()


def test_stretches_of_three_tiers() -> None:
    """Blocks fall into stretches by where they lie, from the first token that is wanted."""
    slots = Slots(2, np.array([5, 6, -1, 7, 8]), np.zeros(5, np.uint64))
    near = Near(np.array([True, False, False, True, True]), "g", False)
    assert stretches(slots, 7 * 16, 2 * 16 + 3, 16, near) == [
        PlanStep(35, 13, "hbm"), PlanStep(48, 16, "host"), PlanStep(64, 16, "disk"),
        PlanStep(80, 32, "hbm"),
    ]  # fmt: skip


def test_of_many_stretches_the_rest_costs_what_its_slowest_does() -> None:
    """The last of many stretches are one, by the bytes that come from the slowest of its tiers."""
    sources = ["host", "hbm", "host", "hbm", "host", "hbm"]
    loads = [PlanStep(16 * i, 16, source) for i, source in enumerate(sources)]
    paths: Any = {"host": {"host>hbm": None}, "hbm": {"hbm>hbm": None}}
    found = list(_segments(loads, 0, 2.0, paths))
    assert [(s.tokens, s.byte_count, s.source) for s in found] == [
        (16, 32, "host"), (16, 32, "hbm"), (16, 32, "host"), (48, 32, "host"),
    ]  # fmt: skip
