"""Kernels compile for real chips without spills, and a bad setting is found out."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


def compile_check(*arguments: str, timeout: float = 110.0) -> subprocess.CompletedProcess[str]:
    """Runs the check in a process of its own, where the interpreter is off."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-I", "-m", "kvstore.kernels.compile_check", *arguments],
        capture_output=True, text=True, timeout=timeout, check=False, env=environment,
    )  # fmt: skip


def test_a_kernel_compiles_for_a_chip_that_is_not_there() -> None:
    """Decode for sm_90 passes: tensor cores, asynchronous 16-byte loads, no spills."""
    run = compile_check("--target", "sm_90", "--only", "decode_raw")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(r"[1-9]\d* compiled, 0 bad", run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("option", "says"), [("maxnreg=64", "spills"), ("num_stages=9", "bytes of shared memory")]
)
def test_a_bad_setting_fails_the_check(option: str, says: str) -> None:
    """Too few registers or too many stages end with status 1 and the reason."""
    run = compile_check("--target", "sm_90", "--only", "decode_raw", "--option", option)
    assert run.returncode == 1, run.stdout + run.stderr
    assert says in run.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_chip() -> None:
    """All variants pass for sm_80, sm_90, sm_100 and gfx942."""
    run = compile_check(timeout=850.0)
    assert run.returncode == 0, run.stdout + run.stderr
