"""A daemon whose disk tier is encrypted: keys that are wrong, change, or leave, and kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually

from kvstore.cli.main import run
from kvstore.core.errors import ConfigError
from kvstore.daemon.tiers import open_vault

ONE, TWO = "one " + "1f" * 32 + "\n", "two " + "2e" * 32 + "\n"
PROMPTS = [list(range(n * 10_000, n * 10_000 + 64)) for n in range(8)]  # of 16 blocks each


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(ONE)
    return path


@pytest.fixture
def daemon(tmp_path: Path, keys: Path) -> Iterator[DaemonProcess]:
    made = DaemonProcess("16MiB", sections(tmp_path, keys))
    yield made
    made.close()


def sections(tmp_path: Path, keys: Path | None) -> str:
    tier = {"path": str(tmp_path / "disk"), "size": "32MiB", "reserve": "1MiB"}
    tier |= {"key_file": str(keys)} if keys else {}
    return "tiers.host.prefault = false\ntiers.host.mlock = false\n" + "".join(
        f'tiers.disk.{key} = "{value}"\n' for key, value in tier.items()
    )


def put(daemon: DaemonProcess, *prompts: list[int]) -> None:
    """Stores prompts, durably."""
    with daemon.client() as client:
        space = client.attach(SPEC)
        for tokens in prompts:
            assert not space.put(tokens, Tagged().blocks(tokens)).rejected
        answer = client.admin.flush()
        assert not answer.left_out_blocks


def found(daemon: DaemonProcess) -> list[int]:
    """Blocks restored of each prompt; asserts that each byte of them is right."""
    counts = []
    with daemon.client() as client:
        space = client.attach(SPEC)
        for tokens in PROMPTS:
            with space.lookup(tokens) as match:
                views = space.restore(match) if match.matched_tokens else []
                assert Tagged().wrong(tokens, views) == 0
                counts.append(len(views))
    return counts


def reboot(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.lose_memory()


def refused(daemon: DaemonProcess) -> tuple[int, str]:
    daemon.log_path.unlink(missing_ok=True)
    code = daemon.launch().wait(30)
    (line,) = [line for line in daemon.log.splitlines() if line.startswith("kvstore: ")]
    assert "Traceback" not in daemon.log
    return code, line


def test_durable_blocks_outlive_kills_and_are_in_no_file(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """I9, I11: kill -9 in the middle of flushes: what was acknowledged is right, and sealed."""
    for life in range(2):
        daemon.start()
        put(daemon, *PROMPTS[life * 3 : life * 3 + 3])
        with daemon.client() as client:
            space = client.attach(SPEC)
            for tokens in PROMPTS[6:]:
                space.put(tokens, Tagged().blocks(tokens))
            pid = os.fork()
            if not pid:  # asks for a flush that the kill cuts short
                os.execv(sys.executable, [sys.executable, "-m", "kvstore.cli.main", "flush",
                                          "--socket", str(daemon.socket)])  # fmt: skip
            eventually(lambda: False, 0.2 * life)
            reboot(daemon)
            os.waitpid(pid, 0)
    daemon.start()
    assert found(daemon)[:6] == [16] * 6
    raw = b"".join(path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file())
    for tokens in PROMPTS:
        for block, key in zip(Tagged().blocks(tokens), Tagged().keys(tokens), strict=True):
            assert block[:32] not in raw
            assert key not in raw
        assert bytes(memoryview(bytes(4)).cast("B")) in raw  # there is something to look at


def test_rotation(daemon: DaemonProcess, keys: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SIGHUP takes a new first key; old blocks stay readable until their key leaves the file."""
    daemon.start()
    put(daemon, *PROMPTS[:2])
    keys.write_text(TWO + ONE)
    daemon.signal(signal.SIGHUP)
    assert eventually(lambda: "(keys in tiers.disk.key_file)" in daemon.log), daemon.log
    assert "blocks are written to disk with key two; there are 32 with one" in daemon.log
    put(daemon, *PROMPTS[2:5])
    reboot(daemon)
    daemon.start()
    assert found(daemon) == [16] * 5 + [0] * 3
    assert "there are 32 with one, 48 with two" in daemon.log
    reboot(daemon)
    keys.write_text(TWO)
    daemon.start()
    assert found(daemon) == [0, 0] + [16] * 3 + [0] * 3
    assert "32 blocks need key" in daemon.log
    reboot(daemon)
    daemon.start()
    assert found(daemon) == [0, 0] + [16] * 3 + [0] * 3


