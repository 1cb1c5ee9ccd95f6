"""The starts of one replica's engines, each measured once, and the calibrated figures that starts like them make.

A start is measured once it has stood still: the same start time of its process, the same blocks and the same facts at
`SETTLED_SCRAPES` scrapes in a row and for `SETTLED_SECONDS`, with every source of its facts answering. A failed scrape or source begins
that anew. So neither the page of a server that goes nor the facts of one that comes are taken for the other's. A start that gives way to
another before is counted as `restarting`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvheadroom.capacity.calibration import CalibratedPrediction, calibrate
from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion, sample_of_engine
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.fleet import ReplicaAssessment
from kvheadroom.capacity.observation import observe
from kvheadroom.capacity.own_start import OwnStart, start_of
from kvheadroom.capacity.prediction import Prediction
from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.monitor.calibration_learner import CalibrationLearner

SETTLED_SCRAPES = 3
SETTLED_SECONDS = 30.0
WATCHED = (
    f"it is measured once nothing of it has changed for {SETTLED_SECONDS:g} s and {SETTLED_SCRAPES} scrapes"
)
MAX_COUNTED = 64
"""Excluded starts that are remembered, so that none is counted twice."""
_GAVE_WAY = (Exclusion.UNKNOWN, Exclusion.RESTARTING)


class ReplicaCalibration:
    """Stepped by the sampler of the replica.

    Args:
        before: what was published of the replica by the sampler before this one.
        foreign_bytes: of other processes on the replica's GPUs now, the most of one; None where nobody knows.
    """

    def __init__(
        self,
        before: ReplicaAssessment,
        learner: CalibrationLearner,
        foreign_bytes: Callable[[], int | None],
    ) -> None:
        self._replica = before.replica
        self._learner = learner
        self._foreign_bytes = foreign_bytes
        self._watched: dict[str, _Watched] = {}
        self._figures: dict[str, _Figure] = {}
        self._excluded: Counter[Exclusion] = Counter(dict(before.excluded_starts_total))
        own = [engine.own_start for engine in before.engines if engine.own_start is not None]
        self._counted: dict[tuple[str, Exclusion], Excluded] = {
            (one.start, one.told.reason): one.told for one in own if isinstance(one.told, Excluded)
        }

    @property
    def excluded_starts_total(self) -> tuple[tuple[Exclusion, int], ...]:
        """Starts that were no sample, by reason."""
        return tuple(sorted(self._excluded.items()))

    def scrape_failed(self) -> None:
        """What was seen before it counts for nothing."""
        for watched in self._watched.values():
            watched.begin_anew()

    def keep_only(self, page: VllmPage) -> None:
        """Forget engines that left the page; a page without engines is of a server that starts."""
        if page.engines:
            there = {engine.engine for engine in page.engines}
            self._watched = {name: one for name, one in self._watched.items() if name in there}
            self._figures = {name: one for name, one in self._figures.items() if name in there}

    def see(
        self,
        snapshot: EngineSnapshot,
        facts: EngineFacts,
        prediction: Prediction,
        *,
        started_at: float | None,
        waits_for: str,
        now: float,
    ) -> tuple[CalibratedPrediction | None, OwnStart]:
        """(the calibrated prediction of one engine, what its own start tells) as of one more page.

        Args:
            prediction: the raw one of the facts.
            started_at: start time of the server's process, None where no page has told it.
            waits_for: why the start cannot be measured yet, a sentence without its full stop; empty where nothing is in the way.
        """
        start = start_of(self._replica, snapshot.engine, started_at, snapshot.num_blocks)
        watched = self._watch(start, snapshot, facts)
        watched.waits_for = waits_for
        if watched.told is None and waits_for:
            watched.begin_anew()
        elif watched.told is None and watched.has_settled(now):
            watched.told = self._measure(start, snapshot, facts, prediction, now)
        own = OwnStart(start, watched.told or waits_for or WATCHED)
        return self._calibrated(snapshot.engine, facts, prediction, start), own

    def _watch(self, start: str, snapshot: EngineSnapshot, facts: EngineFacts) -> "_Watched":
        """What was seen of this start in the same state; begun anew where it is another."""
        before = self._watched.get(snapshot.engine)
        if before is not None and before.is_same(start, snapshot, facts):
            return before
        if before is not None and before.start != start and before.told is None:
            self._gave_way(before)
        watched = _Watched(start, snapshot.num_blocks, bool(snapshot.sleeping), facts)
        self._watched[snapshot.engine] = watched
        return watched

    def _gave_way(self, watched: "_Watched") -> None:
        """Count a start that another one followed before it was measured; one that comes back in turn is counted once."""
        if any((watched.start, reason) in self._counted for reason in _GAVE_WAY):
            return
        reason = Exclusion.UNKNOWN if watched.waits_for else Exclusion.RESTARTING
        self._count(watched.start, Excluded(reason, watched.waits_for or "another start followed at once"))

    def _measure(
        self,
        start: str,
        snapshot: EngineSnapshot,
        facts: EngineFacts,
        prediction: Prediction,
        now: float,
    ) -> CalibrationSample | Excluded:
        # Its pool stays what it was when others held memory, also after they are gone.
        told = self._counted.get((start, Exclusion.FOREIGN_MEMORY)) or sample_of_engine(
            facts,
            snapshot,
            observe(snapshot, facts, prediction.layout),
            start=start,
            foreign_bytes=self._foreign_bytes(),
            measured_at=now,
            evidence=f"the page of {self._replica}, engine {snapshot.engine}",
        )
        if isinstance(told, Excluded):
            self._count(start, told)
        else:
            self._learner.keep(told)
        return told

    def _count(self, start: str, excluded: Excluded) -> None:
        if (start, excluded.reason) in self._counted:
            return
        self._excluded[excluded.reason] += 1
        self._counted[start, excluded.reason] = excluded
        while len(self._counted) > MAX_COUNTED:
            del self._counted[next(iter(self._counted))]

    def _calibrated(
        self, engine: str, facts: EngineFacts, prediction: Prediction, own_start: str
    ) -> CalibratedPrediction | None:
        """Made anew only where the facts, or what is known of starts like it, have changed: it costs three predictions."""
        figure = self._figures.get(engine)
        if figure is None or figure.facts is not facts or figure.own_start != own_start:
            figure = self._figures[engine] = _Figure(facts, own_start, key_of(facts))
        calibration = self._learner.calibration
        samples = () if isinstance(figure.key, str) else calibration.samples.get(figure.key, ())
        if samples is not figure.samples:
            figure.samples = samples
            figure.value = calibrate(facts, prediction, calibration, own_start=own_start)
        return figure.value


@dataclass(slots=True)
class _Watched:
    """One start of one engine, as it was first seen.

    Attributes:
        told: what it tells, None until it has settled.
        since: unix seconds from which on nothing changed, None before.
    """

    start: str
    num_blocks: int | None
    sleeping: bool
    facts: EngineFacts
    told: CalibrationSample | Excluded | None = None
    waits_for: str = ""
    since: float | None = None
    scrapes: int = 0

    def is_same(self, start: str, snapshot: EngineSnapshot, facts: EngineFacts) -> bool:
        """Whether the engine is still in that state; facts that were found anew and are equal are the same."""
        now = (start, snapshot.num_blocks, bool(snapshot.sleeping))
        if now != (self.start, self.num_blocks, self.sleeping):
            return False
        if facts is not self.facts and facts != self.facts:
            return False
        self.facts = facts
        return True

    def begin_anew(self) -> None:
        self.since, self.scrapes = None, 0

    def has_settled(self, now: float) -> bool:
        """Whether it has stood still for long enough, this scrape included."""
        if self.since is None or now < self.since:
            self.since, self.scrapes = now, 0
        self.scrapes += 1
        return self.scrapes >= SETTLED_SCRAPES and now - self.since >= SETTLED_SECONDS


@dataclass(slots=True)
class _Figure:
    """The calibrated prediction of one engine, and what it was made of."""

    facts: EngineFacts
    own_start: str
    key: CalibrationKey | str
    samples: tuple[CalibrationSample, ...] = ()
    value: CalibratedPrediction | None = None
