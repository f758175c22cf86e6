"""Storing blocks: what is wanted is copied to staging batch by batch while the daemon takes in
the batches before.

A put is best effort: what the daemon has no room for is counted as rejected, with the reason.
Only a daemon that does not answer, or a wrong argument, is an exception.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

import numpy as np

from kvstore.client.buffers import BlockSource, rows_at
from kvstore.client.session import Attachment
from kvstore.client.staging import StagingRange
from kvstore.client.transport import CallTimeout, Disconnected, Pending
from kvstore.client.wire import cut_prompt
from kvstore.core.errors import KVStoreError, LimitReached, NotFound, StoreUnavailable
from kvstore.core.plan import BlockOutcome
from kvstore.proto.v1 import kvstore_pb2 as pb

BATCH_BYTES = 8 << 20  # of one Commit: long enough to hide its round trip, short enough to overlap
BATCHES_IN_FLIGHT = 3
WINDOW_BLOCKS = 1024  # of one Reserve, unless the daemon says otherwise


@dataclass(frozen=True, slots=True)
class PutResult:
    """Counts of blocks: stored now, there already, not taken, and stored once others are.

    `pending` blocks wait for another shard or writer. `reason` is the first rejection's.
    """

    stored: int = 0
    present: int = 0
    rejected: int = 0
    pending: int = 0
    reason: str = ""

    def and_left_out(self, count: int) -> PutResult:
        """The same with `count` more blocks that were too far into the prompt to be sent."""
        if not count:
            return self
        reason = (
            self.reason or f"the last {count} blocks are beyond what limits.message_bytes holds"
        )
        return replace(self, rejected=self.rejected + count, reason=self.reason or reason)


class PutHandle:
    """A put under way on the client's own thread; its blocks must not change until it is done."""

    def __init__(self, future: Future[PutResult]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> PutResult:
        """Waits; raises what `put` would have, or TimeoutError after `timeout` seconds."""
        try:
            return self._future.result(timeout)
        except CancelledError:
            raise StoreUnavailable(
                "the client was closed before this put began; call result() before close()"
            ) from None

    def __repr__(self) -> str:
        return f"PutHandle(done={self.done})"


@dataclass(slots=True)
class _Batch:
    """A Commit on its way and the staging range it reads."""

    pending: Pending
    taken: StagingRange


class Put:
    """One put over shared memory. `request` is its Reserve for the whole prompt."""

    def __init__(
        self, attachment: Attachment, request: pb.ReserveRequest, blocks: BlockSource,
        first_block: int, count: int, symbol_bytes: int, timeout: float,
    ) -> None:  # fmt: skip
        assert attachment.session.staging is not None
        self._attachment = attachment
        self._session = attachment.session
        self._staging = attachment.session.staging
        self._request = request
        self._symbols = request.prompt.tokens or request.prompt.hashes
        self._symbol_bytes = symbol_bytes
        self._blocks = blocks
        self._first = first_block
        self._timeout = timeout
        self._stride = attachment.slot_bytes
        self._batch_blocks = max(min(BATCH_BYTES, self._staging.size // 4) // self._stride, 1)
        self._in_flight: deque[_Batch] = deque()
        self._outcomes = np.full(count, BlockOutcome.REJECTED, np.uint8)
        self._committed = np.zeros(count, bool)
        self._reason = ""
        self._refused = False
        if self._stride > self._staging.size:
            raise LimitReached(
                f"a block takes {self._stride} bytes and the session's staging segment has "
                f"{self._staging.size}; raise limits.staging_bytes_per_session"
            )

    def run(self) -> PutResult:
        try:
            return self._run()
        except Exception:
            raise
        except BaseException:
            # Ranges of staging may be nobody's now, or a Commit's that nobody knows of.
            self._session.is_torn = True
            self._session.tear()
            raise

    def _run(self) -> PutResult:
        position, stop = self._first, self._first + len(self._outcomes)
        window = self._session.info.limits.reserve_blocks or WINDOW_BLOCKS
        while position < stop and not self._refused:
            answer = self._reserve(position, min(position + window, stop))
            if answer is None:
                break
            position = self._fill(answer, position)
        return self._result()

    def _result(self) -> PutResult:
        outcomes = self._outcomes
        if self._attachment.shard_count == 1:
            _follow_parents(outcomes, self._committed)
        counts = np.bincount(outcomes, minlength=len(BlockOutcome)).tolist()
        return PutResult(
            counts[BlockOutcome.STORED], counts[BlockOutcome.PRESENT],
            counts[BlockOutcome.REJECTED], counts[BlockOutcome.PENDING],
            self._reason if counts[BlockOutcome.REJECTED] else "",
        )  # fmt: skip

    def _refuse(self, reason: str) -> None:
        """Nothing more of this put can be stored."""
        self._refused = True
        self._reason = self._reason or reason

    def _reserve(self, first: int, stop: int) -> pb.ReserveResponse | None:
        request = self._request
        request.first_block = first
        cut_prompt(request.prompt, self._symbols, self._symbol_bytes, stop)
        try:
            answer: pb.ReserveResponse = self._session.call(
                "Reserve", request, self._timeout, self._session.late_reserve
            )
        except (LimitReached, NotFound) as error:
            self._refuse(str(error))
            return None
        if not answer.outcomes:
            self._refuse(answer.reason or "the daemon granted nothing")
            return None
        return answer

    def _fill(self, answer: pb.ReserveResponse, first: int) -> int:
        """Sends what was granted from `first` on; answers with the position reached.

        A limit may have cut the grant short: what was left out is asked for again once this part
        is stored, until a grant begins with a rejection.
        """
        outcomes = np.frombuffer(answer.outcomes, np.uint8)
        rejected = np.flatnonzero(outcomes == BlockOutcome.REJECTED)
        if len(rejected):
            outcomes = outcomes[: rejected[0]]
            self._reason = answer.reason
        if not len(outcomes):
            self._refuse(answer.reason)
        there = (outcomes == BlockOutcome.PRESENT) | (outcomes == BlockOutcome.PENDING)
        self._outcomes[first - self._first :][: len(outcomes)][there] = outcomes[there]
        wanted = np.flatnonzero(outcomes == BlockOutcome.WANTED) + first
        sent_all = False
        try:
            sent_all = self._send(answer.reservation_id, wanted.tolist())
        finally:
            if answer.reservation_id and not sent_all:
                self._session.abort(answer.reservation_id)
        return first + len(outcomes)

    def _send(self, reservation_id: int, wanted: list[int]) -> bool:
        """Copies and commits blocks; False when it stopped before the last."""
        sent = 0
        try:
            while sent < len(wanted) and not self._refused:
                count = self._batch(len(wanted) - sent)
                sent += self._send_batch(reservation_id, wanted[sent : sent + count])
            while self._in_flight:
                self._collect()
        finally:
            self._settle()
        return sent == len(wanted)

    def _batch(self, left: int) -> int:
        """How many of `left` blocks go next: the last batches are halves, for two threads."""
        return min(self._batch_blocks, max(-(-left // 2), self._batch_blocks // 2, 1))

    def _send_batch(self, reservation_id: int, positions: list[int]) -> int:
        """One Commit of these blocks, or of the first alone if staging is scarce."""
        while len(self._in_flight) >= BATCHES_IN_FLIGHT:
            self._collect()
        taken = self._take(len(positions))
        positions = positions[: taken.size // self._stride]
        session, staging = self._session, self._staging
        try:
            runs = list(self._copy(positions, taken.offset))
            pending = session.start(
                "Commit",
                pb.CommitRequest(reservation_id=reservation_id, runs=runs),
                self._timeout,
                lambda answer: staging.give_back(taken),
            )
        except Exception as error:  # after others it may have been sent, or not
            if not isinstance(error, Disconnected):  # it was not sent
                staging.give_back(taken)
            raise
        self._in_flight.append(_Batch(pending, taken))
        return len(positions)

    def _take(self, count: int) -> StagingRange:
        while (taken := self._staging.take(count * self._stride)) is None:
            if self._in_flight:
                self._collect()
                continue
            clock = self._session.clock
            deadline = clock.now() + self._timeout
            taken = self._staging.wait(self._stride, deadline, clock)
            if taken is None:
                raise StoreUnavailable(
                    f"no staging memory became free within {self._timeout:g} s; put less at once"
                )
            break
        return taken

    def _copy(self, positions: list[int], offset: int) -> Iterator[pb.CommitRun]:
        """Copies blocks to staging at `offset`; one run for each row of neighbours."""
        width = self._attachment.block_bytes
        start = 0
        for i in range(1, len(positions) + 1):
            if i < len(positions) and positions[i] == positions[i - 1] + 1:
                continue
            count, first = i - start, positions[start]
            target = rows_at(self._staging.data, offset, count, self._stride, width)
            self._blocks.read(first - self._first, target)
            yield pb.CommitRun(first_block=first, block_count=count, staging_offset=offset)
            offset += count * self._stride
            start = i

    def _collect(self) -> None:
        """Waits for the oldest Commit."""
        batch = self._in_flight.popleft()
        try:
            answer: pb.CommitResponse = self._session.result(batch.pending)
        except (CallTimeout, Disconnected):
            raise  # the range stays taken: the daemon may read it yet
        except NotFound as error:  # the reservation ended
            self._staging.give_back(batch.taken)
            self._refuse(str(error))
            return
        except KVStoreError:
            self._staging.give_back(batch.taken)
            raise
        self._staging.give_back(batch.taken)
        for result in answer.results:
            here = slice(result.first_block - self._first, None)
            self._outcomes[here][: len(result.outcomes)] = list(result.outcomes)
            self._committed[here][: len(result.outcomes)] = True
            if BlockOutcome.REJECTED in result.outcomes:
                self._refuse(result.reason)

    def _settle(self) -> None:
        """After an error: takes what answers still come, so that their ranges are free again."""
        while self._in_flight:
            batch = self._in_flight.popleft()
            try:
                batch.pending.result()
            except (CallTimeout, Disconnected):
                continue
            except KVStoreError:
                pass
            self._staging.give_back(batch.taken)


def _follow_parents(outcomes: np.ndarray, committed: np.ndarray) -> None:
    """Counts blocks as stored that waited only for blocks before them in the same put.

    Commits may end out of order: a block that was answered PENDING became READY with its parent,
    if the parent's own answer came later and no other shard is waited for.
    """
    there = (BlockOutcome.STORED, BlockOutcome.PRESENT)
    for i in np.flatnonzero((outcomes == BlockOutcome.PENDING) & committed).tolist():
        if i and outcomes[i - 1] in there:
            outcomes[i] = BlockOutcome.STORED
