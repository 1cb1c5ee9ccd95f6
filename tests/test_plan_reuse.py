"""`kvheadroom plan --from URL --tier-sizes ... --prometheus URL`: what tiers would find, by the last day in a Prometheus."""

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.reuse import Stretch
from tests.capacity.lru_day import POOL_TOKENS, lru_day
from tests.doubles.http_server import http_server
from tests.doubles.prometheus_api import Asked, instants, matrix, prometheus_api, refusal
from tests.doubles.vllm_pages import gpu_server
from tests.end_to_end.prometheus_server import Binaries
from tests.exported_history import Series, real_prometheus_with
from tests.test_plan_model import tiny
from tests.test_what_if import ON_H100, plan_from

SEED = int(os.environ.get("KVHEADROOM_SEED", random.randrange(2**32)))
BLOCKS = POOL_TOKENS // 16 + 1
DAY = 86_400.0
CHUNK_BYTES = 16_384
SIZES = {120_000: "122.88MB", 180_000: "184.32MB"}
"""Tokens that fit -> size: 16 of them take 16 KiB."""


def series_of(stretches: list[Stretch], **target: str) -> list[Series]:
    """Counters of a server whose day these were; values by the seconds before its end."""
    labels = {"engine": "0", "model_name": "served", **target}
    sums = {
        name: [0.0, *itertools.accumulate(getattr(one, field) for one in stretches)]
        for name, field in (("prompt_tokens_total", "prompts"), ("prefix_cache_hits_total", "found_in_pool"))
    }

    def counter(name: str) -> Callable[[float], str]:
        def value(at: float) -> str:
            place, rest = divmod(min(max(at + DAY, 0.0), DAY), 600.0)
            here = sums[name][int(place)]
            after = sums[name][min(int(place) + 1, len(stretches))]
            return str(here + (after - here) * rest / 600.0)

        return value

    def constant(text: str) -> Callable[[float], str]:
        return lambda _: text

    return [
        *((labels | {"__name__": f"vllm:{name}"}, counter(name)) for name in sums),
        (labels | {"__name__": "vllm:prefix_cache_queries_total"}, counter("prompt_tokens_total")),
        (labels | {"__name__": "vllm:generation_tokens_total"}, constant("0")),
        (labels | {"__name__": "vllm:kv_cache_usage_perc"}, constant("0")),
        (labels | {"__name__": "vllm:num_requests_waiting"}, constant("0")),
        (labels | {"__name__": "vllm:num_requests_running"}, constant("0")),
        (target | {"__name__": "process_start_time_seconds"}, constant("1700000000")),
    ]


class Double:
    """A Prometheus that has these series until now, and remembers what it was asked."""

    def __init__(self, *series: Series) -> None:
        self.series = series
        self.queries: list[str] = []
        self.ends_at = time.time()

    def __call__(self, asked: Asked) -> Any:
        query = asked["query"]
        self.queries.append(query)
        name = query.removeprefix("avg_over_time(").partition("{")[0].partition(" ")[0]
        found = []
        for labels, value in self.series:
            if labels["__name__"] == name:
                points = [
                    (at, text) for at in instants(asked) if (text := value(at - self.ends_at)) is not None
                ]
                found.append((labels, points))
        return matrix(*found)


def asked(tmp_path: Path, prometheus: str, *more: str) -> Any:
    with http_server(gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=16_384)) as (url, _):
        return plan_from(
            url,
            "--runs-with",
            ON_H100,
            "--tier-sizes",
            ",".join(SIZES.values()),
            "--prometheus",
            prometheus,
            *more,
        )


