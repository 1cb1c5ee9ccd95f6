"""Our own /metrics: every family from the catalogue, absent is absent, both formats, no duplicates."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvheadroom.capacity.discovery import OUR_LABELS, checked_labels
from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment, withhold_stale
from kvheadroom.capacity.gpu_assignment import GpuAssignments, NotHere
from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading
from kvheadroom.capacity.overhead import EDITION
from kvheadroom.outputs.check_report import check_report
from kvheadroom.outputs.json_report import status_report, to_json
from kvheadroom.outputs.metric_catalogue import CATALOGUE, ENGINE_LABELS, OVERHEAD_SAMPLE, PREFIX
from kvheadroom.outputs.prometheus import exposition
from tests.conftest import Golden
from tests.outputs.fleet import NOW, calibrated, fleet, inflated, offloading, on_a_gpu
from tests.outputs.fleet import replica as replica_of
from tests.outputs.pages import all_pages

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def page(accept: str = "", shown: FleetAssessment | None = None) -> str:
    body, _ = exposition(withhold_stale(shown or fleet(), NOW), NOW, accept)
    return body.decode()


def samples(text: str) -> Samples:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in parse_text(text)
        for s in family.samples
    }


def of(name: str, /, **labels: str) -> float | None:
    found = [
        value
        for (n, have), value in samples(page()).items()
        if n == PREFIX + name and labels.items() <= dict(have).items()
    ]
    assert len(found) <= 1, (name, labels, found)
    return found[0] if found else None


def test_the_page_is_as_committed(golden: Golden) -> None:
    golden.check("metrics.txt", page())


def test_every_family_of_the_catalogue_is_on_the_page_and_none_besides() -> None:
    families = {family.name for family in parse_text(page())}
    assert families == {metric.full_name.removesuffix("_total") for metric in CATALOGUE}


def test_every_sample_carries_exactly_the_labels_of_the_catalogue() -> None:
    labels = {metric.full_name: set(metric.labels) for metric in CATALOGUE}
    for name, have in samples(page()):
        if name != PREFIX + "replica_info":
            assert set(dict(have)) == labels[name], name


def test_the_labels_of_operators_stand_on_the_info_of_their_replica_and_nowhere_else() -> None:
    info = {
        labels["replica"]: labels
        for n, have in samples(page())
        if n == PREFIX + "replica_info"
        for labels in (dict(have),)
    }
    assert info["hub"] == {"replica": "hub", "source": "file_sd_configs[0]", "team": "chat", "rack": "r12"}
    assert info["gqa"] == {"replica": "gqa", "source": "config", "team": "search <1>"}
    assert info["new"] == {"replica": "new", "source": "config"}
    assert not any("team" in dict(have) for n, have in samples(page()) if n != PREFIX + "replica_info")


def test_an_operators_label_can_write_over_none_of_a_replicas_series() -> None:
    joined = [one for one in CATALOGUE if "replica" in one.labels and one is not OVERHEAD_SAMPLE]
    ours = {label for metric in joined for label in metric.labels}
    assert ours <= OUR_LABELS
    for label in ours:
        with pytest.raises(ValueError, match=f"'{label}' is a label of kvheadroom's own series"):
            checked_labels({label: "x"})


def test_how_a_source_of_replicas_answered_is_told() -> None:
    assert of("source_up", replica="", source="file_sd_configs[0]") == 0
    assert of("source_failures_total", source="file_sd_configs[0]", reason="not_found") == 4
    assert of("discovery_targets", source="file_sd_configs[0]") == 1
    assert of("discovery_left_out_targets", source="file_sd_configs[0]") == 1
    assert of("discovery_last_success_timestamp_seconds", source="file_sd_configs[0]") == NOW - 60


def test_the_memory_of_a_gpu_is_told_term_by_term_and_of_the_live_one_what_its_pool_tells() -> None:
    terms = ("outside_utilization", "weights", "overhead", "block_rounding", "kv_pool")
    predicted = {term: of("predicted_memory_bytes", replica="hbm", term=term) for term in terms}
    # The CUDA total of the catalogue's H100.
    assert sum(size or 0 for size in predicted.values()) == 85_028_896_768
    parts = ("context", "activations", "workspaces", "encoder", "cuda_graphs")
    made_of = {part: of("predicted_overhead_bytes", replica="hbm", part=part) for part in parts}
    assert made_of["context"] == 2**28
    assert made_of["workspaces"] == made_of["encoder"] == 0
    assert sum(size or 0 for size in made_of.values()) == predicted["overhead"]
    live = {term: of("observed_memory_bytes", replica="hbm", term=term) for term in terms}
    assert live["kv_pool"] == 2_300_000 * 32 * 1024
    unexplained = of("unexplained_overhead_bytes", replica="hbm")
    assert unexplained == (live["overhead"] or 0) - (predicted["overhead"] or 0)
    assert (
        live["overhead"]
        == sum(predicted[term] or 0 for term in ("overhead", "block_rounding", "kv_pool")) - live["kv_pool"]
    )
    assert [term for term in terms if live[term] is None] == [
        "outside_utilization",
        "weights",
        "block_rounding",
    ]
    # Its pool is given by a flag.
    assert of("predicted_memory_bytes", replica="gqa") is None
    assert of("unexplained_overhead_bytes", replica="gqa") is None


def test_memory_that_is_held_for_nothing_has_a_name() -> None:
    # 16 requests of 64 blocks, the null block; 32 KiB each.
    unused = (2_300_000 - 1 - 16 * 64) * 32 * 1024
    assert (
        of("memory_finding_bytes", replica="hbm", engine="0", gpu="", finding="pool_above_demand") == unused
    )
    assert of("memory_finding_bytes", replica="gqa") is None


def test_what_was_learned_is_told_beside_with_its_interval_and_adds_up_to_the_gpu() -> None:
    terms = ("outside_utilization", "weights", "overhead", "block_rounding", "kv_pool")
    learned = {term: of("calibrated_memory_bytes", replica="hbm", term=term) for term in terms}
    # The CUDA total of the catalogue's H100.
    assert sum(size or 0 for size in learned.values()) == 85_028_896_768
    # The median of three, one block of 32 KiB less one byte added at both ends.
    assert learned["overhead"] == 1_100_000_000
    assert of("calibrated_overhead_low_bytes", replica="hbm") == 1_050_000_007 - 32_767
    assert of("calibrated_overhead_high_bytes", replica="hbm") == 1_150_000_000 + 32_767
    assert of("calibration_samples", replica="hbm") == 3
    assert of("calibration_reliability", replica="hbm", reliability="good") == 1
    # ceil(92% of that) - weights of 4,065,536 B - 1.1 GB, in blocks of 32,768 B.
    blocks = (78_226_585_027 - 4_065_536 - 1_100_000_000) // 32_768
    assert of("calibrated_blocks", replica="hbm") == blocks == 2_353_592
    assert of("calibrated_pool_bytes", replica="hbm") == learned["kv_pool"] == blocks * 32_768
    assert of("calibrated_pool_tokens", replica="hbm") == blocks * 32
    assert of("calibrated_sessions", replica="hbm", session_tokens="1024") == blocks / 32
    assert of("calibration_clamped", replica="hbm") is None
    # Its pool is given by a flag.
    assert of("calibrated_blocks", replica="gqa") is None
    assert of("calibration_excluded_starts_total", replica="gqa", reason="pool_by_flag") == 2


def test_memory_and_what_was_learned_add_as_many_series_as_the_page_on_metrics_says() -> None:
    series = Counter(
        name.removeprefix(PREFIX) for name, have in samples(page()) if ("replica", "hbm") in have
    )
    memory = ("predicted_memory", "observed_memory", "predicted_overhead", "unexplained_overhead")
    assert sum(series[f"{name}_bytes"] for name in memory) == 13
    assert series["gpu_memory_term_bytes"] == 6
    # With two lengths: 1,024 tokens, and max_model_len.
    learned = sum(count for name, count in series.items() if name.startswith(("calibrat", "overhead_sample")))
    assert (learned, series["calibrated_sessions"]) == (13 + 2, 2)
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert "adds 13 to an engine whose pool is what HBM leaves over, and 6 to a GPU" in text
    assert "adds 13 to an engine, and one for each length" in text


def test_a_learned_overhead_that_leaves_nothing_is_cut_and_makes_no_pool() -> None:
    assert of("calibration_clamped", replica="tight", bound="nothing_left") == 1
    assert of("calibration_samples", replica="tight") == 1
    assert of("calibrated_blocks", replica="tight") is None
    assert of("calibrated_memory_bytes", replica="tight", term="overhead") is None
    # Its own start cannot be, and is no sample.
    assert of("overhead_sample_bytes", replica="tight") is None


def test_a_start_that_is_a_sample_tells_it_with_all_that_it_depends_on() -> None:
    ((labels, value),) = [
        (dict(have), size)
        for (name, have), size in samples(page()).items()
        if name == PREFIX + "overhead_sample_bytes"
    ]
    # ceil(92% of 85,028,896,768 B) - weights of 4,065,536 B - 2,300,000 blocks of 32,768 B.
    assert value == 78_226_585_027 - 4_065_536 - 2_300_000 * 32_768
    geometry = labels.pop("geometry")
    assert geometry.startswith("LlamaForCausalLM ")
    assert labels == {
        "replica": "hbm",
        "engine": "0",
        "model_name": "tiny",
        "start": "hbm/0/1795986400",
        "weight_format": "bfloat16",
        "gpu": "H100",
        "parallelism": "tp1",
        "release": "0.32.0",
        "settings": "kv_cache_dtype=auto max_num_batched_tokens=8192 max_num_seqs=16",
        "edition": str(EDITION),
    }


def test_the_sample_of_an_engine_whose_overhead_the_operator_says_has_no_edition_of_the_estimate() -> None:
    said = calibrated(on_a_gpu(overhead_bytes=2**30), "said")
    shown = samples(page(shown=FleetAssessment((said,))))
    ((edition, value),) = [
        (dict(have)["edition"], size)
        for (name, have), size in shown.items()
        if name == PREFIX + "overhead_sample_bytes"
    ]
    assert edition == "0"
    # What the operator says is not in it.
    assert value == of("overhead_sample_bytes", replica="hbm")


def test_a_calibration_file_that_cannot_be_used_is_a_source_that_is_down() -> None:
    assert of("source_up", replica="", source="calibration") == 0
    assert of("source_failures_total", source="calibration", reason="no_permission") == 3
    without = samples(page(shown=replace(fleet(), calibration=None)))
    assert not any(dict(have).get("source") == "calibration" for _, have in without)


def test_what_is_on_a_gpu_adds_up_to_what_its_driver_counts() -> None:
    terms = ("reserved", "others", "weights", "kv_pool", "rest", "free")
    on = {
        term: of("gpu_memory_term_bytes", replica="hbm", gpu="GPU-12121212", term=term) or 0 for term in terms
    }
    assert (on["reserved"], on["others"], on["kv_pool"], on["free"]) == (
        551 * 2**20,
        2**20,
        2_300_000 * 32 * 1024,
        6_256 * 2**20,
    )
    assert on["others"] + on["weights"] + on["kv_pool"] + on["rest"] == 73 * 2**30
    # Two replicas run on it.
    assert of("gpu_memory_term_bytes", gpu="GPU-aaaaaaaa") is None


def test_a_sample_is_the_number_that_the_engine_said() -> None:
    # gqa_waiting_and_preempting, read by hand: 128 blocks of 32; usage 125/127
    assert of("observed_pool_tokens", replica="gqa") == 4096
    assert of("observed_blocks", replica="gqa") == 128
    assert of("used_blocks", replica="gqa") == 125
    assert of("free_blocks", replica="gqa") == 2
    assert of("predicted_pool_tokens", replica="gqa") == 4096
    assert of("predicted_bytes_per_token", replica="gqa") == 1024
    assert of("observed_pool_bytes", replica="gqa") == 4 * 2**20
    assert of("observed_sessions", replica="gqa", session_tokens="2048") == 2.0
    assert of("source_failures_total", replica="down", reason="refused") == 12
    assert of("page_problems_total", replica="gqa", reason="bad_value") == 7
    assert of("lost_metric", replica="gqa", metric="vllm:prompt_tokens_total") == 1
    assert of("sample_age_seconds", replica="gqa") == 1.25
    assert of("replica_state", replica="gqa", state="serving") == 1
    assert of("replica_state", replica="down", state="down") == 1
    assert of("replica_restarts_total", replica="gqa") == 1
    assert of("config_last_reload_successful") == 0
    assert of("config_last_reload_success_timestamp_seconds") == NOW - 3600


def test_the_limit_that_binds_is_a_label_and_what_is_not_known_has_no_sample() -> None:
    assert of("binding_limit", replica="hub", limit="none") == 1
    assert of("binding_limit", replica="hub") == 1
    # A queue, and nothing remembered of the scrape before.
    assert of("requests_waiting", replica="gqa") == 9
    assert of("binding_limit", replica="gqa") is None


def test_a_state_that_an_engine_is_in_is_a_label_and_no_other_has_a_sample() -> None:
    assert of("engine_state", replica="gqa") == of("engine_state", replica="gqa", state="thrash") == 1
    assert of("engine_state", replica="hub") is None


def test_a_forecast_is_told_by_horizon_with_its_interval_and_where_there_is_none_the_reason() -> None:
    chances = {
        h: of("forecast_preemption_probability_ratio", replica="gqa", horizon=h) for h in ("30s", "2m", "10m")
    }
    assert chances == {"30s": 0.625, "2m": 0.875, "10m": 0.96875}
    assert of("forecast_exhaustion_earliest_seconds", replica="gqa") == 0.0
    assert of("forecast_exhaustion_seconds", replica="gqa") == 12.5
    assert of("forecast_exhaustion_latest_seconds", replica="gqa") == 45.0
    assert of("forecast_peak_blocks", replica="gqa") == 243.5
    assert of("prefill_backlog_tokens", replica="gqa") == 2016.0
    assert of("forecast_unavailable", replica="gqa") is None
    # One page of an engine tells of no trend.
    assert of("forecast_unavailable", replica="hub", reason="watched_too_short") == 1
    assert of("forecast_preemption_probability_ratio", replica="hub") is None
    assert of("prefill_backlog_tokens", replica="hub") is None


def test_hit_ratios_are_given_by_window_and_only_where_the_counters_count_no_more_than_that() -> None:
    assert of("prefix_cache_hit_ratio", replica="offload", window="1m") == 0
    assert of("external_prefix_cache_hit_ratio", replica="offload", window="1m") == pytest.approx(2 / 3)
    # LMCache beside it is asked for whole prompts, and has a figure of its own.
    assert of("lmcache_hit_ratio", replica="offload", window="1m") == 0.25
    assert of("tier_used_bytes", replica="offload", cache_tier="host") == 3e9
    assert of("tier_used_bytes", replica="offload", cache_tier="disk") == 5e9
    assert of("tier_used_bytes", replica="offload", cache_tier="hbm") is None
    # Windows that are not full yet, and engines of which nothing is remembered.
    assert of("prefix_cache_hit_ratio", replica="offload", window="5m") is None
    assert of("prefix_cache_hit_ratio", replica="gqa") is None
    assert of("token_occupancy_estimate_ratio", replica="hub") == pytest.approx(0.557, abs=0.001)
    assert of("kv_usage_ratio", replica="hub") == pytest.approx(77 / 127)
    assert of("token_occupancy_estimate_ratio", replica="gqa") is None


def test_where_nothing_is_looked_up_there_is_no_hit_ratio_and_no_0() -> None:
    quiet = replica_of("quiet", "gqa_prefix_reuse", before="gqa_prefix_reuse")
    text = page(shown=FleetAssessment((quiet,)))
    assert "kvheadroom_prefix_cache_queries_tokens_total{" in text
    assert "_hit_ratio{" not in text
    report = json.loads(
        to_json(status_report(FleetAssessment((quiet,)), NOW, None)), parse_constant=pytest.fail
    )
    assert report["replicas"][0]["engines"][0]["hit_windows"] == []
    busy = replica_of("busy", "gqa_prefix_reuse", before="gqa_idle_fresh")
    assert "kvheadroom_prefix_cache_hit_ratio{" in page(shown=FleetAssessment((busy,)))


def test_a_hit_ratio_in_doubt_is_on_no_graph() -> None:
    old = inflated()
    assert old.engines[0].hit_windows
    text = page(shown=FleetAssessment((old,)))
    assert "kvheadroom_prefix_cache_hits_tokens_total{" in text
    assert "kvheadroom_prefix_cache_hit_ratio{" not in text


def test_what_is_not_known_has_no_sample() -> None:
    assert of("predicted_pool_tokens", replica="hub") is None
    assert of("missing_fact", replica="hub", fact="model_files") == 1
    assert of("observed_pool_tokens", replica="hub") == 4096
    assert of("observed_pool_bytes", replica="hub") is None
    assert of("kv_usage_ratio", replica="down") is None
    assert of("sample_age_seconds", replica="down") is None
    assert of("source_up", replica="down", source="metrics") == 0
    assert of("source_up", replica="new", source="metrics") is None
    assert of("replica_state", replica="new") is None
    # A session of 262,144 tokens is refused by a server with max_model_len 2,048.
    assert of("observed_sessions", replica="gqa", session_tokens="262144") is None


def test_the_memory_of_a_gpu_is_given_once_for_each_replica_that_it_serves() -> None:
    mib = 2**20
    for replica in ("gqa", "hub"):
        assert of("gpu_memory_total_bytes", replica=replica, gpu="GPU-aaaaaaaa") == 143_771 * mib
        assert of("gpu_memory_reserved_bytes", replica=replica, gpu="GPU-aaaaaaaa") == 601 * mib
        assert of("gpu_memory_used_bytes", replica=replica, gpu="GPU-aaaaaaaa") == 130_003 * mib
        assert of("gpu_memory_free_bytes", replica=replica, gpu="GPU-aaaaaaaa") == 13_167 * mib
    assert of("gpu_memory_free_bytes", replica="", gpu="GPU-aaaaaaaa") is None
    # Unassigned, and a driver that counts what it reserves as used.
    assert of("gpu_memory_free_bytes", replica="", gpu="GPU-bbbbbbbb") == 81_913 * mib
    assert of("gpu_memory_reserved_bytes", gpu="GPU-bbbbbbbb") is None


def test_memory_that_a_sleeping_engine_takes_back_is_free_for_nobody() -> None:
    awake = fleet()
    hub = awake.replicas[2]
    engines = tuple(replace(e, snapshot=replace(e.snapshot, sleeping=True)) for e in hub.engines)
    asleep = replace(
        awake, replicas=tuple(replace(hub, engines=engines) if r is hub else r for r in awake.replicas)
    )
    body, _ = exposition(withhold_stale(asleep, NOW), NOW, "")
    free = {labels for name, labels in samples(body.decode()) if name.endswith("_memory_free_bytes")}
    # GPU-aaaaaaaa serves the sleeping replica and another one.
    assert {dict(labels)["gpu"] for labels in free} == {
        *("GPU-bbbbbbbb", "GPU-10101010", "GPU-12121212", "MIG-dddddddd"),
        *("GPU-20202020", "MIG-GPU-30303030/3"),
    }
    used = [name for name, _ in samples(body.decode()) if name.endswith("_memory_used_bytes")]
    assert len(used) == 8
    html = all_pages(withhold_stale(asleep, NOW), NOW)
    assert html.count("<td>an engine sleeps</td>") == 2
    report = status_report(withhold_stale(asleep, NOW), NOW, None)
    assert [gpu["free_bytes"] for gpu in report["gpus"]["gpus"]][:2] == [None, 81_913 * 2**20]
    assert any(
        "free memory not told, an engine sleeps, serves gqa, hub (its processes are on it)" in row
        for row in check_report(asleep)
    )


def test_a_gpu_tells_what_it_is_and_how_its_memory_is_counted() -> None:
    whole = {"parent": "", "gpu_instance": "", "compute_instance": ""}
    assert of("gpu_info", gpu="GPU-aaaaaaaa", name="NVIDIA H200", index="0", memory="v2", **whole) == 1
    assert of("gpu_info", gpu="GPU-bbbbbbbb", name="NVIDIA <A100>", index="1", memory="v1", **whole) == 1
    assert of("gpu_info", gpu="GPU-10101010", name="NVIDIA GB10", index="5", memory="host", **whole) == 1
    place = {"parent": "GPU-dddddddd", "gpu_instance": "5", "compute_instance": "0"}
    assert of("gpu_info", gpu="MIG-dddddddd", index="3", memory="v2", **place) == 1
    assert of("gpu_info", gpu="GPU-cccccccc") is None


def test_a_mig_device_has_its_own_memory_and_the_gpu_that_it_is_a_part_of_has_none() -> None:
    assert of("gpu_memory_total_bytes", replica="dp2", gpu="MIG-dddddddd") == 33_024 * 2**20
    assert of("gpu_memory_free_bytes", replica="dp2", gpu="MIG-dddddddd") == 3_000 * 2**20
    assert "GPU-dddddddd" not in {dict(labels).get("gpu") for _, labels in samples(page())}


def test_memory_of_the_host_has_no_reserved_part() -> None:
    assert of("gpu_memory_total_bytes", replica="", gpu="GPU-10101010") == 120 * 2**30
    assert of("gpu_memory_free_bytes", replica="", gpu="GPU-10101010") == 100 * 2**30
    assert of("gpu_memory_reserved_bytes", gpu="GPU-10101010") is None


def test_each_gpu_of_a_replica_tells_how_that_is_known_and_what_others_use() -> None:
    assert of("gpu_assignment", replica="gqa", gpu="GPU-aaaaaaaa", by="config") == 1
    assert of("gpu_assignment", replica="hub", gpu="GPU-aaaaaaaa", by="process") == 1
    assert of("gpu_assignment", replica="new") is None
    assert of("gpu_memory_others_bytes", replica="hub", gpu="GPU-aaaaaaaa") == 5 * 2**30
    assert of("gpu_memory_others_bytes", replica="gqa") is None
    assert of("gpu_up", replica="dp2", gpu="GPU-eeeeeeee") == 0


def test_xid_errors_are_counted_by_number_and_those_that_never_came_are_absent() -> None:
    assert of("gpu_xid_errors_total", gpu="GPU-aaaaaaaa", xid="79") == 2
    assert of("gpu_xid_errors_total", gpu="GPU-cccccccc", xid="31") == 1
    assert of("gpu_xid_errors_total", gpu="GPU-bbbbbbbb") is None


def test_a_lost_gpu_is_down_and_hides_no_other() -> None:
    assert of("gpu_up", replica="gqa", gpu="GPU-cccccccc") == 0
    assert of("gpu_memory_free_bytes", gpu="GPU-cccccccc") is None
    assert of("gpu_up", replica="gqa", gpu="GPU-aaaaaaaa") == 1
    assert of("gpu_up", replica="", gpu="GPU-bbbbbbbb") == 1
    assert of("source_up", replica="", source="nvml") == 1
    assert of("source_failures_total", source="nvml", reason="lost") == 3


def gpu_names(reading: GpuReading, now: float = NOW) -> set[str]:
    gpus = GpuAssessment(reading=reading, interval_seconds=5.0)
    body, _ = exposition(withhold_stale(FleetAssessment((), gpus=gpus), now), now, "")
    return set(re.findall(r"^kvheadroom_(\w+)", body.decode(), re.MULTILINE)) - {"build_info"}


def test_without_a_driver_there_is_nothing_to_be_up_or_down() -> None:
    assert gpu_names(GpuReading(taken_at=NOW, duration_seconds=0.0, driver_absent=True)) == set()


def test_a_driver_that_does_not_answer_is_a_source_that_is_down() -> None:
    stuck = GpuFailure(None, GpuFailureReason.TIMEOUT, "no answer")
    reading = GpuReading(taken_at=NOW, duration_seconds=5.0, failures=(stuck,))
    assert gpu_names(reading) == {"source_up"}


def test_a_reading_of_gpus_older_than_three_ticks_is_withheld() -> None:
    (gpu, *_) = fleet().gpus.reading.gpus  # type: ignore[union-attr]
    reading = GpuReading(taken_at=NOW, duration_seconds=0.0, gpus=(gpu,))
    assert "gpu_memory_free_bytes" in gpu_names(reading, NOW + 15)
    assert gpu_names(reading, NOW + 15.1) == set()


def test_a_gpu_that_a_replica_is_said_to_run_on_and_is_not_here_is_down() -> None:
    fleet_ = FleetAssessment(
        (),
        gpus=GpuAssessment(
            reading=GpuReading(taken_at=NOW, duration_seconds=0.0),
            interval_seconds=5.0,
            runs=GpuAssignments(not_here=(NotHere("GPU-elsewhere", "r", "is not on this machine"),)),
        ),
    )
    body, _ = exposition(fleet_, NOW, "")
    assert 'kvheadroom_gpu_up{gpu="GPU-elsewhere",replica="r"} 0' in body.decode()


def test_no_series_is_on_the_page_twice() -> None:
    body, _ = exposition(fleet(), NOW, "")
    series = re.findall(r"^(kvheadroom_[^ ]+(?:\{.*\})?) ", body.decode(), re.MULTILINE)
    assert len(series) > 100
    assert len(series) == len(set(series))


def test_two_engines_of_one_server_are_two_pools() -> None:
    assert of("observed_blocks", replica="dp2", engine="0") == 64
    assert of("observed_blocks", replica="dp2", engine="1") == 64


def test_no_value_is_nan_infinite_or_negative() -> None:
    for value in samples(page()).values():
        assert 0 <= value < float("inf")


def test_openmetrics_is_given_to_those_who_ask_for_it_with_the_same_samples() -> None:
    body, content_type = exposition(fleet(), NOW, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    text, plain_type = exposition(fleet(), NOW, "text/plain")
    assert plain_type.startswith("text/plain")
    opened = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
        for s in family.samples
    }
    assert opened == samples(text.decode())


def test_an_empty_fleet_still_says_which_version_runs() -> None:
    body, _ = exposition(FleetAssessment(()), NOW, "")
    assert re.findall(r"^kvheadroom_\w+", body.decode(), re.MULTILINE) == ["kvheadroom_build_info"]


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))
    for metric in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith((".", ")"))
        if "engine" in metric.labels:
            assert metric.labels[:3] == ENGINE_LABELS
    for one, other in itertools.combinations(names, 2):
        assert one != f"{other}_total", "a counter and a gauge may not differ by _total alone"


def test_an_exposition_of_some_metrics_has_their_lines_alone_as_the_whole_page_has_them() -> None:
    whole, _ = exposition(withhold_stale(fleet(), NOW), NOW, "")
    part, _ = exposition(
        withhold_stale(fleet(), NOW),
        NOW,
        "",
        only=frozenset({"kvheadroom_kv_usage_ratio", "kvheadroom_preemptions_total"}),
    )
    wanted = re.compile(rb"(?:# \w+ )?kvheadroom_(?:kv_usage_ratio|preemptions_total)\b")
    expected = [line for line in whole.splitlines() if wanted.match(line)]
    assert part.splitlines() == expected
    assert len(expected) > 4


def test_idle_times_that_differ_by_a_second_have_labels_of_their_own() -> None:
    told = offloading()
    (engine,) = told.engines
    (answer, *_) = engine.warmth.answers
    times = (5.0, 0.5, 1_234_567.0, 1_234_568.0)
    warmth = replace(engine.warmth, answers=tuple(replace(answer, idle_seconds=each) for each in times))
    text = page(shown=FleetAssessment(replicas=(replace(told, engines=(replace(engine, warmth=warmth),)),)))
    shown = [dict(labels) for name, labels in samples(text) if name == f"{PREFIX}session_warm"]
    assert sorted(one["idle_seconds"] for one in shown) == ["0.5", "1234567", "1234568", "5"]
