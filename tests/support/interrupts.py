"""KeyboardInterrupt where CPython lets one come: at a chosen point, or by a timer's signal."""

from __future__ import annotations

import dis
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# After these CPython looks for signals (3.11 to 3.13), and nowhere else.
_POINTS = frozenset(
    dis.opmap[name]
    for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD")
    if name in dis.opmap
)


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th point of the calling thread at which one can come.

    `point` says where that was, and is empty if the call was over before.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.point = ""
        self._last: dict[int, int] = {}

    def run(self, call: Callable[[], Any]) -> Any:
        """What `call` answers; None if it was interrupted."""
        sys.settrace(self._enter)
        try:
            return call()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.point or frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode" or self.point:
            return self._step
        code = frame.f_code.co_code
        last = self._last.get(id(frame))
        self._last[id(frame)] = code[frame.f_lasti]
        if last in _POINTS:
            self.left -= 1
            if self.left == 0:
                name = frame.f_code.co_filename.rsplit("/", 1)[-1]
                self.point = f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}"
                raise KeyboardInterrupt
        return self._step


class Alarm:
    """Raises KeyboardInterrupt `count` times, first after `seconds`, then every `again`; in the
    main thread, by a signal of its own. Whoever catches one sets `left` to 0 in the very next
    step."""

    def __init__(self) -> None:
        self.left = self.raised = 0
        self._before = signal.signal(signal.SIGUSR1, self._ring)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.left:
            self.left -= 1
            self.raised += 1
            raise KeyboardInterrupt

    def interrupt(
        self, call: Callable[[], Any], seconds: float, count: int = 1, again: float = 0.0
    ) -> Any:
        """What `call` answers; None if it was interrupted."""
        answer = None
        ringer = threading.Thread(target=self._send, args=(seconds, count, again), daemon=True)
        ringer.start()
        try:
            self.left = count
            answer = call()
            self.left = 0
        except KeyboardInterrupt:
            self.left = 0
        ringer.join()
        return answer

    def _send(self, seconds: float, count: int, again: float) -> None:
        for _ in range(count):
            time.sleep(seconds)
            if not self.left:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            seconds = again

    def close(self) -> None:
        self.left = 0
        signal.signal(signal.SIGUSR1, self._before)
