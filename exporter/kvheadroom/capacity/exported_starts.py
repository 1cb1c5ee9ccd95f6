"""Starts that kvheadroom itself measured and exported earlier -> samples, and which of them tell nothing.

The family `kvheadroom_overhead_sample_bytes` has one series for each start of each engine, with the key as labels. It is constant as
long as the start lasts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.calibration_run import LookedAt
from kvheadroom.capacity.calibration_samples import (
    MOST_OVERHEAD_RATIO,
    CalibrationSample,
    Excluded,
    Exclusion,
    SampleSource,
)
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.own_start import without_replica

_MOST_BYTES = 2**50
"""No GPU has more, whatever it is called."""

Window = tuple[float, float]
"""Unix seconds of its first and its last instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSample:
    """What was exported of one start under one set of labels, for some time.

    Attributes:
        edition: of the estimate that `estimated_bytes` is by, 0 where what stands in its place is none.
        seen: from the first to the last instant at which it was looked for and found.
        values: bytes, each different one.
        estimated_bytes: what was estimated beside it; None where nothing was.
        block_bytes: of one block of its pool; None where they are not told beside it.
    """

    start: str
    replica: str
    engine: str
    model: str
    key: CalibrationKey
    edition: int
    seen: Window
    values: frozenset[float]
    estimated_bytes: int | None
    block_bytes: int | None

    @property
    def name(self) -> str:
        """Of its engine, for people."""
        return f"{self.replica} engine {self.engine}"


@dataclass(frozen=True, slots=True)
class Described:
    """One start under one key, over the whole history.

    Attributes:
        last: as it was described last.
    """

    last: ExportedSample
    seen: Window
    values: frozenset[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Where and how far was looked.

    Attributes:
        where: the history, for people.
        every_seconds: from one look to the next.
        unanswered: times of which nothing is known.
        instant: unix seconds in words.
    """

    where: str
    every_seconds: float
    unanswered: Sequence[Window]
    instant: Callable[[float], str]

    def evidence(self, name: str, seen: Window) -> str:
        """Where something stands."""
        return f"{self.where}: {name}, {self.between(seen)}"

    def between(self, window: Window) -> str:
        """Two instants in words."""
        return f"{self.instant(window[0])} to {self.instant(window[1])}"

    @property
    def seen_once(self) -> str:
        """Why what was seen once is not taken."""
        return (
            "it was seen at one instant alone, and may have been read while another process took its place; a shorter --every than "
            f"{self.every_seconds:g} s may show it twice"
        )

    def unanswered_near(self, seen: Window) -> Window | None:
        """A time of which nothing is known and at which something that was seen before or after it may have been there too."""
        first, last = seen[0] - self.every_seconds, seen[1] + self.every_seconds
        # Prometheus rounds instants to milliseconds.
        return next(
            (one for one in self.unanswered if one[0] <= last + 1e-3 and one[1] >= first - 1e-3), None
        )


def exported_starts(told: Iterable[ExportedSample], past: Past) -> tuple[LookedAt, ...]:
    """Every start once, by its name."""
    by_start: dict[str, dict[CalibrationKey, Described]] = {}
    for one in sorted(told, key=lambda one: one.seen):
        descriptions = by_start.setdefault(one.start, {})
        before = descriptions.get(one.key)
        descriptions[one.key] = (
            Described(one, one.seen, one.values) if before is None else _joined(before, one)
        )
    return tuple(_each_once([_judged(list(one.values()), past) for _, one in sorted(by_start.items())], past))


def _joined(before: Described, one: ExportedSample) -> Described:
    seen = before.seen[0], max(before.seen[1], one.seen[1])
    return Described(one if one.seen[1] >= before.seen[1] else before.last, seen, before.values | one.values)


@dataclass(frozen=True, slots=True)
class _Judged:
    described: Described
    outcome: CalibrationSample | Excluded


def _judged(descriptions: list[Described], past: Past) -> _Judged:
    """A start by its last description: what it was described as before was corrected since."""
    *others, last = sorted(descriptions, key=lambda one: one.seen[1])
    return _Judged(last, _outcome(last, others, past))


def _outcome(start: Described, others: list[Described], past: Past) -> CalibrationSample | Excluded:
    told = start.last
    both = next((one for one in others if one.seen[1] >= start.seen[0]), None)
    if both is not None:
        changes = "; ".join(both.last.key.differences(told.key))
        return Excluded(
            Exclusion.UNKNOWN,
            f"it is described in two ways at once ({changes}): do two daemons watch it with different configs?",
        )
    impossible = next((value for value in sorted(start.values) if not _is_possible(value, told.key)), None)
    if impossible is not None:
        return Excluded(Exclusion.IMPOSSIBLE, f"an overhead of {impossible:,.15g} bytes cannot be on its GPU")
    if len(start.values) > 1:
        low, high = min(start.values), max(start.values)
        return Excluded(
            Exclusion.RESTARTING,
            f"its overhead was {low / GIB:,.2f} GiB and {high / GIB:,.2f} GiB: one was read while another process was in its place",
        )
    unanswered = past.unanswered_near(start.seen)
    if unanswered is not None:
        return Excluded(
            Exclusion.UNKNOWN,
            f"nothing is known of {past.between(unanswered)}, when it may have run too",
        )
    if start.seen[0] == start.seen[1]:
        return Excluded(Exclusion.RESTARTING, past.seen_once)
    if told.block_bytes is None:
        return Excluded(
            Exclusion.UNKNOWN,
            "kvheadroom_observed_pool_bytes and kvheadroom_observed_blocks are not beside it: does Prometheus drop them?",
        )
    [value] = start.values
    return CalibrationSample(
        key=told.key,
        start=told.start,
        source=SampleSource.PROMETHEUS,
        overhead_bytes=round(value),
        uncertainty_bytes=told.block_bytes - 1,
        estimated_bytes=told.estimated_bytes,
        edition=told.edition,
        measured_at=start.seen[0],
        model=told.model,
        evidence=past.evidence(told.name, start.seen),
    )


def _is_possible(value: float, key: CalibrationKey) -> bool:
    return math.isfinite(value) and value >= 0 and value == int(value) and value <= _most_overhead(key)


def _most_overhead(key: CalibrationKey) -> float:
    return _MOST_BYTES if key.gpu_bytes is None else MOST_OVERHEAD_RATIO * key.gpu_bytes


def _each_once(judged: list[_Judged], past: Past) -> Iterable[LookedAt]:
    """A replica that was renamed is one start with two names, one after the other: the later counts, as the daemon calls it now."""
    same: dict[object, list[_Judged]] = {}
    for number, one in enumerate(judged):
        name = None if isinstance(one.outcome, Excluded) else without_replica(one.outcome)
        same.setdefault(name or number, []).append(one)
    for these in same.values():
        these.sort(key=lambda one: one.described.seen)
        for before, after in zip(these, [*these[1:], None], strict=True):
            if after is None or after.described.seen[0] <= before.described.seen[1]:
                yield _looked_at(before, past)


def _looked_at(one: _Judged, past: Past) -> LookedAt:
    told = one.described.last
    return LookedAt(
        evidence=past.evidence(told.name, one.described.seen),
        model=told.model,
        release=told.key.release,
        outcome=one.outcome,
    )
