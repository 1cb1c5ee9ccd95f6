"""kvheadroom's own forecasts as signals, taken from what the daemon's code exported at every tick."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvheadroom.lab.backtest.events import Scale
from kvheadroom.lab.backtest.histories import EXHAUSTION, PROBABILITY, EngineHistory, History, Values

ALARM_PROBABILITY = 0.5
"""A probability of at least this much is an alarm: more likely than not."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One forecast of one engine.

    Attributes:
        firing: at each tick whether it is an alarm; None where the engine was not known.
        horizon_seconds, probabilities: of a forecast that tells a probability, else None and empty.
    """

    name: str
    firing: tuple[bool | None, ...]
    horizon_seconds: float | None = None
    probabilities: Values = ()


def forecasts(history: History, engine: EngineHistory, scale: Scale) -> Iterator[Forecast]:
    """Every forecast that was exported for an engine at any tick.

    A tick at which the engine was known and nothing was forecast is silence, not ignorance: nobody was warned.
    """
    span = scale.horizon_seconds
    for series, values in sorted(history.series.items(), key=lambda item: item[0].labels):
        if series.label("engine") != engine.engine:
            continue
        if series.name == PROBABILITY:
            horizon = _seconds(series.label("horizon"))
            if horizon is not None:
                name = f"probability within {horizon:g}s >= {ALARM_PROBABILITY:g}"
                firing = _firing(engine, values, lambda value: value >= ALARM_PROBABILITY)
                yield Forecast(name, firing, horizon, values)
        elif series.name == EXHAUSTION:
            firing = _firing(engine, values, lambda value: value <= span)
            yield Forecast(f"exhaustion within {span:g}s", firing)


def _firing(
    engine: EngineHistory, values: Values, is_alarm: Callable[[float], bool]
) -> tuple[bool | None, ...]:
    return tuple(
        None if tick is None else value is not None and is_alarm(value)
        for tick, value in zip(engine.ticks, values, strict=True)
    )


def _seconds(horizon: str) -> float | None:
    """A horizon as its label says it: `60`, `60s`, `15m`; None for what is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", horizon)
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else None
