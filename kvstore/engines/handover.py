"""Hand-over of a prompt between two engines of a host: one computes it, another goes on from it.

prefill side: `Announced` promises the blocks before they are computed, stores them as they come
decode side: `wait_for_prefix` until they are there, or nobody writes any more, or the time is up

What is written is owned by the writer's session: the daemon takes it back when that dies, so that
whoever waits hears of it at the next look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvstore.client import PutResult, Space, SpecMismatch, StoreUnavailable
from kvstore.client.buffers import BlockSource
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import InvalidRequest, KVStoreError

COMPUTE_SECONDS_MAX = 25.0  # for one block: the daemon keeps a promise of 30 s by default
QUIET_SECONDS = 0.05
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX, LOOK_GROWTH = 0.002, 0.02, 1.5


class Ticket(msgspec.Struct, frozen=True):
    """What the prefill side may tell the decode side beside the blocks: where, and how many.

    `stored_tokens` of the prompt are complete in the space and epoch that are named; `owner` is
    who says so, for logs. It travels as JSON: `msgspec.json.encode(ticket)`.
    """

    space_id: str
    epoch: int
    stored_tokens: int
    owner: str = ""

    @classmethod
    def of(cls, space: Space, result: PutResult | None, prompt_tokens: int) -> Ticket:
        """The ticket of a prompt that was put; of none of it unless all of it is stored."""
        whole = prompt_tokens // space.spec.block_size * space.spec.block_size
        complete = result is not None and not result.rejected and not result.pending
        owner = space.engine_id
        return cls(space.space_id.hex(), space.epoch, whole if complete else 0, owner)

    def check(self, space: Space) -> None:
        """Raises SpecMismatch if this engine looks elsewhere than the other one has stored."""
        if self.space_id != space.space_id.hex():
            raise SpecMismatch(
                f"{self.owner or 'the prefill side'} stores in space {self.space_id[:16]}, this "
                f"engine looks in {space.space_id.hex()[:16]}; give both the same model, "
                "revision, block_size and tenant"
            )


class Awaited(NamedTuple):
    """How a wait ended: leading tokens of the prompt that are there, and why it ended."""

    tokens: int
    seconds: float
    reason: str


def wait_for_prefix(
    space: Space,
    token_ids: Any = None,
    *,
    deadline_seconds: float,
    quiet_seconds: float = QUIET_SECONDS,
    ticket: Ticket | None = None,
    hashes: Sequence[bytes] | None = None,
    adapter: str = "",
    cache_salt: str = "",
    extra_digests: Mapping[int, bytes] | None = None,
    request_id: str | None = None,
) -> Awaited:
    """Waits until the full blocks before a prompt's last token are stored, if somebody writes them.

    It ends after `deadline_seconds`, or when nothing was seen being written for `quiet_seconds`:
    make that longer where a router knows of a prefill that may not have begun. With a `ticket` it
    waits for what that says is complete. A store that is away ends it; whatever is missing then is
    to be computed. Raises SpecMismatch for a ticket of another space.
    """
    if deadline_seconds < 0 or quiet_seconds < 0:
        raise InvalidRequest("deadline_seconds and quiet_seconds must not be negative")
    wait = _Wait(space, deadline_seconds, quiet_seconds)
    prompt: dict[str, Any] = {
        "adapter": adapter, "cache_salt": cache_salt, "extra_digests": extra_digests,
        "request_id": request_id,
    }  # fmt: skip
    size = space.spec.block_size
    if hashes is not None:
        prompt["hashes"], wanted = hashes, len(hashes) * size
    else:
        token_ids = () if token_ids is None else token_ids
        wanted = max(len(token_ids) - 1, 0) // size * size
        prompt["token_ids"] = token_ids[:wanted]
    try:
        if ticket is not None:
            ticket.check(space)
            wanted = min(wanted, ticket.stored_tokens if ticket.epoch == space.epoch else 0)
        return wait.until(wanted, lambda: _look(space, prompt))
    except StoreUnavailable as error:
        return wait.ended(f"no store: {error}")


def _look(space: Space, prompt: dict[str, Any]) -> tuple[int, int]:
    with space.lookup(**prompt) as match:
        return match.matched_tokens, match.pending_tokens


class _Wait:
    """One wait: how far it has got, and until when it may go on."""

    def __init__(self, space: Space, deadline_seconds: float, quiet_seconds: float) -> None:
        self._space = space
        self._limit, self._quiet_limit = deadline_seconds, quiet_seconds
        self._began = self._last_news = perf_seconds()
        self._tokens = 0

    def until(self, wanted: int, look: Callable[[], tuple[int, int]]) -> Awaited:
        pause = LOOK_SECONDS_MIN
        while True:
            tokens, pending = look()
            now = perf_seconds()
            if pending or tokens > self._tokens:
                self._last_news = now
            if tokens > self._tokens:
                pause = LOOK_SECONDS_MIN
            self._tokens = tokens
            if tokens >= wanted:
                return self.ended("all of it is there")
            if now - self._last_news >= self._quiet_limit:
                return self.ended(f"nobody writes the {wanted - tokens} tokens that are missing")
            left = self._began + self._limit - now
            if left <= 0:
                return self.ended(f"{pending} tokens are still being written, and the time is up")
            sleep(min(pause, left))
            pause = min(pause * LOOK_GROWTH, LOOK_SECONDS_MAX)

    def ended(self, reason: str) -> Awaited:
        return Awaited(self._tokens, perf_seconds() - self._began, reason)


class Announced:
    """A prompt's blocks, promised to the store before they are computed, stored as they come.

    `blocks` begin with `first_block`, and are read on the client's own thread once `computed` was
    told of them. Others that look the prompt up see the rest as pending. Where an engine computes
    nothing for `limit_seconds` the promise is taken back.
    """

    def __init__(
        self, space: Space, tokens: Any, blocks: BlockSource, first_block: int,
        prompt: Mapping[str, Any], limit_seconds: float = COMPUTE_SECONDS_MAX,
    ) -> None:  # fmt: skip
        self._blocks, self._first = blocks, first_block
        self._block_size = space.spec.block_size
        self._limit = limit_seconds
        self._changed = threading.Condition()
        self._tokens = 0
        self._is_over = False
        self._handle = space.put_async(tokens, self, first_block, **prompt)

    def computed(self, tokens: int) -> None:
        """The first `tokens` of the prompt can be read."""
        with self._changed:
            self._tokens = tokens
            self._changed.notify_all()

    def result(self) -> PutResult:
        """What became of the blocks, all of which are computed; raises what a put raises."""
        return self._handle.result()

    def give_up(self) -> None:
        """Nothing more will be computed: what is not stored yet is taken back."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def block(self, i: int) -> np.ndarray:
        """Bytes of the i-th block, once they are there."""
        self._wait(i + 1)
        return self._blocks.block(i)

    def read(self, i: int, target: np.ndarray) -> None:
        """Copies the i-th block and the next ones into the rows of `target`, as they come."""
        for n in range(len(target)):
            self._wait(i + n + 1)
            self._blocks.read(i + n, target[n : n + 1])

    def _wait(self, count: int) -> None:
        """Until `count` blocks are computed."""
        position = self._first + count - 1
        stop = (position + 1) * self._block_size
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._tokens >= stop or self._is_over, self._limit
            )
        if not known or self._is_over:
            raise KVStoreError(
                f"block {position} was promised and not computed in {self._limit:g} s"
            )
