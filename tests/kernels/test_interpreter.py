"""The interpreter that all kernel tests trust is tested itself."""

from __future__ import annotations

import pytest
from triton.runtime import interpreter as triton_interpreter

from kvstore.kernels import interpreter

OPERATIONS = (*interpreter.CASTS, "create_fadd", "create_dot")


def test_the_interpreter_is_faithful() -> None:
    """bfloat16 and float8 casts, sums and dots equal torch's."""
    interpreter.self_test()


@pytest.mark.parametrize("name", ["create_fp_trunc", "create_fadd", "create_dot"])
def test_an_interpreter_that_works_differently_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an operation works on bit patterns again, the self-test says so and names Triton."""
    ours = getattr(triton_interpreter.InterpreterBuilder, name)
    original = next(
        cell.cell_contents
        for cell in ours.__closure__
        if (callable(cell.cell_contents) and getattr(cell.cell_contents, "__name__", "") == name)
        or getattr(cell.cell_contents, "__qualname__", "").startswith("InterpreterBuilder.")
    )
    monkeypatch.setattr(triton_interpreter.InterpreterBuilder, name, original)
    with pytest.raises(interpreter.InterpreterChanged, match="must follow"):
        interpreter.self_test()


def test_a_renamed_operation_is_found() -> None:
    """An interpreter without an operation that is replaced is refused by name."""

    class Renamed:
        create_fp_trunc = create_fp_ext = create_fp_to_fp = create_dot = None

    with pytest.raises(interpreter.InterpreterChanged, match="create_fadd"):
        interpreter._replace(Renamed)


def test_without_the_interpreter_there_is_nothing_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that compiles kernels for a GPU is told how to have the interpreter instead."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(interpreter.InterpreterChanged, match="TRITON_INTERPRET=1"):
        interpreter.install()
