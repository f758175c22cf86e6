"""The tier above host: copies made by measurement, shown to engines, and gone with host's own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from daemons import SPEC, Tagged
from fake_cuda import fake_driver

from kvstore.client import (
    InvalidRequest,
    KVClient,
    LeaseLost,
    LimitReached,
    Match,
    NotFound,
)
from kvstore.core.block import place_offset
from kvstore.core.clock import ManualClock
from kvstore.core.errors import FailedPrecondition
from kvstore.cuda.device import Device
from kvstore.policies.index import Span
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.testing import InProcessStore
from kvstore.tiers.hbm import HbmTier

MIB = 1 << 20
UUID = "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"
BLOCK = SPEC.block_bytes
PAYLOAD = Tagged()


class World:
    """A store with a GPU of `size`, a client on that GPU, and its device staging."""

    def __init__(self, size: int, host: str = "64MiB", **hbm: Any) -> None:
        self.clock = ManualClock()
        self.tier = HbmTier(Device(driver=fake_driver()), {"": size}, buffer_bytes=1 << 18)
        sections = {"tiers": {"hbm": {"staging_bytes_per_session": "1MiB", **hbm}}}
        self.store = InProcessStore(host, hbm=self.tier, clock=self.clock, sections=sections)
        self.client = self.store.client()
        self.space = self.client.attach(SPEC)
        self.share: Any = None
        for size in (1, 2, 4, 8, 16) * 2:  # loads from host take their time
            self.space.report_transfer("host>hbm", size << 16, size * 1e-3)

    @property
    def hbm(self) -> Any:
        return self.store.kv.parts.hbm

    def call(self, method: str, request: Any, client: KVClient | None = None) -> Any:
        answer = (client or self.client)._link.session().call(method, request, 5.0)
        self.store.settle()
        return answer

    def attach(self, client: KVClient | None = None) -> Any:
        request = pb.AttachDeviceRequest(device_uuid=UUID)
        self.share = self.call("AttachDevice", request, client)
        return self.share

    def put(self, seed: int, blocks: int = 8) -> list[int]:
        tokens = list(range(seed * 1000, seed * 1000 + 4 * blocks))
        made = [np.frombuffer(b, np.uint8) for b in PAYLOAD.blocks(tokens)]
        assert self.space.put(tokens, made).stored == blocks
        return tokens

    def load(self, tokens: list[int], offset: int = 0, room: int = MIB) -> list[int]:
        with self.space.lookup(tokens) as match:
            return self.offsets(match, offset, room)

    def offsets(self, match: Match, offset: int = 0, room: int = MIB) -> list[int]:
        assert match.lease is not None
        request = pb.LoadDeviceRequest(
            lease_id=match.lease.id, staging_offset=offset, staging_bytes=room
        )
        answer = self.call("LoadDevice", request)
        return memoryview(answer.offsets).cast("q").tolist()

    def heat(self, tokens: list[int]) -> None:
        """Loads a prompt twice, a second apart: now it has copies."""
        for _ in range(2):
            self.clock.advance(1.0)
            self.load(tokens)
        self.clock.advance(1.0)

    def staged(self, offset: int) -> bytes:
        (staging, _), *_ = self.hbm._staging._open.values()
        return ctypes.string_at(staging.address + offset, BLOCK)

    def close(self) -> None:
        self.store.check_integrity()
        self.store.close()
        self.tier.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World(MIB)
    made.attach()
    yield made
    made.close()


def test_a_block_gets_a_copy_at_its_second_load(world: World) -> None:
    """The first load makes none, the second one does, the third finds it, whole."""
    tokens = world.put(1)
    assert world.load(tokens) == [-1] * 8
    assert world.tier.usage().block_count == 0
    world.clock.advance(1.0)
    assert world.load(tokens) == [-1] * 8
    assert world.tier.usage().block_count == 8
    world.clock.advance(1.0)
    offsets = world.load(tokens, offset=1 << 16)
    assert offsets == [(1 << 16) + i * BLOCK for i in range(8)]
    for offset, block in zip(offsets, PAYLOAD.blocks(tokens), strict=True):
        assert world.staged(offset) == block
    status = world.store.kv.status()
    assert list(status.tiers) == ["hbm", "host"]
    assert status.tiers["hbm"].block_count == 8
    assert status.tiers["hbm"].used_bytes == 8 * BLOCK


def test_what_does_not_fit_staging_comes_from_host(world: World) -> None:
    """Only blocks that fit the range the engine names are copied there."""
    tokens = world.put(1)
    world.heat(tokens)
    assert world.load(tokens, 0, 3 * BLOCK + 1) == [0, BLOCK, 2 * BLOCK, -1, -1, -1, -1, -1]
    assert world.load(tokens, MIB - BLOCK, MIB) == [MIB - BLOCK] + [-1] * 7
    assert world.load(tokens, 5 * MIB, MIB) == [-1] * 8


def test_the_coldest_make_room(world: World) -> None:
    """With the arena full, hotter blocks take the place of those that were not read longest."""
    slots = MIB // BLOCK
    cold, hot = world.put(1, slots), world.put(2, 8)
    world.heat(cold)
    assert world.tier.usage().block_count == slots
    world.heat(hot)
    assert world.load(hot) == [i * BLOCK for i in range(8)]
    kept = world.load(cold)
    assert kept[-8:] == [-1] * 8  # of one prompt the end goes first
    assert kept[: slots - 8] == [i * BLOCK for i in range(slots - 8)]


@pytest.mark.parametrize("how", ["clear", "epoch", "evicted"])
def test_a_copy_goes_with_the_host_copy(how: str) -> None:
    """Nothing is read from a GPU that host holds no more."""
    world = World(MIB, host="6MiB")
    world.attach()
    tokens = world.put(1)
    world.heat(tokens)
    if how == "clear":
        world.client.admin.clear(space_id=world.space.space_id)
    elif how == "epoch":
        world.client.admin.bump_epoch(world.space.space_id)
    else:
        for seed in range(2, 90):
            world.put(seed)
    world.store.settle()
    if how != "evicted":
        assert world.tier.usage().block_count == 0
    world.store.check_integrity()
    with world.space.lookup(tokens) as match:
        assert match.matched_tokens == 0
    world.close()


def test_a_lost_lease_gets_nothing(world: World) -> None:
    """Blocks are shown to those alone that hold a lease on them."""
    tokens = world.put(1)
    world.heat(tokens)
    match = world.space.lookup(tokens)
    assert match.lease is not None
    request = pb.LoadDeviceRequest(lease_id=match.lease.id)
    match.release()
    world.store.settle()
    world.client.keep()
    other = world.store.client()
    with pytest.raises(NotFound, match="lease"):
        world.call("LoadDevice", request, other)


def test_a_call_takes_a_turn_and_no_more(world: World) -> None:
    """Too many blocks for a turn of the owner, and blocks that are not leased, are refused."""
    tokens = world.put(1, 1100)
    with world.space.lookup(tokens) as match:
        assert match.lease is not None
        request = pb.LoadDeviceRequest(lease_id=match.lease.id)
        with pytest.raises(InvalidRequest, match="1024 at a time"):
            world.call("LoadDevice", request)
        request.block_count = 1024
        assert len(world.call("LoadDevice", request).offsets) == 8 * 1024
        request.first_block = 1000
        with pytest.raises(InvalidRequest, match="not all leased"):
            world.call("LoadDevice", request)


def test_a_long_prompt_is_promoted_in_turns() -> None:
    """A load has at most 128 blocks promoted, a turn's worth; the next loads have the others."""
    world = World(8 * MIB)
    world.attach()
    tokens, counts = world.put(1, 300), []
    for _ in range(5):
        world.load(tokens)
        world.clock.advance(1.0)
        counts.append(world.tier.usage().block_count)
    assert counts == [0, 128, 256, 300, 300]
    world.close()


