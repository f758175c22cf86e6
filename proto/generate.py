"""Generates the code of kvstore.proto beside it; `--check` only says whether it is up to date.

`--freeze` writes the protocol down as released: tests hold later ones to it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).parent / "v1" / "kvstore.proto"
RELEASED = SOURCE.parent / "released.binpb"
OUTPUTS = ("kvstore_pb2.py", "kvstore_pb2.pyi", "kvstore_pb2_grpc.py")


def generate(target: Path) -> None:
    """Writes the three generated modules under `target`/kvstore/proto/v1."""
    arguments = [
        "protoc",
        f"-Ikvstore/proto={SOURCE.parent.parent}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        "kvstore/proto/v1/kvstore.proto",
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed; see its message above")


def freeze() -> None:
    """Writes the descriptor of kvstore.proto, comments left out, to `RELEASED`."""
    arguments = [
        "protoc",
        f"-Ikvstore/proto={SOURCE.parent.parent}",
        f"--descriptor_set_out={RELEASED}",
        "kvstore/proto/v1/kvstore.proto",
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed; see its message above")


def main(arguments: list[str]) -> int:
    """0 when the committed code is, or now is, what the proto says."""
    if "--freeze" in arguments:
        freeze()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made = Path(folder) / "kvstore" / "proto" / "v1"
        stale = []
        for name in OUTPUTS:
            new, old = (made / name).read_text(), SOURCE.parent / name
            if not old.exists() or old.read_text() != new:
                stale.append(name)
                if "--check" not in arguments:
                    old.write_text(new)
    if "--check" in arguments and stale:
        print(f"out of date: {', '.join(stale)}; run make proto", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
