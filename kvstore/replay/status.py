"""A daemon's status as plain values, once or over a connection that stays."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvstore.client import KVClient


class StatusReader:
    """Reads the status again and again over one connection."""

    def __init__(self, target: str) -> None:
        self._client = KVClient.connect(target, client_name="status")

    def __enter__(self) -> StatusReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def read(self) -> dict[str, Any]:
        return plain(self._client.status())


def read_status(target: str) -> dict[str, Any]:
    """The status of the daemon at `target`."""
    with StatusReader(target) as reader:
        return reader.read()


def plain(message: Any) -> dict[str, Any]:
    """A message's fields, unset ones included, as dictionaries, lists and numbers."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if hasattr(value, "items"):
            values[field.name] = {key: _plain_value(value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_plain_value(item) for item in value]
        else:
            values[field.name] = _plain_value(value)
    return values


def _plain_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return plain(value) if hasattr(value, "DESCRIPTOR") else value
