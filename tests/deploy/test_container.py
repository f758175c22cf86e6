"""The container file: linted, its build's commands run on what it copies, and what it starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_page import words

from kvstore.cli.main import run
from kvstore.core.config import load
from kvstore.core.machine import FixedMachine
from kvstore.server.access import Access
from kvstore.store.sessions import Identity

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "container" / "Containerfile"
EXAMPLE = ROOT / "deploy" / "container" / "kvstore.toml"
HADOLINT = Path(sys.executable).with_name("hadolint")
UID = 64000
# What a container has by default: a small /dev/shm, little locked memory, no rights, no writes.
CONTAINER = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=1777 none /dev/shm
mount -t tmpfs -o mode=755 none /run
install -d -m 0750 -o 64000 -g 64000 /run/kvstore
base=$1
shift
case $base in /root/*)
    # Python, for a user that may not enter /root.
    mkdir /run/python
    mount --bind "$base" /run/python
    mount -t tmpfs -o mode=755 none /root
    mkdir -p "$base"
    mount --bind /run/python "$base"
esac
mount -o remount,ro,bind /
exec setpriv --reuid 64000 --regid 64000 --clear-groups --bounding-set=-all --inh-caps=-all \
    --no-new-privs prlimit --memlock=65536 -- "$@"
"""


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction, lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line]  # type: ignore[misc]


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed (make operate-env)")
def test_the_file_is_linted() -> None:
    """hadolint finds nothing, at any level."""
    done = subprocess.run([HADOLINT, str(FILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_no_root_and_nothing_else() -> None:
    """The last stage runs as a numbered user, that its directories belong to; base images agree."""
    assert of("USER") == [f"{UID}:{UID}"]
    assert len({rest.partition(" AS ")[0] for rest in of("FROM")}) == 1
    assert of("RUN")[-1].count(f"-o {UID} -g {UID}") == 2
    # An image that is read-only and has no pip has what the daemon's settings may ask for.
    assert '".[events,encryption]"' in of("RUN")[0]
    assert {"ENTRYPOINT", "HEALTHCHECK"} <= {word for word, _ in instructions()}


def test_what_is_started_is_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """ENTRYPOINT and CMD are a verb with options that there are."""
    (entry,), (arguments,) = of("ENTRYPOINT"), of("CMD")[-1:]
    command = [*json.loads(entry), *json.loads(arguments)]
    assert command[:2] == ["kvstore", "serve"]
    assert run(["serve", "--help"]) == 0
    assert command[2] in capsys.readouterr().out


def test_the_documented_commands_fit_the_image() -> None:
    """The build keeps the health check, and what is run mounts, publishes and waits as needed."""
    build, started = words("Container", "podman build"), words("Container", "podman run")
    assert build[build.index("--format") + 1] == "docker"  # OCI images have no HEALTHCHECK
    assert ROOT / build[build.index("-f") + 1] == FILE
    assert started[-1] == build[build.index("-t") + 1]
    mounts = dict(
        started[i + 1].removesuffix(":ro").split(":") for i, w in enumerate(started) if w == "-v"
    )
    (config_file,) = [source for source, at in mounts.items() if at.endswith(".toml")]
    assert ROOT / config_file == EXAMPLE
    assert mounts[config_file] == json.loads(of("CMD")[-1])[-1]
    config = load(EXAMPLE, {}, FixedMachine(user=UID))
    assert {str(Path(config.server.socket).parent), "/var/lib/kvstore"} <= set(mounts.values())
    port = started[started.index("-p") + 1].rsplit(":", 1)[1]
    assert config.server.metrics == f"0.0.0.0:{port}"
    assert of("EXPOSE") == [port]
    (waits,) = [int(word.split("=")[1]) for word in started if word.startswith("--stop-timeout")]
    assert waits >= 2 * config.server.drain_seconds


def test_the_configuration_needs_no_names() -> None:
    """The image has no group of a name, and its own user may run `kvstore status`."""
    config = load(EXAMPLE, {}, FixedMachine(user=UID))
    assert config.server.socket_group == str(UID)
    assert Access(config.access, UID).grant(Identity(uid=UID)).role == "admin"


def test_what_is_copied_is_let_through() -> None:
    """Each COPY of the build names what is there, and the ignore file lets exactly that through."""
    named = {source for rest in of("COPY") for source in rest.split()[:-1] if "/" not in rest[:2]}
    sources = {name for name in named if not name.startswith("--from")} - {"/opt/kvstore"}
    assert all((ROOT / name).exists() for name in sources)
    ignore = FILE.with_name("Containerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == sources


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter, on disk: what is in it is executed."""
    path = Path(tempfile.mkdtemp(prefix="kvt-image-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def built(place: Path) -> Path:
    """The build stage: its COPY and RUN instructions, in a directory of their own."""
    source, target = place / "src", place / "kvstore"
    for rest in of("COPY"):
        *names, into = rest.split()
        if names[0].startswith("--from"):
            continue
        for name in names:
            to = source / into / (Path(name).name if into.endswith("/") else "")
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, to, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, to)
    # The lock's versions are in this environment already; pip would take minutes to fetch them.
    assert "pip install --no-cache-dir -c requirements/dev.lock" in of("RUN")[0]
    pip = [sys.executable, "-Im", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", str(target), "."],
        cwd=source, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    command = target / "bin" / "kvstore"
    command.write_text(
        f"#!/bin/sh\nPYTHONPATH={target}:{Path(pytest.__file__).parents[1]} "
        f'exec {sys.executable} -Pm kvstore.cli.main "$@"\n'
    )
    return target


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace")
def test_the_image_builds_and_serves(place: Path) -> None:
    """What the build stage installs serves as user 64000 with a container's small /dev/shm.

    Read-only root, no capabilities, 64 KiB of locked memory; it is ready, healthy, and drains.
    """
    target = built(place)
    config = place / "kvstore.toml"
    config.write_text(EXAMPLE.read_text().replace(":9750", ":19750"))
    health = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    health = [part.replace(":9750", ":19750") for part in health]
    script = (
        f"export PATH={target}/bin:{Path(sys.executable).parent}:$PATH\n"
        "export KVSTORE_SOCKET=/run/kvstore/kvstore.sock\n"
        f"kvstore serve --config {config} & daemon=$!\n"
        f"for _ in $(seq 200); do kvstore status --json >/dev/null 2>&1 && break; sleep 0.1; done\n"
        f"{shlex.join(health)}\nkvstore status --json\nkvstore drain >&2\nwait $daemon\n"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", CONTAINER, "sh", sys.base_prefix, "sh", "-euc", script],
        capture_output=True, text=True, timeout=60, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads(done.stdout)
    assert status["state"] == "serving"
    assert status["tiers"]["host"]["capacity_bytes"] == 32 << 20
    assert of("STOPSIGNAL") == ["SIGTERM"]
