"""The index of a disk tier: an LMDB file of what is stored where, one transaction a group.

    blocks     serial (4 bytes, big-endian), slot (4)  ->  header fields, symbol, check
    sealed     the same, of encrypted blocks           ->  all of that encrypted, check
    segments   serial (4)                              ->  class, chunk bytes, check
    meta       "meta"                                  ->  counters of the tier, check

LMDB checks nothing itself, so each value carries a check over key and value. Values are copied
out of the map, never lent: memory of the map is unmapped under whoever still looks at it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import numpy as np
import xxhash

from kvstore.core.errors import TierError
from kvstore.tiers.disk.entries import (
    SEALED_EXTRA_BYTES,
    VALUE,
    identity,
    pack_fields,
    parse_fields,
    parse_record,
    seal_record,
)
from kvstore.tiers.disk.io import PAGE, FileIO, whole_pages
from kvstore.tiers.disk.layout import STORE_ID_BYTES, VERSION, Geometry
from kvstore.tiers.record import SlotRecord

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

FULL_RATIO = 0.8
"""No block is entered from here on: deleting needs room, too."""
RELIEF_RATIO = 0.75
FILE, NEW_FILE = "data.mdb", "data.new"

_KEY = struct.Struct(">II")
_SERIAL = struct.Struct(">I")
CHECK_BYTES = 8
_SEGMENT = struct.Struct("<QQQQ")
_META = struct.Struct(f"<I{STORE_ID_BYTES}sQQQQ")
_LMDB_META = struct.Struct("<16xI116xQQ")
_LMDB_MAGIC = 0xBEEFC0DE
_META_KEY = b"meta"
_NAMES = (b"blocks", b"segments", b"meta", b"sealed")


class IndexFull(TierError):
    """The map has no room for more blocks."""


class IndexLost(TierError):
    """A transaction failed; whether it counts is known after `reopen` only."""


class Meta(NamedTuple):
    """Counters of the tier: none of them ever goes back."""

    sequence: int
    """Number of the last group."""
    generations: int
    """No generation from here on was handed out."""
    watermark: int
    """Highest generation of any group so far."""
    serial: int
    """The next segment gets this number or a higher one."""


@dataclass
class Changes:
    """What one transaction does."""

    puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    sealed_puts: list[tuple[bytes, bytes]] = field(default_factory=list)
    deletes: Sequence[bytes] = ()
    segments: dict[int, Geometry] = field(default_factory=dict)
    gone_segments: Iterable[int] = ()


def entry_bytes(symbol_bytes: int, is_sealed: bool = False) -> int:
    """What an entry takes of the map, at most: large ones lie on pages of their own."""
    size = VALUE.size + symbol_bytes + CHECK_BYTES + (SEALED_EXTRA_BYTES if is_sealed else 0)
    return 2 * size if size < PAGE // 2 else whole_pages(size + CHECK_BYTES * 2) + PAGE // 16


def pack_key(serial: int, index: int) -> bytes:
    return _KEY.pack(serial, index)


def pack_value(key: bytes, record: SlotRecord) -> bytes:
    return _checked(key, pack_fields(record))


def parse_value(key: bytes, raw: bytes) -> SlotRecord | None:
    """None if it is damaged or another key's."""
    body = raw[:-CHECK_BYTES]
    if len(body) < VALUE.size or _checked(key, body) != raw:
        return None
    return parse_fields(body)


