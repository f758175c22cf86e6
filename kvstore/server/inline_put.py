"""`InlinePut`: a put whose bytes come in messages, one block in memory at a time."""

from __future__ import annotations

from kvstore.core.completion import Completion
from kvstore.core.errors import InvalidRequest, LimitReached, NotFound, Unauthenticated
from kvstore.core.plan import BlockOutcome, CommitRun
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.budget import MessageBudget
from kvstore.server.engine_calls import EngineCalls
from kvstore.server.steps import Steps, drive
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Session


class InlinePut:
    """One PutInline call. The caller feeds messages, waiting for each, then finishes or aborts.

    Bytes of blocks that are not wanted (already there, or refused) are read past.
    """

    def __init__(
        self, store: KVStore, calls: EngineCalls, session: Session, budget: MessageBudget
    ) -> None:
        self._store = store
        self._calls = calls
        self._session = session
        self._budget = budget
        self._reservation_id = 0
        self._outcomes: bytearray | None = None
        self._first_block = 0
        self._block_bytes = 0
        self._slot_bytes = 0
        self._reason = ""
        self._block = -1
        self._filled = 0
        self._buffer: bytearray | None = None

    def feed(self, request: pb.PutInlineRequest) -> Completion[None]:
        """Takes the next message; done when the following one may come."""
        return drive(self._feed(request))

    def finish(self) -> Completion[pb.PutInlineResponse]:
        """The peer has sent everything: what became of each block."""
        return drive(self._finish())

    def abort(self) -> None:
        """Gives up what was reserved and not stored; blocks stored already stay."""
        self._drop_buffer()
        reservation, self._reservation_id = self._reservation_id, 0
        if reservation and reservation in self._session.reservations:
            self._store.abort(self._session, reservation)

    def _feed(self, request: pb.PutInlineRequest) -> Steps[None]:
        if self._session.closed:
            raise Unauthenticated("the session has ended; open a new one")
        if request.HasField("reserve"):
            yield from self._reserve(request.reserve)
        elif self._outcomes is None:
            raise InvalidRequest("reserve is missing; the first message carries it")
        if request.data:
            yield from self._add(request.block, request.data)

    def _reserve(self, request: pb.ReserveRequest) -> Steps[None]:
        if self._outcomes is not None:
            raise InvalidRequest("reserve came twice; only the first message carries it")
        result = self._calls.reserve_blocks(self._session, request)
        if isinstance(result, Completion):
            result = yield result
        space = self._session.attachments[request.attachment].space
        self._block_bytes, self._slot_bytes = space.block_bytes, space.slot_bytes
        self._reservation_id = result.reservation_id
        self._first_block = result.first_block
        self._outcomes = bytearray(result.outcomes)
        self._reason = result.reason
        self._block = result.first_block - 1
        self._filled = self._block_bytes

    def _add(self, block: int, data: bytes) -> Steps[None]:
        if block != self._block:
            self._begin(block)
        if self._filled + len(data) > self._block_bytes:
            raise InvalidRequest(
                f"data of block {block} is longer than block_bytes, {self._block_bytes}"
            )
        if self._buffer is not None:
            self._buffer[self._filled : self._filled + len(data)] = data
        self._filled += len(data)
        if self._filled == self._block_bytes and self._buffer is not None:
            try:
                yield from self._commit(block, self._buffer)
            finally:
                self._drop_buffer()

    def _begin(self, block: int) -> None:
        if self._filled != self._block_bytes:
            raise InvalidRequest(
                f"data of block {self._block} ends at byte {self._filled} of {self._block_bytes}; "
                "send a block's bytes in order before the next block's"
            )
        if block < self._block or block < self._first_block:
            raise InvalidRequest(f"block {block} follows block {self._block}; send them in order")
        self._block, self._filled = block, 0
        if self._is_wanted(block):
            self._take_buffer()

    def _take_buffer(self) -> None:
        if not self._budget.take(self._block_bytes):
            raise LimitReached(
                f"limits.inflight_message_bytes has no room for a block of {self._block_bytes} "
                "bytes now; try again"
            )
        self._buffer = bytearray(self._block_bytes)

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer = None
            self._budget.give_back(self._block_bytes)

    def _is_wanted(self, block: int) -> bool:
        assert self._outcomes is not None
        i = block - self._first_block
        return i < len(self._outcomes) and self._outcomes[i] == BlockOutcome.WANTED

    def _commit(self, block: int, buffer: bytearray) -> Steps[None]:
        assert self._outcomes is not None
        run = CommitRun(block, 1, memoryview(buffer), self._slot_bytes)
        try:
            results = self._store.commit(self._session, self._reservation_id, [run])
        except NotFound as error:
            # Its time ran out, or what it goes on from is gone: the rest is not stored.
            self._reject_wanted(str(error))
            return
        if isinstance(results, Completion):
            results = yield results
        for result in results:
            start = result.first_block - self._first_block
            self._outcomes[start : start + len(result.outcomes)] = result.outcomes
            self._reason = result.reason or self._reason

    def _reject_wanted(self, reason: str) -> None:
        """What was granted and did not come to be stored will not be."""
        assert self._outcomes is not None
        wanted, rejected = bytes([BlockOutcome.WANTED]), bytes([BlockOutcome.REJECTED])
        self._outcomes = self._outcomes.replace(wanted, rejected)
        self._reason = self._reason or reason

    def _finish(self) -> Steps[pb.PutInlineResponse]:
        if self._outcomes is None:
            raise InvalidRequest("reserve is missing; the first message carries it")
        if self._filled != self._block_bytes:
            raise InvalidRequest(
                f"data of block {self._block} ends at byte {self._filled} of {self._block_bytes}"
            )
        self.abort()
        if missing := self._outcomes.count(BlockOutcome.WANTED):
            self._reject_wanted(f"no bytes came for {missing} wanted blocks")
        return pb.PutInlineResponse(
            first_block=self._first_block, outcomes=bytes(self._outcomes), reason=self._reason
        )
        yield
