"""Restored blocks as pools and block tables of attention: the store's own memory, no copy.

views of Space.restore -> Context -> attention of kvstore.kernels
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvstore.client import Match, Space
from kvstore.core.errors import InvalidRequest, SpecError
from kvstore.core.spec import KVSpec

if TYPE_CHECKING:
    from kvstore.kernels.formats import BlockLayout

ORDERS = {"LKNHD": "NHD", "LKHND": "HND"}
UNIT_MAX, UNIT_MIN = 4096, 16  # bytes; slots of the store begin at multiples of the first


class Part(NamedTuple):
    """Blocks of a context that lie in one piece of memory.

    `pool` is uint8 [places, block_bytes], a view of that memory whose rows overlap: place i begins
    at byte i times the row stride, so that every block is a whole place, wherever it lies. `blocks`
    are the places of this part's blocks, int32 [n].
    """

    pool: Any
    blocks: Any


@dataclass(frozen=True)
class Context:
    """Keys and values of the first `tokens` tokens of a prompt, in blocks that lie anywhere."""

    layout: BlockLayout
    tokens: int
    parts: tuple[Part, ...]


def layout_of(spec: KVSpec) -> BlockLayout:
    """The byte layout of a space's blocks as kernels know it; raises SpecError for opaque ones."""
    from kvstore.kernels.formats import BlockLayout

    if spec.layout not in ORDERS:
        raise SpecError(
            f"layout {spec.layout!r} is opaque to kernels; attach with {' or '.join(ORDERS)}"
        )
    try:
        layout = BlockLayout(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.block_size, spec.dtype,
            ORDERS[spec.layout], spec.kv_format, spec.kv_factor,
        )  # fmt: skip
    except ValueError as error:
        raise SpecError(f"kernels cannot read blocks of this spec: {error}") from error
    if layout.block_bytes != spec.block_bytes:
        raise SpecError(
            f"block_bytes is {spec.block_bytes} and {spec.kv_format} takes {layout.block_bytes}; "
            "make the spec with in_format"
        )
    return layout


def in_format(spec: KVSpec, kv_format: str) -> KVSpec:
    """The spec of the same KV in another format, a space of its own; raises SpecError."""
    whole = layout_of(msgspec.structs.replace(spec, kv_format="raw", block_bytes=0))
    if kv_format == "raw":
        return msgspec.structs.replace(spec, kv_format="raw", block_bytes=whole.block_bytes)
    from kvstore.kernels.formats import BlockLayout

    try:
        layout = BlockLayout(
            whole.num_layers, whole.num_kv_heads, whole.head_dim, whole.block_size, whole.dtype,
            whole.order, kv_format, whole.kv_factor,
        )  # fmt: skip
    except ValueError as error:
        raise SpecError(f"blocks of this spec have no such format: {error}") from error
    return msgspec.structs.replace(spec, kv_format=kv_format, block_bytes=layout.block_bytes)


def quantising(read: Callable[[int], Any], spec: KVSpec) -> Callable[[int], Any]:
    """A function that gives blocks in the format of `spec`, from one that gives the same raw.

    Both take a block's position, as `Space.put` wants it.
    """
    import torch

    from kvstore.kernels.quantize import quantize_blocks

    layout = layout_of(spec)

    def quantised(position: int) -> Any:
        raw = torch.from_numpy(np.frombuffer(read(position), np.uint8).copy())[None]
        made = torch.zeros((1, layout.block_bytes), dtype=torch.uint8)
        quantize_blocks(raw, made, layout, backend="reference")
        return made[0].numpy().data

    return quantised


def rounding(read: Callable[[int], Any], spec: KVSpec, dtype: str) -> Callable[[int], Any]:
    """A function that gives raw blocks with every value rounded to `dtype` and kept in the spec's.

    What a model's KV is where an engine keeps it in fewer bits than it computes in.
    """
    import torch

    def rounded(position: int) -> Any:
        raw = torch.from_numpy(np.frombuffer(read(position), np.uint8).copy())
        values = raw.view(getattr(torch, spec.dtype))
        return values.to(getattr(torch, dtype)).to(values.dtype).view(torch.uint8).numpy().data

    return rounded


def context_from(read: Callable[[int], Any], count: int, spec: KVSpec) -> Context:
    """The context in `count` blocks that a function gives by position, copied to one buffer."""
    blocks = np.empty((count, spec.block_bytes), np.uint8)
    for position, block in enumerate(blocks):
        block[:] = np.frombuffer(read(position), np.uint8)
    return context_of([block.data.toreadonly() for block in blocks], spec)


def restore_in_place(space: Space, match: Match) -> Context:
    """Restores what the plan loads and names it where it lies.

    Valid until the match is released; what was computed from it is right only if `match.check()`
    passes afterwards. Raises what `Space.restore` does, and InvalidRequest for a plan that loads
    anything but one stretch from the first token on.
    """
    views = space.restore(match)
    if views and match.ranges != (range(len(views)),):
        raise InvalidRequest(
            f"the plan loads blocks {match.ranges}; attach with plan_shapes=('prefix',) and look "
            "up without local_tokens"
        )
    return context_of(views, space.spec)


def context_of(views: Sequence[memoryview], spec: KVSpec) -> Context:
    """The context in read-only views of a prompt's first blocks, of which nothing is copied.

    Raises SpecError for blocks that kernels cannot read, InvalidRequest for views of other sizes.
    """
    layout = layout_of(spec)
    found: dict[int, tuple[Any, list[int]]] = {}
    for view in views:
        if view.nbytes != layout.block_bytes:
            raise InvalidRequest(
                f"a view holds {view.nbytes} bytes; a block of the spec has {layout.block_bytes}"
            )
        owner = _owner(view)
        at = _address(view) - _address(owner)
        found.setdefault(id(owner), (owner, []))[1].append(at)
    parts = tuple(_part(owner, places, layout) for owner, places in found.values())
    return Context(layout, len(views) * layout.block_size, parts)


def _owner(view: memoryview) -> Any:
    """The whole memory of which a view is a part: a mapped pool, or the copies of one restore."""
    owner = view.obj
    if isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        return owner.base
    return owner


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _part(owner: Any, offsets: list[int], layout: BlockLayout) -> Part:
    import torch

    unit = gcd(UNIT_MAX, *offsets)
    if unit < UNIT_MIN or _address(owner) % UNIT_MIN:
        raise InvalidRequest(f"blocks begin at multiples of {unit} bytes; kernels need {UNIT_MIN}")
    with warnings.catch_warnings():
        # The store's memory is read-only, and it is only read.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        flat = torch.frombuffer(owner, dtype=torch.uint8)
    count = (len(flat) - layout.block_bytes) // unit + 1
    pool = flat.as_strided((count, layout.block_bytes), (unit, 1))
    return Part(pool, torch.tensor([at // unit for at in offsets], dtype=torch.int32))
