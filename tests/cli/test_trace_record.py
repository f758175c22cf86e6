"""`kvstore trace record`: a recording from its begin to its end, and what can be wrong with it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.replay.formats import load_trace

SECONDS = 30.0


class Recorder:
    """The command in a process of its own."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )

        assert self.process.stderr is not None
        self.begun = self.process.stderr.readline()

    def end(self, number: signal.Signals | None = signal.SIGINT) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err


@pytest.fixture
def recorder(
    daemon: Any, command_line: Callable[..., list[str]]
) -> Iterator[Callable[..., Recorder]]:
    """Starts recorders, and waits until each records."""
    made: list[Recorder] = []

    def start(*arguments: str, **options: Any) -> Recorder:
        command = command_line("trace", "record", *arguments)
        made.append(Recorder(command, env=dict(os.environ), **options))
        assert made[-1].begun == "recording; Ctrl-C ends it\n"
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def space(engine: Any) -> Any:
    """A prompt of eight blocks of 16 tokens, which are one block of a trace, is stored in it."""
    return engine.fill(8)


def ask(space: Any, count: int = 3, first: int = 0) -> None:
    """Requests for the prompt and a bit, each ended."""
    for n in range(first, first + count):
        with space.lookup([*range(1, 129), *range(n)], request_id=f"r{n}"):
            pass
        space.finish_request(f"r{n}", 10 + n)


def test_ctrl_c_ends_it_and_keeps_all(
    recorder: Callable[..., Recorder], space: Any, tmp_path: Path
) -> None:
    """The file is whole, compressed as its name says, and the document says what is in it."""
    out = tmp_path / "t.jsonl.gz"
    running = recorder("--out", str(out), "--json")
    ask(space)
    with space.lookup([*range(1, 129)], request_id="still computing"):
        code, text, err = running.end()
    document = json.loads(text)
    assert (code, err) == (0, "")
    assert document["requests"] == 4
    assert document["without_output"] == 1
    assert (document["ended"], document["block_size"]) == ("stopped", 128)
    assert out.read_bytes()[:2] == b"\x1f\x8b"
    requests = load_trace(out)
    assert [r.output_length for r in requests] == [10, 11, 12, 0]
    assert [r.input_length for r in requests] == [128, 129, 130, 128]
    assert len({r.hash_ids[0] for r in requests}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl.gz"]


def test_it_ends_by_itself(
    recorder: Callable[..., Recorder], space: Any, tmp_path: Path, kv: Callable[..., Any]
) -> None:
    """After --limit requests, or --seconds; people get a sentence."""
    running = recorder("--out", str(tmp_path / "a.jsonl"), "--limit", "2")
    ask(space)
    code, text, _ = running.end(None)
    assert code == 0
    assert text.startswith("2 requests in ")
    running = recorder("--out", str(tmp_path / "b.jsonl"), "--seconds", "2")
    ask(space)
    assert running.end(None)[0] == 0
    assert kv("trace", "info", str(tmp_path / "b.jsonl"), "--json").json["requests"] == 3


def test_it_is_stopped_from_elsewhere(
    recorder: Callable[..., Recorder], space: Any, tmp_path: Path, kv: Callable[..., Any]
) -> None:
    """--stop ends whoever's recording; there is one at a time, and none to stop is said."""
    running = recorder("--out", str(tmp_path / "a.jsonl"), "--json")
    ask(space)
    other = kv("trace", "record", "--out", str(tmp_path / "b.jsonl"))
    assert other.code == 1
    assert "a recording is under way" in other.sentence
    assert not (tmp_path / "b.jsonl").exists()
    assert kv("trace", "record", "--stop", "--json").json == {"requests": 3}
    code, text, _ = running.end(None)
    assert (code, json.loads(text)["ended"]) == (0, "stopped")
    none = kv("trace", "record", "--stop")
    assert none.code == 1
    assert "no recording is under way" in none.sentence


def test_files_that_cannot_be_written(daemon: Any, tmp_path: Path, kv: Callable[..., Any]) -> None:
    """A file that is there, a missing name, a directory that is not: said before it begins."""
    there = tmp_path / "t.jsonl"
    there.write_text("mine")
    refused = kv("trace", "record", "--out", str(there))
    assert refused.code == 2
    assert "is there already; name another file or --force" in refused.sentence
    assert kv("trace", "record").code == 2
    missing = kv("trace", "record", "--out", str(tmp_path / "no" / "t.jsonl"))
    assert missing.code == 1
    assert "cannot be written (No such file or directory)" in missing.sentence
    nothing = kv("trace", "record", "--out", str(there), "--force", "--seconds", "100ms")
    assert nothing.code == 1
    assert nothing.err.endswith("kvstore: no request came; no file was written\n")
    assert there.read_text() == "mine"


def test_a_full_disk(recorder: Callable[..., Recorder], space: Any, tmp_path: Path) -> None:
    """When the file can't grow it is over at once: exit 1, and half a file is not left."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    running = recorder("--out", str(tmp_path / "t.jsonl"), preexec_fn=limit)
    ask(space, 200)
    code, text, err = running.end(None)
    assert (code, text) == (1, "")
    assert "cannot be written (File too large)" in err
    assert list(tmp_path.iterdir()) == []


def test_without_a_daemon(tmp_path: Path, kv: Callable[..., Any]) -> None:
    """Exit 3, and no file."""
    out = tmp_path / "t.jsonl"
    gone = kv("trace", "record", "--out", str(out), "--socket", str(tmp_path / "none.sock"))
    assert gone.code == 3
    assert not out.exists()


def test_a_daemon_that_dies_ends_it(
    serve: Callable[..., Any], command_line: Callable[..., list[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What came until then is kept; the command says so and exits 1."""
    own = serve().start()
    monkeypatch.setenv("KVSTORE_SOCKET", own.socket)
    out = tmp_path / "t.jsonl"
    command = command_line("trace", "record", "--out", str(out))
    with own.client() as client:
        space = own.engine(client).fill(8)
        running = Recorder(command, env=dict(os.environ))
        assert running.begun
        ask(space)
        time.sleep(0.5)  # until they were sent
        own.end(signal.SIGKILL)
        code, text, err = running.end(None)
    assert (code, err) == (1, "")
    assert "cut short: the daemon went away" in text
    assert len(load_trace(out)) == 3
