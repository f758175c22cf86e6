"""Asks the kernel for short turns: the owner thread runs little at a time, and should run soon."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_NANOSECONDS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, 2 x util.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")


def take_short_turns() -> bool:
    """Gives the calling thread time slices of 0.1 ms; False where the kernel does not know how.

    Under the EEVDF scheduler (Linux 6.12 on) a shorter slice means an earlier turn and no larger
    share: engines that keep every core busy then delay a lookup by less than one of their slices.
    Needs no privilege; a policy or niceness that an operator chose stays.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NANOSECONDS, 0, 0, 0, 0
    )
    return bool(ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0) == 0)
