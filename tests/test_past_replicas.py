"""Calibration from vLLM's own metrics of before kvheadroom ran, as a Prometheus keeps them."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.calibration_run import Looked
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion, SampleSource
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.config import validate_config
from kvheadroom.history_calibrator import HistoryOrder, look_at_history
from kvheadroom.sources import prometheus_parts
from kvheadroom.sources.prometheus_api import PrometheusApi
from tests.doubles.prometheus_api import matrix, prometheus_api, refusal
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer
from tests.exported_history import (
    NOW,
    OVERHEAD,
    Series,
    always,
    beside,
    during,
    prometheus_with,
    real_prometheus_with,
    sample,
)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
WEIGHTS = 16_060_522_496
BLOCK_BYTES = 16 * 2 * 8 * 128 * 2 * 32
"""Tokens, keys and values, heads, their width, bytes, layers."""
BLOCKS = 50_000
STARTED = 1_799_990_000
TARGET = {"job": "vllm", "instance": "gpu-7:8000"}


NO_GPU = (
    "neither the size of the pool nor that of the GPU's memory is known; set `gpu: B200` (or another name of the catalogue), or "
    "`hbm_bytes: N` (torch.cuda.mem_get_info()[1])"
)


def overhead(blocks: int, utilization: float = 0.9) -> int:
    total = GPUS["H200"].cuda_total_bytes
    assert total is not None
    return math.ceil(total * utilization) - WEIGHTS - blocks * BLOCK_BYTES


def vllm(
    *,
    blocks: int = BLOCKS,
    started: float | None = STARTED,
    first: float = -3600.0,
    last: float = 0.0,
    awake: Callable[[float], str | None] | None = None,
    target: dict[str, str] = TARGET,
    engines: tuple[str, ...] = ("0",),
    **info: str,
) -> list[Series]:
    """What vLLM says of itself from `first` to `last`, in seconds before NOW."""
    found: list[Series] = []
    for engine in engines:
        labels = {**target, "engine": engine}
        told = labels | {
            "block_size": "16",
            "num_gpu_blocks": str(blocks),
            "gpu_memory_utilization": "0.9",
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
        }
        model = labels | {"model_name": "llama"}
        found += [
            (told | info | {"__name__": "vllm:cache_config_info"}, during(first, last, 1)),
            # As many as there are seconds: it is never the same twice.
            (
                model | {"__name__": "vllm:num_requests_running"},
                lambda at: str(-at) if first <= at <= last else None,
            ),
            (
                model | {"__name__": "vllm:engine_sleep_state", "sleep_state": "awake"},
                awake or during(first, last, 1),
            ),
        ]
    if started is not None:
        found.append(
            (target | {"__name__": "process_start_time_seconds"}, during(first, last, f"{started:.2f}"))
        )
    return found


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_parts, "PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def replica(tmp_path: Path) -> dict[str, Any]:
    """The config's entry of the server at gpu-7:8000."""
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    return {
        "url": "http://gpu-7:8000",
        "name": "glm-a",
        "model": str(model),
        "gpu": "H200",
        "weights_bytes": WEIGHTS,
        "flags": {"max_num_seqs": 256},
    }


def look(url: str, *replicas: dict[str, Any], **changed: Any) -> Looked:
    order = HistoryOrder(
        api=PrometheusApi(url=url, timeout_seconds=5.0),
        range_seconds=3600.0,
        every_seconds=60.0,
        config=validate_config({"replicas": list(replicas)}, "the test"),
        version="0.33.0",
    )
    now = changed.pop("now", NOW)
    return look_at_history(replace(order, **changed), now, lambda _: None)


def looked(series: list[Series], *replicas: dict[str, Any], **changed: Any) -> Looked:
    with prometheus_api(prometheus_with(*series)) as (url, _):
        return look(url, *replicas, **changed)


def samples(series: list[Series], *replicas: dict[str, Any], **changed: Any) -> list[CalibrationSample]:
    found = looked(series, *replicas, **changed)
    assert found.problems == ()
    assert [one.outcome for one in found.starts if isinstance(one.outcome, Excluded)] == []
    return list(found.samples)


def excluded(series: list[Series], *replicas: dict[str, Any], **changed: Any) -> tuple[Exclusion, str]:
    """The only start, left out."""
    [one] = looked(series, *replicas, **changed).starts
    assert isinstance(one.outcome, Excluded)
    return one.outcome.reason, one.outcome.detail


# --- what is learned ---


