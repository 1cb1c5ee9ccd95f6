"""Looks at many things again and again, of which some may hang: who hangs holds nobody else up."""

from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from kvheadroom.sources.background import BackgroundCall

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class PatientLooks(Generic[K, T]):
    """Remembers the last answer of each. To be used from one thread only.

    Args:
        wait_seconds: for each that does not answer, once: no second look is begun while the first hangs.
    """

    def __init__(self, wait_seconds: float) -> None:
        self._wait_seconds = wait_seconds
        self._calls: dict[K, BackgroundCall[T]] = {}
        self._last: dict[K, T] = {}

    def look(self, key: K, ask: Callable[[], T]) -> T | None:
        """What `ask` gives; of who hangs what it gave before, None where that is nothing. It must not raise."""
        call = self._calls.get(key)
        if call is None or not call.is_stuck:
            call = self._calls[key] = BackgroundCall(ask, "look")
            call.wait(self._wait_seconds)
        if call.answer is not None:
            self._last[key] = call.answer
        return self._last.get(key)

    def last(self, key: K) -> T | None:
        """What it gave last."""
        return self._last.get(key)

    def keep_only(self, keys: Collection[K]) -> None:
        """Forget the others. A thread of theirs that hangs ends when it ends."""
        self._calls = {key: call for key, call in self._calls.items() if key in keys}
        self._last = {key: last for key, last in self._last.items() if key in keys}
