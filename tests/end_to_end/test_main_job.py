"""The main job on a real vLLM: scrape, predict, compare, export, store in Prometheus, show, alert."""

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.sources.seldom_lines import SeldomLines, seldom_lines
from kvheadroom.sources.vllm_metrics import parse_page
from kvheadroom.sources.vllm_pages import FILTERED_PAGE, FILTERED_PAGE_WITH_SELDOM, WHOLE_PAGE
from tests.daemon import Daemon, daemon, wait_for
from tests.dashboards.test_dashboards import DASHBOARDS
from tests.dashboards.test_on_prometheus import ALL, Asked
from tests.end_to_end.conftest import TINY_GQA_FLAGS, TINY_MLA_FLAGS, Progress
from tests.end_to_end.load import Shape, run_to_the_end, run_until, steady_load
from tests.end_to_end.page_proxy import Handed, page_proxy
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_server import VllmServer

RULES = Path(__file__).parents[2] / "dashboards" / "rules"
# A page of a busy vLLM can take a second here: two cores serve the model, the daemon and Prometheus.
INTERVAL_SECONDS = 3
HEAVY = Shape(clients=16, prompt_tokens=200, output_tokens=300, deadline_seconds=240)

# Every result of the engine on its page, with a wrong number in its place.
WRONG_RESULTS = {
    r'num_gpu_blocks="\d+"': 'num_gpu_blocks="7919"',
    r'kv_cache_size_tokens="\d+"': 'kv_cache_size_tokens="1234567"',
    r'kv_cache_max_concurrency="[\d.]+"': 'kv_cache_max_concurrency="99.5"',
    r'effective_attention_block_size="\d+"': 'effective_attention_block_size="48"',
    r"(vllm:kv_cache_usage_perc\{.*\}) .*": r"\1 0.123",
    r"(vllm:num_requests_(?:running|waiting)\{.*\}) .*": r"\1 77",
}


def with_wrong_results(page: bytes) -> bytes:
    text = page.decode()
    for pattern, wrong in WRONG_RESULTS.items():
        text, replaced = re.subn(pattern, wrong, text)
        assert replaced, pattern
    return text.encode()


@dataclass
class Watched:
    """A vLLM, the daemon that watches it (straight, through a proxy, and lied to), and a Prometheus on that."""

    vllm: VllmServer
    serve: Daemon
    prometheus: PrometheusServer
    handed: Handed


