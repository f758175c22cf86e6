"""`Gate`: one thread waits until another lets it through; an interrupt cannot leave it shut."""

from __future__ import annotations

import threading


class Gate:
    """Shut until `open`; the thread that gets through shuts it again.

    What threading.Event is made of takes a lock in Python code: a KeyboardInterrupt that comes
    between two lines of it leaves the lock taken, and every other thread waits for ever. Here is
    nothing but the lock that is waited for, which any thread may release.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Lets one waiting thread through, or else the next."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # it was open

    def wait(self, seconds: float) -> bool:
        """Whether it was opened in time."""
        return self._lock.acquire(timeout=max(seconds, 0.0))