def test_a_start_is_measured_by_its_blocks_the_config_and_the_release(replica: dict[str, Any]) -> None:
    with prometheus_api(prometheus_with(*vllm())) as (url, _):
        [one] = look(url, replica).starts
    assert (one.model, one.release) == ("llama", "0.33.0")
    found = one.outcome
    assert isinstance(found, CalibrationSample)
    assert (found.start, found.source) == (f"glm-a/0/{STARTED}", SampleSource.PROMETHEUS)
    assert found.overhead_bytes == overhead(BLOCKS)
    assert found.uncertainty_bytes == BLOCK_BYTES - 1
    assert (found.measured_at, found.model) == (NOW - 3600, "llama")
    assert found.evidence == (
        f"Prometheus at {url}: gpu-7:8000 engine 0, 2027-01-15 07:00:00 UTC to 2027-01-15 08:00:00 UTC"
    )
    assert (found.key.gpu, found.key.release, found.key.parallelism) == ("H200", "0.33.0", "tp1")
    assert "max_num_seqs=256" in found.key.settings


def test_a_restart_is_another_start_with_the_flags_that_it_echoes(replica: dict[str, Any]) -> None:
    first, second = samples(
        [
            *vllm(last=-1860),
            *vllm(
                first=-1200,
                blocks=52_000,
                started=STARTED + 9000,
                gpu_memory_utilization="0.92",
            ),
        ],
        replica,
    )
    assert (first.start, first.overhead_bytes) == (f"glm-a/0/{STARTED}", overhead(BLOCKS))
    assert (second.start, second.overhead_bytes) == (f"glm-a/0/{STARTED + 9000}", overhead(52_000, 0.92))
    assert second.measured_at == NOW - 1200


def test_a_server_without_a_start_time_is_named_by_its_blocks(replica: dict[str, Any]) -> None:
    """A restart into as many blocks is the same start then."""
    [one] = samples([*vllm(started=None, last=-1860), *vllm(started=None, first=-1200)], replica)
    assert (one.start, one.measured_at) == (f"glm-a/0/{BLOCKS} blocks", NOW - 3600)


def test_the_page_of_a_server_that_has_no_pool_yet_is_no_start_of_its_own(replica: dict[str, Any]) -> None:
    page = vllm(started=None)
    info = page[0]
    [one] = samples([(info[0], during(-1800, 0, 1)), *page[1:]], replica)
    assert (one.start, one.measured_at) == (f"glm-a/0/{BLOCKS} blocks", NOW - 1800)


def test_two_jobs_that_scrape_a_server_see_one_start(replica: dict[str, Any]) -> None:
    [one] = samples([*vllm(), *vllm(target=TARGET | {"job": "other", "pod": "a"})], replica)
    assert one.start == f"glm-a/0/{STARTED}"


def test_one_that_another_job_scraped_for_a_while_was_seen_all_the_time(replica: dict[str, Any]) -> None:
    [one] = samples([*vllm(), *vllm(target=TARGET | {"job": "other"}, first=-1800, last=-900)], replica)
    assert one.evidence.endswith(" 2027-01-15 07:00:00 UTC to 2027-01-15 08:00:00 UTC")


def test_a_page_that_tells_no_blocks_in_the_end_leaves_those_that_it_told(replica: dict[str, Any]) -> None:
    info, *page = vllm()
    [one] = samples([(info[0], during(-3600, -1800, 1)), *page], replica)
    assert one.overhead_bytes == overhead(BLOCKS)


def test_a_start_that_slept_for_a_while_is_measured_by_its_blocks(replica: dict[str, Any]) -> None:
    [one] = samples(vllm(awake=lambda at: "0" if -1800 <= at < -60 else "1"), replica)
    assert one.overhead_bytes == overhead(BLOCKS)


def test_one_that_stands_at_the_default_port_is_found(replica: dict[str, Any]) -> None:
    replica["url"] = "http://GPU-7/v"
    [one] = samples(vllm(target=TARGET | {"instance": "Gpu-7:80"}), replica)
    assert one.start == f"glm-a/0/{STARTED}"


def test_what_kvheadroom_measured_itself_comes_first(replica: dict[str, Any]) -> None:
    own = [sample(start=f"glm-a/0/{STARTED}"), *beside()]
    [one] = samples([*vllm(), *own], replica)
    assert (one.start, one.overhead_bytes) == (f"glm-a/0/{STARTED}", OVERHEAD)
    both = samples([*vllm(started=STARTED - 5), *own], replica)
    assert [each.overhead_bytes for each in both] == [OVERHEAD, overhead(BLOCKS)]


# --- what is left out ---


def test_without_the_release_nothing_is_measured(replica: dict[str, Any]) -> None:
    assert excluded(vllm(), replica, version=None) == (
        Exclusion.UNKNOWN,
        "vLLM's metrics do not tell its release; say --vllm-version X.Y.Z",
    )


