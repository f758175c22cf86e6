"""Measures settings of the attention kernels on a GPU: tiles, warps, stages, splits.

    python bench/tune_kernels.py --json tune.json [--seconds 150] [--only decode]

Prints what is fastest for each format, for whoever writes the choice into `kernels/plans.py`.
Settings are compiled first, in parallel processes that share Triton's cache; each is then measured
by replays of a CUDA graph over layers that do not fit the L2 together, its output compared with the
chosen setting's. Needs no network and no installed kvstore.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROCESSES = 14


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure settings of the attention kernels.")
    parser.add_argument("--json", required=True, help="where the figures go")
    parser.add_argument("--seconds", type=float, default=150.0, help="end by then")
    parser.add_argument("--only", default="", help="decode, extend or mla")
    parsed = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from gpu_check import environment_for

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_for(Path(folder))
        command = [sys.executable, str(HERE / "gpu_sections" / "tune.py"), parsed.only]
        compiling = [
            subprocess.Popen([*command, str(part), str(PROCESSES)], env=environment)
            for part in range(PROCESSES)
        ]
        for process in compiling:
            try:
                process.wait(max(1.0, parsed.seconds * 0.6 - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                process.kill()
        left = parsed.seconds - (time.monotonic() - begin)
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
        subprocess.run([*command, parsed.json, str(left)], env=environment, check=False)
    rows: list[dict[str, Any]] = json.loads(Path(parsed.json).read_text())["rows"]
    print(f"{len(rows)} settings, {sum('error' in row for row in rows)} failed")


if __name__ == "__main__":
    os.chdir(HERE.parent)
    main()
