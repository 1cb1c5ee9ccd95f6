"""The installed `kvheadroom` command as a subprocess, watched from outside as a user would."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import requests
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")

COMMAND = [sys.executable, "-m", "kvheadroom"]


def hear_signals() -> None:
    """As `preexec_fn`: what runs in the background or under nohup ignores these, and so would what it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def check(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """`kvheadroom check`, run to its end."""
    return subprocess.run(
        [*COMMAND, "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )


class Daemon:
    """A running `serve` or `demo`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = wait_for(self._address, "the daemon's address", seconds=20)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    def _address(self) -> str | None:
        if self._process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self._process.returncode}:\n{self.output}")
        match = re.search(r"^open (http://\S+)/$", self.output, re.MULTILINE)
        return match[1] if match else None

    @property
    def output(self) -> str:
        """Standard output and error so far."""
        return "".join(self._lines)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def get(self, path: str, **headers: str) -> requests.Response:
        return requests.get(self.url + path, headers=headers, timeout=5)

    def pages(self) -> str:
        """The fleet's page, and every engine's that it links to."""
        fleet = self.get("/").text
        links = dict.fromkeys(re.findall(r'href="(/engines/[^"]+)"', fleet))
        return "\n".join([fleet, *(self.get(link).text for link in links)])

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Samples of /metrics by name."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample of that name with those labels, None without one."""
        found = [v for have, v in self.metrics().get(name, []) if labels.items() <= have.items()]
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else None

    def stop(self, number: int = signal.SIGINT) -> tuple[int, float]:
        """(exit code, seconds it took)."""
        started = time.monotonic()
        self._process.send_signal(number)
        code = self._process.wait(10)
        return code, time.monotonic() - started


@contextlib.contextmanager
def daemon(
    *arguments: str | Path, listen: str = "127.0.0.1:0", environment: Mapping[str, str] | None = None
) -> Iterator[Daemon]:
    """Run `kvheadroom ARGUMENTS`, ended at the end."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments), "--web.listen-address", listen],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**(environment or os.environ), "PYTHONUNBUFFERED": "1"},
        preexec_fn=hear_signals,
    )
    try:
        yield Daemon(process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_for(condition: Callable[[], T | None], what: str, *, seconds: float = 15) -> T:
    """The first answer that is neither None nor False."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer is not None and answer is not False:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {seconds:g} s")
