"""Alert rules, dashboard and runbooks: against the metrics there are, promtool and Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import DaemonProcess

from kvstore.client import KVSpec
from kvstore.metrics import HISTOGRAM, TABLE, Metrics

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY, RUNBOOKS = ROOT / "deploy", ROOT / "docs" / "runbooks"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "kvstore.json"
UNIT_TESTS = Path(__file__).parent / "data" / "alerts_test.yml"
DEBIAN = Path(sys.prefix) / "prometheus" / "usr" / "bin"  # where make operate-env unpacks it
SELECTOR = re.compile(r"\b(kvstore_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"(?:by|ignoring|on|group_left)\s*\(([^)]*)\)")
SCRAPED = {"instance", "job", "le"}


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(DEBIAN))


needs_prometheus = pytest.mark.skipif(
    program("prometheus") is None, reason="Prometheus is not installed (make operate-env)"
)


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> list[tuple[str, str]]:
    """(title, query) of every target of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(p["title"], t["expr"]) for p in panels for t in p.get("targets", [])]


def expressions() -> list[tuple[str, str]]:
    return [*queries(), *((rule["alert"], rule["expr"]) for rule in rules())]


def known() -> dict[str, dict[str, Any]]:
    """Series by name as they are scraped, with the values of each label where these are fixed."""
    found: dict[str, dict[str, Any]] = {}
    for row in TABLE:
        names = [row.name]
        if row.kind == HISTOGRAM:
            names = [f"{row.name}{end}" for end in ("_bucket", "_sum", "_count")]
        found |= {name: dict(row.labels) for name in names}
    return found


@pytest.mark.parametrize(("title", "query"), expressions())
def test_queries_ask_what_there_is(title: str, query: str) -> None:
    """Each metric, label and value in a query of dashboard and alerts is one of the daemon's."""
    metrics, labels = known(), set(SCRAPED)
    for name, inside in SELECTOR.findall(query):
        assert name in metrics, f"{title}: {name}"
        labels |= set(metrics[name])
        for label, value in MATCHER.findall(inside or ""):
            assert label in set(metrics[name]) | SCRAPED, f"{title}: {name}{{{label}}}"
            if label == "status":
                continue  # any gRPC status may come
            values = metrics[name].get(label)
            fixed = values and label in ("tier", "reason", "costs", "link", "limit", "kind")
            assert not fixed or value in values, f"{title}: {label}={value}"
    for group in GROUPING.findall(query):
        assert {word.strip() for word in group.split(",")} <= labels, f"{title}: {group}"


def test_the_dashboard_is_what_its_panels_say() -> None:
    """kvstore.json is generated from generate.py; identities and places are unique."""
    command = [sys.executable, str(DEPLOY / "grafana" / "generate.py"), "--check"]
    assert subprocess.run(command, timeout=30).returncode == 0
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in panels)
    assert all(p["description"] for p in panels if p["type"] != "row")


def test_every_alert_has_its_page() -> None:
    """A runbook for each alert, and no other; it says what it means and what to do."""
    names = {rule["alert"] for rule in rules()}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == names | {"README"}
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    for rule in rules():
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{name}.md"
        assert f"[{name}]({name}.md)" in index
        page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}\n")
        for part in ("**Means.**", "**Effect.**", "**What to do.**"):
            assert part in page, name
        names = set(known()) | {row.name for row in TABLE}
        assert {metric for metric, _ in SELECTOR.findall(page)} <= names, name


def test_a_scrape_is_cheap() -> None:
    """Rendering takes < 50 ms of processor time with as many spaces and engines as are measured."""
    metrics = Metrics()
    for i in range(100):
        metrics.set_cost(f"model-{i} on cuda:0", True, 100, 1.0, 1.1)
        metrics.set_hint(f"tenant-{i}", "likely", 0.5)
    taken = []
    for _ in range(5):
        start = time.process_time()
        assert metrics.render().count(b"\n") > 500
        taken.append(time.process_time() - start)
    assert min(taken) < 0.05


