"""Where long tests leave their figures: the folder that KVSTORE_SOAK_REPORT names, if it does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def leave_report(name: str, figures: dict[str, Any]) -> None:
    """Writes `name`.json there; on standard output all but the samples."""
    brief = {key: value for key, value in figures.items() if key != "samples"}
    print(json.dumps(brief, indent=1))
    folder = os.environ.get("KVSTORE_SOAK_REPORT")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures)
        (Path(folder) / f"{name}.json").write_text(text + "\n")
