"""`kvstore clear`: what goes, what stays, and that nothing goes by accident."""

from __future__ import annotations

import os
import pty
import subprocess
from typing import Any

import pytest

from kvstore.client import LeaseLost


def test_one_space(kv: Any, engine: Any) -> None:
    """--space drops that space alone; the answer counts its blocks."""
    gone, kept = engine.fill(4, model="gone"), engine.fill(3, model="kept")
    spaces = kv("spaces", "--json").json["spaces"]
    space_id = next(s["space_id"] for s in spaces if s["spec"]["model"] == "gone")
    assert kv("clear", "--space", space_id.upper(), "--yes", "--json").json == {
        "removed_blocks": 4, "space_count": 1,
    }  # fmt: skip
    assert gone.lookup(engine.prompt(4)).matched_tokens == 0
    assert kept.lookup(engine.prompt(3)).matched_tokens == 3 * 16


def test_one_tenant(kv: Any, engine: Any) -> None:
    """--tenant drops all spaces of the tenant, in its own pool too, and nobody else's."""
    engine.fill(2, tenant="medical", model="a")
    engine.fill(3, tenant="medical", model="b")
    kept = engine.fill(1)
    assert kv("clear", "--tenant", "medical", "--yes", "--json").json["removed_blocks"] == 5
    assert kept.lookup(engine.prompt(1)).matched_tokens == 16


def test_everything(kv: Any, engine: Any) -> None:
    """--all empties the store; a second time there is nothing left to drop."""
    space = engine.fill(4)
    assert kv("clear", "--all", "--yes").out.startswith("4 blocks dropped from ")
    assert kv("clear", "--all", "--yes", "--json").json["removed_blocks"] == 0
    assert space.lookup(engine.prompt(4)).matched_tokens == 0


def test_leases_are_lost(kv: Any, engine: Any) -> None:
    """Whoever holds a lease on cleared blocks hears LeaseLost, and reads no other bytes."""
    space = engine.fill(4)
    match = engine.lease(space)
    views = space.restore(match)
    match.check()
    kv("clear", "--all", "--yes")
    with pytest.raises(LeaseLost):
        match.check()
    assert bytes(views[0]) == bytes([7]) * 4096
    match.release()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "exactly one of"),
        (("--all", "--tenant", "chat"), "exactly one of"),
        (("--all", "--space", "0" * 64), "exactly one of"),
        (("--tenant", ""), "--tenant is empty"),
        (("--space", "xyz"), "no space id"),
        (("--space", "0" * 7), "8 to 64 hex digits"),
        (("--space", "0" * 65), "8 to 64 hex digits"),
    ],
)
def test_wrong_options_are_exit_2(kv: Any, daemon: Any, options: Any, words: str) -> None:
    """What to clear is said once and exactly."""
    outcome = kv("clear", *options, "--yes")
    assert outcome.code == 2
    assert words in outcome.sentence


def test_without_yes_nothing_goes(kv: Any, engine: Any) -> None:
    """Without --yes and without a terminal to ask at, the verb refuses with exit 2."""
    space = engine.fill(4)
    outcome = kv("clear", "--all")
    assert outcome.code == 2
    assert "--yes" in outcome.sentence
    engine.lease(space).release()


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, 64), (b"y\n", 0, 0)])
def test_a_terminal_is_asked(
    engine: Any, daemon: Any, command_line: Any, answer: bytes, code: int, left: int
) -> None:
    """On a terminal it asks, with the blocks and models at stake; a no drops nothing, exit 1."""
    space = engine.fill(4)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command_line("clear", "--all"), stdin=theirs, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "KVSTORE_SOCKET": daemon.socket}, cwd="/",
    )  # fmt: skip
    os.write(ours, answer)
    out, err = process.communicate(timeout=30)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == code
    assert b"Drop 4 blocks, 16 KiB, of" in err
    assert b"tiny" in err
    assert (b"4 blocks dropped" in out) == (code == 0)
    assert (b"nothing was dropped" in err) == (code == 1)
    assert space.lookup(engine.prompt(4)).matched_tokens == left


def test_unknown_names_are_exit_1(kv: Any, daemon: Any) -> None:
    """A space or tenant that is not there is named."""
    for options in (("--space", "0" * 16), ("--tenant", "nobody")):
        outcome = kv("clear", *options, "--yes")
        assert outcome.code == 1
        assert options[1] in outcome.sentence
        assert "kvstore spaces" in outcome.sentence


def test_ambiguous_ids_are_refused(kv: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """First digits that fit two spaces name none."""
    engine.fill(1)
    engine.fill(1, model="other")
    monkeypatch.setattr("kvstore.cli.spaces.ID_DIGITS_MIN", 0)
    outcome = kv("clear", "--space", "", "--yes")
    assert outcome.code == 1
    assert "spaces begin with" in outcome.sentence
