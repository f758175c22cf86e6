"""Same code, proven: what a live daemon decided is decided again from its journal, line by line."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crowd import BLOCK, WIDE, Crowd, meddle, prompt
from daemons import DaemonProcess
from simulation import Simulation

import kvstore.testing.store as in_process
from kvstore.cli.main import run
from kvstore.policies import inputs
from kvstore.policies.index import PrefixIndex
from kvstore.policies.leaf_scores import LeafScores
from kvstore.policies.residency import Residency
from kvstore.replay.journal import JournalError, check_journal, read_journal, replay
from kvstore.store.assemble import assemble
from kvstore.store.journal import Journal

CONFIG = """
tiers.host.prefault = false
tiers.host.mlock = false
tiers.disk.path = "{disk}"
tiers.disk.size = "64MiB"
tiers.disk.reserve = "1MiB"
tiers.disk.demote_watermark = 0.1
tiers.disk.admission = "{admission}"
policy.eviction = "{policy}"
[[tenants]]
name = "chat"
[[access]]
uid = {uid}
role = "admin"
[[access]]
uid = {uid}
tenant = "chat"
"""

# What no input changes, or what is never called while a store runs.
INDEX_QUESTIONS = {
    "anchored_below", "block_count", "blocks_of", "changes", "check_integrity", "extend",
    "adopt", "find_root", "free_blocks", "graft_columns", "keep_for", "key_before", "keys",
    "listener", "max_blocks", "path", "path_to", "place", "places", "places_grid", "root",
    "root_count", "roots", "run_count", "runs", "symbol", "tier_count", "walk",
}  # fmt: skip
HEARD_FROM_INDEX = {
    "on_adopt", "on_leaf", "on_merge", "on_ready", "on_remove", "on_slots", "on_split",
    "on_unanchor", "attach",
}  # fmt: skip
RESIDENCY_QUESTIONS = {
    "accounts", "check_integrity", "context", "index", "new_policy", "on_action", "on_event",
    "passed_blocks", "policy_name", "quota", "rank_anew", "request_count", "room", "tick",
}  # fmt: skip


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Makes a daemon with a host and a disk tier that are both too small; it keeps a journal."""
    made: list[DaemonProcess] = []

    def make(policy: str, admission: str = "all") -> DaemonProcess:
        config = CONFIG.format(
            disk=tmp_path / "disk", policy=policy, admission=admission, uid=os.getuid()
        )
        made.append(DaemonProcess("16MiB", config))
        made[-1].options = ["--journal", str(tmp_path / "journal.jsonl")]
        return made[-1].start()

    yield make
    for each in made:
        each.close()


def end(daemon: DaemonProcess) -> None:
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def called(path: Path) -> set[str]:
    """Which calls are in a journal."""
    lines = [line for line in read_journal(path) if isinstance(line, list)]
    plain = {line[1] for line in lines if line[0] in (inputs.INDEX, inputs.RESIDENCY)}
    return plain | {line[2] for line in lines if line[0] == inputs.OPEN}


@pytest.mark.parametrize(
    ("policy", "admission"), [("saved_time", "all"), ("saved_time", "measured"), ("lru", "all")]
)
def test_a_live_daemon_is_decided_again(
    daemon: Callable[..., DaemonProcess], tmp_path: Path, policy: str, admission: str
) -> None:
    """Clients and an operator at once, through memory and disk: the action log is the same."""
    live = daemon(policy, admission)
    crowd = Crowd(live, seed=3)
    crowd.run(meddle((policy, "gdsf", policy)))
    end(live)
    assert crowd.restored > 100
    assert crowd.wrong == 0
    path = tmp_path / "journal.jsonl"
    result = check_journal(path)
    assert result.difference is None
    assert result.is_whole
    assert set(result.actions) >= {"admit", "drop"}
    assert called(path) >= {
        "stage", "commit_span", "publish", "anchor", "unanchor", "begin_move", "end_move", "drop",
        "remove", "request", "serve", "finish", "access", "set_quota", "set_policy",
        "demote_above", "make_room", "demotions",
    }  # fmt: skip
    assert ("set_prices" in called(path)) == (admission == "measured")
    lines = list(read_journal(path))
    if admission == "all":
        assert result.actions["demote"] > 0
        moves = [line for line in lines[1:] if line[:2] == ["index", "begin_move"]]
        assert {line[-1] for line in moves} == {0, 1}, "blocks went to disk, and came back from it"
    # What one request brought it, left out: from there on it is decided otherwise.
    assert changed(lines, first(lines, "index", "publish")) is not None


