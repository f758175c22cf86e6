"""The image under podman, run with the flags that docs/deploy.md has.

KVSTORE_TEST_PODMAN is the command, with options if it needs any: `podman --runtime=runc`. The image
is built before, by the page's own line.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_page import words

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "container" / "kvstore.toml"
PODMAN = shlex.split(os.environ.get("KVSTORE_TEST_PODMAN", ""))
UID, ENGINE = 64000, 1000
CAP_SYS_RESOURCE = 24
IMAGE = words("Container", "podman build")[-2]
SENTENCE = re.compile(r"locking memory stopped after \d+ bytes \(.*raise LimitMEMLOCK")
CLIENT = """
import sys, time
from kvstore.client import KVClient, KVSpec
spec = KVSpec(model="m", revision="1", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16",
              block_size=16)
prompt = list(range(64))
with KVClient.connect() as client:
    space = client.attach(spec)
    blocks = [bytes([i + 7]) * space.spec.block_bytes for i in range(4)]
    if "put" in sys.argv:
        space.put(prompt, blocks)
    with space.lookup(prompt, request_id=sys.argv[1]) as match:
        print(match.matched_tokens, [bytes(each) for each in space.restore(match)] == blocks,
              flush=True)
        time.sleep(30 if "hold" in sys.argv else 0)
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PODMAN, reason="set KVSTORE_TEST_PODMAN=podman, with the image built"),
    pytest.mark.skipif(os.geteuid() != 0, reason="podman runs as root here, for its uids"),
]


def podman(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PODMAN, *arguments], capture_output=True, text=True, timeout=seconds, check=False
    )


def limits(memlock: str = "-1") -> list[str]:
    """--ulimit flags: those of the page; without CAP_SYS_RESOURCE no more than this process has."""
    (line,) = [it for it in Path("/proc/self/status").read_text().splitlines() if "CapEff" in it]
    if int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1:
        return ["--ulimit", f"memlock={memlock}"]
    most = {"memlock": int(memlock), "nofile": 4096, "nproc": 4096}
    found = {name: _at_most(name, value) for name, value in most.items()}
    flags = [f"{name}={value}:{value}" for name, value in found.items()]
    return [word for flag in flags for word in ("--ulimit", flag)]


def _at_most(name: str, value: int) -> int:
    own = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    bounds = {value, own} - {resource.RLIM_INFINITY}
    return min(bounds, default=resource.RLIM_INFINITY)


class Place:
    """Directories, names and a configuration of one test's own, and the page's line with them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.sockets, self.pools = path / "run", path / "pools"
        self.config = path / "kvstore.toml"
        for directory, mode in ((self.sockets, 0o750), (self.pools, 0o700)):
            directory.mkdir()
            directory.chmod(mode)
            os.chown(directory, UID, UID)
        (path / "client.py").write_text(CLIENT)
        self.configure("64MiB")

    def configure(self, size: str) -> None:
        engines = f'[[access]]\nuid = {ENGINE}\n[[access]]\nuid = 0\n[tiers.host]\nsize = "{size}"'
        text = EXAMPLE.read_text()
        assert text.count("[tiers.host]") == 1
        self.config.write_text(text.replace("[tiers.host]", engines))
        self.config.chmod(0o644)

    def line(self, *extra: str) -> list[str]:
        """The page's `podman run`, of which only names, places and what is not to be had differ."""
        page = words("Container", "podman run")[1:]
        at = page.index("--ulimit")
        assert page[at : at + 2] == ["--ulimit", "memlock=-1"]
        page[at : at + 2] = limits()
        other = {
            "kvstore": self.name,
            "/run/kvstore:/run/kvstore": f"{self.sockets}:/run/kvstore",
            "kvstore:/var/lib/kvstore": f"{self.name}:/var/lib/kvstore",
            "./deploy/container/kvstore.toml:/etc/kvstore/kvstore.toml:ro":
                f"{self.config}:/etc/kvstore/kvstore.toml:ro",
            "127.0.0.1:9750:9750": "127.0.0.1::9750",
        }  # fmt: skip
        assert set(other) <= set(page)
        started = [other.get(word, word) for word in page]
        return [*started[:-1], *extra, started[-1]]

    def start(self) -> None:
        verb, *line = self.line("-d", "-v", f"{self.pools}:/dev/shm/kvstore")
        done = podman(verb, *line)
        assert done.returncode == 0, done.stderr
        self.wait()

    def wait(self) -> None:
        """Until it serves."""
        end = time.monotonic() + 60
        while podman("exec", self.name, "kvstore", "status").returncode:
            assert time.monotonic() < end, podman("logs", self.name).stderr
            time.sleep(0.2)

    def engine(self, *arguments: str, groups: tuple[str, ...] = (str(UID),)) -> list[str]:
        """The command line of a client in a container of its own."""
        joined = [word for group in groups for word in ("--group-add", group)]
        return [
            "run", "--rm", "--net=none", "--read-only", "-u", f"{ENGINE}:{ENGINE}", *joined,
            *limits(), "-v", f"{self.sockets}:/run/kvstore:ro",
            "-v", f"{self.path}/client.py:/client.py:ro", "--entrypoint", "python", IMAGE,
            "/client.py", *arguments,
        ]  # fmt: skip

    def finds_all(self) -> bool:
        """Whether an engine in a second container gets the right bytes."""
        return podman(*self.engine("get")).stdout == "64 True\n"


