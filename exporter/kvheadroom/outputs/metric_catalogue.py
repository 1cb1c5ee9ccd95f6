"""Every metric that kvheadroom exports: name, type, labels, meaning. The only file that spells them.

The metrics reference in docs/ is generated from here; the dashboards take their names from here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.calibration import LearnedOverhead
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.prediction import PredictedPool

PREFIX = "kvheadroom_"
ENGINE_LABELS = ("replica", "engine", "model_name")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family.

    Attributes:
        name: without the prefix; counters with `_total`.
        value: for families with one sample per engine, where in the assessment it stands.
    """

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    help: str
    value: Callable[[Assessment], float | None] | None = None

    @property
    def full_name(self) -> str:
        """The name on the page, counters with `_total`."""
        return PREFIX + self.name


def _gauge(name: str, help_text: str, value: Callable[[Assessment], float | None]) -> Metric:
    return Metric(name, "gauge", ENGINE_LABELS, help_text, value)


def _counter(name: str, help_text: str, value: Callable[[Assessment], float | None]) -> Metric:
    return Metric(name, "counter", ENGINE_LABELS, help_text, value)


def _of_pool(value: Callable[[PredictedPool], float | None]) -> Callable[[Assessment], float | None]:
    return lambda a: None if a.prediction.pool is None else value(a.prediction.pool)


def _of_layout(value: Callable[[KvLayout], float | None]) -> Callable[[Assessment], float | None]:
    return lambda a: None if a.prediction.layout is None else value(a.prediction.layout)


def _of_calibrated(value: Callable[[PredictedPool], float | None]) -> Callable[[Assessment], float | None]:
    def of_pool(a: Assessment) -> float | None:
        pool = None if a.calibrated is None else a.calibrated.prediction.pool
        return None if pool is None else value(pool)

    return of_pool


def _of_learned(value: Callable[[LearnedOverhead], float]) -> Callable[[Assessment], float | None]:
    return lambda a: None if a.calibrated is None else value(a.calibrated.learned)


PREDICTED = (
    _gauge(
        "predicted_pool_tokens",
        "Tokens of the engine's KV pool as vLLM would report them (kv_cache_size_tokens), predicted from "
        "model files, flags and hardware only.",
        _of_pool(lambda pool: pool.pool_tokens),
    ),
    _gauge(
        "predicted_blocks",
        "KV blocks of the engine's pool, the null block included, predicted.",
        _of_pool(lambda pool: pool.num_blocks),
    ),
    _gauge(
        "predicted_block_size_tokens",
        "Tokens per KV block, context parallelism included, predicted.",
        _of_layout(lambda layout: layout.block_tokens),
    ),
    _gauge(
        "predicted_pool_bytes",
        "Bytes of the KV pool on one GPU: predicted blocks x predicted bytes per block.",
        _of_pool(lambda pool: pool.pool_bytes),
    ),
    _gauge(
        "predicted_bytes_per_token",
        "Bytes of the KV pool on one GPU that one more token of context takes, predicted "
        "(with context parallelism its share; with pipeline stages the widest).",
        _of_layout(lambda layout: layout.bytes_per_token),
    ),
)

CALIBRATED = (
    _gauge(
        "calibrated_pool_tokens",
        "The same as predicted_pool_tokens with the overhead that starts like it had (docs/calibration.md). The engine's own start has no "
        "say in it. Absent until another start of the same kind is known, and where the pool is given by a flag.",
        _of_calibrated(lambda pool: pool.pool_tokens),
    ),
    _gauge(
        "calibrated_blocks",
        "KV blocks of the engine's pool, the null block included, with the overhead that starts like it had.",
        _of_calibrated(lambda pool: pool.num_blocks),
    ),
    _gauge(
        "calibrated_pool_bytes",
        "Bytes of the KV pool on one GPU: calibrated blocks x predicted bytes per block.",
        _of_calibrated(lambda pool: pool.pool_bytes),
    ),
    _gauge(
        "calibrated_overhead_low_bytes",
        "Low end of the interval of the learned overhead, in bytes of one GPU: eight of ten starts are expected within; of one start "
        "alone it is as wide as the estimate's.",
        _of_learned(lambda learned: learned.low_bytes),
    ),
    _gauge(
        "calibrated_overhead_high_bytes",
        "High end of the same interval.",
        _of_learned(lambda learned: learned.high_bytes),
    ),
    _gauge(
        "calibration_samples",
        "Starts that the learned overhead is of.",
        _of_learned(lambda learned: learned.samples),
    ),
)

