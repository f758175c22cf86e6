"""Staging segments: shared memory that one session writes and the daemon copies out of."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

from kvstore.core.errors import LimitReached

_PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Staging:
    """One segment: made and sized by the daemon, so that no client can cut it short under it.

    `view` is the daemon's mapping; `take_descriptor` gives the one descriptor away.
    """

    def __init__(self, byte_count: int) -> None:
        descriptor = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            # Blocks are allocated now: a page that cannot be had later would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, byte_count)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.view: memoryview | None = memoryview(mmap.mmap(descriptor, byte_count))
        except BaseException:
            os.close(descriptor)
            raise
        self.byte_count = byte_count
        self._descriptor: int | None = descriptor

    def take_descriptor(self) -> int:
        """The read-write descriptor; the caller closes it."""
        assert self._descriptor is not None, "a staging descriptor was taken twice"
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def close(self) -> None:
        """Lets the daemon's mapping go; it vanishes with the last view into it."""
        self.view = None
        if self._descriptor is not None:
            os.close(self.take_descriptor())


def _at_once(call: Callable[[], None]) -> None:
    call()


class StagingBudget:
    """Bytes of all staging segments together, kept under a limit.

    `elsewhere` runs what takes milliseconds off the calling thread: unmapping a large segment.
    """

    def __init__(
        self,
        default_bytes: int,
        session_bytes: int,
        total_bytes: int,
        elsewhere: Callable[[Callable[[], None]], object] = _at_once,
    ) -> None:
        self.used_bytes = 0
        self._elsewhere = elsewhere
        self._default_bytes = default_bytes
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes

    def take(self, wanted_bytes: int) -> int:
        """Size of a new segment: what is wanted (0: the default), cut to the session's limit.

        Raises LimitReached when the segments together would pass theirs.
        """
        wanted = min(wanted_bytes or self._default_bytes, self._session_bytes)
        size = -(-wanted // _PAGE) * _PAGE
        # A page is always to be had: operators' commands put nothing and must get in.
        if size > _PAGE and self.used_bytes + size > self._total_bytes:
            raise LimitReached(
                f"limits.staging_bytes ({self._total_bytes}) is used up by other sessions; "
                "ask for a smaller staging_bytes or raise the limit"
            )
        self.used_bytes += size
        return size

    def give_back(self, byte_count: int) -> None:
        self.used_bytes -= byte_count
        assert self.used_bytes >= 0, "staging bytes were given back twice"

    def releaser(self, staging: Staging) -> Callable[[], None]:
        """What the store calls when nothing reads `staging` any more."""

        def release() -> None:
            self._elsewhere(staging.close)
            self.give_back(staging.byte_count)

        return release
