"""What one engine said before: its figures of the last hour, as long as one server went on without a gap."""

import math
from array import array
from bisect import bisect_left
from itertools import islice
from operator import lt

from kvheadroom.capacity.fleet import STALE_AFTER_TICKS
from kvheadroom.capacity.history import (
    COUNTERS,
    KEPT,
    WINDOWS,
    LastHour,
    Moment,
    PastFigures,
    Recent,
    moment_of,
)
from kvheadroom.capacity.readings import EngineSnapshot

FINE_SECONDS, FINE_STEP = 300.0, 1.0
"""Of the last five minutes every scrape is kept, but no more than one a second."""
COARSE_SECONDS, COARSE_STEP = 3600.0, 60.0
"""Of the last hour one scrape a minute."""
LONGEST_GAP_SECONDS = 15.0
"""Without a scrape, where three intervals are less: a server under load answers late, just when its past is wanted."""
LONGEST_SILENCE_SECONDS = 120.0
"""After which no scrape follows another one, even of the same run."""
LARGEST_SHARE_OFF = 0.25
"""A window may be longer or shorter by so much of it, and by no more than a step."""

_WIDTH = len(KEPT)
_USAGE = KEPT.index("kv_usage_ratio")


class EngineHistory:
    """Scrapes of one engine, evenly spaced: at a gap, a restart or a clock set back they begin anew.

    A scrape is 26 figures and its time; 86 KB in all at an interval of 1 s or less, 31 KB at 5 s.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._started_at: float | None = None
        self._last: Moment | None = None
        self._previous: Moment | None = None
        self._fine = _Kept(FINE_SECONDS, FINE_STEP, interval_seconds)
        self._coarse = _Kept(COARSE_SECONDS, COARSE_STEP, interval_seconds)
        self._last_hour = LastHour()

    @property
    def last(self) -> Moment | None:
        """The newest scrape."""
        return self._last

    def add(self, snapshot: EngineSnapshot, taken_at: float, started_at: float | None) -> bool:
        """Remember one more scrape; whether it is of the same run of the server as the one before, and not long after it.

        What is kept here begins anew after a shorter gap: a forecast needs even steps, and a sum over minutes does not.

        Args:
            taken_at: unix seconds.
            started_at: start time of the server's process, None where its page does not tell.
        """
        moment = moment_of(snapshot, taken_at)
        passed = self._seconds_of_one_run(moment, started_at)
        longest = max(STALE_AFTER_TICKS * self._interval, LONGEST_GAP_SECONDS)
        if passed is None or passed > longest:
            self._fine.clear()
            self._coarse.clear()
            self._last = None
        self._started_at = self._started_at if started_at is None else started_at
        self._previous, self._last = self._last, moment
        self._fine.add(moment)
        if self._coarse.add(moment):
            # A tick a minute copies it; all others publish the same one again.
            hour = self._coarse.since(taken_at - COARSE_SECONDS)
            self._last_hour = LastHour(hour.times, hour.of("kv_usage_ratio"), hour.of("preemptions_total"))
        return passed is not None and passed <= max(longest, LONGEST_SILENCE_SECONDS)

    def window_starts(self) -> dict[str, Moment]:
        """Where each window begins that reaches back whole."""
        return {name: start for name, seconds in WINDOWS.items() if (start := self._ago(seconds)) is not None}

    def recent(self) -> Recent:
        """Instants to compare the last scrape with."""
        half_minute = self._ago(30.0)
        return Recent(
            previous=self._previous,
            seconds_10=self._ago(10.0),
            seconds_30=half_minute,
            seconds_60=self._ago(60.0),
            oldest=self._fine.oldest(),
            usage_of_30_seconds=None if half_minute is None else self._fine.mean_usage(half_minute.taken_at),
        )

    def five_minutes(self) -> PastFigures:
        """Every scrape of the last five minutes, at most one a second; a copy."""
        return PastFigures() if self._last is None else self._fine.since(self._last.taken_at - FINE_SECONDS)

    def last_hour(self) -> LastHour:
        """One scrape a minute of the last hour; shared until the next one is kept, so never changed."""
        return self._last_hour

    def _seconds_of_one_run(self, now: Moment, started_at: float | None) -> float | None:
        """Since the scrape before, where that was of the same run of the server."""
        before = self._last
        moved = started_at is not None and self._started_at is not None and started_at != self._started_at
        if before is None or moved or now.taken_at <= before.taken_at:
            return None
        fell = any(islice(map(lt, now.figures, before.figures), len(COUNTERS)))
        return None if fell else now.taken_at - before.taken_at

    def _ago(self, seconds: float) -> Moment | None:
        """The scrape nearest to so long ago; None if none is near."""
        if self._last is None:
            return None
        kept = self._fine if seconds <= FINE_SECONDS else self._coarse
        return kept.near(self._last.taken_at - seconds, seconds * LARGEST_SHARE_OFF)


class _Kept:
    """Scrapes that are a step apart, oldest first.

    All figures stand in one array, one scrape after the other: a scrape and the course of a figure are both slices of it.
    """

    def __init__(self, seconds: float, step: float, interval: float) -> None:
        # A scrape may come a little early and is meant for its step all the same.
        self._least_step = step - min(step, interval) / 4
        self._spacing = max(step, interval)
        self._seconds = seconds
        self._times = array("d")
        self._figures = array("d")

    def clear(self) -> None:
        """Forget them all."""
        del self._times[:], self._figures[:]

    def add(self, moment: Moment) -> bool:
        """Append a scrape if it is a step after the last one, and drop those that no window needs any more.

        Whether it was appended.
        """
        times, at = self._times, moment.taken_at
        if times and at - times[-1] < self._least_step:
            return False
        times.append(at)
        self._figures.extend(moment.figures)
        old = bisect_left(times, at - self._seconds - self._spacing)
        if old:
            del times[:old], self._figures[: old * _WIDTH]
        return True

    def oldest(self) -> Moment | None:
        """None before the first."""
        return self._moment(0) if self._times else None

    def near(self, wanted: float, most_off: float) -> Moment | None:
        """The scrape nearest to an instant; None if none is within a step of it, or so many seconds where that is less."""
        times = self._times
        place = bisect_left(times, wanted)
        if place == len(times) or (place and wanted - times[place - 1] <= times[place] - wanted):
            place -= 1
        if place < 0 or abs(times[place] - wanted) > min(most_off, self._spacing):
            return None
        return self._moment(place)

    def since(self, at: float) -> PastFigures:
        """Those from an instant on."""
        first = bisect_left(self._times, at)
        return PastFigures(self._times[first:], self._figures[first * _WIDTH :])

    def mean_usage(self, since: float) -> float | None:
        """Mean of the usage from an instant on."""
        first = bisect_left(self._times, since)
        told = [usage for usage in self._figures[first * _WIDTH + _USAGE :: _WIDTH] if not math.isnan(usage)]
        return sum(told) / len(told) if told else None

    def _moment(self, place: int) -> Moment:
        return Moment(self._times[place], self._figures[place * _WIDTH : (place + 1) * _WIDTH])
