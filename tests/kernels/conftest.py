"""Kernels run by Triton's interpreter: no GPU, and faithful in bfloat16 and float8."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the first module with kernels
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from kvstore.kernels import interpreter

interpreter.install()
