"""Growth: more memory for a pool that serves, on a thread of its own, all of it or none."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from kvstore.core.machine import LocalMachine
from kvstore.core.sizes import format_bytes
from kvstore.tiers.host import files, pages
from kvstore.tiers.host.backing import CELL_BYTES, Backing
from kvstore.tiers.host.files import FileSizes, PoolFiles

SPARE_BYTES = 64 << 20
"""Left to others: who asks for the last page of a control group is killed, not refused."""
CELLS_A_LOOK = 16


class Growth:
    """Has `size_bytes` of a pool allocated and, as its start does, made present and locked.

    `is_over` when it has ended; then `cells` are those that have memory now, and `problem` says why
    not all, if it could not be had. Until the owner takes them into use, nothing of them is handed
    out, and nobody sees them.
    """

    def __init__(
        self,
        made: PoolFiles,
        sizes: FileSizes,
        backing: Backing,
        address: int,
        size_bytes: int,
        populate: bool,
        lock: bool,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self.problem = ""
        self.cells: list[int] = []
        self.prefaulted_bytes = self.locked_bytes = 0
        self._files, self._sizes, self._backing, self._address = made, sizes, backing, address
        self._populate, self._lock = populate, lock
        self._available_bytes = available_bytes or LocalMachine().available_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-growth", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ends it where it is, within a cell's time."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except OSError as error:
            reason = error.strerror or str(error)
            self.problem = f"memory for it cannot be had ({reason}); free some, then reload again"

    def _work(self) -> None:
        for number, cell in enumerate(self._backing.missing(self.size_bytes)):
            if self._stop.is_set():
                self.problem = "another size was asked for"
            elif number % CELLS_A_LOOK == 0:
                self.problem = self._shortage()
            if self.problem or not self._one(cell):
                return
        files.allocate_books(self._files, self._sizes, self.size_bytes)

    def _one(self, cell: int) -> bool:
        """A cell of memory; False where it cannot be locked."""
        start, stop = self._backing.range_of(cell)
        self._backing.back(cell)
        if self._populate:
            try:
                pages.populate(self._address + start, stop - start)
                self.prefaulted_bytes += stop - start
            except OSError as error:
                if error.errno != errno.EINVAL:  # an old kernel does not know how
                    raise
        if self._lock:
            try:
                pages.lock(self._address + start, stop - start)
                self.locked_bytes += stop - start
            except OSError as error:
                self.problem = (
                    f"it cannot be locked ({error.strerror}); raise LimitMEMLOCK (ulimit -l) or "
                    "set tiers.host.mlock = false and start again"
                )
                return False
        self.cells.append(cell)
        return True

    def _shortage(self) -> str:
        available = self._available_bytes()
        if available >= min(CELLS_A_LOOK * CELL_BYTES, self.size_bytes) + SPARE_BYTES:
            return ""
        return (
            f"only {format_bytes(available)} of memory are left to the machine or its control "
            "group; free some or raise the limit, then reload again"
        )
