"""Checks and measures everything of kvstore that needs a GPU, within eight minutes, offline.

    python bench/gpu_check.py --json gpu.json [--seconds 470] [--only ceilings,restore]

Needs torch, triton and numpy, and no installed kvstore: the tree it lies in is used. Sections run
one after another in worker processes, each within a budget; one that fails, hangs or breaks the GPU
context costs only itself, since the next runs in a fresh process. The correctness matrices run
first, over several processes, which also fills the compile cache for what is timed later. The JSON
file is written anew after every section.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MATRIX_PROCESSES = 10


class Section(NamedTuple):
    """A section's name, module, seconds it may take, and whether it is spread over processes."""

    name: str
    module: str
    budget_seconds: float
    spread: bool = False


DRY = ("engine_side", "vllm_pages")  # sections that a driver without a GPU can try out
SECTIONS = (
    Section("attention_matrix", "attention_matrix", 110, spread=True),
    Section("copy_matrix", "copy_matrix", 60, spread=True),
    Section("compiling", "compiling", 45, spread=True),
    Section("ceilings", "ceilings", 40),
    Section("decode", "decode", 80),
    Section("copies", "copies", 45),
    Section("restore", "restore", 70),
    Section("engine_side", "engine_side", 60),
    Section("vllm_pages", "vllm_pages", 40),
    Section("extend", "extend", 50),
    Section("sharing", "sharing", 45),
    Section("host_memory", "host_memory", 20),
    Section("contract", "contract", 60),
    Section("baselines", "baselines", 60),
)


class Worker:
    """A process that runs sections; started early, so that its imports are done when asked."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None, "the worker was started with a pipe"
        for line in self.process.stdout:
            if line.startswith("@@"):
                self._answers.put(json.loads(line[2:]))
            else:
                sys.stderr.write(line)
        self._answers.put({"error": "its process ended", "poisoned": True})

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None, "the worker was started with a pipe"
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # its end is an answer of its own

    def answer(self, seconds: float) -> dict[str, Any]:
        try:
            return self._answers.get(timeout=max(0.1, seconds))
        except queue.Empty:
            return {"error": f"no answer within {seconds:.0f} s", "poisoned": True}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Check:
    """A run: its workers, its deadline, and the results so far."""

    def __init__(
        self, path: Path, seconds: float, environment: dict[str, str], driver: str = ""
    ) -> None:
        self.path, self.environment, self.driver = path, environment, driver
        self.started = time.monotonic()
        self.deadline = self.started + seconds
        self.results: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self._spares: list[Worker] = []

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, sections: list[Section]) -> None:
        self.fill(MATRIX_PROCESSES if any(s.spread for s in sections) else 2)
        for section in sections:
            begin = time.monotonic()
            budget = min(section.budget_seconds, self.left - 5)
            if budget < 5:
                self.results[section.name] = {"error": "left out: the time was used up"}
            elif section.spread:
                self.results[section.name] = self.spread(section, budget)
            else:
                self.results[section.name] = self.one(section, budget)
            self.seconds[section.name] = round(time.monotonic() - begin, 1)
            self.write()
            print(f"-- {section.name}: {self.seconds[section.name]} s", flush=True)
        for worker in self._spares:
            worker.kill()

    def fill(self, count: int) -> None:
        while len(self._spares) < count:
            self._spares.append(Worker(self.environment))

    def request(self, section: Section, budget: float, **more: int) -> dict[str, Any]:
        name = section.module
        return {
            "section": name, "seconds": budget * 0.9, "results": self.results,
            "driver": self.driver, **more,
        }  # fmt: skip

    def one(self, section: Section, budget: float) -> dict[str, Any]:
        self.fill(2)
        while len(self._spares) > 2:  # a matrix left them; what is timed has the GPU alone
            self._spares.pop().kill()
        worker = self._spares[0]
        worker.ask(self.request(section, budget))
        answer = worker.answer(budget)
        if answer.pop("poisoned", False):
            worker.kill()
            del self._spares[0]
        return answer

    def spread(self, section: Section, budget: float) -> dict[str, Any]:
        """Shares of the cases to every worker; the counts add up, failures come together."""
        self.fill(MATRIX_PROCESSES)
        end = time.monotonic() + budget
        for part, worker in enumerate(self._spares):
            share = {"part": part, "parts": len(self._spares)}
            worker.ask(self.request(section, budget, **share))
        answers, fit = [], []
        for worker in self._spares:
            answer = worker.answer(end - time.monotonic())
            if answer.pop("poisoned", False):
                worker.kill()
            else:
                fit.append(worker)
            answers.append(answer)
        self._spares = fit
        return joined(answers)

    def write(self) -> None:
        whole = {
            "seconds": round(time.monotonic() - self.started, 1),
            "section_seconds": self.seconds, **self.results,
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(whole, indent=1))
        partial.rename(self.path)


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of the shares' results: numbers add up, lists follow each other."""
    whole: dict[str, Any] = {"errors": [a["error"] for a in answers if "error" in a]}
    for answer in answers:
        for key, value in answer.items():
            if isinstance(value, list):
                whole.setdefault(key, []).extend(value)
            elif isinstance(value, dict):
                worst = whole.setdefault(key, {})
                for name, number in value.items():
                    worst[name] = max(number, worst.get(name, number))
            elif isinstance(value, int | float):
                whole[key] = whole.get(key, 0) + value
    return whole


def link_tree(folder: Path) -> Path:
    """A folder from which this tree can be imported as `kvstore`, installed or not."""
    package = folder / "kvstore"
    package.mkdir()
    for path in (ROOT / "kvstore").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("kernels", "tiers", "policies", "proto"):
        (package / name).symlink_to(ROOT / name)
    return folder


def environment_for(folder: Path) -> dict[str, str]:
    paths = [str(link_tree(folder)), os.environ.get("PYTHONPATH", "")]
    cache = folder / "triton"
    cache.mkdir()
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "2",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file that the results go to")
    parser.add_argument("--seconds", type=float, default=470, help="time for everything")
    parser.add_argument("--only", default="", help="sections to run, by comma")
    parser.add_argument(
        "--dry-run", default="", metavar="LIBRARY",
        help="try the sections out that can do without a GPU, on a driver that has none",
    )  # fmt: skip
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    unknown = set(wanted) - {section.name for section in SECTIONS}
    if options.dry_run:
        wanted = wanted or list(DRY)
        unknown |= set(wanted) - set(DRY)
    if unknown:
        parser.error(f"unknown sections {sorted(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_for(Path(folder))
        check = Check(options.json, options.seconds, environment, options.dry_run)
        check.run([s for s in SECTIONS if not wanted or s.name in wanted])
    sys.path.insert(0, str(HERE))
    from gpu_sections.table import table

    print(table(check.results))


if __name__ == "__main__":
    main()
