"""Which share of prompt tokens had been asked for within an age before: a rising curve through what was seen."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

AGES = tuple(math.exp2(step / 4) for step in range(-8, 88))
"""Seconds at which the integral is known: from a quarter of a second to some weeks."""


class Sample(NamedTuple):
    """What one cache found at one time, and the age that it reached.

    Attributes:
        age: seconds.
        share: of prompt tokens that had been asked for within it.
        weight: prompt tokens.
        at: place of the stretch.
    """

    age: float
    share: float
    weight: float
    at: int


class ReuseCurve:
    """The share by age; linear in the logarithm of the age between points, and in the age before the first.

    Attributes:
        points: (age in seconds, share), ascending in both.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self.points = tuple(points)
        self._logs = [math.log(age) for age, _ in points]
        self._shares = [share for _, share in points]
        self._at_ages = [self.share(age) for age in AGES]
        self._integrals = [self._at_ages[0] * AGES[0] / 2]
        for (before, now), (begin, end) in zip(pairwise(self._at_ages), pairwise(AGES), strict=True):
            self._integrals.append(self._integrals[-1] + (end - begin) * (before + now) / 2)

    @property
    def oldest(self) -> float:
        """Seconds; what is older was not seen."""
        return self.points[-1][0]

    def share(self, age: float) -> float:
        """Of prompt tokens, those that had been asked for within this age; of older ones than were seen the last known."""
        if age <= 0:
            return 0.0
        log = math.log(age)
        place = bisect_left(self._logs, log)
        if place == len(self._logs):
            return self._shares[-1]
        if place == 0:
            return self._shares[0] * age / self.points[0][0]
        part = (log - self._logs[place - 1]) / (self._logs[place] - self._logs[place - 1])
        return self._shares[place - 1] + part * (self._shares[place] - self._shares[place - 1])

    def integral(self, age: float) -> float:
        """Of the share over all ages up to this one, in seconds."""
        if age <= AGES[0]:
            return self._integrals[0] * age / AGES[0] * age / AGES[0]
        place = bisect_right(AGES, age)
        if place == len(AGES):
            return self._integrals[-1] + (age - AGES[-1]) * self._at_ages[-1]
        part = (age - AGES[place - 1]) / (AGES[place] - AGES[place - 1])
        return self._integrals[place - 1] + part * (self._integrals[place] - self._integrals[place - 1])


def rising(samples: Sequence[Sample], least_weight: float) -> ReuseCurve:
    """The rising curve nearest to the samples (pool adjacent violators).

    Args:
        samples: at least one.
        least_weight: behind each point, where there is as much.
    """
    points: list[tuple[float, float, float]] = []
    for one in sorted(samples):
        point = math.log(one.age) * one.weight, one.share * one.weight, one.weight
        while points and (
            points[-1][2] < least_weight
            or _share(points[-1]) >= _share(point)
            or _age(point) <= _age(points[-1]) * _APART
        ):
            point = _joined(points.pop(), point)
        points.append(point)
    while len(points) > 1 and points[-1][2] < least_weight:
        last = points.pop()
        points.append(_joined(points.pop(), last))
    return ReuseCurve([(_age(point), _share(point)) for point in points])


_APART = 1.0001
"""Points of one age are one point."""


def _age(point: tuple[float, float, float]) -> float:
    return math.exp(point[0] / point[2])


def _share(point: tuple[float, float, float]) -> float:
    return point[1] / point[2]


def _joined(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
