"""A recording through the daemon's own code: page -> scanner -> sampler -> assessment -> exported metrics, tick by tick."""

import asyncio
import itertools
import re
import statistics
from collections.abc import Callable, Iterable
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.capacity.assessment import EventKind, ReplicaAssessment, withhold_stale
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.facts import MissingFact, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.readings import EngineSnapshot, FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.lab.backtest.events import EngineSample, find_stretches
from kvheadroom.lab.backtest.histories import EngineHistory, History, Series, gap_problems
from kvheadroom.lab.recording_lines import Entry
from kvheadroom.lab.recordings import GAP_INTERVALS, Playback, Recording, read_entries
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.sampler import ReplicaSampler, ReplicaSources, Resolution
from kvheadroom.outputs.prometheus import exposition
from kvheadroom.sources.finished_requests import finished_requests
from kvheadroom.sources.vllm_metrics import parse_page

MAX_TICKS = 2_000_000
_HALF_A_MILLISECOND = 0.0005
"""Prometheus keeps milliseconds: what was scraped a few microseconds after a tick was there at that tick."""
_REPORT_EVERY_TICKS = 500
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
    target: tuple[str, str] | None = None,
) -> History:
    """Watch a recording as the daemon would have, scraping at every tick.

    Args:
        wanted: names of the metrics of which the series are kept, vLLM's own and kvheadroom's.
        target: job and instance of the page's series, where they are known.

    Raises:
        OperatorError: it has too many ticks.
    """
    ticks = int(recording.duration_seconds / every_seconds + 1e-6) + 1
    if ticks > MAX_TICKS:
        raise OperatorError(f"--every: {name} would have {ticks:,} ticks, at most {MAX_TICKS:,} are scored")
    samples, times = _all_samples(recording)
    longest_gap = GAP_INTERVALS * _interval_seconds(recording, times)
    run = _Run(
        recording,
        name,
        every_seconds=every_seconds,
        wanted=wanted,
        longest_gap_seconds=longest_gap,
        target=target or (VLLM_JOB, name),
    )
    asyncio.run(run.watch(ticks, report))
    engines = tuple(
        EngineHistory(
            engine=engine,
            stretches=find_stretches(seen, longest_gap),
            ticks=tuple(tick.get(engine) for tick in run.ticks),
        )
        for engine, seen in samples.items()
    )
    problems = [*run.problems(), *(problem for engine in engines for problem in gap_problems(name, engine))]
    return History(
        name=name,
        started_at=recording.first_at,
        duration_seconds=recording.duration_seconds,
        every_seconds=every_seconds,
        engines=engines,
        series={series: (*values, *[None] * (ticks - len(values))) for series, values in run.series.items()},
        problems=tuple(problems),
    )


def _all_samples(recording: Recording) -> tuple[dict[str, list[EngineSample]], list[float]]:
    """(engine -> what each scrape says of it, seconds of every scrape, also of those that failed)."""
    samples: dict[str, list[EngineSample]] = {}
    times: list[float] = []
    for entry in read_entries(recording.path):
        at = round(entry.taken_at - recording.first_at, 3)
        times.append(at)
        body = b"" if entry.failure is not None else entry.page.encode()
        page = parse_page(body)
        if isinstance(page, SourceFailure):
            continue
        finished = finished_requests(body)
        for engine in page.engines:
            samples.setdefault(engine.engine, []).append(sample_of(engine, at, finished.get(engine.engine)))
    return samples, times


def sample_of(engine: EngineSnapshot, at: float, finished_total: float | None = None) -> EngineSample:
    """What is scored of a snapshot."""
    return EngineSample(
        at=at,
        kv_usage_ratio=engine.kv_usage_ratio,
        requests_running=engine.requests_running,
        requests_waiting=engine.requests_waiting,
        preemptions_total=engine.preemptions_total,
        finished_total=finished_total,
    )


def _interval_seconds(recording: Recording, times: list[float]) -> float:
    """What the header says, else what most scrapes keep."""
    told = recording.origin.get("interval_seconds")
    if isinstance(told, int | float):
        return float(told)
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(steps) if steps else 1.0


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
        longest_gap_seconds: float,
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
        self._longest_gap_seconds = longest_gap_seconds
        self._offset = 0.0
        self._entry = self._playback.entry_at(0.0)
        first = ReplicaAssessment(replica=name, url="", interval_seconds=every_seconds)
        self._board = Board((first,))
        sources = ReplicaSources(self._fetch_page, self._resolve_facts, self._facts, self._ask_health)
        self._sampler = ReplicaSampler(first, (), sources, self._board)

    async def watch(self, ticks: int, report: Report) -> None:
        """Every tick of the recording."""
        for number in range(ticks):
            if number and number % _REPORT_EVERY_TICKS == 0:
                report(f"{self._name}: tick {number:,} of {ticks:,}")
            self._offset = number * self._every_seconds
            self._entry = self._playback.entry_at(self._offset + _HALF_A_MILLISECOND)
            now = self._recording.first_at + self._offset
            await self._sampler.tick(now)
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

    def problems(self) -> Iterable[str]:
        """What the daemon would have told while it watched."""
        [replica] = self._board.fleet.replicas
        for reason, count in replica.problems_total:
            yield f"{self._name}: {reason}, at {count:,} of {len(self.ticks):,} ticks"
        for event in replica.events:
            if event.kind is not EventKind.STATE_CHANGED:
                at = event.at - self._recording.first_at
                yield f"{self._name}: at {at:.1f} s {event.kind.replace('_', ' ')}: {event.detail}"

    def _gap(self) -> str | None:
        """Why the entry in force tells nothing about this instant."""
        entry, at = self._entry, self._entry.taken_at - self._recording.first_at
        if entry.failure is not None:
            return f"the scrape at {at:.3f} s failed ({entry.failure})"
        if self._offset - at > self._longest_gap_seconds:
            return f"nothing was recorded for some time after {at:.3f} s"
        return None

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
