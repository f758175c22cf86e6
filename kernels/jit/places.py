"""Where the tokens of a tile lie: block ids loaded a tile ahead, rows by additions only.

A tile of BLOCK_N tokens begins at a multiple of BLOCK_N. It lies inside one block (PAGE >= BLOCK_N,
one id for the tile) or is made of whole blocks (an id a token). Either way what does not change
from tile to tile stands apart, so that the compiler moves it out of the loop.
"""

import triton
import triton.language as tl


@triton.jit
def block_ids(table, t0, end, i, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ids of the blocks that hold the tile at `t0`; 0 for tokens from `end` on."""
    if PAGE >= BLOCK_N:
        ids = tl.load(table + t0 // PAGE, mask=t0 < end, other=0)
    else:
        ids = tl.load(table + t0 // PAGE + i // PAGE, mask=t0 + i < end, other=0)
    return ids


@triton.jit
def row_pointers(ptr, columns, ids, t0, i, s_n, s_t, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the tile's rows, [BLOCK_N, columns]; `columns` are offsets in a row."""
    if PAGE >= BLOCK_N:
        first = ptr + (ids.to(tl.int64) * s_n + (t0 % PAGE) * s_t)
        at = first + (i[:, None] * s_t + columns[None, :])
    else:
        at = (ptr + ((i % PAGE)[:, None] * s_t + columns[None, :])) + (ids.to(tl.int64) * s_n)[
            :, None
        ]
    return at


@triton.jit
def token_pointers(ptr, ids, t0, i, s_n, s_t, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to one number a token, [BLOCK_N]."""
    if PAGE >= BLOCK_N:
        at = ptr + (ids.to(tl.int64) * s_n + (t0 % PAGE) * s_t) + i * s_t
    else:
        at = (ptr + (i % PAGE) * s_t) + ids.to(tl.int64) * s_n
    return at


@triton.jit
def scales(ptr, ids, t0, end, i, s_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
           FORMAT: tl.constexpr):  # fmt: skip
    """8-bit formats: the scale of each token of the tile (fp8_bh: its block's)."""
    if FORMAT == "int8_th":
        at = token_pointers(ptr, ids, t0, i, s_n, 1, PAGE, BLOCK_N)
    else:
        at = token_pointers(ptr, ids, t0, i, s_n, 0, PAGE, BLOCK_N)
    return tl.load(at, mask=t0 + i < end, other=0.0)
