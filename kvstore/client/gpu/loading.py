"""Loads: blocks from the store's memory into an engine's, group of layers by group of layers.

    pool, registered ──────────────► copies of pieces ───────────────────► engine's pages
    pool, not yet ──► ring (memcpy)       (long pieces)
                           └───────► whole blocks ──► stage ── scatter ──► engine's pages
                                          (short pieces, or another layout)

Everything is asked of the GPU at once and in order, so `start` returns long before the bytes are
there; only what passes through the ring is copied by the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from kvstore.client.gpu.calibration import Calibration
from kvstore.client.gpu.memory import Copies, EngineMemory, block_copies, load_slots
from kvstore.client.gpu.registration import Registered, Registrar
from kvstore.client.gpu.ring import Ring, StageTurns
from kvstore.client.match import Match
from kvstore.core.errors import KVStoreError, StoreUnavailable
from kvstore.cuda.device import Device, Event, Stream
from kvstore.cuda.driver import CudaError

LINK, DEVICE_LINK = "host>hbm", "hbm>hbm"


class Sources(NamedTuple):
    """Where the blocks of a load are, and which of them the GPU can fetch by itself.

    `addresses` uint64 and `fast` bool, one a block; `rows` are the bytes of those that are not
    fast, in order; `bounds` are addresses between registrations, sorted.
    """

    addresses: np.ndarray
    fast: np.ndarray
    rows: list[np.ndarray]
    bounds: np.ndarray

    def overlaid(self, addresses: np.ndarray) -> Sources:
        """The same with blocks that have an address here (uint64, 0 for none) taken from there."""
        there = addresses != 0
        slow = np.flatnonzero(~self.fast)
        rows = [row for i, row in zip(slow.tolist(), self.rows, strict=True) if not there[i]]
        return Sources(
            np.where(there, addresses, self.addresses), self.fast | there, rows, self.bounds
        )


class Load:
    """A load under way. The match must stay unreleased, and the pages unused, until `result`.

    `device_blocks` of it come from the daemon's memory on the GPU, the others from host.

    An engine that overlaps waits layer by layer on its own stream (`wait_layer`), which costs the
    host nothing; what it computed counts only if `result` raises nothing.
    """

    def __init__(
        self, match: Match, groups: list[range], events: list[Event], begin: Event,
        used: list[Registered], registrar: Registrar, byte_count: int, device_blocks: int,
    ) -> None:  # fmt: skip
        self.match, self.byte_count, self.device_blocks = match, byte_count, device_blocks
        self._groups, self._events, self._begin = groups, events, begin
        self._used, self._registrar = used, registrar
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether all bytes are there; raises StoreUnavailable if the GPU failed."""
        try:
            return all(event.done() for event in self._events[-1:])
        except CudaError as error:
            raise failed(error) from error

    def wait_layer(self, layer: int, stream: int) -> None:
        """Lets later work of the engine's stream (its handle) begin once this layer is there."""
        for group, event in zip(self._groups, self._events, strict=True):
            if layer in group:
                external(event.device, stream).wait(event)
                return

    def wait_all(self, stream: int) -> None:
        """Lets later work of the engine's stream begin once all layers are there."""
        for event in self._events[-1:]:
            external(event.device, stream).wait(event)

    def result(self) -> None:
        """Waits, and makes sure of the bytes.

        Raises LeaseLost when they may be others by now, StoreUnavailable when the GPU failed: what
        is in the pages then is worthless.
        """
        try:
            for event in self._events[-1:]:
                event.synchronize()
        except CudaError as error:
            raise failed(error) from error
        finally:
            self._let_go()
        if self.byte_count:
            self.match.check()

    @property
    def seconds(self) -> float:
        """What the copies took on the GPU, waits for each other included; after `result`."""
        return self._events[-1].seconds_since(self._begin) if self._events else 0.0

    def settle(self) -> bool:
        """Lets go of memory if the copies are over, for a load that nobody waits for."""
        with suppress(StoreUnavailable):
            if not self.done:
                return False
        self._let_go()
        return True

    def _let_go(self) -> None:
        used, self._used = self._used, []
        for entry in used:
            self._registrar.let_go(entry)


