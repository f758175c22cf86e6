"""The CUDA driver's functions by ctypes: found when first asked for, checked at every call.

The driver is there wherever a GPU works, its functions keep their meaning under versioned names,
and it has all that is needed here; the runtime API's wrappers lack some of it (batched copies,
pointer attributes) and weigh hundreds of megabytes.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64
from ctypes import c_void_p as Handle
from typing import Any

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64
NOT_READY = 600
BATCH_VERSION = 12080

Address = c_uint64
Count = c_size_t


class CudaUnavailable(Exception):
    """There is no GPU to use here, and why."""


class CudaError(Exception):
    """A call of the driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed with {name} ({code})")
        self.call, self.code, self.name = call, code, name


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes that name an allocation to other processes."""

    _fields_ = (("reserved", c_ubyte * IPC_HANDLE_BYTES),)


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: how the sources of a batch may be read."""

    _fields_ = (
        ("source_order", c_int),
        ("source_type", c_int),
        ("source_id", c_int),
        ("target_type", c_int),
        ("target_id", c_int),
        ("flags", c_uint),
    )


# Name in the library: parameter types. CUdeviceptr is 64 bits, handles are pointers.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (Handle, c_int),
    "cuDeviceGetName": (Handle, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(Handle), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (Handle,),
    "cuCtxPushCurrent_v2": (Handle,),
    "cuCtxPopCurrent_v2": (POINTER(Handle),),
    "cuMemGetInfo_v2": (POINTER(Count), POINTER(Count)),
    "cuMemAlloc_v2": (POINTER(Address), Count),
    "cuMemFree_v2": (Address,),
    "cuMemGetAddressRange_v2": (POINTER(Address), POINTER(Count), Address),
    "cuMemHostRegister_v2": (Handle, Count, c_uint),
    "cuMemHostUnregister": (Handle,),
    "cuMemHostGetDevicePointer_v2": (POINTER(Address), Handle, c_uint),
    "cuPointerGetAttribute": (Handle, c_int, Address),
    "cuMemcpyAsync": (Address, Address, Count, Handle),
    "cuMemcpyPeerAsync": (Address, Handle, Address, Handle, Count, Handle),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuCtxEnablePeerAccess": (Handle, c_uint),
    "cuMemsetD8Async": (Address, c_ubyte, Count, Handle),
    "cuStreamCreateWithPriority": (POINTER(Handle), c_uint, c_int),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamDestroy_v2": (Handle,),
    "cuStreamSynchronize": (Handle,),
    "cuStreamWaitEvent": (Handle, Handle, c_uint),
    "cuStreamWriteValue64_v2": (Handle, Address, c_uint64, c_uint),
    "cuStreamWaitValue64_v2": (Handle, Address, c_uint64, c_uint),
    "cuEventCreate": (POINTER(Handle), c_uint),
    "cuEventDestroy_v2": (Handle,),
    "cuEventRecord": (Handle, Handle),
    "cuEventQuery": (Handle,),
    "cuEventSynchronize": (Handle,),
    "cuEventElapsedTime": (POINTER(c_float), Handle, Handle),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), Address),
    "cuIpcOpenMemHandle_v2": (POINTER(Address), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (Address,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(Handle), c_int, c_uint64, POINTER(c_int)),
}
BATCH_TYPES = (
    Handle, Handle, Handle, Count, POINTER(CopyAttributes), POINTER(Count), Count, POINTER(Count),
    Handle,
)  # fmt: skip


class Driver:
    """A loaded driver. Its functions may be called from any thread that has a context."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaUnavailable(f"the CUDA driver {library} cannot be loaded: {error}") from error
        self._functions: dict[str, Any] = {}
        self._batch: Any = None
        try:
            self.call("cuInit", 0)
            count = c_int()
            self.call("cuDeviceGetCount", byref(count))
        except CudaError as error:
            raise CudaUnavailable(f"the CUDA driver finds no GPU: {error}") from error
        self.device_count = count.value
        if not self.device_count:
            raise CudaUnavailable("the CUDA driver finds no GPU")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls one function; raises CudaError unless it succeeds."""
        code = self.ask(name, *arguments)
        if code:
            raise CudaError(name, code, self._name_of(code))

    def ask(self, name: str, *arguments: Any) -> int:
        """Calls one function; its CUresult."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._find(name)
        return int(function(*arguments))

    def copy_batch(self, *arguments: Any) -> None:
        """cuMemcpyBatchAsync in its CUDA 12.8 form; raises CudaError, also where it is missing."""
        if self._batch is None:
            self._batch = self._find_batch()
        code = self._batch(*arguments)
        if code:
            raise CudaError("cuMemcpyBatchAsync", code, self._name_of(code))

    @property
    def has_batch(self) -> bool:
        """Whether this driver copies in batches (CUDA 12.8 and newer)."""
        if self._batch is None:
            try:
                self._batch = self._find_batch()
            except CudaError:
                return False
        return True

    def _find(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaError(name, -1, "missing from this driver") from None
        function.argtypes, function.restype = FUNCTIONS[name], c_int
        return function

    def _find_batch(self) -> Any:
        found, status = Handle(), c_int()
        name = b"cuMemcpyBatchAsync"
        self.call("cuGetProcAddress_v2", name, byref(found), BATCH_VERSION, 0, byref(status))
        if not found.value:
            raise CudaError("cuMemcpyBatchAsync", -1, "missing from this driver")
        return ctypes.CFUNCTYPE(c_int, *BATCH_TYPES)(found.value)

    def _name_of(self, code: int) -> str:
        name = c_char_p()
        self.ask("cuGetErrorName", code, byref(name))
        return (name.value or b"an unknown error").decode()
