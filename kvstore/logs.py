"""Logs of the daemon: text or JSON lines, rate-limited by message, with request ids.

Parts log through `logging.getLogger("kvstore.<part>")` with %-style messages; what belongs to one
line goes in `extra=fields(space=..., blocks=...)`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from kvstore.core.clock import Clock

BURST = 10
WINDOW_SECONDS = 10.0
KEYS_MAX = 1024

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """What `extra=` takes so that the line carries `values`."""
    return {"fields": values}


@contextmanager
def request(request_id: str) -> Iterator[None]:
    """Every line logged inside carries `request_id`."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


class RateLimit(logging.Filter):
    """Lets through `BURST` lines of one message in a window, then counts what it holds back.

    A message is its logger and its format string, so the numbers in it do not matter. The first
    line of the next window says how many were held back.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)), self._clock.now()
        entry = self._seen.get(key)
        if entry is None or now - entry[0] >= WINDOW_SECONDS:
            if len(self._seen) >= KEYS_MAX:
                self._seen.clear()
            held_back = int(entry[1]) - BURST if entry else 0
            record.held_back = max(held_back, 0)
            self._seen[key] = [now, 1]
            return True
        entry[1] += 1
        return entry[1] <= BURST


def _line_fields(record: logging.LogRecord) -> dict[str, Any]:
    values = dict(getattr(record, "fields", {}))
    request_id = _request_id.get()
    if request_id:
        values["request_id"] = request_id
    if getattr(record, "held_back", 0):
        values["held_back"] = record.held_back  # type: ignore[attr-defined]
    return values


def _when(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`time LEVEL part: message key=value ...`, one line; a traceback follows indented."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {k}={_plain(v)}" for k, v in _line_fields(record).items())
        line = f"{_when(record)} {record.levelname} {record.name}: {record.getMessage()}{pairs}"
        line = line.replace("\n", "\\n").replace("\r", "\\r")
        if record.exc_info:
            trace = "".join(traceback.format_exception(*record.exc_info))
            line += "\n" + "\n".join(f"    {part}" for part in trace.splitlines())
        return line


def _plain(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if not text or not text.isprintable() or " " in text else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "part": record.name,
            "message": record.getMessage(),
            **_line_fields(record),
        }
        if record.exc_info:
            document["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(document, default=str)


def configure(
    clock: Clock, format: str = "text", level: str = "info", stream: TextIO | None = None
) -> logging.Handler:
    """Sends what `kvstore` loggers say to `stream` (standard error); replaces an earlier call."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(RateLimit(clock))
    logger = logging.getLogger("kvstore")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return handler
