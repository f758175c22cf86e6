"""Device memory between two processes: handles with offsets, semaphores, the death of either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_sections.context import Context

PEER = Path(__file__).with_name("sharing_peer.py")


class Peer:
    """A process that holds device memory and does as it is told, a line of JSON each."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | environment,
        )  # fmt: skip

    def ask(self, do: str, **what: Any) -> Any:
        """The answer's `result`. Raises RuntimeError with what went wrong there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer died at {do!r} (exit {self.process.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do}: {answer['error']}")
        return answer["result"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def run(context: Context, answer: dict[str, Any]) -> None:
    """Each check by itself: what happened, or the error."""
    for check in (both_ways, importer_dies, exporter_dies, virtual_memory, isolated_handles):
        if context.left < 5:
            answer[check.__name__] = "left out"
            continue
        begin = time.monotonic()
        try:
            result = check()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        answer[check.__name__] = {**result, "seconds": round(time.monotonic() - begin, 2)}


def pair() -> tuple[Peer, Peer, dict[str, Any]]:
    """An exporter with an arena, an importer that opened a range inside it."""
    exporter, importer = Peer(), Peer()
    shared = exporter.ask("allocate", length=256 << 20, offset=3 << 20, share=128 << 20)
    importer.ask("open", shared=shared)
    return exporter, importer, shared


def both_ways() -> dict[str, Any]:
    """Bytes written on either side are read on the other; values in memory order the two."""
    exporter, importer, shared = pair()
    try:
        result: dict[str, Any] = {"offset": shared["offset"]}
        exporter.ask("fill", value=0x5A, at=0, length=1 << 20)
        result["importer_reads"] = importer.ask("read", at=0, length=1 << 20) == [0x5A, 0x5A]
        importer.ask("fill", value=0xA5, at=1 << 20, length=1 << 20)
        result["exporter_reads"] = exporter.ask("read", at=1 << 20, length=1 << 20) == [0xA5, 0xA5]
        importer.ask("wait_then_fill", at=8 << 20, value=7, fill=0x11, to=16 << 20)
        result["waits"] = importer.ask("busy")
        exporter.ask("signal", at=8 << 20, value=7)
        importer.ask("finish")
        result["went_on"] = exporter.ask("read", at=16 << 20, length=4096) == [0x11, 0x11]
        result["copy_bytes_per_second"] = importer.ask("copy_speed", length=96 << 20)
        return result
    finally:
        importer.kill()
        exporter.kill()


def importer_dies() -> dict[str, Any]:
    """An engine that is killed while it copies harms neither the arena nor other work."""
    exporter, importer, _ = pair()
    try:
        exporter.ask("fill", value=0x77, at=0, length=64 << 20)
        importer.ask("copy_on", length=64 << 20)
        importer.kill()
        result = {"reads": exporter.ask("read", at=0, length=64 << 20) == [0x77, 0x77]}
        other = Peer()
        again = exporter.ask("share", offset=0, share=1 << 20)
        other.ask("open", shared=again)
        result["another_opens"] = other.ask("read", at=3 << 20, length=4096) is not None
        other.kill()
        exporter.ask("free")
        return result | {"frees": True}
    finally:
        importer.kill()
        exporter.kill()


def exporter_dies() -> dict[str, Any]:
    """What an engine sees when the daemon that owns the arena is killed while it copies."""
    exporter, importer, _ = pair()
    try:
        exporter.ask("fill", value=0x33, at=0, length=64 << 20)
        importer.ask("copy_on", length=64 << 20)
        exporter.kill()
        result: dict[str, Any] = {}
        for name, do in (("running_copy", "finish"), ("new_copy", "read_again")):
            try:
                result[name] = importer.ask(do, at=0, length=1 << 20)
            except RuntimeError as error:
                result[name] = str(error)[:200]
        try:
            importer.ask("close")
            result["own_memory_works"] = importer.ask("own_memory")
        except RuntimeError as error:
            result["own_memory_works"] = str(error)[:200]
        return result
    finally:
        importer.kill()
        exporter.kill()


def virtual_memory() -> dict[str, Any]:
    """Memory of torch's expandable segments is refused with a sentence, plain memory is not."""
    result = {}
    for name, setting in (("expandable", "expandable_segments:True"), ("plain", "")):
        peer = Peer(PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
        try:
            result[name] = str(peer.ask("share_torch"))[:200]
        except RuntimeError as error:
            result[name] = str(error)[:300]
        finally:
            peer.kill()
    return result


def isolated_handles() -> dict[str, Any]:
    """A handle that is damaged or names a range too long is refused."""
    exporter, importer = Peer(), Peer()
    try:
        shared = exporter.ask("allocate", length=64 << 20, offset=0, share=64 << 20)
        result = {}
        for name, change in (
            ("too_long", {"length": 65 << 20}), ("damaged", {"handle": "ff" * 64}),
            ("short", {"handle": "00"}),
        ):  # fmt: skip
            try:
                importer.ask("open", shared={**shared, **change})
                result[name] = "was accepted"
            except RuntimeError as error:
                result[name] = str(error)[:200]
        return result
    finally:
        importer.kill()
        exporter.kill()
