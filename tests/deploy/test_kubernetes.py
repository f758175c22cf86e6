"""The Kubernetes manifests: against the schema, against the command line, against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.doctor_memory import daemon_bytes
from kvstore.core.config import Config, load
from kvstore.core.machine import FixedMachine
from kvstore.core.sizes import parse_size

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
CONTAINERFILE = FOLDER.parent / "container" / "Containerfile"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))
UID = 64000


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(kind: str) -> Any:
    (found,) = [each for each in documents(FOLDER / "kvstore.yaml") if each["kind"] == kind]
    return found


def pod() -> Any:
    return of_kind("DaemonSet")["spec"]["template"]["spec"]


def configuration(tmp_path: Path) -> Config:
    """The manifest's configuration as a daemon on a node with enough memory takes it."""
    file = tmp_path / "kvstore.toml"
    file.write_text(of_kind("ConfigMap")["data"]["kvstore.toml"])
    return load(file, {}, FixedMachine(memory=256 << 30, free=128 << 30, user=UID))


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schema(path: Path, version: str) -> None:
    """Every manifest is valid, unknown fields refused, for an older and a new Kubernetes."""
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_check_can_fail() -> None:
    """A field that there is not is refused: the check checks."""
    broken = of_kind("DaemonSet")
    broken["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_the_configuration_is_valid_and_fits_the_limit(tmp_path: Path) -> None:
    """The daemon takes the ConfigMap's configuration, and its memory is within the pod's limit."""
    config = configuration(tmp_path)
    (container,) = pod()["containers"]
    limit = parse_size(container["resources"]["limits"]["memory"].replace("Gi", "GiB"))
    assert daemon_bytes(config) <= limit
    assert container["resources"]["requests"]["memory"] == f"{limit >> 30}Gi"


def test_probes_ask_what_there_is(tmp_path: Path) -> None:
    """Probes and scrapes go to the configured port, and to paths that the daemon answers."""
    (container,) = pod()["containers"]
    (port,) = container["ports"]
    host, _, number = configuration(tmp_path).server.metrics.rpartition(":")
    assert (host, int(number)) == ("0.0.0.0", port["containerPort"])
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")}
    assert {"path": "/ready", "port": port["name"]} == paths["startup"]
    assert {"path": "/live", "port": port["name"]} == paths["liveness"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    (service_port,) = of_kind("Service")["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]


def test_paths_and_users_agree(tmp_path: Path) -> None:
    """Socket and pools lie on volumes that belong to the pod's user, who is the image's."""
    config, spec = configuration(tmp_path), pod()
    mounts = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
    paths = {v["name"]: v.get("hostPath", {}).get("path") for v in spec["volumes"]}
    assert paths[mounts[str(Path(config.server.socket).parent)]] == "/run/kvstore"
    assert paths[mounts[config.tiers.host.directory]] == "/dev/shm/kvstore"
    assert spec["securityContext"]["runAsUser"] == UID
    assert f"USER {UID}:{UID}" in CONTAINERFILE.read_text()
    assert any(rule.uid == UID and rule.role == "admin" for rule in config.access)
    (engine,) = documents(FOLDER / "engine-patch.yaml")
    user = engine["spec"]["securityContext"]
    assert any(rule.uid == user["runAsUser"] and rule.role == "engine" for rule in config.access)
    assert str(config.server.socket_group) in map(str, user["supplementalGroups"])
    assert engine["spec"]["containers"][0]["env"][0]["value"] == config.server.socket


def test_a_pod_has_time_to_drain(tmp_path: Path) -> None:
    """The grace period is longer than the drain and a slow close take."""
    grace = pod()["terminationGracePeriodSeconds"]
    assert grace >= 2 * (configuration(tmp_path).server.drain_seconds + 10)
    strategy = of_kind("DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert strategy == {"maxUnavailable": 1, "maxSurge": 0}