def test_a_reload_with_bad_keys_changes_nothing(daemon: DaemonProcess, keys: Path) -> None:
    """A file that is not in order is told, and the old keys go on."""
    daemon.start()
    keys.write_text("two 00\n")
    daemon.signal(signal.SIGHUP)
    assert eventually(lambda: "was not reloaded" in daemon.log), daemon.log
    assert "the key of two is not 32 bytes" in daemon.log
    keys.write_text(ONE)
    put(daemon, PROMPTS[0])
    reboot(daemon)
    daemon.start()
    assert found(daemon)[0] == 16


def test_a_wrong_key_file_is_refused_and_costs_nothing(
    daemon: DaemonProcess, keys: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No key that fits, none at all, open modes: one sentence each, and all is there after."""
    daemon.start()
    put(daemon, *PROMPTS[:2])
    reboot(daemon)
    keys.write_text(TWO)
    code, sentence = refused(daemon)
    assert (code, "no key of tiers.disk.key_file opens one" in sentence) == (1, True)
    daemon.configure(sections(tmp_path, None))
    code, sentence = refused(daemon)
    assert (code, "tiers.disk.key_file is empty" in sentence) == (1, True)
    daemon.configure(sections(tmp_path, keys))
    keys.chmod(0o640)
    code, sentence = refused(daemon)
    assert (code, f"chmod 600 {keys}" in sentence) == (2, True)
    keys.chmod(0o600)
    keys.write_text(ONE)
    capfd.readouterr()
    assert run(["fsck", str(tmp_path / "disk")]) == 0
    assert "32 encrypted blocks could not be checked: pass --key-file" in capfd.readouterr().out
    assert run(["fsck", str(tmp_path / "disk"), "--key-file", str(keys), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["unchecked_blocks"] == {}
    daemon.start()
    assert found(daemon)[:2] == [16, 16]


def test_an_unencrypted_tier_starts_anew(daemon: DaemonProcess, keys: Path, tmp_path: Path) -> None:
    """With keys from now on: blocks in clear are misses, which is said; new ones are sealed."""
    daemon.configure(sections(tmp_path, None))
    daemon.start()
    put(daemon, PROMPTS[0])
    reboot(daemon)
    daemon.configure(sections(tmp_path, keys))
    daemon.start()
    assert "16 blocks are in clear" in daemon.log
    assert found(daemon)[0] == 0
    put(daemon, PROMPTS[1])
    reboot(daemon)
    daemon.start()
    assert found(daemon)[:3] == [0, 16, 0]
    assert "there are 16 with one" in daemon.log


def test_without_the_package_the_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    """Keys without cryptography: what to install. Without keys nothing is missed."""
    monkeypatch.delitem(sys.modules, "kvstore.tiers.disk.vault", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install kvstore-daemon\[encryption\]"):
        open_vault(str(keys))
    assert open_vault("") is None


def test_a_daemon_without_keys_does_not_load_it(tmp_path: Path) -> None:
    """A disk tier in clear opens, writes and reads where there is no cryptography."""
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    made = DaemonProcess("16MiB", sections(tmp_path, None))
    hidden = tmp_path / "hidden" / "cryptography"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden')\n")
    made.environ["PYTHONPATH"] = str(hidden.parent)
    try:
        made.start()
        put(made, PROMPTS[0])
        reboot(made)
        made.start()
        assert found(made)[0] == 16
    finally:
        made.close()
