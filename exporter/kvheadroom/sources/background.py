"""A blocking call that may never come back, made in a daemon thread: whoever asks waits as long as it likes."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """One call, under way from now on.

    Args:
        ask: blocks and gives the answer; it must not raise.
        name: of the thread.

    Attributes:
        answer: None until the call has ended.
    """

    def __init__(self, ask: Callable[[], T], name: str) -> None:
        self._ask = ask
        self._ended = threading.Event()
        self.answer: T | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        self.answer = self._ask()
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Until it has ended, or for so long."""
        self._ended.wait(max(0.0, seconds))

    @property
    def is_stuck(self) -> bool:
        """Whether it has not ended yet."""
        return self.answer is None
