"""What the outside said, as typed values: one vLLM page, and what went wrong getting it.

Every type here crosses a room: `sources` makes them, `monitor` keeps them, `assessment` reads them.
Absent is `None`, never 0: a gauge that vLLM has not set yet is not a gauge at zero.
"""

from dataclasses import dataclass
from enum import StrEnum


class FailureReason(StrEnum):
    """Why a source gave nothing usable. A closed list, so that alerts can name a reason."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    TLS = "tls"
    HTTP_STATUS = "http_status"
    UNAUTHORIZED = "unauthorized"
    UNAVAILABLE = "unavailable"
    TOO_LARGE = "too_large"
    BAD_ANSWER = "bad_answer"
    NOT_VLLM = "not_vllm"
    NO_VLLM_METRICS = "no_vllm_metrics"
    STATS_DISABLED = "stats_disabled"
    NOT_FOUND = "not_found"
    NO_PERMISSION = "no_permission"
    IO_ERROR = "io_error"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """The outside's error as a value.

    Attributes:
        source: which source failed: `metrics`, `version`, `models` or `model_files` of a replica, `calibration`, or the name of a
            source of replicas.
        reason: from the closed list.
        detail: one sentence for a person: what was asked, what came, what to do.
        status: of the HTTP answer that is no success; None where none came, or something else of it is wrong.
    """

    source: str
    reason: FailureReason
    detail: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Scrape:
    """The bytes of one `/metrics` page.

    Attributes:
        taken_at: unix seconds when the request was sent.
        duration_seconds: from sending the request to the last byte.
    """

    body: bytes
    taken_at: float
    duration_seconds: float


class ProblemReason(StrEnum):
    """What was wrong with a page that could still be read, or with what its numbers mean."""

    NO_ENGINE_SERIES = "no_engine_series"
    BAD_LINE = "bad_line"
    BAD_VALUE = "bad_value"
    DUPLICATE_SERIES = "duplicate_series"
    SEVERAL_SERVERS = "several_servers"
    CONTRADICTION = "contradiction"
    DIFFERING_NAMES = "differing_names"
    METRICS_LOST = "metrics_lost"
    BELOW_ONE_BLOCK = "below_one_block"
    INFLATED_BY_RECOMPUTE = "inflated_by_recompute"
    COUNTER_NOT_WIRED = "counter_not_wired"


@dataclass(frozen=True, slots=True)
class PageProblem:
    """One thing on a page that was dropped, repaired or misleads, with a sentence for a person."""

    reason: ProblemReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedFlags:
    """Flags that the running engine repeats as labels of `vllm:cache_config_info`.

    Only flags, never results: a resolved block size, block counts and token counts are not here, so a
    prediction cannot be fed its own answer. `None`: the release does not echo it, or it was not given.
    """

    kv_cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    block_size: int | None = None
    """Only where the page says `user_specified_block_size="True"`; otherwise the label is a result."""
    kv_cache_dtype_skip_layers: tuple[str, ...] | None = None
    kv_offloading_size: float | None = None
    """GiB of one engine; its backend is told even where there is none."""
    kv_offloading_backend: str | None = None


@dataclass(frozen=True, slots=True)
class ToldTier:
    """What the engine itself says of its tier in host memory (`kv_offload_config_info`, 0.33 and later).

    Attributes:
        num_chunks, blocks_per_chunk: of this engine.
        size_bytes: padding included.
        size_tokens: of requests of max_model_len.
    """

    num_chunks: int | None
    blocks_per_chunk: int | None
    size_bytes: int | None
    size_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """What one engine (one KV pool) said in one scrape, in our words and base units.

    Attributes:
        engine: vLLM's `engine` label, the data-parallel rank; `"0"` on pages without it.
        num_blocks: blocks of this engine's pool, the null block included.
        blocks_are_shared: the page adds up the blocks of several engines; num_blocks is this engine's even share.
        block_size: the `block_size` label, tokens per block and context-parallel rank.
        attention_block_size: tokens one block of the full-attention group holds, context parallelism
            included (`effective_attention_block_size`, 0.32 and later).
        pool_tokens: vLLM's own `kv_cache_size_tokens` (0.24 and later).
        max_concurrency: vLLM's own `kv_cache_max_concurrency`: requests of max_model_len that fit.
        kv_usage_ratio: used share of the usable blocks, 0-1.
        requests_waiting_capacity, requests_waiting_deferred: vLLM's `num_requests_waiting_by_reason` (0.20 and later).
        sleeping: vLLM's sleep mode: weights or pool are not in GPU memory (0.11.2 and later).
        prefix_match_unit: tokens that a prefix hit is a multiple of, where the operator chose it (0.26 and later).
        *_total: counters since the server's start; prefix counters in tokens.
        prompt_tokens_*_total: prompt tokens by where they came from: computed, found in this engine's cache, supplied by
            a connector; counted once for each request, as its prefill ends (0.16 and later).
        offload_*_bytes_total: of one engine, all its workers together; offload_*_seconds_total: the same sum of their times, so that
            bytes / seconds is what one worker moves.
        offload_allocation_failures_total: stores for which the tier had no room, counted at each attempt (0.26 and later).
        prefill_*_total: of requests that finished: seconds from their first scheduling to their first token, and tokens that were
            computed for them.
        evicted_*_total: sampled blocks that were taken for another content, and how long nobody had asked for theirs
            (`--kv-cache-metrics`).
        told_tier: a tier in host memory.
        lmcache_*: what LMCache tells of itself, added up over its workers; of a page with one engine. Look-ups are of whole prompts, in tokens, and
            counted by every worker. host_bytes and disk_bytes are in use.
        finished_*_total: requests that finished, and their tokens; those whose client went away are not among them. All
            of one instant, which may be a minute before the rest.
    """

    engine: str
    model_name: str | None = None
    num_blocks: int | None = None
    blocks_are_shared: bool = False
    block_size: int | None = None
    attention_block_size: int | None = None
    pool_tokens: int | None = None
    max_concurrency: float | None = None
    kv_cache_dtype: str | None = None
    prefix_match_unit: int | None = None
    kv_usage_ratio: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    requests_waiting_capacity: float | None = None
    requests_waiting_deferred: float | None = None
    preemptions_total: float | None = None
    prefix_cache_queries_total: float | None = None
    prefix_cache_hits_total: float | None = None
    external_prefix_cache_queries_total: float | None = None
    external_prefix_cache_hits_total: float | None = None
    prompt_tokens_total: float | None = None
    prompt_tokens_local_compute_total: float | None = None
    prompt_tokens_local_cache_hit_total: float | None = None
    prompt_tokens_external_kv_transfer_total: float | None = None
    generation_tokens_total: float | None = None
    finished_requests_total: float | None = None
    finished_prompt_tokens_total: float | None = None
    finished_generation_tokens_total: float | None = None
    offload_load_bytes_total: float | None = None
    offload_load_seconds_total: float | None = None
    offload_store_bytes_total: float | None = None
    offload_allocation_failures_total: float | None = None
    prefill_seconds_total: float | None = None
    prefill_computed_tokens_total: float | None = None
    evicted_blocks_total: float | None = None
    evicted_block_idle_seconds_total: float | None = None
    lmcache_lookup_tokens_total: float | None = None
    lmcache_lookup_hits_total: float | None = None
    lmcache_host_bytes: float | None = None
    lmcache_disk_bytes: float | None = None
    sleeping: bool | None = None
    told_tier: ToldTier | None = None
    echoed: EchoedFlags = EchoedFlags()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPage:
    """One `/metrics` page, read.

    Attributes:
        format: `text` or `openmetrics`.
        engines: in the order of the engine number.
        process_start_time_seconds: absent on multi-process servers.
        metrics: vLLM's names of the wanted metrics that the page has or declares, each by its newest name, but for those that a
            server has with some flag only.
    """

    format: str
    engines: tuple[EngineSnapshot, ...]
    problems: tuple[PageProblem, ...] = ()
    process_start_time_seconds: float | None = None
    metrics: frozenset[str] = frozenset()


def one_line(text: str) -> str:
    """Text that a server or another program may have written, as it may stand in a log or a label: it forges no line of ours."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
