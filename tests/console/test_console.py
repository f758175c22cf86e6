"""The console: who may look, what a page may load, and what a real browser shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest
from daemons import DaemonProcess

from kvstore.client import KVSpec
from kvstore.console import Console
from kvstore.console.console import PAGES, is_address
from kvstore.console.peer import uid_of_peer
from kvstore.core.errors import StoreUnavailable
from kvstore.httpd import WatchServer
from kvstore.metrics import Metrics

PAGE_BYTES_MAX = 300_000
EVIL = '<img src=x onerror="document.title=1">'


def get(address: tuple[str, int], path: str, host: str = "") -> tuple[int, str, Any]:
    """(status, body, headers) of a request with this Host header."""
    headers = {"Host": host} if host else {}
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    request = urllib.request.Request(f"http://{name}:{address[1]}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, int]]]:
    """Starts watch servers with a console; answers with the address."""
    made: list[WatchServer] = []

    def start(
        refusal: Callable[[int], str | None] = lambda uid: None,
        data: Callable[[], bytes] = lambda: b"{}",
        host: str = "127.0.0.1",
        **more: Any,
    ) -> tuple[str, int]:
        console = Console(refusal, data, **more)
        made.append(WatchServer((host, 0), Metrics().render, pages=console.answer))
        return made[-1].address

    yield start
    for server in made:
        server.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_says_who_asks(host: str, serve: Callable[..., tuple[str, int]]) -> None:
    """The user of the other end is known, over either protocol, and decides."""
    try:
        asked: list[int] = []
        address = serve(lambda uid: asked.append(uid), host=host)
    except OSError:
        pytest.skip(f"{host} is not to be had here")
    assert get(address, "/console")[0] == 200
    assert asked == [os.getuid()]


@pytest.mark.skipif(os.geteuid() != 0, reason="asks as another user")
def test_another_user_is_told_apart(serve: Callable[..., tuple[str, int]]) -> None:
    """A process of uid 65534 is seen as that, and refused with the reason."""
    address = serve(lambda uid: None if uid == 0 else f"uid {uid} may not")
    url = f"http://{address[0]}:{address[1]}/console/data.json"
    done = subprocess.run(
        ["curl", "-s", url], capture_output=True, text=True, timeout=20, user=65534, check=False
    )
    assert done.stdout == "uid 65534 may not\n"
    assert get(address, "/console/data.json")[0] == 200


def test_a_connection_that_is_not_ours_has_no_user() -> None:
    """Both ends must be in the kernel's tables, and connected."""
    assert uid_of_peer(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert uid_of_peer(("192.0.2.1", 40000), ("127.0.0.1", 9750)) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        ends = client.getsockname(), there.getsockname()
        assert uid_of_peer(*ends) == os.getuid()
        client.close()
        assert uid_of_peer(*ends) is None
        there.close()


def test_who_cannot_be_known_is_refused(serve: Callable[..., tuple[str, int]]) -> None:
    """From another machine there is no user; page, script and numbers are refused alike."""
    address = serve(uid_of=lambda request: None)
    for path in (*PAGES, "/console/data.json"):
        status, text, _ = get(address, path)
        assert (status, "ssh -L" in text) == (403, True), path
    assert get(address, "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:9750", 200), ("localhost", 200), ("[::1]:9750", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example:80", 403), ("evil", 403)],
)  # fmt: skip
def test_names_that_lead_here_are_refused(
    host: str, status: int, serve: Callable[..., tuple[str, int]]
) -> None:
    """A page of another site, whose name was pointed here, cannot read what its visitor may."""
    assert get(serve(), "/console/data.json", host)[0] == status
    assert is_address(host) == (status == 200)


def test_pages_load_nothing_from_elsewhere(serve: Callable[..., tuple[str, int]]) -> None:
    """Everything is ours, small, without inline code, and the browser is told to hold to that."""
    address, total = serve(), 0
    for path in PAGES:
        status, text, headers = get(address, path)
        assert status == 200
        total += len(text.encode())
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert total <= PAGE_BYTES_MAX
    page = (files("kvstore.console") / "index.html").read_text()
    assert not re.search(r"\son\w+=|<style|<script>|style=", page)
    script = (files("kvstore.console") / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def test_other_paths_and_methods_are_none_of_its(serve: Callable[..., tuple[str, int]]) -> None:
    """It answers its own paths alone, and only reads."""
    address = serve()
    for path in ("/console/../etc/passwd", "/console/x", "/consoles", "/"):
        assert get(address, path)[0] == 404, path
    request = urllib.request.Request(
        f"http://127.0.0.1:{address[1]}/console/data.json", b"x", method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 501
    caught.value.close()


def test_a_busy_or_broken_daemon_is_an_answer(serve: Callable[..., tuple[str, int]]) -> None:
    """503 with the sentence while the owner does not answer, 500 without details for a bug."""

    def busy() -> bytes:
        raise StoreUnavailable("the owner thread is busy; try again")

    def broken() -> bytes:
        raise ValueError("secret")

    assert get(serve(data=busy), "/console/data.json")[:2] == (
        503, "the owner thread is busy; try again\n",
    )  # fmt: skip
    status, text, _ = get(serve(data=broken), "/console/data.json")
    assert (status, "secret" in text) == (500, False)


# ---- With a daemon ----


def spec(model: str) -> KVSpec:
    return KVSpec(
        model=model, revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
        block_size=4,
    )  # fmt: skip


@pytest.fixture
def daemon() -> Iterator[tuple[DaemonProcess, tuple[str, int]]]:
    """A daemon with its console, and where that is."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = DaemonProcess("8MiB", metrics=f"127.0.0.1:{port}")
    made.configure("server.console = true\n")
    with made:
        yield made, ("127.0.0.1", port)


def use(daemon: DaemonProcess) -> None:
    """One prompt that is found the second time, by a request and a model with odd names."""
    with daemon.client() as client:
        space = client.attach(spec("a-model"))
        other = client.attach(spec(EVIL))
        for one in (space, other):
            one.put(list(range(16)), [bytes(one.spec.block_bytes)] * 4)
            with one.lookup(list(range(16)), request_id=f"request {EVIL}") as match:
                assert match.matched_tokens == 16


def test_the_document_is_the_daemons_state(daemon: tuple[DaemonProcess, Any]) -> None:
    """Tiers, spaces, tenants, hits and decisions with their reasons are what happened."""
    running, address = daemon
    use(running)
    document = json.loads(get(address, "/console/data.json")[1])
    status = document["status"]
    assert status["state"] == "serving"
    assert status["tiers"]["host"]["block_count"] == 8
    assert {space["model"] for space in status["spaces"]} == {"a-model", EVIL}
    assert document["hit_tokens"]["host"] == 32
    last = document["decisions"][0]
    assert (last["matched_tokens"], last["request_id"]) == (16, f"request {EVIL}")
    assert last["reason"]
    assert status["tenants"][0]["tenant"] == "default"


def test_an_engine_may_not_look(daemon: tuple[DaemonProcess, Any]) -> None:
    """With a rule that makes this user an engine, the console says which role it takes."""
    running, address = daemon
    running.configure(f'server.console = true\n[[access]]\nuid = {os.getuid()}\nrole = "engine"\n')
    running.kill()
    running.start()
    status, text, _ = get(address, "/console/data.json")
    assert status == 403
    assert 'role = "admin"' in text


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_a_browser_shows_it(daemon: tuple[DaemonProcess, Any]) -> None:
    """A real browser draws tiers, decisions and spaces; odd names stay text."""
    running, address = daemon
    use(running)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{address[1]}/console"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    dom = done.stdout
    ready = re.search(r'data-ready="(\d+)"', dom)
    assert ready, dom[-2000:] + done.stderr[-2000:]
    assert "<title>kvstore</title>" in dom
    assert "<img" not in dom
    assert "&lt;img src=x" in dom
    for name, words in {"tiers": "host", "decisions": "load_all", "spaces": "a-model"}.items():
        table = re.search(f'<table id="{name}">(.*?)</table>', dom, re.DOTALL)
        assert table, name
        assert words in table[1], name
