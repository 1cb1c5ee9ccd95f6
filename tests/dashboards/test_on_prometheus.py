"""Every query of every dashboard on a real Prometheus: over what the daemon says of recorded pages, over a made-up fleet that has every
family, and over a daemon that runs."""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import TESTS
from tests.daemon import daemon, wait_for
from tests.dashboards import expressions
from tests.dashboards.expressions import EXPORTED, Json, panels_of
from tests.dashboards.made_fleet import made_fleet
from tests.dashboards.test_dashboards import DASHBOARDS
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer
from tests.exported_history import Series, always, ended_lately, real_prometheus_with

TARGET = {"job": "kvheadroom", "instance": "gpu-7:9878"}
ALL = {"job": ".+", "replica": ".+", "model_name": ".*", "engine": ".+", "daemon": "gpu-7:9878"}
# Alerts are Prometheus's, and the recorded tier in host memory evicted nothing.
NOT_ON_THE_PAGE = {"Alerts that fire", "Stays in host memory, shortest engines"}


class Asked:
    """What the queries of a dashboard answered.

    Attributes:
        shown: titles of panels with a number.
        silent: titles of those without.
        wrong: queries without an answer although each of their selectors has one.
    """

    def __init__(
        self, server: PrometheusServer, document: Json, chosen: Mapping[str, str], ends_at: float, span: float
    ) -> None:
        self.shown: set[str] = set()
        self.silent: set[str] = set()
        self.wrong: list[str] = []
        self._server, self._ends_at, self._span = server, ends_at, span
        step = span / 60
        times = {
            "__rate_interval": f"{max(60, round(4 * step))}s" if span > 600 else "15s",
            "__range": f"{round(span)}s",
            "__interval": f"{round(step)}s",
        }
        values = dict(chosen) | times
        for panel in panels_of(document):
            answered = [
                self._answers(
                    expressions.filled_in(target["expr"], values),
                    instant=target.get("instant", False),
                    step=step,
                )
                for target in panel["targets"]
            ]
            (self.shown if any(answered) else self.silent).add(panel["title"])
        for mark in document["annotations"]["list"]:
            self._ask(expressions.filled_in(mark["expr"], values), instant=False, step=step)

    def _ask(self, query: str, *, instant: bool, step: float) -> list[dict[str, Any]]:
        start = self._ends_at if instant else self._ends_at - self._span
        return self._server.query_range(query, start, self._ends_at, step)

    def _answers(self, query: str, *, instant: bool, step: float) -> bool:
        found = self._ask(query, instant=instant, step=step)
        finite = any(math.isfinite(float(value)) for series in found for _, value in series["values"])
        if found and not finite:
            self.wrong.append(f"only NaN: {query}")
        # A comparison, `unless` and `==` are there to answer nothing where all is well.
        if not found and not re.search(r"[<>]=? -?\d|== \d|\bunless\b", query):
            parts = re.findall(r"kvheadroom_\w+\{[^}]*\}", query)
            if parts and all(self._ask(part, instant=instant, step=step) for part in parts):
                self.wrong.append(f"nothing: {query}")
        return finite


def variables_without_a_value(
    server: PrometheusServer, document: Json, chosen: Mapping[str, str]
) -> set[str]:
    empty = set()
    for name, query in expressions.variable_queries(document).items():
        label = "instance" if name == "daemon" else name
        if not any(label in series for series in server.series(expressions.filled_in(query, chosen))):
            empty.add(name)
    return empty


