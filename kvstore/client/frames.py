"""Frames from a stream of bytes and the descriptors that came along."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.core.lane import FLAG_FDS, HEADER, HEADER_BYTES

FRAME_BYTES_MAX = 64 << 20


class Frame(NamedTuple):
    kind: int
    method: int
    call_id: int
    payload: bytes
    descriptors: list[int]


class FrameError(Exception):
    """What arrived cannot be a frame: the stream is out of step for good."""


class FrameReader:
    """Cuts what is fed to it into frames.

    Descriptors arrive with the first byte of a frame that carries FLAG_FDS, so the batches and
    those frames pair up in order.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._batches: deque[list[int]] = deque()

    def feed(self, data: memoryview, descriptors: list[int]) -> Iterable[Frame]:
        """The frames that `data` completes."""
        size = len(data)
        if size >= HEADER_BYTES and not self._pending and not descriptors:
            length, kind, method, flags, call_id = HEADER.unpack_from(data)
            if length == size - HEADER_BYTES and not flags & FLAG_FDS:  # one whole frame, as usual
                return (Frame(kind, method, call_id, bytes(data[HEADER_BYTES:]), []),)
        return self._feed(data, descriptors)

    def _feed(self, data: memoryview, descriptors: list[int]) -> Iterator[Frame]:
        if descriptors:
            self._batches.append(descriptors)
        if self._pending:
            self._pending += data
            whole = memoryview(bytes(self._pending)) if self._complete() else data[:0]
        else:
            whole = data
        done = 0
        for stop, frame in self._cut(whole):
            done = stop
            yield frame
        if self._pending:
            del self._pending[:done]
        else:
            self._pending += whole[done:]

    def _complete(self) -> bool:
        if len(self._pending) < HEADER_BYTES:
            return False
        return len(self._pending) >= HEADER_BYTES + _length(self._pending, 0)

    def _cut(self, data: memoryview) -> Iterator[tuple[int, Frame]]:
        start, end = 0, len(data)
        while end - start >= HEADER_BYTES:
            length, kind, method, flags, call_id = HEADER.unpack_from(data, start)
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {length} bytes, over {FRAME_BYTES_MAX}")
            stop = start + HEADER_BYTES + length
            if stop > end:
                return
            payload = bytes(data[start + HEADER_BYTES : stop])
            start = stop
            yield start, Frame(kind, method, call_id, payload, self._descriptors(flags))

    def _descriptors(self, flags: int) -> list[int]:
        if not flags & FLAG_FDS:
            return []
        if not self._batches:
            raise FrameError("a frame came without the descriptors it announced")
        return self._batches.popleft()

    def close(self) -> None:
        """Closes descriptors whose frame never came whole."""
        while self._batches:
            close_all(self._batches.popleft())


def _length(data: bytearray, start: int) -> int:
    length: int = HEADER.unpack_from(data, start)[0]
    if length > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {length} bytes, over {FRAME_BYTES_MAX}")
    return length


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
