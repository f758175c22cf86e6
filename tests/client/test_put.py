"""Puts: what is wanted is stored, what is not is counted, what is wrong is named."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvstore.client import InvalidRequest, KVClient, KVSpec, NotFound, PutResult, StoreUnavailable
from kvstore.core.errors import LimitReached
from kvstore.core.plan import BlockOutcome
from kvstore.proto.v1 import kvstore_pb2 as pb

SIZE, COUNT = 4096, 10
TOKENS = list(range(4 * COUNT))
BLOCKS = np.frombuffer(random.Random(7).randbytes(SIZE * COUNT), np.uint8).reshape(COUNT, SIZE)


def test_present_blocks_are_not_copied(space, daemon):
    """A block that is there already is neither asked for nor sent."""
    space.put(TOKENS[:16], BLOCKS[:4])
    made = []

    def make(position):
        made.append(position)
        return BLOCKS[position]

    assert space.put(TOKENS, make) == PutResult(stored=6, present=4)
    assert made == [4, 5, 6, 7, 8, 9]


def test_a_put_may_begin_in_the_middle(space):
    """Blocks from first_block on extend what is stored; positions are the prompt's."""
    space.put(TOKENS[:16], BLOCKS[:4])
    assert space.put(TOKENS, BLOCKS[4:], first_block=4).stored == 6
    with space.lookup(TOKENS) as match:
        out = bytearray(SIZE * COUNT)
        space.restore_into(match, out)
        assert out == BLOCKS.tobytes()


def test_put_async_keeps_the_order_of_calls(space):
    """Puts of one client follow each other, so that parents come before children."""
    handles = [
        space.put_async(TOKENS[: 4 * n], BLOCKS[n - 1 : n], first_block=n - 1)
        for n in range(1, COUNT + 1)
    ]
    assert [handle.result(5).stored for handle in handles] == [1] * COUNT
    assert all(handle.done for handle in handles)


WRONG = {
    "a short block": ([*BLOCKS[:9], b"x"], r"blocks\[9\] \(block 9\) holds 1 bytes"),
    "too few blocks": (list(BLOCKS[:9]), "holds 9 buffers for 10 blocks"),
    "a short array": (BLOCKS[:9].copy(), "holds 36864 bytes; 10 blocks of 4096 are 40960"),
    "no buffer": ([1] * 10, r"blocks\[0\] is a int"),
    "a made block": (lambda position: b"xy", r"\(block 0\) holds 2 bytes"),
    "a hole": ([BLOCKS[0], *[np.zeros(2 * SIZE, np.uint8)[::2]] * 9], "is not contiguous"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_blocks_are_named_and_nothing_is_stored(space, daemon, name):
    """I4: a block of the wrong size is an InvalidRequest that names it, before it is sent."""
    blocks, message = WRONG[name]
    with pytest.raises(InvalidRequest, match=message):
        space.put(TOKENS, blocks)
    assert not daemon.blocks
    assert space.put(TOKENS, BLOCKS).stored == COUNT


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (bytes(SIZE * COUNT), "read-only"),
        (bytearray(SIZE * COUNT - 1), "10 blocks of 4096 are 40960"),
        ([bytearray(SIZE)] * 9, "9 buffers for 10 blocks"),
        ([bytearray(SIZE)] * 9 + [bytes(SIZE)], r"buffers\[9\] is read-only"),
    ],
)
def test_wrong_targets_are_named(space, buffers, message):
    """A target that does not fit is refused before anything is written to it."""
    space.put(TOKENS, BLOCKS)
    with space.lookup(TOKENS) as match, pytest.raises(InvalidRequest, match=message):
        space.restore_into(match, buffers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": [1, -1, 2, 3]}, "holds -1"),
        ({"token_ids": [1, 2**32, 2, 3]}, "holds 4294967296"),
        ({"token_ids": [[1, 2]]}, "flat"),
        ({"token_ids": [1.5] * 4}, "integers"),
        ({"hashes": [b"x" * 16]}, "pass token_ids"),
        ({}, "pass token_ids"),
    ],
)
def test_wrong_prompts_are_named(space, arguments, message):
    """What is no prompt of this space is an InvalidRequest."""
    with pytest.raises(InvalidRequest, match=message):
        space.lookup(**arguments)


def test_a_full_daemon_rejects_with_its_reason(space, daemon):
    """No room is a result, not an exception: the engine goes on either way."""
    daemon.before = lambda method, request: (
        LimitReached("limits.reserved_bytes is used up") if method == "Reserve" else None
    )
    result = space.put(TOKENS, BLOCKS)
    assert result == PutResult(rejected=COUNT, reason="limits.reserved_bytes is used up")


