"""`KVSpec`: what must agree for KV bytes to be exchangeable, and its canonical encoding."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import msgspec

from kvstore.core.errors import SpecError

DTYPE_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
    "uint8": 1.0,
    "int4": 0.5,
}
NAMED_LAYOUTS = ("LKNHD", "LKHND")
KV_FORMATS = ("raw", "int8_th", "fp8_bh", "int4_kivi")
HASH_BYTES_MIN, HASH_BYTES_MAX = 16, 32
BLOCK_SIZE_MAX = 4096
BLOCK_BYTES_MAX = 1 << 32


class KVSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """Identity of KV bytes: two blocks are exchangeable only if every field is equal.

    `block_size` is in tokens; `num_kv_heads` counts the heads of one shard; `kv_factor` is 2 for
    separate K and V, 1 for MLA latents. `block_bytes` is the size of one shard's block; 0 takes
    the layout's formula. `layout` is a named byte order (`LKNHD` = [layer, k/v, token, head,
    dim]) or any other name, which then is opaque and needs `block_bytes`. `attention` holds
    whatever else changes K or V (rope scaling, window, softcap). Raises SpecError.
    """

    model: str
    revision: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    layer_first: int = 0
    kv_factor: int = 2
    layout: str = "LKNHD"
    block_bytes: int = 0
    attention: dict[str, str] = {}
    shard_count: int = 1
    pp_size: int = 1
    group: str = ""
    kv_format: str = "raw"
    key_mode: str = "tokens"
    hash_algorithm: str = ""

    def __post_init__(self) -> None:
        _check(self)
        if not self.block_bytes:
            msgspec.structs.force_setattr(self, "block_bytes", self._formula_bytes())
        if not 0 < self.block_bytes <= BLOCK_BYTES_MAX:
            raise SpecError(f"block_bytes is {self.block_bytes}; pass 1 to {BLOCK_BYTES_MAX}")

    def _formula_bytes(self) -> int:
        values = (
            self.num_layers * self.kv_factor * self.block_size * self.num_kv_heads * self.head_dim
        )
        return math.ceil(values * DTYPE_BYTES[self.dtype])

    def encode(self) -> bytes:
        """Canonical bytes: every field typed and length-prefixed, so equal only if all are."""
        parts = [b"kvspec/1"]
        for name in self.__struct_fields__:
            parts.append(_encode_value(name) + _encode_value(getattr(self, name)))
        return b"".join(parts)

    @cached_property
    def symbol_bytes(self) -> int:
        """Bytes of one block's symbol in tokens mode; 0 in external mode (the hash decides)."""
        return 4 * self.block_size if self.key_mode == "tokens" else 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes one shard keeps for one token."""
        return self.block_bytes / self.block_size


def _encode_value(value: str | int | dict[str, str]) -> bytes:
    if isinstance(value, str):
        raw = value.encode()
        return b"s" + len(raw).to_bytes(4, "little") + raw
    if isinstance(value, int):
        return b"i" + value.to_bytes(8, "little", signed=True)
    items = b"".join(_encode_value(k) + _encode_value(v) for k, v in sorted(value.items()))
    return b"m" + len(value).to_bytes(4, "little") + items


def _check(spec: KVSpec) -> None:
    for name in ("model", "revision", "dtype", "layout"):
        if not getattr(spec, name):
            raise SpecError(f"{name} is empty; say which {name} the KV bytes belong to")
    for name in (
        "num_layers", "num_kv_heads", "head_dim", "block_size", "kv_factor",
        "shard_count", "pp_size",
    ):  # fmt: skip
        if not 0 < getattr(spec, name) < 2**31:
            raise SpecError(f"{name} is {getattr(spec, name)}; pass a whole number from 1 up")
    if spec.block_size > BLOCK_SIZE_MAX:
        raise SpecError(f"block_size is {spec.block_size} tokens; pass at most {BLOCK_SIZE_MAX}")
    if not 0 <= spec.layer_first < 2**31:
        raise SpecError(f"layer_first is {spec.layer_first}; pass the first layer's number")
    if spec.kv_factor > 2:
        raise SpecError(f"kv_factor is {spec.kv_factor}; pass 2, or 1 for MLA latents")
    if spec.kv_format not in KV_FORMATS:
        raise SpecError(f"kv_format is {spec.kv_format!r}; pass one of {', '.join(KV_FORMATS)}")
    _check_sizes(spec)
    _check_key_mode(spec)


def _check_sizes(spec: KVSpec) -> None:
    if spec.layout in NAMED_LAYOUTS and spec.kv_format == "raw":
        if spec.dtype not in DTYPE_BYTES:
            raise SpecError(f"dtype is {spec.dtype!r}; pass one of {', '.join(DTYPE_BYTES)}")
        want = spec._formula_bytes()
        if spec.block_bytes not in (0, want):
            raise SpecError(
                f"block_bytes is {spec.block_bytes} but layout {spec.layout} needs {want}; "
                "correct it or pass 0"
            )
    elif spec.block_bytes <= 0:
        raise SpecError(
            f"block_bytes is required: layout {spec.layout!r} with kv_format "
            f"{spec.kv_format!r} has no size formula"
        )


def _check_key_mode(spec: KVSpec) -> None:
    if spec.key_mode not in ("tokens", "external"):
        raise SpecError(f"key_mode is {spec.key_mode!r}; pass 'tokens' or 'external'")
    if spec.key_mode == "external" and not spec.hash_algorithm:
        raise SpecError("hash_algorithm is empty; external keys need the algorithm and its seed")
    if "random" in spec.hash_algorithm.lower():
        raise SpecError(
            f"hash_algorithm is {spec.hash_algorithm!r}: hashes seeded at random differ in every "
            "process; set a fixed seed (PYTHONHASHSEED) or use a sha256 algorithm"
        )


def space_id(spec: KVSpec, tenant: str) -> bytes:
    """32-byte identity of a space: SHA-256 over the spec's and the tenant's encodings."""
    return hashlib.sha256(spec.encode() + _encode_value(tenant)).digest()


def root_digest(space: bytes, adapter: str, cache_salt: str) -> bytes:
    """32-byte identity of a root; its first 16 bytes are the parent key of first blocks."""
    return hashlib.sha256(
        b"kvroot/1" + space + _encode_value(adapter) + _encode_value(cache_salt)
    ).digest()
