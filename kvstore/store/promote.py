"""Promote: blocks that lie on disk only come into the host tier, checked before anybody sees them.

slots in host -> read on a worker, several blocks at a time -> checksum right? -> header -> READY
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.errors import TierError
from kvstore.core.keys import chain_keys
from kvstore.core.space import Space
from kvstore.mover import READ_LINK, Job, Moved
from kvstore.policies.index import Run, Span
from kvstore.store.evict import Remover
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.room import HostRoom
from kvstore.tiers.base import BlockHeader

PIECE_BYTES = 4 << 20
PIECE_BLOCKS = 128  # of one turn that publishes them

# Hears (first block, blocks readable now, blocks behind them that are not, kind, reason).
Heard = Callable[[int, int, int, str, str], None]


class Begun(NamedTuple):
    """How far a promotion got: the block in its run where it ended, its pieces, and why no more."""

    stop: int
    pieces: int
    kind: str = ""
    reason: str = ""


class Piece:
    """Blocks [first, first + count) of a chain, being read together.

    `sources` and `targets` are places [block][shard]; `expected` are checksums in that order.
    `keys` are those of its blocks, behind that of the block before them.
    """

    __slots__ = (
        "anchor", "epoch", "expected", "first", "heard", "keys", "reader", "sources", "targets"
    )  # fmt: skip

    def __init__(self, first: int, epoch: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self.first = first
        self.epoch = epoch
        self.anchor: Any = None
        self.reader = 0
        self.sources = sources
        self.targets = targets
        self.heard: list[Heard] = []
        self.expected: list[bytes] = []
        self.keys: list[bytes] = []

    @property
    def count(self) -> int:
        return len(self.sources)

    def tell(self, readable: int, kind: str = "", reason: str = "") -> None:
        heard, self.heard = self.heard, []
        for each in heard:
            each(self.first, readable, self.count - readable, kind, reason)


class Promoter:
    """Brings blocks from disk into host, each once however many ask for it.

    `taken(pool)` hears that a host pool took blocks in.
    """

    def __init__(
        self, parts: Parts, remover: Remover, room: HostRoom, taken: Callable[[str], None]
    ) -> None:
        self._parts = parts
        self._taken = taken
        self._remover = remover
        self._room = room
        self._pieces: dict[int, Piece] = {}  # by the disk place of each block's first shard
        self._running = 0
        self._progress = 0.0

    @property
    def stalled(self) -> bool:
        """Whether the disk has not answered for so long that nobody should wait for it."""
        late = self._parts.clock.now() - self._progress
        return self._running > 0 and late > self._parts.config.tiers.disk.read_timeout_seconds

    @property
    def silence(self) -> str:
        """That the disk does not answer, in one sentence; empty while it does."""
        timeout = self._parts.config.tiers.disk.read_timeout_seconds
        return f"the disk has not answered for {timeout} s" if self.stalled else ""

    def tick(self) -> None:
        """Lets nobody wait for a disk that does not answer; late answers still count."""
        reason = self.silence
        for piece in dict.fromkeys(self._pieces.values() if reason else ()):
            piece.tell(0, "timeout", reason)

    def piece_of(self, place: int) -> Piece | None:
        """The piece under way that holds the block with this disk place."""
        return self._pieces.get(place)

    def piece_blocks(self, space: Space) -> int:
        """Blocks of a space that are read together."""
        return max(1, min(PIECE_BYTES // (space.block_bytes * space.shard_count), PIECE_BLOCKS))

    def begin(self, run: Run, start: int, stop: int, session: int, heard: Heard) -> Begun:
        """Begins to read blocks [start, stop) of `run`, on disk only, as far as it goes."""
        space, index = run.root.space, self._parts.index
        index.begin_move(run, start, stop, HOST)
        slots = self._room.take(space, (stop - start) * space.shard_count)
        count, spare = divmod(len(slots), space.shard_count)
        if spare:
            self._parts.retired[HOST].retire(slots[-spare:])
        end = start + count
        if end < stop:
            index.give_up_move(run, end, stop, HOST)
        step = self.piece_blocks(space)
        targets = np.array(slots[: count * space.shard_count], np.int64)
        targets = targets.reshape(count, space.shard_count)
        keys = self._keys(run, start, end)
        for at in range(start, end, step):
            past = min(at + step, end)
            piece = Piece(
                run.first + at,
                space.epoch,
                index.places_grid(run, at, past)[:, DISK].copy(),
                targets[at - start : past - start],
            )
            piece.keys = keys[at - start : past - start + 1]
            if not self._submit(piece, run, at, session):
                self._parts.retired[HOST].retire(targets[at - start :].ravel().tolist())
                index.give_up_move(run, at, end, HOST)
                return Begun(at, (at - start) // step, "queue", "the queue of disk reads is full")
            piece.heard.append(heard)
        pieces = -(-count // step)
        if end < stop:
            return Begun(end, pieces, "room", "there is no room in the host tier")
        return Begun(end, pieces)

    def _keys(self, run: Run, start: int, stop: int) -> list[bytes]:
        """Keys of the blocks [start, stop), behind that of the block before them."""
        before = self._parts.index.key_before(run, start)
        return [before, *chain_keys(before, [run.symbol(i) for i in range(start, stop)])]

    def _submit(self, piece: Piece, run: Run, at: int, session: int) -> bool:
        parts, space = self._parts, run.root.space
        disk, host, length = parts.disk, parts.host, space.block_bytes
        assert disk is not None
        sources = piece.sources.ravel().tolist()
        piece.expected = [disk.checksum(place) for place in sources]
        targets = piece.targets.ravel().tolist()

        def read() -> list[bytes | None]:
            items = [(s, host.target(t)) for s, t in zip(sources, targets, strict=True)]
            return disk.read_many(items, length)

        job = Job(
            READ_LINK, space.tenant, session, len(sources) * length, read,
            lambda moved: self._arrived(piece, moved), is_measured=False,
        )  # fmt: skip
        if not parts.mover.submit(job):
            parts.recorder.queue_rejected(READ_LINK, piece.count)
            return False
        piece.reader = parts.start_reading()
        piece.anchor = parts.index.anchor(run, at + piece.count, piece.reader)
        self._pieces.update(dict.fromkeys(piece.sources[:, 0].tolist(), piece))
        if not self._running:
            self._progress = parts.clock.now()
        self._running += 1
        return True

    def _arrived(self, piece: Piece, moved: Moved) -> None:
        parts = self._parts
        self._running -= 1
        self._progress = parts.clock.now()
        for place in piece.sources[:, 0].tolist():
            del self._pieces[place]
        path = parts.moving_path(piece.anchor, piece.reader, piece.first)
        readable, kind, reason = self._take_in(piece, path, moved)
        parts.index.unanchor(piece.anchor)
        parts.stop_reading(piece.reader)
        piece.tell(readable, kind, reason)
        if kind in ("corrupt", "failed"):
            self._drop_bad(piece, path, readable)
        if path:
            self._taken(path[0].run.root.space.pool)

    def _take_in(self, piece: Piece, path: list[Span], moved: Moved) -> tuple[int, str, str]:
        """Makes READY what arrived whole; answers with how many blocks, and why not all."""
        parts, retired = self._parts, self._parts.retired[HOST]
        if not self._may_come_in(piece):
            for run, start, stop in path:
                parts.index.give_up_move(run, start, stop, HOST)
            retired.retire(piece.targets.ravel().tolist())
            return 0, "lost", "the blocks were cleared or dropped meanwhile"
        sums = moved.value if moved.error is None else [None] * piece.sources.size
        right = np.array([a == b for a, b in zip(sums, piece.expected, strict=True)])
        whole = right.reshape(piece.count, -1).all(axis=1)
        good = piece.count if whole.all() else int(whole.argmin())
        done = 0
        for span in path:
            take = min(span.stop - span.start, good - done)
            if take > 0 and not self._publish(piece, span, done, take):
                good = done
            keep = max(0, min(take, good - done))
            if keep < span.stop - span.start:
                parts.index.give_up_move(span.run, span.start + keep, span.stop, HOST)
            done += span.stop - span.start
        if good:
            space = path[0].run.root.space
            byte_count = good * space.shard_count * space.block_bytes
            parts.recorder.copied(READ_LINK, byte_count, moved.seconds)
            parts.recorder.promoted(good, byte_count)
        if good == piece.count:
            return good, "", ""
        retired.retire(piece.targets[good:].ravel().tolist())
        if None in sums[good * piece.sources.shape[1] :]:
            return good, "failed", f"the disk did not give them: {moved.error or 'a read error'}"
        return good, "corrupt", "they do not match their checksums and were dropped"

    def _may_come_in(self, piece: Piece) -> bool:
        """Whether the blocks are still wanted: an older epoch's never come in again."""
        run = piece.anchor.run
        if run is None:
            return False
        space = run.root.space
        return space.epoch == piece.epoch and not space.closing

    def _publish(self, piece: Piece, span: Span, at: int, count: int) -> bool:
        """Blocks of the piece from `at` on, `count` of them, are the first of `span`."""
        parts, (run, start, _) = self._parts, span
        space, shards = run.root.space, run.root.space.shard_count
        targets = piece.targets[at : at + count]
        symbols = [run.symbol(i) for i in range(start, start + count)]
        parents = piece.keys[at : at + count + 1]
        parent_key, *keys = parents
        blocks = [
            (
                int(targets[n, shard]),
                BlockHeader(
                    space.id, run.root.digest, key, parents[n], run.first + start + n, shard,
                    space.epoch, space.block_bytes, symbols[n],
                ),
                piece.expected[(at + n) * shards + shard],
            )
            for n, key in enumerate(keys)
            for shard in range(shards)
        ]  # fmt: skip
        try:
            parts.host.commit(blocks)
        except TierError:
            return False
        parts.index.end_move(run, start, HOST, targets)
        parts.events.stored(
            space, parts.tier_names[HOST], b"".join(keys), parent_key, b"".join(symbols)
        )
        return True

    def _drop_bad(self, piece: Piece, path: list[Span], readable: int) -> None:
        """The first block that could not be read leaves the disk; the others were not to blame."""
        position = piece.first + readable
        for run, start, stop in path:
            if run.first + start <= position < run.first + stop and run.alive:
                i = position - run.first
                places = self._parts.index.places_grid(run, i, i + 1)[0, DISK].tolist()
                if places == piece.sources[readable].tolist():
                    self._remover.lose_copy(run, i, DISK, "corrupt")
                return
