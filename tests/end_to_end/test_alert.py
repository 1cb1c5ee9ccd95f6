"""The whole chain that wakes somebody: a real vLLM, the daemon, Prometheus, the rules, Alertmanager, a webhook.

One story for all tests here: a light load, then a ramp of clients until vLLM counts its first preemption, then none.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon import daemon, wait_for
from tests.end_to_end.alertmanager_server import Notice, alertmanager_server, webhook
from tests.end_to_end.conftest import TINY_GQA_FLAGS, Progress
from tests.end_to_end.load import LoadReport, Shape, run_until, steady_load
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_server import VllmServer

RULES = sorted((Path(__file__).parents[2] / "dashboards" / "rules").glob("*.yaml"))
EXHAUSTION = ("KvHeadroomExhaustionSoon", "KvHeadroomExhaustionImminent")
REPLICA = "chat-a"

# 32 MiB are 1,024 blocks of 32 tokens. The servers of the other tests have an eighth of it: there a preemption came 1.7 s
# after usage had been 70%, and no chain that looks once a second has much to say before such a one.
FLAGS = {**TINY_GQA_FLAGS, "--kv-cache-memory-bytes": 32 * 1024 * 1024}

# A request takes 16 blocks at its beginning and 47 at its end.
LIGHT_SECONDS = 25
LIGHT = Shape(clients=3, prompt_tokens=500, output_tokens=1000, prompt_seed=1)
# Clients that wait for their answers fill the pool at about the same pace on a slow machine as on a fast one: a request that
# takes longer holds its blocks longer. It is full with some 32 of them, at about 1% a second.
RAMP = Shape(
    clients=60,
    join_every_seconds=2,
    prompt_tokens=500,
    output_tokens=1000,
    prompt_seed=2,
    deadline_seconds=170,
)
WATCH_SECONDS = 0.25
RESOLVED_WITHIN_SECONDS = 20
"""Of the load's end, beside the rule's own `keep_firing_for`."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happened, with instants in unix seconds.

    Attributes:
        notices: what the webhook got, in the order of arrival; still growing.
        unrisen_at: vLLM was asked for its preemptions for the last time before it told more than at the beginning.
        risen_at: and then it had answered with more.
    """

    prometheus: PrometheusServer
    notices: list[Notice]
    light: tuple[float, float]
    ramp: LoadReport
    unrisen_at: float
    risen_at: float
    load_ended_at: float

    def exhaustion(self) -> list[Notice]:
        return [notice for notice in self.notices if notice.name in EXHAUSTION]

    def warning(self) -> Notice:
        """The first one."""
        firing = [notice for notice in self.exhaustion() if notice.status == "firing"]
        assert firing, "no alert has fired"
        return firing[0]

    def told(self, name: str, at: float) -> dict[str, float]:
        """The engine's samples of a metric as the rules saw them at that evaluation, by the label `limit` if they have one."""
        series = self.prometheus.query_range(f'{name}{{replica="{REPLICA}",engine="0"}}', at, at, 1)
        return {each["metric"].get("limit", ""): float(each["values"][0][1]) for each in series}