def check(document: dict[str, Any], found_ratio: float) -> None:
    reuse = document["reuse"]
    assert reuse["found_in_pool_ratio"] == pytest.approx(found_ratio, abs=0.005)
    assert reuse["found_outside_ratio"] == 0.0
    none, *tiers = reuse["expected"]
    assert (none["tier_bytes"], none["tier_tokens"]) == (0, 0)
    assert [one["tier_tokens"] for one in tiers] == list(SIZES)
    assert [one["tier_bytes"] for one in tiers] == [tokens // 16 * CHUNK_BYTES for tokens in SIZES]
    for one in tiers:
        _, truth = lru_day(random.Random(SEED), one["tier_tokens"])
        print(
            f"{one['tier_tokens']:,.0f}: {one['low_ratio']:.1%} to {one['high_ratio']:.1%}, truth {truth:.1%}"
        )
        assert one["low_ratio"] - 0.02 <= truth <= one["high_ratio"] + 0.02


def test_the_last_day_in_a_prometheus_says_what_tiers_would_find(tmp_path: Path) -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    stretches, found = lru_day(random.Random(SEED), 1000)
    double = Double(*series_of(stretches, job="vllm", instance="glm:8000"))
    with prometheus_api(double) as (prometheus, _):
        run = asked(tmp_path, prometheus, "--select", '{instance="glm:8000"}', "--json")
        assert run.returncode == 0, run.stderr
        check(json.loads(run.stdout), found)
        text = asked(tmp_path, prometheus, "--select", 'instance="glm:8000"').stdout
    assert all('{instance="glm:8000"}' in query for query in double.queries)
    assert "What an offload tier in host memory would find" in text
    assert "0.12 GB  120,000" in " ".join(text.split()).replace("GB 120", "GB  120")


def test_it_is_looked_for_by_its_address(tmp_path: Path) -> None:
    double = Double()
    with prometheus_api(double) as (prometheus, _):
        run = asked(tmp_path, prometheus)
    assert run.returncode == 1
    assert "it has none of vLLM's metrics of instance=\"127.0.0.1:" in run.stderr
    assert "--select" in run.stderr


def test_several_servers_are_not_taken_for_one(tmp_path: Path) -> None:
    stretches, _ = lru_day(random.Random(1), 1000)
    both = [one for name in ("a:1", "b:1") for one in series_of(stretches, job="vllm", instance=name)]
    with prometheus_api(Double(*both)) as (prometheus, _):
        run = asked(tmp_path, prometheus, "--select", 'job="vllm"')
    assert run.returncode == 1
    assert 'job="vllm" matches several servers (vllm/a:1, vllm/b:1); narrow it with --select' in run.stderr


def test_a_prometheus_that_refuses_is_named(tmp_path: Path) -> None:
    with prometheus_api(lambda _: refusal(401, "who are you")) as (prometheus, _):
        run = asked(tmp_path, prometheus)
    assert run.returncode == 1
    assert f"Prometheus at {prometheus}: it refuses access (401); give --bearer-token-file" in run.stderr


def test_too_little_is_known_of_a_young_server(tmp_path: Path) -> None:
    stretches, _ = lru_day(random.Random(1), 1000)
    young = [one._replace(prompts=0.0, found_in_pool=0.0) for one in stretches[:-5]] + stretches[-5:]
    double = Double(*series_of(young, job="vllm", instance="glm:8000"))
    with prometheus_api(double) as (prometheus, _):
        run = asked(tmp_path, prometheus, "--select", 'instance="glm:8000"')
    assert "Not known: it takes 12 stretches of 10 minutes with prompts in them" in " ".join(
        run.stdout.split()
    )


def learned_seconds(tmp_path: Path, *series: Series) -> float:
    """Of the time with prompts in it, by a Prometheus that has these."""
    with prometheus_api(Double(*series)) as (prometheus, _):
        run = asked(tmp_path, prometheus, "--select", 'instance="glm:8000"', "--json")
    assert run.returncode == 0, run.stderr
    return float(json.loads(run.stdout)["reuse"]["seconds"])


def changed(series: list[Series], name: str, value: Callable[[float, str], str | None]) -> list[Series]:
    """With another value of one metric, made of the seconds before the end and the value there."""
    return [
        (labels, (lambda at, of=of: value(at, of(at))) if labels["__name__"] == name else of)  # type: ignore[misc]
        for labels, of in series
    ]


def test_what_counts_in_a_prometheus_is_one_run_of_one_pool_and_tier_without_its_gaps(tmp_path: Path) -> None:
    stretches, _ = lru_day(random.Random(1), 1000)
    whole = series_of(stretches, job="vllm", instance="glm:8000")
    assert learned_seconds(tmp_path, *whole) == DAY
    no_start = [one for one in whole if one[0]["__name__"] != "process_start_time_seconds"]
    assert learned_seconds(tmp_path, *no_start) == DAY
    # Half an hour without prompts' counter leaves out the stretches that begin or end there.
    gap = changed(
        whole, "vllm:prompt_tokens_total", lambda at, text: None if -20_400 <= at <= -18_600 else text
    )
    assert DAY - 3 * 600 - 1200 <= learned_seconds(tmp_path, *gap) <= DAY - 2 * 600
    # Once the counters begin anew, and once the process alone does: one stretch of each.
    started = changed(
        whole,
        "process_start_time_seconds",
        lambda at, text: "1700000000" if at < -30_300 else "1700009999",
    )
    assert learned_seconds(tmp_path, *started) == DAY - 600
    fell = changed(
        no_start,
        "vllm:prompt_tokens_total",
        lambda at, text: text if at < -30_300 else str(float(text) - 1e6),
    )
    assert learned_seconds(tmp_path, *fell) == DAY - 600
    # What is found outside may be left out of a page, so its fall alone must tell.
    outside: Series = (
        {**whole[0][0], "__name__": "vllm:external_prefix_cache_hits_total"},
        lambda at: "5" if at < -30_300 else "0",
    )
    assert learned_seconds(tmp_path, *no_start, outside) == DAY - 600


def test_other_engines_of_the_server_and_the_time_with_another_tier_are_left_out(tmp_path: Path) -> None:
    stretches, found = lru_day(random.Random(SEED), 1000)
    target = {"job": "vllm", "instance": "glm:8000"}
    whole = series_of(stretches, **target)
    other = [
        ({**labels, "engine": "1"}, value)
        for labels, value in changed(whole, "vllm:prefix_cache_hits_total", lambda *_: "0")
        if "engine" in labels
    ]
    with prometheus_api(Double(*whole, *other)) as (prometheus, _):
        run = asked(tmp_path, prometheus, "--select", 'instance="glm:8000"', "--json")
    check(json.loads(run.stdout), found)
    tier = {"__name__": "vllm:kv_offload_config_info", "engine": "0", "model_name": "served", **target}
    told: Series = ({**tier, "cpu_num_chunks": "7"}, lambda at: "1" if at < -43_200 else None)
    assert learned_seconds(tmp_path, *whole, told) == pytest.approx(43_200, abs=600)
    pool = {**tier, "__name__": "vllm:cache_config_info", "block_size": "16", "num_gpu_blocks": "77"}
    told = (pool, lambda at: "1" if at < -43_200 else None)
    assert learned_seconds(tmp_path, *whole, told) == pytest.approx(43_200, abs=600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tier-sizes", "64GB"), "--tier-sizes and --prometheus belong together"),
        (("--prometheus", "http://127.0.0.1:9"), "--tier-sizes and --prometheus belong together"),
        (
            ("--tier-sizes", "64", "--prometheus", "http://127.0.0.1:9"),
            "'64' is no size; write a number with its unit",
        ),
        (("--tier-sizes", "1kB", "--prometheus", "http://127.0.0.1:9"), "from 1MB to 100000GB is needed"),
    ],
)
def test_options_that_are_wrong_are_told(options: tuple[str, ...], message: str) -> None:
    run = plan_from("http://127.0.0.1:9", *options)
    assert run.returncode == 2
    assert message in run.stderr


def test_a_real_prometheus_answers_the_queries(tmp_path: Path, each_prometheus: Binaries) -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    stretches, found = lru_day(random.Random(SEED), 1000)
    series = series_of(stretches, job="vllm", instance="glm:8000")
    with real_prometheus_with(each_prometheus, tmp_path, *series, seconds=86_400, every=60) as (server, _):
        run = asked(tmp_path, server.base_url, "--select", 'instance="glm:8000"', "--json")
    assert run.returncode == 0, run.stderr
    check(json.loads(run.stdout), found)