@pytest.fixture
def place() -> Iterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="kvt-podman-", dir="/dev/shm"))
    path.chmod(0o755)
    yield Place(path)
    podman("rm", "-f", "-t", "0", path.name)
    podman("volume", "rm", "-f", path.name)
    subprocess.run(["rm", "-rf", str(path)], check=True)


def test_it_serves_confined_and_gets_healthy(place: Place) -> None:
    """Under the page's flags: its own uid, no writes to the image, healthy, metrics from outside.

    `kvstore status` and `kvstore doctor` work inside.
    """
    place.start()
    assert podman("exec", place.name, "id", "-u").stdout == f"{UID}\n"
    assert podman("exec", place.name, "touch", "/opt/kvstore/x").returncode != 0
    assert podman("exec", place.name, "touch", "/var/lib/kvstore/x").returncode == 0
    doctor = json.loads(podman(
        "exec", place.name, "kvstore", "doctor", "--json", "--config", "/etc/kvstore/kvstore.toml"
    ).stdout)  # fmt: skip
    assert doctor["fail"] == 0
    assert podman("healthcheck", "run", place.name).returncode == 0
    state = json.loads(podman("inspect", place.name).stdout)[0]["State"]
    assert (state.get("Health") or state["Healthcheck"])["Status"] == "healthy"
    port = podman("port", place.name, "9750").stdout.strip()
    with urllib.request.urlopen(f"http://{port}/metrics", timeout=5) as answer:
        assert b"kvstore_build_info" in answer.read()


def test_engines_outside_get_the_right_bytes(place: Place) -> None:
    """One on the host and one in a container without /dev/shm of the daemon's; by the group only.

    What the first put is found by all, and after a restart and a kill too.
    """
    place.start()
    environ = {**os.environ, "KVSTORE_SOCKET": f"{place.sockets}/kvstore.sock"}
    done = subprocess.run(
        [sys.executable, str(place.path / "client.py"), "put"],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "64 True\n", done.stderr
    assert place.finds_all()
    stranger = podman(*place.engine("get", groups=()))
    assert f"uid {ENGINE} may not connect" in stranger.stderr
    for stop in (("stop",), ("kill", "-s", "KILL")):
        assert podman(*stop, place.name).returncode == 0
        podman("wait", place.name)
        assert podman("start", place.name).returncode == 0
        place.wait()
        assert place.finds_all(), stop


def test_a_stop_lets_it_drain(place: Place) -> None:
    """With blocks in use it drains for all of its time, and is not killed meanwhile."""
    place.start()
    assert podman(*place.engine("first", "put")).returncode == 0
    with subprocess.Popen(
        [*PODMAN, *place.engine("second", "hold")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "64 True\n"
        start = time.monotonic()
        assert podman("stop", place.name).returncode == 0
        assert 9 < time.monotonic() - start < 40
    assert json.loads(podman("inspect", place.name).stdout)[0]["State"]["ExitCode"] == 0


def test_little_memory_is_told_in_a_sentence(place: Place) -> None:
    """A tier above /dev/shm's 64 MiB: exit 2. 64 KiB of locked memory: a warning, once."""
    place.configure("1GiB")
    small = ["--rm", "-v", f"{place.config}:/etc/kvstore/kvstore.toml:ro", IMAGE]
    done = podman("run", *limits(), *small)
    assert done.returncode == 2
    assert "the file system of /dev/shm/kvstore has 62.5 MiB free" in done.stderr
    place.configure("16MiB")
    done = podman("run", "-d", "--name", place.name, *limits("65536"), *small[1:])
    place.wait()
    assert len(SENTENCE.findall(podman("logs", place.name).stderr)) == 1
