"""A real vLLM on this machine's CPU, serving one tiny model on loopback."""

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import requests

from tests.end_to_end.cache_folder import cache_folder
from tests.end_to_end.server_process import ServerProcess, free_loopback_port

Flags = Mapping[str, str | int | float | bool] | Sequence[str]

# Measured: 60 s on two idle cores, up to 220 s beside other work or with cold disk caches.
READY_LIMIT_SECONDS = 420.0

NICER = 5
"""What a server that gives way adds to its niceness."""

# As in: "CPU KV cache size: 4,096 tokens, Maximum concurrency for 2,048 tokens per request: 2.00x"
CAPACITY_LINE = re.compile(
    r"KV cache size: (?P<pool>[\d,]+) tokens.*?"
    r"Maximum concurrency for (?P<request>[\d,]+) tokens per request: (?P<concurrency>[\d.]+)x",
    re.DOTALL,  # other releases print the two halves as two lines
)


@dataclass(frozen=True)
class StartupLogCapacity:
    """What vLLM said at startup about its KV cache. It counts the null block, which no request can use."""

    pool_tokens: int
    max_concurrency: float
    request_tokens: int


class VllmServer:
    """Use as a context manager, or call start() and stop().

    `flags` is either the command line's own words or a mapping such as `{"--max-model-len": 2048}`, where
    True gives the bare flag and False leaves it out. With a `certificate` the server speaks TLS and wants to be shown
    that same certificate.
    """

    def __init__(
        self,
        python: Path,
        model_folder: Path,
        flags: Flags,
        log_path: Path,
        *,
        served_model_name: str = "tiny",
        dev_mode: bool = False,
        ready_limit_seconds: float = READY_LIMIT_SECONDS,
        port: int | None = None,
        certificate: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.served_model_name = served_model_name
        self.started_after_seconds: float | None = None
        self._python = python
        self._model_folder = model_folder
        self._flags = flag_words(flags)
        self._log_path = log_path
        self._dev_mode = dev_mode
        self._ready_limit_seconds = ready_limit_seconds
        self._progress = progress
        self._wanted_port = port
        self._certificate = certificate
        self._port = 0
        self._temporary_folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: ServerProcess | None = None

    def start(self) -> None:
        """Return when /health answers; raise ServerStartError with the end of the log when it never does."""
        self._port = self._wanted_port or free_loopback_port()
        # vLLM leaves its sockets and rendezvous files behind. Short, for the path of a socket has 107 bytes.
        self._temporary_folder = tempfile.TemporaryDirectory(prefix="kvheadroom-vllm-")
        # By the name that the command has on every machine, so that its process looks as it does there.
        command = Path(self._temporary_folder.name) / "vllm"
        command.symlink_to(Path(__file__).with_name("vllm_command.py"))
        if self._progress is not None:
            self._progress(f"starting vLLM with {self._model_folder.name}, about a minute")
        self._process = ServerProcess(
            self._words(command),
            name="vLLM",
            log_path=self._log_path,
            environment=self._environment() | {"TMPDIR": self._temporary_folder.name},
        )
        self.started_after_seconds = self._process.wait_until(
            self._is_healthy, limit_seconds=self._ready_limit_seconds, progress=self._progress
        )
        if self._progress is not None:
            self._progress(f"vLLM is ready after {self.started_after_seconds:.0f} s at {self.base_url}")

    def stop(self, grace_seconds: float = 30) -> None:
        if self._process is not None:
            self._process.stop(grace_seconds)
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            # Ctrl-C while waiting must not leave the server behind; one that still imports heeds no request.
            self.stop(grace_seconds=1)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        return f"{'http' if self._certificate is None else 'https'}://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def host_and_port(self) -> str:
        """As a Prometheus target."""
        return f"127.0.0.1:{self._port}"

    @property
    def model_folder(self) -> Path:
        return self._model_folder

    @property
    def pid(self) -> int:
        """The API server's; the engine is its child."""
        return self._running().pid

    @property
    def startup_log(self) -> str:
        return self._running().log()

    def startup_log_capacity(self) -> StartupLogCapacity:
        return parse_startup_log_capacity(self.startup_log)

    def give_way(self) -> None:
        """Let those who watch the server have the cores first: one who waits for a core tells when it got it, not what was."""
        os.setpriority(os.PRIO_PGRP, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICER)

    def metrics(self) -> str:
        answer = requests.get(f"{self.base_url}/metrics", timeout=10)
        answer.raise_for_status()
        return answer.text

    def metric_sum(self, name: str) -> float | None:
        """The sum of all series called `name` right now, None when there are none.

        Not read by the product's own parser, on purpose.
        """
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)", self.metrics(), re.MULTILINE)
        return sum(float(value) for value in values) if values else None

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("vLLM was not started")
        return self._process

    def _is_healthy(self) -> bool:
        try:
            file = None if self._certificate is None else str(self._certificate)
            return requests.get(f"{self.base_url}/health", timeout=2, verify=file or True, cert=file).ok
        except requests.RequestException:
            return False

    def _words(self, command: Path) -> list[str | Path]:
        # `vllm serve`, as people start it: unlike the api_server module it starts one front end per
        # data-parallel engine, which makes the page a multi-process one.
        return [
            self._python,
            command,
            "serve",
            self._model_folder,
            *("--host", "127.0.0.1"),
            *("--port", str(self._port)),
            *("--served-model-name", self.served_model_name),
            *self._flags,
            *self._tls_flags(),
        ]

    def _tls_flags(self) -> list[str | Path]:
        if self._certificate is None:
            return []
        files = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
        return [word for flag in files for word in (flag, self._certificate)] + ["--ssl-cert-reqs", "2"]

    def _environment(self) -> dict[str, str]:
        # Byte code must be written, or every start is as slow as the first; PYTHONPATH could shadow packages.
        unwanted = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VLLM_SERVER_DEV_MODE")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        environment |= {
            # Nothing leaves this machine: no model hub, no statistics, engine processes meet on loopback.
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "no_proxy": "127.0.0.1,localhost",
            # One computing thread: OpenMP's threads spin while they wait, and on two cores they starved vLLM's own front
            # end until a request had ended, so that every scrape saw the engine idle.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(cache_folder() / "vllm-cache"),
        }
        if self._dev_mode:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        return environment


def flag_words(flags: Flags) -> list[str]:
    if not isinstance(flags, Mapping):
        return list(flags)
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif value is not False:
            words += [name, str(value)]
    return words


def parse_startup_log_capacity(log: str) -> StartupLogCapacity:
    found = CAPACITY_LINE.search(log)
    if found is None:
        raise ValueError("vLLM's log has no line about the size of its KV cache")
    return StartupLogCapacity(
        pool_tokens=int(found["pool"].replace(",", "")),
        max_concurrency=float(found["concurrency"].replace(",", "")),
        request_tokens=int(found["request"].replace(",", "")),
    )
