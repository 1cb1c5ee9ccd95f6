"""Earlier instants of an engine, by the figures that a test is about."""

import math
from collections.abc import Mapping

from kvheadroom.capacity.history import KEPT, Moment


def moment(taken_at: float, figures: Mapping[str, float]) -> Moment:
    """What is not among the figures was not told."""
    assert figures.keys() <= set(KEPT)
    return Moment(taken_at, [figures.get(name, math.nan) for name in KEPT])


def told(then: Moment) -> dict[str, float]:
    """The figures that a moment has."""
    return {name: figure for name in KEPT if (figure := then.of(name)) is not None}
