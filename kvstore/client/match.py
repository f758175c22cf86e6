"""`Match`: what a lookup found, and the lease that keeps it."""

from __future__ import annotations

from functools import cached_property
from types import TracebackType

from kvstore.client.leases import Lease
from kvstore.client.located import Located
from kvstore.client.session import Attachment
from kvstore.client.wire import plan_of
from kvstore.core.errors import LeaseLost
from kvstore.core.plan import (
    LOAD_ALL,
    PREFIX,
    RECOMPUTE,
    RECOMPUTE_ALL,
    PlanStep,
    RestorePlan,
)
from kvstore.proto.v1 import kvstore_pb2 as pb


class Match:
    """The longest stored prefix of a prompt, leased until `release`.

    `matched_tokens` is its length, `restore_tokens` what is worth loading of it beyond the
    tokens the engine has, `pending_tokens` what somebody writes after it at this moment;
    `reason` says in one sentence why. As a context manager it releases itself.
    """

    def __init__(
        self,
        response: pb.LookupResponse,
        attachment: Attachment,
        lease: Lease | None,
        block_size: int,
        local_tokens: int,
    ) -> None:
        self.matched_tokens: int = response.matched_tokens
        self.restore_tokens: int = response.restore_tokens
        self.attachment = attachment
        self.lease = lease
        self._response = response
        self._block_size = block_size
        self._local_tokens = local_tokens
        self._released = lease is None
        self._ranges: tuple[range, ...] | None = None
        self._block_count: int | None = None
        self._located: Located | None = None
        self._left_out = ""

    @property
    def pending_tokens(self) -> int:
        count: int = self._response.pending_tokens
        return count

    @property
    def reason(self) -> str:
        text: str = self._response.reason
        return self._left_out or text

    @cached_property
    def plan(self) -> RestorePlan:
        return plan_of(self._response.plan)

    @property
    def ranges(self) -> tuple[range, ...]:
        """Positions of the blocks that `restore` loads, ascending; one range for a prefix."""
        if self._ranges is None:
            plan = self._response.plan
            if plan.kind == LOAD_ALL or not plan.steps:
                loads = [(self._local_tokens, self.restore_tokens)]
            else:
                loads = [
                    (s.first_token, s.token_count) for s in plan.steps if s.source != RECOMPUTE
                ]
            self._ranges = _block_ranges(loads, self._block_size)
        return self._ranges

    def shorten(self, block: int, why: str) -> None:
        """Leaves out the blocks of the only range from `block` on, which cannot be had."""
        (blocks,) = self.ranges
        if block >= blocks.stop:
            return
        kept = range(blocks.start, max(block, blocks.start))
        end = max(self._local_tokens, kept.stop * self._block_size)
        self._ranges, self._block_count = (kept,), len(kept)
        self.restore_tokens = end - self._local_tokens
        self._left_out = f"{self._response.reason}; blocks from {block} on are left out: {why}"
        self.plan = shortened(self.plan, end)
        self.located.shorten(kept)

    @property
    def block_count(self) -> int:
        """Blocks that `restore` loads."""
        if self._block_count is None:
            self._block_count = sum(map(len, self.ranges))
        return self._block_count

    @property
    def located(self) -> Located:
        """Where the blocks lie, as far as the lookup said."""
        located = self._located
        if located is None:
            located = Located(self.attachment, self.ranges)
            located.add(self._response.first_block, self._response.slots)
            self._located = located
        return located

    def check(self) -> None:
        """Raises LeaseLost unless everything `restore` returned was right until now."""
        self.check_lease()
        if self._located is not None:
            self._located.check()

    def check_lease(self) -> None:
        """Raises LeaseLost unless the lease is live by this process's own clock."""
        if self._released:
            raise LeaseLost("the match was released or held nothing; look the prompt up again")
        assert self.lease is not None
        self.lease.check(self.attachment.session.clock.now())

    def release(self) -> None:
        """Ends the lease; views of the blocks must not be read any more. Never waits."""
        if self._released or self.lease is None:
            return
        self._released = True
        session = self.attachment.session
        if session.leases.drop(self.lease):
            session.release(self.lease.id)

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Not sent from here: a destructor may run while this very thread holds any lock.
        if not self.__dict__.get("_released", True) and self.lease is not None:
            self.attachment.session.drop_soon(self.lease)

    def __repr__(self) -> str:
        return (
            f"Match(matched_tokens={self.matched_tokens}, restore_tokens={self.restore_tokens}, "
            f"pending_tokens={self.pending_tokens}, reason={self.reason!r})"
        )


def shortened(plan: RestorePlan, end: int) -> RestorePlan:
    """A plan of one stretch of loads with everything from token `end` on recomputed."""
    steps, last = [], 0
    for step in plan.steps:
        last = step.first_token + step.token_count
        kept = min(last, end) - step.first_token
        if step.source != RECOMPUTE and kept > 0:
            steps.append(PlanStep(step.first_token, kept, step.source))
    kind = PREFIX if steps else RECOMPUTE_ALL
    return RestorePlan(kind, (*steps, PlanStep(end, last - end, RECOMPUTE)))


def _block_ranges(loads: list[tuple[int, int]], size: int) -> tuple[range, ...]:
    """Blocks of stretches of tokens, (first, count) each, ascending; neighbours are merged."""
    merged: list[range] = []
    for first, count in loads:
        if not count:
            continue
        start, stop = first // size, -(-(first + count) // size)
        if merged and merged[-1].stop >= start:
            start = merged.pop().start
        merged.append(range(start, stop))
    return tuple(merged)