class Loader:
    """Asks the GPU for the copies of loads; one thread at a time."""

    def __init__(
        self, device: Device, memory: EngineMemory, calibration: Calibration, ring: Ring
    ) -> None:
        self._device, self._memory = device, memory
        self._calibration, self._ring = calibration, ring
        self._copy, self._last = device.stream(), device.stream()
        self._turns = None if memory.stage is None else StageTurns(0, load_slots(memory.stage))

    def start(
        self, sources: Sources, pages: np.ndarray, groups: Sequence[range], after: Event | None
    ) -> tuple[Event, list[Event]]:
        """Begins after `after`; answers with the begin and the end of each group.

        Raises StoreUnavailable; then nothing writes to the pages any more.
        """
        try:
            if after is not None:
                self._copy.wait(after)
            begin = self._copy.record(timing=True)
            return begin, [self._group(sources, pages, layers) for layers in groups]
        except CudaError as error:
            self.finish()
            raise failed(error) from error

    def finish(self) -> None:
        """Waits for everything that was asked for."""
        for stream in (self._copy, self._last):
            with suppress(CudaError):
                stream.synchronize()

    def close(self) -> None:
        self.finish()
        self._ring.close()

    def _group(self, sources: Sources, pages: np.ndarray, layers: range) -> Event:
        fast = np.flatnonzero(sources.fast)
        if len(fast):
            self._fetch(sources.addresses[fast], pages[fast], layers, sources.bounds)
        slow = np.flatnonzero(~sources.fast)
        first = layers.start * self._memory.layer_bytes
        length = len(layers) * self._memory.layer_bytes
        for start, half in self._through_ring(sources.rows, first, length):
            blocks = slow[start : start + len(half)]
            begins = half.ctypes.data + np.arange(len(half), dtype=np.uint64) * np.uint64(length)
            self._fetch(begins - np.uint64(first), pages[blocks], layers, NO_BOUNDS)
            self._ring.until(self._copy.record())
        self._last.wait(self._copy.record())
        return self._last.record(timing=True)

    def _through_ring(
        self, rows: list[np.ndarray], first: int, length: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The group's part of each row, in halves of the ring: (first row, [rows, length])."""
        count = self._ring.half_bytes // length
        assert count, "the ring has room for a block"
        for start in range(0, len(rows), count):
            wave = rows[start : start + count]
            half = self._ring.take()[: len(wave) * length].reshape(len(wave), length)
            for row, source in zip(half, wave, strict=True):
                np.copyto(row, source[first : first + length])
            yield start, half

    def _fetch(
        self, blocks: np.ndarray, pages: np.ndarray, layers: range, bounds: np.ndarray
    ) -> None:
        """Copies these layers of blocks that begin at these registered addresses."""
        parts = self._memory.parts(pages, layers)
        if parts is not None:
            copies = block_copies(parts, blocks)
            if self._turns is None or self._calibration.copies_pieces(copies.run_bytes):
                self._many(self._copy, copies, bounds)
                return
        self._by_stage(blocks, pages, layers, bounds)

    def _by_stage(
        self, blocks: np.ndarray, pages: np.ndarray, layers: range, bounds: np.ndarray
    ) -> None:
        stage, turns = self._memory.stage, self._turns
        assert stage is not None, "an engine's memory has pieces or a stage"
        assert turns is not None, "there are turns where there is a stage"
        first = np.uint64(layers.start * self._memory.layer_bytes)
        length = np.uint64(len(layers) * self._memory.layer_bytes)
        start = 0
        while start < len(blocks):
            slots, free = turns.take(len(blocks) - start)
            if free is not None:
                self._copy.wait(free)
            here = slice(start, start + len(slots))
            targets = np.uint64(stage.address) + slots.astype(np.uint64) * np.uint64(stage.stride)
            lengths = np.full(len(slots), length)
            copies = Copies(targets + first, blocks[here] + first, lengths)
            self._many(self._copy, copies.merged(), bounds)
            self._last.wait(self._copy.record())
            self._memory.scatter(slots, pages[here], layers, self._last)
            turns.until(self._last.record())
            start += len(slots)

    def _many(self, stream: Stream, copies: Copies, bounds: np.ndarray) -> None:
        if len(bounds):
            copies = copies.cut(bounds)
        # READY blocks don't change, and what passed through the ring is there already.
        stream.copy_many(*copies, stable=True)


NO_BOUNDS = np.empty(0, np.uint64)


def failed(error: CudaError) -> KVStoreError:
    return StoreUnavailable(f"the GPU did not do its copies: {error}; recompute the blocks")


def external(device: Device, handle: int) -> Stream:
    """Somebody else's stream; 0 is the legacy default one, as torch names it."""
    return Stream(device, external=handle or LEGACY_STREAM)


LEGACY_STREAM = 1