def test_a_server_that_the_config_lacks_is_told(replica: dict[str, Any]) -> None:
    replica["url"] = "http://gpu-8:8000"
    assert excluded(vllm(), replica) == (
        Exclusion.UNKNOWN,
        "no replica of the config has the address gpu-7:8000; add it, or leave it out with --select",
    )


def test_two_replicas_at_one_address_are_not_told_apart(replica: dict[str, Any]) -> None:
    other = replica | {"url": "http://gpu-7:8000/other", "name": "glm-b"}
    assert excluded(vllm(), replica, other) == (
        Exclusion.UNKNOWN,
        "2 replicas of the config are at gpu-7:8000, and which of them this is, is not told",
    )


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (
            "model",
            "vLLM's metrics do not tell where the model is; set `model: /path/to/the/model` in the config",
        ),
        ("gpu", NO_GPU),
    ],
)
def test_what_the_config_does_not_tell_is_named_with_its_line(
    lost: str, why: str, replica: dict[str, Any]
) -> None:
    del replica[lost]
    assert excluded(vllm(), replica) == (Exclusion.UNKNOWN, why)


def test_a_model_that_is_not_there_is_told_with_its_file(replica: dict[str, Any], tmp_path: Path) -> None:
    replica["model"] = str(tmp_path / "gone")
    assert excluded(vllm(), replica) == (
        Exclusion.UNKNOWN,
        f"{tmp_path}/gone/config.json: there is no such file on this machine; set `model: /path/to/the/model` in the config",
    )


def test_a_length_that_the_overhead_grows_with_is_not_guessed(
    replica: dict[str, Any], tmp_path: Path
) -> None:
    sparse = {
        **MODEL,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "n_routed_experts": None,
    }
    (tmp_path / "llama" / "config.json").write_text(json.dumps(sparse))
    seen = vllm(block_size="64", blocks=60_000, cache_dtype="fp8")
    assert excluded(seen, replica) == (
        Exclusion.UNKNOWN,
        "its overhead depends on max_model_len, which vLLM's metrics do not tell; set `flags: {max_model_len: N}`",
    )
    replica["flags"] = {"max_model_len": 65536}
    [one] = samples(seen, replica)
    assert "max_model_len=65536" in one.key.settings


def test_a_start_that_always_slept_is_left_out(replica: dict[str, Any]) -> None:
    assert excluded(vllm(awake=always(0)), replica) == (
        Exclusion.ASLEEP,
        "it slept whenever it was seen, and had given its memory up",
    )


def test_a_start_that_was_seen_once_is_left_out(replica: dict[str, Any]) -> None:
    reason, detail = excluded(vllm(first=-60, last=-60), replica)
    assert reason is Exclusion.RESTARTING
    assert detail.startswith("it was seen at one instant alone")


@pytest.mark.parametrize("blocks", [7, BLOCKS])
def test_a_start_that_is_only_seen_together_with_another_is_left_out(
    blocks: int, replica: dict[str, Any]
) -> None:
    """A store that knows no staleness shows the series of both for minutes."""
    other = vllm(first=-2100, last=-1900, started=STARTED + 9000, blocks=blocks, pod="b")
    found = looked([*vllm(last=-1800), *other], replica)
    assert [one.start for one in found.samples] == [f"glm-a/0/{STARTED}"]
    [one] = [one.outcome for one in found.starts if isinstance(one.outcome, Excluded)]
    assert one == Excluded(
        Exclusion.RESTARTING,
        "whenever it was on the page another process was too, and which of them had these blocks is not told",
    )


def test_instants_with_the_blocks_of_two_processes_count_for_neither(replica: dict[str, Any]) -> None:
    """Without a start time the blocks alone tell the processes apart."""
    first, second = samples(
        [*vllm(started=None, last=-1500), *vllm(started=None, first=-1800, blocks=49_000)], replica
    )
    assert (first.overhead_bytes, second.overhead_bytes) == (overhead(BLOCKS), overhead(49_000))
    assert (first.measured_at, second.measured_at) == (NOW - 3600, NOW - 1440)
    assert first.evidence.endswith(" 2027-01-15 07:00:00 UTC to 2027-01-15 07:29:00 UTC")


def test_blocks_that_change_while_the_process_goes_on_are_left_out(replica: dict[str, Any]) -> None:
    assert excluded([*vllm(last=-1860), *vllm(first=-1800, blocks=49_000)], replica) == (
        Exclusion.RESTARTING,
        "its pool had 49,000 and 50,000 blocks while the same process went on",
    )


def test_engines_whose_blocks_are_added_up_are_one_start_and_tell_nothing(replica: dict[str, Any]) -> None:
    """Each tells the sum; how many each has is not told."""
    replica["flags"] = {"data_parallel_size": 2}
    assert excluded(vllm(blocks=2 * BLOCKS, engines=("0", "1")), replica) == (
        Exclusion.UNKNOWN,
        "its page adds up the blocks of several engines",
    )


