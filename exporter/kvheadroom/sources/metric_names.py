"""vLLM's names for what is wanted of a page, from 0.6.6 on, each with the field of `EngineSnapshot` it fills.

Read in the source of 32 releases from 0.6.6 to 0.33.0 (`vllm/v1/metrics/loggers.py`, `vllm/engine/metrics.py` of V0). What a
new release renames is a line here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

INFO_METRIC = "cache_config_info"
TIER_INFO = "kv_offload_config_info"
SLEEP_STATE = "engine_sleep_state"
LARGEST_WHOLE = 2**53
"""Beyond this a float, and with it every metric, no longer tells whole numbers apart."""

_MOST_BYTES = 2.0**63
"""Of counters of bytes: eight GPUs that move 10 GB/s each are beyond 2^53 in 31 hours, and what a float rounds there matters to nobody."""

# Rounding may push a full pool a hair over 1.
_FULL = 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class WantedMetric:
    """One name of one figure.

    Attributes:
        metric: the sample's name without `vllm:`.
        field: of EngineSnapshot.
        when: label and value that a sample must have, None where every sample of the name is meant.
        most: the largest value that can be true.
        releases: which show it, for people.
        seldom: asked for once a minute.
        by_flag: a server has it with some flag only, so that its absence tells nothing.
    """

    metric: str
    field: str
    when: tuple[str, str] | None = None
    most: float = LARGEST_WHOLE
    releases: str = "all"
    seldom: bool = False
    by_flag: bool = False


# Where a release says one figure under two names, the preferred one stands first.
WANTED_METRICS: tuple[WantedMetric, ...] = (
    WantedMetric("kv_cache_usage_perc", "kv_usage_ratio", most=_FULL, releases="from 0.9.2"),
    WantedMetric("gpu_cache_usage_perc", "kv_usage_ratio", most=_FULL, releases="to 0.10.2, hidden in 0.11"),
    WantedMetric("num_requests_running", "requests_running"),
    WantedMetric("num_requests_waiting", "requests_waiting"),
    WantedMetric(
        "num_requests_waiting_by_reason",
        "requests_waiting_capacity",
        when=("reason", "capacity"),
        releases="from 0.20",
    ),
    WantedMetric(
        "num_requests_waiting_by_reason",
        "requests_waiting_deferred",
        when=("reason", "deferred"),
        releases="from 0.20",
    ),
    WantedMetric("num_preemptions_total", "preemptions_total", releases="V0, and V1 from 0.8"),
    WantedMetric("prefix_cache_queries_total", "prefix_cache_queries_total", releases="from 0.9.2"),
    WantedMetric(
        "gpu_prefix_cache_queries_total",
        "prefix_cache_queries_total",
        releases="V1 from 0.7.3 to 0.10.2, hidden in 0.11; in blocks up to 0.8",
    ),
    WantedMetric("prefix_cache_hits_total", "prefix_cache_hits_total", releases="from 0.9.2"),
    WantedMetric(
        "gpu_prefix_cache_hits_total",
        "prefix_cache_hits_total",
        releases="V1 from 0.7.3 to 0.10.2, hidden in 0.11; in blocks up to 0.8",
    ),
    WantedMetric(
        "external_prefix_cache_queries_total", "external_prefix_cache_queries_total", releases="from 0.11"
    ),
    WantedMetric(
        "external_prefix_cache_hits_total", "external_prefix_cache_hits_total", releases="from 0.11"
    ),
    WantedMetric("prompt_tokens_total", "prompt_tokens_total"),
    WantedMetric(
        "prompt_tokens_by_source_total",
        "prompt_tokens_local_compute_total",
        when=("source", "local_compute"),
        releases="from 0.16",
    ),
    WantedMetric(
        "prompt_tokens_by_source_total",
        "prompt_tokens_local_cache_hit_total",
        when=("source", "local_cache_hit"),
        releases="from 0.16",
    ),
    WantedMetric(
        "prompt_tokens_by_source_total",
        "prompt_tokens_external_kv_transfer_total",
        when=("source", "external_kv_transfer"),
        releases="from 0.16",
    ),
    WantedMetric("generation_tokens_total", "generation_tokens_total"),
    # Flat names are absent until the first transfer, while the older ones stand there at 0.
    WantedMetric(
        "kv_offload_load_bytes_total",
        "offload_load_bytes_total",
        most=_MOST_BYTES,
        releases="from 0.24",
        by_flag=True,
    ),
    WantedMetric(
        "kv_offload_load_time_total", "offload_load_seconds_total", releases="from 0.24", by_flag=True
    ),
    WantedMetric(
        "kv_offload_store_bytes_total",
        "offload_store_bytes_total",
        most=_MOST_BYTES,
        releases="from 0.24",
        by_flag=True,
    ),
    *(
        WantedMetric(
            name,
            field,
            when=("transfer_type", direction),
            most=_MOST_BYTES,
            releases="from 0.16",
            by_flag=True,
        )
        for name, direction, field in (
            ("kv_offload_total_bytes_total", "CPU_to_GPU", "offload_load_bytes_total"),
            ("kv_offload_total_bytes_total", "GPU_to_CPU", "offload_store_bytes_total"),
            ("kv_offload_total_time_total", "CPU_to_GPU", "offload_load_seconds_total"),
        )
    ),
    WantedMetric(
        "kv_offload_allocation_failure_total",
        "offload_allocation_failures_total",
        releases="from 0.26",
        by_flag=True,
    ),
    # Of these histograms the sums alone: how long prompts and answers are on average, how long their prefill takes, and how long
    # blocks were idle before another content took their place.
    WantedMetric("request_prompt_tokens_count", "finished_requests_total", seldom=True),
    WantedMetric("request_prompt_tokens_sum", "finished_prompt_tokens_total", seldom=True),
    WantedMetric("request_generation_tokens_sum", "finished_generation_tokens_total", seldom=True),
    WantedMetric("request_prefill_time_seconds_sum", "prefill_seconds_total", seldom=True),
    WantedMetric(
        "request_prefill_kv_computed_tokens_sum",
        "prefill_computed_tokens_total",
        releases="from 0.13",
        seldom=True,
    ),
    WantedMetric(
        "kv_block_idle_before_evict_seconds_count",
        "evicted_blocks_total",
        releases="from 0.12, with --kv-cache-metrics",
        seldom=True,
        by_flag=True,
    ),
    WantedMetric(
        "kv_block_idle_before_evict_seconds_sum",
        "evicted_block_idle_seconds_total",
        releases="from 0.12, with --kv-cache-metrics",
        seldom=True,
        by_flag=True,
    ),
)

NAMES: tuple[str, ...] = tuple(
    dict.fromkeys((INFO_METRIC, SLEEP_STATE, TIER_INFO, *(wanted.metric for wanted in WANTED_METRICS)))
)
SELDOM_NAMES: frozenset[str] = frozenset(
    (INFO_METRIC, TIER_INFO, *(wanted.metric for wanted in WANTED_METRICS if wanted.seldom))
)
"""Asked for once a minute: a histogram, or the thirty labels of what never changes in a process, cost the server as much as
five or six gauges."""
BY_FLAG: frozenset[str] = frozenset(
    (TIER_INFO, *(wanted.metric for wanted in WANTED_METRICS if wanted.by_flag))
)
OFTEN_NAMES: tuple[str, ...] = tuple(name for name in NAMES if name not in SELDOM_NAMES)
BY_NAME: Mapping[str, tuple[WantedMetric, ...]] = {
    name: tuple(wanted for wanted in WANTED_METRICS if wanted.metric == name) for name in NAMES
}
RANK: Mapping[str, int] = {name: rank for rank, name in enumerate(NAMES)}
"""The smaller, the more it is preferred among names of one figure."""

NEWEST: Mapping[str, str] = {
    wanted.metric: next(other.metric for other in WANTED_METRICS if other.field == wanted.field)
    for wanted in WANTED_METRICS
} | {name: name for name in (INFO_METRIC, SLEEP_STATE, TIER_INFO)}
"""The newest name of the same figure."""
