"""Device staging of sessions: memory that the daemon fills and one engine opens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, LimitReached, TierError
from kvstore.core.space import Space
from kvstore.mover import ARENA_OUT_LINK, PEER_LINK, Job, Moved
from kvstore.store.parts import Parts
from kvstore.store.sessions import Session
from kvstore.tiers.base import DeviceMemory, DeviceStaging, DeviceTier

Key = tuple[int, str]  # a session and the UUID of a GPU


class DeviceShare(NamedTuple):
    """What an engine opens: the arena itself (`in_place`), or staging of its session (`copy`)."""

    share: str
    memory: DeviceMemory


class StagingBook:
    """Opened on a worker, closed on one when the session is over and nothing is copied there.

    A session has one on each GPU that it attaches; they share `tiers.hbm.staging_bytes`.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._open: dict[Key, tuple[DeviceStaging, DeviceShare]] = {}
        self._opening: dict[Key, Completion[DeviceShare]] = {}
        self._running: Counter[Key] = Counter()
        self.byte_count = 0

    def of(self, session: Session, tier: DeviceTier) -> DeviceStaging:
        known = self._open.get((session.id, tier.device_uuid))
        if known is None:
            raise FailedPrecondition("the session has no device staging; call AttachDevice first")
        return known[0]

    def open(self, session: Session, tier: DeviceTier, wanted: int) -> Completion[DeviceShare]:
        """The session's staging on a GPU, made when it is asked for the first time."""
        key = session.id, tier.device_uuid
        known, opening = self._open.get(key), self._opening.get(key)
        if opening is not None:
            return opening
        answer: Completion[DeviceShare] = Completion()
        if known is not None:
            answer.resolve(known[1])
            return answer
        config = self._parts.config.tiers.hbm
        most = int(config.staging_bytes_per_session)
        size = min(wanted or most, most)
        if self.byte_count + size > config.staging_bytes:
            raise LimitReached(
                f"sessions have {self.byte_count} bytes of device staging; raise "
                "tiers.hbm.staging_bytes"
            )
        self._make(session, tier, size, answer)
        return answer

    def _make(
        self, session: Session, tier: DeviceTier, size: int, answer: Completion[DeviceShare]
    ) -> None:
        key = session.id, tier.device_uuid

        def work() -> tuple[DeviceStaging, DeviceMemory]:
            staging = tier.open_staging(size)
            try:
                return staging, staging.share()
            except TierError:
                staging.close()
                raise

        def done(moved: Moved) -> None:
            del self._opening[key]
            if moved.error is not None:
                self.byte_count -= size
                error = moved.error
                if isinstance(error, TierError):
                    error = FailedPrecondition(str(error))
                answer.fail(error)
                return
            staging, memory = moved.value
            self._open[key] = staging, DeviceShare("copy", memory)
            if session.closed:
                self._close(key)
            answer.resolve(DeviceShare("copy", memory))

        self.byte_count += size
        self._opening[key] = answer
        if not self._parts.mover.submit(Job(ARENA_OUT_LINK, "", session.id, 0, work, done)):
            self.byte_count -= size
            del self._opening[key]
            raise LimitReached("too many copies wait for the GPU; try again in a moment")

    def fill(
        self, session: Session, tier: DeviceTier, space: Space, blocks: list[tuple[int, int]],
        done: Callable[[Moved], None], peer: DeviceTier | None = None,
    ) -> None:  # fmt: skip
        """Copies (slot, offset in staging) each; `done` hears of the end, whatever it is.

        The slots are those of `tier`, or of a `peer` on another GPU.
        """
        staging, length = self.of(session, tier), space.block_bytes
        key, link = (session.id, tier.device_uuid), PEER_LINK if peer else ARENA_OUT_LINK
        self._running[key] += 1

        def ended(moved: Moved) -> None:
            self._running[key] -= 1
            if session.closed:
                self._end(key)
            done(moved)

        def work() -> int:
            staging.fill(blocks, length, peer)
            return len(blocks)

        job = Job(
            link, space.tenant, session.id, len(blocks) * length, work, ended,
            device=tier.device_uuid,
        )  # fmt: skip
        if not self._parts.mover.submit(job):
            self._parts.recorder.queue_rejected(link, len(blocks))
            ended(Moved(None, LimitReached("the queue of copies is full"), 0.0))

    def session_closed(self, session: Session) -> None:
        for key in [key for key in self._open if key[0] == session.id]:
            self._end(key)

    def _end(self, key: Key) -> None:
        if not self._running[key]:
            self._close(key)

    def _close(self, key: Key) -> None:
        self._running.pop(key, None)
        known = self._open.pop(key, None)
        if known is None:
            return
        staging = known[0]

        def done(_: Moved) -> None:
            self.byte_count -= staging.length

        job = Job(ARENA_OUT_LINK, "", key[0], 0, staging.close, done)
        if not self._parts.mover.submit(job):
            staging.close()
            self.byte_count -= staging.length
