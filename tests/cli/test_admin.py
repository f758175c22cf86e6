"""Durations and sizes as operators type and read them."""

from __future__ import annotations

import click
import pytest

from kvstore.cli.admin import counted, duration_text, parse_duration, size_value
from kvstore.cli.status import _tier_state


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("0", 0), ("0.5", 0.5), ("90s", 90), ("250ms", 0.25), ("15m", 900),
        ("1h30m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172_800), ("1d1h1m1s", 90_061),
    ],
)  # fmt: skip
def test_durations_read(text: str, seconds: float) -> None:
    """Bare seconds, one unit, or several."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "1x", "-5s", "1h30", "nan", "inf", "1e3", "h1", "\u0661s"]
)
def test_other_texts_are_refused(text: str) -> None:
    """What is no duration is said with how to write one."""
    with pytest.raises(ValueError, match=r"is no duration; write it like 90s"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [0.25, 1, 12.5, 59, 60, 5400, 86_400, 90_061])
def test_shown_durations_read_back(seconds: float) -> None:
    """What is printed may be typed."""
    assert parse_duration(duration_text(seconds)) == seconds


def test_none_takes_a_limit_away() -> None:
    """Sizes of quotas may be `none`, which is 0 on the wire; 0 itself is a slip."""
    assert size_value("none") == 0
    assert size_value("1.5 GiB") == 3 << 29
    with pytest.raises(click.BadParameter, match="or none"):
        size_value("0")


def test_counts_have_their_plural() -> None:
    """One block, many blocks."""
    assert [counted(n, "block") for n in (0, 1, 1234)] == ["0 blocks", "1 block", "1,234 blocks"]


def test_prefaulting_shows_until_it_is_over() -> None:
    """A pool whose pages are not there yet is serving, and says how far it is."""
    tier = {"capacity_bytes": 200, "prefaulted_bytes": 50, "state": "serving"}
    assert _tier_state("host", tier) == "serving, 25% prefaulted"
    assert _tier_state("host", {**tier, "prefaulted_bytes": 200}) == "serving"
    assert _tier_state("disk", tier) == "serving"
