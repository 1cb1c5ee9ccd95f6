"""One replica, tick by tick: scrape, resolve facts when they may have changed, assess, publish.

The sampler knows no source: it is handed callables. It is stepped by `tick(now)`, so tests need no
clock; `run` adds the clock.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.events import (
    MAX_SERVERS,
    ServerMemory,
    counters_fell,
    is_one_of_several,
    progress,
    remember,
)
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.fleet import Event, EventKind, ReplicaAssessment, ReplicaState, SourceStatus
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import (
    FailureReason,
    PageProblem,
    ProblemReason,
    Scrape,
    SourceFailure,
    VllmPage,
    one_line,
)
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.history import EngineHistory
from kvheadroom.monitor.host_looks import HostLooks, ReadHost
from kvheadroom.monitor.replica_calibration import ReplicaCalibration
from kvheadroom.monitor.reuse_learner import ReuseLearner

log = logging.getLogger(__name__)

MAX_EVENTS = 50
IDLE_HEALTH_TICKS = 6
WAIT_FOR_FACTS_SECONDS = 0.5
"""Enough for a server and a disk that answer, so that the first numbers come with their prediction."""
PHASES = 25
"""Moments of an interval at which replicas are asked. What shares one is worked on in one go: on its own, each scrape of a
large fleet found the processor's caches full of other things, and cost twice as much."""
ASK_AGAIN_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Facts are asked for again, ever more slowly, while a source of them fails; another server is asked at once."""

_PAGE_READ = SourceStatus(source="metrics", failure=None)

Identity = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Facts per engine, and how each source that they come from answered.

    Attributes:
        told_at: unix seconds at which the answer came; None where nobody was asked.
    """

    facts: dict[str, EngineFacts]
    sources: tuple[SourceStatus, ...]
    told_at: float | None = None


FetchPage = Callable[[], Awaitable[tuple[Scrape, VllmPage] | SourceFailure]]
ResolveFacts = Callable[[VllmPage], Awaitable[Resolution]]
AskHealth = Callable[[], Awaitable[bool | None]]


@dataclass(frozen=True, slots=True)
class ReplicaSources:
    """The outside of one replica, as callables.

    Attributes:
        fetch_page: scrape and read `/metrics`.
        resolve_facts: ask for everything that does not change until a restart.
        facts_unasked: what is known of it without asking anybody.
        ask_health: whether `/health` answers 200, None where it cannot be asked; only when something looks wrong.
        read_host: the memory of its host, of a server of this machine; None for every other.
    """

    fetch_page: FetchPage
    resolve_facts: ResolveFacts
    facts_unasked: Callable[[VllmPage], Resolution]
    ask_health: AskHealth
    read_host: ReadHost | None = None


