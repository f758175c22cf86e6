"""Blocks in the messages themselves: put and restore without shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from kvstore.client.buffers import BlockBuffers, BlockSource
from kvstore.client.match import Match
from kvstore.client.put import WINDOW_BLOCKS, PutResult
from kvstore.client.session import Attachment
from kvstore.client.wire import cut_prompt
from kvstore.core.errors import NotFound, StoreUnavailable
from kvstore.core.plan import BlockOutcome
from kvstore.proto.v1 import kvstore_pb2 as pb

CHUNK_BYTES = 1 << 20


def fetch(match: Match, target: BlockBuffers, timeout: float) -> None:
    """Fills `target` with the match's blocks; every block is checked against its checksum."""
    for blocks in match.ranges:
        fetch_range(match, blocks, target, timeout)


def fetch_range(match: Match, blocks: range, target: BlockBuffers, timeout: float) -> None:
    """Fills what `target` has for `blocks`, which lie in one of the match's ranges."""
    assert match.lease is not None
    index = 0
    for stretch in match.ranges:
        if blocks.start in stretch:
            index += blocks.start - stretch.start
            break
        index += len(stretch)
    request = pb.FetchInlineRequest(
        lease_id=match.lease.id, first_block=blocks.start, block_count=len(blocks)
    )
    hasher, position, filled = xxhash.xxh3_128(), blocks.start, 0
    for part in match.attachment.session.stream("FetchInline", request, timeout):
        if part.block != position or part.offset != filled:
            raise StoreUnavailable(
                f"block {part.block} came where block {position} was due; restart the daemon"
            )
        row, size = target.block(index + position - blocks.start), len(part.data)
        row[filled : filled + size] = np.frombuffer(part.data, np.uint8)
        hasher.update(part.data)
        filled += size
        if part.checksum:
            if filled != len(row) or hasher.digest() != part.checksum:
                raise NotFound(f"block {position} did not arrive whole; recompute it")
            hasher, position, filled = xxhash.xxh3_128(), position + 1, 0
    if position != blocks.stop:
        raise NotFound(f"block {position} did not arrive; recompute it")


def put(
    attachment: Attachment, request: pb.ReserveRequest, blocks: BlockSource, count: int,
    symbol_bytes: int, timeout: float,
) -> PutResult:  # fmt: skip
    """Sends `count` blocks from `request.first_block` on, a window at a time."""
    limits = attachment.session.info.limits
    window = limits.reserve_blocks or WINDOW_BLOCKS
    chunk = min(CHUNK_BYTES, (limits.message_bytes or CHUNK_BYTES) // 2)
    symbols, first = request.prompt.tokens or request.prompt.hashes, request.first_block
    outcomes: list[int] = []
    reason = ""
    while len(outcomes) < count and not reason:
        start, size = len(outcomes), min(window, count - len(outcomes))
        request.first_block = first + start
        cut_prompt(request.prompt, symbols, symbol_bytes, first + start + size)
        messages = _messages(request, blocks, range(start, start + size), first, chunk)
        answer: pb.PutInlineResponse = attachment.session.upload("PutInline", messages, timeout)
        outcomes += answer.outcomes
        if len(answer.outcomes) < size or BlockOutcome.REJECTED in answer.outcomes:
            reason = answer.reason or "the daemon took a part only"
    return PutResult(
        stored=outcomes.count(BlockOutcome.STORED),
        present=outcomes.count(BlockOutcome.PRESENT),
        rejected=outcomes.count(BlockOutcome.REJECTED) + count - len(outcomes),
        pending=outcomes.count(BlockOutcome.PENDING),
        reason=reason,
    )


def _messages(
    request: pb.ReserveRequest, blocks: BlockSource, indices: range, first: int, chunk: int
) -> Iterator[pb.PutInlineRequest]:
    yield pb.PutInlineRequest(reserve=request)
    for i in indices:
        data = blocks.block(i)
        for start in range(0, len(data), chunk):
            part = data[start : start + chunk].tobytes()
            yield pb.PutInlineRequest(block=first + i, data=part)