def test_another_gpu_and_no_gpu_are_refused(world: World) -> None:
    """Only an engine on the tier's own GPU, on this host, gets its memory."""
    request = pb.AttachDeviceRequest(device_uuid="GPU-1")
    with pytest.raises(FailedPrecondition, match=UUID):
        world.call("AttachDevice", request)
    far = world.store.client(shared_memory=False)
    with pytest.raises(FailedPrecondition, match="this host"):
        world.attach(far)
    fresh = world.store.client()
    space = fresh.attach(SPEC)
    tokens = world.put(1)
    world.heat(tokens)
    with space.lookup(tokens) as match:
        assert match.lease is not None
        load = pb.LoadDeviceRequest(lease_id=match.lease.id)
        with pytest.raises(FailedPrecondition, match="AttachDevice"):
            world.call("LoadDevice", load, fresh)
    with InProcessStore("32MiB") as store, store.client() as client:
        session = client._link.session()
        with pytest.raises(FailedPrecondition, match=r"tiers\.hbm"):
            session.call("AttachDevice", pb.AttachDeviceRequest(device_uuid=UUID), 5.0)


def test_staging_has_a_limit_and_ends_with_its_session() -> None:
    """Device staging of all sessions stays within the limit, and is free when a session ends."""
    world = World(MIB, staging_bytes="2MiB")
    clients = [world.store.client() for _ in range(3)]
    assert world.attach(clients[0]).share == "copy"
    assert world.attach(clients[0]).length == MIB  # the same again
    world.attach(clients[1])
    with pytest.raises(LimitReached, match=r"tiers\.hbm\.staging_bytes"):
        world.attach(clients[2])
    clients[0].close()
    world.store.settle()
    world.attach(clients[2])
    world.close()


