"""What a backtest looks at: engines as they were at every tick, and the series that Prometheus would have had."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvheadroom.lab.backtest.events import EngineSample, Stretch
from kvheadroom.sources.prometheus_parts import ticks_in

PROBABILITY = "kvheadroom_forecast_preemption_probability_ratio"
"""Of every forecast; where it is absent there is none."""
EXHAUSTION = "kvheadroom_forecast_exhaustion_seconds"
ALWAYS_WANTED = frozenset({PROBABILITY, EXHAUSTION})
"""Our own forecasts, scored wherever the daemon's code exports them."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series as Prometheus would store it: name, and labels in the order of their names."""

    name: str
    labels: tuple[tuple[str, str], ...]

    def label(self, name: str) -> str:
        """The value of a label, empty without it."""
        return dict(self.labels).get(name, "")


Values = Sequence[float | None]
"""At tick 0, 1, ...; None where the series had no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHistory:
    """One engine.

    Attributes:
        stretches: every scrape that tells the counter of preemptions, for what really happened.
        ticks: what the daemon would have shown at tick 0, 1, ...; None where it was not known.
    """

    engine: str
    stretches: tuple[Stretch, ...]
    ticks: tuple[EngineSample | None, ...]

    @property
    def tells_preemptions(self) -> bool:
        """Whether any scrape has the counter: without it nothing can be scored."""
        return bool(self.stretches)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Some time of one server.

    Attributes:
        started_at: unix seconds of second 0, None where that is not known.
        every_seconds: from tick to tick; the first is at second 0.
        series: what rules and forecasts are made of, as far as it was wanted.
        problems: a sentence each, for a person.
        why_not: why nothing of it can be scored; None where it can.
    """

    name: str
    duration_seconds: float
    every_seconds: float
    engines: tuple[EngineHistory, ...]
    series: Mapping[Series, Values]
    problems: tuple[str, ...] = ()
    started_at: float | None = None
    why_not: str | None = None

    @property
    def num_ticks(self) -> int:
        """How many there are."""
        return ticks_in(self.duration_seconds, self.every_seconds)


def gap_problems(
    name: str, engine: EngineHistory, duration_seconds: float, longest_gap_seconds: float
) -> list[str]:
    """When it is not known what an engine preempted, and what it must have preempted meanwhile."""
    if not engine.stretches:
        return []
    first, last = engine.stretches[0], engine.stretches[-1]
    told = []
    if first.starts_at > longest_gap_seconds:
        told.append(_gap_problem(name, engine, 0.0, first.starts_at))
    for before, after in itertools.pairwise(engine.stretches):
        lost = (after.samples[0].preemptions_total or 0.0) - (before.samples[-1].preemptions_total or 0.0)
        told.append(_gap_problem(name, engine, before.ends_at, after.starts_at, lost))
    if duration_seconds - last.ends_at > longest_gap_seconds:
        told.append(_gap_problem(name, engine, last.ends_at, duration_seconds))
    return told


def _gap_problem(name: str, engine: EngineHistory, start: float, end: float, lost: float = 0.0) -> str:
    said = f", with {lost:g} preemptions in it" if lost > 0 else ""
    return (
        f"{name}: engine {engine.engine} did not tell its preemptions from {start:.1f} s to {end:.1f} s{said}: "
        "not scored"
    )
