"""What an engine is asked for now, and whether there will be room for the next request.

Demand, the blocks in use and those of the next waiting request, is taken as a value that goes on from where it is, returns to its trend
within the time that a request stays, and scatters as it did in the last five minutes. docs/forecast.md derives it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import mul, sub

from kvheadroom.capacity.binding_limit import Admission, queue_at
from kvheadroom.capacity.history import PastFigures

AHEAD = (0, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600)
"""Seconds ahead at which p(t) is computed; straight lines between."""
_TREND_SHARE = 0.5
"""A trend that explains all of what demand did goes on for about so much of the time that it was seen for; else for less."""
_LEAST_SCATTER = 0.03
"""Of the pool: what has stood still for five minutes can move all the same."""
_SHORTEST_STAY, USUAL_STAY_SECONDS, _LONGEST_STAY = 2.0, 15.0, 60.0
"""Seconds in which demand returns to its trend; the usual one where nothing has finished yet."""
_LEAST_TREND_SECONDS = 10.0
_NONE_FINISHED_SECONDS = 90.0
"""A server is asked once a minute how many requests have finished: that none has is only known when this is over."""
_MOST_POINTS = 60
"""Of five minutes: more scrapes tell hardly more, and cost CPU at every tick."""
_ENOUGH_TO_SEE_TAILS = 20
"""Scrapes: of so many normally distributed values the highest is expected 1.9 standard deviations above the mean."""
_AT_ONCE = 1e-3
"""Of the pool: what demand is now is known to so much."""
_SQRT_2 = math.sqrt(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine does now; blocks, and seconds.

    Attributes:
        need: of the usual request that waits.
        growth: a second, of the answers of all that run.
        finished: requests a second; 0 where none has for long, None where it is not known.
        queue: requests that wait for room.
        most_running: at once, in the last five minutes; None where these were not watched.
    """

    usable: int
    used: int
    need: float
    growth: float
    finished: float | None
    queue: float
    running: float
    most_running: float | None

    @property
    def free(self) -> int:
        """Blocks."""
        return self.usable - self.used

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or was generated of late."""
        return not (self.running or self.queue or self.growth)

    @property
    def is_alone(self) -> bool:
        """Whether nobody can be preempted: vLLM starts only where the longest request fits, and what waits does not fit beside it."""
        most = self.most_running
        return (
            most is not None and most <= 1 and self.running <= 1 and (not self.queue or self.free < self.need)
        )


def tokens_per_block_of(now: Admission) -> float | None:
    """As vLLM itself counts the pool: with several KV groups that of a request of max_model_len, on average."""
    tokens, blocks = now.observation.pool_tokens, now.observation.num_blocks
    return tokens / blocks if tokens and blocks else None


def growth_tokens(now: Admission) -> float | None:
    """Tokens generated a second: those of the last 10 s or of the last minute, whichever is more; None at a first scrape."""
    rates = []
    for since in (now.recent.seconds_10 or now.recent.previous, now.recent.seconds_60 or now.recent.oldest):
        grown = now.since(since)
        tokens = None if grown is None else grown.of("generation_tokens_total")
        if grown is not None and grown.seconds and tokens is not None:
            rates.append(tokens / grown.seconds)
    return max(rates, default=None)


def finished_requests(now: Admission) -> float | None:
    """Requests that finished a second, in the last five minutes."""
    grown = now.since(now.recent.oldest)
    requests = None if grown is None else grown.of("finished_requests_total")
    if grown is None or not grown.seconds or requests is None:
        return None
    return requests / grown.seconds if requests or grown.seconds >= _NONE_FINISHED_SECONDS else None


def chances_without_room(now: Admission, load: Load, *, for_blocks: bool) -> list[float]:
    """p(t) at each of AHEAD: the probability that the usual request would not fit then.

    Args:
        for_blocks: whether what waits, waits for blocks.
    """
    need, at = load.need / load.usable, now.now.taken_at
    seen_before = _course(now.course)
    before = None if now.recent.previous is None else queue_at(now.recent.previous)
    # What is not known to have just come, asks one by one.
    came = 0.0 if before is None else load.queue - before
    demand = _demand(load.used / load.usable, load.queue, came, need)
    level, trend, scatter, stay, goes_on = demand, 0.0, 0.0, USUAL_STAY_SECONDS, 1.0
    if seen_before is not None:
        times, usages, queues, new, runnings = seen_before
        seen = at - times[0]
        if load.finished:
            # Little's law: so many run, and so many end a second.
            stay = min(max(sum(runnings) / len(runnings) / load.finished, _SHORTEST_STAY), _LONGEST_STAY)
        if seen >= _LEAST_TREND_SECONDS:
            if for_blocks and any(queues):
                usages = [_demand(*told, need) for told in zip(usages, queues, new, strict=True)]
            level, trend, scatter, explained = _line(times, usages, at)
            goes_on = max(_TREND_SHARE * explained * seen, goes_on)
    scatter = math.hypot(scatter, _LEAST_SCATTER)
    limit = 1.0 - need
    chances = []
    for ahead in AHEAD:
        kept = math.exp(-ahead / stay)
        mean = level + (demand - level) * kept + trend * goes_on * (1.0 - math.exp(-ahead / goes_on))
        deviation = scatter * math.sqrt(1.0 - kept * kept) + _AT_ONCE
        chances.append(0.5 * math.erfc((limit - mean) / deviation / _SQRT_2))
    return chances


def _course(course: PastFigures) -> "tuple[Sequence[float], ...] | None":
    """(unix seconds, usage, queue, what the queue grew by since the scrape before, running) of up to _MOST_POINTS scrapes.

    Evenly spaced, up to the newest; None where none tells all of it.
    """
    number = len(course.times)
    step = max(1, -(-number // _MOST_POINTS))
    first = (number - 1) % step if number else 0
    waiting = course.of("requests_waiting_capacity")
    if number and math.isnan(waiting[-1]):
        waiting = course.of("requests_waiting")
    queues = waiting[first::step]
    # The very first scrape has none before it.
    earlier = waiting[first - 1 : -1 : step] if first else [*waiting[:1], *waiting[step - 1 : -1 : step]]
    columns = (
        course.times[first::step],
        course.of("kv_usage_ratio")[first::step],
        queues,
        list(map(sub, queues, earlier)),
        course.of("requests_running")[first::step],
    )
    if math.isnan(sum(map(sum, columns))):
        # The sum is not a number where one of them is none.
        rows = [row for row in zip(*columns, strict=True) if not math.isnan(sum(row))]
        columns = tuple(zip(*rows, strict=True))  # type: ignore[assignment]
    return columns if columns and columns[0] else None


def _demand(usage: float, queue: float, new: float, need: float) -> float:
    """Blocks in use and those that are asked for next, as a share of the pool; at most full, and one that does not fit.

    Of those that wait, all that came since the scrape before ask next. Those that waited then as well do not fit, or wait for
    others to be computed, and go on one by one.

    Args:
        new: what the queue has grown by.
        need: of one request, as a share of the pool.
    """
    return min(usage + need * max(min(queue, 1.0), new), 1.0 + need)


def _line(times: Sequence[float], values: Sequence[float], at: float) -> tuple[float, float, float, float]:
    """The least-squares line: (value at an instant, slope a second, scatter around it, share explained by it, 0-1).

    The scatter is the standard deviation, and at most half of how far the values ever rose above the line: a load that comes and goes
    strays far from its mean and no further than it goes, and a normal distribution would have tails beyond.
    """
    number = len(times)
    ages = [time - at for time in times]
    mean_age, mean = sum(ages) / number, sum(values) / number
    from_mean = [age - mean_age for age in ages]
    squares = sum(map(mul, from_mean, from_mean))
    slope = sum(map(mul, from_mean, values)) / squares if squares else 0.0
    variance, explained = (
        sum(map(mul, values, values)) / number - mean * mean,
        slope * slope * squares / number,
    )
    share = min(explained / variance, 1.0) if variance > 0 else 0.0
    level, scatter = mean - slope * mean_age, math.sqrt(max(0.0, variance - explained))
    if number >= _ENOUGH_TO_SEE_TAILS:
        scatter = min(scatter, (max(map(sub, values, map(mul, repeat(slope), ages))) - level) / 2.0)
    return level, slope, scatter, share
