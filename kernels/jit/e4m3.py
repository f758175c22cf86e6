"""float8 e4m3fn by whole-number arithmetic, for chips that have no instruction for it (sm_80)."""

import triton
import triton.language as tl

# 2**120: what the biases of float32 (127) and e4m3 (7) differ by.
_BIAS = tl.constexpr(1.329227995784916e36)


@triton.jit
def e4m3_values(bits):
    """Codes in the low 8 bits of int32 `bits` as float32, exact; the codes of NaN become 480."""
    moved = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    return moved.to(tl.float32, bitcast=True) * _BIAS


@triton.jit
def e4m3_codes(x):
    """Codes (int8) of float32 `x`, finite, to the nearest, ties to even; beyond 448 it is 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Seven bits stay: half of what goes is added, less one where the last that stays is even.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 codes count steps of 2**-9; the sum with 1.5 * 2**23 has the last bit 1.
    small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)
