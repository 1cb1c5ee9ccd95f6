"""Two data-parallel engines on a real vLLM: each has its own pool, and nothing is counted twice."""

import time
from collections.abc import Iterator

import pytest

from tests.daemon import Daemon, daemon, wait_for
from tests.end_to_end.load import Shape, run_to_the_end
from tests.end_to_end.page_proxy import Handed, page_proxy
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer
from tests.end_to_end.test_main_job import status_of, vllm_samples
from tests.end_to_end.vllm_server import VllmServer

ENGINES = ("0", "1")


@pytest.fixture(scope="module")
def handed(tiny_dp2_server: VllmServer) -> Iterator[Handed]:
    with page_proxy(tiny_dp2_server.base_url) as handed:
        yield handed


@pytest.fixture(scope="module")
def serve(tiny_dp2_server: VllmServer, handed: Handed) -> Iterator[Daemon]:
    with daemon("serve", "--target", handed.base_url) as serve:
        wait_for(lambda: serve.get("/-/ready").status_code == 200, "the first scrape")
        yield serve


def test_each_engine_has_its_own_pool_predicted_to_the_block(
    tiny_dp2_server: VllmServer, serve: Daemon
) -> None:
    said = tiny_dp2_server.startup_log_capacity()
    assert (said.pool_tokens, said.max_concurrency) == (2048, 2.0)
    for engine in ENGINES:
        for origin in ("predicted", "observed"):
            # The page says 128 blocks on both: vLLM's front end adds the two pools of 64 up.
            assert serve.value(f"kvheadroom_{origin}_blocks", engine=engine) == 64
            assert serve.value(f"kvheadroom_{origin}_pool_tokens", engine=engine) == said.pool_tokens


def test_before_the_first_request_the_gauges_are_absent_and_not_zero(
    tiny_dp2_server: VllmServer, serve: Daemon
) -> None:
    if tiny_dp2_server.metric_sum("vllm:kv_cache_usage_perc") is not None:
        pytest.fail("this test must come before any load on the data-parallel server")
    for engine in ENGINES:
        assert serve.value("kvheadroom_kv_usage_ratio", engine=engine) is None
        assert serve.value("kvheadroom_requests_running", engine=engine) is None
        assert serve.value("kvheadroom_preemptions_total", engine=engine) == 0
    assert serve.value("kvheadroom_replica_state", state="serving") == 1


def test_counters_stay_with_their_engine_and_add_up_to_what_was_sent(
    serve: Daemon, handed: Handed, tiny_dp2_server: VllmServer
) -> None:
    shape = Shape(clients=4, prompt_tokens=100, output_tokens=20, max_requests=12, deadline_seconds=120)
    report = run_to_the_end(tiny_dp2_server.base_url, shape)
    assert (report.finished, report.failed) == (12, 0)
    replica = handed.base_url.removeprefix("http://")
    asked_at = time.time()
    wait_for(lambda: status_of(serve, replica)["last_success_at"] > asked_at, "the next scrape")
    status = status_of(serve, replica)
    engines = {engine["engine"]: engine["snapshot"] for engine in status["engines"]}
    assert set(engines) == set(ENGINES)
    generated = [engines[engine]["generation_tokens_total"] for engine in ENGINES]
    prompts = [engines[engine]["prompt_tokens_total"] for engine in ENGINES]
    assert sum(generated) == report.output_tokens == 240
    assert sum(prompts) == report.prompt_tokens == 1200
    assert min(generated) > 0
    page = vllm_samples(handed.pages[-1][1])
    assert page["vllm:generation_tokens_total"] in generated


def test_a_sum_over_the_fleet_counts_each_pool_once(serve: Daemon, prometheus3: Binaries) -> None:
    scrape = {"job_name": "k", "static_configs": [{"targets": [serve.url.removeprefix("http://")]}]}
    with PrometheusServer(prometheus3, [scrape]) as prometheus:
        prometheus.wait_for("kvheadroom_observed_blocks")
        assert prometheus.value("sum(kvheadroom_observed_blocks)") == 128
        assert prometheus.value("sum(kvheadroom_observed_pool_tokens)") == 4096
        assert prometheus.value("sum(kvheadroom_predicted_pool_tokens)") == 4096
        assert prometheus.value("count(kvheadroom_kv_usage_ratio)") == 2
