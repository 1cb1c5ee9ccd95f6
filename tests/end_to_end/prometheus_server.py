"""A real Prometheus on loopback, of either generation, and where their programs are."""

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import requests

from tests.end_to_end.cache_folder import cache_folder
from tests.end_to_end.server_process import ServerProcess, free_loopback_port

Generation = Literal["2.x", "3.x"]
GENERATIONS: tuple[Generation, ...] = ("2.x", "3.x")

PROMETHEUS3_SCRIPT = Path(__file__).parents[1] / "prometheus3.sh"
PROMETHEUS3_LIMIT_SECONDS = 300
READY_LIMIT_SECONDS = 30.0

Sample = dict[str, Any]


class PrometheusUnavailableError(Exception):
    """No such Prometheus here, and none could be had; the message says why in one line."""


class Binaries(NamedTuple):
    prometheus: Path
    promtool: Path


def binaries() -> dict[Generation, Binaries]:
    """Both generations. Raises PrometheusUnavailableError when one is missing."""
    return {generation: find_binaries(generation) for generation in GENERATIONS}


@cache
def find_binaries(generation: Generation) -> Binaries:
    """The installed Prometheus when it is of this generation; 3.x is otherwise unpacked into the cache."""
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if prometheus and promtool and generation_of(Path(prometheus)) == generation:
        return Binaries(Path(prometheus), Path(promtool))
    if generation == "3.x":
        return _unpacked_prometheus3()
    raise PrometheusUnavailableError(
        "no Prometheus 2.x with promtool on the PATH; tests/system_packages.sh installs Debian's"
    )


def generation_of(prometheus: Path) -> str:
    # 2.x prints its version on one stream and 3.x on the other, depending on the build.
    answer = subprocess.run(
        [prometheus, "--version"], capture_output=True, text=True, check=False, timeout=30
    )
    found = re.search(r"version (\d+)\.", answer.stdout + answer.stderr)
    return f"{found[1]}.x" if found else "unknown"


def _unpacked_prometheus3() -> Binaries:
    folder = cache_folder() / "prometheus3"
    try:
        answer = subprocess.run(
            ["bash", PROMETHEUS3_SCRIPT, folder],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROMETHEUS3_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise PrometheusUnavailableError(
            f"{PROMETHEUS3_SCRIPT.name} took over {PROMETHEUS3_LIMIT_SECONDS} s"
        ) from None
    if answer.returncode != 0:
        last_line = (answer.stderr.strip().splitlines() or [f"{PROMETHEUS3_SCRIPT.name} failed"])[-1]
        raise PrometheusUnavailableError(last_line)
    return Binaries(folder / "bin" / "prometheus", folder / "bin" / "promtool")


class PrometheusServer:
    """Use as a context manager, or call start() and stop(). Its data go with it.

    `scrape_configs` are the entries of Prometheus's `scrape_configs`; scrape and evaluation interval are
    `interval_seconds` unless an entry says otherwise. `alertmanagers` are hosts with ports. `blocks` is a
    folder of history that it begins with.
    """

    def __init__(
        self,
        binaries: Binaries,
        scrape_configs: Sequence[Mapping[str, Any]],
        *,
        rule_files: Sequence[Path] = (),
        alertmanagers: Sequence[str] = (),
        interval_seconds: float = 1.0,
        more_config: Mapping[str, Any] | None = None,
        blocks: Path | None = None,
    ) -> None:
        self._binaries = binaries
        self._blocks = blocks
        interval = f"{round(interval_seconds * 1000)}ms"
        self._config: dict[str, Any] = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": interval,
            },
            "scrape_configs": list(scrape_configs),
            "rule_files": [str(path.resolve()) for path in rule_files],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]},
            **(more_config or {}),
        }
        self._port = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: ServerProcess | None = None

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvheadroom-prometheus-")
        folder = Path(self._folder.name)
        config = folder / "prometheus.yml"
        config.write_text(json.dumps(self._config, indent=1))  # every JSON document is YAML as well
        if self._blocks is not None:
            shutil.copytree(self._blocks, folder / "data")
        self._port = free_loopback_port()
        self._process = ServerProcess(
            [
                self._binaries.prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            name="Prometheus",
            log_path=folder / "prometheus.log",
        )
        self._process.wait_until(self._is_ready, limit_seconds=READY_LIMIT_SECONDS, every_seconds=0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(grace_seconds=10)
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
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
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("Prometheus was not started")
        return self._process.pid

    @property
    def log(self) -> str:
        return self._process.log() if self._process is not None else ""

    def query(self, expression: str) -> list[Sample]:
        """The instant vector: `[{"metric": {...}, "value": [at, "1"]}, ...]`."""
        result: list[Sample] = self._get("query", {"query": expression})["result"]
        return result

    def value(self, expression: str) -> float | None:
        """The value of an expression with at most one series; None when it has none."""
        result = self.query(expression)
        if len(result) > 1:
            raise ValueError(f"{expression} has {len(result)} series")
        return float(result[0]["value"][1]) if result else None

    def query_range(self, expression: str, start: float, end: float, step_seconds: float) -> list[Sample]:
        """The range vector: `[{"metric": {...}, "values": [[at, "1"], ...]}, ...]`."""
        answer = self._get(
            "query_range", {"query": expression, "start": start, "end": end, "step": step_seconds}
        )
        result: list[Sample] = answer["result"]
        return result

    def series(self, *matchers: str) -> list[dict[str, str]]:
        result: list[dict[str, str]] = self._get("series", {"match[]": list(matchers)})
        return result

    def targets(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get("targets", {"state": "active"})["activeTargets"]
        return result

    def rule_groups(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get("rules", {})["groups"]
        return result

    def wait_for(
        self,
        expression: str,
        *,
        limit_seconds: float = 30.0,
        holds: Callable[[list[Sample]], bool] = bool,
    ) -> list[Sample]:
        """Query until the answer is not empty, or until `holds` accepts it."""
        deadline = time.monotonic() + limit_seconds
        while True:
            result = self.query(expression)
            if holds(result):
                return result
            if time.monotonic() > deadline:
                problems = [f"{target['scrapeUrl']}: {target['lastError']}" for target in self.targets()]
                raise TimeoutError(
                    f"{expression} was {result} for {limit_seconds:.0f} s; targets: {problems}"
                )
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"{self.base_url}/-/ready", timeout=2).ok
        except requests.RequestException:
            return False

    def _get(self, path: str, parameters: Mapping[str, Any]) -> Any:
        answer = requests.get(f"{self.base_url}/api/v1/{path}", params=parameters, timeout=30)
        body = answer.json()
        if body["status"] != "success":
            raise ValueError(f"Prometheus refused {dict(parameters)}: {body.get('error')}")
        return body["data"]
