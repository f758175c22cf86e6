"""Trace files: what is read, what is refused and how it is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.replay.formats import (
    BUNDLED,
    TraceError,
    TraceRequest,
    load_trace,
    read_trace,
    write_trace,
)

GOOD = {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def fault(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    return str(caught.value)


def test_read_mooncake_line(tmp_path: Path) -> None:
    """A published line is read as it is; the optional fields have their defaults."""
    [request] = read_trace(write_lines(tmp_path / "t.jsonl", GOOD))
    assert request.hash_ids == [0, 1, 2]
    assert (request.block_size, request.tenant, request.session) == (512, "", "")
    assert request.full_blocks == 2
    assert request.covered_tokens(2) == 6


def test_read_extra_fields(tmp_path: Path) -> None:
    """tenant, session and block_size are read; fields nobody knows are ignored."""
    line = {**GOOD, "tenant": "a", "session": "s", "block_size": 400, "kind": "chat"}
    [request] = read_trace(write_lines(tmp_path / "t.jsonl", line))
    assert (request.tenant, request.session, request.block_size) == ("a", "s", 400)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst", "jsonl.gz"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    """What is written is read back equal, in every compression, and no scrap is left."""
    path = tmp_path / f"t.{suffix}"
    requests = load_trace(BUNDLED, limit=20)
    assert write_trace(path, requests) == 20
    assert load_trace(path) == requests
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """A source that breaks half way leaves the old file as it was and no partial one."""
    path = write_lines(tmp_path / "t.jsonl", "old")

    def broken() -> Any:
        yield TraceRequest(**GOOD)
        raise TraceError("half way")

    with pytest.raises(TraceError, match="half way"):
        write_trace(path, broken())
    assert path.read_text() == "old\n"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: no valid JSON"),
        ("[1]", "line 2: the line: expected `object`"),
        ({"timestamp": 1}, "line 2: the line: object missing required field `input_length`"),
        ({**GOOD, "input_length": -5}, "line 2: input_length: expected `int` >= 0"),
        ({**GOOD, "hash_ids": [0, 1.5, 2]}, "line 2: hash_ids[1]: expected `int`"),
        ({**GOOD, "hash_ids": [0, 1]}, "line 2: hash_ids has 2 ids, but 1030 input tokens"),
        ({**GOOD, "hash_ids": [0, 1, 1]}, "line 2: id 1 follows id 1 here and id 0 before"),
        ({**GOOD, "hash_ids": [0, 2, 1]}, "line 2: id 2 follows id 0 here and id 1 before"),
        ({**GOOD, "hash_ids": [1, 5, 6]}, "line 2: id 1 follows nothing here and id 0 before"),
        ({**GOOD, "timestamp": -1}, "line 2: timestamp: expected `int` >= 0"),
        ({**GOOD, "block_size": 515}, "line 2: block_size is 515, above it was 512"),
        ({**GOOD, "block_size": 0}, "line 2: block_size: expected `int` >= 1"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    """A wrong line is refused in one sentence with file, line number and fault."""
    path = tmp_path / "t.jsonl"
    if isinstance(line, dict) and line.get("block_size") == 515:
        line["hash_ids"] = [0, 1]
    text = fault(write_lines(path, GOOD, line))
    assert text.startswith(str(path))
    assert words in text
    assert "\n" not in text


def test_time_must_not_go_back(tmp_path: Path) -> None:
    """Timestamps that go back are refused, equal ones are fine."""
    late = {**GOOD, "timestamp": 30}
    path = write_lines(tmp_path / "t.jsonl", late, late, {**GOOD, "timestamp": 29.5})
    assert "line 3: timestamp 29.5 is before the line above (30)" in fault(path)


def test_repeated_id_is_refused(tmp_path: Path) -> None:
    """An id cannot come twice in one request, not even as a loop of new ids."""
    line = {**GOOD, "input_length": 2000, "hash_ids": [7, 8, 7, 8]}
    assert "line 1: id 7 follows id 8 here" in fault(write_lines(tmp_path / "t.jsonl", line))


def test_empty_and_missing_files(tmp_path: Path) -> None:
    """An empty file and a missing one are refused by name."""
    empty = tmp_path / "t.jsonl"
    empty.write_bytes(b"\n\n")
    assert "holds no request" in fault(empty)
    assert "cannot be read (No such file" in fault(tmp_path / "missing")


@pytest.mark.parametrize("compressed", ["zst", "gz"])
def test_damaged_compression(tmp_path: Path, compressed: str) -> None:
    """A compressed file that is cut short or changed ends in a sentence, not in a traceback."""
    path = tmp_path / "t"
    if compressed == "zst":
        path.write_bytes(BUNDLED.read_bytes()[:-100])
        # A cut frame ends silently or loudly, depending on where: flip bytes as well.
        data = bytearray(BUNDLED.read_bytes())
        data[2000:2040] = bytes(40)
        path.write_bytes(data)
    else:
        path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 1000)[:-20])
    assert fault(path).startswith(f"{path}, line ")


def test_long_line(tmp_path: Path) -> None:
    """A line that never ends is refused before it fills the memory."""
    path = tmp_path / "t.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(18):
            file.write(b" " * (1 << 20))
    assert "line 1: longer than 16 MiB" in fault(path)
