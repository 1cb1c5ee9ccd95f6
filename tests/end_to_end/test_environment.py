"""What the other end-to-end tests stand on: the real vLLM, load, both generations of Prometheus."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import requests

from tests.daemon import wait_for
from tests.doubles.http_server import http_server, text_answer
from tests.end_to_end.alertmanager_server import alertmanager_server, webhook
from tests.end_to_end.load import Shape, run_to_the_end, run_until, steady_load
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer, generation_of
from tests.end_to_end.server_process import ServerProcess, ServerStartError
from tests.end_to_end.vllm_server import (
    StartupLogCapacity,
    VllmServer,
    flag_words,
    parse_startup_log_capacity,
)


def scrape_vllm(server: VllmServer) -> dict[str, object]:
    return {"job_name": "vllm", "static_configs": [{"targets": [server.host_and_port]}]}


def test_the_startup_log_tells_a_pool_of_128_blocks_of_32_tokens(tiny_gqa_server: VllmServer) -> None:
    # 128 x 32 = 4,096 tokens, of which one request may take 2,048.
    assert tiny_gqa_server.startup_log_capacity() == StartupLogCapacity(
        pool_tokens=4096, max_concurrency=2.0, request_tokens=2048
    )


def test_the_server_tells_its_version_its_model_and_its_metrics(tiny_gqa_server: VllmServer) -> None:
    version = requests.get(f"{tiny_gqa_server.base_url}/version", timeout=10).json()
    models = requests.get(f"{tiny_gqa_server.base_url}/v1/models", timeout=10).json()
    assert version["version"].startswith("0.32.0")
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 2048)]
    assert tiny_gqa_server.metric_sum("vllm:cache_config_info") == 1
    assert tiny_gqa_server.metric_sum("vllm:no_such_metric") is None


def test_the_server_runs_without_dev_mode(tiny_gqa_server: VllmServer) -> None:
    assert requests.get(f"{tiny_gqa_server.base_url}/server_info", timeout=10).status_code == 404


def test_the_tokenizer_written_by_hand_reads_words_as_their_tokens(tiny_gqa_server: VllmServer) -> None:
    answer = requests.post(
        f"{tiny_gqa_server.base_url}/tokenize",
        json={"model": "tiny", "prompt": "w17 w1023 unheard"},
        timeout=10,
    )
    assert answer.json()["tokens"] == [17, 1023, 0]


def test_a_bounded_load_is_answered_to_the_last_token(tiny_gqa_server: VllmServer) -> None:
    shape = Shape(clients=3, prompt_tokens=50, output_tokens=20, max_requests=7)
    before = tiny_gqa_server.metric_sum("vllm:generation_tokens_total") or 0
    report = run_to_the_end(tiny_gqa_server.base_url, shape)
    assert (report.sent, report.finished, report.failed, report.abandoned) == (7, 7, 0, 0)
    assert (report.prompt_tokens, report.output_tokens) == (350, 140)
    assert tiny_gqa_server.metric_sum("vllm:generation_tokens_total") == before + 140


def test_a_steady_load_holds_its_number_of_requests(tiny_gqa_server: VllmServer) -> None:
    shape = Shape(clients=4, prompt_tokens=100, output_tokens=400)

    def all_run() -> bool:
        return tiny_gqa_server.metric_sum("vllm:num_requests_running") == 4

    with steady_load(tiny_gqa_server.base_url, shape) as report:
        for _ in range(300):
            if all_run():
                break
        else:
            pytest.fail("four clients never had four requests running")
    assert report.reached
    assert report.failed == 0
    assert report.sent == report.finished + report.abandoned


def test_a_load_larger_than_the_pool_makes_vllm_preempt(tiny_gqa_server: VllmServer) -> None:
    # A request begins with 7 blocks and ends with 16, so 16 of them come to want 256 of the 127 usable
    # blocks, and vLLM has to take blocks back from requests that it had admitted.
    shape = Shape(clients=16, prompt_tokens=200, output_tokens=300)
    before = tiny_gqa_server.metric_sum("vllm:num_preemptions_total")
    assert before is not None

    def preempted() -> bool:
        return (tiny_gqa_server.metric_sum("vllm:num_preemptions_total") or 0) > before

    report = run_until(preempted, tiny_gqa_server.base_url, shape)
    assert report.reached, report
    assert report.failed == 0


def test_prometheus_scrapes_the_server(tiny_gqa_server: VllmServer, each_prometheus: Binaries) -> None:
    with PrometheusServer(each_prometheus, [scrape_vllm(tiny_gqa_server)]) as prometheus:
        prometheus.wait_for('up{job="vllm"} == 1')
        (info,) = prometheus.wait_for("vllm:cache_config_info")
        assert (info["metric"]["num_gpu_blocks"], info["metric"]["block_size"]) == ("128", "32")
        (target,) = prometheus.targets()
        assert target["health"] == "up"
        assert prometheus.series("vllm:kv_cache_usage_perc")
        at = float(info["value"][0])
        (history,) = prometheus.query_range("up", at - 5, at, 1)
        assert history["values"][-1][1] == "1"


def test_an_alert_and_its_end_reach_the_webhook_within_seconds(
    prometheus2: Binaries, alertmanager: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rule = {"alert": "Raised", "expr": "flag > 0", "annotations": {"summary": "{{ $value }}"}}
    rules.write_text(json.dumps({"groups": [{"name": "one", "rules": [rule]}]}))
    answers = {"/metrics": text_answer("flag 0\n")}
    with (
        http_server(answers) as (target, _),
        webhook() as (url, notices),
        alertmanager_server(alertmanager, tmp_path, url) as notified,
        PrometheusServer(
            prometheus2,
            [
                {
                    "job_name": "flag",
                    "static_configs": [{"targets": [target.removeprefix("http://")]}],
                }
            ],
            rule_files=[rules],
            alertmanagers=[notified],
        ) as prometheus,
    ):
        prometheus.wait_for("flag == 0")
        assert notices == []
        raised_at = time.time()
        answers["/metrics"] = text_answer("flag 3\n")
        wait_for(lambda: len(notices) == 1, "the alert")
        answers["/metrics"] = text_answer("flag 0\n")
        wait_for(lambda: len(notices) == 2, "its end")
    assert [(notice.name, notice.status) for notice in notices] == [
        ("Raised", "firing"),
        ("Raised", "resolved"),
    ]
    assert {notice.annotations["summary"] for notice in notices} == {"3"}
    assert raised_at < notices[0].starts_at < notices[0].arrived_at < notices[1].arrived_at
    # A scrape and an evaluation a second, each way, on a busy machine.
    assert notices[1].arrived_at - raised_at < 12


def test_the_two_prometheus_are_of_two_generations(prometheus2: Binaries, prometheus3: Binaries) -> None:
    assert [generation_of(binaries.prometheus) for binaries in (prometheus2, prometheus3)] == ["2.x", "3.x"]


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = ServerProcess(
        ["sh", "-c", "echo starting; echo no such model; exit 3"],
        name="the server",
        log_path=tmp_path / "log",
    )
    with pytest.raises(ServerStartError, match=r"(?s)the server ended with 3.*no such model"):
        process.wait_until(lambda: False, limit_seconds=10, every_seconds=0.01)


def test_stopping_a_server_ends_its_children_even_those_that_ignore_the_request(tmp_path: Path) -> None:
    process = ServerProcess(
        ["sh", "-c", "trap '' TERM; sleep 60 & echo $!; wait; sleep 60"],
        name="the server",
        log_path=tmp_path / "log",
    )
    process.wait_until(lambda: process.log().endswith("\n"), limit_seconds=10, every_seconds=0.01)
    child = int(process.log())
    process.stop(grace_seconds=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"--block-size": 32, "--seed": 0}, ["--block-size", "32", "--seed", "0"]),
        ({"--enforce-eager": True, "--enable-prefix-caching": False}, ["--enforce-eager"]),
    ],
)
def test_a_mapping_of_flags_becomes_words(flags: Mapping[str, int | bool], words: list[str]) -> None:
    assert flag_words(flags) == words


def test_the_capacity_line_is_found_when_a_release_splits_it_in_two() -> None:
    log = "GPU KV cache size: 13,579 tokens\nINFO Maximum concurrency for 2,468 tokens per request: 5.50x\n"
    assert parse_startup_log_capacity(log) == StartupLogCapacity(13579, 5.5, 2468)
