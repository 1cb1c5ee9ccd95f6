"""Preemptions of one engine, as its scrapes tell them: events, and the episodes that they form. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

TOLERANCE_SECONDS = 1e-6
"""Instants are sums of intervals that a float may not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """What one scrape says of one engine; None where it does not say it.

    Attributes:
        at: seconds since the start of the history.
        kv_usage_ratio: 0-1.
        preemptions_total, finished_total: counters since the server's start; finished requests of every reason.
    """

    at: float
    kv_usage_ratio: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    preemptions_total: float | None = None
    finished_total: float | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples without a gap between them.

    Attributes:
        samples: in order; at least one.
    """

    samples: tuple[EngineSample, ...]

    @property
    def starts_at(self) -> float:
        """Seconds of its first sample."""
        return self.samples[0].at

    @property
    def ends_at(self) -> float:
        """Seconds of its last sample."""
        return self.samples[-1].at


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How far apart things are before they are told apart.

    Attributes:
        horizon_seconds: how long before an episode an alarm warns of it.
        episode_gap_seconds: events nearer than this are one episode.
        alarm_gap_seconds: a signal that pauses no longer than this is one alarm.
        hold_seconds: what `for` stands for in the baselines.
    """

    horizon_seconds: float
    episode_gap_seconds: float
    alarm_gap_seconds: float
    hold_seconds: float


SMALL = Scale(horizon_seconds=60.0, episode_gap_seconds=20.0, alarm_gap_seconds=5.0, hold_seconds=15.0)
"""Recordings of a tiny model on a CPU, where a pool fills within seconds."""
PRODUCTION = Scale(
    horizon_seconds=900.0, episode_gap_seconds=300.0, alarm_gap_seconds=60.0, hold_seconds=60.0
)
SCALES = {"small": SMALL, "production": PRODUCTION}


@dataclass(frozen=True, slots=True)
class Rise:
    """A rise of the counter of preemptions.

    Attributes:
        dated_at: when it began, as far as the samples show it.
        counted_at: seconds of the sample at which the counter was higher.
    """

    dated_at: float
    counted_at: float


@dataclass(frozen=True, slots=True)
class Episode:
    """Events that belong together.

    Attributes:
        events: their seconds, in order; at least one.
    """

    events: tuple[float, ...]

    @property
    def preempted_at(self) -> float:
        """Seconds of its first event."""
        return self.events[0]

    @property
    def last_at(self) -> float:
        """Seconds of its last event."""
        return self.events[-1]


def find_stretches(samples: Iterable[EngineSample], longest_gap_seconds: float) -> tuple[Stretch, ...]:
    """Samples, in order, cut where they are further apart: what happened between is not known."""
    stretches: list[list[EngineSample]] = []
    for sample in samples:
        if stretches and sample.at - stretches[-1][-1].at <= longest_gap_seconds + TOLERANCE_SECONDS:
            stretches[-1].append(sample)
        else:
            stretches.append([sample])
    return tuple(Stretch(tuple(samples)) for samples in stretches)


def known_until(stretches: Sequence[Stretch], at: float) -> float:
    """Up to which second it is known what came after an instant; before all stretches, the instant itself."""
    number = bisect_right(stretches, at, key=lambda stretch: stretch.starts_at)
    return stretches[number - 1].ends_at if number else at


def date_rises(samples: Iterable[EngineSample]) -> Iterator[Rise]:
    """Every rise of `num_preemptions_total` after the first sample of a stretch, and when it began.

    The counter comes late: a victim is counted with its next output (vLLM 0.33.0 `v1/engine/output_processor.py`, `take_events`
    of the scheduler), often after it was computed again. So a rise is dated to the earliest sample since the previous rise at
    which fewer requests ran, none had finished and more waited than one sample before; without such a sample, to the rise.

    A counter that fell began anew: what was before it dates nothing after it.
    """
    sign_at: float | None = None
    before: EngineSample | None = None
    counted: float | None = None
    for sample in samples:
        count = sample.preemptions_total
        if counted is not None and count is not None and count < counted:
            sign_at, counted = None, count
        elif sign_at is None and before is not None and _shows_a_preemption(before, sample):
            sign_at = sample.at
        if count is not None:
            if counted is not None and count > counted:
                yield Rise(sample.at if sign_at is None else sign_at, sample.at)
                sign_at = None
            counted = count
        before = sample


def count_preemptions(samples: Iterable[EngineSample]) -> float:
    """How many there were in a stretch: the sum of what the counter rose."""
    counts = [sample.preemptions_total for sample in samples if sample.preemptions_total is not None]
    return sum(max(0.0, after - before) for before, after in pairwise(counts))


def _shows_a_preemption(before: EngineSample, now: EngineSample) -> bool:
    """Fewer run, none finished, more wait; so it is, too, where a client hangs up, whom no counter counts, as others come."""
    return (
        _rose(now.requests_running, before.requests_running)
        and _rose(before.requests_waiting, now.requests_waiting)
        and before.finished_total is not None
        and before.finished_total == now.finished_total
    )


def _rose(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and now > before


def find_episodes(events: Sequence[float], gap_seconds: float) -> tuple[Episode, ...]:
    """Events, in order, less than a gap apart are one episode."""
    episodes: list[list[float]] = []
    for at in events:
        if episodes and at - episodes[-1][-1] < gap_seconds:
            episodes[-1].append(at)
        else:
            episodes.append([at])
    return tuple(Episode(tuple(events)) for events in episodes)
