"""A vLLM `/metrics` page -> one snapshot per engine. The only file that spells vLLM's metric names.

A scanner of our own rather than the official parser: a page has some 60 KB and 500 samples per engine,
of which some 16 are wanted. Tests hold it equal to `prometheus_client.parser` on every wanted sample.
Read: text format and OpenMetrics; names as `vllm:x` or, where an OpenMetrics server escapes the colon, `vllm_x`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

_WANTED = (INFO_METRIC, WAITING_BY_REASON, SLEEP_STATE, *GAUGES, *COUNTERS)
# One pass over the bytes finds the lines worth reading: some 16 of 500, and never the millions of a broken page.
_WANTED_LINE = re.compile(
    rb"^vllm[:_](" + b"|".join(name.encode() for name in _WANTED) + rb")(?![a-zA-Z0-9_:])[^\n]*", re.MULTILINE
)
_PREFERRED = {metric: next(n for n, f in GAUGES.items() if f == field) for metric, field in GAUGES.items()}
_START_LINE = re.compile(rb"^process_start_time_seconds[ \t]+(\S+)", re.MULTILINE)
# A family that is declared but has no samples yet is vLLM all the same.
_ANY_VLLM = re.compile(rb"^(?:# (?:HELP|TYPE) )?vllm[:_]", re.MULTILINE)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(?:,|(?=\}))')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r'\\[\\"n]')
_MAX_PROBLEMS = 20
MAX_LABEL_CHARACTERS = 4096
MAX_ENGINES = 1024
LARGEST_WHOLE = 2**53
"""Beyond this a float, and with it every metric, no longer tells whole numbers apart."""


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
    if _ANY_VLLM.search(body) is None:
        return _what_is_it(body)
    problems: list[PageProblem] = []
    samples: list[_Sample] = []
    for found in _WANTED_LINE.finditer(body):
        name = found[1].decode("ascii")
        try:
            samples.append(_parse_line(name, found[0], found.end(1) - found.start()))
        except (_BadLineError, UnicodeDecodeError) as error:
            shown = found[0][:120].decode(errors="replace")
            problems.append(PageProblem(ProblemReason.BAD_LINE, f"line dropped, {error}: {shown}"))
    start = _START_LINE.search(body)
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
        process_start_time_seconds=None if start is None else _start_time(start[1]),
        metrics=_metrics(body, {sample.name for sample in samples}),
    )


def _metrics(body: bytes, with_samples: set[str]) -> frozenset[str]:
    """The wanted metrics on a page: a multi-process server declares a gauge that it has not set yet."""
    names = {name for name in _WANTED if name in with_samples or b"# TYPE vllm:%b " % name.encode() in body}
    return frozenset(f"vllm:{_PREFERRED.get(name, name)}" for name in names)


def _start_time(text: bytes) -> float | None:
    number = _float([text])
    return number if number is not None and 0 < number < LARGEST_WHOLE else None


def _what_is_it(body: bytes) -> SourceFailure:
    reason = FailureReason.NOT_VLLM
    head = body.lstrip()[:200].lower()
    if not head:
        detail = "the answer is empty; is this vLLM's /metrics?"
    elif head.startswith(b"<"):
        detail = "the answer is an HTML page; is this vLLM's address?"
    elif re.search(rb"^(?:# TYPE )?ray_vllm", body, re.MULTILINE):
        detail = "the answer is Ray's page, which names vLLM's metrics otherwise; give the address of vLLM's own /metrics"
    elif re.search(rb"^# (?:HELP|TYPE) ", body, re.MULTILINE):
        reason = FailureReason.NO_VLLM_METRICS
        detail = (
            "the answer is a metrics page without any vllm: metric; "
            "another program, or vLLM with --disable-log-stats"
        )
    else:
        detail = f"the answer is no metrics page: {body[:60].decode(errors='replace')!r}"
    return SourceFailure("metrics", reason, detail)


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
            if len(value) > MAX_LABEL_CHARACTERS:
                raise _BadLineError(f"its label {label[1]} has {len(value)} characters")
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


@dataclass
class _Engine:
    """What a page says of one engine, while it is being read."""

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    """By field of the snapshot and name of the metric: old releases say some under two names."""
    info: dict[str, str] | None = None
    model_name: str | None = None
    sleeping: bool | None = None


def _collect(samples: list[_Sample], problems: list[PageProblem]) -> tuple[EngineSnapshot, ...]:
    engines: dict[str, _Engine] = {}
    for sample in samples:
        name = sample.labels.get("engine", "0")
        _take(engines.setdefault(name, _Engine()), name, sample, problems)
    names = sorted(
        (name for name, engine in engines.items() if engine.values or engine.info is not None),
        key=_engine_order,
    )
    if len(names) > MAX_ENGINES:
        detail = f"the page has {len(names)} engines; only the first {MAX_ENGINES} are read"
        problems.append(PageProblem(ProblemReason.BAD_VALUE, detail))
    with_info = sum(engine.info is not None for engine in engines.values())
    return tuple(_snapshot(name, engines[name], with_info, problems) for name in names[:MAX_ENGINES])


def _take(engine: _Engine, name: str, sample: _Sample, problems: list[PageProblem]) -> None:
    """Take one sample over."""
    metric, labels, value = sample
    if metric == INFO_METRIC:
        if engine.info is not None and engine.info != labels:
            detail = f"engine {name}: {metric} stands there more than once; the first that tells its blocks is taken"
            problems.append(PageProblem(ProblemReason.DUPLICATE_SERIES, detail))
        if engine.info is None or not engine.info.get("num_gpu_blocks", "").isdigit():
            engine.info = labels
        return
    engine.model_name = engine.model_name or labels.get("model_name") or None
    if metric == SLEEP_STATE:
        if labels.get("sleep_state") == "awake":
            engine.sleeping = value == 0
        return
    target = _field_of(metric, labels)
    if target is None:
        return
    fault = _impossible(target, value)
    if fault:
        detail = f"engine {name}: {metric} = {value} dropped, {fault}"
        problems.append(PageProblem(ProblemReason.BAD_VALUE, detail))
        return
    by_name = engine.values.setdefault(target, {})
    if metric in by_name:
        # Multi-process servers of old releases repeat a gauge per process; the dead ones stay at 0.
        detail = f"engine {name}: {metric} stands there more than once; the largest value is taken"
        problems.append(PageProblem(ProblemReason.DUPLICATE_SERIES, detail))
    by_name[metric] = max(by_name.get(metric, 0.0), value)


def _field_of(name: str, labels: Mapping[str, str]) -> str | None:
    if name == WAITING_BY_REASON:
        return WAITING_REASONS.get(labels.get("reason", ""))
    return GAUGES.get(name) or COUNTERS[name]


def _preferred(engine: str, by_name: Mapping[str, float], problems: list[PageProblem]) -> float:
    """The value under the newest name; that older names say otherwise is told."""
    (newest, value), *older = sorted(by_name.items(), key=lambda item: _WANTED.index(item[0]))
    for name, other in older:
        if other != value:
            detail = f"engine {engine}: {newest} = {value} and {name} = {other} are the same figure; the first is taken"
            problems.append(PageProblem(ProblemReason.DIFFERING_NAMES, detail))
    return value


def _impossible(field: str, value: float) -> str | None:
    if math.isnan(value):
        return "it is not a number"
    if value < 0:
        return "it is negative"
    if value > LARGEST_WHOLE:
        return "it is larger than any counter"
    # Rounding may push a full pool a hair over 1.
    if field in RATIOS and value > 1.0 + 1e-9:
        return "a share of the pool is at most 1"
    return None


def _engine_order(engine: str) -> tuple[int, int | str]:
    return (0, int(engine)) if engine.isascii() and engine.isdecimal() and len(engine) < 10 else (1, engine)


class _Info:
    """The labels of one engine's `cache_config_info`, as numbers and words.

    They are Python's str() of the fields: `None` is the word for absent. A number that cannot be one of a running
    engine is dropped and reported.
    """

    def __init__(self, engine: str, labels: Mapping[str, str], problems: list[PageProblem]) -> None:
        self._engine = engine
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
        number = _float([text])
        # A tiny number is no share and no concurrency of anything, and what is divided by it overflows.
        if number is None or not 1e-6 <= number <= most:
            self._drop(name, text)
            return None
        return number

    def whole(self, name: str) -> int | None:
        """1 or more."""
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) <= LARGEST_WHOLE):
            self._drop(name, text)
            return None
        return int(text)

    def words(self, name: str) -> tuple[str, ...] | None:
        text = self.text(name)
        return None if text is None else tuple(re.findall(r"[\w.]+", text))

    def _drop(self, name: str, text: str) -> None:
        detail = f"engine {self._engine}: {name}={text[:60]!r} of {INFO_METRIC} dropped, it cannot be true"
        self._problems.append(PageProblem(ProblemReason.BAD_VALUE, detail))


def _snapshot(
    name: str, engine: _Engine, engines_with_info: int, problems: list[PageProblem]
) -> EngineSnapshot:
    snapshot = EngineSnapshot(
        engine=name,
        model_name=engine.model_name,
        sleeping=engine.sleeping,
        **{target: _preferred(name, by_name, problems) for target, by_name in engine.values.items()},  # type: ignore[arg-type]
    )
    if engine.info is None:
        return snapshot
    info = _Info(name, engine.info, problems)
    total_blocks = info.whole("num_gpu_blocks")
    block_size = info.whole("block_size")
    kv_cache_dtype = info.text("cache_dtype")
    return replace(
        snapshot,
        # The front end adds the blocks of its data-parallel engines up and repeats the sum on each of
        # them (vllm/v1/engine/core_client.py, 0.33.0); the other figures are per engine.
        num_blocks=None if total_blocks is None else total_blocks // engines_with_info,
        blocks_are_shared=engines_with_info > 1,
        block_size=block_size,
        attention_block_size=info.whole("effective_attention_block_size"),
        pool_tokens=info.whole("kv_cache_size_tokens"),
        max_concurrency=info.number("kv_cache_max_concurrency", LARGEST_WHOLE),
        kv_cache_dtype=kv_cache_dtype,
        echoed=EchoedFlags(
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=info.number("gpu_memory_utilization", 1.0),
            kv_cache_memory_bytes=info.whole("kv_cache_memory_bytes"),
            num_gpu_blocks_override=info.whole("num_gpu_blocks_override"),
            enable_prefix_caching={"True": True, "False": False}.get(
                info.text("enable_prefix_caching") or ""
            ),
            block_size=block_size if info.text("user_specified_block_size") == "True" else None,
            kv_cache_dtype_skip_layers=info.words("kv_cache_dtype_skip_layers"),
        ),
    )