@needs_prometheus
def test_promtool_accepts_rules_and_configuration() -> None:
    """promtool finds nothing wrong with either."""
    config = DEPLOY / "prometheus" / "prometheus.yml"
    for arguments in (["check", "rules", str(ALERTS)], ["check", "config", str(config)]):
        done = subprocess.run(
            [program("promtool") or "", *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_alerts_fire_for_what_is_out_of_order_and_for_nothing_else(tmp_path: Path) -> None:
    """By promtool: each alert fires for a series that calls for it, and for no other."""
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(UNIT_TESTS, tmp_path)
    text = UNIT_TESTS.read_text()
    assert all(f'alertname="{rule["alert"]}"' in text for rule in rules())
    done = subprocess.run(
        [program("promtool") or "", "test", "rules", str(tmp_path / UNIT_TESTS.name)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# ---- A real Prometheus scrapes a real daemon under load ----


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def spec(model: str) -> KVSpec:
    return KVSpec(
        model=model, revision="r", num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32",
        block_size=4,
    )  # fmt: skip


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[DaemonProcess, str]]:
    """A daemon with two tiers, and the address of a Prometheus that scrapes it every 0.5 s."""
    scraped, served = free_port(), free_port()
    with DaemonProcess("8MiB", metrics=f"127.0.0.1:{scraped}") as daemon:
        disk = daemon.directory / "disk"
        daemon.configure(
            f'[tiers.disk]\npath = "{disk}"\nsize = "32MiB"\nreserve = "1MiB"\nadmission = "all"\n'
        )
        daemon.kill()
        daemon.start()
        shutil.copy(ALERTS, tmp_path)
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        text = text.replace("127.0.0.1:9750", f"127.0.0.1:{scraped}").replace(": 15s", ": 500ms")
        (tmp_path / "prometheus.yml").write_text(text)
        process = subprocess.Popen(
            [program("prometheus") or "", f"--config.file={tmp_path}/prometheus.yml",
             f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{served}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path,
        )  # fmt: skip
        try:
            yield daemon, f"http://127.0.0.1:{served}"
        finally:
            process.terminate()
            process.wait(20)


def ask(address: str, query: str) -> list[Any]:
    """What Prometheus answers to a query; raises for one that it does not understand."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        document = json.load(answer)
    assert document["status"] == "success"
    result: list[Any] = document["data"]["result"]
    return result


def work(daemon: DaemonProcess, seconds: float) -> None:
    """Engines' work over a hundred spaces: puts, lookups, restores, steps and copies reported."""
    with daemon.client() as client:
        spaces = [client.attach(spec(f"model-{i}")) for i in range(100)]
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            space, tokens = spaces[n % 100], [n % 7, *range(63)]
            space.put(tokens, [bytes(space.spec.block_bytes)] * 16)
            match = space.lookup(tokens)
            if n % 100 < 50:  # 64 engines at most have costs of their own
                space.report_step(0.01, [(64, n % 512)], decode_tokens=1)
            match.release()
            n += 1


@pytest.mark.long
@needs_prometheus
def test_prometheus_answers_every_query(watched: tuple[DaemonProcess, str]) -> None:
    """Each query of dashboard and alerts resolves on a daemon under load with 100 spaces.

    Answers are not empty, except of alerts, none of which fires.
    """
    daemon, address = watched
    work(daemon, 6.0)
    for title, query in queries():
        query = query.replace("$__rate_interval", "5s").replace("$instance", ".*")
        assert ask(address, query), f"{title}: {query}"
    for rule in rules():
        ask(address, rule["expr"])
    assert ask(address, 'ALERTS{alertstate="firing"}') == []
    (spaces,) = ask(address, "kvstore_spaces")
    assert float(spaces["value"][1]) >= 100
