"""What watching a fleet costs, and whether it is in time: `make bench`.

CPU: the daemon and Debian's Prometheus scrape the same 500 targets every 5 s in the same run, Prometheus keeping only the
series that the daemon reads; CPU of each process for one target-scrape. Lateness: 1,000 targets, some hanging, some slow.
"""

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from kvheadroom.sources.metric_names import OFTEN_NAMES
from kvheadroom.sources.vllm_pages import FILTERED_PAGE
from tests.bench.fleet_server import address
from tests.bench.server_cost import cpu_seconds
from tests.daemon import Daemon, daemon, wait_for
from tests.end_to_end.prometheus_server import PrometheusServer, PrometheusUnavailableError, find_binaries

INTERVAL_SECONDS = 5
COMPARED_TARGETS = 500
WARM_SECONDS = 20
ROUNDS = 3
ROUND_SECONDS = 20
TIMED_TARGETS = 1000
TIMED_SECONDS = 60
KEPT = "|".join(re.escape(f"vllm:{name}") for name in OFTEN_NAMES) + "|process_start_time_seconds"


@dataclass(frozen=True)
class Fleet:
    """A running fleet of targets."""

    port: int

    def asked(self) -> dict[str, Any]:
        """What was asked so far."""
        told: dict[str, Any] = requests.get(f"http://127.0.0.1:{self.port}/counts", timeout=30).json()
        return told


@contextlib.contextmanager
def fleet(**settings: object) -> Iterator[Fleet]:
    """The targets, in a process of their own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.fleet_server", json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Fleet(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def watching(fleet: Fleet, targets: int) -> Iterator[Daemon]:
    """The daemon as people run it."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvheadroom.yaml"
        replicas = [{"url": f"http://{address(target)}:{fleet.port}"} for target in range(targets)]
        # Every JSON document is YAML as well.
        config.write_text(json.dumps({"scrape_interval": f"{INTERVAL_SECONDS}s", "replicas": replicas}))
        with daemon("serve", "--config", config) as serve:
            yield serve


def prometheus(fleet: Fleet, *, filters: bool) -> PrometheusServer:
    """Debian's Prometheus on the same targets."""
    scrape: dict[str, Any] = {
        "job_name": "vllm",
        "static_configs": [
            {"targets": [f"{address(target)}:{fleet.port}" for target in range(COMPARED_TARGETS)]}
        ],
        "metric_relabel_configs": [{"source_labels": ["__name__"], "regex": KEPT, "action": "keep"}],
    }
    if filters:
        names = [*(f"vllm:{name}" for name in OFTEN_NAMES), "process_start_time_seconds"]
        scrape |= {"metrics_path": FILTERED_PAGE.partition("?")[0], "params": {"name[]": names}}
    return PrometheusServer(find_binaries("2.x"), [scrape], interval_seconds=INTERVAL_SECONDS)


