"""Tracing: records the requests that come, as a trace has them: lengths, times, equal blocks.

a request is heard of -> held until its end says how long its output was -> taken by a reader

Of a prompt it has one word for each block, that stands for the block and all before it. Words go
out hidden under a key that nobody else has and that is forgotten with the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.core.entropy import random_token
from kvstore.core.errors import FailedPrecondition
from kvstore.core.hiding import KEY_BYTES, hidden_words
from kvstore.core.sizes import format_bytes
from kvstore.core.space import Space
from kvstore.policies.uses import Request, Use
from kvstore.store.parts import Parts

HOLD_SECONDS = 600.0  # that a request is held for its end
WAKE_SECONDS = 1.0
RECORD_BYTES = 256  # of a record, its words left out
TAKE_BYTES = 32 << 10  # of words at a time: hiding them takes the owner a millisecond


class TraceOptions(NamedTuple):
    """What is recorded; 0 is no limit, and a block size of 0 that of the first request."""

    block_size: int = 0
    seconds: float = 0.0
    requests: int = 0


class TraceRecord(NamedTuple):
    """One request. `words` has 64 bits for each full block, `session` is 0 where none was named."""

    seconds: float
    input_tokens: int
    output_tokens: int
    words: bytes
    tenant: str
    session: int


class Held:
    """A request whose end is waited for."""

    __slots__ = ("is_over", "record", "until")

    def __init__(self, record: TraceRecord, until: float) -> None:
        self.record = record
        self.until = until
        self.is_over = False

    @property
    def byte_count(self) -> int:
        return RECORD_BYTES + len(self.record.words)


class Recording:
    """One recording under way; `ended` says why it is over. `wake` is called when there is news."""

    def __init__(self, parts: Parts, options: TraceOptions, wake: Callable[[], None]) -> None:
        self.options = options
        self.block_size = options.block_size
        self.ended = ""
        self.request_count = self.left_out_count = 0
        self._parts = parts
        self._wake = wake
        self._key = random_token(KEY_BYTES)
        self._began = self._woken = parts.clock.now()
        self._held: dict[int, Held] = {}
        self._ready: deque[TraceRecord] = deque()
        self._held_bytes = self._ready_bytes = 0
        self._bytes_max = int(parts.limits.trace_bytes) // 2  # held, and ready, each
        parts.requests.listeners.append(self._heard)
        parts.requests.finished.append(self._finished)

    @property
    def held_count(self) -> int:
        """Requests that wait for their end."""
        return len(self._held)

    @property
    def ready_count(self) -> int:
        """Requests that wait for who reads them."""
        return len(self._ready)

    def end(self, reason: str) -> None:
        """Hears no more; what is there can still be taken."""
        if self.ended:
            return
        self.ended = reason
        self._parts.requests.listeners.remove(self._heard)
        self._parts.requests.finished.remove(self._finished)
        self._let_go(lambda held: True)
        self._wake()

    def take(self) -> list[TraceRecord]:
        """Some of the next records, in the order of arrival, their words hidden."""
        records, size = [], 0
        while self._ready and size < TAKE_BYTES:
            records.append(self._ready.popleft())
            size += RECORD_BYTES + len(records[-1].words)
        self._ready_bytes -= size
        plain = b"".join(record.words for record in records)
        sessions = np.array([record.session for record in records], np.uint64)
        words = np.concatenate([sessions, np.frombuffer(plain, np.uint64)])
        hidden = hidden_words(self._key, words)
        left, taken = hidden[len(records) :].tobytes(), []
        for record, session in zip(records, hidden[: len(records)].tolist(), strict=True):
            size = len(record.words)
            named = session if record.session else 0
            taken.append(record._replace(words=left[:size], session=named))
            left = left[size:]
        return taken

    def tick(self, now: float) -> None:
        """Lets go of what was held for too long, and ends when it is time."""
        self._let_go(lambda held: held.is_over or held.until <= now)
        if self.options.seconds and now - self._began >= self.options.seconds:
            self.end("seconds")
        elif self._ready or now - self._woken >= WAKE_SECONDS:
            self._woken = now
            self._wake()

    def _heard(self, space: Space, request: Request, use: Use) -> None:
        size = space.block_size * request.grain_blocks
        self.block_size = self.block_size or size
        step, rest = divmod(self.block_size, size)
        if rest or not step:
            self.left_out_count += 1
            return
        self.request_count += 1
        session = self._parts.requests.session
        record = TraceRecord(
            request.seconds - self._began,
            request.input_tokens,
            request.output_tokens,
            self._words(request, step),
            request.tenant,
            xxhash.xxh3_64_intdigest(session.encode()) or 1 if session else 0,
        )
        held = self._held[use.number] = Held(record, self._parts.clock.now() + HOLD_SECONDS)
        self._held_bytes += held.byte_count
        self._let_go(lambda held: held.is_over or self._held_bytes > self._bytes_max)
        if self._ready_bytes > self._bytes_max:
            self.end(f"its reader is too slow: {format_bytes(self._ready_bytes)} wait for it")
        elif self.request_count == self.options.requests:
            self.end("requests")

    def _words(self, request: Request, step: int) -> bytes:
        """One word for each full block of the trace, which is `step` of the request's."""
        words = np.frombuffer(request.digests, np.uint64)[step - 1 :: step]
        return words[: request.input_tokens // self.block_size].tobytes()

    def _finished(self, use: Use, output_tokens: int) -> None:
        held = self._held.get(use.number)
        if held is not None:
            held.record = held.record._replace(output_tokens=output_tokens)
            held.is_over = True

    def _let_go(self, may_go: Callable[[Held], bool]) -> None:
        """The first of those that are held may be taken, as long as they `may_go`."""
        while self._held:
            number = next(iter(self._held))
            held = self._held[number]
            if not may_go(held):
                return
            del self._held[number]
            self._held_bytes -= held.byte_count
            self._ready_bytes += held.byte_count
            self._ready.append(held.record)


class TraceRecorder:
    """Records for one reader at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._recording: Recording | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is no recording under way."""
        return self._recording is None or bool(self._recording.ended)

    def start(self, options: TraceOptions, wake: Callable[[], None]) -> Recording:
        """Begins a recording; raises FailedPrecondition while there is one."""
        if self._recording is not None and not self.is_idle:
            raise FailedPrecondition(
                f"a recording is under way, with {self._recording.request_count} requests so far; "
                "stop it first (`kvstore trace record --stop`)"
            )
        self._recording = Recording(self._parts, options, wake)
        return self._recording

    def stop(self) -> int:
        """Ends the recording; answers with how many requests it has."""
        if self._recording is None or self.is_idle:
            raise FailedPrecondition(
                "no recording is under way; `kvstore trace record --out FILE` begins one"
            )
        self._recording.end("stopped")
        return self._recording.request_count

    def tick(self, now: float) -> None:
        if self._recording is not None and not self.is_idle:
            self._recording.tick(now)
