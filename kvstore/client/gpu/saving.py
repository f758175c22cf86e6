"""Saves: blocks from an engine's memory into staging, from where the daemon takes them.

The engine's stream is waited for on the GPU (an event after the last layer), on a stream of low
priority, so that saving takes what the engine leaves. A put asks for the blocks it is granted,
batch by batch; each batch is copied while the daemon takes in the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvstore.client.gpu.calibration import Calibration
from kvstore.client.gpu.loading import NO_BOUNDS, failed
from kvstore.client.gpu.memory import Copies, EngineMemory, block_copies, load_slots
from kvstore.client.gpu.registration import Registered, Registrar
from kvstore.client.gpu.ring import Ring, StageTurns
from kvstore.client.space import Space
from kvstore.cuda.device import Device, Event
from kvstore.cuda.driver import CudaError


class Saver:
    """Copies blocks to host memory; one thread at a time."""

    def __init__(
        self, device: Device, memory: EngineMemory, calibration: Calibration, ring: Ring
    ) -> None:
        self._memory, self._calibration, self._ring = memory, calibration, ring
        self.stream = device.stream(low_priority=True)
        stage = memory.stage
        self._turns = None if stage is None else StageTurns(load_slots(stage), stage.slots)

    def copy(self, pages: np.ndarray, rows: np.ndarray, registered: Registered | None) -> None:
        """Copies a block for each row of pages into `rows` [n, block bytes]; waits until done.

        Rows in memory that is not registered are filled through the ring.
        """
        width, step = rows.shape[1], rows.strides[0]
        begin = rows.ctypes.data
        if registered is not None and begin + step * len(rows) <= registered.end:
            starts = np.uint64(begin) + np.arange(len(rows), dtype=np.uint64) * np.uint64(step)
            self._ask(pages, starts, registered.bounds)
            self.stream.synchronize()
            return
        count = max(1, self._ring.half_bytes // width)
        for start in range(0, len(rows), count):
            wave = rows[start : start + count]
            half = self._ring.take()[: wave.size].reshape(wave.shape)
            starts = half.ctypes.data + np.arange(len(wave), dtype=np.uint64) * np.uint64(width)
            self._ask(pages[start : start + count], starts, NO_BOUNDS)
            self.stream.synchronize()
            np.copyto(wave, half)

    def _ask(self, pages: np.ndarray, starts: np.ndarray, bounds: np.ndarray) -> None:
        memory = self._memory
        parts = memory.parts(pages, range(memory.layer_count))
        if parts is not None:
            copies = block_copies(parts, starts, to_blocks=True)
            if self._turns is None or self._calibration.copies_pieces(copies.run_bytes):
                self._many(copies, bounds)
                return
        stage, turns = memory.stage, self._turns
        assert stage is not None, "an engine's memory has pieces or a stage"
        assert turns is not None, "there are turns where there is a stage"
        width = np.uint64(memory.layer_count * memory.layer_bytes)
        done = 0
        while done < len(starts):
            # All on one stream: a half is free once what was asked for before is over.
            slots, _ = turns.take(len(starts) - done)
            here = slice(done, done + len(slots))
            memory.gather(pages[here], slots, self.stream)
            sources = np.uint64(stage.address) + slots.astype(np.uint64) * np.uint64(stage.stride)
            self._many(Copies(starts[here], sources, np.full(len(slots), width)).merged(), bounds)
            done += len(slots)

    def _many(self, copies: Copies, bounds: np.ndarray) -> None:
        if len(bounds):
            copies = copies.turned().cut(bounds).turned()
        # In stream order: the engine may be writing what is read here until its event.
        self.stream.copy_many(*copies)

    def settle(self) -> None:
        """Waits for what was asked for: nothing is written any more to where it was to go."""
        with suppress(CudaError):
            self.stream.synchronize()

    def close(self) -> None:
        self.settle()
        self._ring.close()


class SavedBlocks:
    """The blocks of one save, as a put takes them (a `BlockSource`).

    `registered` answers what is known of the staging segment, once there is one.
    """

    def __init__(
        self, saver: Saver, lock: threading.Lock, pages: np.ndarray, block_bytes: int,
        after: Event | None, registered: Callable[[], Registered | None],
    ) -> None:  # fmt: skip
        self._saver, self._lock = saver, lock
        self._pages, self._block_bytes = pages, block_bytes
        self._after, self._registered = after, registered

    def block(self, i: int) -> np.ndarray:
        row = np.empty(self._block_bytes, np.uint8)
        self._copy(i, row[None, :], None)
        return row

    def read(self, i: int, target: np.ndarray) -> None:
        self._copy(i, target, self._registered())

    def _copy(self, i: int, rows: np.ndarray, registered: Registered | None) -> None:
        with self._lock:
            try:
                if self._after is not None:
                    self._saver.stream.wait(self._after)
                    self._after = None
                self._saver.copy(self._pages[i : i + len(rows)], rows, registered)
            except CudaError as error:
                self._saver.settle()
                raise failed(error) from error


def registered_staging(registrar: Registrar, space: Space) -> Registered | None:
    """The staging of the space's session, once it is registered: it is soon, and small."""
    attachment = space.attached
    staging = None if attachment is None else attachment.session.staging
    if attachment is None or staging is None:
        return None
    session = attachment.session
    entry = registrar.use(staging.data, False, lambda: bool(session.ended))
    registrar.let_go(entry)  # a session's staging stays while its puts run
    return entry
