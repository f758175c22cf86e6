"""Attention by Triton's interpreter against the reference in float64, over what may vary."""

from __future__ import annotations

import pytest
from attended import Case, check, pairwise, spread

FEATURES = ("plain", "window", "softcap", "sinks", "all")
FORMATS = ("raw", "int8_th", "fp8_bh", "int4_kivi")
DECODE = pairwise(
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "order": ("NHD", "HND"),
        "group": (1, 4, 7, 8),
        "block_size": (16, 32, 64),
        "lens": ((0, 1), (63, 64, 65), (15, 16, 17), (1, 37, 130)),
        "feature": FEATURES,
        "kv_format": FORMATS,
        "num_splits": (1, 3),
    }
)
EXTEND = pairwise(
    {
        "dtype": ("bfloat16", "float16", "float32"),
        "order": ("NHD", "HND"),
        "group": (1, 3, 4),
        "block_size": (16, 64),
        "lens": ((0, 20), (64, 65), (5, 16, 70)),
        "feature": FEATURES,
        "kv_format": FORMATS,
        "num_splits": (1, 2),
        "new": (2, 20),
    }
)
SHAPES = pairwise(
    {
        "head_dim": (64, 80, 96, 128),
        "kv_format": FORMATS,
        "block_size": (16, 32, 64, 128),
        "order": ("NHD", "HND"),
        "dtype": ("bfloat16", "float16", "float32"),
        "group": (2, 16),
        "new": (1, 3),
        "lens": ((16,), (33,)),
        "num_kv_heads": (1,),
        "num_splits": (1,),
    }
)
SIZES = [
    Case(head_dim=80, lens=(33,), kv_format="int4_kivi"),
    Case(head_dim=96, lens=(33,), kv_format="fp8_bh"),
    Case(head_dim=128, lens=(129,), block_size=128, kv_format="int8_th"),
    Case(head_dim=256, lens=(33,), group=16, num_kv_heads=1),
    Case(head_dim=128, lens=(65,), block_size=64, kv_format="int4_kivi"),
    Case(head_dim=80, lens=(40,), new=9, kv_format="int8_th"),
    Case(head_dim=128, lens=(40,), new=9, kv_format="int4_kivi"),
    Case(head_dim=256, lens=(70,), new=9, dtype="float16"),
    Case(lens=(100,), new=40, causal=False, num_splits=2),
]


@pytest.mark.parametrize("case", spread(DECODE))
def test_decode_equals_the_reference(case: Case) -> None:
    """Decode in place is right in every format, layout, feature and split, NaN all around."""
    check(case)


@pytest.mark.parametrize("case", spread(EXTEND))
def test_extend_equals_the_reference(case: Case) -> None:
    """New tokens attend causally to what is before them, in every format, NaN all around."""
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_every_shape_in_every_format(case: Case) -> None:
    """Sizes of heads and blocks meet formats, orders, types and groups, in decode and extend."""
    check(case)


@pytest.mark.parametrize("case", spread(SIZES, 2))
def test_every_head_size_and_block_size(case: Case) -> None:
    """Head sizes that are no power of two, the widest group, the largest blocks, no causality."""
    check(case)
