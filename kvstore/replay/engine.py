"""`TraceEngine`: an inference engine without the model: looks up, restores, checks, stores, ends.

Tokens follow from a request's ids and payloads from block keys, so that every restored byte can be
checked. The daemon may go away at any moment: then the request is recomputed, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvstore.core.clock import perf_seconds
from kvstore.core.errors import LeaseLost, LimitReached, NotFound, StoreUnavailable
from kvstore.core.plan import RECOMPUTE, ReuseHints
from kvstore.replay.formats import TraceRequest
from kvstore.replay.payload import PayloadMaker, PromptMaker, prompt_keys
from kvstore.replay.tally import Tally

PUT_BYTES = 16 << 20


class ClientSpace(Protocol):
    """What the engine uses of a client's attached space."""

    def lookup(
        self, token_ids: np.ndarray, *, request_id: str, hints: ReuseHints | None
    ) -> Any: ...
    def restore_into(self, match: Any, buffers: Any) -> Any: ...
    def put(
        self, token_ids: np.ndarray, blocks: Any, first_block: int = 0, *, request_id: str
    ) -> Any: ...
    def finish_request(self, request_id: str, output_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class AttachedSpace:
    """A client's space, and what its payloads follow from."""

    space: ClientSpace
    space_id: bytes
    epoch: int
    block_bytes: int


class Freshness(Protocol):
    """In which life of the daemon blocks were last stored; a Board, or nothing."""

    @property
    def phase(self) -> int: ...
    @property
    def stored_phase(self) -> np.ndarray: ...


class TraceEngine:
    """One client's way through requests; a failed call costs hits, never the run."""

    def __init__(self, prompts: PromptMaker, block_size: int, tally: Tally):
        self._prompts, self._block_size = prompts, block_size
        self.tally = tally
        self._buffer = np.zeros((0, 0), dtype=np.uint8)
        self._makers: dict[tuple[bytes, int], PayloadMaker] = {}

    def serve(self, attached: AttachedSpace, request: TraceRequest, seen: Seen) -> None:
        """Serves one request; StoreUnavailable is counted and passed on."""
        tally = self.tally
        tally.requests += 1
        tally.input_tokens += request.input_length
        # Each client has a session of its own, so that its own numbers will do.
        request_id = str(tally.requests)
        try:
            self._serve_blocks(attached, request, request_id, seen)
            attached.space.finish_request(request_id, request.output_length)
        except StoreUnavailable:
            tally.unavailable += 1
            raise

    def _serve_blocks(
        self, attached: AttachedSpace, request: TraceRequest, request_id: str, seen: Seen
    ) -> None:
        tokens = self._prompts.tokens(request.hash_ids, request.input_length)
        hints = ReuseHints(session=request.session) if request.session else None
        phase = seen.phase
        start = perf_seconds()
        match = attached.space.lookup(tokens, request_id=request_id, hints=hints)
        self.tally.lookup_seconds.append(perf_seconds() - start)
        with match:
            keys = prompt_keys(attached.space_id, tokens, self._block_size)
            self._reserve_buffer(request.full_blocks, attached.block_bytes)
            restored = self._restore(attached, match, keys)
            self._count_hits(match, restored, phase, seen)
            first = match.matched_tokens // self._block_size
            self._store(attached, tokens, keys, first, request_id, seen)

    def _restore(self, attached: AttachedSpace, match: Any, keys: list[bytes]) -> int:
        """Copies the match out and checks it; answers with the blocks that came back right."""
        count: int = match.restore_tokens // self._block_size
        if not count:
            return 0
        start = perf_seconds()
        try:
            attached.space.restore_into(match, self._buffer[:count])
        except (LeaseLost, NotFound):
            self.tally.lost_leases += 1
            return 0
        self.tally.restore_seconds.append(perf_seconds() - start)
        maker = self._maker(attached)
        right = count
        for i in range(count):
            wrong = maker.wrong_bytes(keys[i], self._buffer[i])
            if wrong:
                self.tally.wrong_bytes += wrong
                self.tally.wrong_blocks += 1
                right = min(right, i)
        self.tally.restored_blocks += count
        self.tally.restored_bytes += count * attached.block_bytes
        self.tally.verified_bytes += count * attached.block_bytes
        return right

    def _count_hits(self, match: Any, restored: int, phase: int, seen: Seen) -> None:
        hits = restored * self._block_size
        self.tally.hit_tokens += hits
        for step in match.plan.steps:
            tokens = min(step.token_count, max(hits - step.first_token, 0))
            if tokens and step.source != RECOMPUTE:
                self.tally.count_tier(step.source, tokens)
        old = seen.stored_before(restored, phase)
        self.tally.readopted_hit_tokens += old * self._block_size

    def _store(
        self, attached: AttachedSpace, tokens: np.ndarray, keys: list[bytes], first: int,
        request_id: str, seen: Seen,
    ) -> None:  # fmt: skip
        """Puts what the lookup did not find, in pieces of bounded size, front to back."""
        piece = max(PUT_BYTES // attached.block_bytes, 1)
        maker = self._maker(attached)
        for at in range(first, len(keys), piece):
            stop = min(at + piece, len(keys))
            blocks = self._buffer[: stop - at]
            for i in range(at, stop):
                maker.write(keys[i], blocks[i - at])
            start = perf_seconds()
            try:
                result = attached.space.put(
                    tokens[: stop * self._block_size], blocks, at, request_id=request_id
                )
            except (LimitReached, NotFound):
                self.tally.rejected_blocks += stop - at
                return
            self.tally.put_seconds.append(perf_seconds() - start)
            self._count_put(result, at, stop, attached.block_bytes, seen)
            if result.rejected:
                return

    def _count_put(self, result: Any, at: int, stop: int, block_bytes: int, seen: Seen) -> None:
        self.tally.stored_blocks += result.stored
        self.tally.present_blocks += result.present + result.pending
        self.tally.rejected_blocks += result.rejected
        self.tally.stored_bytes += result.stored * block_bytes
        if result.stored:
            seen.mark_stored(at, stop)

    def _maker(self, attached: AttachedSpace) -> PayloadMaker:
        key = (attached.space_id, attached.epoch)
        if key not in self._makers:
            self._makers[key] = PayloadMaker(*key, attached.block_bytes)
        return self._makers[key]

    def _reserve_buffer(self, blocks: int, block_bytes: int) -> None:
        """Room for `blocks`, touched once so that no page fault lands in a measurement."""
        if len(self._buffer) < blocks or self._buffer.shape[1] != block_bytes:
            self._buffer = np.ones((blocks, block_bytes), dtype=np.uint8)


class Seen:
    """Which of a request's blocks were last stored in an earlier life of the daemon."""

    def __init__(self, board: Freshness, ordinals: np.ndarray):
        self._board, self._ordinals = board, ordinals

    @property
    def phase(self) -> int:
        return self._board.phase

    def stored_before(self, blocks: int, phase: int) -> int:
        """Of the first `blocks`, those not stored since `phase` began.

        `phase` is read before the lookup: an answer of the daemon before it cannot be counted.
        """
        return int((self._board.stored_phase[self._ordinals[:blocks]] < phase).sum())

    def mark_stored(self, at: int, stop: int) -> None:
        """Counts blocks for the life read *after* they were stored: never too early a one."""
        self._board.stored_phase[self._ordinals[at:stop]] = self._board.phase
