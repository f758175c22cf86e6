"""The tier above host on several GPUs: one copy a block, shown to engines of its own GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from daemons import SPEC, Tagged
from fake_cuda import fake_driver

from kvstore.client import KVClient, LimitReached, Match
from kvstore.core.clock import ManualClock
from kvstore.core.errors import FailedPrecondition
from kvstore.cuda.device import Device
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.testing import InProcessStore
from kvstore.tiers.hbm import HbmTier

MIB = 1 << 20
BLOCK = SPEC.block_bytes
PAYLOAD = Tagged()
HERE, THERE = 0, 1


class World:
    """A store with two GPUs, and a client with an engine on each."""

    def __init__(self, size: int = MIB, host: str = "64MiB", **hbm: Any) -> None:
        self.clock = ManualClock()
        self.tiers = [
            HbmTier(Device(ordinal=i, driver=fake_driver()), {"": size}, buffer_bytes=1 << 18)
            for i in range(2)
        ]
        sections = {"tiers": {"hbm": {"staging_bytes_per_session": "1MiB", **hbm}}}
        self.store = InProcessStore(host, hbm=self.tiers, clock=self.clock, sections=sections)
        self.clients = [self.store.client() for _ in range(2)]
        self.spaces = [client.attach(SPEC) for client in self.clients]
        for size in (1, 2, 4, 8, 16) * 2:  # loads from host take their time
            self.spaces[HERE].report_transfer("host>hbm", size << 16, size * 1e-3)
        for at, client in enumerate(self.clients):
            self.attach(client, at)

    @property
    def hbm(self) -> Any:
        return self.store.kv.parts.hbm

    def copies(self) -> list[int]:
        """How many each GPU has."""
        return [tier.usage().block_count for tier in self.tiers]

    def call(self, client: KVClient, method: str, request: Any) -> Any:
        answer = client._link.session().call(method, request, 5.0)
        self.store.settle()
        return answer

    def attach(self, client: KVClient, at: int) -> Any:
        uuid = self.tiers[at].device_uuid
        return self.call(client, "AttachDevice", pb.AttachDeviceRequest(device_uuid=uuid))

    def put(self, seed: int, blocks: int = 8) -> list[int]:
        tokens = list(range(seed * 1000, seed * 1000 + 4 * blocks))
        made = [np.frombuffer(b, np.uint8) for b in PAYLOAD.blocks(tokens)]
        assert self.spaces[HERE].put(tokens, made).rejected == 0
        return tokens

    def load(self, at: int, tokens: list[int]) -> list[int]:
        """Loads a prompt on one of the GPUs; a second passes."""
        with self.spaces[at].lookup(tokens) as match:
            offsets = self.offsets(at, match)
        self.clock.advance(1.0)
        return offsets

    def offsets(self, at: int, match: Match, device: str = "") -> list[int]:
        assert match.lease is not None
        request = pb.LoadDeviceRequest(
            lease_id=match.lease.id, staging_bytes=MIB, device_uuid=device
        )
        answer = self.call(self.clients[at], "LoadDevice", request)
        return memoryview(answer.offsets).cast("q").tolist()

    def staged(self, at: int, offset: int) -> bytes:
        uuid = self.tiers[at].device_uuid
        staging = next(
            staging for key, (staging, _) in self.hbm._staging._open.items() if key[1] == uuid
        )
        return ctypes.string_at(staging.address + offset, BLOCK)

    def close(self) -> None:
        self.store.check_integrity()
        self.store.close()
        for tier in self.tiers:
            tier.close()


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(**options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_a_copy_is_made_on_the_gpu_that_loads(make_world: Any) -> None:
    """Each GPU gets copies of what its own engines load, and of nothing else."""
    world = make_world()
    one, other = world.put(1), world.put(2, 5)
    for _ in range(2):
        assert world.load(HERE, one) == [-1] * 8
        assert world.load(THERE, other) == [-1] * 5
    assert world.copies() == [8, 5]
    assert world.load(HERE, one) == [i * BLOCK for i in range(8)]
    assert world.load(THERE, other) == [i * BLOCK for i in range(5)]
    for at, tokens in ((HERE, one), (THERE, other)):
        for i, block in enumerate(PAYLOAD.blocks(tokens)):
            assert world.staged(at, i * BLOCK) == block
    status = world.clients[HERE].status().tiers["hbm"]
    assert (status.block_count, status.capacity_bytes) == (13, 2 * MIB)
    counts = {uuid: tier.block_count for uuid, tier in status.devices.items()}
    assert counts == {world.tiers[0].device_uuid: 8, world.tiers[1].device_uuid: 5}


def test_an_engine_elsewhere_gets_copies(make_world: Any) -> None:
    """copy: what lies on another GPU is copied from there into the session's staging."""
    world = make_world()
    tokens = world.put(1)
    for _ in range(2):
        world.load(HERE, tokens)
    assert world.load(THERE, tokens) == [i * BLOCK for i in range(8)]
    for i, block in enumerate(PAYLOAD.blocks(tokens)):
        assert world.staged(THERE, i * BLOCK) == block
    assert world.copies() == [8, 0]
    costs = {(cost.subject, cost.device) for cost in world.clients[HERE].status().costs}
    assert ("peer>staging", world.tiers[THERE].device_uuid) in costs
    assert ("host>arena", world.tiers[HERE].device_uuid) in costs


