"""vLLM's own metrics of the last day, as a Prometheus keeps them -> stretches of time that tell of reuse."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from kvheadroom.capacity.history import COUNTERS, Moment, growth, moment_of
from kvheadroom.capacity.readings import EngineSnapshot, FailureReason, SourceFailure, VllmPage
from kvheadroom.capacity.reuse import MOST_STRETCHES, STRETCH_SECONDS, Stretch, stretch_of
from kvheadroom.sources.metric_names import INFO_METRIC, TIER_INFO
from kvheadroom.sources.prometheus_api import SOURCE, PrometheusApi, RangeSeries
from kvheadroom.sources.prometheus_queries import START, VLLM, pages
from kvheadroom.sources.vllm_metrics import parse_page

_MEANS = ("kv_cache_usage_perc", "num_requests_waiting")
_READ = (
    "prompt_tokens_total",
    "prompt_tokens_by_source_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    INFO_METRIC,
    TIER_INFO,
)


class _Seen(NamedTuple):
    """One instant of one run of the server."""

    moment: Moment
    started_at: float | None


def read_stretches(
    api: PrometheusApi, select: str, now: EngineSnapshot, ends_at: float
) -> list[Stretch] | SourceFailure:
    """The last day of one engine, with the pool that it has; oldest first. Blocking.

    Args:
        select: matchers that name the server.
        now: the engine, as its page tells it.
        ends_at: unix seconds.
    """
    steps = MOST_STRETCHES + 1
    begins_at = ends_at - MOST_STRETCHES * STRETCH_SECONDS
    answers: dict[str, tuple[RangeSeries, ...]] = {}
    for name, query in _queries(select).items():
        answer = api.query_range(query, start=begins_at, steps=steps, step_seconds=STRETCH_SECONDS)
        if isinstance(answer, SourceFailure):
            return answer
        answers[name] = answer.series
    shown = pages(VLLM, answers, steps)
    if len(shown.series) > 1:
        names = ", ".join(sorted(f"{job}/{instance}" for job, instance in shown.series)[:_MOST_NAMED])
        return _failed(f"{select} matches several servers ({names}); narrow it with --select")
    if not shown.series:
        return _failed(
            f'it has none of vLLM\'s metrics of {select}; with --select \'job="vllm",instance="host:port"\' say how it knows the server'
        )
    [server] = shown.series
    seen = [
        _seen(text, begins_at + step * STRETCH_SECONDS, now) for step, text in enumerate(shown.of(server))
    ]
    return list(_stretches(seen))


_MOST_NAMED = 5


def _failed(detail: str) -> SourceFailure:
    return SourceFailure(SOURCE, FailureReason.NOT_FOUND, detail)


def _queries(select: str) -> dict[str, str]:
    """Name on the page -> PromQL."""
    queries = {f"vllm:{name}": f"vllm:{name}{{{select}}}" for name in _READ}
    window = f"[{STRETCH_SECONDS:.0f}s]"
    queries |= {f"vllm:{name}": f"avg_over_time(vllm:{name}{{{select}}}{window})" for name in _MEANS}
    # Without its own answer an engine of a page has no name.
    queries[VLLM.present] = f"{VLLM.present}{{{select}}}"
    queries[START] = f"{START} and on (job, instance) {VLLM.present}{{{select}}}"
    return queries


def _seen(text: str | None, at: float, now: EngineSnapshot) -> _Seen | None:
    """None where there is nothing of this engine, or it had another pool or tier."""
    page = None if text is None else parse_page(text.encode())
    if not isinstance(page, VllmPage):
        return None
    for engine in page.engines:
        is_same = engine.num_blocks in (None, now.num_blocks) and engine.told_tier in (None, now.told_tier)
        if engine.engine == now.engine and is_same:
            return _Seen(moment_of(engine, at), page.process_start_time_seconds)
    return None


def _stretches(seen: list[_Seen | None]) -> Iterator[Stretch]:
    follows = False
    for before, after in itertools.pairwise(seen):
        one = None if before is None or after is None else _stretch(before, after, follows=follows)
        follows = one is not None
        if one is not None:
            yield one


def _stretch(before: _Seen, after: _Seen, *, follows: bool) -> Stretch | None:
    """None across a restart."""
    grown = growth(before.moment, after.moment)
    fell = any(
        then < earlier for earlier, then in zip(grown.before, grown.after[: len(COUNTERS)], strict=False)
    )
    usage = after.moment.of("kv_usage_ratio")
    if before.started_at != after.started_at or fell or usage is None:
        return None
    waiting = after.moment.of("requests_waiting") or 0.0
    return stretch_of(grown, usage=usage, waiting=waiting, follows=follows)
