"""How old the oldest content is that a cache of some size holds, at each time, given how soon content is asked for again.

A cache that evicts what nobody asked for longest holds all that was asked for within an age T, and T is the age at which as much different
content was asked for as it has room for. Content that is asked for again is no more of it: `d content / dT = asked per second x (1 - F(T))`, where
F is the reuse curve (Denning, Schwartz, "Properties of the working-set model", 1972; for caches Che, Tung, Wang, 2002).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvheadroom.capacity.reuse import Stretch
from kvheadroom.capacity.reuse_curve import ReuseCurve


class Interval(NamedTuple):
    """A stretch of time in tokens: `held` by running requests, on average, and `free` beside them."""

    seconds: float
    prompts: float
    found_in_pool: float
    found_outside: float
    generated: float
    held: float
    free: float
    waiting: float
    follows: bool

    @property
    def computed(self) -> float:
        """Prompt tokens that were found nowhere."""
        return self.prompts - self.found_in_pool - self.found_outside

    @property
    def pool_share(self) -> float:
        """Of its prompt tokens, those that were found in the pool; 0 without any."""
        return self.found_in_pool / self.prompts if self.prompts > 0 else 0.0


def interval_of(one: Stretch, pool_tokens: float) -> Interval:
    """A stretch of an engine with such a pool."""
    held = one.usage * pool_tokens
    return Interval(
        one.seconds,
        one.prompts,
        one.found_in_pool,
        one.found_outside,
        one.generated,
        held,
        pool_tokens - held,
        one.waiting,
        one.follows,
    )


def survivors(one: Interval, age: float) -> float:
    """Share of requests that end before a tier has evicted what it stored of them as they began.

    How long they run on average follows from what they hold (Little's law); times are taken as exponential.
    """
    if one.held <= 0 or one.prompts <= 0:
        return 1.0
    return -math.expm1(-age * one.prompts / one.seconds / one.held)


def old_share(one: Interval, *, stores_answers: bool) -> float:
    """Of prompt tokens that are asked for again, those that are in a tier; an answer is not, until it was part of a prompt."""
    if stores_answers or one.prompts <= 0:
        return 1.0
    return max(_LEAST_OLD, 1.0 - one.generated / one.prompts)


_LEAST_OLD = 0.1
_OLDEST = 30 * 86_400.0
_HALVINGS = 24


class _Flow(NamedTuple):
    """Tokens per second: what comes in, and what of it would be asked for again, came all of it back."""

    new: float
    again: float


class Ages:
    """Of one cache, by the interval at whose end it is asked for.

    Content of a request in the pool is free once it has ended, and ages from then on. In a tier it ages from when it was stored, and anew from
    the request's end if it is still there. So a tier holds S x (what is held by requests + what was asked for since), where S are the survivors.
    """

    def __init__(
        self, intervals: Sequence[Interval], curve: ReuseCurve, *, is_tier: bool, stores_answers: bool
    ) -> None:
        self._intervals = intervals
        self._curve = curve
        self._is_tier = is_tier
        self._flows = [
            _Flow(
                (one.prompts + (one.generated if stores_answers else 0.0)) / one.seconds,
                (one.prompts - (0.0 if stores_answers else min(one.generated, one.prompts))) / one.seconds,
            )
            for one in intervals
        ]
        seconds = math.fsum(one.seconds for one in intervals)
        parts = list(zip(self._flows, intervals, strict=True))
        self._mean = _Flow(
            math.fsum(flow.new * one.seconds for flow, one in parts) / seconds,
            math.fsum(flow.again * one.seconds for flow, one in parts) / seconds,
        )

    def of(self, at: int, capacity: float, *, goes_on: bool = False) -> float | None:
        """Seconds at the end of an interval; None where the cache was not full since that run of the server began.

        Args:
            capacity: tokens.
            goes_on: before the first interval the load was what it is on average.
        """
        now, curve = self._intervals[at], self._curve
        content, age, integral = now.held if self._is_tier else 0.0, 0.0, 0.0
        for place in range(at, -1, -1):
            one, flow = self._intervals[place], self._flows[place]
            end = age + one.seconds
            integral_then = curve.integral(end)
            grown = content + flow.new * one.seconds - flow.again * (integral_then - integral)
            if self._share(now, end) * grown >= capacity:
                return self._within(now, content, flow, (age, end), capacity)
            content, age, integral = grown, end, integral_then
            if not one.follows and not goes_on:
                return None
        return self._within(now, content, self._mean, (age, _OLDEST), capacity) if goes_on else None

    def _share(self, now: Interval, age: float) -> float:
        return survivors(now, age) if self._is_tier else 1.0

    def _within(
        self, now: Interval, content: float, flow: _Flow, ages: tuple[float, float], capacity: float
    ) -> float:
        """By bisection, for what is held rises with age; the later of the two where it never is enough."""
        begin, integral = ages[0], self._curve.integral(ages[0])
        low, high = ages
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            grown = content + flow.new * (middle - begin)
            grown -= flow.again * (self._curve.integral(middle) - integral)
            if self._share(now, middle) * grown >= capacity:
                high = middle
            else:
                low = middle
        return high
