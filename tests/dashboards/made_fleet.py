"""A fleet that was made up: every family that kvheadroom exports, for as many engines as wanted, over one hour.

For looking at dashboards with many engines, of which no recording is at hand. The first engine fills up and preempts, the second is
about to, the last server of eight or more is down; the rest is busy and well.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.exported_history import Series, always

TARGET = {"job": "kvheadroom", "instance": "gpu-7:9878"}
SPAN = 3600.0
LENGTHS, IDLE_TIMES = (32_768, 131_072, 262_144), (300, 2_700)
MODELS = ("glm-5.3", "qwen3-235b", "llama-3.3-70b")
TOTAL, WEIGHTS, OVERHEAD = 191_512_379_392, 121_800_000_000, 11_300_000_000
BLOCK_TOKENS, BYTES_PER_TOKEN, RESERVED = 64, 47_700, 681_574_400
UTILIZATION = 0.92
HOST_TIER = 512 * 2**30


@dataclass(frozen=True, slots=True)
class Engine:
    """One of the fleet.

    Attributes:
        place: its number in the fleet, from 0.
    """

    place: int
    replica: str
    engine: str
    model_name: str

    @property
    def labels(self) -> dict[str, str]:
        return {**TARGET, "replica": self.replica, "engine": self.engine, "model_name": self.model_name}

    @property
    def predicted_blocks(self) -> int:
        pool = TOTAL * UTILIZATION - WEIGHTS - OVERHEAD
        return int(pool // (BYTES_PER_TOKEN * BLOCK_TOKENS))

    @property
    def blocks(self) -> int:
        off = 1 + 0.03 * math.sin(self.place) - (0.14 if self.place % 8 == 3 else 0)
        return int(self.predicted_blocks * off)

    def usage(self, at: float) -> float:
        """At so many seconds before the end (below 0)."""
        wave = 0.06 * math.sin(at / 170 + self.place) + 0.03 * math.sin(at / 37 + 2 * self.place)
        if self.place % 8 == 0:
            return min(0.995, max(0.05, 0.35 + 0.75 * (1 + at / SPAN) + wave))
        if self.place % 8 == 1:
            return 0.72 + 0.12 * (1 + at / SPAN) + wave
        return max(0.03, 0.18 + 0.06 * (self.place % 6) + 2 * wave)

    def full(self, at: float) -> bool:
        return self.usage(at) > 0.985

    def preemptions(self, at: float) -> int:
        """Since the hour began, one for each 40 s that it was full."""
        return sum(self.full(-SPAN + 40 * i) for i in range(int((at + SPAN) // 40) + 1))


def engines(number: int) -> list[Engine]:
    """Servers of one engine each, but every fifth has two."""
    found: list[Engine] = []
    replicas = 0
    while len(found) < number:
        model = MODELS[replicas % len(MODELS)]
        name = f"{model.split('-')[0]}-{replicas // len(MODELS) + 1}"
        for rank in range(2 if replicas % 5 == 1 else 1):
            found.append(Engine(len(found), name, str(rank), model))
        replicas += 1
    return found[:number]


def made_fleet(number: int, ends_at: float) -> list[Series]:
    """All series of so many engines, in the hour that ends then (unix seconds)."""
    fleet = engines(number)
    series = [*_of_daemon(ends_at)]
    for one in fleet:
        series += _of_engine(one)
        series += _of_memory(one)
        series += _of_warmth(one)
        series += _of_sizes(one)
    for replica in dict.fromkeys(one.replica for one in fleet):
        [first, *_] = [one for one in fleet if one.replica == replica]
        series += _of_replica(first, ends_at)
    if number >= 8:
        series += _of_server_that_is_down()
    return series


def _gauge(labels: Mapping[str, str], name: str, value: Callable[[float], float | None]) -> Series:
    def text(at: float) -> str | None:
        found = value(at)
        return None if found is None else f"{found:.10g}"

    return {"__name__": f"kvheadroom_{name}", **labels}, text


def _fixed(labels: Mapping[str, str], name: str, value: float) -> Series:
    return {"__name__": f"kvheadroom_{name}", **labels}, always(f"{value:.10g}")


def _counter(labels: Mapping[str, str], name: str, per_second: float) -> Series:
    return _gauge(labels, name, lambda at: 5e6 * per_second + per_second * (SPAN + at))


def _flag(labels: Mapping[str, str], name: str, holds: Callable[[float], bool]) -> Series:
    return _gauge(labels, name, lambda at: 1.0 if holds(at) else None)


def _blocks_of(length: int) -> int:
    return -(-length // BLOCK_TOKENS)


def _of_engine(one: Engine) -> Iterator[Series]:
    labels, usable = one.labels, one.blocks - 1
    for origin, blocks in (("predicted", one.predicted_blocks), ("observed", one.blocks)):
        yield _fixed(labels, f"{origin}_pool_tokens", blocks * BLOCK_TOKENS)
        yield _fixed(labels, f"{origin}_blocks", blocks)
        yield _fixed(labels, f"{origin}_block_size_tokens", BLOCK_TOKENS)
        yield _fixed(labels, f"{origin}_pool_bytes", blocks * BLOCK_TOKENS * BYTES_PER_TOKEN)
        for length in LENGTHS:
            yield _fixed(
                labels | {"session_tokens": str(length)}, f"{origin}_sessions", blocks / _blocks_of(length)
            )
    yield _fixed(labels, "predicted_bytes_per_token", BYTES_PER_TOKEN)
    yield _fixed(labels | {"basis": "kv_cache_size_tokens"}, "observed_pool_basis", 1)

    def used(at: float) -> int:
        return round(one.usage(at) * usable)

    for length in LENGTHS:
        of_length = labels | {"session_tokens": str(length)}
        each = _blocks_of(length)
        yield _gauge(of_length, "sessions_in_use", lambda at, each=each: used(at) / each)  # type: ignore[misc]
        yield _gauge(
            of_length,
            "sessions_headroom",
            lambda at, each=each: (usable - used(at)) // each,  # type: ignore[misc]
        )
    yield _gauge(labels, "kv_usage_ratio", one.usage)
    yield _gauge(labels, "used_blocks", used)
    yield _gauge(labels, "free_blocks", lambda at: usable - used(at))
    yield _gauge(labels, "used_tokens", lambda at: used(at) * BLOCK_TOKENS)
    yield _gauge(labels, "free_tokens", lambda at: (usable - used(at)) * BLOCK_TOKENS)
    yield _gauge(labels, "token_occupancy_estimate_ratio", lambda at: 0.9 * one.usage(at))
    yield _gauge(labels, "requests_running", lambda at: round(40 * one.usage(at)))
    yield _gauge(labels, "requests_waiting", lambda at: _waiting(one, at))
    yield _gauge(labels | {"reason": "capacity"}, "requests_waiting_by_reason", lambda at: _waiting(one, at))
    yield _fixed(labels | {"reason": "deferred"}, "requests_waiting_by_reason", 0)
    yield _gauge(labels, "preemptions_total", one.preemptions)
    yield _counter(labels, "prompt_tokens_total", 4_000 + 150 * (one.place % 7))
    yield _counter(labels, "generation_tokens_total", 900 + 40 * (one.place % 7))
    yield _flag(labels | {"limit": "none"}, "binding_limit", lambda at: _waiting(one, at) == 0)
    yield _flag(labels | {"limit": "kv_pool"}, "binding_limit", lambda at: _waiting(one, at) > 0)
    yield _flag(labels | {"state": "preempting"}, "engine_state", one.full)
    for horizon, share in (("30s", 0.3), ("2m", 0.6), ("10m", 1.0)):
        yield _gauge(
            labels | {"horizon": horizon},
            "forecast_preemption_probability_ratio",
            lambda at, share=share: _probability(one, at, share),  # type: ignore[misc]
        )
    for name, times in (("", 1.0), ("_earliest", 0.5), ("_latest", 1.8)):
        yield _gauge(
            labels,
            f"forecast_exhaustion{name}_seconds",
            lambda at, times=times: _seconds_left(one, at, times),  # type: ignore[misc]
        )
    yield _gauge(labels, "forecast_peak_blocks", lambda at: 1.35 * used(at))
    yield _gauge(labels, "prefill_backlog_tokens", lambda at: 6_000 * _waiting(one, at))
    yield _flag(
        labels | {"reason": "watched_too_short"},
        "forecast_unavailable",
        lambda at: one.place % 8 == 5 and at < -3500,
    )
    yield _gauge(labels, "sample_age_seconds", lambda at: 2 + math.sin(at + one.place))
    yield _fixed(labels | {"fact": "attention_backend"}, "assumed_fact", 1)
    if one.place % 8 == 6:
        yield _fixed(labels | {"fact": "weights_bytes"}, "missing_fact", 1)
    if one.full(0):
        alert = {"alertname": "KvHeadroomPreempting", "alertstate": "firing", "severity": "warning"}
        firing = always(1)
        yield {"__name__": "ALERTS", **alert, **labels}, lambda at: firing(at) if at > -500 else None


def _waiting(one: Engine, at: float) -> int:
    return max(0, round(300 * (one.usage(at) - 0.95)))


def _probability(one: Engine, at: float, share: float) -> float | None:
    if one.place % 8 == 5 and at < -3500:
        return None
    return min(1.0, max(0.0, share * (one.usage(at) - 0.5) / 0.4))


def _seconds_left(one: Engine, at: float, times: float) -> float | None:
    seconds = times * max(0.0, 2_400 * (0.97 - one.usage(at)))
    return seconds if seconds < 600 else None


def _of_memory(one: Engine) -> Iterator[Series]:
    labels = one.labels
    of_block = BYTES_PER_TOKEN * BLOCK_TOKENS
    budget = TOTAL * UTILIZATION
    observed = budget - WEIGHTS - one.blocks * of_block
    learned = observed + 150e6 * math.sin(3 * one.place)
    calibrated_blocks = int((budget - WEIGHTS - learned) // of_block)
    for origin, overhead, blocks in (
        ("predicted", float(OVERHEAD), one.predicted_blocks),
        ("calibrated", learned, calibrated_blocks),
    ):
        terms = {
            "outside_utilization": TOTAL - budget,
            "weights": WEIGHTS,
            "overhead": overhead,
            "kv_pool": blocks * of_block,
        }
        terms["block_rounding"] = TOTAL - sum(terms.values())
        for term, value in terms.items():
            yield _fixed(labels | {"term": term}, f"{origin}_memory_bytes", value)
    yield _fixed(labels | {"term": "overhead"}, "observed_memory_bytes", observed)
    yield _fixed(labels | {"term": "kv_pool"}, "observed_memory_bytes", one.blocks * of_block)
    yield _fixed(labels, "unexplained_overhead_bytes", observed - OVERHEAD)
    for part, share in (
        ("context", 0.12),
        ("activations", 0.58),
        ("workspaces", 0.1),
        ("encoder", 0.0),
        ("cuda_graphs", 0.2),
    ):
        yield _fixed(labels | {"part": part}, "predicted_overhead_bytes", share * OVERHEAD)
    yield _fixed(labels, "calibrated_pool_tokens", calibrated_blocks * BLOCK_TOKENS)
    yield _fixed(labels, "calibrated_blocks", calibrated_blocks)
    yield _fixed(labels, "calibrated_pool_bytes", calibrated_blocks * of_block)
    for length in LENGTHS:
        yield _fixed(
            labels | {"session_tokens": str(length)},
            "calibrated_sessions",
            calibrated_blocks / _blocks_of(length),
        )
    yield _fixed(labels, "calibrated_overhead_low_bytes", learned - 4e8)
    yield _fixed(labels, "calibrated_overhead_high_bytes", learned + 4e8)
    yield _fixed(labels, "calibration_samples", 1 + one.place % 5)
    trust = "one_sample" if one.place % 5 == 0 else "spread" if one.place % 8 == 3 else "good"
    yield _fixed(labels | {"reliability": trust}, "calibration_reliability", 1)
    if one.place % 8 == 3:
        yield _fixed(labels | {"bound": "nothing_left"}, "calibration_clamped", 1)
        yield _fixed(labels | {"gpu": "", "finding": "room_outside_budget"}, "memory_finding_bytes", 7.5e9)
    yield _fixed(
        labels
        | {
            "start": f"{one.replica}/{one.engine}/1799990000",
            "geometry": "GlmMoeDsaForCausalLM 0123456789ab",
            "weight_format": "modelopt_fp4",
            "gpu": "B200",
            "parallelism": "tp4",
            "release": "0.33.0",
            "settings": "kv_cache_dtype=fp8 max_num_batched_tokens=8192 max_num_seqs=1024",
            "edition": "1",
        },
        "overhead_sample_bytes",
        observed,
    )


def _of_sizes(one: Engine) -> Iterator[Series]:
    labels = one.labels
    for size, low, high in ((0, 0.5, 0.52), (64 * 10**9, 0.61, 0.66), (256 * 10**9, 0.7, 0.93)):
        of_size = labels | {"tier_bytes": str(size)}
        yield _fixed(of_size, "expected_hit_low_ratio", low)
        yield _fixed(of_size, "expected_hit_high_ratio", high)
        if high - low <= 0.1:
            yield _fixed(of_size, "expected_hit_ratio", (low + high) / 2)
    for tier, found in (("hbm", 0.51), ("host", 0.08)):
        yield _fixed(labels | {"cache_tier": tier}, "prompt_tokens_found_ratio", found)
    yield _fixed(labels, "reuse_observed_seconds", 50_400)
    if one.place % 2 == 0:
        yield _fixed(labels, "predicted_tier_host_bytes", HOST_TIER)
        yield _fixed({**TARGET, "replica": one.replica}, "observed_host_shared_bytes", 2.1 * HOST_TIER)
    if one.place % 4 == 2:
        yield _fixed(labels | {"cache_tier": "host"}, "tier_used_bytes", 300 * 2**30)
        for window in ("1m", "5m", "1h"):
            yield _fixed(labels | {"window": window}, "lmcache_hit_ratio", 0.7)


def _of_warmth(one: Engine) -> Iterator[Series]:
    labels = one.labels
    tiers = {"hbm": one.blocks * BLOCK_TOKENS * BYTES_PER_TOKEN, "host": HOST_TIER}
    if one.place % 2:
        del tiers["host"]
    referenced = one.usage
    for content, share in (
        ("referenced", referenced),
        ("cached", lambda at: 0.9 * (1 - referenced(at))),
        ("blank", lambda at: 0.1 * (1 - referenced(at))),
    ):
        yield _gauge(
            labels | {"content": content},
            "hbm_blocks",
            lambda at, share=share: share(at) * one.blocks,  # type: ignore[misc]
        )
    for tier, size in tiers.items():
        of_tier = labels | {"cache_tier": tier}
        tokens = size / BYTES_PER_TOKEN
        yield _fixed(of_tier, "tier_capacity_bytes", size)
        yield _fixed(of_tier, "tier_capacity_tokens", tokens)
        stays = 700 * (1 + one.place % 4) * (6 if tier == "host" else 1)
        for window in ("1m", "5m", "1h"):
            of_window = of_tier | {"window": window}
            yield _gauge(
                of_window,
                "retention_low_seconds",
                lambda at, stays=stays: stays * (1.1 - one.usage(at)),  # type: ignore[misc]
            )
            yield _gauge(
                of_window,
                "retention_high_seconds",
                lambda at, stays=stays: 2.2 * stays * (1.1 - one.usage(at)),  # type: ignore[misc]
            )
        for length in LENGTHS:
            of_length = of_tier | {"session_tokens": str(length)}
            yield _fixed(of_length, "tier_sessions", tokens / length)
            for idle in IDLE_TIMES:
                low = stays * (1.1 - one.usage(0))
                warm = "yes" if idle < low else "perhaps" if idle < 2.2 * low else "no"
                yield _fixed(of_length | {"idle_seconds": str(idle), "warm": warm}, "session_warm", 1)
        yield _counter(of_tier, "prefill_saved_tokens_total", 700 if tier == "hbm" else 1_500)
        yield _fixed(of_tier, "prefill_saved_seconds", 61_000 if tier == "hbm" else 130_000)
    for window in ("1m", "5m", "1h"):
        of_window = labels | {"window": window}
        dip = 0.2 if window == "5m" else 0.0
        yield _gauge(
            of_window,
            "prefix_cache_hit_ratio",
            lambda at, dip=dip: 0.55 - dip * one.usage(at) - 0.02 * (one.place % 9),  # type: ignore[misc]
        )
        yield _fixed(of_window, "evicted_block_idle_seconds", 900 + 60 * (one.place % 9))
        yield _gauge(
            of_window,
            "prefill_tokens_per_second",
            lambda at: 9_000 * (1.2 - one.usage(at)),
        )
        if "host" in tiers:
            yield _gauge(
                of_window,
                "external_prefix_cache_hit_ratio",
                lambda at: 0.72 - 0.3 * one.usage(at),
            )
            yield _fixed(of_window, "offload_load_bytes_per_second", 11e9 + 2e8 * one.place)
    asked = 4_000 + 150 * (one.place % 7)
    yield _counter(labels, "prefix_cache_queries_tokens_total", asked)
    yield _counter(labels, "prefix_cache_hits_tokens_total", 0.5 * asked)
    for length in LENGTHS:
        of_length = labels | {"session_tokens": str(length)}
        yield _gauge(
            of_length | {"by": "recompute"},
            "resume_seconds",
            lambda at, length=length: length / (9_000 * (1.2 - one.usage(at))),  # type: ignore[misc]
        )
        if "host" in tiers:
            yield _fixed(of_length | {"by": "reload"}, "resume_seconds", length * BYTES_PER_TOKEN / 11e9)
    if "host" in tiers:
        yield _counter(labels, "external_prefix_cache_queries_tokens_total", 0.5 * asked)
        yield _counter(labels, "external_prefix_cache_hits_tokens_total", 0.3 * asked)
        yield _counter(labels, "offload_store_bytes_total", 1.4e8)
        yield _counter(labels, "offload_load_bytes_total", 0.9e8)
        yield _fixed(labels, "offload_allocation_failures_total", 0)
        if one.place % 8 == 4:
            yield _flag(labels | {"finding": "tier_not_paying"}, "warm_finding", lambda at: at > -1500)


def _of_replica(first: Engine, ends_at: float) -> Iterator[Series]:
    labels = {**TARGET, "replica": first.replica}
    restarted = first.place % 8 == 4
    yield _fixed(labels | {"source": "config", "team": "chat"}, "replica_info", 1)
    yield _flag(labels | {"state": "starting"}, "replica_state", lambda at: restarted and -1900 < at <= -1600)
    yield _flag(
        labels | {"state": "serving"}, "replica_state", lambda at: not (restarted and -1900 < at <= -1600)
    )
    yield _gauge(labels, "replica_restarts_total", lambda at: float(restarted and at > -1900))
    yield _gauge(
        labels, "scrape_duration_seconds", lambda at: 0.012 + 0.004 * math.sin(at / 60 + first.place)
    )
    for source in ("metrics", "version", "models", "model_files"):
        yield _fixed(labels | {"source": source}, "source_up", 1)
    yield _gauge(
        labels | {"source": "metrics", "reason": "timeout"},
        "source_failures_total",
        lambda at: float(3 * (restarted and at > -1900)),
    )
    yield _fixed(labels | {"reason": "contradiction"}, "page_problems_total", 0)
    if first.place % 8 == 6:
        yield _fixed(labels | {"metric": "vllm:num_preemptions_total"}, "lost_metric", 1)
    yield _fixed(
        labels | {"reason": "pool_by_flag"}, "calibration_excluded_starts_total", first.place % 3 == 0
    )
    others = 11e9 if first.place % 8 == 3 else 1e9
    for rank in range(4):
        gpu = f"GPU-{first.place:04x}{rank}7c2-5b0e-4a1f-9d3c-7f0e1d2c3b4a"
        of_gpu = labels | {"gpu": gpu}
        pool = first.blocks * BYTES_PER_TOKEN * BLOCK_TOKENS
        rest = TOTAL * UTILIZATION - WEIGHTS - pool
        whole = TOTAL + RESERVED
        free = whole - RESERVED - others - WEIGHTS - pool - rest
        terms = {
            "reserved": RESERVED,
            "others": others,
            "weights": WEIGHTS,
            "kv_pool": pool,
            "rest": rest,
            "free": free,
        }
        for term, value in terms.items():
            yield _fixed(of_gpu | {"term": term}, "gpu_memory_term_bytes", value)
        yield _fixed(of_gpu, "gpu_memory_total_bytes", whole)
        yield _fixed(of_gpu, "gpu_memory_reserved_bytes", RESERVED)
        yield _fixed(of_gpu, "gpu_memory_used_bytes", whole - RESERVED - free)
        yield _fixed(of_gpu, "gpu_memory_free_bytes", free)
        yield _fixed(of_gpu, "gpu_memory_others_bytes", others)
        yield _fixed(of_gpu, "gpu_up", 1)
        yield _fixed(of_gpu | {"by": "config"}, "gpu_assignment", 1)
        yield _gauge(of_gpu, "gpu_memory_changed_timestamp_seconds", lambda at: ends_at + at - 20)
        info = {"name": "NVIDIA B200", "index": str(rank), "memory": "v2", "source": "dcgm_exporters[0]"}
        empty = {"parent": "", "gpu_instance": "", "compute_instance": "", "host": f"node-{first.place}"}
        yield _fixed({**TARGET, "gpu": gpu, **info, **empty}, "gpu_info", 1)
        if first.place % 8 == 3 and rank == 0:
            yield _fixed({**TARGET, "gpu": gpu, "xid": "31"}, "gpu_xid_errors_total", 2)
            yield _fixed(
                of_gpu | {"engine": "", "model_name": "", "finding": "foreign_memory"},
                "memory_finding_bytes",
                others,
            )


def _of_server_that_is_down() -> Iterator[Series]:
    labels = {**TARGET, "replica": "llama-old"}
    yield _fixed(labels | {"source": "file_sd_configs[0]"}, "replica_info", 1)
    yield _fixed(labels | {"state": "down"}, "replica_state", 1)
    yield _fixed(labels | {"source": "metrics"}, "source_up", 0)
    yield _counter(labels | {"source": "metrics", "reason": "refused"}, "source_failures_total", 0.2)
    name = {"alertname": "KvHeadroomTargetDown", "alertstate": "firing", "severity": "critical"}
    yield {"__name__": "ALERTS", **name, **labels}, always(1)


def _of_daemon(ends_at: float) -> Iterator[Series]:
    yield _fixed(TARGET | {"version": "0.1.0"}, "build_info", 1)
    yield _fixed(TARGET, "config_last_reload_successful", 1)
    yield _gauge(TARGET, "config_last_reload_success_timestamp_seconds", lambda at: ends_at - 90_000)
    listed = TARGET | {"source": "file_sd_configs[0]"}
    yield _fixed(listed, "discovery_targets", 1)
    yield _fixed(listed, "discovery_left_out_targets", 1)
    yield _gauge(listed, "discovery_last_success_timestamp_seconds", lambda at: ends_at + at - 12)
    yield _fixed(TARGET | {"replica": "", "source": "nvml"}, "source_up", 1)
    yield _fixed(TARGET | {"replica": "", "source": "file_sd_configs[0]"}, "source_up", 1)
    yield _fixed(TARGET | {"replica": "", "source": "nvml", "reason": "timeout"}, "source_failures_total", 0)
