"""One run of `calibrate`: what was looked at, what is learned from it, what was left out and why."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvheadroom.capacity.calibration import Calibration, LearnedOverhead
from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.logged_figures import LoggedFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """One start of one engine, wherever it was found.

    Attributes:
        evidence: where it stands, for people.
        model, release: empty where nobody tells them.
        facts: of such an engine, where they are known.
        figures: of a log.
        notes: what a reader should know about it, each one sentence.
    """

    evidence: str
    model: str
    release: str
    outcome: CalibrationSample | Excluded
    facts: EngineFacts | None = None
    figures: LoggedFigures | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Looked:
    """All that a source told.

    Attributes:
        problems: of the source itself, each one sentence: a log that is no vLLM's, a server that does not answer.
    """

    starts: tuple[LookedAt, ...]
    problems: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[CalibrationSample, ...]:
        """Of one start that was found twice, both."""
        return tuple(one.outcome for one in self.starts if isinstance(one.outcome, CalibrationSample))

    def excluded(self) -> tuple[tuple[Exclusion, int], ...]:
        """How many starts were left out, by reason, in the order of the list of reasons."""
        counts = Counter(one.outcome.reason for one in self.starts if isinstance(one.outcome, Excluded))
        return tuple((reason, counts[reason]) for reason in Exclusion if counts[reason])


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the starts of one kind tell.

    Attributes:
        starts: of this run.
    """

    key: CalibrationKey
    model: str
    overhead: LearnedOverhead
    starts: tuple[LookedAt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A run, ended.

    Attributes:
        out: the file that keeps the samples; empty where none was asked for.
        not_kept: why that file holds nothing of this run; empty where it does.
        told: what happened to a damaged file that stood there; empty where all was well.
        kept: samples of this run in that file.
    """

    looked: Looked
    learned: tuple[Learned, ...]
    out: str = ""
    not_kept: str = ""
    told: str = ""
    kept: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every start is a sample, and all was kept."""
        return (
            bool(self.learned)
            and not self.looked.problems
            and not self.looked.excluded()
            and not self.not_kept
            and not self.told
        )


def learn(looked: Looked, before: Iterable[CalibrationSample] = ()) -> tuple[Learned, ...]:
    """What is known of every kind of start that was looked at.

    Args:
        before: samples that are known already.
    """
    calibration = Calibration.of((*before, *looked.samples))
    found: dict[CalibrationKey, list[LookedAt]] = {}
    for one in looked.starts:
        if isinstance(one.outcome, CalibrationSample):
            found.setdefault(one.outcome.key, []).append(one)
    learned = []
    for key, starts in sorted(found.items()):
        overhead = calibration.of_key(key, next((one.facts for one in starts if one.facts is not None), None))
        if overhead is not None:
            learned.append(
                Learned(key=key, model=starts[-1].model, overhead=overhead, starts=_each_once(starts))
            )
    return tuple(learned)


def _each_once(starts: list[LookedAt]) -> tuple[LookedAt, ...]:
    """Of a start that was found twice the last."""
    return tuple(
        {one.outcome.start: one for one in starts if isinstance(one.outcome, CalibrationSample)}.values()
    )
