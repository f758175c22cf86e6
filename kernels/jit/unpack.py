"""Codes to values inside registers: what lets attention read quantised blocks in place.

Pools of codes are read as 16-bit words, since tensor cores take 16-bit elements from shared memory:
a word holds 2 channels (8-bit codes) or 4 (4-bit codes), and `PART` says which one is wanted. Each
part of a row then is a matrix of its own, multiplied on its own.

`ASM` uses bit tricks on pairs of words, three to six instructions for two values, instead of
conversions, which run at a fraction of that rate: 0x4300 | x is 128 + x in bfloat16, 0x6400 | x is
1024 + x in float16. Without `ASM` (AMD, Triton's interpreter) the same values come by conversion.
4-bit codes come out less 8, since products of small numbers round least.
"""

import triton
import triton.language as tl

from kvstore.kernels.jit.e4m3 import e4m3_values

# Bodies of functions of x, two words, to y, two values. The code is in the low bits of each word,
# in fp8_bh in its high byte, or in bits 4 to 7 ("high").
_BODIES = {
    # (128 + low seven bits) - (128, or 256 where the sign bit is set)
    ("int8_th", "bf16"): """
        lop3.b32 a, x, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 b, x, 0x00800080, 0x43004300, 0xEA;
        mov.b32 c, 0xBF80BF80;
        fma.rn.bf16x2 y, b, c, a;""",
    # (1024 + (code + 128)) - 1152
    ("int8_th", "fp16"): """
        lop3.b32 a, x, 0x00FF00FF, 0x64806480, 0x6A;
        mov.b32 c, 0x64806480;
        sub.f16x2 y, a, c;""",
    # Exponent and mantissa into place; 2**120 is what the biases (127 and 7) differ by.
    ("fp8_bh", "bf16"): """
        and.b32 b, x, 0x80008000;
        shr.u32 a, x, 4;
        lop3.b32 a, a, 0x07F007F0, b, 0xEA;
        mov.b32 c, 0x7B807B80;
        mov.b32 b, 0x80008000;
        fma.rn.bf16x2 y, a, c, b;""",
    # The same for float16, whose bias is 15; 2**8 comes in with the scale.
    ("fp8_bh", "fp16"): """
        and.b32 b, x, 0x80008000;
        shr.u32 a, x, 1;
        lop3.b32 y, a, 0x3F803F80, b, 0xEA;""",
    # (128 + code) - 136
    ("int4_kivi", "bf16"): """
        lop3.b32 a, x, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 c, 0x3F803F80;
        mov.b32 b, 0xC308C308;
        fma.rn.bf16x2 y, a, c, b;""",
    ("int4_kivi", "fp16"): """
        lop3.b32 a, x, 0x000F000F, 0x64006400, 0xEA;
        mov.b32 c, 0x64086408;
        sub.f16x2 y, a, c;""",
    # The high half of a byte as it lies: (1024 + 16 code) / 16 - 72
    ("int4_kivi", "fp16", "high"): """
        lop3.b32 a, x, 0x00F000F0, 0x64006400, 0xEA;
        mov.b32 c, 0x2C002C00;
        mov.b32 b, 0xD480D480;
        fma.rn.f16x2 y, a, c, b;""",
}


@triton.constexpr_function
def asm_body(FORMAT, PART, DTYPE):
    """PTX from x, two words, to y, two values of a part; a to c are free registers."""
    kind, move = (FORMAT, str(DTYPE)), PART * 4 if FORMAT == "int4_kivi" else PART * 8
    if FORMAT == "fp8_bh":
        move -= 8
    if (*kind, "high") in _BODIES and PART % 2:
        kind, move = (*kind, "high"), move - 4
    first = "" if move == 0 else f"{'shr.u32' if move > 0 else 'shl.b32'} x, x, {abs(move)};"
    return first + _BODIES[kind]


@triton.constexpr_function
def _asm(FORMAT, PART, DTYPE):
    body = asm_body(FORMAT, PART, DTYPE)
    return "{ .reg .b32 x, y, a, b, c;\nmov.b32 x, $1;" + body + "\nmov.b32 $0, y; }"


@triton.jit
def part(words, PART: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Part `PART` of int16 `words` as values of `DTYPE`, exact; `factor` and scales come after."""
    if ASM:
        return tl.inline_asm_elementwise(
            _asm(FORMAT, PART, DTYPE), "=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2
        )
    else:
        bits = words.to(tl.int32)
        if FORMAT == "int8_th":
            values = ((bits << (24 - 8 * PART)) >> 24).to(tl.float32)
        elif FORMAT == "fp8_bh":
            values = e4m3_values(bits >> (8 * PART))
        else:
            values = (((bits >> (4 * PART)) & 15) - 8).to(tl.float32)
        return (values / factor(FORMAT, DTYPE)).to(DTYPE)


@triton.constexpr_function
def factor(FORMAT, DTYPE):
    """What values of `part` must be multiplied by: a power of two, which scales take in."""
    return 256.0 if FORMAT == "fp8_bh" and str(DTYPE) == "fp16" else 1.0