def test_in_place_is_on_the_own_gpu_only(make_world: Any) -> None:
    """in_place: an engine is shown what lies in its own GPU's arena; the rest comes from host."""
    world = make_world(share="in_place")
    tokens = world.put(1)
    for _ in range(2):
        world.load(HERE, tokens)
    assert world.load(THERE, tokens) == [-1] * 8
    offsets = world.load(HERE, tokens)
    assert len(set(offsets)) == 8
    address = world.tiers[HERE]._pools[0].address
    for offset, block in zip(offsets, PAYLOAD.blocks(tokens), strict=True):
        assert ctypes.string_at(address + offset, BLOCK) == block


@pytest.mark.parametrize("share", ["copy", "in_place"])
def test_a_copy_moves_to_who_uses_it(make_world: Any, share: str) -> None:
    """Loaded twice in a row by another GPU's engines it moves there; read by both, it stays."""
    world = make_world(share=share)
    tokens = world.put(1)
    heard: list[tuple[str, int]] = []
    world.store.events.subscribe(
        None, 0, lambda e: heard.append((e.kind, len(e.keys) // 16)) if e.medium == "hbm" else None
    )
    for at in (HERE, HERE, THERE, HERE, THERE, HERE):
        world.load(at, tokens)
    assert world.copies() == [8, 0]
    world.load(THERE, tokens)
    world.load(THERE, tokens)
    assert world.copies() == [0, 8]
    assert heard == [("stored", 8)]  # the tier has had them all the time
    offsets = world.load(THERE, tokens)
    assert -1 not in offsets
    world.clients[HERE].admin.clear(space_id=world.spaces[HERE].space_id)
    assert world.copies() == [0, 0]
    assert sum(count for kind, count in heard if kind == "removed") == 8


def test_a_moved_copy_stays_where_it_was_shown(make_world: Any) -> None:
    """I6: what an engine reads in place is not overwritten when the copy moves to another GPU."""
    world = make_world(share="in_place")
    tokens = world.put(1)
    for _ in range(2):
        world.load(HERE, tokens)
    match = world.spaces[HERE].lookup(tokens)
    offsets = world.offsets(HERE, match)
    for _ in range(2):
        world.load(THERE, tokens)
    assert world.copies() == [0, 8]
    for seed in range(2, 20):
        for _ in range(2):
            world.load(HERE, world.put(seed, 16))
            world.clients[HERE].keep()
    address = world.tiers[HERE]._pools[0].address
    for offset, block in zip(offsets, PAYLOAD.blocks(tokens), strict=True):
        assert ctypes.string_at(address + offset, BLOCK) == block
    match.check_lease()
    match.release()


def test_peers_that_are_slower_than_host_are_not_used(make_world: Any) -> None:
    """Where copies between GPUs are measured slower than loads from host, host it is."""
    world = make_world()
    tokens = world.put(1)
    for _ in range(2):
        world.load(HERE, tokens)
    for size in (1, 2, 4, 8, 16) * 8:
        world.spaces[HERE].report_transfer("host>hbm", size << 16, size * 1e-7)
    assert world.load(THERE, tokens) == [-1] * 8
    assert world.load(HERE, tokens) != [-1] * 8


def test_one_session_may_have_engines_on_both(make_world: Any) -> None:
    """A load names its GPU of those that its session attached; another one is refused."""
    world = make_world()
    tokens, uuids = world.put(1), [tier.device_uuid for tier in world.tiers]
    for _ in range(2):
        world.load(HERE, tokens)
    with world.spaces[HERE].lookup(tokens) as match:
        with pytest.raises(FailedPrecondition, match="attached no GPU"):
            world.offsets(HERE, match, uuids[THERE])
        world.attach(world.clients[HERE], THERE)
        assert world.offsets(HERE, match, uuids[THERE]) == [i * BLOCK for i in range(8)]
        assert world.offsets(HERE, match) == world.offsets(HERE, match, uuids[HERE])


def test_staging_on_all_gpus_has_one_limit(make_world: Any) -> None:
    """Sessions' staging together stays within the limit, whichever GPUs it is on."""
    world = make_world(staging_bytes="3MiB")
    world.attach(world.clients[HERE], THERE)
    with pytest.raises(LimitReached, match=r"tiers\.hbm\.staging_bytes"):
        world.attach(world.clients[THERE], HERE)
    world.clients[HERE].close()
    world.store.settle()
    assert world.hbm._staging.byte_count == MIB
    world.attach(world.clients[THERE], HERE)


def test_a_gpu_that_fails_leaves_the_other(make_world: Any) -> None:
    """I14: with one GPU lost its copies are read no more, and the other gets its own."""
    world = make_world()
    tokens = world.put(1)
    for _ in range(2):
        world.load(HERE, tokens)
    world.tiers[HERE].problem = "GPU failed"
    assert world.load(THERE, tokens) == [-1] * 8
    world.load(THERE, tokens)
    assert world.copies() == [0, 8]
    status = world.clients[HERE].status()
    assert (status.state, status.tiers["hbm"].state) == ("degraded", "degraded")
    states = [status.tiers["hbm"].devices[tier.device_uuid].state for tier in world.tiers]
    assert states == ["degraded", "serving"]
    assert world.load(THERE, tokens) == [i * BLOCK for i in range(8)]


@pytest.mark.parametrize("share", ["copy", "in_place"])
def test_whatever_two_gpus_load_bytes_are_right(make_world: Any, share: str) -> None:
    """Puts, loads here and there, evictions and clears in any order: what is shown is right."""
    random = Random(7)
    world = make_world(size=MIB // 2, host="3MiB", share=share)
    shown = [0, 0]
    for _ in range(120):
        first = 1000 * random.randrange(4)
        tokens = list(range(first, first + 4 * random.randrange(1, 20)))
        what, at, blocks = random.random(), random.randrange(2), PAYLOAD.blocks(tokens)
        if what < 0.35:
            world.spaces[at].put(tokens, [np.frombuffer(b, np.uint8) for b in blocks])
        elif what < 0.985:
            match = world.spaces[at].lookup(tokens)
            if match.lease is not None:
                base = world.tiers[at]._pools[0].address
                for i, offset in enumerate(world.offsets(at, match)):
                    if offset >= 0:
                        shown[at] += 1
                        found = (
                            world.staged(at, offset)
                            if share == "copy"
                            else ctypes.string_at(base + offset, BLOCK)
                        )
                        assert found == blocks[i]
            match.release()
        else:
            world.clients[at].admin.clear(space_id=world.spaces[at].space_id)
        world.clock.advance(random.random())
        for client in world.clients:
            client.keep()
        world.store.settle()
        world.store.check_integrity()
    assert min(shown) > 10
