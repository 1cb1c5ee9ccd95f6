"""Asking a vLLM server for its page: the wanted metrics alone where it gives them right, else the whole page.

A whole page costs the server several times as much as the wanted samples (`make bench` measures it). vLLM answers `/metrics/?name[]=...`
(with the slash) by the application that its route `/metrics` hides, on its event loop: filtered in a single process, with
an empty body where several processes share their metrics (0.8.5 to 0.33.0). So the whole page is asked for first, at
`/metrics`, which vLLM renders beside its event loop; then the filtered one is tried, and kept to while it tells as much.
What costs the server most is left out of most filtered pages, and stands on them as it was on the last that had it.
"""

import operator
import time
from collections.abc import Iterable

from kvheadroom.capacity.readings import EngineSnapshot, FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch
from kvheadroom.sources.metric_names import NAMES, OFTEN_NAMES
from kvheadroom.sources.seldom_lines import SeldomLines, seldom_lines
from kvheadroom.sources.vllm_metrics import parse_page

WHOLE_PAGE = "/metrics"


def _filtered(names: Iterable[str]) -> str:
    wanted = (*(f"vllm:{name}" for name in names), "process_start_time_seconds")
    return "/metrics/?" + "&".join(f"name%5B%5D={name}" for name in wanted)


FILTERED_PAGE = _filtered(OFTEN_NAMES)
FILTERED_PAGE_WITH_SELDOM = _filtered(NAMES)
SELDOM_SECONDS = 60.0
"""Between two filtered pages with everything; what the others leave out is taken over from the last one."""

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
        self._seldom: SeldomLines | None = None
        self._seldom_at = 0.0
        """Seconds of the monotonic clock."""

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
        self._seldom = None

    async def _ask(self, endpoint: Endpoint, deadline: float) -> tuple[Scrape, VllmPage] | SourceFailure:
        if self._whole is not None and not self._refused:
            told, size = self._whole
            answer = await self._get_filtered(endpoint, deadline)
            if isinstance(answer, SourceFailure):
                if answer.reason not in _OF_THE_FILTER:
                    return answer
            elif self._is_another(answer[1]):
                self._forget()
            elif len(answer[0].body) <= size * LARGEST_SHARE:
                shape = _shape(answer[1])
                if shape == self._shape:
                    return answer
                now = _told(answer[1])
                if told <= now:
                    self._whole, self._shape = (now, size), shape
                    self._ask_who_joined(answer[1])
                    return answer
            # A process that has just started is tried anew after its whole page.
            self._refused = self._whole is not None
        answer = await self._get(endpoint, WHOLE_PAGE, deadline)
        if not isinstance(answer, SourceFailure) and answer[1].engines:
            shape = _shape(answer[1])
            if self._whole is None or shape != self._shape:
                told = _told(answer[1])
                if self._whole is not None and told != self._whole[0]:
                    # It was the page that changed, not the filter that failed.
                    self._refused = False
                self._whole, self._shape = (told, len(answer[0].body)), shape
            if not self._refused:
                self._keep_seldom(*answer)
        return answer

    def _ask_who_joined(self, page: VllmPage) -> None:
        """Let the next page tell everything where this one has an engine that has told only a part so far."""
        if self._seldom is not None and any(
            engine.engine not in self._seldom.engines for engine in page.engines
        ):
            self._seldom = None

    def _is_another(self, page: VllmPage) -> bool:
        """Whether a page is of another process than the last one, as far as both tell."""
        start = page.process_start_time_seconds
        return start is not None and self._process_start is not None and start != self._process_start

    async def _get_filtered(
        self, endpoint: Endpoint, deadline: float
    ) -> tuple[Scrape, VllmPage] | SourceFailure:
        if self._seldom is not None and time.monotonic() - self._seldom_at < SELDOM_SECONDS:
            return await self._get(endpoint, FILTERED_PAGE, deadline, self._seldom)
        answer = await self._get(endpoint, FILTERED_PAGE_WITH_SELDOM, deadline)
        if not isinstance(answer, SourceFailure):
            self._keep_seldom(*answer)
        return answer

    def _keep_seldom(self, scrape: Scrape, page: VllmPage) -> None:
        self._seldom, self._seldom_at = seldom_lines(scrape.body, page), time.monotonic()

    async def _get(
        self, endpoint: Endpoint, path: str, deadline: float, earlier: SeldomLines | None = None
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
        page = parse_page(scrape.body, earlier)
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