def test_blocks_shown_in_place_stay_until_the_lease_ends() -> None:
    """in_place: an engine reads the arena itself; what it was shown is not overwritten."""
    world = World(MIB, share="in_place")
    assert world.attach().share == "in_place"
    assert world.share.length == MIB
    tokens = world.put(1)
    world.heat(tokens)
    address = world.tier._pools[0].address
    match = world.space.lookup(tokens)
    offsets = world.offsets(match)
    assert len(set(offsets)) == 8
    blocks = PAYLOAD.blocks(tokens)
    assert match.lease is not None
    renew = pb.RenewRequest(lease_ids=[match.lease.id])
    for seed in range(2, 12):
        world.heat(world.put(seed, 16))
        assert not world.call("Renew", renew).lost_leases
    world.client.admin.clear(space_id=world.space.space_id)
    for seed in range(20, 22):
        world.heat(world.put(seed, 64))
    for offset, block in zip(offsets, blocks, strict=True):
        assert ctypes.string_at(address + offset, BLOCK) == block
    match.release()
    world.store.settle()
    world.client.keep()
    world.store.settle()
    for seed in range(40, 50):
        world.heat(world.put(seed, 16))
    shown = [ctypes.string_at(address + offset, BLOCK) for offset in offsets]
    assert shown != blocks
    world.close()


def test_events_tell_what_lies_on_the_gpu(world: World) -> None:
    """Stored and Removed with medium hbm give, at every moment, the keys of what is there."""
    shown: set[bytes] = set()

    def hear(event: Any) -> None:
        keys = {event.keys[i : i + 16] for i in range(0, len(event.keys), 16)}
        if event.medium == "hbm" and event.kind == "stored":
            assert not shown & keys
            shown.update(keys)
        elif event.medium == "hbm":
            assert keys <= shown
            shown.difference_update(keys)

    world.store.events.subscribe(None, 0, hear)
    prompts = [world.put(seed, 16) for seed in range(1, 8)]
    for turn in range(30):
        world.load(prompts[turn * turn % 7])
        world.clock.advance(0.7)
        if turn == 20:
            world.client.admin.clear(space_id=world.space.space_id)
            prompts = [world.put(seed, 16) for seed in range(1, 8)]
        tier, copies = world.tier, world.hbm.gpus[0].slots.values()
        assert shown == {tier.header(slot).key for slot in copies}
    assert shown


def test_nothing_is_copied_where_it_is_no_faster(world: World) -> None:
    """Where loads from host are measured quicker than from a copy, no copies are made."""
    for size in (1, 2, 4, 8, 16) * 8:
        world.space.report_transfer("host>hbm", size << 16, size * 1e-7)
    tokens = world.put(1)
    world.heat(tokens)
    world.heat(tokens)
    assert world.tier.usage().block_count == 0


def test_wrong_bytes_never_reach_a_gpu(world: World) -> None:
    """A host block that is damaged is found when it is copied up, and is a miss from then on."""
    tokens = world.put(1)
    world.load(tokens)
    place = int(world.store.kv.parts.index.places(path_of(world), 0, 0)[3])
    world.store.tier._pools[0].data[place_offset(place) :][:7] ^= 0xFF
    world.clock.advance(1.0)
    world.load(tokens)
    assert world.tier.usage().block_count == 3
    with world.space.lookup(tokens) as match:
        assert match.matched_tokens == 3 * SPEC.block_size


@pytest.mark.parametrize("share", ["copy", "in_place"])
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_bytes_are_right(share: str, seed: int) -> None:
    """Puts, loads, evictions, clears and ends of leases in any order: what is shown is right."""
    random = Random(seed)
    world = World(MIB // 2, host="3MiB", share=share)
    world.attach()
    address = world.tier._pools[0].address
    held: list[tuple[Match, list[int], list[bytes]]] = []
    shown = 0

    def read(offset: int) -> bytes:
        return (
            world.staged(offset) if share == "copy" else ctypes.string_at(address + offset, BLOCK)
        )

    def check(match: Match, offsets: list[int], blocks: list[bytes]) -> None:
        found = {i: read(offset) for i, offset in enumerate(offsets) if offset >= 0}
        try:
            match.check_lease()
        except LeaseLost:
            return
        assert all(blocks[i] == data for i, data in found.items())

    for _ in range(100):
        tokens = list(range(tag := 1000 * random.randrange(12), tag + 4 * random.randrange(1, 30)))
        blocks = PAYLOAD.blocks(tokens)
        what = random.random()
        if what < 0.45:
            world.space.put(tokens, [np.frombuffer(b, np.uint8) for b in blocks])
        elif what < 0.9:
            match = world.space.lookup(tokens)
            if match.lease is not None:
                offsets = world.offsets(match)
                shown += sum(offset >= 0 for offset in offsets)
                check(match, offsets, blocks)
                if share == "in_place":
                    held.append((match, offsets, blocks))
                else:
                    match.release()
        elif what < 0.92:
            world.client.admin.clear(space_id=world.space.space_id)
        else:
            world.clock.advance(random.random())
            world.client.keep()
        world.store.settle()
        for one in held:
            check(*one)
        while len(held) > 3:
            held.pop(random.randrange(len(held)))[0].release()
        world.store.check_integrity()
    assert shown
    for match, _, _ in held:
        match.release()
    world.close()


def path_of(world: World) -> Any:
    (run,) = world.store.kv.parts.index.runs()
    return [Span(run, 0, run.ready)]
