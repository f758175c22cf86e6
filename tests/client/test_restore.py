"""Bytes in, the same bytes out: the forms of blocks, and where restored bytes come from."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import (
    InvalidRequest,
    KVClient,
    KVSpec,
    LeaseLost,
    NotFound,
    PutResult,
    StoreUnavailable,
)
from kvstore.client.located import Located
from kvstore.core.lane import FrameKind, pack_frame
from kvstore.core.slots import encode_slots
from kvstore.proto.v1 import kvstore_pb2 as pb

SIZE, COUNT = 4096, 10
TOKENS = list(range(4 * COUNT))
BLOCKS = np.frombuffer(random.Random(7).randbytes(SIZE * COUNT), np.uint8).reshape(COUNT, SIZE)


FORMS = {
    "one array": lambda: BLOCKS,
    "one buffer": lambda: BLOCKS.tobytes(),
    "words": lambda: BLOCKS.view(np.float16).reshape(COUNT, 4, -1),
    "arrays": lambda: list(BLOCKS),
    "bytes": lambda: [row.tobytes() for row in BLOCKS],
    "memoryviews": lambda: [memoryview(row) for row in BLOCKS],
    "strided": lambda: np.repeat(BLOCKS, 2, axis=0)[::2],
    "made on demand": lambda: lambda position: BLOCKS[position],
}


@pytest.mark.parametrize("form", FORMS)
def test_what_was_put_is_restored(space, form):
    """I1: in whatever form blocks are given, their bytes come back, by view and by copy."""
    assert space.put(TOKENS, FORMS[form]()) == PutResult(stored=COUNT)
    with space.lookup(TOKENS) as match:
        assert match.matched_tokens == match.restore_tokens == len(TOKENS)
        assert match.block_count == COUNT
        views = space.restore(match)
        assert [bytes(view) for view in views] == [row.tobytes() for row in BLOCKS]
        out = np.zeros_like(BLOCKS)
        space.restore_into(match, out)
        assert (out == BLOCKS).all()
        separate = [bytearray(SIZE) for _ in range(COUNT)]
        space.restore_into(match, separate)
        assert b"".join(separate) == BLOCKS.tobytes()
        flat = bytearray(SIZE * COUNT)
        space.restore_into(match, memoryview(flat))
        assert flat == BLOCKS.tobytes()


@pytest.mark.parametrize("block_bytes", [1, 1000, 4095, 5000])
def test_blocks_that_do_not_fill_their_slots(make_daemon, block_bytes):
    """Padding between slots is neither copied in nor handed out."""
    daemon = make_daemon(block_bytes=block_bytes)
    spec = KVSpec(
        model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
        block_size=4, layout="opaque", block_bytes=block_bytes,
    )  # fmt: skip
    blocks = random.Random(1).randbytes(block_bytes * COUNT)
    with KVClient.connect(daemon.path) as client:
        space = client.attach(spec)
        assert space.put(TOKENS, blocks).stored == COUNT
        with space.lookup(TOKENS) as match:
            out = bytearray(block_bytes * COUNT)
            space.restore_into(match, out)
            assert out == blocks
            assert b"".join(space.restore(match)) == blocks


def test_views_cannot_be_written(space):
    """I7: a view of the pool is read-only all the way down."""
    space.put(TOKENS, BLOCKS)
    with space.lookup(TOKENS) as match:
        view = space.restore(match)[0]
        assert view.readonly
        with pytest.raises((TypeError, ValueError)):
            np.frombuffer(view, np.uint8)[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            match.located.runs[0][2].data.setflags(write=True)


@given(seed=st.integers(0, 10**6))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_scattered_slots_come_back_in_order(space, daemon, seed):
    """I1: wherever in the pool the blocks of a prompt lie, restore puts them in prompt order."""
    daemon.blocks.clear()
    daemon.data[: 64 * SIZE] = np.frombuffer(random.Random(seed).randbytes(64 * SIZE), np.uint8)
    slots = random.Random(seed).sample(range(64), COUNT)
    if seed % 2:
        slots[3:7] = sorted(slots[3:7])
    prefix = np.array(TOKENS, "<u4").tobytes()
    for i, slot in enumerate(slots):
        daemon.generations[slot] = daemon.fresh_id()
        daemon.blocks[prefix[: 16 * (i + 1)]] = slot
    want = [daemon.data[slot * SIZE :][:SIZE].tobytes() for slot in slots]
    local = seed % 3
    with space.lookup(TOKENS, local_tokens=4 * local) as match:
        assert [bytes(view) for view in space.restore(match)] == want[local:]
        out = np.empty((COUNT - local, SIZE), np.uint8)
        space.restore_into(match, out)
        assert out.tobytes() == b"".join(want[local:])
        daemon.generations[slots[-1]] += 1
        with pytest.raises(LeaseLost):
            match.check()


def test_slots_that_cannot_be_are_refused(space, daemon):
    """I1: what is no slot of a mapped pool is an error, whatever else the answer holds."""
    located = Located(space._link.attachment(space), (range(0, 2),))
    with pytest.raises(StoreUnavailable, match="pool 7"):
        located.add(0, packed_slots([7 << 40, 0], [1, 1]))
    with pytest.raises(StoreUnavailable, match="unpack"):
        located.add(0, pb.SlotRuns(places=b"123"))
    with pytest.raises(StoreUnavailable, match="disagree"):
        located.add(0, pb.SlotRuns(places=bytes(16), generations=bytes(16), counts=b"1234"))
    assert located.missing() == [range(0, 2)]
    located.add(0, packed_slots([0, len(daemon.generations) + 5], [0, 1]))
    with pytest.raises(LeaseLost):
        located.check()


@pytest.mark.parametrize("make", [np.array, np.asfortranarray, lambda a: a.view(np.int8), list])
def test_any_contiguous_array_takes_blocks(space, make):
    """Blocks reach the caller's memory whatever the type of the array; others are refused."""
    space.put(TOKENS, BLOCKS)
    out = make(np.zeros((COUNT, SIZE), np.uint8))
    with space.lookup(TOKENS) as match:
        if isinstance(out, np.ndarray) and not out.flags.c_contiguous:
            with pytest.raises(InvalidRequest):
                space.restore_into(match, out)
            return
        space.restore_into(match, out)
        assert np.array_equal(np.stack(list(out)).view(np.uint8), BLOCKS)
        frozen = np.zeros((COUNT, SIZE), np.uint8)
        frozen.setflags(write=False)
        with pytest.raises(InvalidRequest, match="read-only"):
            space.restore_into(match, frozen)
        with pytest.raises(InvalidRequest, match="read-only"):
            space.restore_into(match, list(frozen))


