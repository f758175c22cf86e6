"""`kvstore check`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kvstore.cli.check import to_toml
from kvstore.cli.main import run

CONFIG = """
[tiers.host]
size = "16MiB"
pool = "sealed"
[index]
max_blocks = 1000
[limits]
staging_bytes = "64MiB"
[[access]]
uid = 5
tenant = "a"
[[tenants]]
name = "a"
host_cap = "8MiB"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvstore.toml"
    path.write_text(CONFIG)
    return path


def test_check_prints_the_effective_configuration(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text is TOML with every default filled in; --json is the same as one document."""
    assert run(["check", "--config", str(file)]) == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert tables["tiers"]["host"]["size"] == "16MiB"
    assert tables["limits"]["sessions"] == 256
    assert tables["access"][0]["uid"] == 5
    assert run(["check", "--config", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.pop("tenants") == tables.pop("tenants")
    assert document == tables


def test_printed_configuration_is_accepted(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What check prints can be the next configuration, and prints the same again."""
    assert run(["check", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(printed)
    assert run(["check", "--config", str(tmp_path / "again.toml")]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[tiers.host]\nsize = "900TiB"', "tiers.host.size"),
        ("[tiers.host]\nsize = 0", "tiers.host.size"),
        ('[tiers.disk]\npath = "/x"', "tiers.disk"),
        ('[policy]\neviction = "best"', "policy.eviction is 'best'; pass one of arc"),
        ("[server", "kvstore.toml"),
    ],
)
def test_bad_configuration_is_exit_2(
    file: Path, text: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration the daemon would refuse: exit 2, the key named, nothing printed."""
    file.write_text(text)
    assert run(["check", "--config", str(file), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert key in captured.err


def test_toml_escapes_strings() -> None:
    """Strings with quotes, backslashes and other scripts survive."""
    tables = {"a": {"text": 'q"\\\t\u00e9', "deep": {"on": True, "ratio": 0.5}}, "b": [{"n": 1}]}
    assert tomllib.loads(to_toml(tables)) == tables
