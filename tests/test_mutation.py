"""The mutation check on trial: its list fits the tree, and it says so when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import mutation
import pytest
from mutation import Broken, Change, Copy, Edit, Result

BUGS = {
    "publish before hash", "skip symbol compare", "reuse a leased slot", "ack before fsync",
    "commit under a missing parent", "free a parent before its child", "stale epoch accepted",
    "generation not checked after copy", "TTL never fires",
    "staging not cleared between tenants", "cap counted without the index",
    "shard 1 answers for shard 0", "role not checked on one admin call", "failed read published",
}  # fmt: skip
SLOTS = "tests/core/test_slots.py"
OLD, NEW = (
    "    count = len(places)\n    if not count:\n",
    "    count = len(places)\n    if count:\n",
)


def change(old: str, new: str = "", tests: str = SLOTS) -> Change:
    edits = (Edit(old, new),)
    return Change("a bug", "a change", "kvstore/core/slots.py", edits, (tests,), "one_run")


@pytest.mark.parametrize("one", mutation.changes(), ids=lambda one: one.what)
def test_every_change_fits_the_tree(one: Change) -> None:
    """Each known bug can be put into the tree as it is, and the tests named for it are there."""
    mutation.apply(one, mutation.ROOT)
    assert all((mutation.ROOT / path).is_file() for path in one.tests)


def test_all_bugs_are_there() -> None:
    """Each of the bugs that the suite promises to notice has a change."""
    assert {one.bug for one in mutation.changes()} == BUGS


@pytest.mark.parametrize("old", ["no such text", "    if "])
def test_a_change_that_does_not_fit_is_an_error(old: str) -> None:
    """A text that is gone, or there more than once, is no missed bug but a broken check."""
    with pytest.raises(Broken, match="no longer fits"):
        mutation.apply(change(old), mutation.ROOT)
    with pytest.raises(Broken, match="no Python"):
        mutation.apply(change(OLD, "    ((\n"), mutation.ROOT)


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that no bug has is exit 2, not a check of nothing that passes."""
    assert mutation.main(["no such bug"]) == 2
    assert "no such bug" in capsys.readouterr().err


@pytest.mark.long
def test_a_bug_is_tried_on_a_copy(tmp_path: Path) -> None:
    """A change that its tests notice is caught, one that changes nothing is missed, tests that
    fail without it break the check; the working tree stays as it is."""
    before = (mutation.ROOT / "kvstore/core/slots.py").read_text()
    copy = Copy(tmp_path)
    caught = copy.try_out(change(OLD, NEW))
    missed = copy.try_out(change(OLD, OLD + "        count = 0\n"))
    assert caught.caught_by.startswith(SLOTS)
    assert not missed.caught_by
    assert "0 of 1" in mutation.table([caught, missed])
    assert "1 of 1" in mutation.table([caught])
    assert mutation.document([caught])["caught"] == 1
    with pytest.raises(Broken, match="does not pass"):
        mutation.check_unchanged(copy, [change(OLD, NEW, "tests/no_such_test.py")])
    assert (mutation.ROOT / "kvstore/core/slots.py").read_text() == before


def test_the_document_is_json() -> None:
    """What programs read has a row a change, and counts a bug as caught only with all of them."""
    results = [Result(change(OLD), "a test", 1.0), Result(change(OLD), "", 1.0)]
    document = json.loads(json.dumps(mutation.document(results)))
    assert (document["bugs"], document["caught"], len(document["changes"])) == (1, 0, 2)
