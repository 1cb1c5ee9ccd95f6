"""The labels of `vllm:cache_config_info` and `vllm:kv_offload_config_info` -> fields of the snapshot."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvheadroom.capacity.readings import EchoedFlags, PageProblem, ProblemReason, ToldTier
from kvheadroom.sources.metric_names import INFO_METRIC, LARGEST_WHOLE, TIER_INFO
from kvheadroom.sources.page_scanner import Series, number_of


class _InfoLabels:
    """The labels of an info metric, as numbers and words.

    They are Python's str() of the fields: `None` is the word for absent. A number that cannot be one of a running
    engine is dropped and reported.
    """

    def __init__(
        self, engine: str, labels: Mapping[str, str], problems: list[PageProblem], metric: str = INFO_METRIC
    ) -> None:
        self._engine = engine
        self._metric = metric
        self._labels = labels
        self._problems = problems

    def text(self, name: str) -> str | None:
        label = self._labels.get(name)
        return None if label in (None, "", "None") else label

    def number(self, name: str, most: float) -> float | None:
        """Above 0 and at most `most`."""
        text = self.text(name)
        if text is None:
            return None
        number = number_of(text)
        # A tiny number is no share and no concurrency of anything, and what is divided by it overflows.
        if number is None or not 1e-6 <= number <= most:
            self._drop(name, text)
            return None
        return number

    def whole(self, name: str, least: int = 1) -> int | None:
        """At least so much."""
        text = self.text(name)
        if text is None:
            return None
        if not (
            text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= LARGEST_WHOLE
        ):
            self._drop(name, text)
            return None
        return int(text)

    def words(self, name: str) -> tuple[str, ...] | None:
        text = self.text(name)
        return None if text is None else tuple(re.findall(r"[\w.]+", text))

    def _drop(self, name: str, text: str) -> None:
        detail = f"engine {self._engine}: {name}={text[:60]!r} of {self._metric} dropped, it cannot be true"
        self._problems.append(PageProblem(ProblemReason.BAD_VALUE, detail))


def info_of(name: str, infos: Sequence[Series], problems: list[PageProblem]) -> Series:
    """The info of one engine; of several the first that tells its blocks."""
    for series in infos[1:]:
        if series.labels != infos[0].labels:
            detail = f"engine {name}: {INFO_METRIC} stands there more than once; the first that tells its blocks is taken"
            problems.append(PageProblem(ProblemReason.DUPLICATE_SERIES, detail))
    return next((series for series in infos if series.labels.get("num_gpu_blocks", "").isdigit()), infos[0])


def info_fields(
    name: str, labels: Mapping[str, str], engines_with_info: int, problems: list[PageProblem]
) -> dict[str, Any]:
    """Fields of the snapshot.

    Args:
        engines_with_info: engines on the page that have such a series.
        problems: takes what cannot be true.
    """
    info = _InfoLabels(name, labels, problems)
    num_blocks, block_size = info.whole("num_gpu_blocks"), info.whole("block_size")
    kv_cache_dtype = info.text("cache_dtype")
    return {
        # The front end adds the blocks of its data-parallel engines up and repeats the sum on each of
        # them (vllm/v1/engine/core_client.py, 0.33.0); the other figures are per engine.
        "num_blocks": None if num_blocks is None else num_blocks // engines_with_info,
        "blocks_are_shared": engines_with_info > 1,
        "block_size": block_size,
        "attention_block_size": info.whole("effective_attention_block_size"),
        "pool_tokens": info.whole("kv_cache_size_tokens"),
        "max_concurrency": info.number("kv_cache_max_concurrency", LARGEST_WHOLE),
        "kv_cache_dtype": kv_cache_dtype,
        "prefix_match_unit": info.whole("prefix_match_unit"),
        "echoed": EchoedFlags(
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=info.number("gpu_memory_utilization", 1.0),
            kv_cache_memory_bytes=info.whole("kv_cache_memory_bytes"),
            num_gpu_blocks_override=info.whole("num_gpu_blocks_override"),
            enable_prefix_caching={"True": True, "False": False}.get(
                info.text("enable_prefix_caching") or ""
            ),
            block_size=block_size if info.text("user_specified_block_size") == "True" else None,
            kv_cache_dtype_skip_layers=info.words("kv_cache_dtype_skip_layers"),
            kv_offloading_size=info.number("kv_offloading_size", LARGEST_WHOLE),
            kv_offloading_backend=info.text("kv_offloading_backend"),
        ),
    }


def told_tier(name: str, labels: Mapping[str, str], problems: list[PageProblem]) -> ToldTier:
    """The tier in host memory as the engine tells it.

    Args:
        problems: takes what cannot be true.
    """
    info = _InfoLabels(name, labels, problems, TIER_INFO)
    # A tier that is smaller than one chunk has none, and vLLM starts with it.
    return ToldTier(
        num_chunks=info.whole("cpu_num_chunks", least=0),
        blocks_per_chunk=info.whole("cpu_blocks_per_chunk"),
        size_bytes=info.whole("cpu_kv_cache_size_bytes", least=0),
        size_tokens=info.whole("cpu_kv_cache_size_tokens", least=0),
    )
