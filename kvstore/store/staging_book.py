"""Device staging of sessions: memory that the daemon fills and one engine opens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, LimitReached, TierError
from kvstore.core.space import Space
from kvstore.mover import ARENA_OUT_LINK, Job, Moved
from kvstore.store.parts import Parts
from kvstore.store.sessions import Session
from kvstore.tiers.base import DeviceMemory, DeviceStaging, DeviceTier


class DeviceShare(NamedTuple):
    """What an engine opens: the arena itself (`in_place`), or staging of its session (`copy`)."""

    share: str
    memory: DeviceMemory


class StagingBook:
    """Opened on a worker, closed on one when the session is over and nothing is copied there."""

    def __init__(self, parts: Parts, tier: DeviceTier) -> None:
        self._parts, self._tier = parts, tier
        self._open: dict[int, tuple[DeviceStaging, DeviceShare]] = {}
        self._opening: dict[int, Completion[DeviceShare]] = {}
        self._running: Counter[int] = Counter()
        self.byte_count = 0

    def of(self, session: Session) -> DeviceStaging:
        known = self._open.get(session.id)
        if known is None:
            raise FailedPrecondition("the session has no device staging; call AttachDevice first")
        return known[0]

    def open(self, session: Session, wanted: int) -> Completion[DeviceShare]:
        """The session's staging, made when it is asked for the first time."""
        known, opening = self._open.get(session.id), self._opening.get(session.id)
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
        self._make(session, size, answer)
        return answer

    def _make(self, session: Session, size: int, answer: Completion[DeviceShare]) -> None:
        def work() -> tuple[DeviceStaging, DeviceMemory]:
            staging = self._tier.open_staging(size)
            try:
                return staging, staging.share()
            except TierError:
                staging.close()
                raise

        def done(moved: Moved) -> None:
            del self._opening[session.id]
            if moved.error is not None:
                self.byte_count -= size
                error = moved.error
                if isinstance(error, TierError):
                    error = FailedPrecondition(str(error))
                answer.fail(error)
                return
            staging, memory = moved.value
            self._open[session.id] = staging, DeviceShare("copy", memory)
            if session.closed:
                self._close(session.id)
            answer.resolve(DeviceShare("copy", memory))

        self.byte_count += size
        self._opening[session.id] = answer
        if not self._parts.mover.submit(Job(ARENA_OUT_LINK, "", session.id, 0, work, done)):
            self.byte_count -= size
            del self._opening[session.id]
            raise LimitReached("too many copies wait for the GPU; try again in a moment")

    def fill(
        self, session: Session, space: Space, blocks: list[tuple[int, int]],
        done: Callable[[Moved], None],
    ) -> None:  # fmt: skip
        """Copies (slot, offset in staging) each; `done` hears of the end, whatever it is."""
        staging, length = self.of(session), space.block_bytes
        self._running[session.id] += 1

        def ended(moved: Moved) -> None:
            self._running[session.id] -= 1
            if session.closed:
                self.session_closed(session)
            done(moved)

        def work() -> int:
            staging.fill(blocks, length)
            return len(blocks)

        size = len(blocks) * length
        job = Job(ARENA_OUT_LINK, space.tenant, session.id, size, work, ended)
        if not self._parts.mover.submit(job):
            self._parts.recorder.queue_rejected(ARENA_OUT_LINK, len(blocks))
            ended(Moved(None, LimitReached("the queue of copies is full"), 0.0))

    def session_closed(self, session: Session) -> None:
        if not self._running[session.id]:
            self._close(session.id)

    def _close(self, session_id: int) -> None:
        self._running.pop(session_id, None)
        known = self._open.pop(session_id, None)
        if known is None:
            return
        staging = known[0]

        def done(_: Moved) -> None:
            self.byte_count -= staging.length

        job = Job(ARENA_OUT_LINK, "", session_id, 0, staging.close, done)
        if not self._parts.mover.submit(job):
            staging.close()
            self.byte_count -= staging.length