@contextlib.contextmanager
def fetching(fleet: Fleet, *more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Our fetching and parsing alone, or up to the forecast, in a process of its own."""
    arguments = [str(fleet.port), str(COMPARED_TARGETS), str(INTERVAL_SECONDS), *more]
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.fetch_fleet", *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def compare(*, filters: bool) -> None:
    """CPU for one target-scrape, of all three in the same run."""
    with (
        fleet(filters=filters, hanging=[], slow=[], timed=False) as targets,
        prometheus(targets, filters=filters) as peer,
        watching(targets, COMPARED_TARGETS) as serve,
        fetching(targets) as fetch,
        tempfile.TemporaryDirectory() as folder,
        fetching(targets, f"{folder}/forecasts") as forecast,
    ):
        spent = Path(folder) / "forecasts"
        pids = {
            "prometheus": peer.pid,
            "kvheadroom": serve.pid,
            "fetch": fetch.pid,
            "forecast": forecast.pid,
        }

        def so_far() -> dict[str, tuple[int, float]]:
            scrapes = targets.asked()["scrapes"]
            return {name: (scrapes[name], cpu_seconds(pid)) for name, pid in pids.items()}

        time.sleep(WARM_SECONDS)
        each: dict[str, list[float]] = {name: [] for name in (*pids, "alone")}
        for _ in range(ROUNDS):
            before = so_far()
            time.sleep(ROUND_SECONDS)
            for name, (scrapes, busy) in so_far().items():
                each[name].append((busy - before[name][1]) / (scrapes - before[name][0]))
            number, seconds = map(float, spent.read_text().split())
            each["alone"].append(each["fetch"][-1] + seconds / number)
        kept = peer.value('count({__name__=~"vllm:.+|process_start_time_seconds"})')
        up = wait_for(lambda: len(serve.metrics()["kvheadroom_observed_blocks"]), "the daemon's own page")
    print(
        f"{'wanted samples alone' if filters else 'whole pages'}, {COMPARED_TARGETS} targets every {INTERVAL_SECONDS} s "
        f"({up} read, Prometheus keeps {kept:.0f} series), CPU for one target-scrape: "
        f"Prometheus {statistics.median(each['prometheus']) * 1e6:.0f} us; {_told('fetch and parse', 'fetch', each)}; "
        f"{_told('with the forecast', 'alone', each)}; {_told('with history and states too', 'forecast', each)}; "
        f"{_told('the whole daemon', 'kvheadroom', each)}",
        flush=True,
    )


def _told(what: str, name: str, each: dict[str, list[float]]) -> str:
    ratios = [own / peer for own, peer in zip(each[name], each["prometheus"], strict=True)]
    return (
        f"{what} {statistics.median(each[name]) * 1e6:.0f} us, {statistics.median(ratios):.2f} of that "
        f"(min {min(ratios):.2f}, max {max(ratios):.2f})"
    )


def late() -> None:
    """How late the scrapes of healthy targets come while others hang or answer slowly."""
    hanging = list(range(0, TIMED_TARGETS, 20))
    slow = list(range(10, TIMED_TARGETS, 20))
    with (
        fleet(filters=True, hanging=hanging, slow=slow, timed=True) as targets,
        watching(targets, TIMED_TARGETS) as serve,
    ):
        time.sleep(WARM_SECONDS)
        began, busy = time.monotonic(), cpu_seconds(serve.pid)
        time.sleep(TIMED_SECONDS)
        ended, busy = time.monotonic(), cpu_seconds(serve.pid) - busy
        arrivals: dict[str, list[float]] = targets.asked()["arrivals"]
    healthy = [address(target) for target in range(TIMED_TARGETS) if target not in {*hanging, *slow}]
    lateness = [
        share
        for host in healthy
        for share in _lateness([at for at in arrivals[host] if began <= at <= ended])
    ]
    print(
        f"{TIMED_TARGETS} targets every {INTERVAL_SECONDS} s, {len(hanging)} hanging, {len(slow)} slow (2 to 4 s): the latest "
        f"scrape of {len(healthy)} healthy ones came {max(lateness):.1%} of the interval late, the median "
        f"{statistics.median(lateness):.1%}; the daemon used {busy / TIMED_SECONDS:.1%} of a core",
        flush=True,
    )


def _lateness(arrivals: list[float]) -> list[float]:
    """Shares of the interval that each scrape came after its turn; the one that was least late is taken to be in time.

    A scrape that was left out counts as late by the whole interval.
    """
    if len(arrivals) < TIMED_SECONDS / INTERVAL_SECONDS - 1:
        return [float(TIMED_SECONDS / INTERVAL_SECONDS - len(arrivals))]
    after = [at - turn * INTERVAL_SECONDS for turn, at in enumerate(arrivals)]
    return [(at - min(after)) / INTERVAL_SECONDS for at in after]


def main() -> int:
    """Print one line each."""
    try:
        compare(filters=False)
        compare(filters=True)
    except PrometheusUnavailableError as reason:
        print(f"not compared: {reason}")
    late()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