class ReplicaSampler:
    """Samples one replica and publishes its assessment on the board.

    Args:
        idle_seconds: for how long sessions may have been idle, to say whether they are still warm.
        memory: of the sampler that this one follows.
        calibration: of this replica; None where nothing is to be learned, as from a recording.
        new_learner: makes one of each engine, to learn of its past what tiers of other sizes would find; None where nobody asks.
    """

    def __init__(
        self,
        first: ReplicaAssessment,
        session_tokens: tuple[int, ...],
        sources: ReplicaSources,
        board: Board,
        *,
        idle_seconds: tuple[float, ...] = (),
        memory: ServerMemory | None = None,
        calibration: ReplicaCalibration | None = None,
        new_learner: Callable[[], ReuseLearner] | None = None,
    ) -> None:
        self._last = first
        self._session_tokens = session_tokens
        self._idle_seconds = idle_seconds
        self._sources = sources
        self._board = board
        self._failures: Counter[tuple[str, FailureReason]] = Counter(dict(first.failures_total))
        self._problems: Counter[ProblemReason] = Counter(dict(first.problems_total))
        self._metrics_seen: frozenset[str] = frozenset()
        self._memory = memory or ServerMemory()
        self._calibration = calibration
        self._new_learner = new_learner
        self._host_looks = None if sources.read_host is None else HostLooks(sources.read_host)
        self._histories: dict[str, EngineHistory] = {}
        self._learners: dict[str, ReuseLearner] = {}
        self._known: dict[Identity, _Known] = {}
        self._asking: _Asking | None = None
        self._outages = 0
        self._ticks_still = 0

    @property
    def url(self) -> str:
        """Of the replica."""
        return self._last.url

    @property
    def memory(self) -> ServerMemory:
        """What tells a restart, for the sampler that comes after this one at the same address."""
        return self._memory

    async def tick(self, now: float, *, wait_for_facts: float | None = None) -> None:
        """One scrape and its consequences.

        Args:
            now: unix seconds.
            wait_for_facts: seconds to wait for facts that are still being asked for; a short while if not said.
        """
        answer = await self._sources.fetch_page()
        if isinstance(answer, SourceFailure):
            await self._tick_failed(answer, now)
            return
        scrape, page = answer
        if wait_for_facts is None:
            wait_for_facts = min(WAIT_FOR_FACTS_SECONDS, self._last.interval_seconds / 2)
        resolution = await self._facts(page, now, wait_for_facts)
        host_use = await self._host_use(page, resolution, now, wait_for_facts)
        engines = self._assess(page, resolution, scrape, now, host_use)
        state = await self._state(page)
        self._memory, happened = remember(self._memory, page.process_start_time_seconds, engines, now)
        problems = (*page.problems, *(problem for engine in engines for problem in engine.problems))
        if is_one_of_several(self._memory, now):
            detail = "several servers answer at this address in turn; give each its own `url`"
            problems = (*problems, PageProblem(ProblemReason.SEVERAL_SERVERS, detail))
        lost = self._lost_metrics(page)
        if lost:
            detail = (
                f"{', '.join(lost)}: on this server's page before and gone now, and with them what was made of them; "
                "is it another release of vLLM? If it is meant, restart kvheadroom"
            )
            problems = (*problems, PageProblem(ProblemReason.METRICS_LOST, detail))
        self._tell_new(problems)
        for problem in problems:
            self._problems[problem.reason] += 1
        self._publish(
            state,
            happened,
            now,
            sources=(_PAGE_READ, *resolution.sources),
            problems=problems,
            problems_total=tuple(sorted(self._problems.items())),
            lost_metrics=lost,
            engines=engines,
            scrape_duration_seconds=scrape.duration_seconds,
            last_success_at=scrape.taken_at,
        )

    async def _tick_failed(self, failure: SourceFailure, now: float) -> None:
        self._count(failure)
        # What answers next may be another server: its facts are asked for once more.
        self._outages += 1
        for known in self._known.values():
            known.ask_again_at = now
        state = ReplicaState.DOWN
        if failure.reason is FailureReason.STATS_DISABLED:
            state = ReplicaState.STATS_DISABLED
        elif failure.reason is FailureReason.UNAVAILABLE and await self._sources.ask_health():
            # While elastic scaling runs, vLLM answers 503 to everything but /health.
            state = ReplicaState.SCALING
        if self._calibration is not None:
            self._calibration.scrape_failed()
        # The other sources were not asked: that they answered before the failure says nothing now.
        status = SourceStatus(source=failure.source, failure=failure)
        self._publish(state, (), now, sources=(status,), problems=(), lost_metrics=())

    def _lost_metrics(self, page: VllmPage) -> tuple[str, ...]:
        """What earlier pages had and this one has not; a page without engines is of a server that starts."""
        if not page.engines:
            return ()
        if self._metrics_seen <= page.metrics:
            self._metrics_seen = page.metrics
            return ()
        self._metrics_seen |= page.metrics
        return tuple(sorted(self._metrics_seen - page.metrics))

    async def _state(self, page: VllmPage) -> ReplicaState:
        """The state of a replica whose page was read.

        A wedged engine keeps its old gauges and answers scrapes; what tells is that its counters stand still
        while /health fails. Health is asked for only when the counters stand still: at every tick
        while requests are there to be worked on, now and then while there are none.
        """
        if not page.engines:
            return ReplicaState.STARTING
        if all(engine.sleeping for engine in page.engines):
            return ReplicaState.SLEEPING
        before = tuple(engine.snapshot for engine in self._last.engines)
        self._ticks_still = self._ticks_still + 1 if progress(before) == progress(page.engines) else 0
        in_flight = any(engine.requests_running or engine.requests_waiting for engine in page.engines)
        suspicious = self._ticks_still > 0 and (in_flight or self._ticks_still % IDLE_HEALTH_TICKS == 0)
        if suspicious or (self._last.state is ReplicaState.WEDGED and self._ticks_still > 0):
            return ReplicaState.WEDGED if await self._sources.ask_health() is False else ReplicaState.SERVING
        return ReplicaState.SERVING

    async def run(self) -> None:
        """Tick for ever, each replica at its own phase of the interval."""
        interval = self._last.interval_seconds
        started, phase = time.monotonic(), _phase(self._last.url)
        # Everybody is seen within the first second; from then on the fleet is spread over the interval.
        await asyncio.sleep(phase * min(interval, 1.0))
        ticks = -1
        try:
            while True:
                try:
                    await self.tick(time.time())
                except Exception as error:
                    # A fault of ours ends this tick, not the monitor: it is counted and the board ages.
                    log.exception("replica %s: this tick failed, please report it", self._last.replica)
                    detail = f"a fault of kvheadroom: {error!r}"
                    await self._tick_failed(
                        SourceFailure("metrics", FailureReason.INTERNAL, detail), time.time()
                    )
                # Ticks that a slow target has cost are left out, so that it keeps its phase.
                passed = (time.monotonic() - started) / interval - phase
                ticks = max(ticks + 1, math.ceil(passed))
                await asyncio.sleep(started + (ticks + phase) * interval - time.monotonic())
        finally:
            if self._asking is not None:
                self._asking.answer.cancel()
            if self._host_looks is not None:
                self._host_looks.close()

    async def _facts(self, page: VllmPage, now: float, wait_seconds: float) -> Resolution:
        """The facts of the server that gave this page; those known without asking while it is being asked.

        Asking can take long (a hung mount, a slow server), so it runs beside the ticks: what the engine says of
        itself is published all the while. Answers are kept by what the page tells servers apart by, so that one
        server's are never taken for another's.
        """
        identity = _identity(page)
        if counters_fell(self._memory, page.process_start_time_seconds, page.engines):
            self._outages += 1
            self._known.pop(identity, None)
        known = self._known.get(identity)
        if self._asking is None and (known is None or known.is_to_be_asked(now)):
            answer = asyncio.ensure_future(self._sources.resolve_facts(page))
            self._asking = _Asking(page, self._outages, answer)
        if self._asking is not None:
            await asyncio.wait({self._asking.answer}, timeout=wait_seconds)
            if self._asking.answer.done():
                asked, self._asking = self._asking, None
                self._learn(asked, now)
            known = self._known.get(identity)
        return self._sources.facts_unasked(page) if known is None else known.resolution

    def _learn(self, asked: "_Asking", now: float) -> None:
        """Keep an answer; while a source that answered before does not, what was known stays."""
        identity = _identity(asked.page)
        before = self._known.get(identity)
        attempts, answered = (0, frozenset[str]()) if before is None else (before.attempts, before.answered)
        try:
            resolution = replace(asked.answer.result(), told_at=now)
        except Exception as error:
            log.exception("replica %s: its facts could not be found, please report it", self._last.replica)
            failure = SourceFailure("facts", FailureReason.INTERNAL, f"a fault of kvheadroom: {error!r}")
            unasked = self._sources.facts_unasked(asked.page)
            resolution = Resolution(
                unasked.facts, (*unasked.sources, SourceStatus(source="facts", failure=failure))
            )
        for source in resolution.sources:
            if source.failure is not None:
                self._count(source.failure)
        if asked.outages != self._outages:
            # Another process may have answered before the outage: what stands there now is asked afresh.
            return
        failed = {source.source for source in resolution.sources if not source.up}
        # With our own fault nothing was told at all.
        if before is not None and (failed & answered or "facts" in failed):
            resolution = replace(before.resolution, sources=resolution.sources)
        answered |= {source.source for source in resolution.sources if source.up}
        attempts = attempts + 1 if failed else 0
        again = ASK_AGAIN_SECONDS[min(attempts, len(ASK_AGAIN_SECONDS)) - 1] if failed else math.inf
        self._known.pop(identity, None)
        self._known[identity] = _Known(resolution, answered, attempts, now + again)
        while len(self._known) > MAX_SERVERS:
            del self._known[next(iter(self._known))]

    async def _host_use(
        self, page: VllmPage, resolution: Resolution, now: float, wait_seconds: float
    ) -> HostUse | None:
        """The memory of its host, where a tier of an engine lies in it."""
        if self._host_looks is None or not any(
            resolution.facts[engine.engine].flags.connector for engine in page.engines
        ):
            return None
        return await self._host_looks.latest(now, wait_seconds=wait_seconds)

    def _assess(
        self,
        page: VllmPage,
        resolution: Resolution,
        scrape: Scrape,
        now: float,
        host_use: HostUse | None,
    ) -> tuple[Assessment, ...]:
        before = {engine.snapshot.engine: engine for engine in self._last.engines}
        # An engine that left the page takes what is remembered of it along.
        histories, self._histories = self._histories, {}
        learners, self._learners = self._learners, {}
        engines = []
        # A page that leaves it out for once is of the same process.
        started_at = page.process_start_time_seconds or self._memory.started_at
        if self._calibration is not None:
            self._calibration.keep_only(page)
        for snapshot in page.engines:
            facts, last = resolution.facts[snapshot.engine], before.get(snapshot.engine)
            history = histories.get(snapshot.engine) or EngineHistory(self._last.interval_seconds)
            goes_on = history.add(snapshot, scrape.taken_at, page.process_start_time_seconds)
            self._histories[snapshot.engine] = history
            learner = learners.get(snapshot.engine) or (self._new_learner and self._new_learner())
            if learner and history.last is not None:
                self._learners[snapshot.engine] = learner
                learner.see(history.last, goes_on=goes_on)
            reading = Reading(
                facts=facts,
                snapshot=snapshot,
                taken_at=scrape.taken_at,
                past=history.window_starts(),
                recent=history.recent(),
                five_minutes=history.five_minutes(),
                host_use=host_use,
                last_hour=history.last_hour(),
                facts_at=resolution.told_at,
            )
            # Of the same facts the same prediction is made, and an hour of ticks has the same facts.
            same = last is not None and last.facts is facts
            prediction = last.prediction if last is not None and same else predict(facts)
            calibrated = own_start = None
            if self._calibration is not None:
                calibrated, own_start = self._calibration.see(
                    snapshot,
                    facts,
                    prediction,
                    started_at=started_at,
                    waits_for=self._in_the_way(resolution, now),
                    now=now,
                )
            assessment = assess(
                reading,
                self._session_tokens,
                prediction,
                calibrated=calibrated,
                own_start=own_start,
                idle_seconds=self._idle_seconds,
                reuse=learner.reuse if learner else None,
            )
            if learner:
                learner.assessed(assessment)
            engines.append(assessment)
        return tuple(engines)

    def _in_the_way(self, resolution: Resolution, now: float) -> str:
        """Why a start cannot be measured by these facts yet, a sentence without its full stop; empty where it can."""
        if not resolution.sources:
            return "its facts are still being asked for"
        if is_one_of_several(self._memory, now):
            return "several servers answer at its address in turn"
        failed = next((source.source for source in resolution.sources if not source.up), None)
        return "" if failed is None else f"not all of its facts are known while {failed} is down"

    def _count(self, failure: SourceFailure) -> None:
        self._failures[failure.source, failure.reason] += 1
        known = {status.source: status.failure for status in self._last.sources}
        if known.get(failure.source) != failure:
            # Said once per change, not once per tick.
            log.warning("replica %s: %s", self._last.replica, one_line(failure.detail))

    def _tell_new(self, problems: tuple[PageProblem, ...]) -> None:
        """Said when a kind of problem comes up: its words, as a value that was dropped, may differ at every tick."""
        for problem in problems:
            if all(problem.reason != known.reason for known in self._last.problems):
                log.warning(
                    "replica %s: %s: %s", self._last.replica, problem.reason, one_line(problem.detail)
                )

    def _publish(
        self, state: ReplicaState, happened: tuple[Event, ...], now: float, **changed: object
    ) -> None:
        """Publish the last assessment with what has changed (fields of ReplicaAssessment)."""
        before = self._last.state
        if before is not None and before is not state:
            event = Event(at=now, kind=EventKind.STATE_CHANGED, detail=f"{before} -> {state}")
            happened = (*happened, event)
        for event in happened:
            log.info("replica %s: %s: %s", self._last.replica, event.kind, one_line(event.detail))
        if happened:
            changed["events"] = (*self._last.events, *happened)[-MAX_EVENTS:]
            restarts = sum(event.kind is EventKind.RESTARTED for event in happened)
            changed["restarts_total"] = self._last.restarts_total + restarts
        failures = tuple(sorted(self._failures.items()))
        if self._calibration is not None:
            changed["excluded_starts_total"] = self._calibration.excluded_starts_total
        self._last = replace(self._last, state=state, failures_total=failures, **changed)  # type: ignore[arg-type]
        self._board.publish(self._last)


@dataclass(frozen=True, slots=True)
class _Asking:
    """A question under way, and after how many outages it was asked."""

    page: VllmPage
    outages: int
    answer: asyncio.Future[Resolution]


@dataclass(slots=True)
class _Known:
    """Facts of one server, the sources that have ever told some, and when to ask again."""

    resolution: Resolution
    answered: frozenset[str]
    attempts: int
    ask_again_at: float

    def is_to_be_asked(self, now: float) -> bool:
        """Whether it is time; also when the clock was set back, so that the time would not come for long."""
        waits = self.ask_again_at - now
        return waits <= 0 or ASK_AGAIN_SECONDS[-1] < waits < math.inf


def _identity(page: VllmPage) -> Identity:
    """What tells one server from another: start time, engines, models, flags, pool."""
    return (
        page.process_start_time_seconds,
        *(
            (e.engine, e.model_name, e.echoed, e.num_blocks, e.block_size, e.pool_tokens)
            for e in page.engines
        ),
    )


def _phase(url: str) -> float:
    """A share of the interval, 0-1, always the same for one URL."""
    return int.from_bytes(hashlib.sha256(url.encode()).digest()[:4]) * PHASES // 2**32 / PHASES
