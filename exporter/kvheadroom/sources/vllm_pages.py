"""Asking a vLLM server for its page: the wanted metrics alone where it gives them right, else the whole page.

A whole page costs the server five to twelve times as much as the wanted samples. vLLM answers `/metrics/?name[]=...`
(with the slash) by the application that its route `/metrics` hides, on its event loop: filtered in a single process, with
an empty body where several processes share their metrics (0.8.5 to 0.33.0). So the whole page is asked for first, at
`/metrics`, which vLLM renders beside its event loop; then the filtered one is tried, and kept to while it tells as much.
"""

import operator
import time

from kvheadroom.capacity.readings import EngineSnapshot, FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch
from kvheadroom.sources.metric_names import NAMES
from kvheadroom.sources.vllm_metrics import parse_page

WHOLE_PAGE = "/metrics"
FILTERED_PAGE = "/metrics/?" + "&".join(
    f"name%5B%5D={name}" for name in (*(f"vllm:{name}" for name in NAMES), "process_start_time_seconds")
)
# What a filtered page may be at most of the whole one; a larger one was not filtered.
LARGEST_SHARE = 0.5

# Failures of a filtered request that say nothing against the whole page.
_OF_THE_FILTER = frozenset(
    {
        FailureReason.HTTP_STATUS,
        FailureReason.UNAUTHORIZED,
        FailureReason.BAD_ANSWER,
        FailureReason.NOT_VLLM,
        FailureReason.NO_VLLM_METRICS,
        FailureReason.TOO_LARGE,
    }
)

_FIGURES = operator.attrgetter(*EngineSnapshot.__slots__)

_Told = frozenset[tuple[str, str]]


class VllmPages:
    """The pages of one server, and what was found out about asking it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._whole: tuple[_Told, int] | None = None
        """What the last whole page told, and its bytes; None until there is one of this process."""
        self._refused = False
        """Whether this process does not give the filtered page right."""
        self._process_start: float | None = None
        self._shape: object = None
        """Of the last page, filtered or whole, that told all there is."""

    async def fetch(self, endpoint: Endpoint, deadline: float) -> tuple[Scrape, VllmPage] | SourceFailure:
        """Scrape and read one page, until the deadline (of the monotonic clock) whatever is asked on the way."""
        answer = await self._ask(endpoint, deadline)
        if isinstance(answer, SourceFailure):
            # What answers next may be another process.
            self._forget()
            return answer
        start = answer[1].process_start_time_seconds
        if start != self._process_start:
            if self._process_start is not None:
                self._forget()
            self._process_start = start
        return answer

    async def fetch_whole(
        self, endpoint: Endpoint, deadline: float
    ) -> tuple[Scrape, VllmPage] | SourceFailure:
        """Scrape and read the whole page, with everything that vLLM tells."""
        return await self._get(endpoint, WHOLE_PAGE, deadline)

    def _forget(self) -> None:
        self._whole, self._refused, self._process_start, self._shape = None, False, None, None

    async def _ask(self, endpoint: Endpoint, deadline: float) -> tuple[Scrape, VllmPage] | SourceFailure:
        if self._whole is not None and not self._refused:
            told, size = self._whole
            answer = await self._get(endpoint, FILTERED_PAGE, deadline)
            if isinstance(answer, SourceFailure):
                if answer.reason not in _OF_THE_FILTER:
                    return answer
            elif len(answer[0].body) <= size * LARGEST_SHARE:
                shape = _shape(answer[1])
                if shape == self._shape:
                    return answer
                now = _told(answer[1])
                if told <= now:
                    self._whole, self._shape = (now, size), shape
                    return answer
            self._refused = True
        answer = await self._get(endpoint, WHOLE_PAGE, deadline)
        if not isinstance(answer, SourceFailure) and answer[1].engines:
            shape = _shape(answer[1])
            if self._whole is None or shape != self._shape:
                told = _told(answer[1])
                if self._whole is not None and told != self._whole[0]:
                    # It was the page that changed, not the filter that failed.
                    self._refused = False
                self._whole, self._shape = (told, len(answer[0].body)), shape
        return answer

    async def _get(
        self, endpoint: Endpoint, path: str, deadline: float
    ) -> tuple[Scrape, VllmPage] | SourceFailure:
        scrape = await fetch(
            self._session,
            endpoint,
            path,
            source="metrics",
            timeout_seconds=max(0.0, deadline - time.monotonic()),
        )
        if isinstance(scrape, SourceFailure):
            return scrape
        page = parse_page(scrape.body)
        return page if isinstance(page, SourceFailure) else (scrape, page)


def _told(page: VllmPage) -> _Told:
    """(engine, figure) of everything that a page tells."""
    return frozenset(
        (engine.engine, name)
        for engine in page.engines
        for name in engine.__slots__
        if getattr(engine, name) is not None
    ) | frozenset(("", name) for name in page.metrics)


def _shape(page: VllmPage) -> object:
    """Equal for pages that tell the same; cheaper than what they tell."""
    return page.metrics, [
        (engine.engine, [value is None for value in _FIGURES(engine)]) for engine in page.engines
    ]
