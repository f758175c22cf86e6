"""Byte formats of a block: where the payload and scales of every layer lie. No torch, no GPU.

A block is one contiguous object, layer after layer, so that a group of layers is one range:

    block   = [layer 0][layer 1]...
    layer   = [K rows][V rows][K scales][V scales][padding to 128 bytes]      (kv_factor 1: no V)
    rows    = NHD: [token, head, row_bytes]    HND: [head, token, row_bytes]

A row is one token's values of one head: `head_dim` values of `dtype` in `raw` blocks (which have
neither scales nor padding), else codes. Codes and scales, with x a value of the layer:

| format | code | x is about | scales (bfloat16), per layer and K or V |
|---|---|---|---|
| `int8_th` | int8, -127..127 | code s | [head, token]: one for a token's row |
| `fp8_bh` | float8 e4m3fn | code s | [head]: one for a block's head |
| `int4_kivi` K | 4 bits, 0..15 | code s + z | [head, token group, (s, z), channel] |
| `int4_kivi` V | 4 bits, 0..15 | code s + z | [head, channel group, (s, z), token] |

`int4_kivi` follows KIVI (Liu et al., 2024): keys have outlier channels, so their scales are per
channel over a group of `token_group` tokens; values have none, so theirs are per token over a group
of `channel_group` channels. A row is 16-bit little-endian words: word i holds, from its lowest
four bits up, channels i, i + q, i + 2q and i + 3q, where q is head_dim / 4. So each place in a word
is a quarter of the channels in order, and a channel group is one quarter or two.

Scales are bfloat16 values, and codes are made with the rounded scale: no error comes from rounding
it, code x scale is exact in float32, and so dequantising gives the same bits everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

FORMATS = ("raw", "int8_th", "fp8_bh", "int4_kivi")
ORDERS = ("NHD", "HND")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 2
LAYER_ALIGN = 128
WORD_BYTES = 16
GROUP = 32
INT8_MAX, FP8_MAX, INT4_MAX = 127.0, 448.0, 15.0
SCALE_MIN = 2.0**-100
"""Least scale: a scale's reciprocal stays finite, and a row of zeros has a scale too."""


@dataclass(frozen=True)
class BlockLayout:
    """One shard's block: its sizes and offsets in bytes.

    `block_size` in tokens; `dtype` is that of the values, quantised or not; `order` of rows is
    `NHD` or `HND` (layouts `LKNHD` and `LKHND` of a space). Raises ValueError naming the field.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "bfloat16"
    order: str = "NHD"
    kv_format: str = "raw"
    kv_factor: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; pass a whole number from 1 up")
        for name, known in (
            ("dtype", tuple(DTYPE_BYTES)), ("order", ORDERS), ("kv_format", FORMATS),
            ("kv_factor", (1, 2)),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; pass one of {known}")
        if self.row_bytes * self.rows % WORD_BYTES:
            raise ValueError(f"block_size {self.block_size} makes layers of uneven 16-byte words")
        if self.kv_format == "int4_kivi":
            self._check_int4()

    def _check_int4(self) -> None:
        group = self.token_group
        if self.head_dim % 16 or self.block_size % group or group & (group - 1):
            raise ValueError(
                "int4_kivi needs head_dim in sixteens and block_size in thirty-twos or a power of "
                f"two; they are {self.head_dim} and {self.block_size}"
            )
        if self.kv_factor == 1:
            raise ValueError("int4_kivi tells K from V; kv_factor 1 has no V")

    @property
    def rows(self) -> int:
        """Rows of K, or of V, in a layer."""
        return self.block_size * self.num_kv_heads

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token's values of one head."""
        if self.kv_format == "raw":
            return self.head_dim * DTYPE_BYTES[self.dtype]
        return self.head_dim // 2 if self.kv_format == "int4_kivi" else self.head_dim

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """Shape of a layer's K or V rows in bytes, in the order they lie."""
        tokens, heads = self.block_size, self.num_kv_heads
        first = (tokens, heads) if self.order == "NHD" else (heads, tokens)
        return (*first, self.row_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes from a row to the next token's row of the same head."""
        return self.row_bytes * (self.num_kv_heads if self.order == "NHD" else 1)

    @property
    def head_bytes(self) -> int:
        """Bytes from a row to the next head's row of the same token."""
        return self.row_bytes * (1 if self.order == "NHD" else self.block_size)

    @property
    def token_group(self) -> int:
        """Tokens that share K scales in int4_kivi."""
        return min(GROUP, self.block_size)

    @property
    def channel_group(self) -> int:
        """Channels that share V scales in int4_kivi: a quarter of a row, of short rows half."""
        return self.head_dim // (4 if self.head_dim >= 4 * GROUP else 2)

    def scale_shape(self, kv: int) -> tuple[int, ...]:
        """Shape of a layer's scales of K (`kv` 0) or V (1), in bfloat16; (0,) where none are."""
        heads, tokens = self.num_kv_heads, self.block_size
        if self.kv_format == "int8_th":
            return (heads, tokens)
        if self.kv_format == "fp8_bh":
            return (heads,)
        if self.kv_format == "raw":
            return (0,)
        if kv == 0:
            return (heads, tokens // self.token_group, 2, self.head_dim)
        return (heads, self.head_dim // self.channel_group, 2, tokens)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of a layer's K rows, or V rows."""
        return self.rows * self.row_bytes

    def scale_bytes(self, kv: int) -> int:
        """Bytes of a layer's scales of K (`kv` 0) or V (1)."""
        return prod(self.scale_shape(kv)) * SCALE_BYTES

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of a layer with scales and padding."""
        if self.kv_format == "raw":
            return self.payload_bytes * self.kv_factor
        used = self.scale_offset(self.kv_factor - 1) + self.scale_bytes(self.kv_factor - 1)
        return -(-used // LAYER_ALIGN) * LAYER_ALIGN

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.num_layers * self.layer_bytes

    def row_offset(self, kv: int) -> int:
        """Where the rows of K (`kv` 0) or V (1) begin in a layer."""
        return kv * self.payload_bytes

    def scale_offset(self, kv: int) -> int:
        """Where the scales of K (`kv` 0) or V (1) begin in a layer."""
        return self.payload_bytes * self.kv_factor + (self.scale_bytes(0) if kv else 0)

    @property
    def raw(self) -> BlockLayout:
        """The layout of the same block unquantised."""
        return BlockLayout(
            self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype,
            self.order, "raw", self.kv_factor,
        )  # fmt: skip
