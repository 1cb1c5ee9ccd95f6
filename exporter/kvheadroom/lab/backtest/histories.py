"""What a backtest looks at: engines as they were at every tick, and the series that Prometheus would have had."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvheadroom.lab.backtest.events import EngineSample, Stretch

ALWAYS_WANTED = frozenset(
    {"kvheadroom_forecast_preemption_probability_ratio", "kvheadroom_forecast_exhaustion_seconds"}
)
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
        stretches: every scrape, for what really happened.
        ticks: what the daemon would have shown at tick 0, 1, ...; None where it was not known.
    """

    engine: str
    stretches: tuple[Stretch, ...]
    ticks: tuple[EngineSample | None, ...]

    @property
    def tells_preemptions(self) -> bool:
        """Whether any scrape has the counter: without it nothing can be scored."""
        return any(
            sample.preemptions_total is not None for stretch in self.stretches for sample in stretch.samples
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Some time of one server.

    Attributes:
        started_at: unix seconds of second 0, None where that is not known.
        every_seconds: from tick to tick; the first is at second 0.
        series: what rules and forecasts are made of, as far as it was wanted.
        problems: a sentence each, for a person.
    """

    name: str
    duration_seconds: float
    every_seconds: float
    engines: tuple[EngineHistory, ...]
    series: Mapping[Series, Values]
    problems: tuple[str, ...] = ()
    started_at: float | None = None

    @property
    def num_ticks(self) -> int:
        """How many there are."""
        return int(self.duration_seconds / self.every_seconds + 1e-6) + 1


def gap_problems(name: str, engine: EngineHistory) -> list[str]:
    """What is not known of an engine, and what must have happened meanwhile."""
    told = []
    for before, after in itertools.pairwise(engine.stretches):
        last, first = before.samples[-1].preemptions_total, after.samples[0].preemptions_total
        lost = (
            ""
            if last is None or first is None or first <= last
            else f", with {first - last:g} preemptions in it"
        )
        told.append(
            f"{name}: nothing is known of engine {engine.engine} from {before.ends_at:.1f} s to {after.starts_at:.1f} s"
            f"{lost}: not scored"
        )
    return told
