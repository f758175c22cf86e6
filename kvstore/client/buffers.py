"""Callers' buffers as arrays of bytes: anything with the buffer protocol, and CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvstore.core.errors import InvalidRequest

_UINT8 = np.dtype(np.uint8)
Buffers = Any  # one buffer of all blocks, or a sequence of one a block
Blocks = Any  # the same, a function from a position to its buffer, or a BlockSource


def as_bytes(buffer: Any, what: str, writable: bool = False) -> np.ndarray:
    """The buffer's bytes as a flat array that shares its memory; raises InvalidRequest."""
    if type(buffer) is np.ndarray and buffer.ndim == 1 and buffer.dtype == _UINT8:
        flags = buffer.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return buffer
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        buffer = _tensor_bytes(buffer, torch, what)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidRequest(
            f"{what} is a {type(buffer).__name__}; pass an object with the buffer protocol"
        ) from None
    except ValueError:  # an array of a type that the protocol has no letter for
        view = memoryview(buffer.view(np.uint8))
    if not view.c_contiguous:
        raise InvalidRequest(f"{what} is not contiguous; pass a contiguous copy")
    if writable and view.readonly:
        raise InvalidRequest(f"{what} is read-only; pass a writable buffer")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _tensor_bytes(tensor: Any, torch: Any, what: str) -> np.ndarray:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidRequest(
            f"{what} is a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}; "
            "pass a contiguous tensor in host memory"
        )
    flat: np.ndarray = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


@runtime_checkable
class BlockSource(Protocol):
    """What a put takes blocks from, by their number in it."""

    def block(self, i: int) -> np.ndarray:
        """Bytes of the i-th block."""
        ...

    def read(self, i: int, target: np.ndarray) -> None:
        """Copies the i-th block and the next ones into the rows of `target`."""
        ...


class BlockBuffers:
    """One buffer a block, in order: `rows` of one array, separate `items`, or made on demand.

    Sizes are checked before anything is copied; only what `make` returns is checked when used.
    """

    __slots__ = ("block_bytes", "first", "items", "make", "rows")

    def __init__(
        self,
        buffers: Blocks,
        count: int,
        block_bytes: int,
        name: str,
        first: int = 0,
        writable: bool = False,
    ) -> None:
        self.block_bytes = block_bytes
        self.first = first  # position of the first block, for messages and `make`
        self.rows: np.ndarray | None = None
        self.items: list[np.ndarray] | None = None
        self.make: Callable[[int], Any] | None = None
        if _are_rows(buffers, count, block_bytes, writable):
            self.rows = buffers
        elif callable(buffers) and not _is_buffer(buffers):
            self.make = buffers
        elif (whole := _whole(buffers)) is not None:
            self._set_rows(as_bytes(whole, name, writable), count, name)
        else:
            self._set_items(buffers, count, name, writable)

    def _set_rows(self, flat: np.ndarray, count: int, name: str) -> None:
        want = count * self.block_bytes
        if len(flat) != want:
            raise InvalidRequest(
                f"{name} holds {len(flat)} bytes; {count} blocks of {self.block_bytes} are {want}"
            )
        self.rows = flat.reshape(count, self.block_bytes)

    def _set_items(self, buffers: Sequence[Any], count: int, name: str, writable: bool) -> None:
        if len(buffers) != count:
            raise InvalidRequest(f"{name} holds {len(buffers)} buffers for {count} blocks")
        items = [as_bytes(b, f"{name}[{i}]", writable) for i, b in enumerate(buffers)]
        for i, item in enumerate(items):
            self._check_size(item, f"{name}[{i}]", self.first + i)
        self.items = items

    def _check_size(self, item: np.ndarray, name: str, position: int) -> None:
        if len(item) != self.block_bytes:
            raise InvalidRequest(
                f"{name} (block {position}) holds {len(item)} bytes; a block of this space is "
                f"{self.block_bytes}"
            )

    def block(self, i: int) -> np.ndarray:
        """Bytes of the i-th block."""
        if self.rows is not None:
            row: np.ndarray = self.rows[i]
            return row
        if self.items is not None:
            return self.items[i]
        assert self.make is not None
        item = as_bytes(self.make(self.first + i), "what blocks() made")
        self._check_size(item, "what blocks() made", self.first + i)
        return item

    def write(self, i: int, source: np.ndarray) -> None:
        """Copies the rows of `source` into the i-th block and the next ones."""
        if self.rows is not None:
            np.copyto(self.rows[i : i + len(source)], source)
            return
        for row in source:
            np.copyto(self.block(i), row)
            i += 1

    def read(self, i: int, target: np.ndarray) -> None:
        """Copies the i-th block and the next ones into the rows of `target`."""
        if self.rows is not None:
            np.copyto(target, self.rows[i : i + len(target)])
            return
        for row in target:
            np.copyto(row, self.block(i))
            i += 1


def _are_rows(buffers: Any, count: int, block_bytes: int, writable: bool) -> bool:
    """Whether `buffers` is an array that needs no turning over: the usual case, told quickly."""
    if type(buffers) is not np.ndarray or buffers.shape != (count, block_bytes):
        return False
    flags = buffers.flags
    return buffers.dtype == _UINT8 and flags.c_contiguous and (flags.writeable or not writable)


def _is_buffer(buffers: Any) -> bool:
    try:
        memoryview(buffers)
    except (TypeError, ValueError):
        return False
    return True


def _whole(buffers: Any) -> Any | None:
    """`buffers` if it is one contiguous buffer of all blocks, else None."""
    if isinstance(buffers, list | tuple):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffers, torch.Tensor):
        return buffers if buffers.is_contiguous() else None
    if isinstance(buffers, np.ndarray):
        return buffers if buffers.flags.c_contiguous else None
    return buffers if _is_buffer(buffers) else None


def rows_at(data: np.ndarray, offset: int, count: int, stride: int, width: int) -> np.ndarray:
    """`count` rows of `width` bytes, `stride` apart, of the flat `data` from `offset` on."""
    rows: np.ndarray = data[offset : offset + count * stride].reshape(count, stride)[:, :width]
    return rows
