"""A promise for one thread: how a flow says "later" without asyncio.

The owner thread makes it, resolves it and hears of it; nothing here is thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Completion(Generic[T]):
    """A value or an error that is there now or comes later, once."""

    __slots__ = ("_callbacks", "_done", "_error", "_value")

    def __init__(self) -> None:
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Completion[T]], None]] = []

    @property
    def done(self) -> bool:
        return self._done

    def resolve(self, value: T) -> None:
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        self._finish(None, error)

    def result(self) -> T:
        """The value; raises the error. Only when `done`."""
        assert self._done, "a completion was asked for its result before it was done"
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def then(self, callback: Callable[[Completion[T]], None]) -> None:
        """Calls `callback(self)` when done: at once if it is already."""
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        assert not self._done, "a completion finished twice"
        self._done, self._value, self._error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
