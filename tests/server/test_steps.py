"""Generators that wait for completions."""

from __future__ import annotations

import pytest

from kvstore.core.completion import Completion
from kvstore.server.steps import Driver, Steps, drive, error_of, mapped


def test_values_and_errors_are_sent_in() -> None:
    """A step gets the value of the completion it waited for, or its error."""
    first: Completion[int] = Completion()
    second: Completion[int] = Completion()

    def steps() -> Steps[str]:
        value = yield first
        try:
            yield second
        except ValueError as error:
            return f"{value} {error}"
        return "no error"

    answer = drive(steps())
    assert not answer.done
    first.resolve(7)
    second.fail(ValueError("bad"))
    assert answer.result() == "7 bad"


def test_ten_thousand_ready_steps_do_not_recurse() -> None:
    """Steps that are done at once cost no stack, however many there are."""

    def steps() -> Steps[int]:
        total = 0
        for i in range(10_000):
            ready: Completion[int] = Completion()
            ready.resolve(i)
            total += yield ready
            yield None
        return total

    assert drive(steps()).result() == 49_995_000


def test_cancel_runs_the_finally_part_and_resolves_nothing() -> None:
    """What was cancelled cleans up and never answers."""
    waited: Completion[None] = Completion()
    closed = []

    def steps() -> Steps[None]:
        try:
            yield waited
        finally:
            closed.append(True)

    driver = Driver(steps())
    driver.cancel()
    waited.resolve(None)
    assert closed == [True]
    assert not driver.completion.done


def test_cancel_from_within_a_step() -> None:
    """A step may cancel its own driver; it stops at the next wait."""
    waited: Completion[None] = Completion()
    reached = []

    def steps() -> Steps[None]:
        yield waited
        driver.cancel()
        yield None
        reached.append(True)

    driver = Driver(steps())
    waited.resolve(None)
    assert not reached
    assert not driver.completion.done


def test_mapped_passes_errors_on() -> None:
    """Errors of the source and of the change both fail the mapped completion."""
    failed: Completion[int] = Completion()
    failed.fail(KeyError("gone"))
    assert isinstance(error_of(mapped(failed, str)), KeyError)
    good: Completion[int] = Completion()
    good.resolve(0)
    with pytest.raises(ZeroDivisionError):
        mapped(good, lambda value: 1 // value).result()
