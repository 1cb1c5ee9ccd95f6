"""A vLLM `/metrics` page -> one snapshot per engine. The only file that spells vLLM's metric names.

A scanner of our own rather than the official parser: a page has some 60 KB and 500 samples per engine,
of which some 16 are wanted. Tests hold it equal to `prometheus_client.parser` on every wanted sample.
Read: text format and OpenMetrics; names as `vllm:x` or, where an OpenMetrics server escapes the colon, `vllm_x`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from kvheadroom.capacity.readings import (
    EchoedFlags,
    EngineSnapshot,
    FailureReason,
    PageProblem,
    ProblemReason,
    SourceFailure,
    VllmPage,
)

INFO_METRIC = "cache_config_info"
PROCESS_START = b"process_start_time_seconds"
WAITING_BY_REASON = "num_requests_waiting_by_reason"
SLEEP_STATE = "engine_sleep_state"

# vLLM's sample name (without `vllm:`) -> field of EngineSnapshot. Where a release says one thing under two
# names, both stand here, the preferred one first (0.9.2-0.10.2 show both spellings of the usage).
GAUGES: Mapping[str, str] = {
    "kv_cache_usage_perc": "kv_usage_ratio",
    "gpu_cache_usage_perc": "kv_usage_ratio",
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
}
COUNTERS: Mapping[str, str] = {
    "num_preemptions_total": "preemptions_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
    "external_prefix_cache_queries_total": "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total": "external_prefix_cache_hits_total",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
}
WAITING_REASONS: Mapping[str, str] = {
    "capacity": "requests_waiting_capacity",
    "deferred": "requests_waiting_deferred",
}
RATIOS = frozenset({"kv_usage_ratio"})

_WANTED = frozenset({INFO_METRIC, WAITING_BY_REASON, SLEEP_STATE, *GAUGES, *COUNTERS})
_NAME = re.compile(rb"vllm[:_]([a-zA-Z0-9_:]+)")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(?:,|(?=\}))')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r'\\[\\"n]')
_MAX_PROBLEMS = 20


class _Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class _BadLineError(ValueError):
    pass


def parse_page(body: bytes) -> VllmPage | SourceFailure:
    """Read one page; a failure only when the bytes are no metrics page of a vLLM server.

    Lines that cannot be read and values that cannot be true are dropped and reported as problems: a page
    with one bad line still tells the rest.
    """
    problems: list[PageProblem] = []
    samples: list[_Sample] = []
    process_start: float | None = None
    saw_vllm = False
    for raw in body.split(b"\n"):
        if raw.startswith(b"#"):
            # A family that is declared but has no samples yet is vLLM all the same.
            saw_vllm = saw_vllm or raw[7:12] in (b"vllm:", b"vllm_")
            continue
        match = _NAME.match(raw)
        if match is None:
            if raw.startswith(PROCESS_START):
                process_start = _float(raw[len(PROCESS_START) :].split()[0:1])
            continue
        saw_vllm = True
        name = match[1].decode("ascii")
        if name not in _WANTED:
            continue
        try:
            samples.append(_parse_line(name, raw, match.end()))
        except (_BadLineError, UnicodeDecodeError) as error:
            problems.append(
                PageProblem(
                    ProblemReason.BAD_LINE, f"line dropped, {error}: {raw[:120].decode(errors='replace')}"
                )
            )
    if not saw_vllm:
        return SourceFailure("metrics", FailureReason.NOT_VLLM, _what_is_it(body))
    engines = _collect(samples, problems)
    if not engines:
        problems.append(
            PageProblem(
                ProblemReason.NO_ENGINE_SERIES,
                "the page has vLLM's metrics but none of an engine: the server is still starting",
            )
        )
    return VllmPage(
        format="openmetrics" if body.rstrip().endswith(b"# EOF") else "text",
        engines=engines,
        problems=tuple(problems[:_MAX_PROBLEMS]),
        process_start_time_seconds=process_start,
    )


def _what_is_it(body: bytes) -> str:
    head = body.lstrip()[:200].lower()
    if not head:
        return "the answer is empty; is this vLLM's /metrics?"
    if head.startswith((b"<!doctype", b"<html", b"<")):
        return "the answer is an HTML page; is this vLLM's address?"
    if b"\n# TYPE " in body or body.startswith((b"# HELP", b"# TYPE")):
        return (
            "the answer is a metrics page without any vllm: metric; "
            "another program, or vLLM with --disable-log-stats"
        )
    return f"the answer is no metrics page: {body[:60].decode(errors='replace')!r}"


def _parse_line(name: str, raw: bytes, at: int) -> _Sample:
    line = raw.decode("utf-8").rstrip("\r")
    labels: dict[str, str] = {}
    rest = line[at:]
    if rest.startswith("{"):
        position = 1
        while True:
            label = _LABEL.match(rest, position)
            if label is None:
                break
            value = label[2]
            labels[label[1]] = _ESCAPE.sub(lambda m: _ESCAPES[m[0]], value) if "\\" in value else value
            position = label.end()
        end = rest[position:].lstrip()
        if not end.startswith("}"):
            raise _BadLineError("its labels are not well formed")
        rest = end[1:]
    elif rest[:1] not in (" ", "\t"):
        raise _BadLineError("no value after the name")
    fields = rest.split()
    if not fields:
        raise _BadLineError("it has no value")
    number = _float(fields)
    if number is None:
        raise _BadLineError(f"{fields[0]!r} is no number")
    return _Sample(name, labels, number)


def _float(fields: list[str] | list[bytes]) -> float | None:
    try:
        # float() also takes "1_000", which is no number of the exposition format
        return float(fields[0]) if fields and b"_" not in bytes(str(fields[0]), "utf-8") else None
    except ValueError:
        return None


def _collect(samples: list[_Sample], problems: list[PageProblem]) -> tuple[EngineSnapshot, ...]:
    values: dict[str, dict[str, float]] = {}
    infos: dict[str, dict[str, str]] = {}
    model_names: dict[str, str] = {}
    taken_from: dict[tuple[str, str], str] = {}
    sleeping: dict[str, bool] = {}
    for name, labels, value in samples:
        engine = labels.get("engine", "0")
        if name == INFO_METRIC:
            infos[engine] = labels
            continue
        if name == SLEEP_STATE:
            if labels.get("sleep_state") == "awake":
                sleeping[engine] = value == 0
            if labels.get("model_name"):
                model_names.setdefault(engine, labels["model_name"])
            continue
        field = _field_of(name, labels)
        if field is None:
            continue
        if labels.get("model_name"):
            model_names.setdefault(engine, labels["model_name"])
        fault = _impossible(field, value)
        if fault:
            problems.append(
                PageProblem(ProblemReason.BAD_VALUE, f"engine {engine}: {name} = {value} dropped, {fault}")
            )
            continue
        known = values.setdefault(engine, {})
        if field not in known:
            known[field] = value
            taken_from[engine, field] = name
        elif taken_from[engine, field] == name:
            # Multi-process servers of old releases repeat a gauge per process; the dead ones stay at 0.
            problems.append(
                PageProblem(
                    ProblemReason.DUPLICATE_SERIES,
                    f"engine {engine}: {name} stands there more than once; the largest value is taken",
                )
            )
            known[field] = max(known[field], value)
        elif _rank(name) < _rank(taken_from[engine, field]):
            known[field] = value
            taken_from[engine, field] = name

    engines = sorted({*values, *infos}, key=_engine_order)
    return tuple(
        replace(
            _snapshot(engine, values.get(engine, {}), infos.get(engine), len(infos), model_names.get(engine)),
            sleeping=sleeping.get(engine),
        )
        for engine in engines
    )


def _field_of(name: str, labels: Mapping[str, str]) -> str | None:
    if name == WAITING_BY_REASON:
        return WAITING_REASONS.get(labels.get("reason", ""))
    return GAUGES.get(name) or COUNTERS[name]


def _rank(name: str) -> int:
    return list(GAUGES).index(name)


def _impossible(field: str, value: float) -> str | None:
    if math.isnan(value):
        return "it is not a number"
    if value < 0:
        return "it is negative"
    if value == float("inf"):
        return "it is infinite"
    # Rounding may push a full pool a hair over 1.
    if field in RATIOS and value > 1.0 + 1e-9:
        return "a share of the pool is at most 1"
    return None


def _engine_order(engine: str) -> tuple[int, int | str]:
    return (0, int(engine)) if engine.isdecimal() else (1, engine)


def _snapshot(
    engine: str,
    values: Mapping[str, float],
    info: Mapping[str, str] | None,
    engines_with_info: int,
    model_name: str | None,
) -> EngineSnapshot:
    snapshot = EngineSnapshot(engine=engine, model_name=model_name, **values)  # type: ignore[arg-type]
    if info is None:
        return snapshot
    total_blocks = _whole(info.get("num_gpu_blocks"))
    return replace(
        snapshot,
        # The front end adds the blocks of its data-parallel engines up and repeats the sum on each of
        # them (vllm/v1/engine/core_client.py, 0.33.0); the other figures are per engine.
        num_blocks=None if total_blocks is None else total_blocks // engines_with_info,
        block_size=_whole(info.get("block_size")),
        attention_block_size=_whole(info.get("effective_attention_block_size")),
        pool_tokens=_whole(info.get("kv_cache_size_tokens")),
        max_concurrency=_number(info.get("kv_cache_max_concurrency")),
        kv_cache_dtype=_text(info.get("cache_dtype")),
        echoed=EchoedFlags(
            kv_cache_dtype=_text(info.get("cache_dtype")),
            gpu_memory_utilization=_number(info.get("gpu_memory_utilization")),
            kv_cache_memory_bytes=_whole(info.get("kv_cache_memory_bytes")),
            num_gpu_blocks_override=_whole(info.get("num_gpu_blocks_override")),
            enable_prefix_caching={"True": True, "False": False}.get(info.get("enable_prefix_caching", "")),
            block_size=_whole(info.get("block_size"))
            if info.get("user_specified_block_size") == "True"
            else None,
            kv_cache_dtype_skip_layers=_words(info.get("kv_cache_dtype_skip_layers")),
        ),
    )


def _text(label: str | None) -> str | None:
    """Labels of the info metric are Python's str() of the field: `None` is the word for absent."""
    return None if label in (None, "", "None") else label


def _number(label: str | None) -> float | None:
    text = _text(label)
    try:
        number = None if text is None else float(text)
    except ValueError:
        return None
    return number if number is not None and 0 <= number < float("inf") else None


def _whole(label: str | None) -> int | None:
    text = _text(label)
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _words(label: str | None) -> tuple[str, ...] | None:
    text = _text(label)
    return None if text is None else tuple(re.findall(r"[\w.]+", text))
