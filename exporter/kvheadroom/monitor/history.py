"""What one engine said before: its figures of the last hour, as long as one server went on without a gap."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from typing import TypeAlias

from kvheadroom.capacity.fleet import STALE_AFTER_TICKS
from kvheadroom.capacity.history import COUNTERS, KEPT, WINDOWS, Moment, Recent
from kvheadroom.capacity.readings import EngineSnapshot

FINE_SECONDS, FINE_STEP = 300.0, 1.0
"""Of the last five minutes every scrape is kept, but no more than one a second."""
COARSE_SECONDS, COARSE_STEP = 3600.0, 60.0
"""Of the last hour one scrape a minute."""
LARGEST_SHARE_OFF = 0.25
"""A window may be longer or shorter by so much of it, and by no more than a step."""

Row: TypeAlias = "array[float]"
"""The instant (unix seconds), then the figures in the order of KEPT; NaN where the page did not tell one."""

_FIGURES = attrgetter(*KEPT)
_instant = itemgetter(0)
_USAGE = 1 + KEPT.index("kv_usage_ratio")


class EngineHistory:
    """Rows of one engine, evenly spaced: at a gap, a restart or a clock set back they begin anew.

    A row is 17 numbers; 80 KB in all at an interval of 1 s or less, 26 KB at 5 s.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._started_at: float | None = None
        self._last: Row | None = None
        self._previous: Row | None = None
        self._fine: list[Row] = []
        self._coarse: list[Row] = []

    def add(self, snapshot: EngineSnapshot, taken_at: float, started_at: float | None) -> None:
        """Remember one more scrape.

        Args:
            taken_at: unix seconds.
            started_at: start time of the server's process, None where its page does not tell.
        """
        row = array("d", (taken_at, *(math.nan if n is None else n for n in _FIGURES(snapshot))))
        if self._last is not None and not self._goes_on(self._last, row, started_at):
            self._fine, self._coarse, self._last = [], [], None
        self._started_at = self._started_at if started_at is None else started_at
        self._previous, self._last = self._last, row
        self._keep(self._fine, row, FINE_STEP, FINE_SECONDS)
        self._keep(self._coarse, row, COARSE_STEP, COARSE_SECONDS)

    def window_starts(self) -> dict[str, Moment]:
        """Where each window begins that reaches back whole."""
        starts = {name: self._at(seconds) for name, seconds in WINDOWS.items()}
        return {name: _moment(row) for name, row in starts.items() if row is not None}

    def recent(self) -> Recent:
        """Instants to compare the last scrape with."""
        thirty = self._at(30.0)
        rows = (self._previous, self._at(10.0), thirty, next(iter(self._fine), None))
        previous, ten, half_minute, oldest = (None if row is None else _moment(row) for row in rows)
        return Recent(
            previous=previous,
            seconds_10=ten,
            seconds_30=half_minute,
            oldest=oldest,
            usage_of_30_seconds=None if thirty is None else self._mean_usage(thirty[0]),
        )

    def moments(self, seconds: float) -> Iterator[Moment]:
        """What is remembered of the last so many seconds, oldest first; every scrape of up to five minutes."""
        if self._last is None:
            return
        rows = self._fine if seconds <= FINE_SECONDS else self._coarse
        since = self._last[0] - seconds
        yield from (_moment(row) for row in rows if row[0] >= since)

    def _mean_usage(self, since: float) -> float | None:
        """Mean of the usage from an instant on."""
        told = [row[_USAGE] for row in self._fine if row[0] >= since and not math.isnan(row[_USAGE])]
        return sum(told) / len(told) if told else None

    def _goes_on(self, before: Row, row: Row, started_at: float | None) -> bool:
        """Whether this is the same run of the server, and the last row is not too old to be followed."""
        moved = started_at is not None and self._started_at is not None and started_at != self._started_at
        passed = row[0] - before[0]
        if moved or not 0 < passed <= STALE_AFTER_TICKS * self._interval:
            return False
        return not any(new < old for new, old in zip(row[1 : 1 + len(COUNTERS)], before[1:], strict=False))

    def _keep(self, rows: list[Row], row: Row, step: float, seconds: float) -> None:
        """Append a row if it is a step after the last one, and drop those that no window needs any more."""
        # A scrape may come a little early and is meant for its step all the same.
        if rows and row[0] - rows[-1][0] < step - min(step, self._interval) / 4:
            return
        rows.append(row)
        needed = bisect_left(rows, row[0] - seconds - max(step, self._interval), key=_instant)
        del rows[:needed]

    def _at(self, seconds: float) -> "Row | None":
        """The row nearest to so long ago; None if none is near."""
        if self._last is None:
            return None
        wanted = self._last[0] - seconds
        rows, step = (self._fine, FINE_STEP) if seconds <= FINE_SECONDS else (self._coarse, COARSE_STEP)
        at = bisect_left(rows, wanted, key=_instant)
        near = rows[max(0, at - 1) : at + 1]
        row = min(near, key=lambda row: abs(row[0] - wanted), default=None)
        off = min(seconds * LARGEST_SHARE_OFF, max(step, self._interval))
        return row if row is not None and abs(row[0] - wanted) <= off else None


def _moment(row: Row) -> Moment:
    figures = {name: value for name, value in zip(KEPT, row[1:], strict=True) if not math.isnan(value)}
    return Moment(row[0], figures)
