"""A terminal of our own, and a program that runs in it as it would in a person's."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any

OTHER_SCREEN, OWN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
CURSOR_HIDDEN, CURSOR_SHOWN = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """One terminal with one program in it.

    Attributes:
        written: all that the program wrote so far.
    """

    def __init__(self, command: Sequence[str], width: int, height: int, environment: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(width, height)
        self.before = self.settings()
        self.written = b""

        def take_it() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):
                signal.signal(number, signal.SIG_DFL)

        kept = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            preexec_fn=take_it,
            env={**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment},
        )

    def resize(self, width: int, height: int) -> None:
        """Another size; the program is told."""
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def settings(self) -> list[Any]:
        """Echo, line by line, and so on."""
        return termios.tcgetattr(self._slave)

    def type(self, keys: str) -> None:
        """As a person."""
        os.write(self._master, keys.encode())

    def read(self, seconds: float = 0.05) -> bytes:
        """What was written since; it is added to `written`."""
        new = b""
        while select.select([self._master], [], [], seconds)[0]:
            try:
                part = os.read(self._master, 65_536)
            except OSError:
                break
            if not part:
                break
            new += part
        self.written += new
        return new

    def wait_for(self, what: bytes, *, seconds: float = 30.0, times: int = 1) -> None:
        """Until the program has written it so often."""
        deadline = time.monotonic() + seconds
        while self.written.count(what) < times:
            self.read()
            assert time.monotonic() < deadline, (what, self.written[-3000:])

    def end(self, seconds: float = 10.0) -> int:
        """The exit code, once it has ended and all is read."""
        code = self.process.wait(seconds)
        self.read()
        return code

    @property
    def words(self) -> str:
        """All that was written, without sequences."""
        return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", " ", self.written.decode("utf-8", "replace"))

    @property
    def is_as_before(self) -> bool:
        """The screen, the cursor and the settings."""
        return (
            self.written.count(OTHER_SCREEN) == self.written.count(OWN_SCREEN)
            and self.written.rfind(CURSOR_SHOWN) > self.written.rfind(CURSOR_HIDDEN)
            and self.settings() == self.before
        )

    def close(self) -> None:
        """End the program, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@contextlib.contextmanager
def terminal(
    command: Sequence[str], *, width: int = 100, height: int = 30, **environment: str
) -> Iterator[Terminal]:
    """The program in a terminal, both gone at the end."""
    inside = Terminal(command, width, height, environment)
    try:
        yield inside
    finally:
        inside.close()
