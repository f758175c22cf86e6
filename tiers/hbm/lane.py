"""A way between host memory and a GPU's: a stream and two registered buffers used by turns."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.cuda.device import Device, Event

PIECE_BYTES = 256 << 10
"""Copied into a buffer and hashed there while it is still in the processor's cache."""


class Piece(NamedTuple):
    """A part of a payload that fits what is left of a buffer: item, offset in it, length."""

    item: int
    start: int
    length: int


class Lane:
    """One thread at a time. Bytes pass through buffers of our own, so that what is hashed is what
    is copied, whatever happens to the source meanwhile."""

    def __init__(self, device: Device, buffer_bytes: int) -> None:
        self._device, self.buffer_bytes = device, buffer_bytes
        self._memory = mmap.mmap(-1, 2 * buffer_bytes)
        whole = np.frombuffer(self._memory, np.uint8)
        self._address = whole.ctypes.data
        self._buffers = [whole[:buffer_bytes], whole[buffer_bytes:]]
        device.register(self._address, 2 * buffer_bytes)
        self.stream = device.stream()
        self._ends: list[Event | None] = [None, None]

    def upload(self, items: Sequence[tuple[int, np.ndarray]]) -> list[bytes]:
        """Copies payloads to addresses of the device; the xxh3_128 of each. Returns when done."""
        digests = [xxhash.xxh3_128() for _ in items]
        lengths = [len(payload) for _, payload in items]
        for turn, pieces in enumerate(batches(lengths, self.buffer_bytes)):
            buffer, at = self._buffers[turn % 2], 0
            self._wait(turn % 2)
            copies = []
            for item, start, length in pieces:
                target, payload = items[item]
                _fill(buffer[at : at + length], payload[start : start + length], digests[item])
                copies.append((target + start, buffer.ctypes.data + at, length))
                at += length
            self._copy(turn % 2, copies)
        self.finish()
        return [digest.digest() for digest in digests]

    def upload_stable(self, items: Sequence[tuple[int, np.ndarray]]) -> list[bytes]:
        """`upload` of payloads in registered memory that do not change: straight from there."""
        copies = [(target, payload.ctypes.data, len(payload)) for target, payload in items]
        self._copy(0, copies, stable=True)
        digests = [xxhash.xxh3_128_digest(payload.data) for _, payload in items]
        self.finish()
        return digests

    def download(self, items: Sequence[tuple[int, np.ndarray]]) -> list[bytes]:
        """Copies from addresses of the device into arrays; the xxh3_128 of each copy."""
        digests = [xxhash.xxh3_128() for _ in items]
        waiting: list[list[Piece]] = [[], []]

        def empty(half: int) -> None:
            self._wait(half)
            at = 0
            for item, start, length in waiting[half]:
                target = items[item][1][start : start + length]
                _fill(target, self._buffers[half][at : at + length], digests[item])
                at += length
            waiting[half] = []

        lengths = [len(target) for _, target in items]
        turn = 0
        for turn, pieces in enumerate(batches(lengths, self.buffer_bytes), 1):
            half = turn % 2
            empty(half)
            at, copies = self._buffers[half].ctypes.data, []
            for item, start, length in pieces:
                copies.append((at, items[item][0] + start, length))
                at += length
            self._copy(half, copies)
            waiting[half] = pieces
        empty((turn + 1) % 2)
        empty(turn % 2)
        return [digest.digest() for digest in digests]

    def hash(self, address: int, length: int) -> bytes:
        """xxh3_128 of bytes on the device."""
        digest = xxhash.xxh3_128()
        for start in range(0, length, self.buffer_bytes):
            size = min(self.buffer_bytes, length - start)
            self._copy(0, [(self._buffers[0].ctypes.data, address + start, size)])
            self._wait(0)
            digest.update(self._buffers[0][:size].data)
        return digest.digest()

    def finish(self) -> None:
        """Waits for everything that was asked for; raises CudaError if any of it failed."""
        self._ends = [None, None]
        self.stream.synchronize()

    def close(self) -> None:
        self.finish()
        self._device.unregister(self._address)

    def _copy(self, half: int, copies: list[tuple[int, int, int]], stable: bool = False) -> None:
        targets, sources, lengths = (np.array(c, np.uint64) for c in zip(*copies, strict=True))
        self.stream.copy_many(targets, sources, lengths, stable)
        self._ends[half] = self.stream.record()

    def _wait(self, half: int) -> None:
        end = self._ends[half]
        if end is not None:
            end.synchronize()
            self._ends[half] = None


def batches(lengths: Sequence[int], room: int) -> Iterator[list[Piece]]:
    """Pieces of payloads of these lengths, in order, as many together as fit `room` bytes."""
    pieces, left = [], room
    for item, length in enumerate(lengths):
        start = 0
        while start < length:
            size = min(left, length - start)
            pieces.append(Piece(item, start, size))
            start, left = start + size, left - size
            if not left:
                yield pieces
                pieces, left = [], room
    if pieces:
        yield pieces


def _fill(target: np.ndarray, source: np.ndarray, digest: xxhash.xxh3_128) -> None:
    """Copies, and hashes what arrived."""
    for start in range(0, len(target), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        np.copyto(piece, source[start : start + PIECE_BYTES])
        digest.update(piece.data)
