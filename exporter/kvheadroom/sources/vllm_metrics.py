"""A vLLM `/metrics` page -> one snapshot per engine: what its samples mean, whatever the release.

Read: text format and OpenMetrics; names as `vllm:x` or, where an OpenMetrics server escapes the colon, `vllm_x`; pages of
Ray's agents, which write `ray_vllm_x` or `ray_vllm:x`.
The names stand in `metric_names`, the reading of lines in `page_scanner`.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvheadroom.capacity.readings import (
    EngineSnapshot,
    FailureReason,
    PageProblem,
    ProblemReason,
    SourceFailure,
    VllmPage,
)
from kvheadroom.sources.lmcache_metrics import with_lmcache
from kvheadroom.sources.metric_names import (
    BY_FLAG,
    INFO_METRIC,
    LARGEST_WHOLE,
    NAMES,
    NEWEST,
    RANK,
    SLEEP_STATE,
    TIER_INFO,
)
from kvheadroom.sources.page_scanner import (
    BadLineError,
    Series,
    number_of,
    read_line,
    series_before,
    wanted_lines,
)
from kvheadroom.sources.seldom_lines import SeldomLines
from kvheadroom.sources.vllm_info import info_fields, info_of, told_tier

MAX_ENGINES = 1024
MAX_WANTED_LINES = 32 * MAX_ENGINES
_MAX_PROBLEMS = 20
_START = b"process_start_time_seconds "
_ANY_FAMILY = re.compile(rb"^# (?:HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]{0,80})", re.MULTILINE)
# A family that is declared but has no samples yet is vLLM all the same.
_ANY_VLLM = re.compile(rb"^(?:# (?:HELP|TYPE) )?(?:ray_)?vllm[:_]", re.MULTILINE)

# Until 0.8 these counted blocks, and the info metric had no engine label; both changed in 0.9.0
# (v1/core/kv_cache_manager.py get_computed_blocks, v1/metrics/loggers.py log_metrics_info).
_ONCE_IN_BLOCKS = frozenset({"gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"})

# Layouts that are remembered: those of as many kinds of servers, whose wanted lines are not larger than this.
_MAX_LAYOUTS = 1024
_MAX_LAYOUT_BYTES = 64 * 1024


def parse_page(body: bytes, earlier: SeldomLines | None = None) -> VllmPage | SourceFailure:
    """Read one page; a failure only when the bytes are no metrics page of a vLLM server.

    Lines that cannot be read and values that cannot be true are dropped and reported as problems: a page
    with one bad line still tells the rest.

    Args:
        earlier: taken over where the page is of the same process. It was asked for without these.
    """
    lines = wanted_lines(body)
    if not lines and _ANY_VLLM.search(body) is None:
        return _what_is_it(body)
    if len(lines) > MAX_WANTED_LINES:
        detail = f"the answer has {len(lines)} lines of the metrics that are read; no vLLM server has so many"
        return SourceFailure("metrics", FailureReason.TOO_LARGE, detail)
    process_start = _start_time(body)
    declared_earlier: frozenset[str] = frozenset()
    if earlier is not None and earlier.process_start == process_start:
        lines = [*earlier.lines, *lines]
        declared_earlier = earlier.metrics
    problems: list[PageProblem] = []
    layout, values = _read(lines, problems)
    engines = tuple(_snapshot(engine, layout, values, problems) for engine in layout.engines)
    # Only servers with several processes show others' metrics, and those tell no start of theirs.
    if len(engines) == 1 and process_start is None:
        engines = (with_lmcache(engines[0], body, problems),)
    if not engines:
        problems.append(
            PageProblem(
                ProblemReason.NO_ENGINE_SERIES,
                "the page has vLLM's metrics but none of an engine: the server is still starting",
            )
        )
    return VllmPage(
        format="openmetrics" if body[-20:].rstrip().endswith(b"# EOF") else "text",
        engines=engines,
        problems=tuple(problems[:_MAX_PROBLEMS]),
        process_start_time_seconds=process_start,
        metrics=_metrics(body, layout) | declared_earlier,
    )


def _read(lines: list[tuple[bytes, bytes]], problems: list[PageProblem]) -> tuple["_Layout", list[float]]:
    """What the lines say of which engine, and the value of each.

    What stands before the values hardly ever changes between pages, so it is read once and then known again.
    """
    before, texts = zip(*lines, strict=True) if lines else ((), ())
    try:
        values = list(map(float, texts))
        # float() also takes "1_000", which is no number of the exposition format.
        if sum(map(len, before)) <= _MAX_LAYOUT_BYTES and b"_" not in b"".join(texts):
            return _known_layout(before), values
    except ValueError:
        pass
    samples: list[tuple[Series, float]] = []
    for start, end in lines:
        line = start[1:] + end
        try:
            samples.append(read_line(line))
        except BadLineError as error:
            shown = line[:120].decode(errors="replace")
            problems.append(PageProblem(ProblemReason.BAD_LINE, f"line dropped, {error}: {shown}"))
    layout = _layout([series for series, _ in samples])
    return layout, [value for _, value in samples]


@lru_cache(maxsize=_MAX_LAYOUTS)
def _known_layout(before: tuple[bytes, ...]) -> "_Layout":
    return _layout([series_before(text) for text in before])


def _metrics(body: bytes, layout: "_Layout") -> frozenset[str]:
    """The wanted metrics on a page: a multi-process server declares a gauge that it has not set yet."""
    declared = [metric for metric, declaration in layout.without_samples if declaration in body]
    return layout.metrics.union(declared) if declared else layout.metrics


def _start_time(body: bytes) -> float | None:
    at = 0 if body.startswith(_START) else body.find(b"\n" + _START) + 1
    if not body.startswith(_START, at):
        return None
    line = body[at + len(_START) : at + len(_START) + 64].split(b"\n", 1)[0].split()
    number = number_of(line[0].decode(errors="replace")) if line else None
    return number if number is not None and 0 < number < LARGEST_WHOLE else None


def _what_is_it(body: bytes) -> SourceFailure:
    reason = FailureReason.NOT_VLLM
    head = body.lstrip()[:200].lower()
    if not head:
        detail = "the answer is empty; is this vLLM's /metrics?"
    elif head.startswith(b"<"):
        detail = "the answer is an HTML page; is this vLLM's address?"
    elif family := _ANY_FAMILY.search(body):
        reason = FailureReason.NO_VLLM_METRICS
        detail = (
            f"the answer is a metrics page without any vllm: metric, of {family[1].decode()} and others; "
            "another program, or vLLM with --disable-log-stats"
        )
    else:
        detail = f"the answer is no metrics page: {body[:60].decode(errors='replace')!r}"
    return SourceFailure("metrics", reason, detail)


@dataclass(frozen=True, slots=True)
class _EngineLayout:
    """Which samples of a page are one engine's, by their index.

    Attributes:
        static: fields of the snapshot that no value decides.
        single: (field, index, largest value that can be true) of figures that stand there once.
        several: (field, indexes) of those that stand there under two names, once per process, or in blocks.
        sleep: index of the sample that tells whether it is awake.
        block_factor: tokens in what the counters of `_ONCE_IN_BLOCKS` count; None where that is not known.
        problems: what cannot be true of its info metric.
    """

    name: str
    static: Mapping[str, Any]
    single: tuple[tuple[str, int, float], ...]
    several: tuple[tuple[str, tuple[int, ...]], ...]
    sleep: int | None
    block_factor: int | None
    problems: tuple[PageProblem, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """What stands on a page beside the values.

    Attributes:
        metrics: the newest names, with `vllm:`, of the metrics that have samples, but for those that hang on a flag.
        without_samples: such names of the others, each with what declares it.
    """

    series: tuple[Series, ...]
    engines: tuple[_EngineLayout, ...]
    metrics: frozenset[str]
    without_samples: tuple[tuple[str, bytes], ...]


def _layout(series: Sequence[Series]) -> _Layout:
    # By server: infos without an engine are of all its engines (up to 0.8).
    of_all: dict[str, list[Series]] = {}
    server_of: dict[str, str] = {}
    indexes: dict[str, list[int]] = {}
    for index, one in enumerate(series):
        server_of[one.engine] = one.server
        if one.metric == INFO_METRIC and "engine" not in one.labels:
            of_all.setdefault(one.server, []).append(one)
        elif one.field is not None or one.metric in (INFO_METRIC, SLEEP_STATE, TIER_INFO):
            indexes.setdefault(one.engine, []).append(index)
    # An engine that only says whether it sleeps has not started.
    names = [
        name
        for name, own in indexes.items()
        if any(series[index].metric not in (SLEEP_STATE, TIER_INFO) for index in own)
    ]
    if not names:
        names = [one.engine for infos in of_all.values() for one in infos[:1]]
    names.sort(key=_engine_order)
    infos: dict[str, list[Series]] = {}
    with_info: Counter[str] = Counter()
    for name in names:
        own = [series[index] for index in indexes.get(name, ()) if series[index].metric == INFO_METRIC]
        infos[name] = own or of_all.get(server_of[name], [])
        with_info[server_of[name]] += bool(infos[name])
    engines = [
        _engine_layout(name, series, indexes.get(name, []), infos[name], with_info[server_of[name]])
        for name in names[:MAX_ENGINES]
    ]
    if len(names) > MAX_ENGINES:
        detail = f"the page has {len(names)} engines; only the first {MAX_ENGINES} are read"
        problem = PageProblem(ProblemReason.BAD_VALUE, detail)
        engines[0] = replace(engines[0], problems=(problem, *engines[0].problems))
    metrics = frozenset(f"vllm:{NEWEST[one.metric]}" for one in series if one.metric not in BY_FLAG)
    without = [
        (newest, b"# TYPE vllm:%b " % name.encode())
        for name in NAMES
        if name not in BY_FLAG and (newest := f"vllm:{NEWEST[name]}") not in metrics
    ]
    return _Layout(tuple(series), tuple(engines), metrics, tuple(without))


def _engine_layout(
    name: str, series: Sequence[Series], indexes: list[int], infos: list[Series], engines_with_info: int
) -> _EngineLayout:
    by_field: dict[str, list[int]] = {}
    sleep = None
    for index in indexes:
        one = series[index]
        if one.field is not None:
            by_field.setdefault(one.field, []).append(index)
        elif one.metric == SLEEP_STATE and one.labels.get("sleep_state") == "awake":
            sleep = index
    static: dict[str, Any] = {
        "engine": name,
        "model_name": next(
            (model for index in indexes if (model := series[index].labels.get("model_name"))), None
        ),
    }
    problems: list[PageProblem] = []
    block_factor: int | None = None
    if infos:
        info = info_of(name, infos, problems)
        static |= info_fields(name, info.labels, engines_with_info, problems)
        block_factor = 1 if "engine" in info.labels else static["block_size"]
    tier = next((series[index] for index in indexes if series[index].metric == TIER_INFO), None)
    if tier is not None:
        static["told_tier"] = told_tier(name, tier.labels, problems)
    plain = {
        target: found[0]
        for target, found in by_field.items()
        if len(found) == 1 and series[found[0]].metric not in _ONCE_IN_BLOCKS
    }
    return _EngineLayout(
        name=name,
        static=static,
        single=tuple((target, index, series[index].most) for target, index in plain.items()),
        several=tuple((target, tuple(found)) for target, found in by_field.items() if target not in plain),
        sleep=sleep,
        block_factor=block_factor,
        problems=tuple(problems),
    )


def _snapshot(
    engine: _EngineLayout,
    layout: _Layout,
    values: list[float],
    problems: list[PageProblem],
) -> EngineSnapshot:
    problems += engine.problems
    fields = dict(engine.static)
    for target, index, most in engine.single:
        value = values[index]
        if 0.0 <= value <= most:
            fields[target] = value
        else:
            problems.append(_impossible(layout.series[index], value))
    for target, indexes in engine.several:
        taken = _of_several([(layout.series[index], values[index]) for index in indexes], problems)
        if taken is not None:
            metric, value = taken
            fields[target] = value if metric not in _ONCE_IN_BLOCKS else _tokens(value, engine)
    if engine.sleep is not None:
        fields["sleeping"] = values[engine.sleep] == 0
    return EngineSnapshot(**fields)


def _tokens(value: float, engine: _EngineLayout) -> float | None:
    return None if engine.block_factor is None else value * engine.block_factor


def _of_several(samples: list[tuple[Series, float]], problems: list[PageProblem]) -> tuple[str, float] | None:
    """(metric, value) of a figure that stands on the page more than once; None where no value can be true.

    Multi-process servers of old releases repeat a gauge per process, and the dead ones stay at 0: the largest is
    taken. Of two names the newer counts, unless it alone is repeated so (`kv_cache_usage_perc` in 0.9.2 to 0.10.2,
    which lacks the mode that `gpu_cache_usage_perc` has there).
    """
    engine = samples[0][0].engine
    largest: dict[str, float] = {}
    times: Counter[str] = Counter()
    repeated: set[str] = set()
    for series, value in samples:
        metric = series.metric
        if not 0.0 <= value <= series.most:
            problems.append(_impossible(series, value))
            continue
        if "pid" in series.labels:
            repeated.add(metric)
        times[metric] += 1
        largest[metric] = max(largest.get(metric, 0.0), value)
    for metric, count in times.items():
        if count > 1:
            why = ", once for each process (a multi-process gauge)" if metric in repeated else ""
            detail = f"engine {engine}: {metric} stands there {count} times{why}; the largest value is taken"
            problems.append(PageProblem(ProblemReason.DUPLICATE_SERIES, detail))
    if not largest:
        return None
    (taken, value), *others = sorted(largest.items(), key=lambda item: (item[0] in repeated, RANK[item[0]]))
    for name, other in others:
        if other != value and (name in repeated) == (taken in repeated):
            detail = (
                f"engine {engine}: {taken} = {value} and {name} = {other} are the same figure; "
                "the first is taken"
            )
            problems.append(PageProblem(ProblemReason.DIFFERING_NAMES, detail))
    return taken, value


def _impossible(series: Series, value: float) -> PageProblem:
    if math.isnan(value):
        why = "it is not a number"
    elif value < 0:
        why = "it is negative"
    elif series.most < LARGEST_WHOLE:
        why = "a share of the pool is at most 1"
    else:
        why = "it is larger than any counter"
    return PageProblem(
        ProblemReason.BAD_VALUE, f"engine {series.engine}: {series.metric} = {value} dropped, {why}"
    )


def _engine_order(engine: str) -> tuple[int, int | str]:
    return (0, int(engine)) if engine.isascii() and engine.isdecimal() and len(engine) < 10 else (1, engine)