@pytest.fixture(scope="module")
def watched(
    tiny_gqa_server: VllmServer, prometheus2: Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    url = tiny_gqa_server.base_url
    with page_proxy(url) as handed, page_proxy(url, with_wrong_results) as lying:
        config = tmp_path_factory.mktemp("kvheadroom") / "kvheadroom.yaml"
        config.write_text(
            json.dumps(
                {
                    "scrape_interval": f"{INTERVAL_SECONDS}s",
                    "session_tokens": [500],
                    "replicas": [
                        {"name": "direct", "url": url, "gpu": "CPU"},
                        {"name": "proxied", "url": handed.base_url, "gpu": "CPU"},
                        {"name": "lied-to", "url": lying.base_url, "gpu": "CPU"},
                    ],
                }
            )
        )
        with daemon("serve", "--config", config) as serve:
            scrape = {
                "job_name": "kvheadroom",
                "static_configs": [{"targets": [serve.url.removeprefix("http://")]}],
            }
            rules = sorted(RULES.iterdir())
            with PrometheusServer(prometheus2, [scrape], rule_files=rules) as prometheus:
                wait_for(lambda: serve.get("/-/ready").status_code == 200, "the first scrapes")
                yield Watched(tiny_gqa_server, serve, prometheus, handed)


def status_of(serve: Daemon, replica: str) -> dict[str, Any]:
    replicas = serve.get("/api/v1/status").json()["replicas"]
    found: dict[str, Any] = next(r for r in replicas if r["replica"] == replica)
    return found


def vllm_samples(page: bytes) -> dict[str, float]:
    """The page's samples by the official parser; with several label sets, name{reason}."""
    return {
        sample.name + (f"{{{sample.labels['reason']}}}" if "reason" in sample.labels else ""): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name.startswith("vllm:") and not sample.name.endswith(("_bucket", "_created"))
    }


def test_the_prediction_equals_what_vllm_said_in_its_own_log(watched: Watched) -> None:
    said = watched.vllm.startup_log_capacity()
    assert (said.pool_tokens, said.max_concurrency, said.request_tokens) == (4096, 2.0, 2048)
    for origin in ("predicted", "observed"):
        value = watched.serve.value
        assert value(f"kvheadroom_{origin}_pool_tokens", replica="direct") == said.pool_tokens
        assert value(f"kvheadroom_{origin}_blocks", replica="direct") == 128
        assert value(f"kvheadroom_{origin}_block_size_tokens", replica="direct") == 32
        assert value(f"kvheadroom_{origin}_pool_bytes", replica="direct") == 4 * 2**20
        assert (
            value(f"kvheadroom_{origin}_sessions", replica="direct", session_tokens="2048")
            == said.max_concurrency
        )
        # 500 tokens take 16 blocks of 32; 128 / 16 = 8 sessions
        assert value(f"kvheadroom_{origin}_sessions", replica="direct", session_tokens="500") == 8
    assert watched.serve.value("kvheadroom_missing_fact", replica="direct") is None


def test_one_target_without_any_config_predicts_the_same(watched: Watched) -> None:
    with daemon("serve", "--target", watched.vllm.base_url) as serve:
        wait_for(lambda: serve.value("kvheadroom_predicted_pool_tokens") == 4096, "the prediction")
        assert serve.value("kvheadroom_observed_pool_tokens") == 4096
        assert serve.value("kvheadroom_assumed_fact", fact="platform") == 1
        assert serve.value("kvheadroom_assumed_fact", fact="block_size") is None
        assert serve.value("kvheadroom_source_up", source="version") == 1


def test_filtered_pages_of_an_idle_server_tell_what_its_whole_page_tells(tiny_gqa_server: VllmServer) -> None:
    shape = Shape(clients=2, prompt_tokens=70, output_tokens=5, max_requests=4)
    assert run_to_the_end(tiny_gqa_server.base_url, shape).finished == 4
    wait_for(lambda: tiny_gqa_server.metric_sum("vllm:num_requests_running") == 0, "the end of all work")

    def get(path: str) -> bytes:
        return requests.get(tiny_gqa_server.base_url + path, timeout=10).content

    def read(body: bytes, earlier: SeldomLines | None = None) -> VllmPage:
        page = parse_page(body, earlier)
        assert isinstance(page, VllmPage)
        return page

    body = get(WHOLE_PAGE)
    whole = read(body)
    assert (whole.engines[0].finished_requests_total or 0) >= 4
    assert (whole.engines[0].prompt_tokens_local_compute_total or 0) > 0
    assert read(get(FILTERED_PAGE_WITH_SELDOM)) == whole
    assert read(get(FILTERED_PAGE), seldom_lines(body, whole)) == whole
    alone = read(get(FILTERED_PAGE)).engines[0]
    assert (alone.finished_requests_total, alone.num_blocks) == (None, None)


def test_wrong_results_on_the_page_leave_the_prediction_where_it_is(watched: Watched) -> None:
    predicted = {
        name: {
            labels.get("session_tokens", ""): value
            for labels, value in watched.serve.metrics()[name]
            if labels["replica"] == "direct"
        }
        for name in watched.serve.metrics()
        if name.startswith("kvheadroom_predicted_")
    }
    assert len(predicted) == 6
    for name, values in predicted.items():
        for session_tokens, value in values.items():
            labels = {"session_tokens": session_tokens} if session_tokens else {}
            assert watched.serve.value(name, replica="lied-to", **labels) == value, name
    assert watched.serve.value("kvheadroom_observed_pool_tokens", replica="lied-to") == 1234567
    assert watched.serve.value("kvheadroom_observed_blocks", replica="lied-to") == 7919


def compare_snapshot(snapshot: dict[str, Any], page: dict[str, float]) -> None:
    assert snapshot["kv_usage_ratio"] == page["vllm:kv_cache_usage_perc"]
    assert snapshot["requests_running"] == page["vllm:num_requests_running"]
    assert snapshot["requests_waiting"] == page["vllm:num_requests_waiting"]
    assert snapshot["requests_waiting_by_reason"] == {
        "capacity": page["vllm:num_requests_waiting_by_reason{capacity}"],
        "deferred": page["vllm:num_requests_waiting_by_reason{deferred}"],
    }
    assert snapshot["preemptions_total"] == page["vllm:num_preemptions_total"]
    for name in (
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    ):
        assert snapshot[name] == page[f"vllm:{name}"], name


def compare_with_page(engine: dict[str, Any], page: dict[str, float]) -> None:
    compare_snapshot(engine["snapshot"], page)
    used = page["vllm:kv_cache_usage_perc"] * 127
    assert abs(used - round(used)) < 1e-6
    assert engine["observed"]["used_blocks"] == round(used)
    assert engine["observed"]["free_blocks"] == 127 - round(used)


def test_under_load_every_number_is_that_of_the_page_read_at_the_same_moment(watched: Watched) -> None:
    before = watched.vllm.metric_sum("vllm:num_preemptions_total") or 0

    def preempted() -> bool:
        return (watched.vllm.metric_sum("vllm:num_preemptions_total") or 0) > before

    report = run_until(preempted, watched.vllm.base_url, HEAVY)
    assert report.reached, report
    busy_pages: set[float] = set()
    deadline = time.monotonic() + 90
    with steady_load(watched.vllm.base_url, HEAVY):
        # A scrape that the busy machine delays past its deadline is withheld, not compared.
        while len(busy_pages) < 4 and time.monotonic() < deadline:
            time.sleep(INTERVAL_SECONDS / 2)
            for engine in status_of(watched.serve, "proxied")["engines"]:
                page = vllm_samples(watched.handed.page_taken_at(engine["taken_at"]))
                compare_with_page(engine, page)
                if page["vllm:num_requests_running"] and page["vllm:kv_cache_usage_perc"]:
                    busy_pages.add(engine["taken_at"])
    assert len(busy_pages) >= 4
    total = watched.serve.value("kvheadroom_preemptions_total", replica="direct")
    assert total is not None
    assert total > before


def test_prometheus_stores_every_family_that_the_daemon_exports(watched: Watched) -> None:
    exported = set(watched.serve.metrics())
    watched.prometheus.wait_for('count({job="kvheadroom",__name__=~"kvheadroom_.+"})')
    stored = {series["__name__"] for series in watched.prometheus.series('{__name__=~"kvheadroom_.+"}')}
    assert stored >= exported
    assert watched.prometheus.value("up") == 1
    assert (
        watched.prometheus.value('kvheadroom_observed_pool_tokens{replica="direct"}')
        == watched.prometheus.value('kvheadroom_predicted_pool_tokens{replica="direct"}')
        == 4096
    )


def test_prometheus_evaluates_the_rules_and_sees_the_preemptions_as_a_rate(watched: Watched) -> None:
    rules = [rule for group in watched.prometheus.rule_groups() for rule in group["rules"]]
    assert {"KvHeadroomTargetDown", "engine:kvheadroom_preemptions:rate5m"} <= {
        rule["name"] for rule in rules
    }
    assert {rule["health"] for rule in rules} == {"ok"}
    assert watched.prometheus.value('increase(kvheadroom_preemptions_total{replica="direct"}[5m])') != 0


SILENT = {
    # Nothing fails.
    "kvheadroom-fleet": {
        "Failures of sources, by reason",
        "Metrics of vLLM that are gone",
        "Problems of pages",
        "Servers while they did not serve",
        "Sources that do not answer",
    },
    # Its prompts share nothing, and its vLLM does not tell of the queue's tokens.
    "kvheadroom-engine": {"Found in the prefix cache", "Prompt tokens in the queue"},
    # It has no GPU, and its pool is given by a flag.
    "kvheadroom-prediction": {
        "Age of DCGM's numbers",
        "Calibrated",
        "Free memory of GPUs, those with the least",
        "GPUs: who holds what",
        "Held by other processes, most of them",
        "Ledger: memory of one GPU, term by term; furthest off first",
        "Memory findings",
        "Overhead",
        "Overhead of one GPU: predicted, learned, observed",
        "Starts as samples of the overhead",
        "Starts that were no sample",
        "Unexplained overhead",
        "Xid errors of GPUs",
    },
}
"""Panels about what this server has not, by dashboard."""
TIERS = {"Tiers", "Blocks of HBM, by what they hold", "Tokens looked up and found each second"}
"""What the fourth shows of a server that has no tier in host memory and is a minute old."""


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_panel_of_a_dashboard_has_data_on_the_real_prometheus(watched: Watched, uid: str) -> None:
    chosen = ALL | {"daemon": ".+", "session_tokens": "500", "idle_seconds": "300"}
    watched.prometheus.wait_for('count({job="kvheadroom",__name__=~"kvheadroom_.+"})')
    asked = Asked(watched.prometheus, DASHBOARDS[uid], chosen, time.time(), 60.0)
    assert asked.wrong == []
    if uid == "kvheadroom-warm":
        assert asked.shown >= TIERS
    else:
        assert asked.silent <= SILENT[uid]


@pytest.mark.ends_vllm
def test_when_vllm_ends_its_source_is_down_within_a_tick_and_its_numbers_go_after_three(
    watched: Watched,
) -> None:
    serve = watched.serve
    assert serve.value("kvheadroom_kv_usage_ratio", replica="direct") is not None
    last_good = status_of(serve, "direct")["last_success_at"]
    watched.vllm.stop()
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{watched.vllm.base_url}/health", timeout=2)
    stopped_at = time.time()
    wait_for(
        lambda: serve.value("kvheadroom_source_up", replica="direct", source="metrics") == 0, "source down"
    )
    assert time.time() - stopped_at < INTERVAL_SECONDS + 1.0  # one tick and the polling
    wait_for(
        lambda: serve.value("kvheadroom_kv_usage_ratio", replica="direct") is None,
        "withholding",
        seconds=4 * INTERVAL_SECONDS,
    )
    last_good = max(last_good, status_of(serve, "direct")["last_success_at"])
    assert time.time() - last_good >= 3 * INTERVAL_SECONDS
    left = {
        name
        for name, samples in serve.metrics().items()
        if any(labels.get("replica") == "direct" for labels, _ in samples)
    }
    assert left == {
        "kvheadroom_source_up",
        "kvheadroom_source_failures_total",
        "kvheadroom_replica_info",
        "kvheadroom_replica_state",
        "kvheadroom_replica_restarts_total",
    }
    assert serve.alive
    assert serve.get("/-/healthy").status_code == 200
    assert "nothing listens there; is vLLM running?" in serve.pages()


@pytest.mark.ends_vllm
def test_another_model_and_pool_behind_the_same_url_are_resolved_afresh(
    watched: Watched, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, progress: Progress
) -> None:
    serve = watched.serve
    assert serve.value("kvheadroom_replica_state", replica="direct", state="down") == 1
    folder = tmp_path_factory.mktemp("tiny-mla")
    with VllmServer(
        vllm_python,
        write_model(folder / "mla", "mla"),
        TINY_MLA_FLAGS,
        folder / "vllm.log",
        port=watched.vllm.port,
        progress=progress,
    ) as mla:
        said = mla.startup_log_capacity()
        assert (said.pool_tokens, said.request_tokens) == (3632, 1024)
        wait_for(
            lambda: serve.value("kvheadroom_observed_pool_tokens", replica="direct") == said.pool_tokens,
            "the new pool",
            seconds=3 * INTERVAL_SECONDS,
        )
        # 16 MiB // (4 layers x 576 x 2 B x 16 tokens) = 227 blocks
        for origin in ("predicted", "observed"):
            assert serve.value(f"kvheadroom_{origin}_blocks", replica="direct") == 227
            assert serve.value(f"kvheadroom_{origin}_block_size_tokens", replica="direct") == 16
            assert serve.value(f"kvheadroom_{origin}_pool_tokens", replica="direct") == 3632
        assert serve.value("kvheadroom_predicted_bytes_per_token", replica="direct") == 4608
        assert serve.value("kvheadroom_replica_restarts_total", replica="direct") == 1
        status = status_of(serve, "direct")
        kinds = [event["kind"] for event in status["events"]]
        assert kinds[-3:] == ["restarted", "capacity_changed", "state_changed"]
        assert status["events"][-2]["detail"] == (
            "engine 0: pool 128 blocks of 32 -> 227 blocks of 16, max_model_len 2,048 -> 1,024"
        )
        assert "Prefix caching is off on this engine" in serve.pages()

        # Usage of the new pool, in blocks of 16: a request of 100 tokens holds 7. One request at a time: latent
        # attention on a CPU keeps both cores so busy that more would starve those who watch.
        shape = Shape(clients=1, prompt_tokens=100, output_tokens=200, pause_seconds=0.2)
        with steady_load(mla.base_url, shape) as report:
            wait_for(
                lambda: (serve.value("kvheadroom_used_blocks", replica="direct") or 0) >= 7,
                f"used blocks, under {report}",
                seconds=90,
            )
        assert serve.value("kvheadroom_prefix_cache_queries_tokens_total", replica="direct") == 0
        # What Prometheus makes of the counters across the restart is never negative and never inflated.
        watched.prometheus.wait_for('kvheadroom_generation_tokens_total{replica="direct"} > 0')
        rates = watched.prometheus.query_range(
            'rate(kvheadroom_generation_tokens_total{replica="direct"}[10s])',
            time.time() - 120,
            time.time(),
            1,
        )
        values = [float(value) for series in rates for _, value in series["values"]]
        assert values
        assert all(0 <= value < 20_000 for value in values)


@pytest.mark.ends_vllm
def test_a_real_vllm_without_log_stats_is_told_as_such_and_not_as_down(
    watched: Watched, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, progress: Progress
) -> None:
    serve = watched.serve
    folder = tmp_path_factory.mktemp("no-stats")
    with VllmServer(
        vllm_python,
        write_model(folder / "gqa", "gqa"),
        {**TINY_GQA_FLAGS, "--disable-log-stats": True},
        folder / "vllm.log",
        port=watched.vllm.port,
        progress=progress,
    ):
        wait_for(
            lambda: serve.value("kvheadroom_replica_state", replica="direct", state="stats_disabled") == 1,
            "the state",
            seconds=3 * INTERVAL_SECONDS,
        )
        assert "start it without --disable-log-stats" in serve.pages()
    code, took = serve.stop(signal.SIGINT)
    assert (code, took < 1.0) == (0, True)
    assert "Traceback" not in serve.output
