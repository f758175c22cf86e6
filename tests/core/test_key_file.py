"""Files of keys: what is read of them, and the one sentence for each that is refused."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from kvstore.core.config import load
from kvstore.core.errors import ConfigError
from kvstore.core.key_file import KEYS_MAX, read_key_file
from kvstore.core.machine import FixedMachine

ONE, TWO = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    return str(caught.value)


def test_keys_are_read_in_order(file: Path) -> None:
    """Hexadecimal and base64 of either alphabet, with comments and empty lines between."""
    url = base64.urlsafe_b64encode(b"\xfb\xff" * 16).decode()
    file.write_text(
        f"# keys\n\nnew {ONE.hex()}  # since May\nold\t{base64.b64encode(TWO).decode()}\nx {url}\n"
    )
    keys = read_key_file(file)
    assert [key.name for key in keys] == ["new", "old", "x"]
    assert [key.secret for key in keys] == [ONE, TWO, b"\xfb\xff" * 16]
    assert len({key.key_id for key in keys}) == 3
    assert 0 not in {key.key_id for key in keys}


def test_a_key_is_never_shown(file: Path) -> None:
    """Neither repr nor an error says what a key is, nor what stands where one should."""
    file.write_text(f"a {ONE.hex()}\n")
    assert ONE.hex() not in repr(read_key_file(file))
    file.write_text(f"{ONE.hex()}\n")
    assert ONE.hex() not in refused(file)
    file.write_text(f"a {ONE.hex()}00\n")
    assert ONE.hex() not in refused(file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o644, 0o620])
def test_a_file_that_others_can_touch_is_refused(file: Path, mode: int) -> None:
    """The sentence names the file, its mode and the command that puts it right."""
    file.write_text(f"a {ONE.hex()}\n")
    file.chmod(mode)
    assert refused(file) == (
        f"tiers.disk.key_file {file} has mode {mode:04o}, others can read it; run: chmod 600 {file}"
    )
    file.chmod(0o400)
    assert len(read_key_file(file)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_file_is_refused(file: Path) -> None:
    """Who owns the file knows the keys: the daemon's user or root."""
    os.chown(file, 12345, 0)
    assert "belongs to user 12345" in refused(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key; add one with"),
        ("# a\n\n", "holds no key"),
        ("a b c\n", "line 1 is not a name and a key"),
        ("\nonlyname\n", "line 2 is not a name and a key"),
        ("a/b " + ONE.hex(), "line 1 is not a name and a key"),
        ("a " + "g" * 64, "line 1: the key of a is not 32 bytes"),
        ("a " + ONE.hex()[:-2], "the key of a is not 32 bytes"),
        ("a " + base64.b64encode(ONE + b"x").decode(), "the key of a is not 32 bytes"),
        (f"a {ONE.hex()}\na {TWO.hex()}", "holds the same name twice"),
        (f"a {ONE.hex()}\nb {ONE.hex().upper()}", "holds the same key twice"),
        ("\n".join(f"k{i} {i:064x}" for i in range(KEYS_MAX + 1)), f"keep {KEYS_MAX} at most"),
        ("#" * (65 << 10), "it is no file of keys"),
    ],
)
def test_what_is_no_file_of_keys_is_refused(file: Path, text: str, said: str) -> None:
    """Each fault in one sentence with the line and what to write."""
    file.write_text(text)
    sentence = refused(file)
    assert said in sentence
    assert sentence.startswith(f"tiers.disk.key_file {file}")
    assert "\n" not in sentence


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Missing, a directory, a pipe: no traceback, and no waiting."""
    assert "cannot be read (No such file" in refused(tmp_path / "none")
    assert "is no file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is no file" in refused(tmp_path / "pipe")


def test_the_configuration_reads_it(file: Path, tmp_path: Path) -> None:
    """`check` refuses a configuration whose keys cannot be read; without a path none are."""
    disk = {"path": str(tmp_path / "disk"), "size": "64MiB", "reserve": "1MiB"}
    tables = {"tiers": {"disk": disk | {"key_file": str(file)}}}
    with pytest.raises(ConfigError, match="holds no key"):
        load(None, {}, FixedMachine(), tables)
    file.write_text(f"a {ONE.hex()}\n")
    assert load(None, {}, FixedMachine(), tables).tiers.disk.key_file == str(file)
    load(None, {}, FixedMachine(), {"tiers": {"disk": {"key_file": "/none"}}})
