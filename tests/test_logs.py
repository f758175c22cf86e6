"""Logs: one line each, limited by message, with request ids."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvstore import logs
from kvstore.core.clock import ManualClock

LOG = logging.getLogger("kvstore.test")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    logger = logging.getLogger("kvstore")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def test_text_is_one_line_with_fields(clock: ManualClock) -> None:
    """A text line holds part, message, fields and the request id; line breaks are escaped."""
    stream = io.StringIO()
    logs.configure(clock, "text", "info", stream)
    with logs.request("req-1"):
        LOG.info("stored %d blocks\nfor you", 3, extra=logs.fields(tenant="a b", space=7))
    LOG.debug("too detailed")
    (line,) = stream.getvalue().splitlines()
    assert "INFO kvstore.test: stored 3 blocks\\nfor you" in line
    assert line.endswith('tenant="a b" space=7 request_id=req-1')


def test_json_is_one_document_a_line(clock: ManualClock) -> None:
    """A JSON line holds the same, and an exception's traceback."""
    stream = io.StringIO()
    logs.configure(clock, "json", "debug", stream)
    try:
        raise ValueError("bad")
    except ValueError:
        LOG.exception("it broke", extra=logs.fields(blocks=2))
    document = json.loads(stream.getvalue())
    assert document["level"] == "error"
    assert (document["part"], document["message"]) == ("kvstore.test", "it broke")
    assert document["blocks"] == 2
    assert "ValueError: bad" in document["traceback"]


def test_repeats_are_held_back_and_counted(clock: ManualClock) -> None:
    """A message that repeats is written a few times a window, then its number is told."""
    stream = io.StringIO()
    logs.configure(clock, "json", "info", stream)
    for i in range(1000):
        LOG.warning("block %d is corrupt", i)
    LOG.warning("another message")
    assert len(stream.getvalue().splitlines()) == logs.BURST + 1
    clock.advance(logs.WINDOW_SECONDS)
    LOG.warning("block %d is corrupt", 1000)
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert last["held_back"] == 1000 - logs.BURST


def test_many_messages_take_bounded_memory(clock: ManualClock) -> None:
    """The table of messages seen is bounded, whatever is logged."""
    limit = logs.RateLimit(clock)
    for i in range(3 * logs.KEYS_MAX):
        record = logging.LogRecord("kvstore", logging.INFO, "", 0, f"message {i}", (), None)
        assert limit.filter(record)
        assert len(limit._seen) <= logs.KEYS_MAX


def test_configuring_again_replaces(clock: ManualClock) -> None:
    """A reload does not write every line twice."""
    first, second = io.StringIO(), io.StringIO()
    logs.configure(clock, stream=first)
    logs.configure(clock, stream=second)
    LOG.info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
