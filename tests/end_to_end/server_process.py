"""A server that a test starts: on loopback, in a process group of its own, with its output in a log file."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class ServerStartError(Exception):
    """The server died or did not get ready in time; the message ends with the last lines of its log."""


def free_loopback_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        name: str,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._stopped = False
        with log_path.open("wb") as log:
            # A group of its own, so that stop() reaches its children too, and nothing else.
            self._process = subprocess.Popen(
                [os.fspath(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment) if environment is not None else None,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def wait_until(
        self,
        is_ready: Callable[[], bool],
        *,
        limit_seconds: float,
        progress: Callable[[str], None] | None = None,
        every_seconds: float = 0.25,
    ) -> float:
        """Wait for `is_ready` and return the seconds it took. Stops the server when it does not get there."""
        began_at = time.monotonic()
        next_line_at = 20.0
        while True:
            if not self.is_running():
                self.stop()
                raise ServerStartError(
                    f"{self.name} ended with {self._process.returncode}\n{self.log_tail()}"
                )
            if is_ready():
                return time.monotonic() - began_at
            elapsed = time.monotonic() - began_at
            if elapsed > limit_seconds:
                tail = self.log_tail()
                self.stop()
                raise ServerStartError(f"{self.name} was not ready after {limit_seconds:.0f} s\n{tail}")
            if progress is not None and elapsed > next_line_at:
                progress(f"{self.name} is starting, {elapsed:.0f} s so far")
                next_line_at += 20
            time.sleep(every_seconds)

    def stop(self, grace_seconds: float = 30) -> None:
        """Ask the whole group to end, insist after `grace_seconds`. Harmless when it has ended already."""
        if self._stopped:
            return
        for number, patience_seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            if self._group_ends_within(patience_seconds):
                break
        self._process.wait()
        self._stopped = True

    def _group_ends_within(self, limit_seconds: float) -> bool:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            self._process.poll()  # collects the leader; as a zombie it would keep the group in being
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False