@pytest.fixture(scope="module")
def vllm(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, progress: Progress
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("alert-gqa")
    model = write_model(folder / "gqa", "gqa")
    with VllmServer(vllm_python, model, FLAGS, folder / "vllm.log", progress=progress) as server:
        server.give_way()
        yield server


@pytest.fixture(scope="module")
def story(
    vllm: VllmServer,
    prometheus2: Binaries,
    alertmanager: Path,
    tmp_path_factory: pytest.TempPathFactory,
    progress: Progress,
) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("alert")
    config = folder / "kvheadroom.yaml"
    replica = {"name": REPLICA, "url": vllm.base_url, "gpu": "CPU"}
    config.write_text(json.dumps({"scrape_interval": "1s", "replicas": [replica]}))
    with (
        webhook() as (url, notices),
        alertmanager_server(alertmanager, folder, url) as notified,
        daemon("serve", "--config", config) as serve,
        PrometheusServer(
            prometheus2,
            [
                {
                    "job_name": "kvheadroom",
                    "static_configs": [{"targets": [serve.url.removeprefix("http://")]}],
                }
            ],
            rule_files=RULES,
            alertmanagers=[notified],
        ) as prometheus,
    ):
        wait_for(lambda: prometheus.value("kvheadroom_kv_usage_ratio") is not None, "usage in Prometheus")
        light_from = time.time()
        with steady_load(vllm.base_url, LIGHT):
            time.sleep(LIGHT_SECONDS)
            light = (light_from, time.time())

        before = vllm.metric_sum("vllm:num_preemptions_total")
        watched: list[tuple[float, float | None, float]] = []

        def rose() -> bool:
            asked_at = time.time()
            watched.append((asked_at, vllm.metric_sum("vllm:num_preemptions_total"), time.time()))
            return watched[-1][1] != before

        ramp_began_at = time.time()
        ramp = run_until(rose, vllm.base_url, RAMP, poll_seconds=WATCH_SECONDS)
        load_ended_at = time.time()
        assert ramp.reached, f"no preemption: {ramp}"
        told = Story(
            prometheus=prometheus,
            notices=notices,
            light=light,
            ramp=ramp,
            unrisen_at=watched[-2][0],
            risen_at=watched[-1][2],
            load_ended_at=load_ended_at,
        )
        progress(f"vLLM counted a preemption {told.risen_at - ramp_began_at:.1f} s after the ramp began")
        for notice in told.exhaustion():
            lead = told.unrisen_at - notice.arrived_at
            progress(f"{notice.name} {notice.status}, {lead:+.1f} s before it")
        yield told


def test_a_light_load_warns_nobody(story: Story) -> None:
    begin, end = story.light
    usage = story.prometheus.query_range("kvheadroom_kv_usage_ratio", begin, end, 1)
    assert 0 < max(float(value) for _, value in usage[0]["values"]) < 0.3
    alerts = 'ALERTS{alertstate="firing",severity=~"warning|critical"}'
    assert story.prometheus.query_range(alerts, begin, end, 1) == []
    assert [notice for notice in story.notices if notice.arrived_at < end] == []


def test_the_alert_arrives_before_vllm_counts_a_preemption_and_holds_until_then(story: Story) -> None:
    assert story.ramp.failed == 0
    assert story.risen_at - story.unrisen_at < 3  # else nobody saw when the counter rose
    before = [notice for notice in story.exhaustion() if notice.arrived_at < story.unrisen_at]
    assert before
    latest = {notice.name: notice.status for notice in before}
    assert "firing" in latest.values()


def test_the_alert_says_which_engine_and_why_in_its_numbers_of_that_moment(story: Story) -> None:
    warning = story.warning()
    assert (warning.labels["replica"], warning.labels["engine"]) == (REPLICA, "0")
    assert warning.labels["severity"] in ("warning", "critical")
    text = f"{warning.annotations['summary']} {warning.annotations['description']}"
    assert f"{REPLICA}, engine 0" in text
    for metric, words in (
        ("kvheadroom_requests_running", "Running"),
        ("kvheadroom_requests_waiting", "Waiting"),
        ("kvheadroom_free_blocks", "Free blocks"),
    ):
        number = story.told(metric, warning.starts_at)[""]
        assert f"{words}: {number:.0f}." in text, (metric, text)
    limits = story.told("kvheadroom_binding_limit", warning.starts_at)
    told = re.findall(r"What keeps requests waiting: (\w+)\.", text)
    assert told == list(limits)
    assert set(told) <= {"none", "kv_pool"}


def test_the_alert_is_resolved_once_the_load_is_over(story: Story) -> None:
    kept = max(
        rule.get("keepFiringFor", 0)
        for group in story.prometheus.rule_groups()
        for rule in group["rules"]
        if rule["name"] in EXHAUSTION
    )

    def resolved_at() -> float | None:
        latest = {notice.name: notice for notice in story.exhaustion()}
        over = latest and all(notice.status == "resolved" for notice in latest.values())
        return max(notice.arrived_at for notice in latest.values()) if over else None

    limit = story.load_ended_at - time.time() + kept + RESOLVED_WITHIN_SECONDS
    assert wait_for(resolved_at, "the end of the alert", seconds=limit) > story.load_ended_at
