"""Sizes with units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.sizes import AUTO, SIZE_MAX, Size, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 << 30), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000), ("4096", 4096),
        ("16 kib", 16384), ("1TiB", 1 << 40), (4096, 4096),
    ],
)  # fmt: skip
def test_size_reads_units(text: str | int, expected: int) -> None:
    """A number with a binary or decimal unit, or alone, is that many bytes."""
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "64Gi", "5%", "-1GiB", "0", "0.0GiB", "1e9", "nan", "1 GiB x"]
)
def test_size_refuses_what_it_does_not_know(text: str) -> None:
    """Anything else raises, and the message says what a size looks like."""
    with pytest.raises(ValueError, match="'64GiB'"):
        parse_size(text)


@pytest.mark.parametrize("value", [0, -1, SIZE_MAX + 1, True, 1.5, None, []])
def test_size_refuses_other_values(value: object) -> None:
    """Zero, negative, huge and untyped values are refused."""
    with pytest.raises(ValueError, match="size"):
        parse_size(value)  # type: ignore[arg-type]


@given(st.integers(1, SIZE_MAX))
def test_size_reads_back_equal(value: int) -> None:
    """Printing a size and reading it gives the same number of bytes."""
    assert parse_size(str(Size(value))) == value


def test_auto_prints_as_auto() -> None:
    """The size that is still to be chosen shows as the word that asks for it."""
    assert str(AUTO) == "auto"
    assert str(Size(64 << 20)) == "64MiB"


def test_format_bytes_is_for_people() -> None:
    """Bytes print with a few digits and a binary unit."""
    assert [format_bytes(n) for n in (512, 1536, 6 << 30)] == ["512 B", "1.5 KiB", "6 GiB"]
