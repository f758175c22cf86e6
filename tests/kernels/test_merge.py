"""Merging attention states: any grouping and order give the state over all tokens."""

from __future__ import annotations

import math

import pytest
import torch
from attended import compare
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.attention import merge_states

LSES = st.one_of(st.floats(-30.0, 30.0), st.just(-math.inf))


def states(lses: list[float], seed: int, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of one head a state; outputs of states without tokens are NaN."""
    out = torch.randn(len(lses), 1, 1, width, generator=torch.Generator().manual_seed(seed))
    lse = torch.tensor(lses, dtype=torch.float32)[:, None, None]
    return out.masked_fill((lse == -math.inf)[..., None], math.nan), lse


def both(
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = zip(first, second, strict=True)
    return merge_states(*(torch.stack(pair) for pair in pairs), backend=backend)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@settings(deadline=None, max_examples=15, derandomize=True)
@given(lses=st.lists(LSES, min_size=3, max_size=3), seed=st.integers(0, 1000))
def test_merge_is_associative_and_commutative(backend: str, lses: list[float], seed: int) -> None:
    """(a + b) + c = a + (b + c) = (c + b) + a up to rounding, states without tokens included."""
    outs, sums = states(lses, seed)
    a, b, c = zip(outs, sums, strict=True)
    left = both(both(a, b, backend), c, backend)
    for other in (both(a, both(b, c, backend), backend), both(both(c, b, backend), a, backend)):
        assert torch.allclose(left[0], other[0], rtol=1e-4, atol=1e-4)
        assert torch.allclose(left[1], other[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("count", "width"), [(1, 64), (3, 80), (17, 128), (33, 64)])
def test_merge_equals_the_reference(count: int, width: int) -> None:
    """Any number of states merge at once, rows of some without tokens, rows with none at all."""
    torch.manual_seed(count)
    lse = torch.randn(count, 5, 3) * 4
    lse[torch.rand(lse.shape) < 0.3] = -math.inf
    lse[:, 2] = -math.inf
    out = torch.randn(count, 5, 3, width).masked_fill((lse == -math.inf)[..., None], math.nan)
    found = merge_states(out, lse, backend="triton")
    compare(found, merge_states(out.double(), lse.double(), backend="reference"), "float32")


def test_merge_takes_any_strides() -> None:
    """States that lie request after request merge without a copy."""
    out, lse = torch.randn(4, 3, 2, 64).transpose(0, 1), torch.randn(4, 3, 2).transpose(0, 1)
    found = merge_states(out, lse, backend="triton")
    compare(found, merge_states(out.double(), lse.double(), backend="reference"), "float32")
