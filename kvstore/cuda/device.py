"""One GPU: its memory, streams and events, through its primary context, which torch uses too."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvstore.cuda.driver import (
    IPC_HANDLE_BYTES,
    NOT_READY,
    CopyAttributes,
    CudaError,
    CudaUnavailable,
    Driver,
    IpcHandle,
)

STREAM_NON_BLOCKING = 1
EVENT_NO_TIMING = 2
REGISTER_PORTABLE, REGISTER_MAPPED, REGISTER_READ_ONLY = 1, 2, 8
LAZY_PEER_ACCESS = 1
IS_LEGACY_IPC_CAPABLE = 10
READ_ONLY_REGISTER_SUPPORTED = 113
PEER_ACCESS_ENABLED = 704
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3


class Shared(NamedTuple):
    """A range of device memory as another process finds it: `handle` opens the allocation."""

    handle: bytes
    offset: int
    length: int


class Event:
    """A point in a stream's work."""

    def __init__(self, device: Device, timing: bool = False) -> None:
        self.device = device
        self._handle = c_void_p()
        device.call("cuEventCreate", byref(self._handle), 0 if timing else EVENT_NO_TIMING)

    def done(self) -> bool:
        """Whether all work before the event has ended. Raises CudaError if that work failed."""
        code = self.device.ask("cuEventQuery", self._handle)
        if code not in (0, NOT_READY):
            raise CudaError("cuEventQuery", code, "an error of earlier work")
        return code == 0

    def synchronize(self) -> None:
        """Waits until all work before the event has ended; releases the GIL."""
        self.device.call("cuEventSynchronize", self._handle)

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two timed events that are done."""
        milliseconds = c_float()
        self.device.call("cuEventElapsedTime", byref(milliseconds), earlier._handle, self._handle)
        return milliseconds.value / 1e3

    def __del__(self) -> None:
        if self._handle.value:
            self.device.destroy("cuEventDestroy_v2", self._handle)

    @property
    def handle(self) -> c_void_p:
        return self._handle


class Stream:
    """Work that a device does in order, beside that of other streams.

    `handle` is its CUstream; with `external` it is somebody else's and stays theirs.
    """

    def __init__(self, device: Device, low_priority: bool = False, external: int = 0) -> None:
        self._device, self._owned = device, not external
        self.handle = c_void_p(external or None)
        if not external:
            priority = device.least_priority if low_priority else 0
            device.call(
                "cuStreamCreateWithPriority", byref(self.handle), STREAM_NON_BLOCKING, priority
            )

    def copy(self, target: int, source: int, length: int) -> None:
        """Copies between any two addresses; host memory that is not registered makes it wait."""
        self._device.call("cuMemcpyAsync", target, source, length, self.handle)

    def copy_from(self, owner: Device, target: int, source: int, length: int) -> None:
        """Copies from another GPU's memory to this one's: over their own link if there is one."""
        own, other = self._device.context, owner.context
        self._device.call("cuMemcpyPeerAsync", target, own, source, other, length, self.handle)

    def copy_many(
        self, targets: np.ndarray, sources: np.ndarray, lengths: np.ndarray, stable: bool = False
    ) -> None:
        """Copies many ranges (uint64 arrays) in one call, in no particular order.

        `stable` promises that the sources do not change until the copies end, and were there
        before anything in this stream; otherwise they are read in stream order.
        """
        if not len(targets):
            return
        if not self._device.driver.has_batch:
            for target, source, length in zip(targets, sources, lengths, strict=True):
                self.copy(int(target), int(source), int(length))
            return
        attributes = CopyAttributes(source_order=IN_ANY_ORDER if stable else IN_STREAM_ORDER)
        arrays = [np.ascontiguousarray(a, np.uint64) for a in (targets, sources, lengths)]
        self._device.enter()
        self._device.driver.copy_batch(
            *(a.ctypes.data for a in arrays), len(targets), byref(attributes),
            byref(c_size_t(0)), 1, byref(c_size_t(0)), self.handle,
        )  # fmt: skip

    def fill(self, target: int, value: int, length: int) -> None:
        self._device.call("cuMemsetD8Async", target, value, length, self.handle)

    def record(self, timing: bool = False) -> Event:
        """An event after all that was asked for so far."""
        event = Event(self._device, timing)
        self._device.call("cuEventRecord", event.handle, self.handle)
        return event

    def wait(self, event: Event) -> None:
        """Lets later work of this stream begin after the event."""
        self._device.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def write_value(self, target: int, value: int) -> None:
        """Writes a 64-bit value after all that was asked for so far."""
        self._device.call("cuStreamWriteValue64_v2", self.handle, target, value, 0)

    def wait_value(self, source: int, at_least: int) -> None:
        """Lets later work begin once the 64-bit value there is at least this."""
        self._device.call("cuStreamWaitValue64_v2", self.handle, source, at_least, 0)

    def synchronize(self) -> None:
        """Waits for all that was asked for; releases the GIL."""
        self._device.call("cuStreamSynchronize", self.handle)

    def __del__(self) -> None:
        if self._owned and self.handle.value:
            self._device.destroy("cuStreamDestroy_v2", self.handle)


class Device:
    """A GPU, named by `uuid` ("GPU-…", as nvidia-smi -L prints) or by its `ordinal`.

    Raises CudaUnavailable where there is no driver or no such GPU.
    """

    kind = "cuda"

    def __init__(self, uuid: str = "", ordinal: int = 0, driver: Driver | None = None) -> None:
        self.driver = driver or Driver()
        self._context = c_void_p()
        self.ordinal = self._find(uuid) if uuid else ordinal
        if not 0 <= self.ordinal < self.driver.device_count:
            raise CudaUnavailable(f"there is no GPU {ordinal}; this machine's are numbered from 0")
        self._number = self._number_of(self.ordinal)
        self.uuid = self._uuid_of(self.ordinal)
        self.driver.call("cuDevicePrimaryCtxRetain", byref(self._context), self._number)
        least, greatest = c_int(), c_int()
        self.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        self.least_priority = least.value

    def enter(self) -> None:
        """Makes this device's context the calling thread's."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *arguments: Any) -> None:
        self.enter()
        self.driver.call(name, *arguments)

    def ask(self, name: str, *arguments: Any) -> int:
        self.driver.ask("cuCtxSetCurrent", self._context)
        return self.driver.ask(name, *arguments)

    def destroy(self, name: str, handle: c_void_p) -> None:
        """Ends an object at any moment: a collector may run between `enter` and another call."""
        if not self.driver.ask("cuCtxPushCurrent_v2", self._context):
            self.driver.ask(name, handle)
            self.driver.ask("cuCtxPopCurrent_v2", byref(c_void_p()))

    @property
    def context(self) -> c_void_p:
        """The primary context, which copies between GPUs name."""
        return self._context

    def reach(self, other: Device) -> bool:
        """Lets copies from another GPU go straight here; False where they go through host."""
        may = c_int()
        self.call("cuDeviceCanAccessPeer", byref(may), self._number, other._number)
        if not may.value:
            return False
        code = self.ask("cuCtxEnablePeerAccess", other.context, 0)
        return code in (0, PEER_ACCESS_ENABLED)

    def allocate(self, length: int) -> int:
        """Address of new device memory, aligned to 256 bytes or more, of any content."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), length)
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def register(self, address: int, length: int, read_only: bool = False) -> None:
        """Pins host memory for copies at full speed; whole pages. Slow: 0.1 s a GB and more."""
        flags = REGISTER_PORTABLE | (REGISTER_READ_ONLY if read_only else 0)
        self.call("cuMemHostRegister_v2", address, length, flags)

    def unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    @property
    def registers_read_only(self) -> bool:
        """Whether memory mapped without the right to write can be registered."""
        value = c_int()
        number = READ_ONLY_REGISTER_SUPPORTED
        self.call("cuDeviceGetAttribute", byref(value), number, self._number)
        return bool(value.value)

    def stream(self, low_priority: bool = False) -> Stream:
        return Stream(self, low_priority)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def share(self, address: int, length: int) -> Shared:
        """Names a range to other processes. Raises CudaError where its memory cannot be shared.

        A handle opens a whole allocation at its base, so the range's offset goes with it.
        """
        capable = c_int()
        self.call("cuPointerGetAttribute", byref(capable), IS_LEGACY_IPC_CAPABLE, address)
        if not capable.value:
            raise CudaError(
                "sharing device memory", -1,
                "memory of a virtual-memory allocator (expandable segments or sleep mode); let "
                "the engine use plain cudaMalloc",
            )  # fmt: skip
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        offset = address - base.value
        if offset + length > size.value:
            raise CudaError("sharing device memory", -1, "a range beyond its allocation")
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), base.value)
        return Shared(bytes(handle), offset, length)

    def open(self, shared: Shared) -> int:
        """Address of a range that another process shares; `close` ends it."""
        if len(shared.handle) != IPC_HANDLE_BYTES:
            raise ValueError(
                f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(shared.handle)}"
            )
        base = c_uint64()
        handle = IpcHandle.from_buffer_copy(shared.handle)
        self.call("cuIpcOpenMemHandle_v2", byref(base), handle, LAZY_PEER_ACCESS)
        size = c_size_t()
        self.call("cuMemGetAddressRange_v2", None, byref(size), base.value)
        if shared.offset < 0 or shared.offset + shared.length > size.value:
            self.call("cuIpcCloseMemHandle", base.value)
            raise ValueError("the shared range lies outside its allocation")
        return base.value + shared.offset

    def close(self, address: int, shared: Shared) -> None:
        self.call("cuIpcCloseMemHandle", address - shared.offset)

    def _number_of(self, ordinal: int) -> int:
        number = c_int()
        self.driver.call("cuDeviceGet", byref(number), ordinal)
        return number.value

    def _uuid_of(self, ordinal: int) -> str:
        raw = ctypes.create_string_buffer(16)
        self.driver.call("cuDeviceGetUuid_v2", raw, self._number_of(ordinal))
        text = raw.raw.hex()
        bounds = (0, 8, 12, 16, 20, 32)
        return "GPU-" + "-".join(text[a:b] for a, b in pairwise(bounds))

    def _find(self, uuid: str) -> int:
        known = [self._uuid_of(ordinal) for ordinal in range(self.driver.device_count)]
        if uuid not in known:
            raise CudaUnavailable(f"there is no GPU {uuid}; this machine has {', '.join(known)}")
        return known.index(uuid)
