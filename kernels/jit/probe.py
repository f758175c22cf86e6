"""Kernels of one operation, by which `interpreter.py` tests Triton's interpreter."""

import triton
import triton.language as tl

from kvstore.kernels.jit.e4m3 import e4m3_codes, e4m3_values


@triton.jit
def probe_cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def probe_add(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(z_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


@triton.jit
def probe_dot(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(z_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def probe_e4m3(x_ptr, code_ptr, back_ptr, N: tl.constexpr):
    """float32 to e4m3 and back, by arithmetic."""
    i = tl.arange(0, N)
    code = e4m3_codes(tl.load(x_ptr + i))
    tl.store(code_ptr + i, code)
    tl.store(back_ptr + i, e4m3_values(code.to(tl.int32)))
