"""What a simulated engine says, as the text of a `/metrics` page of vLLM (`v1/metrics/loggers.py` of vLLM 0.33.0).

Only what a scheduler knows stands on it: docs/simulator.md has the list. The text has no HELP lines.
"""

from collections.abc import Iterator

from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.meters import HISTOGRAMS, Meters
from kvheadroom.lab.simulator.run import Run


class Pages:
    """The pages of one engine; only values differ from page to page."""

    def __init__(self, settings: EngineSettings, *, model_name: str, starts_at: float) -> None:
        """What does not change.

        Args:
            starts_at: unix seconds of the server's start.
        """
        self._tells_reasons = settings.rules.tells_waiting_by_reason
        self._num_usable = settings.num_blocks - 1
        self._labels = 'engine="0"', f'model_name="{model_name}"'
        self._series: dict[tuple[str, str], str] = {}
        self._constants = [
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {float(starts_at)}",
            "# TYPE vllm:engine_sleep_state gauge",
            self._line("engine_sleep_state", 1.0, 'sleep_state="awake"'),
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{_config_labels(settings)}}} 1.0",
        ]
        self._chunk_bytes = settings.chunk_bytes
        if settings.tier_chunks:
            size = (
                'cpu_blocks_per_chunk="1"',
                f'cpu_kv_cache_size_bytes="{settings.tier_chunks * settings.chunk_bytes}"',
                f'cpu_kv_cache_size_tokens="{_tier_tokens(settings)}"',
                f'cpu_num_chunks="{settings.tier_chunks}"',
            )
            self._constants += [
                "# TYPE vllm:kv_offload_config_info gauge",
                f"vllm:kv_offload_config_info{{{','.join((*size, *self._labels))}}} 1.0",
            ]

    def text(self, run: Run) -> str:
        """The page of this moment."""
        return "\n".join(
            (*self._constants, *self._gauges(run), *self._counters(run), *self._histograms(run.meters), "")
        )

    def _line(self, name: str, value: float, label: str = "") -> str:
        """A sample, its labels in the order of the alphabet."""
        series = self._series.get((name, label))
        if series is None:
            labels = sorted((*self._labels, label) if label else self._labels)
            series = self._series[name, label] = f"vllm:{name}{{{','.join(labels)}}}"
        return f"{series} {float(value)}"

    def _gauges(self, run: Run) -> Iterator[str]:
        told = run.told
        yield "# TYPE vllm:num_requests_running gauge"
        yield self._line("num_requests_running", told.num_running)
        yield "# TYPE vllm:num_requests_waiting gauge"
        yield self._line("num_requests_waiting", told.num_waiting)
        if self._tells_reasons:
            yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
            yield self._line("num_requests_waiting_by_reason", told.num_waiting, 'reason="capacity"')
            yield self._line("num_requests_waiting_by_reason", 0.0, 'reason="deferred"')
        yield "# TYPE vllm:kv_cache_usage_perc gauge"
        yield self._line("kv_cache_usage_perc", 1.0 - (self._num_usable - told.num_used) / self._num_usable)

    def _counters(self, run: Run) -> Iterator[str]:
        meters = run.meters
        for name, value in (
            ("prefix_cache_queries", run.told.queries),
            ("prefix_cache_hits", run.told.hits),
            ("num_preemptions", meters.preemptions),
            ("prompt_tokens", meters.prompt_tokens),
            ("prompt_tokens_cached", meters.cached_tokens),
            ("generation_tokens", meters.generation_tokens),
        ):
            yield f"# TYPE vllm:{name}_total counter"
            yield self._line(f"{name}_total", value)
        if self._chunk_bytes:
            yield from self._of_the_tier(run)
        yield "# TYPE vllm:request_success_total counter"
        for reason, count in meters.success.items():
            yield self._line("request_success_total", count, f'finished_reason="{reason}"')

    def _of_the_tier(self, run: Run) -> Iterator[str]:
        told, meters = run.told, run.meters
        yield "# TYPE vllm:prompt_tokens_by_source_total counter"
        for source, tokens in (
            ("local_compute", meters.prompt_tokens - meters.cached_tokens),
            ("local_cache_hit", meters.cached_tokens - meters.external_tokens),
            ("external_kv_transfer", meters.external_tokens),
        ):
            yield self._line("prompt_tokens_by_source_total", tokens, f'source="{source}"')
        for name, value in (
            ("external_prefix_cache_queries", told.external_queries),
            ("external_prefix_cache_hits", told.external_hits),
            ("kv_offload_store_bytes", told.stored_chunks * self._chunk_bytes),
            ("kv_offload_load_bytes", told.loaded_chunks * self._chunk_bytes),
            ("kv_offload_allocation_failure", told.refused_stores),
        ):
            yield f"# TYPE vllm:{name}_total counter"
            yield self._line(f"{name}_total", value)

    def _histograms(self, meters: Meters) -> Iterator[str]:
        for name in HISTOGRAMS:
            histogram = meters.histograms[name]
            yield f"# TYPE vllm:{name} histogram"
            total = 0
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
                total += count
                yield self._line(f"{name}_bucket", total, f'le="{bound}"')
            yield self._line(f"{name}_count", total)
            yield self._line(f"{name}_sum", histogram.sum)


def _tier_tokens(settings: EngineSettings) -> int:
    """As `CPUOffloadingInfo` counts them (`v1/kv_offload/cpu/common.py`): of requests of max_model_len."""
    return settings.tier_chunks * settings.max_model_len // -(-settings.max_model_len // settings.block_size)


def _config_labels(settings: EngineSettings) -> str:
    """Of `CacheConfig`, what the simulated engine has; a pool in tokens as `get_max_concurrency_for_kv_cache_config` counts."""
    blocks_of_longest = -(-settings.max_model_len // settings.block_size)
    concurrency = settings.num_blocks / blocks_of_longest
    labels = {
        "block_size": settings.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": settings.enable_prefix_caching,
        "engine": 0,
        "num_gpu_blocks": settings.num_blocks,
        "num_gpu_blocks_override": settings.num_blocks,
        "user_specified_block_size": True,
    }
    if settings.rules.tells_pool_tokens:
        labels["kv_cache_max_concurrency"] = concurrency
        labels["kv_cache_size_tokens"] = int(concurrency * settings.max_model_len)
    if settings.rules.tells_attention_block_size:
        labels["effective_attention_block_size"] = settings.block_size
    return ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