def test_every_panel_shows_something_of_a_fleet_that_has_every_family(
    each_prometheus: Binaries, tmp_path: Path
) -> None:
    ends_at = ended_lately()
    series = made_fleet(8, ends_at)
    names = {labels["__name__"] for labels, _ in series}
    assert EXPORTED.keys() <= names
    assert names - EXPORTED.keys() == {"ALERTS"}
    for name in names & EXPORTED.keys():
        labels = {label for one, _ in series if one["__name__"] == name for label in one}
        own = {"team"} if name == "kvheadroom_replica_info" else set()
        assert labels - own == {"__name__", *TARGET, *EXPORTED[name].labels}
    chosen = ALL | {"session_tokens": "262144", "idle_seconds": "2700"}
    with real_prometheus_with(each_prometheus, tmp_path, *series, ends_at=ends_at) as (server, _):
        for uid, document in DASHBOARDS.items():
            asked = Asked(server, document, chosen, ends_at, 3600)
            assert asked.wrong == []
            assert asked.silent == set(), uid
            assert variables_without_a_value(server, document, chosen) == set()


def test_nothing_that_the_daemon_says_of_recorded_pages_is_missing_on_a_panel(
    each_prometheus: Binaries, tmp_path: Path
) -> None:
    page = (TESTS / "golden" / "metrics.txt").read_text()
    series: list[Series] = [
        ({"__name__": sample.name, **TARGET, **sample.labels}, always(sample.value))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]
    lengths = {labels["session_tokens"] for labels, _ in series if "session_tokens" in labels}
    assert {"1024", "2048"} <= lengths
    with real_prometheus_with(each_prometheus, tmp_path, *series) as (server, ends_at):
        for uid, document in DASHBOARDS.items():
            silent: set[str] = set(asked_titles(document))
            for length in ("1024", "2048"):
                chosen = ALL | {"session_tokens": length, "idle_seconds": "2700"}
                asked = Asked(server, document, chosen, ends_at, 3600)
                assert asked.wrong == []
                silent &= asked.silent
            assert silent <= NOT_ON_THE_PAGE, uid


def asked_titles(document: Json) -> list[str]:
    return [panel["title"] for panel in panels_of(document)]


def test_a_running_daemon_fills_the_dashboard_of_its_engine(prometheus2: Binaries) -> None:
    with daemon("demo") as demo:
        address = demo.url.removeprefix("http://")
        scrape = {"job_name": "kvheadroom", "static_configs": [{"targets": [address]}]}
        with PrometheusServer(prometheus2, [scrape]) as server:
            wait_for(lambda: demo.get("/-/ready").status_code == 200, "the first scrapes")
            started = time.time()
            # With a queue there is a forecast at once, which ends with it; else it takes half a minute.
            forecast = 'kvheadroom_forecast_preemption_probability_ratio{horizon="10m"}'
            server.wait_for(f"count_over_time({forecast}[20s]) > 12", limit_seconds=120)
            ends_at = time.time()
            [replica] = {one["replica"] for one in server.series("kvheadroom_sample_age_seconds")}
            lengths = {one["session_tokens"] for one in server.series("kvheadroom_observed_sessions")}
            chosen = ALL | {
                "replica": replica,
                "session_tokens": max(lengths, key=int),
                "idle_seconds": "300",
                "daemon": address,
            }
            span = ends_at - started
            answers = {
                uid: Asked(server, document, chosen, ends_at, span) for uid, document in DASHBOARDS.items()
            }
            for document in DASHBOARDS.values():
                # Whether a session is warm is not known before something was evicted.
                assert variables_without_a_value(server, document, chosen) <= {"idle_seconds"}
    for asked in answers.values():
        assert asked.wrong == []
    # The fewest that a server without a GPU, a connector or a finished request can leave out.
    assert answers["kvheadroom-engine"].silent <= {
        "Full in",
        "Time until no room",
        "Prompt tokens in the queue",
        "Found in the prefix cache",
        "Waits for",
        "Restarts",
    }
    assert answers["kvheadroom-fleet"].shown >= {
        "In trouble",
        "Still fit",
        "KV in use",
        "Engines, worst first",
        "KV cache in use, fullest engines",
        "Daemons",
    }
    assert answers["kvheadroom-prediction"].shown >= {"Off by", "Pools, furthest off first"}
    assert "Tiers" in answers["kvheadroom-warm"].shown