OBSERVED = (
    _gauge(
        "observed_pool_tokens",
        "Tokens of the engine's KV pool as vLLM itself reports them (kv_cache_size_tokens); of releases before 0.24 made of "
        "its blocks by vLLM's rule, for pools with one KV cache group. observed_pool_basis tells which.",
        lambda a: a.observation.pool_tokens,
    ),
    _gauge(
        "observed_blocks",
        "KV blocks of this engine's pool, the null block included (num_gpu_blocks divided by the engines "
        "that share the sum).",
        lambda a: a.observation.num_blocks,
    ),
    _gauge(
        "observed_block_size_tokens",
        "Tokens per KV block, context parallelism included (effective_attention_block_size, else block_size); absent "
        "where it contradicts the pool's tokens.",
        lambda a: a.observation.block_size,
    ),
    _gauge(
        "observed_pool_bytes",
        "Bytes of the KV pool on one GPU: observed blocks x bytes per block by the model's geometry "
        "(vLLM exports no bytes).",
        lambda a: a.observation.pool_bytes,
    ),
    _gauge(
        "kv_usage_ratio",
        "Share of the usable KV blocks that running requests hold, 0-1 (vllm:kv_cache_usage_perc).",
        lambda a: a.snapshot.kv_usage_ratio,
    ),
    _gauge(
        "used_blocks",
        "KV blocks held by running requests: usage x usable blocks; shared blocks count once.",
        lambda a: a.observation.used_blocks,
    ),
    _gauge(
        "free_blocks",
        "KV blocks that can be handed out now, cached prefixes that nobody uses included.",
        lambda a: a.observation.free_blocks,
    ),
    _gauge(
        "used_tokens",
        "used_blocks x tokens per block; only for pools with one KV cache group.",
        lambda a: a.observation.used_tokens,
    ),
    _gauge(
        "free_tokens",
        "free_blocks x tokens per block; only for pools with one KV cache group.",
        lambda a: a.observation.free_tokens,
    ),
    _gauge(
        "token_occupancy_estimate_ratio",
        "Estimate of the share of the usable blocks' tokens that are really filled, 0-1: running requests x the mean prompt and "
        "half the mean answer of those that finished in the last 5 minutes, held within what the blocks in use allow. "
        "kv_usage_ratio counts whole blocks, so it is higher where requests are short. Only for pools with one KV cache "
        "group; absent where the blocks contradict it.",
        lambda a: a.occupancy.estimate_ratio,
    ),
    _gauge(
        "requests_running",
        "Requests in the running batch (vllm:num_requests_running).",
        lambda a: a.snapshot.requests_running,
    ),
    _gauge(
        "requests_waiting",
        "Requests in the queue, preempted ones included (vllm:num_requests_waiting).",
        lambda a: a.snapshot.requests_waiting,
    ),
    _counter(
        "preemptions_total",
        "Preemptions since the server's start (vllm:num_preemptions_total).",
        lambda a: a.snapshot.preemptions_total,
    ),
    _counter(
        "prefix_cache_queries_tokens_total",
        "Prompt tokens looked up in the prefix cache (vllm:prefix_cache_queries_total).",
        lambda a: a.snapshot.prefix_cache_queries_total,
    ),
    _counter(
        "prefix_cache_hits_tokens_total",
        "Prompt tokens found in the prefix cache (vllm:prefix_cache_hits_total).",
        lambda a: a.snapshot.prefix_cache_hits_total,
    ),
    _counter(
        "external_prefix_cache_queries_tokens_total",
        "Prompt tokens looked up at a KV connector after the local cache "
        "(vllm:external_prefix_cache_queries_total).",
        lambda a: a.snapshot.external_prefix_cache_queries_total,
    ),
    _counter(
        "external_prefix_cache_hits_tokens_total",
        "Prompt tokens that a KV connector supplied (vllm:external_prefix_cache_hits_total).",
        lambda a: a.snapshot.external_prefix_cache_hits_total,
    ),
    _counter(
        "prompt_tokens_total",
        "Prompt tokens prefilled or taken from a cache (vllm:prompt_tokens_total).",
        lambda a: a.snapshot.prompt_tokens_total,
    ),
    _counter(
        "generation_tokens_total",
        "Tokens generated (vllm:generation_tokens_total).",
        lambda a: a.snapshot.generation_tokens_total,
    ),
)

