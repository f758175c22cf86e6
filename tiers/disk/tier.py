"""`DiskTier`: blocks on a local disk behind the `Tier` protocol."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.block import slot_bytes
from kvstore.core.errors import CorruptBlock, TierError
from kvstore.core.generations import Generations
from kvstore.tiers.base import (
    BlockHeader,
    Source,
    StoredBlock,
    StoredColumns,
    Target,
    TierUsage,
)
from kvstore.tiers.disk import directory
from kvstore.tiers.disk.group import Committer
from kvstore.tiers.disk.health import Health
from kvstore.tiers.disk.index import pack_key
from kvstore.tiers.disk.io import PAGE, FileIO
from kvstore.tiers.disk.layout import header_bytes
from kvstore.tiers.disk.loading import end_probation
from kvstore.tiers.disk.opening import Opening
from kvstore.tiers.disk.readoption import Readoption
from kvstore.tiers.disk.resizing import Resizing
from kvstore.tiers.disk.sealed_transfer import SealedTransfer
from kvstore.tiers.disk.segments import Segment
from kvstore.tiers.disk.transfer import Item, Transfer
from kvstore.tiers.payload import as_bytes

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault


class DiskTier:
    """Segment files in `directory`, which this process alone uses: the caller holds its lock.

    Everything in the directory together never takes more than `size_bytes`, and the tier does not
    grow where the file system has less than `reserve_bytes` free. What a `commit` returned for
    comes back at the next start, whatever happens in between, unless it was discarded. `notes`
    says what was dropped or put right at open, `torn_header_count` how many headers were torn.
    With a vault all that is written is encrypted, and `locked_block_count` says how many blocks
    were dropped at open because none of its keys opens them. Raises TierError.
    """

    durable = True

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        *,
        reserve_bytes: int = 0,
        generations: Generations | None = None,
        direct: bool = True,
        name: str = "disk",
        io: FileIO | None = None,
        vault: Vault | None = None,
    ) -> None:
        self.name, self._vault = name, vault
        self._path, self._io = Path(directory), io or FileIO()
        self._generations = generations or Generations()
        self._health = Health(name, str(directory))
        opened = Opening(self._path, size_bytes, reserve_bytes, direct, self._io, vault).run()
        self._closed = False
        self.notes = opened.notes
        self.torn_header_count = opened.belief.torn_header_count
        self.locked_block_count = opened.belief.missing.total()
        self._generations.raise_to(opened.meta.generations)
        self._books, self._files, self._index = opened.books, opened.files, opened.index
        self._transfer = self._make_transfer(opened.format.store_id)
        self._readoption = Readoption(self._books, opened.belief.blocks, vault)
        self._committer = Committer(
            self._books, self._files, self._index, opened.meta, opened.format.store_id,
            self._generations, self._health, self._io, lambda: end_probation(self._path), vault,
        )  # fmt: skip
        self._resizing = Resizing(
            self._path, opened.format.unit_shift, size_bytes, self._books, self._files,
            self._committer,
        )  # fmt: skip
        if opened.problem:
            self._health.give_up(opened.problem)

    def _make_transfer(self, store_id: bytes) -> Transfer:
        if self._vault is None:
            return Transfer(self._io, lambda: self._files.direct)
        return SealedTransfer(self._io, lambda: self._files.direct, self._vault, store_id)

    @property
    def problem(self) -> str:
        return self._health.problem

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self._files.direct

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        self._check_pool(pool)
        if self._health.problem:
            return []
        return self._books.reserve(*self._class(payload_bytes, symbol_bytes), count)

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        self._make_files([self._books.locate(place)[0] for place, _, _ in blocks])
        return self._committer.commit(blocks)

    def discard(self, places: Sequence[int]) -> None:
        self._books.discard(places)

    def free(self, places: Sequence[int]) -> None:
        self._books.free(places)

    def report_bad(self, place: int) -> None:
        """A block that is about to be discarded was found corrupt; such a slot ends its service
        after a few of them."""
        self._books.report_bad(place)

    def blocks_by_key(self) -> dict[str, int]:
        """Blocks that each key of an encrypted tier opens, by name."""
        return {} if self._vault is None else self._vault.count_by_key(self._books.streams())

    def usage(self, pool: str | None = None) -> TierUsage:
        self._check_pool(pool or "")
        return self._books.usage()

    def header(self, place: int) -> BlockHeader:
        generation = self.generation(place)
        if generation:
            segment, index = self._books.locate(place)
            record = self._committer.entry(pack_key(segment.serial, index))
            if record is not None and record.generation == generation:
                return record.header
        raise CorruptBlock(f"place {place} of tier {self.name} holds no committed block")

    def checksum(self, place: int) -> bytes:
        return self._books.checksum(place)

    def generation(self, place: int) -> int:
        return int(self._books.generations(np.array([place]))[0])

    def generations(self, places: np.ndarray) -> np.ndarray:
        return self._books.generations(places)

    def next_generation(self) -> int:
        return self._generations.next

    def recover(self) -> Iterator[StoredBlock]:
        return self._readoption.blocks()

    def adopt(self, place: int) -> None:
        self._readoption.adopt(np.array([place]))

    def recover_columns(self) -> StoredColumns:
        return self._readoption.columns()

    def adopt_many(self, places: np.ndarray) -> None:
        self._readoption.adopt(places)

    def finish_recovery(self) -> list[int]:
        """Nobody outside reads files, so nothing has to rest: the answer is empty."""
        self._readoption.finish()
        return []

    def drain_candidates(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> list[int]:
        self._check_pool(pool)
        return self._books.drain(*self._class(payload_bytes, symbol_bytes))

    def cancel_drain(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> None:
        self._check_pool(pool)
        self._books.cancel_drain(*self._class(payload_bytes, symbol_bytes))

    def begin_resize(self, byte_count: int) -> int:
        if self._health.problem:
            raise TierError(f"{self._health.problem}; mend that first")
        return self._resizing.begin(byte_count, self._books.room.reserve_bytes)

    @property
    def owed_bytes(self) -> int:
        return self._books.slab.debt_bytes

    def choose_leaving(self, unmovable: np.ndarray) -> bool:
        return self._books.choose_leaving(unmovable)

    def is_leaving(self, places: np.ndarray) -> np.ndarray:
        return self._books.is_leaving(places)

    def reserve_for_move(self, payload_bytes: int, symbol_bytes: int, count: int) -> list[int]:
        return self._books.reserve_for_move(*self._class(payload_bytes, symbol_bytes), count)

    def finish_resize(self) -> int:
        try:
            return self._resizing.finish()
        except OSError as error:
            raise self._health.failed("resize", error) from error

    def write(self, place: int, source: Source) -> bytes:
        item = self._staging(0, place, source)
        try:
            self._make_files([item.segment])
            return self._transfer.write(item)
        except OSError as error:
            raise self._failed_to_write([place], error) from error

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        staged = [self._staging(i, place, source) for i, (place, source) in enumerate(items)]
        try:
            self._make_files([item.segment for item in staged])
            return self._transfer.write_many(staged)
        except OSError as error:
            raise self._failed_to_write([place for place, _ in items], error) from error

    def read(self, place: int, target: Target, length: int) -> None:
        segment, index = self._books.locate(place)
        try:
            self._transfer.read(Item(0, segment, index, as_bytes(target)), length)
        except OSError as error:
            raise TierError(
                f"tier {self.name} failed to read place {place} ({error.strerror}); check the disk"
            ) from error

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        found = [
            Item(i, *self._books.locate(place), as_bytes(target))
            for i, (place, target) in enumerate(items)
        ]
        return self._transfer.read_many(found, length)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        segment, index = self._books.locate(place)
        try:
            return self._transfer.checksum(segment, index, length) == checksum
        except (OSError, TierError):
            return False

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        payload = np.empty(length, np.uint8)
        self.read(source_place, payload, length)
        return self.write(target_place, payload)

    def probe(self) -> None:
        """Measures free space anew, removes files given up, and tries again what failed.

        A worker calls it now and then, and soon after `problem` was set.
        """
        try:
            self._unlink_doomed()
            if self._health.problem and not self._health.read_only:
                self._committer.commit([])
                if self._committer.relieve() and self._may_grow():
                    self._files.try_out()
                    self._health.problem = ""
        except (OSError, TierError) as error:
            self._health.failed("work again", error)

    def check_integrity(self) -> None:
        """Books, index and headers name the same blocks."""
        self._books.check_integrity()
        self._committer.check_integrity()

    def close(self, keep: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        if keep and not self._health.problem:
            with suppress(TierError):  # what was discarded comes back at the next start then
                self._committer.commit([])
        self._books.close()
        self._index.close()
        end_probation(self._path)
        self._files.close()
        if not keep:
            _delete(self._path)

    def _class(self, payload_bytes: int, symbol_bytes: int) -> tuple[int, int]:
        """(slot bytes, header bytes)."""
        header = header_bytes(symbol_bytes, self._vault is not None)
        return max(slot_bytes(payload_bytes), PAGE) + header, header

    def _check_pool(self, pool: str) -> None:
        if pool:
            raise TierError(f"tier {self.name} has no pool {pool!r}; its only pool is ''")

    def _staging(self, number: int, place: int, source: Source) -> Item:
        payload = as_bytes(source)
        segment, index = self._books.locate(place)
        assert not segment.generations[index], "a published block is never written"
        if len(payload) > segment.geometry.payload_bytes:
            raise TierError(
                f"a payload of {len(payload)} bytes does not fit its slot of "
                f"{segment.geometry.payload_bytes}; reserve slots for the largest payload"
            )
        return Item(number, segment, index, payload)

    def _make_files(self, segments: Sequence[Segment]) -> None:
        """Makes the files of new segments, after unlinking what was given up."""
        if all(segment.fd >= 0 for segment in segments):
            return
        with self._files.lock:
            try:
                self._books.unlink_doomed(self._files)
                for segment in segments:
                    if segment.fd < 0:
                        self._files.make(segment, self._books.room.reserve_bytes)
                        self._books.made(segment, self._files.free_bytes())
            except (OSError, TierError) as error:
                self._books.measured(self._files.free_bytes())
                raise self._health.failed("make a segment", error) from error

    def _unlink_doomed(self) -> None:
        with self._files.lock:
            self._books.unlink_doomed(self._files)

    def _may_grow(self) -> bool:
        room = self._books.room
        return self._files.free_bytes() >= room.reserve_bytes

    def _failed_to_write(self, places: Sequence[int], error: OSError) -> TierError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            self._books.suspect(places)
        return self._health.failed("write a payload", error)


def _delete(path: Path) -> None:
    for name in directory.OURS:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)
