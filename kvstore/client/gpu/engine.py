"""`GpuSide` and `EngineSide`: loads and saves of an engine on one GPU.

gpu = GpuSide(Device(uuid))
engine = gpu.engine(space, memory)
match = space.lookup(token_ids)
load = engine.load(match, pages, after=stream)     # returns at once
load.wait_layer(0, stream)                         # or load.wait_all(stream)
load.result()                                      # LeaseLost: throw what was computed away
save = engine.save(token_ids, pages, first_block, after=stream)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from kvstore.client.gpu.calibration import Calibration
from kvstore.client.gpu.loading import (
    DEVICE_LINK,
    LINK,
    Load,
    Loader,
    Sources,
    external,
    failed,
)
from kvstore.client.gpu.memory import EngineMemory, layer_groups
from kvstore.client.gpu.registration import CHUNK_BYTES, Registered, Registrar
from kvstore.client.gpu.ring import RING_BYTES, Ring
from kvstore.client.gpu.saving import SavedBlocks, Saver, registered_staging
from kvstore.client.gpu.share import DeviceShare, InPlace
from kvstore.client.located import Located
from kvstore.client.match import Match
from kvstore.client.put import PutHandle
from kvstore.client.session import Attachment, Session
from kvstore.client.space import Space
from kvstore.client.wire import Tokens
from kvstore.core.block import SLOT_SHIFT
from kvstore.core.errors import InvalidRequest, KVStoreError, StoreUnavailable
from kvstore.cuda.device import Device, Event
from kvstore.cuda.driver import CudaError

OVERLAPS = "layerwise"


class GpuSide:
    """What the engines of a process share on one GPU: the memory that is registered with it.

    `ring_bytes` of registered memory are each engine's way for loads, and once more for saves,
    until what the daemon shares is registered, `chunk_bytes` at a time.
    """

    def __init__(
        self, device: Device, ring_bytes: int = RING_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.device, self.ring_bytes = device, ring_bytes
        self.registrar = Registrar(device, chunk_bytes)
        self._engines: list[EngineSide] = []  # their memory stays registered until `close`

    def engine(
        self, space: Space, memory: EngineMemory, calibration: Calibration | None = None,
        scratch: np.ndarray | None = None,
    ) -> EngineSide:  # fmt: skip
        """Loads and saves of one engine's memory, calibrated at the start.

        That needs `scratch`: pages (int32, a row a block) that nothing lies in yet, for at most as
        many blocks as the stage has slots. Without it, or with a `calibration` of the caller's, the
        least length of pieces is what that says. Raises InvalidRequest for blocks of another size,
        StoreUnavailable when the GPU fails.
        """
        made = EngineSide(self, space, memory, calibration or Calibration())
        self._engines.append(made)
        if calibration is None and scratch is not None:
            made.calibrate(scratch)
        return made

    def drop(self, engine: EngineSide) -> None:
        """Closes one engine's side, of a space that is not used any more."""
        engine.close()
        if engine in self._engines:
            self._engines.remove(engine)

    def close(self) -> None:
        """Waits for all copies and unregisters everything; idempotent."""
        for engine in self._engines:
            engine.close()
        self._engines.clear()
        self.registrar.close()


