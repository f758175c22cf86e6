"""An operator's walk on a clean machine: install to roll back, each command timed.

    python deploy/walk.py --wheel OLD.whl --next NEW.whl [--pip "pip install"]

Fifteen commands at most. Each answers within 2 s, except install, the engine, drain, upgrade and
roll back; none needs a restart but the upgrade. Exit 1 if one failed or was slower. It works in a
directory of its own, which it removes.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SECONDS_MAX, COMMANDS_MAX = 2.0, 15
ENGINE = """
from kvstore.client import KVClient, KVSpec
spec = KVSpec(model="m", revision="1", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16",
              block_size=16)
prompt = list(range(64))
with KVClient.connect() as client:
    space = client.attach(spec)
    for request in ("first", "second"):
        with space.lookup(prompt, request_id=request) as match:
            print(request, match.matched_tokens, "tokens found")
        space.put(prompt, [bytes([i]) * space.spec.block_bytes for i in range(4)])
"""


class Step(NamedTuple):
    """One command; `quick` ones have 2 s, and `shows` must be in what it prints."""

    name: str
    command: str
    quick: bool = True
    shows: str = ""


def steps(pip: str, old: Path, new: Path) -> list[Step]:
    serve = "(kvstore serve --config kvstore.toml >>log 2>&1 &)"
    until_it_serves = "until kvstore status --json 2>/dev/null; do sleep 0.05; done"
    metrics = (
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://'$METRICS'/metrics\")"
    )
    metrics += ".read().decode())'"
    return [
        Step("install", f"{pip} {old}", quick=False),
        Step("does the machine suit?", "kvstore doctor --config kvstore.toml"),
        Step("serve", f"{serve}; until kvstore status >/dev/null 2>&1; do sleep 0.05; done"),
        Step("how is it?", "kvstore status", shows="serving"),
        Step("attach an engine", "python3 engine.py", quick=False, shows="second 64 tokens found"),
        Step("the first hit", f"{metrics} | grep kvstore_hit_tokens_total", shows='"host"} 64.0'),
        Step("why was a prefix computed?", "kvstore explain first", shows="first"),
        Step("change the policy", "kvstore policy set lru", shows="lru"),
        Step("cap a tenant", "kvstore quota set default --cap 16MiB", shows="16 MiB"),
        Step("reload the file", "kill -HUP $(kvstore status --json | grep -o '\"pid\": [0-9]*' "
             "| grep -o '[0-9]*')"),
        Step("drain", "kvstore drain", quick=False),
        Step("upgrade", f"{pip} --upgrade {new} && {serve}; {until_it_serves}", quick=False,
             shows='"readopted_blocks": 4'),
        Step("still a hit", "python3 engine.py", quick=False, shows="first 64 tokens found"),
        Step("roll back", f"kvstore drain && {pip} --upgrade --force-reinstall {old} && {serve}; "
             f"{until_it_serves}", quick=False, shows='"readopted_blocks": 4'),
        Step("leave", "kvstore drain --free", quick=False),
    ]  # fmt: skip


def walk(pip: str, old: Path, new: Path) -> bool:
    """Whether every step did what it should, in its time; prints a line for each."""
    place = Path(tempfile.mkdtemp(prefix="kvwalk-", dir="/dev/shm"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        metrics = f"127.0.0.1:{probe.getsockname()[1]}"
    (place / "engine.py").write_text(ENGINE)
    (place / "kvstore.toml").write_text(
        f'[server]\nmetrics = "{metrics}"\n'
        f'[tiers.host]\nsize = "64MiB"\ndirectory = "{place}/pool"\n'
    )
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(place), "METRICS": metrics}
    todo, well = steps(pip, old, new), True
    assert len(todo) <= COMMANDS_MAX
    try:
        for step in todo:
            well = _take(step, place, environ) and well
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return well


def _take(step: Step, place: Path, environ: dict[str, str]) -> bool:
    before, start = _processor_seconds(), time.monotonic()
    done = subprocess.run(
        ["bash", "-euc", step.command], cwd=place, env=environ, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    seconds, processor = time.monotonic() - start, _processor_seconds() - before
    well = done.returncode == 0 and step.shows in done.stdout
    in_time = not step.quick or min(seconds, processor) <= SECONDS_MAX
    word = "ok" if well and in_time else "FAILED" if not well else "slow"
    print(f"{word:7} {seconds:6.2f} s  {processor:6.2f} s of processor  {step.name}", flush=True)
    if not well:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", flush=True)
    return well and in_time


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--wheel", required=True, type=Path, help="The version to begin with.")
    parser.add_argument("--next", required=True, type=Path, help="The version to upgrade to.")
    parser.add_argument("--pip", default="pip install --quiet", help="How packages are installed.")
    given = parser.parse_args()
    return 0 if walk(given.pip, given.wheel.resolve(), given.next.resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
