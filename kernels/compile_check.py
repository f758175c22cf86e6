"""Compiles every kernel for real chips, without one, and reads the machine code.

A kernel fails where it spills registers, takes more registers or shared memory than the chip has,
multiplies without tensor cores, or reads KV in pieces of less than 16 bytes: what would make it
slow without making it wrong. Runs in its own process, since Triton's interpreter and its compiler
exclude each other: `make compile-check`, or `python -m kvstore.kernels.compile_check --help`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvstore.kernels.block_variants import block_variants
from kvstore.kernels.dispatch import TARGETS
from kvstore.kernels.variants import Variant, attention_variants, every_shape

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MAX = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
REGISTERS_MAX = 255
WORKERS = 2


class Code(NamedTuple):
    """What the machine code of a kernel says."""

    registers: int
    spilled: int
    shared: int
    dots: int
    wide_loads: int
    wide_copies: int


def main(arguments: list[str] | None = None) -> int:
    """Prints a line a kernel and chip; returns 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this chip")
    parser.add_argument("--only", help="only variants whose name contains this")
    parser.add_argument("--every-shape", action="store_true",
                        help="attention in every format and head size: an hour")  # fmt: skip
    parser.add_argument("--option", action="append", default=[], metavar="NAME=NUMBER",
                        help="a compiler option, e.g. maxnreg=64")  # fmt: skip
    parsed = parser.parse_args(arguments)
    options = {name: int(value) for name, value in (o.split("=") for o in parsed.option)}
    jobs = [
        (target, variant.name, options)
        for target in parsed.target or TARGETS
        for variant in (every_shape if parsed.every_shape else variants)(target)
        if (parsed.only or "") in variant.name
    ]
    if not jobs:
        parser.error(f"no variant's name contains {parsed.only!r}")
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), initializer=_own_cache) as pool:
        bad = sum(report(job[0], job[1], *answer) for job, answer in zip(
            jobs, pool.map(_check_named, *zip(*jobs, strict=True)), strict=True))  # fmt: skip
    print(f"{len(jobs)} compiled, {bad} bad")
    return 1 if bad else 0


def variants(target: str) -> Iterator[Variant]:
    """Every variant that is checked for `target`."""
    yield from attention_variants(target)
    yield from block_variants(target)


def report(target: str, name: str, code: Code | None, problems: list[str]) -> bool:
    """Prints the outcome; whether there are problems."""
    facts = "" if code is None else (
        f"{code.registers:4} registers {code.shared >> 10:4} KiB shared {code.dots:4} dots "
        f"{code.wide_loads + code.wide_copies:4} wide loads"
    )  # fmt: skip
    print(f"{target:7} {name:28} {facts}", *problems, sep="  " if problems else "", flush=True)
    return bool(problems)


def _own_cache() -> None:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvstore-compile-check-")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def _check_named(target: str, name: str, options: dict[str, int]) -> tuple[Code | None, list[str]]:
    known = chain(variants(target), every_shape(target))
    variant = next(v for v in known if v.name == name)
    return check(replace(variant, options=variant.options | options), target)


def check(variant: Variant, target: str) -> tuple[Code | None, list[str]]:
    """The machine code's facts and what is wrong with them."""
    try:
        code = read_code(compile_variant(variant, target), target)
    except Exception as error:
        return None, [f"does not compile: {type(error).__name__}: {str(error)[-200:]}"]
    problems = []
    if code.spilled:
        problems.append(f"spills ({code.spilled})")
    if code.registers > REGISTERS_MAX * (2 if target.startswith("gfx") else 1):
        problems.append(f"{code.registers} registers")
    if code.shared > SHARED_MAX[target]:
        problems.append(f"{code.shared} bytes of shared memory, {SHARED_MAX[target]} are there")
    if variant.dot and not code.dots:
        problems.append("no tensor cores")
    if variant.asynchronous and not target.startswith("gfx") and not code.wide_copies:
        problems.append("no asynchronous 16-byte copies")
    if variant.wide and not code.wide_loads + code.wide_copies:
        problems.append("no 16-byte loads")
    return code, problems


def compile_variant(variant: Variant, target: str) -> Any:
    """Triton's compiled kernel for a chip that need not be there."""
    signature, attributes = {}, {}
    for position, parameter in enumerate(variant.kernel.params):
        name = parameter.name
        # A constant that is left out of the signature would become a run-time parameter.
        kind = "constexpr" if parameter.is_constexpr else variant.types.get(name, "i32")
        signature[name] = kind
        if kind.startswith("*") or name in variant.sixteens:
            attributes[(position,)] = [["tt.divisibility", 16]]
    names = variant.kernel.arg_names
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    return triton.compile(source, target=gpu_target(target), options=options)


def gpu_target(target: str) -> GPUTarget:
    """Triton's name of one of `TARGETS`."""
    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target[3:]), 32)
    return GPUTarget("hip", target, 64)


def read_code(kernel: Any, target: str) -> Code:
    """Facts from SASS, or from AMD's assembler text."""
    if target.startswith("gfx"):
        return _read_amd(kernel.asm["amdgcn"], int(kernel.metadata.shared))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if not found:
        raise ValueError(f"cuobjdump says nothing of registers: {usage[-200:]}")
    return Code(
        registers=int(found[1]),
        spilled=int(found[2]) + _count(r"\b(LDL|STL)\b", sass),
        shared=int(kernel.metadata.shared),
        dots=_count(r"\b(HMMA|HGMMA|UTC\w*MMA)\b", sass),
        wide_loads=_count(r"\bLDG\S*\.128\b", sass),
        wide_copies=_count(r"\bLDGSTS\S*\.128\b", sass),
    )


def _read_amd(text: str, shared: int) -> Code:
    def number(name: str) -> int:
        return max(map(int, re.findall(rf"\.{name}:\s*(\d+)", text)), default=0)

    return Code(
        registers=number("vgpr_count"),
        spilled=number("vgpr_spill_count"),
        shared=shared,
        dots=_count(r"\bv_mfma", text),
        wide_loads=_count(r"\b(global|buffer)_load_dwordx4\b", text),
        wide_copies=0,
    )


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