def test_a_partial_grant_is_asked_for_again(space, daemon):
    """A limit that grants three blocks at a time still lets a whole prompt through."""

    def three(method, request):
        if method != "Reserve":
            return None
        response = daemon.on_reserve(None, request, [])
        outcomes = bytearray(response.outcomes)
        outcomes[3:] = bytes(len(outcomes[3:]))
        response.outcomes, response.reason = bytes(outcomes), "three at a time"
        return response

    daemon.before = three
    assert space.put(TOKENS, BLOCKS) == PutResult(stored=COUNT)


def test_a_rejected_block_ends_the_put(space, daemon):
    """What follows a block that could not be stored is not sent in vain; the rest is aborted."""
    daemon.before = lambda method, request: (
        pb.CommitResponse(results=[
            pb.CommitResult(first_block=run.first_block, outcomes=bytes(run.block_count),
                            reason="the parent is gone")
            for run in request.runs
        ]) if method == "Commit" else None
    )  # fmt: skip
    result = space.put(TOKENS, BLOCKS)
    assert result == PutResult(rejected=COUNT, reason="the parent is gone")
    assert daemon.calls.count("Reserve") == 1


def test_a_reservation_that_ended_is_a_rejection(space, daemon):
    """A put slower than its reservation's time is not stored, and says why."""
    daemon.before = lambda method, request: (
        NotFound("the reservation is gone") if method == "Commit" else None
    )
    result = space.put(TOKENS, BLOCKS)
    assert (result.stored, result.rejected) == (0, COUNT)
    assert result.reason == "the reservation is gone"


def test_blocks_stored_out_of_order_count_as_stored(space, daemon):
    """A block that waited only for its parent in the same put is stored when the put is over."""
    order = iter([BlockOutcome.STORED, BlockOutcome.PENDING])

    def commit(method, request):
        if method != "Commit":
            return None
        answer = daemon.on_commit(next(iter(daemon.peers.values())), request, [])
        outcome = next(order)
        for result in answer.results:
            result.outcomes = bytes([outcome]) * len(result.outcomes)
        return answer

    daemon.before = commit
    assert space.put(TOKENS, BLOCKS) == PutResult(stored=COUNT)


def test_a_block_larger_than_staging_is_refused(make_daemon):
    """A block that cannot pass through staging names the limit to raise."""
    daemon = make_daemon(block_bytes=2 << 20, slots=1)
    spec = KVSpec(
        model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
        block_size=4, layout="opaque", block_bytes=2 << 20,
    )  # fmt: skip
    with KVClient.connect(daemon.path) as client:
        space = client.attach(spec)
        with pytest.raises(LimitReached, match=r"limits\.staging_bytes_per_session"):
            space.put(TOKENS[:4], bytes(2 << 20))


def test_an_exception_in_the_callers_function_leaves_nothing_behind(space, daemon, eventually):
    """I4: a put that its own caller breaks is aborted, and its staging is free again."""

    def make(position):
        if position == 5:
            raise RuntimeError("the engine's own trouble")
        return BLOCKS[position]

    with pytest.raises(RuntimeError, match="own trouble"):
        space.put(TOKENS, make)
    eventually(lambda: daemon.aborted)
    staging = space._link.session().staging
    assert staging.free_bytes == staging.size


def test_external_hashes_are_the_symbols(client, daemon):
    """In external mode the engine's own hashes go to the daemon as they are."""
    spec = KVSpec(
        model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
        block_size=4, layout="opaque", block_bytes=SIZE, key_mode="external",
        hash_algorithm="sha256_cbor",
    )  # fmt: skip
    space = client.attach(spec)
    seen = []
    daemon.before = lambda method, request: seen.append(request) if method == "Lookup" else None
    space.lookup(hashes=[b"a" * 32, b"b" * 32])
    assert seen[0].prompt.hashes == b"a" * 32 + b"b" * 32
    assert seen[0].prompt.hash_bytes == 32
    with pytest.raises(InvalidRequest, match="one length"):
        space.lookup(hashes=[b"a" * 32, b"b" * 16])


def test_puts_that_had_no_turn_before_close_say_so(client, space):
    """A put that close() cancelled raises StoreUnavailable; the one under way finishes."""
    begun, go_on = threading.Event(), threading.Event()

    def make(position):
        begun.set()
        go_on.wait(5)
        return BLOCKS[position]

    first = space.put_async(TOKENS, make)
    waiting = space.put_async(TOKENS, BLOCKS)
    begun.wait(5)
    closing = threading.Thread(target=client.close)
    closing.start()
    with pytest.raises(StoreUnavailable, match="closed before this put began"):
        waiting.result(5)
    go_on.set()
    assert first.result(5) == PutResult(stored=COUNT)
    closing.join(5)
    with pytest.raises(StoreUnavailable, match="the client is closed"):
        space.put_async(TOKENS, BLOCKS)
