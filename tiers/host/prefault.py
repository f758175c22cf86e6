"""Background thread that makes a pool's pages present and locks them, slice by slice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvstore.tiers.host import pages

_log = logging.getLogger("kvstore.tiers")
SLICE_BYTES = 4 << 20


class Prefaulter:
    """Touches memory regions (address, length) so that no copy pays for a first touch.

    Progress is readable from any thread. A kernel that refuses to populate or to lock ends that
    part; `prefault_problem` and `lock_problem` then say why and what to do, and so does the log.
    """

    def __init__(self, regions: Sequence[tuple[int, int]], populate: bool, lock: bool) -> None:
        self.prefaulted_bytes = 0
        self.locked_bytes = 0
        self.prefault_problem = ""
        self.lock_problem = ""
        self._regions = list(regions)
        self._populate, self._lock = populate, lock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvstore-prefault", daemon=True)

    @property
    def populates(self) -> bool:
        """Whether pages are to be made present, and nothing has kept them from it."""
        return self._populate

    @property
    def locks(self) -> bool:
        return self._lock

    def start(self) -> None:
        if self._populate or self._lock:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; afterwards the regions may be unmapped."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether all is done within the time; for tests and benchmarks."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        for address, length in self._regions:
            for start in range(0, length, SLICE_BYTES):
                if self._stop.is_set() or not (self._populate or self._lock):
                    return
                self._slice(address + start, min(SLICE_BYTES, length - start))

    def _slice(self, address: int, length: int) -> None:
        if self._populate:
            try:
                pages.populate(address, length)
                self.prefaulted_bytes += length
            except OSError as error:
                self._populate = False
                self.prefault_problem = (
                    f"prefaulting stopped after {self.prefaulted_bytes} bytes "
                    f"({error.strerror}); the first write to each page is slower"
                )
                _log.warning("%s", self.prefault_problem)
        if self._lock:
            try:
                pages.lock(address, length)
                self.locked_bytes += length
            except OSError as error:
                self._lock = False
                self.lock_problem = (
                    f"locking memory stopped after {self.locked_bytes} bytes "
                    f"({error.strerror}), so the rest may be swapped out; raise LimitMEMLOCK "
                    "(ulimit -l, --ulimit memlock=-1) or set tiers.host.mlock = false"
                )
                _log.warning("%s", self.lock_problem)
