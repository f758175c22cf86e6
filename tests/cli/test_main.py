"""The command as a whole: verbs, exit codes, output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

import kvstore
from kvstore.cli import output
from kvstore.cli.main import VERBS, group, run
from kvstore.core.errors import (
    AlreadyRunning,
    ConfigError,
    KVStoreError,
    LimitReached,
    StoreUnavailable,
)


def commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A verb, or the verbs inside it if it is a group."""
    if isinstance(command, click.Group):
        for inner_name, inner in command.commands.items():
            yield from commands(f"{name} {inner_name}", inner)
    else:
        yield name, command


@pytest.mark.parametrize("verb", VERBS)
def test_verb_can_print_json(verb: str) -> None:
    """Every verb is there, says what it does and has --json."""
    found = group.get_command(click.Context(group), verb)
    assert found is not None
    for name, command in commands(verb, found):
        options = [option for parameter in command.params for option in parameter.opts]
        assert "--json" in options, name
        assert command.help, name


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KVStoreError("it failed"), 1), (LimitReached("too much"), 1),
        (ConfigError("key is wrong"), 2), (AlreadyRunning("held"), 2),
        (StoreUnavailable("gone"), 3), (click.UsageError("no such option"), 2),
        (FileNotFoundError(2, "No such file", "trace.jsonl"), 1),
    ],
)  # fmt: skip
def test_errors_are_exit_codes_and_one_sentence(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error ends in its exit code and one sentence on standard error, never a traceback."""

    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(type(group), "get_command", lambda *_: failing)
    assert run(["anything"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("kvstore: ")


def test_failed_result_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that printed a bad result ends with 1."""

    @click.command()
    def failing() -> None:
        output.finish(False)

    monkeypatch.setattr(type(group), "get_command", lambda *_: failing)
    assert run(["anything"]) == 1


def test_unknown_verbs_and_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Mistyping is exit 2 and says where help is."""
    assert run(["chek"]) == 2
    assert run(["check", "--nope"]) == 2
    assert capsys.readouterr().err.count("--help") == 2


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version; --help lists every verb without importing one."""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvstore {kvstore.__version__}\n"
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)


def test_light_verbs_do_not_load_grpc() -> None:
    """check and estimate start without gRPC, the client or rich."""
    code = (
        "import sys; from kvstore.cli.main import run; run(['estimate', '--json']); "
        "run(['check', '--json']); heavy = {'grpc', 'kvstore.client', 'rich'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-Ic", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stderr.strip() == "[]"


def test_table_cells_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells may hold brackets, and numbers get thousands separators."""
    output.print_table(("name", "count"), [("[red]x[/red]", 1234567)])
    text = capsys.readouterr().out
    assert "[red]x[/red]" in text
    assert "1,234,567" in text


def test_target_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path becomes a Unix address, host:port stays, and the environment is the default."""
    monkeypatch.setenv("KVSTORE_SOCKET", "/tmp/x.sock")
    assert output.target(None) == "unix:///tmp/x.sock"
    assert output.target("/a/b.sock") == "unix:///a/b.sock"
    assert output.target("host:9751") == "host:9751"
    assert output.target("unix:///c") == "unix:///c"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed JSON reads back."""
    output.print_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}