def _checked(key: bytes, body: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(key + body)


class DiskIndex:
    """The open index. One thread at a time is inside; the caller sees to that.

    Its file grows up to `map_bytes`; only `resize` makes it smaller. Closed until `open`, which
    raises IndexLost.
    """

    def __init__(
        self, path: Path, map_bytes: int, store_id: bytes, io: FileIO, vault: Vault | None = None
    ) -> None:
        self._path, self.map_bytes, self.store_id, self._io = path, map_bytes, store_id, io
        self.vault = vault
        self._env: Any = None

    def open(self) -> None:
        try:
            (self._path / NEW_FILE).unlink(missing_ok=True)
            # Nobody else opens it (the directory's lock sees to that), so LMDB needs no lock file.
            self._env = lmdb.open(
                str(self._path), map_size=self.map_bytes, max_dbs=len(_NAMES), lock=False,
                mode=0o600, sync=True, metasync=True, writemap=False,
            )  # fmt: skip
            self._blocks, self._segments, self._meta, self._sealed = map(self._env.open_db, _NAMES)
        except (lmdb.Error, OSError) as error:
            self.close()
            raise IndexLost(f"the index in {self._path} cannot be opened ({error})") from error

    @property
    def is_open(self) -> bool:
        return self._env is not None

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def reopen(self) -> None:
        self.close()
        self.open()

    def resize(self, map_bytes: int) -> float:
        """Has another share from now on; a file that is larger is written anew.

        Answers with the part of the blocks that has to go before that can be, 0 when it is done.
        Raises IndexLost; the old file, or the new one, is whole then.
        """
        file = self._path / FILE
        try:
            if map_bytes < self.map_bytes:
                used = self.used_ratio * self.map_bytes / map_bytes
                if used > RELIEF_RATIO:
                    return 1.0 - RELIEF_RATIO / used
                if file.stat().st_size > map_bytes:
                    self._write_anew(file)
            self.map_bytes = map_bytes
            if self._env is None:
                self.open()
            self._env.set_mapsize(map_bytes)
        except (lmdb.Error, OSError) as error:
            raise IndexLost(f"the index in {self._path} cannot be resized ({error})") from error
        return 0.0

    def _write_anew(self, file: Path) -> None:
        """Without what is free in it; a file beside the old one, then in its place. Closes."""
        new = self._path / NEW_FILE
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._env.copyfd(fd, compact=True)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.close()
        os.replace(new, file)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def commit(self, changes: Changes, meta: Meta | None) -> None:
        """All changes, durably, or none. Raises IndexFull or IndexLost; neither is retried."""
        try:
            self._commit(changes, meta)
        except lmdb.MapFullError as error:
            raise IndexFull(f"the index in {self._path} is full") from error
        except (lmdb.Error, OSError) as error:
            raise IndexLost(f"the index in {self._path} cannot be written ({error})") from error

    def _commit(self, changes: Changes, meta: Meta | None) -> None:
        assert self._env is not None, "the index is closed"
        transaction = self._env.begin(write=True)
        try:
            for key in changes.deletes:
                if not transaction.delete(key, db=self._blocks):
                    transaction.delete(key, db=self._sealed)
            for serial in changes.gone_segments:
                transaction.delete(_SERIAL.pack(serial), db=self._segments)
            for serial, geometry in changes.segments.items():
                key = _SERIAL.pack(serial)
                body = _SEGMENT.pack(*geometry)
                transaction.put(key, _checked(key, body), db=self._segments)
            for key, value in changes.puts:
                transaction.put(key, value, db=self._blocks)
            for key, value in changes.sealed_puts:
                transaction.put(key, value, db=self._sealed)
            if meta is not None:
                body = _META.pack(VERSION, self.store_id, *meta)
                transaction.put(_META_KEY, _checked(_META_KEY, body), db=self._meta)
            self._io.commit(transaction)
        except BaseException:
            transaction.abort()
            raise

    def enter(self, changes: Changes, serial: int, slot: int, record: SlotRecord) -> None:
        """Makes a block part of `changes`, encrypted if its payload is."""
        key = pack_key(serial, slot)
        if not record.seal:
            changes.puts.append((key, pack_value(key, record)))
            return
        assert self.vault is not None, "sealed records are written with keys"
        sealed = seal_record(record, self.vault, self.place(serial, slot))
        changes.sealed_puts.append((key, _checked(key, sealed)))

    def place(self, serial: int, slot: int) -> bytes:
        """What an encrypted entry is authenticated with."""
        return identity(b"entry", self.store_id, serial, slot)

    def meta(self) -> Meta | None:
        """The counters; None if there are none, they are damaged or another store's."""
        with self._env.begin() as transaction:
            raw = transaction.get(_META_KEY, db=self._meta)
        return None if raw is None else self._parse_meta(raw)

    def _parse_meta(self, raw: bytes) -> Meta | None:
        body = raw[:-CHECK_BYTES]
        if len(body) != _META.size or _checked(_META_KEY, body) != raw:
            return None
        version, store_id, *counters = _META.unpack(body)
        if (version, store_id) != (VERSION, self.store_id):
            return None
        return Meta(*counters)

    def segments(self) -> dict[int, Geometry] | None:
        """Segments that hold or held blocks; None if an entry is damaged."""
        found = {}
        with self._env.begin() as transaction:
            for key, raw in transaction.cursor(db=self._segments):
                body = raw[:-CHECK_BYTES]
                if len(body) != _SEGMENT.size or _checked(key, body) != raw:
                    return None
                found[_SERIAL.unpack(key)[0]] = Geometry(*_SEGMENT.unpack(body))
        return found

    def blocks(self) -> tuple[list[bytes], list[bytes]] | None:
        """Keys, ascending, and values of all in clear; None if anything about them is wrong."""
        return self._entries(self._blocks, VALUE.size + CHECK_BYTES)

    def sealed_blocks(self) -> tuple[list[bytes], list[bytes]] | None:
        """The same of encrypted blocks, unopened."""
        return self._entries(self._sealed, SEALED_EXTRA_BYTES + VALUE.size + CHECK_BYTES)

    def _entries(self, db: Any, least_bytes: int) -> tuple[list[bytes], list[bytes]] | None:
        with self._env.begin() as transaction:
            count = transaction.stat(db)["entries"]
            # A damaged tree may lead in circles, so one more than there should be is enough.
            cursor = transaction.cursor(db=db)
            values = list(islice(cursor.iternext(keys=False, values=True), count + 1))
            cursor = transaction.cursor(db=db)
            keys = list(islice(cursor.iternext(keys=True, values=False), count + 1))
        if len(keys) != count or len(values) != count:
            return None
        if any(len(key) != _KEY.size for key in keys) or not _ascending(keys):
            return None
        digest, at = xxhash.xxh3_64_digest, -CHECK_BYTES
        checks = [digest(key + raw[:at]) for key, raw in zip(keys, values, strict=True)]
        if checks != [raw[at:] for raw in values]:
            return None
        is_whole = not values or min(map(len, values)) >= least_bytes
        return (keys, values) if is_whole else None

    def block(self, key: bytes) -> SlotRecord | None:
        """One entry; None if it is not there or damaged."""
        with self._env.begin() as transaction:
            table = self._blocks if self.vault is None else self._sealed
            raw = transaction.get(key, db=table)
        return None if raw is None else self.parse(key, raw)

    def parse(self, key: bytes, raw: bytes) -> SlotRecord | None:
        """None if it is damaged, another place's, or its key is not there."""
        if self.vault is None:
            return parse_value(key, raw)
        sealed = raw[:-CHECK_BYTES]
        if _checked(key, sealed) != raw:
            return None
        return parse_record(sealed, self.vault, self.place(*_KEY.unpack(key)))

    @property
    def used_ratio(self) -> float:
        """Share of the map that holds something."""
        with self._env.begin() as transaction:
            tables = (self._blocks, self._segments, self._meta, self._sealed)
            stats = [transaction.stat(db) for db in tables]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        used: float = pages * PAGE / self.map_bytes
        return used


def _ascending(keys: list[bytes]) -> bool:
    numbers = np.frombuffer(b"".join(keys), ">u8")
    return bool((numbers[1:] > numbers[:-1]).all())


def ends_too_early(path: Path) -> bool:
    """Whether the file lacks pages it claims to have: LMDB would die of a signal on them."""
    try:
        with (path / FILE).open("rb") as file:
            raw, size = file.read(2 * PAGE), file.seek(0, 2)
    except FileNotFoundError:
        return False
    claims = (
        [
            (transaction, last_page)
            for at in (0, PAGE)
            for magic, last_page, transaction in [_LMDB_META.unpack(raw[at : at + _LMDB_META.size])]
            if magic == _LMDB_MAGIC
        ]
        if len(raw) == 2 * PAGE
        else []
    )
    return not claims or (max(claims)[1] + 1) * PAGE > size
