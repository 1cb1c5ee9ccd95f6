"""Probabilities held against what came: Brier score and reliability. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvheadroom.lab.backtest.events import TOLERANCE_SECONDS, Stretch, known_until

BINS = 10


@dataclass(frozen=True, slots=True)
class Judged:
    """One probability and what came of it."""

    probability: float
    came: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Probabilities of one range.

    Attributes:
        at_least, below: of the range; the last one has 1 in it too.
        mean_probability, came_ratio: of its ticks.
    """

    at_least: float
    below: float
    ticks: int
    mean_probability: float
    came_ratio: float


def judge(
    probabilities: Iterable[tuple[float, float | None]],
    events: Sequence[float],
    horizon_seconds: float,
    stretches: Sequence[Stretch],
) -> tuple[Judged, ...]:
    """Each probability against "an event starts within the horizon".

    Ticks without a probability, and ticks whose horizon was not seen to its end, are left out: of those only the ones that
    an event followed could be judged, and they would make every forecast look timid.

    Args:
        probabilities: (seconds, 0-1 or None), one for each tick.
        events: seconds, in order.
        stretches: in which the engine was seen.
    """
    judged = []
    for at, probability in probabilities:
        if probability is None or at + horizon_seconds > known_until(stretches, at) + TOLERANCE_SECONDS:
            continue
        following = bisect_right(events, at)
        came = following < len(events) and events[following] - at <= horizon_seconds + TOLERANCE_SECONDS
        judged.append(Judged(probability, came))
    return tuple(judged)


def brier(judged: Sequence[Judged]) -> float | None:
    """Mean squared error of probabilities: 0 is perfect, always saying a half gives 0.25; None without any."""
    if not judged:
        return None
    return sum((one.probability - one.came) ** 2 for one in judged) / len(judged)


def base_rate(judged: Sequence[Judged]) -> float | None:
    """Share of ticks that an event followed: always saying it is the least that a forecast must beat."""
    return sum(one.came for one in judged) / len(judged) if judged else None


def reliability(judged: Sequence[Judged]) -> tuple[Bin, ...]:
    """Of the ticks at which about so much was said, how many an event followed; ranges without ticks are left out."""
    bins = []
    for number in range(BINS):
        inside = [one for one in judged if min(int(one.probability * BINS), BINS - 1) == number]
        if inside:
            bins.append(
                Bin(
                    at_least=number / BINS,
                    below=(number + 1) / BINS,
                    ticks=len(inside),
                    mean_probability=sum(one.probability for one in inside) / len(inside),
                    came_ratio=sum(one.came for one in inside) / len(inside),
                )
            )
    return tuple(bins)
