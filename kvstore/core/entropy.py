"""Random bytes that nobody can guess: the only module that draws them."""

from __future__ import annotations

import secrets


def random_token(byte_count: int) -> bytes:
    """`byte_count` bytes from the operating system, for session tokens and boot ids."""
    return secrets.token_bytes(byte_count)