class EngineSide:
    """Loads and saves between a space's blocks and one engine's memory. Any thread may use it."""

    def __init__(
        self, gpu: GpuSide, space: Space, memory: EngineMemory, calibration: Calibration
    ) -> None:
        size = memory.layer_count * memory.layer_bytes
        if size != space.spec.block_bytes:
            raise InvalidRequest(
                f"the engine's memory has blocks of {size} bytes and the space of "
                f"{space.spec.block_bytes}; describe both with the same layout and format"
            )
        self.space, self.memory, self.calibration = space, memory, calibration
        self._gpu, self._device = gpu, gpu.device
        self._ring_bytes = max(gpu.ring_bytes, 2 * size)
        self._loading, self._saving = threading.Lock(), threading.Lock()
        self._running: list[Load] = []
        self._closed = False
        self._saver: Saver | None = None
        self._device_share: DeviceShare | None = None
        try:
            self._loader = Loader(
                gpu.device, memory, calibration, Ring(gpu.device, self._ring_bytes)
            )
        except CudaError as error:
            raise failed(error) from error
        for entry in self._register(space.attached).values():
            gpu.registrar.let_go(entry)

    def calibrate(self, pages: np.ndarray) -> None:
        """Measures from which length on pieces are copied one by one.

        What is in `pages` (int32, a row a block) is lost: before the engine serves. Raises
        StoreUnavailable when the GPU fails.
        """
        try:
            with self._loading:
                self.calibration.measure(self._device, self.memory, pages)
        except CudaError as error:
            raise failed(error) from error

    # ---- Load ----

    def load(
        self, match: Match, pages: np.ndarray, *, after: int | Event | None = None,
        partial: bool = False,
    ) -> Load:  # fmt: skip
        """Begins to load what the plan loads of a match into `pages`, a row a block (int32).

        Rows are of `match.ranges`, in order. It begins after the event `after`, or after all that
        the engine has asked of the stream `after` (its handle). With
        `partial`, as in `Space.restore`, `match` says afterwards which blocks are loaded; later
        rows of pages stay as they are. Raises what `Space.restore` does, and StoreUnavailable
        when the GPU fails.
        """
        if len(pages) != match.block_count:
            raise InvalidRequest(
                f"{len(pages)} rows of pages for {match.block_count} blocks; give each block one"
            )
        located = self.space.locate(match, partial=partial)
        count = match.block_count
        with self._loading:
            if self._closed:
                raise StoreUnavailable("the engine's side is closed; recompute the blocks")
            self._running = [load for load in self._running if not load.settle()]
            used: list[Registered] = []
            try:
                sources = self._sources(match, located, used)
                share = self._share(match.attachment.session)
                shared = share.load(match) if count else None
                if shared is not None:
                    sources = sources.overlaid(shared)
                groups = self._groups(count)
                begin, events = self._loader.start(
                    sources, pages[:count], groups, self._after(after)
                )
                if shared is not None:
                    share.until(events[-1])
            except BaseException:
                for entry in used:
                    self._gpu.registrar.let_go(entry)
                raise
            load = Load(
                match, groups, events, begin, used, self._gpu.registrar,
                count * self.space.spec.block_bytes,
                0 if shared is None else int(np.count_nonzero(shared)),
            )  # fmt: skip
            self._running.append(load)
            return load

    def in_place(self, match: Match) -> InPlace | None:
        """Where blocks of the match lie in the daemon's memory on this GPU, to be read there.

        None where the daemon does not share it so (`tiers.hbm.share`). Which blocks are there is up
        to the daemon; the others, at offset -1, are in host as always.
        """
        match.check_lease()
        with self._loading:
            return self._share(match.attachment.session).in_place(match)

    def _share(self, session: Session) -> DeviceShare:
        """The daemon's device memory in the session, opened when it is first asked for."""
        share = self._device_share
        if share is None or share.session is not session:
            if share is not None:
                self._loader.finish()
                share.close()
            share = DeviceShare(self._device, session, self.space.attach_seconds)
            self._device_share = share
        return share

    def report(self, load: Load) -> None:
        """Tells the daemon what a load took, after its `result`; never raises.

        One that came from host and from the daemon's device memory says nothing of either.
        """
        with suppress(KVStoreError, CudaError):
            blocks = load.match.block_count
            if load.byte_count and load.device_blocks in (0, blocks):
                link = DEVICE_LINK if load.device_blocks else LINK
                self.space.report_transfer(link, load.byte_count, load.seconds, match=load.match)

    def _groups(self, count: int) -> list[range]:
        memory = self.memory
        if not count:
            return []
        if self.space.overlap != OVERLAPS:
            return [range(memory.layer_count)]
        return layer_groups(memory.layer_count, memory.layer_bytes, count)

    def _after(self, stream: int | Event | None) -> Event | None:
        if stream is None or isinstance(stream, Event):
            return stream
        try:
            return external(self._device, stream).record()
        except CudaError as error:
            raise failed(error) from error

    def _sources(self, match: Match, located: Located | None, used: list[Registered]) -> Sources:
        """Addresses of the match's blocks; what lies in no pool is sent, and goes by the ring."""
        count, attachment = match.block_count, match.attachment
        width, step = attachment.block_bytes, attachment.slot_bytes
        addresses, fast = np.zeros(count, np.uint64), np.zeros(count, bool)
        rows: dict[int, np.ndarray] = {}
        entries = self._register(attachment)
        used += entries.values()
        for index, run, pool, page, _ in located.runs if located is not None else ():
            entry, start = entries[pool.pool_id], page << SLOT_SHIFT
            begins = start + np.arange(run, dtype=np.uint64) * np.uint64(step)
            here = slice(index, index + run)
            addresses[here] = begins + np.uint64(entry.address)
            fast[here] = begins + np.uint64(width) <= entry.covered
            for i in np.flatnonzero(~fast[here]).tolist():
                at = start + i * step
                rows[index + i] = pool.data[at : at + width]
        rows |= self._sent(match, located)
        bounds = [entry.bounds for entry in entries.values() if len(entry.bounds)]
        joined = np.sort(np.concatenate(bounds)) if bounds else np.empty(0, np.uint64)
        return Sources(addresses, fast, [rows[i] for i in sorted(rows)], joined)

    def _sent(self, match: Match, located: Located | None) -> dict[int, np.ndarray]:
        """Blocks that had to be sent, by their number in the load."""
        blocks = list(match.ranges) if located is None else located.inline
        if not match.block_count or not blocks:
            return {}
        rows = np.empty((match.block_count, match.attachment.block_bytes), np.uint8)
        self.space.fetch(match, rows, blocks)
        wanted = [position for positions in match.ranges for position in positions]
        sent = {position for positions in blocks for position in positions}
        return {i: rows[i] for i, position in enumerate(wanted) if position in sent}

    def _register(self, attachment: Attachment | None) -> dict[int, Registered]:
        """What is registered of the attachment's pools, each in use until it is let go."""
        if attachment is None:
            return {}
        session = attachment.session
        return {
            pool.pool_id: self._gpu.registrar.use(
                pool.data, True, lambda: bool(session.ended), pool.backing
            )
            for pool in attachment.pools.values()
        }

    # ---- Save ----

    def save(
        self,
        token_ids: Tokens | None,
        pages: np.ndarray,
        first_block: int = 0,
        *,
        after: int | None = None,
        hashes: Any = None,
        extra_digests: Mapping[int, bytes] | None = None,
        **names: Any,
    ) -> PutHandle:
        """Begins to store a prompt's full blocks from `first_block` on, out of `pages`.

        `pages` has a row a block; they are read after all that the engine has asked of the stream
        `after` until now, and must not change until the handle is done. Other arguments are those
        of `Space.put_async`, on whose thread blocks are copied and stored.
        """
        saver = self._begin_saving()
        blocks = SavedBlocks(
            saver, self._saving, np.array(pages), self.space.spec.block_bytes,
            self._after(after), self._staging,
        )  # fmt: skip
        return self.space.put_async(
            token_ids, blocks, first_block, hashes=hashes, extra_digests=extra_digests, **names
        )

    def _begin_saving(self) -> Saver:
        with self._saving:
            if self._saver is None:
                try:
                    ring = Ring(self._device, self._ring_bytes)
                    self._saver = Saver(self._device, self.memory, self.calibration, ring)
                except CudaError as error:
                    raise failed(error) from error
            return self._saver

    def _staging(self) -> Registered | None:
        return registered_staging(self._gpu.registrar, self.space)

    def close(self) -> None:
        """Waits for all copies; loads and saves that come later fail. `GpuSide.close` calls it."""
        with self._loading:
            if self._closed:
                return
            self._closed = True
            self._loader.close()
            if self._device_share is not None:
                self._device_share.close()
            self._running = [load for load in self._running if not load.settle()]
        with self._saving:
            if self._saver is not None:
                self._saver.close()