_SESSION_LABELS = (*ENGINE_LABELS, "session_tokens")
PREDICTED_SESSIONS = Metric(
    "predicted_sessions",
    "gauge",
    _SESSION_LABELS,
    "Sessions of session_tokens tokens that the predicted pool holds at once "
    "(predicted blocks / blocks per session).",
)
CALIBRATED_SESSIONS = Metric(
    "calibrated_sessions",
    "gauge",
    _SESSION_LABELS,
    "Sessions of session_tokens tokens that the calibrated pool holds at once (calibrated blocks / blocks per session).",
)
OBSERVED_SESSIONS = Metric(
    "observed_sessions",
    "gauge",
    _SESSION_LABELS,
    "Sessions of session_tokens tokens that the engine's pool holds at once; for max_model_len it is vLLM's "
    "own maximum concurrency.",
)
SESSIONS_IN_USE = Metric(
    "sessions_in_use",
    "gauge",
    _SESSION_LABELS,
    "used_blocks / blocks per session: what is in use, in sessions of session_tokens tokens.",
)
SESSIONS_HEADROOM = Metric(
    "sessions_headroom",
    "gauge",
    _SESSION_LABELS,
    "Whole sessions of session_tokens tokens that fit in the free blocks now.",
)
_TIER_LABELS = (*ENGINE_LABELS, "cache_tier")
TIER_BYTES = Metric(
    "tier_capacity_bytes",
    "gauge",
    _TIER_LABELS,
    "What a tier of the KV cache holds: hbm (the pool, of one GPU) or host (the offload tier in host memory, of the engine, all its workers "
    "together; told by vLLM from 0.33, else planned from flags). Absent where it is not known.",
)
TIER_TOKENS = Metric(
    "tier_capacity_tokens",
    "gauge",
    _TIER_LABELS,
    "The same in tokens, of requests of max_model_len, as vLLM counts them.",
)
TIER_SESSIONS = Metric(
    "tier_sessions",
    "gauge",
    (*_TIER_LABELS, "session_tokens"),
    "Sessions of session_tokens tokens that a tier holds at once.",
)
TIER_USED = Metric(
    "tier_used_bytes",
    "gauge",
    _TIER_LABELS,
    "Bytes of a tier that are in use: of LMCache's in host memory (lmcache:local_cache_usage) and on disk (lmcache:local_storage_usage), all "
    "workers together. vLLM tells it of no tier of its own. Only of servers with one engine, on whose page LMCache's series are.",
)
PREDICTED_TIER_HOST = Metric(
    "predicted_tier_host_bytes",
    "gauge",
    ENGINE_LABELS,
    "Host memory that the tier of one engine takes, all its workers together: from vLLM 0.27 its own size, before with each pinned tensor rounded "
    "up to a power of two. Absent where it is not known how vLLM cuts the tier; the status page then says between which two it lies.",
)
OBSERVED_HOST_SHARED = Metric(
    "observed_host_shared_bytes",
    "gauge",
    ("replica",),
    "Shared memory that the processes of a server with a tier in host memory have, added up (RssShmem: pinned memory, and files of /dev/shm, which "
    "count for each process that maps them). Only of servers that kvheadroom finds in the process table of its machine.",
)
HBM_BLOCKS = Metric(
    "hbm_blocks",
    "gauge",
    (*ENGINE_LABELS, "content"),
    "Blocks of the pool by what they hold: referenced (of running requests), cached (of none, and may be found again), blank. vLLM tells "
    "the first; the others follow from what was computed since its start.",
)
RETENTION_LOW = Metric(
    "retention_low_seconds",
    "gauge",
    (*_TIER_LABELS, "window"),
    "So long at least what nobody asks for stays in a tier, by what came in over the window, everything that was asked for taken for "
    "different content. Absent where nothing was evicted since the server's start, and where it is not known.",
)
RETENTION_HIGH = Metric(
    "retention_high_seconds",
    "gauge",
    (*_TIER_LABELS, "window"),
    "So long at most: the new content alone counted.",
)
SESSION_WARM = Metric(
    "session_warm",
    "gauge",
    (*_TIER_LABELS, "session_tokens", "idle_seconds", "warm"),
    "1; the label warm tells whether a session of session_tokens tokens that was idle for idle_seconds (idle_times of the config) is still in "
    "the tier: yes, no, or perhaps (between retention_low_seconds and retention_high_seconds).",
)
EVICTED_IDLE = Metric(
    "evicted_block_idle_seconds",
    "gauge",
    (*ENGINE_LABELS, "window"),
    "How long sampled blocks of the pool had not been asked for when other content took their place, on average, with the time of their own "
    "request (vllm:kv_block_idle_before_evict_seconds, with --kv-cache-metrics).",
)
PREFILL_RATE = Metric(
    "prefill_tokens_per_second",
    "gauge",
    (*ENGINE_LABELS, "window"),
    "Prompt tokens computed for a request, by the time from its first scheduling to its first token, over those that finished in the window: "
    "under the load that there was.",
)
LOAD_RATE = Metric(
    "offload_load_bytes_per_second",
    "gauge",
    (*ENGINE_LABELS, "window"),
    "What one worker loads from the host's memory while it loads (bytes / time of vllm:kv_offload_load_*).",
)
RESUME = Metric(
    "resume_seconds",
    "gauge",
    (*_SESSION_LABELS, "by"),
    "Seconds until a session of session_tokens tokens that was evicted from HBM can go on: by recompute of all of it at the measured prefill "
    "speed, or by reload from the host's memory at the measured speed. Absent where no speed was measured.",
)
SAVED_TOKENS = Metric(
    "prefill_saved_tokens_total",
    "counter",
    _TIER_LABELS,
    "Prompt tokens that were found in a tier and not computed, since the server's start. Absent for host memory where other connectors, or "
    "tiers behind it, supply tokens too.",
)
SAVED_SECONDS = Metric(
    "prefill_saved_seconds",
    "gauge",
    _TIER_LABELS,
    "Seconds of prefill that they would have taken, by the speed since the server's start.",
)
WARM_FINDING = Metric(
    "warm_finding",
    "gauge",
    (*ENGINE_LABELS, "finding"),
    "1 for what keeps the offload tier from doing what its size promises: tier_too_small (stores found no room), tier_not_paying (stores, but "
    "no loads in an hour), nothing_stored, host_memory_above_tier (it takes more of the host's memory than was asked for), tier_above_shm (more "
    "than /dev/shm has), tier_above_host_memory (more than the machine or the memory limit has). And what keeps prompts "
    "from being found: evicted_by_churn, blocks_too_big, prefixes_differ, finds_less_than_before. The status page has the sentence.",
)
_SIZE_LABELS = (*ENGINE_LABELS, "tier_bytes")
EXPECTED_HITS = Metric(
    "expected_hit_ratio",
    "gauge",
    _SIZE_LABELS,
    "Share of prompt tokens that the pool and a tier of tier_bytes in host memory would find together (0: the pool alone), by how soon the "
    "prompts of the last day came back: the middle of expected_hit_low_ratio and expected_hit_high_ratio. Absent where they are more than 0.1 apart.",
)
EXPECTED_HITS_LOW = Metric(
    "expected_hit_low_ratio",
    "gauge",
    _SIZE_LABELS,
    "So much at least, for the tier_sizes of the config and the tier that there is. Absent until two hours with prompts were seen.",
)
EXPECTED_HITS_HIGH = Metric(
    "expected_hit_high_ratio",
    "gauge",
    _SIZE_LABELS,
    "So much at most.",
)
FOUND_RATIO = Metric(
    "prompt_tokens_found_ratio",
    "gauge",
    _TIER_LABELS,
    "Share of the prompt tokens of the same time that was found in the pool (hbm), and that a KV connector supplied (host). With "
    "expected_hit_ratio it says what another size would change.",
)
REUSE_SECONDS = Metric(
    "reuse_observed_seconds",
    "gauge",
    ENGINE_LABELS,
    "How much time with prompts, of the last day, that was learned from.",
)
OFFLOAD = (
    _counter(
        "offload_store_bytes_total",
        "Bytes stored in host memory, all workers of the engine together (vllm:kv_offload_store_bytes).",
        lambda a: a.snapshot.offload_store_bytes_total,
    ),
    _counter(
        "offload_load_bytes_total",
        "Bytes loaded from host memory, all workers of the engine together (vllm:kv_offload_load_bytes).",
        lambda a: a.snapshot.offload_load_bytes_total,
    ),
    _counter(
        "offload_allocation_failures_total",
        "Stores for which the tier had no room, counted at each attempt (vllm:kv_offload_allocation_failure, from 0.26).",
        lambda a: a.snapshot.offload_allocation_failures_total,
    ),
)
WAITING_BY_REASON = Metric(
    "requests_waiting_by_reason",
    "gauge",
    (*ENGINE_LABELS, "reason"),
    "Queued requests by vLLM's reason: capacity or deferred (vllm:num_requests_waiting_by_reason).",
)
_MEMORY_LABELS = (*ENGINE_LABELS, "term")
PREDICTED_MEMORY = Metric(
    "predicted_memory_bytes",
    "gauge",
    _MEMORY_LABELS,
    "Memory of one GPU, term by term, as predicted: outside_utilization, weights, overhead, block_rounding, kv_pool. They add up to the "
    "GPU's total as CUDA reports it. Absent where the pool is given by a flag, and with pipeline stages.",
)
CALIBRATED_MEMORY = Metric(
    "calibrated_memory_bytes",
    "gauge",
    _MEMORY_LABELS,
    "The same as predicted_memory_bytes with the learned overhead, which is the term overhead; they add up to the GPU's total as well.",
)
OBSERVED_MEMORY = Metric(
    "observed_memory_bytes",
    "gauge",
    _MEMORY_LABELS,
    "The same as the live pool says: kv_pool, and overhead, which is what HBM, utilization and weights leave beside it (too large by less "
    "than one block). With tensor parallelism of the GPU that left the least. Absent where the sum cannot be.",
)
PREDICTED_OVERHEAD = Metric(
    "predicted_overhead_bytes",
    "gauge",
    (*ENGINE_LABELS, "part"),
    "What the predicted overhead of one GPU is made of: context (kernels, NCCL), activations, workspaces, encoder, cuda_graphs "
    "(docs/capacity-model.md). They add up to predicted_memory_bytes of overhead. Absent where overhead_gb is said, and where the "
    "model's sizes are not known.",
)
UNEXPLAINED_OVERHEAD = _gauge(
    "unexplained_overhead_bytes",
    "Overhead that the live pool tells (observed_memory_bytes) less the predicted one: below 0 where there is less than predicted.",
    lambda a: None if a.ledger is None else a.ledger.unexplained_bytes,
)
MEMORY_FINDING = Metric(
    "memory_finding_bytes",
    "gauge",
    (*ENGINE_LABELS, "gpu", "finding"),
    "Memory of a GPU that is held for nothing or will be missed, with its name: pool_above_demand (of the pool, what all requests at "
    "once cannot fill), room_outside_budget (what a higher gpu_memory_utilization would add to the pool), foreign_memory (held by other "
    "processes, more than the budget leaves them), grew_since_start (by so much the overhead grew), slowest_rank (what the other GPUs of "
    "the replica leave unused). The first two are an engine's and have no gpu, the others a GPU's and have no engine. Absent where "
    "there is nothing to say; the status page has the sentence and the way out.",
)
CALIBRATION_RELIABILITY = Metric(
    "calibration_reliability",
    "gauge",
    (*ENGINE_LABELS, "reliability"),
    "1; the label tells how far the learned overhead can be trusted: good, one_sample, or spread (the starts differ by more than an "
    "estimate may be off).",
)
CALIBRATION_CLAMPED = Metric(
    "calibration_clamped",
    "gauge",
    (*ENGINE_LABELS, "bound"),
    "1 where the learned overhead ran into what can be and was cut to it: nothing_left (more than the budget holds beside the weights) or "
    "below_zero.",
)
OVERHEAD_SAMPLE = Metric(
    "overhead_sample_bytes",
    "gauge",
    (
        *ENGINE_LABELS,
        "start",
        "geometry",
        "weight_format",
        "gpu",
        "parallelism",
        "release",
        "settings",
        "edition",
    ),
    "Overhead of one GPU that the engine's present start had, from its pool, as the next start like it takes it. The labels tell the start, "
    "what its overhead depends on, and the edition of the estimate in predicted_memory_bytes (0 where that is none). Absent until the start has stood still for 30 s, and where it "
    "is no sample (calibration_excluded_starts_total).",
)
CALIBRATION_EXCLUDED = Metric(
    "calibration_excluded_starts_total",
    "counter",
    ("replica", "reason"),
    "Starts that were no sample, once each, by reason, since kvheadroom's start: pool_by_flag, unknown (a fact or the pool is not known), foreign_memory (other "
    "processes hold more than 5% of its GPU), asleep, restarting (another start followed before it stood still), impossible, "
    "pipeline_stages. The status page has the words.",
)
BINDING_LIMIT = Metric(
    "binding_limit",
    "gauge",
    (*ENGINE_LABELS, "limit"),
    "1 for what keeps waiting requests from running now: kv_pool, max_num_seqs, token_budget (each step's tokens are spent), "
    "deferred (they wait for a LoRA slot, a grammar or a connector), or none (no request waits). Absent where the page cannot "
    "tell it; the status page has the reason.",
)
ENGINE_STATE = Metric(
    "engine_state",
    "gauge",
    (*ENGINE_LABELS, "state"),
    "1 for each named state that the engine is in: preempting, scheduler_stalled, reprefill_loop, thrash, working_set_exceeds_pool, "
    "pool_below_one_session (docs/forecast.md defines them). Absent otherwise, and after a restart or a gap until a state's "
    "time is over again.",
)
FORECAST_PROBABILITY = Metric(
    "forecast_preemption_probability_ratio",
    "gauge",
    (*ENGINE_LABELS, "horizon"),
    "Probability, 0-1, that a request is preempted within the horizon: 30s, 2m, 10m. From the last five minutes of the engine "
    "(docs/forecast.md has the formula and how often it was right). Absent where there is no forecast.",
)
FORECAST = (
    _gauge(
        "forecast_exhaustion_seconds",
        "Seconds until the next request would not fit in the free blocks, with a probability of a half; 0: now. Absent where that "
        "is not within 10 minutes, and where there is no forecast.",
        lambda a: a.forecast.exhaustion_seconds,
    ),
    _gauge(
        "forecast_exhaustion_earliest_seconds",
        "The same with a probability of 10%: the near end of the interval.",
        lambda a: a.forecast.earliest_seconds,
    ),
    _gauge(
        "forecast_exhaustion_latest_seconds",
        "The same with a probability of 90%: the far end of the interval.",
        lambda a: a.forecast.latest_seconds,
    ),
    _gauge(
        "forecast_peak_blocks",
        "Blocks that what runs, and what waits for blocks, would hold if all of it went on to its usual end at once: more than "
        "used_blocks + free_blocks means that something has to end first. Absent until ten requests have finished.",
        lambda a: a.forecast.peak_blocks,
    ),
    _gauge(
        "prefill_backlog_tokens",
        "Prompt tokens of the waiting requests that are not in the prefix cache, by the usual prompt; of deferred requests none. "
        "Absent where the usual prompt is not known.",
        lambda a: a.forecast.prefill_backlog_tokens,
    ),
)
FORECAST_UNAVAILABLE = Metric(
    "forecast_unavailable",
    "gauge",
    (*ENGINE_LABELS, "reason"),
    "1 where there is no forecast, with the reason: sleeping, not_told (the page lacks a figure), watched_too_short (less than "
    "30 s without a gap and nothing waits, or one scrape alone), tokens_per_block_unknown.",
)
_WINDOW_LABELS = (*ENGINE_LABELS, "window")
PREFIX_CACHE_HIT_RATIO = Metric(
    "prefix_cache_hit_ratio",
    "gauge",
    _WINDOW_LABELS,
    "Prompt tokens found in the engine's prefix cache / prompt tokens looked up, 0-1, over the last 1m, 5m and 1h. Absent "
    "where nothing was looked up, until a window is full, and for windows that a restart or a gap of more than three "
    "scrapes (and 15 s) falls in; also where the release's counters count more than that (the status page tells).",
)
EXTERNAL_PREFIX_CACHE_HIT_RATIO = Metric(
    "external_prefix_cache_hit_ratio",
    "gauge",
    _WINDOW_LABELS,
    "Prompt tokens that a KV connector supplied / prompt tokens that it was asked for, which the engine's own cache had "
    "not, 0-1, over the same windows.",
)
LMCACHE_HIT_RATIO = Metric(
    "lmcache_hit_ratio",
    "gauge",
    _WINDOW_LABELS,
    "Prompt tokens that LMCache found / prompt tokens that it was asked for (lmcache:num_lookup_hits and _tokens), 0-1, over the same windows: of "
    "whole prompts, what the engine's own cache had included. Where LMCache's series are on vLLM's page and the server has one engine.",
)
OBSERVED_POOL_BASIS = Metric(
    "observed_pool_basis",
    "gauge",
    (*ENGINE_LABELS, "basis"),
    "1; the label tells what observed_pool_tokens is: kv_cache_size_tokens of vLLM, or made of blocks. Absent where the "
    "server tells neither (V1 0.8, API servers of 0.15 to 0.19 with data parallelism, the Rust front end).",
)
SAMPLE_AGE = Metric(
    "sample_age_seconds",
    "gauge",
    ENGINE_LABELS,
    "Age of this engine's numbers. After three scrape intervals they are withheld, this one too.",
)
SOURCE_UP = Metric(
    "source_up",
    "gauge",
    ("replica", "source"),
    "1 if the source answered usefully when last asked, else 0: metrics, version, models, model_files of a "
    "replica (facts: 0 after a fault of kvheadroom in finding them). With an empty replica: nvml of this machine (absent where "
    "there is no NVIDIA driver), calibration (the calibration_file, absent without one; 0 while it cannot be read or written), each DCGM-exporter (dcgm_exporters[0]), and each source of replicas by its place in the config (file_sd_configs[0]): 0 while any of it "
    "cannot be read; the replicas of its last good list stay.",
)
SOURCE_FAILURES = Metric(
    "source_failures_total",
    "counter",
    ("replica", "source", "reason"),
    "Failures of a source by reason, since kvheadroom's start.",
)
DISCOVERY_TARGETS = Metric(
    "discovery_targets",
    "gauge",
    ("source",),
    "Replicas that are watched because this source lists them.",
)
DISCOVERY_LEFT_OUT = Metric(
    "discovery_left_out_targets",
    "gauge",
    ("source",),
    "Targets of this source that are not watched: no server's address, a name or address that is watched already, access "
    "with a fault. The status page has a sentence for each.",
)
DISCOVERY_SUCCESS_TIME = Metric(
    "discovery_last_success_timestamp_seconds",
    "gauge",
    ("source",),
    "Unix time at which this source was last read whole.",
)
REPLICA_INFO = Metric(
    "replica_info",
    "gauge",
    ("replica", "source"),
    "1 for each replica that is watched; source is what found it (config for those in replicas), and the operator's labels "
    "of the replica stand beside. They are on no other series: join them, as in `kvheadroom_sessions_headroom * on (replica) "
    "group_left (team) kvheadroom_replica_info`.",
)
PAGE_PROBLEMS = Metric(
    "page_problems_total",
    "counter",
    ("replica", "reason"),
    "Problems of the replica's pages by reason, since kvheadroom's start; one that stays counts at every scrape, at "
    "most 20 of one page's lines and values do: bad_value and bad_line (a sample dropped), duplicate_series, "
    "differing_names, contradiction, metrics_lost, several_servers, no_engine_series; and of hit counters that mislead "
    "below_one_block, inflated_by_recompute, counter_not_wired. The status page has the words.",
)
LOST_METRIC = Metric(
    "lost_metric",
    "gauge",
    ("replica", "metric"),
    "1 for each metric of vLLM that the replica's page had earlier and has no more, as after an upgrade: what is made "
    "of it is absent.",
)
SCRAPE_DURATION = Metric(
    "scrape_duration_seconds",
    "gauge",
    ("replica",),
    "Time the replica's /metrics page took in the last successful scrape, to its last byte.",
)
MISSING_FACT = Metric(
    "missing_fact",
    "gauge",
    (*ENGINE_LABELS, "fact"),
    "1 for each fact that a prediction needs and nobody said; the status page names the way to give it.",
)
ASSUMED_FACT = Metric(
    "assumed_fact",
    "gauge",
    (*ENGINE_LABELS, "fact"),
    "1 for each fact that the prediction takes on trust (a default of vLLM, or a guess).",
)
GPU_LABELS = ("replica", "gpu")
GPU_INFO = Metric(
    "gpu_info",
    "gauge",
    ("gpu", "name", "index", "parent", "gpu_instance", "compute_instance", "memory", "source", "host"),
    "1; the labels tell what the GPU is: the driver's index (PCI order), of a MIG device its parent and instances (else "
    "empty), how its memory is counted: v2, v1 (what is reserved counts as used), or host (the GPU has no memory but "
    "the host's, so /proc/meminfo tells), and who tells of it: nvml (this machine's driver), or a DCGM-exporter by its place in "
    "the config (dcgm_exporters[0]) with the name of its machine.",
)
GPU_ASSIGNMENT = Metric(
    "gpu_assignment",
    "gauge",
    (*GPU_LABELS, "by"),
    "1 for each GPU or MIG device that serves a replica; by tells how that is known: config (gpus of the replica), "
    "process (the driver lists a process of the server on it), or pod (a DCGM-exporter says that the replica's pod has it). Absent where nobody knows; the status page tells why.",
)
GPU_TOTAL = Metric(
    "gpu_memory_total_bytes",
    "gauge",
    GPU_LABELS,
    "Memory of the GPU or MIG device as NVML counts it; CUDA's total, which vLLM budgets with, is 0.4 to 1.1 GiB less. "
    "Of a DCGM-exporter's GPU: free + used + reserved in whole MiB, absent where it does not tell what is reserved. "
    "Of a GPU without memory of its own (gpu_info with memory host): the host's. replica is empty for a GPU that is not "
    "known to serve any; one that serves several has a series for each. A GPU in MIG mode has none, its MIG devices do.",
)
GPU_RESERVED = Metric(
    "gpu_memory_reserved_bytes",
    "gauge",
    GPU_LABELS,
    "Kept by driver and firmware (NVML v2, DCGM_FI_DEV_FB_RESERVED); absent with drivers that count it as used (v1).",
)
GPU_USED = Metric(
    "gpu_memory_used_bytes",
    "gauge",
    GPU_LABELS,
    "Allocated by all processes on the GPU; with drivers that know no v2 accounting, reserved included; where the memory "
    "is the host's, by everything on the host.",
)
GPU_FREE = Metric(
    "gpu_memory_free_bytes",
    "gauge",
    GPU_LABELS,
    "Free memory of the GPU, NVML (where it is the host's, MemAvailable); absent while an engine on it sleeps, which takes "
    "it back as it wakes.",
)
GPU_MEMORY_TERM = Metric(
    "gpu_memory_term_bytes",
    "gauge",
    ("replica", "gpu", "term"),
    "What is on a GPU of this machine that serves one replica: reserved, others (other processes), weights (predicted), kv_pool (the live one), "
    "rest (what else is in use: the overhead as it is now), free. They add up to what NVML calls reserved, used and free. Absent where they cannot be told apart; the "
    "status page says why.",
)
GPU_CHANGED_TIME = Metric(
    "gpu_memory_changed_timestamp_seconds",
    "gauge",
    GPU_LABELS,
    "Unix time since when the numbers of a DCGM-exporter's GPU stand, as far as kvheadroom saw. DCGM reads a GPU every 30 s "
    "unless it is told otherwise, so its numbers may be that old when they come.",
)
GPU_OTHERS = Metric(
    "gpu_memory_others_bytes",
    "gauge",
    GPU_LABELS,
    "Used on the GPU by anything but the replica's own processes, as of the last list of processes, which is up to ten "
    "ticks old; absent where the driver does not tell the bytes of each, or not by v2, or the processes are not known.",
)
GPU_UP = Metric(
    "gpu_up",
    "gauge",
    GPU_LABELS,
    "1 if the GPU gave its memory when last read, 0 if it failed (lost, no permission, not supported, ...), its DCGM-exporter "
    "has been silent for three of its intervals, or it is nowhere.",
)
GPU_XIDS = Metric(
    "gpu_xid_errors_total",
    "counter",
    ("gpu", "xid"),
    "Errors that the driver told of, by NVIDIA's Xid number, since kvheadroom's start; of a MIG device where the driver "
    "tells which, else of the whole GPU. A kind that never came has no series. None of a DCGM-exporter's GPUs: it tells the last "
    "one only, no count.",
)
REPLICA_STATE = Metric(
    "replica_state",
    "gauge",
    ("replica", "state"),
    "1 for the state the replica is in: serving, starting, sleeping, scaling, wedged, stats_disabled or down.",
)
REPLICA_RESTARTS = Metric(
    "replica_restarts_total",
    "counter",
    ("replica",),
    "Restarts of the server seen since kvheadroom's start (its process began anew, or its counters did).",
)
RELOAD_SUCCESSFUL = Metric(
    "config_last_reload_successful",
    "gauge",
    (),
    "1 if the config file was fine when last read, 0 if the config before it is still in use.",
)
RELOAD_SUCCESS_TIME = Metric(
    "config_last_reload_success_timestamp_seconds",
    "gauge",
    (),
    "Unix time at which the config in use was read.",
)
BUILD_INFO = Metric("build_info", "gauge", ("version",), "1; the label tells kvheadroom's version.")

