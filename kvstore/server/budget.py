"""`MessageBudget`: bytes of messages under way, over all connections and transports."""

from __future__ import annotations


class MessageBudget:
    """A bound on buffered message bytes; who gets no bytes refuses the message."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, byte_count: int) -> bool:
        """True if `byte_count` more fit; the caller then gives them back."""
        if self.used_bytes + byte_count > self.limit_bytes:
            return False
        self.used_bytes += byte_count
        return True

    def give_back(self, byte_count: int) -> None:
        self.used_bytes -= byte_count
        assert self.used_bytes >= 0, "message bytes were given back twice"
