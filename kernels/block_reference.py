"""Plain-torch reference of block copies and quantised formats: what the kernels must equal."""

from __future__ import annotations

import torch

from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import FP8_MAX, INT4_MAX, INT8_MAX, SCALE_MIN, BlockLayout
from kvstore.kernels.views import DTYPES, layer_views


def gather(
    pool: EnginePool,
    pages: torch.Tensor,
    store: torch.Tensor,
    slots: torch.Tensor,
    layout: BlockLayout,
    layers: range,
) -> None:
    """Engine pages [n, pages a block] -> blocks `slots` [n] of `store`, in the layout's format."""
    for layer in layers:
        views = layer_views(store, layout, layer)
        for kv in range(layout.kv_factor):
            tensor = pool.tensors[layer * layout.kv_factor + kv]
            rows = tensor[pages.long()].flatten(1, 2)
            codes, scales = quantize_rows(rows, layout, kv)
            _put(views[kv], slots, codes)
            if scales is not None:
                _put(views[2 + kv], slots, scales)


def scatter(
    store: torch.Tensor,
    slots: torch.Tensor,
    pool: EnginePool,
    pages: torch.Tensor,
    layout: BlockLayout,
    layers: range,
) -> None:
    """Blocks `slots` [n] of `store` -> engine pages [n, pages a block], dequantised."""
    for layer in layers:
        views = layer_views(store, layout, layer)
        for kv in range(layout.kv_factor):
            codes, scales = views[kv], views[2 + kv]
            assert codes is not None, "kv_factor says which views there are"
            taken = None if scales is None else scales[slots.long()]
            rows = dequantize_rows(_bytes(codes)[slots.long()].view(codes.dtype), taken, layout, kv)
            tensor = pool.tensors[layer * layout.kv_factor + kv]
            tensor[pages.long()] = rows.unflatten(1, (-1, pool.page_tokens))


def quantize_rows(
    rows: torch.Tensor, layout: BlockLayout, kv: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [n, tokens, heads, head_dim] -> codes of the same order of dimensions, and scales.

    Scales have the shape [n, *layout.scale_shape(kv)], bfloat16; None in raw.
    """
    if layout.kv_format == "raw":
        return rows, None
    x = rows.float()
    if layout.kv_format == "int8_th":
        scale = _scale(x.abs().amax(3), INT8_MAX)
        return _codes(x, scale[..., None]).to(torch.int8), scale.transpose(1, 2)
    if layout.kv_format == "fp8_bh":
        scale = _scale(x.abs().amax((1, 3)), FP8_MAX)
        return (x * _inverse(scale)[:, None, :, None]).to(torch.float8_e4m3fn), scale
    return _quantize_keys(x, layout) if kv == 0 else _quantize_values(x, layout)


def dequantize_rows(
    codes: torch.Tensor, scales: torch.Tensor | None, layout: BlockLayout, kv: int
) -> torch.Tensor:
    """Inverse of `quantize_rows`: rows [n, tokens, heads, head_dim] of the layout's dtype."""
    if scales is None:
        return codes
    dtype, scale = DTYPES[layout.dtype], scales.float()
    if layout.kv_format == "int8_th":
        return (codes.float() * scale.transpose(1, 2)[..., None]).to(dtype)
    if layout.kv_format == "fp8_bh":
        return (codes.float() * scale[:, None, :, None]).to(dtype)
    values = _unpack(codes).float()
    if kv == 0:  # scales [n, heads, groups, 2, channel]
        step, zero = scale.unbind(3)
        grouped = values.unflatten(1, (-1, layout.token_group))
        x = grouped * step.transpose(1, 2)[:, :, None] + zero.transpose(1, 2)[:, :, None]
        return x.flatten(1, 2).to(dtype)
    step, zero = scale.permute(3, 0, 4, 1, 2)[..., None]  # each [n, tokens, heads, groups, 1]
    grouped = values.unflatten(3, (-1, layout.channel_group))
    return (grouped * step + zero).flatten(3).to(dtype)


def _quantize_keys(x: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = x.unflatten(1, (-1, layout.token_group))  # [n, groups, tokens, heads, channel]
    step, zero = _range(grouped, 2)
    codes = _codes(grouped - zero.float(), step).flatten(1, 2)
    scales = torch.stack([step, zero], 4).squeeze(2)  # [n, groups, heads, 2, channel]
    return _pack(codes), scales.transpose(1, 2)


def _quantize_values(x: torch.Tensor, layout: BlockLayout) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = x.unflatten(3, (-1, layout.channel_group))  # [n, tokens, heads, groups, channel]
    step, zero = _range(grouped, 4)
    codes = _codes(grouped - zero.float(), step).flatten(3)
    scales = torch.stack([step, zero]).squeeze(5)  # [2, n, tokens, heads, groups]
    return _pack(codes), scales.permute(1, 3, 4, 0, 2)


def _range(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and zero (bfloat16) that put all of `x` along `dim` within 15 steps above zero."""
    zero = _floor_bf16(x.amin(dim, keepdim=True))
    return _scale(x.amax(dim, keepdim=True) - zero.float(), INT4_MAX), zero


def _scale(span: torch.Tensor, steps: float) -> torch.Tensor:
    """One of `steps` equal parts of `span`, rounded to bfloat16."""
    return (span * (1.0 / steps)).clamp_min(SCALE_MIN).to(torch.bfloat16)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return 1.0 / scale.float()


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Whole steps, ties to even. Rounding a scale moves an end of the range by < 1/2 step."""
    return torch.round(x * _inverse(scale))


def _floor_bf16(x: torch.Tensor) -> torch.Tensor:
    """The largest bfloat16 that is at most `x` (float32, finite)."""
    bits = x.view(torch.int32)
    cut = (bits & 0xFFFF) != 0
    down = (bits & -0x10000) + (cut & (x < 0)).int() * 0x10000
    return down.view(torch.float32).to(torch.bfloat16)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., head_dim] -> bytes [..., head_dim / 2]: words of one code of each quarter."""
    first, second, third, fourth = codes.to(torch.uint8).chunk(4, 3)
    return torch.stack([first | (second << 4), third | (fourth << 4)], 4).flatten(3)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    low, high = packed.unflatten(3, (-1, 2)).unbind(4)
    return torch.cat([low & 15, low >> 4, high & 15, high >> 4], 3)


def _put(view: torch.Tensor | None, slots: torch.Tensor, values: torch.Tensor) -> None:
    assert view is not None, "kv_factor says which views there are"
    _bytes(view)[slots.long()] = _bytes(values)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """float8 as bytes, since torch indexes few of its kinds; all else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