CATALOGUE: tuple[Metric, ...] = (
    *PREDICTED,
    PREDICTED_SESSIONS,
    *CALIBRATED,
    CALIBRATED_SESSIONS,
    CALIBRATED_MEMORY,
    CALIBRATION_RELIABILITY,
    CALIBRATION_CLAMPED,
    OVERHEAD_SAMPLE,
    CALIBRATION_EXCLUDED,
    *OBSERVED,
    PREFIX_CACHE_HIT_RATIO,
    EXTERNAL_PREFIX_CACHE_HIT_RATIO,
    LMCACHE_HIT_RATIO,
    OBSERVED_POOL_BASIS,
    OBSERVED_SESSIONS,
    SESSIONS_IN_USE,
    SESSIONS_HEADROOM,
    PREDICTED_MEMORY,
    OBSERVED_MEMORY,
    PREDICTED_OVERHEAD,
    UNEXPLAINED_OVERHEAD,
    MEMORY_FINDING,
    TIER_BYTES,
    TIER_TOKENS,
    TIER_SESSIONS,
    TIER_USED,
    PREDICTED_TIER_HOST,
    OBSERVED_HOST_SHARED,
    HBM_BLOCKS,
    RETENTION_LOW,
    RETENTION_HIGH,
    SESSION_WARM,
    EVICTED_IDLE,
    PREFILL_RATE,
    LOAD_RATE,
    RESUME,
    SAVED_TOKENS,
    SAVED_SECONDS,
    WARM_FINDING,
    EXPECTED_HITS,
    EXPECTED_HITS_LOW,
    EXPECTED_HITS_HIGH,
    FOUND_RATIO,
    REUSE_SECONDS,
    *OFFLOAD,
    WAITING_BY_REASON,
    BINDING_LIMIT,
    ENGINE_STATE,
    FORECAST_PROBABILITY,
    *FORECAST,
    FORECAST_UNAVAILABLE,
    SAMPLE_AGE,
    SOURCE_UP,
    SOURCE_FAILURES,
    PAGE_PROBLEMS,
    LOST_METRIC,
    SCRAPE_DURATION,
    MISSING_FACT,
    ASSUMED_FACT,
    GPU_INFO,
    GPU_ASSIGNMENT,
    GPU_TOTAL,
    GPU_RESERVED,
    GPU_USED,
    GPU_FREE,
    GPU_MEMORY_TERM,
    GPU_CHANGED_TIME,
    GPU_OTHERS,
    GPU_UP,
    GPU_XIDS,
    REPLICA_INFO,
    REPLICA_STATE,
    REPLICA_RESTARTS,
    DISCOVERY_TARGETS,
    DISCOVERY_LEFT_OUT,
    DISCOVERY_SUCCESS_TIME,
    RELOAD_SUCCESSFUL,
    RELOAD_SUCCESS_TIME,
    BUILD_INFO,
)
