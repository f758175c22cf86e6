"""Pins: prefixes that an operator or engine wants kept, with a time to live."""

from __future__ import annotations

from typing import Any

from kvstore.core.errors import InvalidRequest, LimitReached, NotFound
from kvstore.core.lease import Deadlines
from kvstore.core.plan import PinResult
from kvstore.store.sessions import Session


class Pin:
    """One pinned prefix; `names` are the request id or printed key it was made under."""

    __slots__ = (
        "anchor",
        "block_count",
        "id",
        "name",
        "owner",
        "pinned_bytes",
        "session",
        "tenant",
    )

    def __init__(self, pin_id: str, name: str, session: Session, tenant: str) -> None:
        self.id = pin_id
        self.name = name
        self.session = session
        self.tenant = tenant
        self.anchor: Any = None
        self.block_count = 0
        self.pinned_bytes = 0
        self.owner = 0


class PinTable:
    """Live pins. They outlive the session that made them and end by time or unpin."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._pins: dict[str, Pin] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._next = 0
        self.by_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, session: Session, name: str, run: Any, depth: int, ttl: float) -> PinResult:
        """Keeps the prefix that ends with block `depth` of `run` for `ttl` seconds."""
        parts, limits = self._parts, self._parts.limits
        if not 0 < ttl <= limits.max_pin_ttl_seconds:
            raise InvalidRequest(
                f"ttl_seconds is {ttl}; pass up to limits.max_pin_ttl_seconds, "
                f"{limits.max_pin_ttl_seconds}"
            )
        space = run.root.space
        count = run.first + depth
        byte_count = count * space.slot_bytes * space.shard_count
        self._check_limits(session, space.tenant, byte_count)
        self._next += 1
        pin = Pin(f"pin-{self._next}", name, session, space.tenant)
        pin.owner = parts.next_id()
        pin.anchor = parts.index.anchor(run, depth, pin.owner)
        pin.block_count, pin.pinned_bytes = count, byte_count
        self._pins[pin.id] = pin
        self._deadlines.set(pin.id, parts.clock.now() + ttl)
        session.pinned_bytes += byte_count
        self.by_tenant[space.tenant] = self.by_tenant.get(space.tenant, 0) + byte_count
        return PinResult(pin.id, count, byte_count)

    def unpin(self, name: str) -> int:
        """Ends pins by their id or by the name they were made under."""
        found = [p for p in self._pins.values() if name in (p.id, p.name)]
        if not found:
            raise NotFound(f"nothing is pinned as {name!r}; pins end with their time to live")
        for pin in found:
            self._end(pin)
        return len(found)

    def tick(self, now: float) -> None:
        for pin_id in self._deadlines.pop_due(now):
            self._end(self._pins[pin_id])

    def lost(self, owner: int) -> None:
        """The blocks under the anchor of `owner`, if that is a pin, are gone."""
        for pin in [p for p in self._pins.values() if p.owner == owner]:
            self._end(pin)

    def _check_limits(self, session: Session, tenant: str, byte_count: int) -> None:
        limits = self._parts.limits
        for name, held in (
            ("pinned_bytes_per_session", session.pinned_bytes),
            ("pinned_bytes_per_tenant", self.by_tenant.get(tenant, 0)),
        ):
            if held + byte_count > int(getattr(limits, name)):
                self._parts.recorder.limit_rejected(name)
                raise LimitReached(
                    f"pinning {byte_count} bytes passes limits.{name}, of which {held} are used; "
                    "unpin something or raise it"
                )

    def _end(self, pin: Pin) -> None:
        del self._pins[pin.id]
        self._deadlines.drop(pin.id)
        self._parts.index.unanchor(pin.anchor)
        pin.session.pinned_bytes -= pin.pinned_bytes
        self.by_tenant[pin.tenant] -= pin.pinned_bytes