def test_local_tokens_are_left_out(space):
    """What the engine has already is neither leased twice nor copied."""
    space.put(TOKENS, BLOCKS)
    with space.lookup(TOKENS, local_tokens=12) as match:
        assert match.ranges == (range(3, COUNT),)
        out = bytearray(SIZE * (COUNT - 3))
        space.restore_into(match, out)
        assert out == BLOCKS[3:].tobytes()


def test_a_split_plan_loads_its_two_parts(space, daemon):
    """Blocks that the plan recomputes are in neither views nor copies."""
    space.put(TOKENS, BLOCKS)

    def split(method, request):
        if method != "Lookup":
            return None
        response = daemon.on_lookup(None, request, [])
        response.plan.kind = "split"
        for first, count, source in ((0, 8, "host"), (8, 16, "recompute"), (24, 16, "host")):
            response.plan.steps.add(first_token=first, token_count=count, source=source)
        return response

    daemon.before = split
    with space.lookup(TOKENS) as match:
        assert match.ranges == (range(0, 2), range(6, 10))
        assert match.plan.kind == "split"
        out = bytearray(SIZE * 6)
        space.restore_into(match, out)
        assert out == BLOCKS[[0, 1, 6, 7, 8, 9]].tobytes()


@given(
    known=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=3),
    split=st.booleans(),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_in_no_pool_yet_is_asked_for(space, daemon, known, split):
    """Blocks that the lookup gave no slots for come by Restore, and only those are asked for."""
    ranges = (range(0, 3), range(5, COUNT)) if split else (range(0, COUNT),)
    located = Located(space._link.attachment(space), ranges)
    have = set()
    for first, count in known:
        blocks = set(range(first, min(first + count, COUNT))) - have
        for block in blocks:
            located.add(block, one_slot(block))
        have |= blocks
    wanted = [block for blocks in ranges for block in blocks if block not in have]
    assert [block for blocks in located.missing() for block in blocks] == wanted
    for blocks in located.missing():
        for block in blocks:
            located.add(block, one_slot(block))
    assert located.missing() == []
    pages = [page for _, _, _, page, _ in sorted(located.runs)]
    assert pages == [block for blocks in ranges for block in blocks]


def one_slot(block):
    return packed_slots([block], [1])


def packed_slots(places, generations):
    slots = pb.SlotRuns()
    slots.places, slots.generations, slots.counts = encode_slots(
        np.array(places), np.array(generations, np.uint64), 1
    )
    return slots


def test_restore_waits_for_blocks_of_other_tiers(space, daemon):
    """A match whose blocks are not in memory yet is complete after the Restore stream."""
    space.put(TOKENS, BLOCKS)

    def slowly(method, request):
        if method == "Lookup":
            response = daemon.on_lookup(None, request, [])
            response.ClearField("slots")
            return response
        if method == "Restore":
            peer = next(iter(daemon.peers.values()))
            call_id = max(space._link.session().transport._calls)
            item = pb.RestoreResponse(first_block=0, block_count=COUNT)
            item.slots.places, item.slots.generations, item.slots.counts = packed
            raw = item.SerializeToString()
            peer.socket.send(pack_frame(FrameKind.STREAM, 3, 0, call_id, raw))
            return pb.RestoreResponse()
        return None

    places = np.arange(COUNT, dtype=np.int64)
    packed = encode_slots(places, daemon.generations[:COUNT], 1)
    daemon.before = slowly
    with space.lookup(TOKENS) as match:
        out = bytearray(SIZE * COUNT)
        space.restore_into(match, out)
        assert out == BLOCKS.tobytes()


def test_blocks_that_cannot_be_had_are_named(space, daemon):
    """A block that its tier lost is NotFound with the reason, never other bytes."""
    space.put(TOKENS, BLOCKS)

    def fail(method, request):
        if method == "Lookup":
            response = daemon.on_lookup(None, request, [])
            response.ClearField("slots")
            return response
        if method == "Restore":
            peer = next(iter(daemon.peers.values()))
            call_id = max(space._link.session().transport._calls)
            item = pb.RestoreResponse(first_block=2, block_count=3, failed_reason="corrupt on disk")
            raw = item.SerializeToString()
            peer.socket.send(pack_frame(FrameKind.STREAM, 3, 0, call_id, raw))
            return pb.RestoreResponse()
        return None

    daemon.before = fail
    with space.lookup(TOKENS) as match, pytest.raises(NotFound, match=r"blocks 2 to 4 .*corrupt"):
        space.restore(match)
