"""What a signal did at every tick -> alarms -> which episodes it warned of. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvheadroom.lab.backtest.events import TOLERANCE_SECONDS, Episode, Scale, Stretch, known_until


@dataclass(frozen=True, slots=True)
class Alarm:
    """A signal that fires from one tick on, and no longer at another.

    Attributes:
        started_at, ended_at: seconds; what still fires at the end of the history ends with it.
    """

    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Warned:
    """An episode and the first alarm that warned of it; seconds."""

    preempted_at: float
    warned_at: float

    @property
    def lead_seconds(self) -> float:
        """How long before the episode's first event."""
        return self.preempted_at - self.warned_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a signal did.

    Attributes:
        alarms: with short pauses closed.
        missed: episodes that no alarm warned of.
        false_alarms: alarms that no event followed within the horizon.
        started_late: alarms that began inside an episode; they are neither.
        undecided: alarms whose horizon was not seen to its end, and no event came before that.
        time_firing_ratio: share of the ticks at which the engine was known.
    """

    alarms: tuple[Alarm, ...]
    warned: tuple[Warned, ...]
    missed: int
    false_alarms: int
    started_late: int
    undecided: int
    time_firing_ratio: float | None


def find_alarms(firing: Sequence[bool | None], every_seconds: float, gap_seconds: float) -> tuple[Alarm, ...]:
    """Alarms of a signal.

    Args:
        firing: at tick 0, 1, ...; None where the engine was not known, which is no firing.
        every_seconds: from tick to tick.
        gap_seconds: pauses up to this long are closed.
    """
    alarms: list[Alarm] = []
    start: int | None = None
    for tick, fires in enumerate((*firing, None)):
        if fires and start is None:
            start = tick
        elif not fires and start is not None:
            # The last tick is an instant: nothing is known of the time after it.
            end = min(tick, max(start, len(firing) - 1))
            began = start * every_seconds
            if alarms and began - alarms[-1].ended_at <= gap_seconds + TOLERANCE_SECONDS:
                alarms[-1] = Alarm(alarms[-1].started_at, end * every_seconds)
            else:
                alarms.append(Alarm(began, end * every_seconds))
            start = None
    return tuple(alarms)


def score(
    firing: Sequence[bool | None],
    episodes: Sequence[Episode],
    *,
    every_seconds: float,
    scale: Scale,
    stretches: Sequence[Stretch],
) -> Score:
    """Score a signal on the episodes of one engine.

    Args:
        firing: as for `find_alarms`.
        episodes: in order.
        stretches: in which the engine was seen.
    """
    alarms = find_alarms(firing, every_seconds, scale.alarm_gap_seconds)
    firsts = [episode.preempted_at for episode in episodes]
    warned: dict[float, float] = {}
    false_alarms = started_late = undecided = 0
    for alarm in alarms:
        at = alarm.started_at
        until = min(at + scale.horizon_seconds, known_until(stretches, at)) + TOLERANCE_SECONDS
        begun = bisect_right(firsts, at)
        if begun and at <= episodes[begun - 1].last_at:
            started_late += 1
        elif begun < len(firsts) and firsts[begun] <= until:
            warned.setdefault(firsts[begun], at)
        elif until < at + scale.horizon_seconds:
            undecided += 1
        else:
            false_alarms += 1
    known = [fires for fires in firing if fires is not None]
    return Score(
        alarms=alarms,
        warned=tuple(Warned(first, at) for first, at in sorted(warned.items())),
        missed=len(episodes) - len(warned),
        false_alarms=false_alarms,
        started_late=started_late,
        undecided=undecided,
        time_firing_ratio=sum(known) / len(known) if known else None,
    )
