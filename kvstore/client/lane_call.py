"""`LaneCall`: a call under way over the side socket, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.client.gate import Gate
from kvstore.client.transport import LateHandler
from kvstore.core.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client.lane import LaneTransport


class LaneCall:
    """A call under way: `items` of a stream, then `value` or `error`.

    While `is_idle` its thread waits and holds nothing that others need.
    """

    # Of the class until they are set: few calls need them all.
    ready = done = abandoned = is_idle = False
    value: Any = None
    error: KVStoreError | None = None
    descriptors: Sequence[int] = ()
    gate: Gate | None = None

    def __init__(
        self, transport: LaneTransport, method: str, timeout: float, on_late: LateHandler | None
    ) -> None:
        self.transport = transport
        self.id = next(transport.call_ids)
        self.method = method
        self.timeout = timeout
        self.deadline = transport.clock.now() + timeout
        self.on_late = on_late
        self.items: deque[Any] = deque()

    def result(self) -> Any:
        self.transport.wait(self)
        if self.error is not None:
            raise self.error
        return self.value

    def signal(self) -> None:
        """Something is there to be taken. After the state is written, before gates are read."""
        self.ready = True
        gate = self.gate
        if gate is not None:
            gate.open()
