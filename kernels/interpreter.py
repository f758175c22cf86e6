"""Triton's interpreter made faithful for bfloat16 and float8, for tests without a GPU.

The interpreter keeps bfloat16 as 16-bit integers: it casts by cutting bits off, and dots and
arithmetic work on the bit patterns, all without an error. `install` replaces those operations by
torch's own and then proves itself: where an interpreter works differently, that fails loudly.
Set TRITON_INTERPRET=1 before the first module with kernels is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kvstore.kernels.jit.probe import probe_add, probe_cast, probe_dot

TYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
CASTS = ("create_fp_trunc", "create_fp_ext", "create_fp_to_fp")
ARITHMETIC = {
    "create_fadd": torch.add,
    "create_fsub": torch.sub,
    "create_fmul": torch.mul,
    "create_fdiv": torch.div,
}
FP8_MAX = 448.0
MARK = "_kvstore_faithful"


class InterpreterChanged(RuntimeError):
    """Triton's interpreter does not do what `install` counts on."""


def install() -> None:
    """Replaces what is wrong and checks the result; once a process.

    Raises InterpreterChanged naming what differs.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise InterpreterChanged("the interpreter is off; set TRITON_INTERPRET=1 before imports")
    builder = interpreter.InterpreterBuilder
    if not getattr(builder, MARK, False):
        _replace(builder)
        setattr(builder, MARK, True)
    self_test()


def _replace(builder: Any) -> None:
    missing = [name for name in (*CASTS, *ARITHMETIC, "create_dot") if not hasattr(builder, name)]
    if missing:
        raise InterpreterChanged(
            f"triton {triton.__version__} has no {', '.join(missing)}; use 3.6 to 3.9"
        )
    for name in CASTS:
        setattr(builder, name, _cast(getattr(builder, name)))
    for name, operation in ARITHMETIC.items():
        setattr(builder, name, _arithmetic(getattr(builder, name), operation))
    builder.create_dot = _dot(builder.create_dot)


def _to_torch(handle: Any) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(handle.data))
    kind = handle.dtype.scalar
    return tensor.view(TYPES[kind]) if kind in NARROW else tensor


def _to_handle(tensor: torch.Tensor, kind: Any) -> Any:
    tensor = tensor.to(TYPES[kind])
    if kind in NARROW:
        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        data = tensor.view(bits).numpy().view(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(data, kind)
    return interpreter.TensorHandle(tensor.numpy(), kind)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, source: Any, kind: Any, *rest: Any, **named: Any) -> Any:
        have, want = source.dtype.scalar, kind.scalar
        if have not in TYPES or want not in TYPES or not (have in NARROW or want in NARROW):
            return original(self, source, kind, *rest, **named)
        values = _to_torch(source).to(torch.float32)
        if want == tl.float8e4nv:  # saturates, as the chip's conversion does
            values = values.clamp(-FP8_MAX, FP8_MAX)
        return _to_handle(values, want)

    return cast


def _arithmetic(original: Callable[..., Any], operation: Callable[..., Any]) -> Callable[..., Any]:
    def arithmetic(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        if a.dtype.scalar not in NARROW:
            return original(self, a, b, *rest, **named)
        result = operation(_to_torch(a).float(), _to_torch(b).float())
        return _to_handle(result, a.dtype.scalar)

    return arithmetic


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any, **named: Any) -> Any:
        if a.dtype.scalar not in NARROW and b.dtype.scalar not in NARROW:
            return original(self, a, b, d, *rest, **named)
        x, y = _to_torch(a).float().numpy(), _to_torch(b).float().numpy()
        product = (np.matmul(x, y) + d.data).astype(d.data.dtype)
        return interpreter.TensorHandle(product, d.dtype.scalar)

    return dot


def self_test() -> None:
    """Compares casts, sums and dots with torch's, bit for bit where they must be.

    Raises InterpreterChanged naming the first that differs.
    """
    wide = torch.linspace(-3.0, 3.0, 1024) ** 5
    for kind in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        narrow, back = torch.empty(1024, dtype=kind), torch.empty(1024)
        probe_cast[(1,)](wide, narrow, N=1024)
        probe_cast[(1,)](narrow, back, N=1024)
        _equal(f"float32 to {kind}", narrow.float(), wide.to(kind).float())
        _equal(f"{kind} to float32", back, narrow.float())
    a, b = wide.bfloat16(), wide.flip(0).bfloat16()
    total = torch.empty_like(a)
    probe_add[(1,)](a, b, total, N=1024)
    _equal("bfloat16 a + b", total.float(), (a + b).float())
    x, y, product = a.view(32, 32), b.view(32, 32), torch.empty(32, 32)
    probe_dot[(1,)](x, y, product, N=32)
    if not torch.allclose(product, x.float() @ y.float(), rtol=1e-5, atol=1e-3):
        raise InterpreterChanged(_says("a dot of bfloat16"))


def _equal(what: str, have: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(have, want):
        raise InterpreterChanged(_says(what))


def _says(what: str) -> str:
    return (
        f"in triton {triton.__version__}'s interpreter {what} differs from torch; "
        "kernels/interpreter.py must follow what changed"
    )
