"""vLLM's own metrics, as a Prometheus keeps them -> what engines there were, and when."""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from kvheadroom.capacity.readings import SourceFailure, VllmPage
from kvheadroom.capacity.scraped_starts import SeenEngine
from kvheadroom.sources.metric_names import INFO_METRIC, LARGEST_WHOLE, SLEEP_STATE
from kvheadroom.sources.page_scanner import number_of
from kvheadroom.sources.prometheus_api import RangeSeries
from kvheadroom.sources.prometheus_parts import Answers
from kvheadroom.sources.prometheus_queries import START, VLLM, pages
from kvheadroom.sources.vllm_metrics import parse_page

_INFO, _SLEEP = f"vllm:{INFO_METRIC}", f"vllm:{SLEEP_STATE}"
_MOST_NAME = 1024
"""Characters of the name of an engine or a model; no vLLM gives a longer one."""
_NAMES = (VLLM.present, _INFO, _SLEEP, START)


def vllm_queries(select: str) -> dict[str, str]:
    """Name on the page -> PromQL.

    Args:
        select: matchers that narrow it, empty for everything.
    """
    queries = VLLM.queries(select, ())
    found = {name: queries[name] for name in _NAMES}
    # Which engines there are, and of which model: a value that moves would make each page another.
    found[VLLM.present] = f"0 * {found[VLLM.present]}"
    return found


def read_engines(answers: Answers, at: Callable[[int], float], steps: int) -> Iterator[SeenEngine]:
    """Every engine of every server in one part of a history, once for each time in a row at which its page said the same.

    Args:
        at: unix seconds of a step.
    """
    told = {name: answers[name] for name in _NAMES}
    shown = pages(VLLM, told, steps)
    doubts = _Doubts(told)
    for server in shown.series:
        runs = _runs(
            (text, doubts.started_at(server, step), doubts.blocks(server, step))
            for step, text in enumerate(shown.of(server))
        )
        for (text, starts, blocks), first, last in runs:
            if text is not None:
                yield from _engines(text, server[1], starts, blocks, (at(first), at(last)))


_Told = tuple[str | None, tuple[float, ...], tuple[tuple[str, tuple[int, ...]], ...]]


def _runs(told: Iterable[_Told]) -> Iterator[tuple[_Told, int, int]]:
    """(what was told, from which step on, until which step)."""
    for one, run in itertools.groupby(enumerate(told), key=operator.itemgetter(1)):
        steps = [step for step, _ in run]
        yield one, steps[0], steps[-1]


def _engines(
    text: str,
    address: str,
    starts: tuple[float, ...],
    several_blocks: tuple[tuple[str, tuple[int, ...]], ...],
    seen: tuple[float, float],
) -> Iterator[SeenEngine]:
    page = _page(text)
    if page is None:
        return
    blocks_of = dict(several_blocks)
    for engine in page.engines:
        if len(engine.engine) > _MOST_NAME or len(engine.model_name or "") > _MOST_NAME:
            continue
        name = page.engines[0].engine if engine.blocks_are_shared else engine.engine
        several = blocks_of.get(engine.engine, ())
        if len(starts) < 2 and not several:
            yield SeenEngine(
                server=address,
                engine=name,
                started_at=starts[0] if starts else None,
                num_blocks=engine.num_blocks,
                seen=seen,
                snapshot=engine,
            )
            continue
        for started_at in starts or (None,):
            for blocks in several if started_at is None else (None,):
                yield SeenEngine(
                    server=address,
                    engine=name,
                    started_at=started_at,
                    num_blocks=blocks,
                    seen=seen,
                    snapshot=None,
                )


@lru_cache(maxsize=1024)
def _page(text: str) -> VllmPage | None:
    page = parse_page(text.encode())
    return None if isinstance(page, SourceFailure) else page


class _Doubts:
    """Where the series of one instant are those of two processes: no page of one server has them together."""

    def __init__(self, answers: Answers) -> None:
        self._starts = _by_server(answers[START])
        self._infos = _by_server(answers[_INFO])

    def started_at(self, server: tuple[str, ...], step: int) -> tuple[float, ...]:
        """Each start time that a server has."""
        found = (number_of(one.values[step]) for one in self._starts.get(server, ()) if step in one.values)
        return tuple(sorted({one for one in found if one is not None and 0 < one < LARGEST_WHOLE}))

    def blocks(self, server: tuple[str, ...], step: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Engine -> numbers of blocks, where there are several of one engine."""
        found: dict[str, set[int]] = {}
        for one in self._infos.get(server, ()):
            blocks = one.labels.get("num_gpu_blocks", "")
            if step in one.values and blocks.isascii() and blocks.isdecimal() and len(blocks) < 16:
                found.setdefault(one.labels.get("engine", "0"), set()).add(int(blocks))
        return tuple(
            (engine, tuple(sorted(these))) for engine, these in sorted(found.items()) if len(these) > 1
        )


def _by_server(
    series: Sequence[RangeSeries],
) -> Mapping[tuple[str, ...], list[RangeSeries]]:
    found: dict[tuple[str, ...], list[RangeSeries]] = {}
    for one in series:
        found.setdefault(VLLM.server(one.labels), []).append(one)
    return found
