"""JSON: strict, whole numbers whole, absent null, every intermediate number there."""

import json

import pytest

from kvheadroom.capacity.fleet import withhold_stale
from kvheadroom.outputs.json_report import status_report, to_json
from tests.outputs.fleet import NOW, fleet


def test_the_status_report_has_every_station_of_every_engine() -> None:
    report = json.loads(to_json(status_report(withhold_stale(fleet(), NOW), NOW, "a notice")))
    assert report["notice"] == "a notice"
    assert [(g["gpu"], g["replicas"], g["free_bytes"]) for g in report["gpus"]["gpus"]] == [
        ("GPU-aaaaaaaa", ["gqa", "hub"], 13_167 * 2**20),
        ("GPU-bbbbbbbb", [], 81_913 * 2**20),
        ("MIG-dddddddd", ["dp2"], 3_000 * 2**20),
        ("GPU-10101010", [], 100 * 2**30),
        ("GPU-12121212", ["hbm"], 6_256 * 2**20),
    ]
    assert [(g["accounting"], g["parent"], g["xid_errors"]) for g in report["gpus"]["gpus"]] == [
        ("v2", None, {"79": 2}),
        ("v1", None, None),
        ("v2", "GPU-dddddddd", {}),
        ("host", None, None),
        ("v2", None, None),
    ]
    assert report["gpus"]["divided"] == ["GPU-dddddddd", "GPU-ffffffff"]
    assert report["gpus"]["assigned"][:2] == [
        {"replica": "gqa", "gpu": "GPU-aaaaaaaa", "by": "config", "others_bytes": None},
        {"replica": "hub", "gpu": "GPU-aaaaaaaa", "by": "process", "others_bytes": 5 * 2**30},
    ]
    assert report["gpus"]["not_here"][0]["gpu"] == "GPU-eeeeeeee"
    assert report["gpus"]["unassigned"] == [{"replica": "new", "why": "new is not known to be this machine"}]
    assert report["gpus"]["failures"][0]["reason"] == "lost"
    assert report["config_fault"] == "/etc/kvheadroom.yaml: replicas[0].url: no"
    gqa, dp2, hub, down, new, offload, hbm, tight = report["replicas"]
    assert [len(r["engines"]) for r in report["replicas"]] == [1, 2, 1, 0, 0, 1, 1, 1]
    states = [r["state"] for r in report["replicas"]]
    assert states == ["serving", "serving", "serving", "down", None, "serving", "serving", "serving"]
    assert gqa["restarts_total"] == 1
    assert gqa["events"][0]["kind"] == "restarted"
    engine = gqa["engines"][0]
    assert engine["predicted"]["pool_tokens"] == engine["observed"]["pool_tokens"] == 4096
    assert engine["binding_limit"]["limit"] is None
    assert "at the first scrape" in engine["binding_limit"]["why"]
    assert engine["states"] == [
        {"state": "thrash", "why": "24 preemptions in a minute, and <26> requests are there"}
    ]
    assert hub["engines"][0]["binding_limit"] == {"limit": "none", "why": "no request waits"}
    assert hub["engines"][0]["states"] == []
    assert engine["difference"] == {"pool_tokens": 0, "blocks": 0, "pool_bytes": 0, "ratio": 0}
    assert engine["facts"]["kv_cache_memory_bytes"] == {
        "value": 4194304,
        "origin": "echoed by the engine",
        "assumed": False,
    }
    assert [e["observed"]["blocks"] for e in dp2["engines"]] == [64, 64]
    assert hub["engines"][0]["predicted"]["pool_tokens"] is None
    assert hub["engines"][0]["missing_facts"][0]["fact"] == "model_files"
    assert (down["stale"], down["sources"][0]["reason"]) == (True, "refused")
    assert (new["last_success_at"], new["sources"]) == (None, [])
    assert engine["memory"] is None
    ledgers = {(one["gpu"], one["replica"]): one for one in report["gpus"]["ledgers"]}
    assert (
        ledgers["GPU-aaaaaaaa", "gqa"]["unknown"]
        == "2 replicas run on it, and which memory is whose is not known"
    )
    on_it = ledgers["GPU-12121212", "hbm"]
    assert sum(on_it["terms"].values()) == on_it["total_bytes"] == 81_559 * 2**20
    assert (on_it["terms"]["kv_pool"], on_it["unknown"], on_it["note"]) == (
        2_300_000 * 32 * 1024,
        None,
        None,
    )
    memory = hbm["engines"][0]["memory"]
    [found] = report["memory_findings"]
    assert (found["finding"], found["replica"], found["engine"], found["gpu"]) == (
        "pool_above_demand",
        "hbm",
        "0",
        None,
    )
    assert found["bytes"] == (2_300_000 - 1 - 16 * 64) * 32 * 1024
    assert found["gpu_memory_utilization"] is None
    assert "fill 1,024 of 2,299,999 blocks" in found["why"]
    assert f"--kv-cache-memory-bytes {1025 * 32 * 1024}" in found["way_out"]
    total = 85_028_896_768
    assert memory["total_bytes"] == total
    assert memory["hbm"] == {
        "as_sold_bytes": 80 * 10**9,
        "cuda_bytes": total,
        "nvml_bytes": 81_559 * 2**20,
    }
    assert memory["problem"] is None
    assert sum(term["predicted_bytes"] for term in memory["terms"]) == total
    assert sum(term["observed_bytes"] or 0 for term in memory["terms"]) == total
    # ceil(92% of the memory), less 4,065,536 B of weights; of it the pool's blocks are no overhead.
    left = 78_226_585_027 - 4_065_536
    own = left - 2_300_000 * 32_768
    overhead = memory["terms"][2]
    estimate = sum(memory["overhead_parts"].values())
    assert list(memory["overhead_parts"]) == [
        "context",
        "activations",
        "workspaces",
        "encoder",
        "cuda_graphs",
    ]
    assert overhead == {
        "term": "overhead",
        "predicted_bytes": estimate,
        "predicted_from": "estimated",
        "predicted_basis": "assumed",
        # 2.9% of the GPU's memory less is more than all of it.
        "predicted_low_bytes": 0,
        "predicted_high_bytes": estimate + round(0.012 * total),
        "calibrated_bytes": 1_100_000_000,
        "observed_bytes": own,
        "observed_from": "what the pool leaves, with the rounding",
        "uncertainty_bytes": 32 * 1024 - 1,
        "difference_bytes": own - estimate,
        "calibrated_difference_bytes": own - 1_100_000_000,
    }
    assert memory["unexplained_overhead_bytes"] == overhead["difference_bytes"]
    # The utilization was said, the memory is the catalogue's.
    assert (memory["terms"][0]["predicted_basis"], memory["terms"][0]["predicted_low_bytes"]) == (
        "assumed",
        None,
    )
    weights = memory["terms"][1]
    assert weights["predicted_basis"] == "derived"
    assert weights["predicted_low_bytes"] == weights["predicted_high_bytes"] == weights["predicted_bytes"]
    assert sum(term["calibrated_bytes"] for term in memory["terms"]) == total
    blocks, fewest, most = (
        (left - learned) // 32_768 for learned in (1_100_000_000, 1_150_032_767, 1_049_967_240)
    )
    assert (blocks, fewest, most) == (2_353_592, 2_352_065, 2_355_119)
    assert hbm["engines"][0]["calibrated"] == {
        "pool_tokens": blocks * 32,
        "blocks": blocks,
        "pool_bytes": blocks * 32_768,
        # Of 64 blocks each.
        "max_concurrency": blocks / 64,
        "fewest_blocks": fewest,
        "most_blocks": most,
        "overhead_bytes": 1_100_000_000,
        # One block of 32 KiB less one byte beside the lowest and the highest of three.
        "low_bytes": 1_050_000_007 - 32_767,
        "high_bytes": 1_150_000_000 + 32_767,
        "samples": 3,
        # Of two logs that told them: the middle.
        "measured_weights_bytes": 4_065_537,
        "reliability": "good",
        "clamped": None,
        "note": "learned from 3 starts like it (1.05 to 1.15 GB)",
        "cannot_predict": [],
    }
    assert hbm["engines"][0]["own_start"] == {
        "start": "hbm/0/1795986400",
        "overhead_bytes": own,
        "uncertainty_bytes": 32_767,
        "excluded": None,
        "detail": None,
        "why_alone": None,
    }
    session = hbm["engines"][0]["sessions"][0]
    assert (session["calibrated"], session["calibrated_fewest"], session["calibrated_most"]) == (
        blocks / 32,
        fewest / 32,
        most / 32,
    )
    (cut,) = tight["engines"]
    assert (cut["calibrated"]["clamped"], cut["calibrated"]["blocks"]) == ("nothing_left", None)
    assert cut["calibrated"]["overhead_bytes"] == left
    assert {term["calibrated_bytes"] for term in cut["memory"]["terms"]} == {None}
    assert cut["own_start"]["excluded"] == "impossible"
    assert (gqa["engines"][0]["calibrated"], gqa["engines"][0]["own_start"]) == (None, None)
    assert gqa["excluded_starts"] == {"pool_by_flag": 2}
    assert report["calibration"] == {
        "path": "/var/lib/kvheadroom/calibration.json",
        "up": False,
        "reason": "no_permission",
        "detail": "/var/lib/kvheadroom/calibration.json: <Permission> denied",
        "note": None,
        "samples": 5,
    }
    warmth = offload["engines"][0]["warmth"]
    assert warmth["host_tier"]["num_chunks"] == 256
    assert warmth["host_tier_unknown"] is None
    assert [(one["tier"], one["bytes"], one["tokens"]) for one in warmth["capacities"]] == [
        ("hbm", 64 * 32_768, 2048),
        ("host", 256 * 32_768, 8192),
    ]
    assert warmth["hbm_blocks"] == {"referenced": 0, "cached": 63, "blank": 0}
    assert [(one["tier"], one["idle_seconds"], one["answer"]) for one in warmth["answers"]] == [
        ("hbm", 5.0, "yes"),
        ("hbm", 2700.0, "no"),
        ("host", 5.0, "yes"),
        ("host", 2700.0, "yes"),
    ]
    assert warmth["evicted_block_idle_seconds"] == {"1m": 12.5}
    assert [one["finding"] for one in warmth["findings"]] == [
        "tier_too_small",
        "tier_above_shm",
        "evicted_by_churn",
        "finds_less_than_before",
    ]
    reuse = warmth["reuse"]
    assert (reuse["found_in_pool_ratio"], reuse["found_outside_ratio"]) == (0.51, 0.125)
    assert [one["tier_bytes"] for one in reuse["expected"]] == [0, 8_388_608, 64 * 10**9]
    assert [one["ratio"] for one in reuse["expected"]] == [0.51, 0.625, None]
    assert reuse["last_hour"] == {"found_ratio": 0.4, "expected_ratio": 0.62}
    assert warmth["reuse_unknown"] is None
    assert warmth["host_need"] == {"low_bytes": 2**23, "high_bytes": 2**23, "in_shared_memory": True}
    use = warmth["host_use"]
    assert (use["processes"], use["processes_shared_bytes"], use["shm_total_bytes"]) == (3, 17_000_000, 2**22)
    assert warmth["lmcache_used"] == {"host_bytes": 3_000_000_000, "disk_bytes": 5_000_000_000}
    assert gqa["engines"][0]["warmth"]["lmcache_used"] is None
    assert gqa["engines"][0]["warmth"]["host_need"] is None
    assert gqa["engines"][0]["warmth"]["host_use"] is None
    basis = {"basis": "prefix_cache_queries", "doubt": None}
    assert offload["engines"][0]["hit_windows"] == [
        {
            "window": "1m",
            "seconds": 60,
            "prefix_cache": {"ratio": 0, "hit_tokens": 0, "lookup_tokens": 11_520, **basis},
            "external_prefix_cache": {
                "ratio": pytest.approx(2 / 3),
                "hit_tokens": 7_680,
                "lookup_tokens": 11_520,
                **basis,
            },
            "lmcache": {
                "ratio": 0.25,
                "hit_tokens": 8_640,
                "lookup_tokens": 34_560,
                "basis": "lmcache:num_lookup_tokens",
                "doubt": None,
            },
        }
    ]
    assert gqa["engines"][0]["hit_windows"] == []
    assert gqa["kv_usage_of_engines"] is None
    assert dp2["kv_usage_of_engines"] == {"max_ratio": 0, "mean_ratio": 0}
    assert gqa["engines"][0]["observed"]["unknown"] is None
    assert gqa["engines"][0]["token_occupancy"] == {
        "estimate_ratio": None,
        # 17 requests hold 125 of 127 blocks: at most 17 x 31 of their 4,000 tokens are empty.
        "least_ratio": pytest.approx((4_000 - 17 * 31) / 4_064),
        "most_ratio": pytest.approx(4_000 / 4_064),
        "unknown": "running requests are not as long as those that finished, or share blocks",
    }


def test_whole_numbers_carry_no_point_and_others_keep_theirs() -> None:
    assert to_json({"a": 2.0, "b": [0.5, 1e15], "c": None, "d": True}) == (
        '{"a": 2, "b": [0.5, 1000000000000000], "c": null, "d": true}'
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": value})
