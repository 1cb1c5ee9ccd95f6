"""Files that may lie on a dead network mount: read in daemon threads, with a deadline."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class SlowFiles:
    """Reads files, one thread for each at a time.

    A dead mount keeps a reading thread for ever. Nobody waits for it, neither a tick nor the end of the process, and no
    second one is started for the same file while it hangs.

    Args:
        most: files under way at once, where somebody else may name ever more of them.
    """

    def __init__(self, *, most: float = math.inf) -> None:
        self._most = most
        self._under_way: dict[str, asyncio.Future[Any]] = {}

    async def read(self, path: str, work: Callable[[], T], *, timeout_seconds: float) -> T:
        """What `work` gives or raises; a reading of the same path under way is waited for.

        Raises:
            TimeoutError: with the reason, to be put after the path.
        """
        self._under_way = {name: answer for name, answer in self._under_way.items() if not answer.done()}
        if path not in self._under_way:
            if len(self._under_way) >= self._most:
                hung = ", ".join(self._under_way)
                raise TimeoutError(f"not read while others take so long ({hung}); does their disk hang?")
            self._under_way[path] = _start(work)
        answer: asyncio.Future[T] = self._under_way[path]
        await asyncio.wait({answer}, timeout=timeout_seconds)
        if answer.done():
            return answer.result()
        raise TimeoutError(f"not read within {timeout_seconds:g} s; does its disk hang?")


def _start(work: Callable[[], T]) -> "asyncio.Future[T]":
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    # An error that comes when nobody waits any more is no news.
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def tell(give: Callable[[], None]) -> None:
        if not answer.done():
            give()

    def read() -> None:
        try:
            give = partial(answer.set_result, work())
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where it is waited for
            give = partial(answer.set_exception, error)
        # The loop may have ended meanwhile; then nobody is there to be told.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, give)

    threading.Thread(target=read, name="files", daemon=True).start()
    return answer
