"""`kvheadroom top`: where its numbers come from, one look, and looking until somebody ends it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from kvheadroom.app import look_once, watch_here
from kvheadroom.capacity.board_view import BoardView
from kvheadroom.capacity.fleet import withhold_stale
from kvheadroom.capacity.readings import SourceFailure
from kvheadroom.config import Config
from kvheadroom.outputs.json_report import status_report
from kvheadroom.outputs.live_screen import LiveScreen, has_blocks
from kvheadroom.outputs.terminal import Space, board_lines
from kvheadroom.sources.http import open_session
from kvheadroom.sources.status_api import fetch_status, parse_status

DAEMON_SECONDS = 5.0
"""As often as the status page loads itself."""
DRAW_SECONDS = 1.0
WITHHELD_AFTER_SECONDS = 3 * DAEMON_SECONDS
"""As with scrapes: numbers older than three looks are not shown."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where documents in the form of /api/v1/status come from.

    Attributes:
        words: for a person.
        every_seconds: between two looks.
        look: one more.
    """

    words: str
    every_seconds: float
    look: Callable[[], Awaitable[Document | SourceFailure]]


@contextlib.asynccontextmanager
async def from_daemon(url: str) -> AsyncIterator[Origin]:
    """What a running daemon tells."""
    async with open_session() as session:
        yield Origin(f"from {url}", DAEMON_SECONDS, lambda: fetch_status(session, url))


@contextlib.asynccontextmanager
async def from_servers(config: Config) -> AsyncIterator[Origin]:
    """What this process sees of the servers itself, at the interval of the config.

    Raises:
        ConfigError: a file that the config names cannot be read.
    """
    async with watch_here(_without_calibration(config)) as watch:

        async def look() -> Document:
            now = time.time()
            return status_report(withhold_stale(watch.board.fleet, now), now, None)

        yield Origin(f"watched here every {config.scrape_interval:g} s", DRAW_SECONDS, look)


async def look_at_servers(config: Config) -> Document:
    """What one look at the servers tells.

    Raises:
        ConfigError: a file that the config names cannot be read.
    """
    fleet, _ = await look_once(_without_calibration(config))
    now = time.time()
    return status_report(withhold_stale(fleet, now), now, None)


async def look_at_daemon(url: str) -> Document | SourceFailure:
    """What a running daemon tells now."""
    async with from_daemon(url) as origin:
        return await origin.look()


def _without_calibration(config: Config) -> Config:
    """The file is the daemon's: two that write it would undo each other's work."""
    return config.model_copy(update={"calibration_file": None})


class Latest:
    """What was told last, and for how long it has been."""

    def __init__(self) -> None:
        self._view: BoardView | None = None
        self._told_at = time.monotonic()
        self._failure: SourceFailure | None = None

    def tell(self, answer: Document | SourceFailure) -> None:
        """One more answer."""
        if isinstance(answer, SourceFailure):
            self._failure = answer
        else:
            self._view, self._failure, self._told_at = parse_status(answer), None, time.monotonic()

    def view(self) -> tuple[BoardView | None, float]:
        """(what may be shown now, how many seconds ago it was told); None before the first answer."""
        age = time.monotonic() - self._told_at
        if self._failure is None:
            return self._view, age
        if self._view is None or age > WITHHELD_AFTER_SECONDS:
            return BoardView.of_no_answer(time.time(), self._failure.detail), 0.0
        fault = f"{self._failure.detail}; this is what it said {age:.0f} s ago"
        return replace(self._view, faults=(fault, *self._view.faults)), age


async def show_live(
    source: contextlib.AbstractAsyncContextManager[Origin], console: Console, most: int | None
) -> None:
    """Draw until `q`, Ctrl-C or a signal that ends programs; the terminal is then as it was.

    Args:
        most: engines at most; None for as many as there is room for.
    """
    loop = asyncio.get_running_loop()
    stop, wake = asyncio.Event(), asyncio.Event()

    def end() -> None:
        stop.set()
        wake.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    async with source as origin:
        latest = Latest()
        with LiveScreen(console) as screen:
            looking = asyncio.create_task(_look(origin, latest, wake))
            # What goes wrong there is to end this too.
            looking.add_done_callback(lambda _: end())
            _listen(loop, screen, end, wake)
            try:
                while not stop.is_set():
                    _draw(screen, console, origin, latest, most)
                    wake.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), DRAW_SECONDS)
            finally:
                if screen.keys is not None:
                    loop.remove_reader(screen.keys)
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking


def _listen(
    loop: asyncio.AbstractEventLoop, screen: LiveScreen, end: Callable[[], None], wake: asyncio.Event
) -> None:
    def typed() -> None:
        keys = screen.read_keys()
        if not keys or "q" in keys.lower():
            end()

    def suspend() -> None:
        with screen.suspended():
            os.kill(os.getpid(), signal.SIGSTOP)
        wake.set()

    if screen.keys is not None:
        loop.add_reader(screen.keys, typed)
    loop.add_signal_handler(signal.SIGTSTP, suspend)
    loop.add_signal_handler(signal.SIGWINCH, wake.set)


async def _look(origin: Origin, latest: Latest, wake: asyncio.Event) -> None:
    while True:
        latest.tell(await origin.look())
        wake.set()
        await asyncio.sleep(origin.every_seconds)


def _draw(screen: LiveScreen, console: Console, origin: Origin, latest: Latest, most: int | None) -> None:
    view, age = latest.view()
    if view is None:
        view = replace(BoardView.of_no_answer(time.time(), ""), faults=(), hints=("asking ...",))
        age = 0.0
    width, height = console.size
    space = Space(width=width, height=height, most=most, blocks=has_blocks(console))
    screen.show(board_lines(view, f"{origin.words}; q ends", space, age_seconds=age))
