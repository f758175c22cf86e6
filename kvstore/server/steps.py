"""`drive`: runs a generator that waits for completions, without asyncio and without recursion."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from kvstore.core.completion import Completion

T = TypeVar("T")
U = TypeVar("U")
Steps = Generator[Completion[Any] | None, Any, T]


class Driver(Generic[T]):
    """A generator under way: each completion it yields is awaited, its value sent back.

    `completion` carries what the generator returns or raises. After `cancel` it stays unresolved.
    """

    __slots__ = ("_running", "_steps", "cancelled", "completion")

    def __init__(self, steps: Steps[T]) -> None:
        self.completion: Completion[T] = Completion()
        self.cancelled = False
        self._running = False
        self._steps = steps
        self._run(None)

    def cancel(self) -> None:
        """Stops at the step that is waited for; the generator's `finally` parts run."""
        if self.completion.done or self.cancelled:
            return
        self.cancelled = True
        if not self._running:
            self._steps.close()

    def _run(self, waited: Completion[Any] | None) -> None:
        while not self.cancelled:
            try:
                waited = self._step(waited)
            except StopIteration as stop:
                return self._finish(stop.value, None)
            except Exception as error:
                return self._finish(None, error)
            if waited is not None and not waited.done:
                return waited.then(self._run)
        self._steps.close()
        return None

    def _finish(self, value: Any, error: Exception | None) -> None:
        if self.cancelled:
            return
        if error is not None:
            self.completion.fail(error)
        else:
            self.completion.resolve(value)

    def _step(self, waited: Completion[Any] | None) -> Completion[Any] | None:
        self._running = True
        try:
            if waited is None:
                return next(self._steps)
            try:
                value = waited.result()
            except Exception as error:
                return self._steps.throw(error)
            return self._steps.send(value)
        finally:
            self._running = False


class Turns:
    """Lets whoever waits go on, one after the other, with all other work in between."""

    def __init__(self, defer: Callable[[Callable[[], None]], None]) -> None:
        self._defer = defer
        self._waiting: deque[Completion[None]] = deque()

    def wait(self) -> Completion[None]:
        turn: Completion[None] = Completion()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            self._defer(self._next)
        return turn

    def _next(self) -> None:
        # Still in front while it goes on, so that one that waits again does not defer, too.
        self._waiting[0].resolve(None)
        self._waiting.popleft()
        if self._waiting:
            self._defer(self._next)


def drive(steps: Steps[T]) -> Completion[T]:
    """The completion of `steps`, which start at once."""
    return Driver(steps).completion


def mapped(source: Completion[T], change: Callable[[T], U]) -> Completion[U]:
    """A completion of `change(value)`; errors of either pass through."""
    target: Completion[U] = Completion()

    def finish(done: Completion[T]) -> None:
        try:
            value = change(done.result())
        except Exception as error:
            target.fail(error)
        else:
            target.resolve(value)

    source.then(finish)
    return target


def error_of(completion: Completion[Any]) -> BaseException | None:
    """The error of a completion that is done, None if it has a value."""
    try:
        completion.result()
    except Exception as error:
        return error
    return None
