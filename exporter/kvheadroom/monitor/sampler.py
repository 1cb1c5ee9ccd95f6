"""One replica, tick by tick: scrape, resolve facts when they may have changed, assess, publish.

The sampler knows no source: it is handed two callables. It is stepped by `tick(now)`, so tests need no
clock; `run` adds the clock.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvheadroom.capacity.assessment import Assessment, Reading, ReplicaAssessment, SourceStatus, assess
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.readings import (
    EchoedFlags,
    FailureReason,
    Scrape,
    SourceFailure,
    VllmPage,
)
from kvheadroom.monitor.board import Board

log = logging.getLogger(__name__)

RESOLVE_AGAIN_AFTER_SECONDS = 60.0
"""Facts are asked for again this often while something is missing; a restart asks at once."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Facts per engine, and how each source that they come from answered."""

    facts: dict[str, EngineFacts]
    sources: tuple[SourceStatus, ...]


FetchPage = Callable[[], Awaitable[tuple[Scrape, VllmPage] | SourceFailure]]
ResolveFacts = Callable[[VllmPage], Awaitable[Resolution]]


class ReplicaSampler:
    """Samples one replica and publishes its assessment on the board."""

    def __init__(
        self,
        first: ReplicaAssessment,
        session_tokens: tuple[int, ...],
        fetch_page: FetchPage,
        resolve_facts: ResolveFacts,
        board: Board,
    ) -> None:
        self._last = first
        self._session_tokens = session_tokens
        self._fetch_page = fetch_page
        self._resolve_facts = resolve_facts
        self._board = board
        self._failures: Counter[tuple[str, FailureReason]] = Counter()
        self._resolution: Resolution | None = None
        self._resolved_for: object = None
        self._resolved_at = 0.0

    async def tick(self, now: float) -> None:
        """One scrape and its consequences.

        Args:
            now: unix seconds.
        """
        answer = await self._fetch_page()
        if isinstance(answer, SourceFailure):
            self._fail(answer)
            # Whatever answers next may be another server.
            self._resolution = None
            return
        scrape, page = answer
        resolution = await self._facts(page, now)
        engines = tuple(self._assess(page, resolution, scrape, index) for index in range(len(page.engines)))
        self._publish(
            replace(
                self._last,
                sources=(SourceStatus(source="metrics", failure=None), *resolution.sources),
                problems=page.problems,
                engines=engines,
                scrape_duration_seconds=scrape.duration_seconds,
                last_success_at=scrape.taken_at,
            )
        )

    async def run(self) -> None:
        """Tick for ever, each replica at its own phase of the interval."""
        interval = self._last.interval_seconds
        phase = _phase(self._last.url)
        # Everybody is seen within the first second; the phase then spreads the fleet over the interval.
        await asyncio.sleep(phase * min(interval, 1.0))
        next_at = time.monotonic()
        while True:
            try:
                await self.tick(time.time())
            except Exception as error:
                # A fault of ours ends this tick, not the monitor: it is counted and the board ages.
                log.exception("replica %s: this tick failed, please report it", self._last.replica)
                self._fail(
                    SourceFailure("metrics", FailureReason.INTERNAL, f"a fault of kvheadroom: {error!r}")
                )
            next_at = max(next_at + interval, time.monotonic())
            await asyncio.sleep(next_at - time.monotonic())

    async def _facts(self, page: VllmPage, now: float) -> Resolution:
        identity = _identity(page)
        incomplete = self._resolution is not None and any(not s.up for s in self._resolution.sources)
        if (
            self._resolution is None
            or identity != self._resolved_for
            or (incomplete and now - self._resolved_at >= RESOLVE_AGAIN_AFTER_SECONDS)
        ):
            self._resolution = await self._resolve_facts(page)
            self._resolved_for, self._resolved_at = identity, now
            for source in self._resolution.sources:
                if source.failure is not None:
                    self._count(source.failure)
        return self._resolution

    def _assess(self, page: VllmPage, resolution: Resolution, scrape: Scrape, index: int) -> Assessment:
        snapshot = page.engines[index]
        return assess(
            Reading(facts=resolution.facts[snapshot.engine], snapshot=snapshot, taken_at=scrape.taken_at),
            self._session_tokens,
        )

    def _fail(self, failure: SourceFailure) -> None:
        self._count(failure)
        # The other sources were not asked: that they answered before the failure says nothing now.
        self._publish(replace(self._last, sources=(SourceStatus(source=failure.source, failure=failure),)))

    def _count(self, failure: SourceFailure) -> None:
        self._failures[failure.source, failure.reason] += 1
        known = {status.source: status.failure for status in self._last.sources}
        if known.get(failure.source) != failure:
            # Said once per change, not once per tick.
            log.warning("replica %s: %s", self._last.replica, failure.detail)

    def _publish(self, replica: ReplicaAssessment) -> None:
        self._last = replace(replica, failures_total=tuple(sorted(self._failures.items())))
        self._board.publish(self._last)


def _identity(page: VllmPage) -> tuple[float | None, tuple[tuple[str, str | None, EchoedFlags, object], ...]]:
    """What changes when another server answers: start time, engines, models, flags, pool."""
    return (
        page.process_start_time_seconds,
        tuple(
            (e.engine, e.model_name, e.echoed, (e.num_blocks, e.block_size, e.pool_tokens))
            for e in page.engines
        ),
    )


def _phase(url: str) -> float:
    """A share of the interval, 0-1, always the same for one URL."""
    return int.from_bytes(hashlib.sha256(url.encode()).digest()[:4]) / 2**32
