"""A recording through the daemon's own code: page -> scanner -> sampler -> assessment -> exported metrics, tick by tick."""

import asyncio
import itertools
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.facts import MissingFact, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.fleet import Event, EventKind, ReplicaAssessment, withhold_stale
from kvheadroom.capacity.readings import (
    FailureReason,
    ProblemReason,
    Scrape,
    SourceFailure,
    VllmPage,
)
from kvheadroom.lab.backtest.events import EngineSample, find_stretches
from kvheadroom.lab.backtest.histories import EngineHistory, History, Series, gap_problems
from kvheadroom.lab.backtest.recorded_samples import all_samples, interval_seconds, sample_of
from kvheadroom.lab.recording_lines import Entry
from kvheadroom.lab.recordings import GAP_INTERVALS, Playback, Recording
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.sampler import ReplicaSampler, ReplicaSources, Resolution
from kvheadroom.outputs.prometheus import exposition
from kvheadroom.sources.prometheus_parts import ticks_in
from kvheadroom.sources.vllm_metrics import parse_page

MAX_TICKS = 2_000_000
_HALF_A_MILLISECOND = 0.0005
"""Prometheus keeps milliseconds: what was scraped a few microseconds after a tick was there at that tick."""
_MOST_REPORTS, _FEWEST_TICKS = 20, 500
"""How often it is told how far a recording is: a long one must not fill a log."""
VLLM_JOB, KVHEADROOM_JOB = "vllm", "kvheadroom"
"""What Prometheus would label, where a recording does not tell, the pages that it scraped."""
_SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)((?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?)[ \t]+(\S+)')

SCHEDULER_FLAGS = (
    ("--max-num-seqs", "max_num_seqs"),
    ("--max-num-batched-tokens", "max_num_batched_tokens"),
)
"""Of the flags that a recording's header may tell, those that no page tells and a reading of its queue needs."""

Report = Callable[[str], None]


def run_recording(
    recording: Recording,
    name: str,
    *,
    every_seconds: float,
    wanted: frozenset[str],
    report: Report,
    longest_pause_seconds: float = 0.0,
    target: tuple[str, str] | None = None,
) -> History:
    """Watch a recording as the daemon would have, scraping at every tick.

    Args:
        wanted: names of the metrics of which the series are kept, vLLM's own and kvheadroom's.
        longest_pause_seconds: scrapes no further apart than this leave no gap, however close together most of them are.
        target: job and instance of the page's series, where they are known.

    Raises:
        OperatorError: it has too many ticks.
    """
    ticks = num_ticks(recording, name, every_seconds)
    samples, times = all_samples(recording)
    interval = interval_seconds(recording, times)
    run = _Run(
        recording,
        name,
        every_seconds=every_seconds,
        wanted=wanted,
        interval_seconds=interval,
        target=target or (VLLM_JOB, name),
    )
    asyncio.run(run.watch(ticks, report))
    longest_pause = max(GAP_INTERVALS * interval, longest_pause_seconds)
    engines = tuple(
        EngineHistory(
            engine=engine,
            # A page without the counter is no word on preemptions: silence there would look as if there were none.
            stretches=find_stretches(
                (sample for sample in seen if sample.preemptions_total is not None), longest_pause
            ),
            ticks=tuple(tick.get(engine) for tick in run.ticks),
        )
        for engine, seen in samples.items()
    )
    gaps = (gap_problems(name, engine, recording.duration_seconds, longest_pause) for engine in engines)
    problems = [*run.problems(), *itertools.chain.from_iterable(gaps)]
    return History(
        name=name,
        started_at=recording.first_at,
        duration_seconds=recording.duration_seconds,
        every_seconds=every_seconds,
        engines=engines,
        series={series: (*values, *[None] * (ticks - len(values))) for series, values in run.series.items()},
        problems=tuple(problems),
        why_not=run.why_not,
    )


def num_ticks(recording: Recording, name: str, every_seconds: float) -> int:
    """How often a recording is looked at.

    Raises:
        OperatorError: too often.
    """
    ticks = ticks_in(recording.duration_seconds, every_seconds)
    if ticks > MAX_TICKS:
        raise OperatorError(
            f"--every: {name} lasts {recording.duration_seconds / 86_400:,.1f} days, which would be {ticks:,} ticks; "
            f"at most {MAX_TICKS:,} are scored"
        )
    return ticks


class _Run:
    """The daemon's parts around one recorded server.

    Attributes:
        ticks: engine -> its sample, for each tick.
        series: values from tick 0 to the last that had one.
    """

    def __init__(
        self,
        recording: Recording,
        name: str,
        *,
        every_seconds: float,
        wanted: frozenset[str],
        interval_seconds: float,
        target: tuple[str, str],
    ) -> None:
        self.ticks: list[dict[str, EngineSample]] = []
        self.series: dict[Series, list[float | None]] = {}
        self._recording = recording
        self._playback = Playback(recording)
        self._name = name
        self._target = target
        self._own_target = (KVHEADROOM_JOB, name)
        self._every_seconds = every_seconds
        self._wanted = wanted
        self._interval_seconds = interval_seconds
        self._offset = 0.0
        self._entry = self._playback.entry_at(0.0)
        self._problems: dict[ProblemReason, tuple[int, str]] = {}
        self._events: dict[Event, None] = {}
        self._last_events: tuple[Event, ...] = ()
        first = ReplicaAssessment(replica=name, url="", interval_seconds=every_seconds)
        self._board = Board((first,))
        sources = ReplicaSources(self._fetch_page, self._resolve_facts, self._facts, self._ask_health)
        self._sampler = ReplicaSampler(first, (), sources, self._board)

    async def watch(self, ticks: int, report: Report) -> None:
        """Every tick of the recording."""
        between_reports = max(_FEWEST_TICKS, -(-ticks // _MOST_REPORTS))
        for number in range(ticks):
            if number and number % between_reports == 0:
                report(f"{self._name}: tick {number:,} of {ticks:,}")
            self._offset = number * self._every_seconds
            self._entry = self._playback.entry_at(self._offset + _HALF_A_MILLISECOND)
            now = self._recording.first_at + self._offset
            await self._sampler.tick(now)
            self._note(self._board.fleet.replicas[0], now)
            fleet = withhold_stale(self._board.fleet, now)
            self.ticks.append(
                {
                    engine.snapshot.engine: sample_of(engine.snapshot, self._offset)
                    for engine in fleet.replicas[0].engines
                }
            )
            if self._wanted:
                page = "" if self._gap() is not None else self._entry.page
                text = exposition(fleet, now, "", only=self._wanted)[0].decode()
                self._keep(number, self._target, page)
                self._keep(number, self._own_target, text)
                self._put(number, _scraped("up", (), *self._target), float(bool(page)))
                self._put(number, _scraped("up", (), *self._own_target), 1.0)

    def _note(self, replica: ReplicaAssessment, now: float) -> None:
        """Keep what the daemon told of this tick: it has its latest events alone, and counts problems, not ticks."""
        if replica.last_success_at == now:
            first = {problem.reason: problem.detail for problem in reversed(replica.problems)}
            for reason, detail in first.items():
                count, told = self._problems.get(reason, (0, detail))
                self._problems[reason] = count + 1, told
        if replica.events is not self._last_events:
            self._last_events = replica.events
            self._events |= dict.fromkeys(replica.events)

    @property
    def why_not(self) -> str | None:
        """Why nothing can be scored; None where it can."""
        if ProblemReason.SEVERAL_SERVERS in self._problems:
            return "several servers answer at its address in turn, and what one has counted the other has not"
        return None

    def problems(self) -> Iterable[str]:
        """What the daemon would have told while it watched."""
        for reason, (count, detail) in sorted(self._problems.items()):
            first = " ".join(detail.split())
            yield f"{self._name}: {reason.replace('_', ' ')}, at {count:,} of {len(self.ticks):,} ticks: {first}"
        for event in self._events:
            if event.kind is not EventKind.STATE_CHANGED:
                at = event.at - self._recording.first_at
                yield f"{self._name}: at {at:.1f} s {event.kind.replace('_', ' ')}: {event.detail}"

    def _gap(self) -> str | None:
        """Why the entry in force tells nothing about this instant."""
        return self._recording.gap_at(self._entry, self._offset, self._interval_seconds)

    async def _fetch_page(self) -> tuple[Scrape, VllmPage] | SourceFailure:
        gap = self._gap()
        if gap is not None:
            return SourceFailure("metrics", FailureReason.TIMEOUT, gap)
        scrape = Scrape(self._entry.page.encode(), self._recording.first_at + self._offset, 0.0)
        page = parse_page(scrape.body)
        return page if isinstance(page, SourceFailure) else (scrape, page)

    async def _resolve_facts(self, page: VllmPage) -> Resolution:
        return self._facts(page)

    def _facts(self, page: VllmPage) -> Resolution:
        missing = MissingFact("model_files", "a recording holds no model files", "nothing: it is a recording")
        facts = {
            engine.engine: resolve_facts(
                operator=OperatorFacts(flags=_flags(self._entry)),
                answers=_answers(self._entry),
                echoed=engine.echoed,
                model_files=None,
                model_files_missing=missing,
            )
            for engine in page.engines
        }
        return Resolution(facts, sources=())

    async def _ask_health(self) -> bool:
        # A recording does not tell; what was recorded came from a server that answered.
        return True

    def _keep(self, tick: int, target: tuple[str, str], page: str) -> None:
        """Keep the wanted samples of a page."""
        for line in page.split("\n"):
            if line.startswith("#") or not line:
                continue
            name = re.match(r"[a-zA-Z0-9_:]*", line)
            if name is None or name[0] not in self._wanted:
                continue
            sample = _SAMPLE.match(line)
            if sample is not None:
                series = _series(sample[1], sample[2], *target)
                if series is not None:
                    self._put(tick, series, float(sample[3]))

    def _put(self, tick: int, series: Series, value: float) -> None:
        values = self.series.setdefault(series, [])
        values.extend([None] * (tick - len(values)))
        if len(values) == tick:
            values.append(value)


def _flags(entry: Entry) -> dict[str, int]:
    """The scheduler's flags, where the header has vLLM's command line."""
    told = entry.origin.get("flags")
    flags = {} if not isinstance(told, dict) else {name: told.get(flag) for flag, name in SCHEDULER_FLAGS}
    return {
        name: value
        for name, value in flags.items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0
    }


def _answers(entry: Entry) -> ServerAnswers:
    version, length = entry.origin.get("vllm_version"), entry.origin.get("max_model_len")
    return ServerAnswers(
        version=version if isinstance(version, str) else None,
        max_model_len=length if isinstance(length, int) and length > 0 else None,
    )


@lru_cache(maxsize=65_536)
def _series(name: str, labels: str, job: str, instance: str) -> Series | None:
    """A series as Prometheus stores it; None where the official parser does not read it."""
    try:
        [family] = text_string_to_metric_families(f"{name}{labels} 0\n")
        [sample] = family.samples
    except ValueError:
        return None
    return _scraped(name, tuple(sample.labels.items()), job, instance)


def _scraped(name: str, labels: Iterable[tuple[str, str]], job: str, instance: str) -> Series:
    """With the labels of the target that was scraped, as Prometheus puts them (honor_labels: false)."""
    kept = {f"exported_{key}" if key in ("job", "instance") else key: value for key, value in labels if value}
    return Series(name, tuple(sorted({**kept, "job": job, "instance": instance}.items())))
