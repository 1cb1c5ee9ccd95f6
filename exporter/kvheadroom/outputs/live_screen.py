"""A terminal that is drawn over: its other screen, without cursor and echo, and back as it was whatever happens."""

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import IO, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text


def open_console(file: IO[str]) -> Console:
    """Colours where the terminal has them and NO_COLOR is not set; plain text where it is none."""
    return Console(file=file, highlight=False, markup=False, emoji=False)


def has_blocks(console: Console) -> bool:
    """Whether block elements can be written."""
    return console.encoding.lower().startswith("utf")


def print_lines(console: Console, lines: Sequence[Text]) -> None:
    """One after the other, none broken."""
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


class LiveScreen:
    """The other screen of a terminal.

    Entered and left as a context; `suspended` gives the terminal back for a while.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None

    @property
    def keys(self) -> int | None:
        """Where keys are read from; None where there are none."""
        return self._keys

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def show(self, lines: Sequence[Text]) -> None:
        """Draw these in place of what was there."""
        if self._live is not None:
            self._live.update(Group(*lines), refresh=True)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The terminal as it was before."""
        self._close()
        try:
            yield
        finally:
            self._open()

    def _open(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            # Signals stay: Ctrl-C and Ctrl-Z do what they do everywhere.
            tty.setcbreak(self._keys)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        try:
            self._live.start()
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:
            if self._keys is not None and self._before is not None:
                before, self._before = self._before, None
                # A terminal that has gone away has nothing to be put back.
                with contextlib.suppress(termios.error, OSError):
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, before)

    def read_keys(self) -> str:
        """What was typed since; empty at its end."""
        if self._keys is None:
            return ""
        try:
            return os.read(self._keys, 256).decode("utf-8", "replace")
        except OSError:
            return ""
