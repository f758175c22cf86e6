"""`Size`: a number of bytes that is written with its unit."""

from __future__ import annotations

import re

UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
SIZE_MAX = 1 << 56
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BY_LOWER = {name.lower(): factor for name, factor in UNITS.items()}


class Size(int):
    """Bytes; prints as the largest binary unit that divides it, so that it reads back equal."""

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self % UNITS[unit] == 0:
                return f"{int(self) // UNITS[unit]}{unit}"
        return f"{int(self)}B"

    __repr__ = __str__


class AutoSize(Size):
    """A size that may be `auto` (0): configuration replaces it by one that fits the machine."""

    def __str__(self) -> str:
        return super().__str__() if self else "auto"

    __repr__ = __str__


AUTO = AutoSize(0)


def parse_size(text: str | int) -> Size:
    """Bytes of `64GiB`, `1.5 GiB`, `500MB` or a bare number. Raises ValueError."""
    if isinstance(text, str):
        value = _parse_text(text)
    elif isinstance(text, bool) or not isinstance(text, int):
        raise ValueError(f"expected a size such as '64GiB', got {text!r}")
    else:
        value = text
    if not 0 < value <= SIZE_MAX:
        raise ValueError(f"the size {text!r} is out of range; pass 1 byte or more, such as '64GiB'")
    return Size(value)


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    factor = _BY_LOWER.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{text!r} is no size; write a number and a unit ({', '.join(UNITS)}), such as '64GiB'"
        )
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(count: float) -> str:
    """For people: three digits and a binary unit, such as `1.50 GiB`; not exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.4g} {unit}"
    return f"{count:.4g} B"
