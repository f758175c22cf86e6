"""Sizes, offsets and views of blocks in every format, and what quantising does to values."""

from __future__ import annotations

import pytest
import torch

from kvstore.kernels.block_reference import dequantize_rows, quantize_rows
from kvstore.kernels.formats import FORMATS, SCALE_MIN, BlockLayout
from kvstore.kernels.views import layer_views

WIDTHS = (64, 80, 96, 128, 256)
QUANTISED = FORMATS[1:]


def layout_of(kv_format: str, width: int = 128, tokens: int = 32, **more: str) -> BlockLayout:
    return BlockLayout(2, 3, width, tokens, kv_format=kv_format, **more)


def rows_of(layout: BlockLayout, scale: float = 1.0) -> torch.Tensor:
    """Rows of two blocks, two channels ten times the rest, as keys have them."""
    torch.manual_seed(layout.head_dim)
    rows = torch.randn(2, layout.block_size, layout.num_kv_heads, layout.head_dim) * scale
    rows[..., [3, 40]] *= 10
    return rows


@pytest.mark.parametrize(
    ("kv_format", "bits"),
    [("raw", 16), ("int8_th", 8.125), ("fp8_bh", 8.0078125), ("int4_kivi", 5)],
)
def test_bits_a_value(kv_format: str, bits: float) -> None:
    """A block of 64 tokens and heads of 128 costs what the format's table says."""
    layout = BlockLayout(32, 8, 128, 64, kv_format=kv_format)
    assert layout.block_bytes * 8 / (32 * 2 * 64 * 8 * 128) == bits


def test_raw_blocks_have_the_named_layouts_size() -> None:
    """A raw block is the bytes of LKNHD or LKHND and nothing else: 1 GiB at 8,192 tokens."""
    assert BlockLayout(32, 8, 128, 8192).block_bytes == 1 << 30
    assert BlockLayout(32, 8, 128, 16, order="HND").layer_bytes == 131072 * 16 // 32


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_views_are_apart_and_inside(kv_format: str, width: int, order: str) -> None:
    """Rows and scales of every layer lie inside the block, and no byte belongs to two of them."""
    layout = layout_of(kv_format, width, order=order)
    pool = torch.zeros(2, layout.block_bytes + 32, dtype=torch.uint8)
    total = 0
    for layer in range(layout.num_layers):
        for view in layer_views(pool, layout, layer):
            if view is not None:
                flat = view.view(torch.uint8)
                assert not flat.any()
                flat[1] = 255
                total += flat[1].numel()
    assert int((pool[1] == 255).sum()) == total
    assert not pool[0].any()
    assert not pool[1, layout.block_bytes :].any()


@pytest.mark.parametrize("change", [
    {"num_layers": 0}, {"order": "DHN"}, {"dtype": "int8"}, {"kv_format": "int3"},
    {"kv_factor": 3}, {"head_dim": 72, "kv_format": "int4_kivi"},
    {"block_size": 24, "kv_format": "int4_kivi"}, {"kv_factor": 1, "kv_format": "int4_kivi"},
])  # fmt: skip
def test_impossible_layouts_are_refused(change: dict[str, object]) -> None:
    """A layout that cannot be is an error that names what is wrong."""
    fields = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "block_size": 16} | change
    with pytest.raises(ValueError, match=r"pass|needs|has no V"):
        BlockLayout(**fields)


@pytest.mark.parametrize("kv_format", ["int8_th", "fp8_bh"])
@pytest.mark.parametrize("kv", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_quantising_again_changes_nothing(kv_format: str, kv: int, scale: float) -> None:
    """Codes of what codes stand for are the same codes, for values of any size."""
    layout = layout_of(kv_format, dtype="float32")
    codes, scales = quantize_rows(rows_of(layout, scale), layout, kv)
    again, scales_again = quantize_rows(dequantize_rows(codes, scales, layout, kv), layout, kv)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert scales is not None
    assert scales_again is not None
    assert torch.equal(scales, scales_again)


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kv", [0, 1])
def test_values_move_by_half_a_step(kv_format: str, width: int, kv: int) -> None:
    """No value moves further than half a code step, the ends of a range included."""
    layout = layout_of(kv_format, width, dtype="float32")
    x = rows_of(layout)
    codes, scales = quantize_rows(x, layout, kv)
    assert scales is not None
    moved = (dequantize_rows(codes, scales, layout, kv) - x).abs()
    if kv_format == "fp8_bh":
        step = x.abs() / 8 + 32 * 448.0**-1 * 2.0**-9  # three mantissa bits; the least normal's
        step = torch.maximum(step, scales.float()[:, None, :, None] * 2.0**-9)
        step[x.abs() >= 440 * scales.float()[:, None, :, None]] *= 2
    elif kv_format == "int8_th":
        step = scales.float().transpose(1, 2)[..., None]
    elif kv == 0:
        step = scales[:, :, :, 0].float().transpose(1, 2)
    else:
        step = scales[:, :, :, 0].float().permute(0, 3, 1, 2)
        step = step.repeat_interleave(layout.channel_group, 3)
    assert bool((moved <= step * 0.5 * (1 + 2**-7)).all())


@pytest.mark.parametrize("kv_format", QUANTISED)
def test_zeros_stay_zeros(kv_format: str) -> None:
    """A block of zeros has the least scale and comes back as zeros."""
    layout = layout_of(kv_format)
    for kv in (0, 1):
        rows = torch.zeros(1, 32, 3, 128, dtype=torch.bfloat16)
        codes, scales = quantize_rows(rows, layout, kv)
        assert scales is not None
        assert float(scales.max()) == SCALE_MIN
        assert not dequantize_rows(codes, scales, layout, kv).any()


def test_int4_words_hold_a_code_of_each_quarter() -> None:
    """Word i has channels i, i + q, i + 2q and i + 3q from its lowest four bits up."""
    layout = layout_of("int4_kivi", 64)
    x = torch.zeros(1, 32, 3, 64)
    x[..., 0], x[..., 16], x[..., 32], x[..., 48] = 0.8, 2.0, 3.0, 15.0
    x[..., 1], x[..., 63] = 0.0, 15.0
    codes, _ = quantize_rows(x, layout, 1)
    words = codes.view(torch.int16)[0, 0, 0].int() & 0xFFFF
    # The row's halves have scales of their own: 2 / 15 and 1.
    assert int(words[0]) == 6 | 15 << 4 | 3 << 8 | 15 << 12
    assert int(words[15]) == 15 << 12


def test_views_refuse_pools_that_do_not_fit() -> None:
    """A pool too small, of another dtype or badly aligned is an error that says so."""
    layout = layout_of("raw")
    with pytest.raises(ValueError, match="the layout needs"):
        layer_views(torch.zeros(2, layout.block_bytes - 16, dtype=torch.uint8), layout, 0)
    with pytest.raises(ValueError, match="uint8"):
        layer_views(torch.zeros(2, layout.block_bytes), layout, 0)
    with pytest.raises(ValueError, match="16 bytes"):
        layer_views(torch.zeros(2, layout.block_bytes + 8, dtype=torch.uint8), layout, 0)
    with pytest.raises(ValueError, match="layer 2"):
        layer_views(torch.zeros(2, layout.block_bytes, dtype=torch.uint8), layout, 2)