def test_what_was_found_at_the_start_is_part_of_it(
    daemon: Callable[..., DaemonProcess], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A journal that a kill cut off is good up to there; the next life's begins with its finds."""
    live = daemon("saved_time")
    Crowd(live, seed=1, steps=30).run()
    live.kill()
    path, second = tmp_path / "journal.jsonl", tmp_path / "second.jsonl"
    cut = check_journal(path)
    assert (cut.difference, cut.is_whole) == (None, False)
    assert cut.actions["admit"] > 10
    live.options = ["--journal", str(second)]
    live.start()
    assert live.status().readopted_blocks > 0
    Crowd(live, seed=2, steps=30).run()
    end(live)
    words = {line[0] for line in read_journal(second) if isinstance(line, list)}
    assert {inputs.GRAFT, inputs.ADOPT} <= words
    capfd.readouterr()
    assert run(["trace", "check", str(second), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["identical"] is True
    assert document["is_whole"] is True
    assert document["actions"]["admit"] > 10


def test_a_journal_is_a_new_file(daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """One that is there already is not written over: the daemon says so and does not start."""
    path = tmp_path / "journal.jsonl"
    path.write_text("mine")
    with pytest.raises(AssertionError, match=r"journal\.jsonl cannot be made \(File exists\)"):
        daemon("lru")
    assert path.read_text() == "mine"


def test_a_journal_ends_at_its_limit(daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """The daemon goes on without it, says so once, and what is there is still good."""
    live = daemon("lru")
    end(live)
    path = tmp_path / "short.jsonl"
    live.environ["KVSTORE_LIMITS__JOURNAL_BYTES"] = "20kB"
    live.options = ["--journal", str(path)]
    live.start()
    Crowd(live, seed=1, clients=2, steps=20).run()
    end(live)
    assert live.log.count("short.jsonl ends here: it has limits.journal_bytes") == 1
    assert path.stat().st_size <= 20_000
    assert path.stat().st_mode & 0o777 == 0o600
    result = check_journal(path)
    assert (result.difference, result.is_whole) == (None, False)
    assert result.inputs > 20


# ---- In process, on a clock that stands still ----


class Lives:
    """Stores in process that keep journals; each life has its lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journals: list[Journal] = []
        self.lines: list[list[bytes]] = []
        monkeypatch.setattr(in_process, "assemble", self._assemble)

    def _assemble(self, *words: Any, **named: Any) -> Any:
        lines: list[bytes] = []

        def write(line: bytes) -> bool:
            lines.append(line)
            return True

        self.lines.append(lines)
        self.journals.append(Journal(write))
        return assemble(*words, **named, journal=self.journals[-1])

    def results(self) -> list[Any]:
        self.journals[-1].close()
        assert {journal.ended for journal in self.journals} == {""}
        return [replay(map(msgspec.json.decode, lines)) for lines in self.lines]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    return Lives(monkeypatch)


@pytest.mark.parametrize("seed", [4, 9, 11])
def test_every_life_of_a_simulated_store_is_decided_again(lives: Lives, seed: int) -> None:
    """Faults, crashes, shards, clears and time that runs out: each life's actions are the same."""
    Simulation(seed, 250).run()
    results = lives.results()
    assert [result.difference for result in results] == [None] * len(results)
    assert results[-1].is_whole
    assert sum(result.inputs for result in results) > 200


@pytest.fixture
def lines(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The journal of a store under `saved_time` that had to evict."""
    store = in_process.InProcessStore("2MiB", sections={"policy": {"eviction": "saved_time"}})
    with store:
        space = store.client().attach(WIDE)
        for n in range(40):
            tokens = prompt(1 + n % 13, 20)
            with space.lookup(tokens, request_id=str(n)) as match:
                first = match.matched_tokens // BLOCK
            space.put(tokens, [bytes(16384)] * (20 - first), first, request_id=str(n))
            space.finish_request(str(n), 10 * n)
    found = [msgspec.json.decode(line) for line in lives.lines[-1]]
    result = replay(found)
    assert result.difference is None
    assert result.actions["drop"] > 5
    return found


def first(lines: list[Any], *words: str) -> int:
    return next(n for n, line in enumerate(lines[1:], 1) if line[: len(words)] == list(words))


def changed(lines: list[Any], at: int, *instead: Any) -> Any:
    return replay([*lines[:at], *instead, *lines[at + 1 :]]).difference


def test_altered_actions_are_found(lines: list[Any]) -> None:
    """An action that is missing, another one, or one too many: the first such line is named."""
    at = first(lines, "index", "drop") - 1
    assert lines[at][1].startswith("drop")
    assert changed(lines, at).replayed == lines[at][1]
    found = changed(lines, at, ["action", "drop nothing"])
    assert (found.line, found.recorded) == (at + 1, "drop nothing")
    assert changed(lines, at, lines[at], lines[at]).replayed == ""
    assert "the daemon did 'drop nothing'" in str(changed(lines, at, ["action", "drop nothing"]))


def test_a_difference_is_an_exit_code(
    lines: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`trace check` says what was decided otherwise, and exits 1; identical ones exit 0."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    capfd.readouterr()
    assert run(["trace", "check", str(path)]) == 0
    assert capfd.readouterr().out.startswith("identical: ")
    at = first(lines, "index", "drop") - 1
    altered = [*lines[:at], ["action", "drop nothing"], *lines[at + 1 :]]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in altered))
    assert run(["trace", "check", str(path)]) == 1
    assert f"line {at + 1}: the daemon did 'drop nothing'" in capfd.readouterr().out
    assert run(["trace", "check", str(path), "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["identical"] is False


def test_altered_inputs_are_found(lines: list[Any]) -> None:
    """Inputs that are left out, or not what they were, lead to other actions or to none."""
    room = first(lines, "open")
    assert lines[room][2] == "make_room"
    wider = [*lines[room][:-2], 64 * lines[room][-2], lines[room][-1]]
    assert changed(lines, room, wider) is not None
    for words in (("index", "publish"), ("index", "stage"), ("index", "drop"), ("run",)):
        assert changed(lines, first(lines, *words)) is not None, words
    told = [lines[0], *(line for line in lines[1:] if line[:2] != ["residency", "request"])]
    assert replay(told).difference is not None
    assert changed(lines, len(lines) - 2, ["index", "open", 1]) is not None


def test_another_policy_is_found(lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay whose policy is a little different does not pass for the daemon's."""
    assert replay(lines, policy="lru").difference is not None
    monkeypatch.setattr(LeafScores, "first", lambda self, limit: (0.0, self._runs[-1]))
    assert replay(lines).difference is not None


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    """A trace, or damage in the middle, is named with its line; exit code 1."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(JournalError, match="no journal of this version"):
        check_journal(path)
    path.write_text('{"journal": 1, "tiers": 1, "max_blocks": 9, "policy": "lru"}\n{{\n')
    with pytest.raises(JournalError, match="line 2"):
        check_journal(path)
    assert run(["trace", "check", str(path)]) == 1


def test_tokens_are_not_in_a_journal(lives: Lives) -> None:
    """Symbols are digests: no block's tokens can be read from the file."""
    tokens = list(range(1 << 20, (1 << 20) + 256))
    with in_process.InProcessStore("2MiB") as store:
        store.client().attach(WIDE).put(tokens, [bytes(16384)] * 2)
    text = b"\n".join(lives.lines[-1])
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    for shift in range(3):
        assert base64.b64encode(raw[shift : shift + 60]) not in text
    assert b"publish" in text


def test_without_a_journal_nothing_stands_between() -> None:
    """The store works on index and residency themselves: no journal, no cost."""
    with in_process.InProcessStore("2MiB") as store:
        assert type(store.kv.parts.index) is PrefixIndex
        assert type(store.kv.parts.residency) is Residency


def test_every_call_is_an_input_or_a_question() -> None:
    """Who adds a call to index or residency says whether a replay has to repeat it."""
    index = {name for name in dir(PrefixIndex(1)) if not name.startswith("_")}
    assert index == inputs.INDEX_INPUTS | INDEX_QUESTIONS
    residency = Residency()
    residency.attach(PrefixIndex(1))
    there = {name for name in dir(residency) if not name.startswith("_")}
    told = inputs.RESIDENCY_INPUTS | inputs.RESIDENCY_GENERATORS
    assert there == told | RESIDENCY_QUESTIONS | HEARD_FROM_INDEX