def test_a_pool_larger_than_the_gpu_is_impossible(replica: dict[str, Any]) -> None:
    reason, detail = excluded(vllm(blocks=5_000_000), replica)
    assert reason is Exclusion.IMPOSSIBLE
    assert "more than gpu_memory_utilization allows" in detail


def test_a_pool_that_a_flag_sized_tells_nothing(replica: dict[str, Any]) -> None:
    assert excluded(vllm(num_gpu_blocks_override="50000"), replica) == (
        Exclusion.POOL_BY_FLAG,
        "a flag gives the pool, and nothing is left over",
    )


def test_a_page_that_does_not_tell_its_blocks_is_told(replica: dict[str, Any]) -> None:
    reason, detail = excluded(vllm(num_gpu_blocks="None"), replica)
    assert reason is Exclusion.UNKNOWN
    assert detail.startswith("the server's page does not tell how many blocks the pool has")


def test_what_is_missing_is_not_named_where_something_else_is_in_the_way(
    replica: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "llama" / "config.json").write_text(
        json.dumps({name: value for name, value in MODEL.items() if name != "max_position_embeddings"})
    )
    reason, detail = excluded(vllm(num_gpu_blocks="None"), replica)
    assert reason is Exclusion.UNKNOWN
    assert detail.startswith("the server's page does not tell how many blocks the pool has")
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"]}))
    del replica["gpu"]
    reason, detail = excluded(vllm(), replica)
    assert reason is Exclusion.UNKNOWN
    assert "NoSuchForCausalLM" in detail


@pytest.mark.parametrize("value", ["NaN", "-5", "+Inf"])
def test_a_start_time_that_cannot_be_is_none(value: str, replica: dict[str, Any]) -> None:
    bad = ({**TARGET, "__name__": "process_start_time_seconds"}, always(value))
    [one] = samples([*vllm(started=None), bad], replica)
    assert one.start == f"glm-a/0/{BLOCKS} blocks"
    [one] = samples([bad, *vllm()], replica)
    assert one.start == f"glm-a/0/{STARTED}"


# --- a Prometheus that fails ---


def test_a_history_without_any_of_both_is_told(replica: dict[str, Any]) -> None:
    with prometheus_api(lambda _: matrix()) as (url, _):
        [problem] = look(url, replica).problems
    assert problem == (
        f"Prometheus at {url} has neither kvheadroom_overhead_sample_bytes nor vllm:num_requests_running since 2027-01-15 07:00:00 "
        "UTC: does it scrape kvheadroom, or vLLM itself?"
    )


def test_only_starts_of_which_all_was_answered_are_learned(
    replica: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_parts, "_FEWEST_TICKS", 10)
    monkeypatch.setattr(prometheus_parts, "_MOST_TICKS", 10)
    told = prometheus_with(*vllm(last=-2460), *vllm(first=-1200, started=STARTED + 9000))
    with prometheus_api(
        lambda asked: (
            refusal(500, "full")
            if "cache_config" in asked["query"] and float(asked["start"]) == NOW - 2400
            else told(asked)
        )
    ) as (url, _):
        found = look(url, replica)
    assert [one.start for one in found.samples] == [f"glm-a/0/{STARTED + 9000}"]
    [one] = [one.outcome for one in found.starts if isinstance(one.outcome, Excluded)]
    assert one == Excluded(
        Exclusion.UNKNOWN,
        "nothing is known of 2027-01-15 07:20:00 UTC to 2027-01-15 07:29:00 UTC, when it may have run too",
    )


# --- the real one ---


@pytest.fixture(scope="module")
def prometheus(
    each_prometheus: Binaries, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PrometheusServer, float]]:
    """One with a past hour of a server that was started anew in the midst of it; and when it ends."""
    series = [*vllm(last=-1860), *vllm(first=-1200, started=STARTED + 9000, blocks=49_000)]
    with real_prometheus_with(each_prometheus, tmp_path_factory.mktemp("prometheus"), *series) as told:
        yield told


def test_a_real_prometheus_gives_both_starts(
    prometheus: tuple[PrometheusServer, float], replica: dict[str, Any]
) -> None:
    server, ends_at = prometheus
    found = look(server.base_url, replica, now=ends_at, range_seconds=7200.0)
    assert found.problems == ()
    assert [(one.start, one.overhead_bytes, one.measured_at) for one in found.samples] == [
        (f"glm-a/0/{STARTED}", overhead(BLOCKS), ends_at - 3600),
        (f"glm-a/0/{STARTED + 9000}", overhead(49_000), ends_at - 1200),
    ]
