"""When the pool is full, and how likely a preemption is, from what one engine did in the last five minutes.

Two questions, one after the other; docs/forecast.md derives both and tells what else was tried:

1. Will there be room? Demand, the blocks in use and those of the next waiting request, is taken as a value that goes on from
   where it is, returns to its trend within the time that a request stays, and scatters as it did. `p(t)` is the probability that at
   `t` fewer blocks are free than the usual request needs, so that the next one would not fit.
2. And then? While the next one does not fit, vLLM fills the pool to somewhere between 0 and `need` free blocks, each as likely,
   and answers grow into them by `growth` blocks a second. So the last block goes `growth / need` times a second (Rice's
   formula for how often a level is crossed: mean speed x density at the level).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise, repeat
from operator import mul, sub

from kvheadroom.capacity.binding_limit import Admission, BindingLimit, Limit, Need, queue_at
from kvheadroom.capacity.history import Growth, PastFigures
from kvheadroom.capacity.prefix_cache import mean_tokens

HORIZONS: Mapping[str, float] = {"30s": 30.0, "2m": 120.0, "10m": 600.0}
"""By the value of the label `horizon`, in seconds."""

LEAST_WATCHED_SECONDS = 30.0
"""Of a load that has just begun no trend is known; a queue tells more, and does not wait for it."""
_AHEAD = (0, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600)
"""Seconds ahead at which p(t) is computed; straight lines between."""
_LENGTHS = tuple(end - begin for begin, end in pairwise(_AHEAD))
_TREND_SHARE = 0.5
"""A trend that explains all of what demand did goes on for about so much of the time that it was seen for; else for less."""
_LEAST_SCATTER = 0.03
"""Of the pool: what has stood still for five minutes can move all the same."""
_SHORTEST_STAY, _USUAL_STAY, _LONGEST_STAY = 2.0, 15.0, 60.0
"""Seconds in which demand returns to its trend; the usual one where nothing has finished yet."""
_LEAST_TREND_SECONDS = 10.0
_NONE_FINISHED_SECONDS = 90.0
"""A server is asked once a minute how many requests have finished: that none has is only known when this is over."""
_EARLIEST, _MEDIAN, _LATEST = 0.1, 0.5, 0.9
_MOST_POINTS = 60
"""Of five minutes: more scrapes tell hardly more, and cost CPU at every tick."""
_ALONE_SECONDS = 270.0
"""One that nothing has joined for so long is taken to stay alone; before, the next burst may be near."""
_ENOUGH_TO_SEE_TAILS = 20
"""Scrapes: of so many normally distributed values the highest is expected 1.9 standard deviations above the mean."""
_AT_ONCE = 1e-3
"""Of the pool: what demand is now is known to so much."""
_SQRT_2 = math.sqrt(2.0)


class NoForecast(StrEnum):
    """Why there is none. A closed list."""

    SLEEPING = "sleeping"
    NOT_TOLD = "not_told"
    WATCHED_TOO_SHORT = "watched_too_short"
    TOKENS_PER_BLOCK = "tokens_per_block_unknown"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is to be expected of one engine.

    Attributes:
        probabilities: of a preemption within each of HORIZONS, 0-1; empty where there is no forecast.
        exhaustion_seconds: until the next request would not fit, with a probability of a half; 0: now; None: not within 10
            minutes, or no forecast.
        earliest_seconds, latest_seconds: the same with a probability of 10% and of 90%.
        peak_blocks: what runs and waits would hold if all of it went on to its usual end at once; None where the usual lengths
            are not known.
        prefill_backlog_tokens: prompt tokens of the queue that are not in the prefix cache, whatever it waits for; None where not
            known.
        load: what it goes by; None where there is no forecast.
        unavailable: why there is none, None with a forecast.
        why_unavailable: the same in one sentence.
    """

    probabilities: Mapping[str, float] = field(default_factory=dict)
    exhaustion_seconds: float | None = None
    earliest_seconds: float | None = None
    latest_seconds: float | None = None
    peak_blocks: float | None = None
    prefill_backlog_tokens: float | None = None
    load: Load | None = None
    unavailable: NoForecast | None = None
    why_unavailable: str = ""

    @property
    def why(self) -> str:
        """The numbers it goes by, or why there is none; one sentence."""
        if self.load is None:
            return self.why_unavailable
        load = self.load
        room = f"{load.free:,} of {load.usable:,} blocks are free"
        if load.is_idle and load.free >= load.need:
            return f"nothing runs, and {room}"
        parts = [_running(load)]
        if load.queue:
            parts.append(f"{load.queue:,.0f} {'waits' if load.queue == 1 else 'wait'} for room")
        parts += [f"{room}, the next request needs about {load.need:,.0f}", self._when()]
        if load.is_alone and load.running:
            parts.append("a request that is alone is not preempted")
        return "; ".join(parts)

    def _when(self) -> str:
        if self.earliest_seconds is None:
            return "that it finds no room within 10 minutes is unlikely"
        if self.latest_seconds == 0:
            return "it has no room now"
        marks = (
            ("10%", self.earliest_seconds),
            ("50%", self.exhaustion_seconds),
            ("90%", self.latest_seconds),
        )
        told = (
            f"{ratio} not within 10 min" if seconds is None else f"{ratio} by {_after(seconds)}"
            for ratio, seconds in marks
        )
        return f"the chance that it has no room: {', '.join(told)}"


def forecast(now: Admission, binding: BindingLimit, lengths_of: Growth) -> Forecast:
    """The forecast of one engine at one instant.

    Args:
        binding: what keeps requests waiting; those that wait for a place or a grammar are no demand for blocks.
        lengths_of: tells the lengths of requests that finished.
    """
    snapshot, observation = now.snapshot, now.observation
    if snapshot.sleeping:
        return Forecast(unavailable=NoForecast.SLEEPING, why_unavailable="the engine sleeps")
    usable, used, running = observation.usable_blocks, observation.used_blocks, snapshot.requests_running
    generated = snapshot.generation_tokens_total
    if usable is None or used is None or running is None or now.queue is None or generated is None:
        return Forecast(
            unavailable=NoForecast.NOT_TOLD,
            why_unavailable="the page does not tell its blocks, its usage, its requests or its generated tokens",
        )
    tokens_per_block = _tokens_per_block(now)
    if tokens_per_block is None:
        return Forecast(
            unavailable=NoForecast.TOKENS_PER_BLOCK,
            why_unavailable="how many tokens a block holds is not known: the page does not tell the pool's tokens, and the model's folder is "
            "not known or has several kinds of layers",
        )
    for_blocks = binding.limit not in (Limit.MAX_NUM_SEQS, Limit.DEFERRED)
    queue = now.queue if for_blocks else 0.0
    oldest = now.recent.oldest
    watched = 0.0 if oldest is None else now.now.taken_at - oldest.taken_at
    if watched < LEAST_WATCHED_SECONDS and not queue:
        return Forecast(
            unavailable=NoForecast.WATCHED_TOO_SHORT,
            why_unavailable=f"watched without a gap for {watched:.0f} s; it takes {LEAST_WATCHED_SECONDS:.0f} s, or a queue",
        )
    growth = _growth(now)
    if growth is None:
        return Forecast(
            unavailable=NoForecast.WATCHED_TOO_SHORT,
            why_unavailable="how fast blocks are used up takes two scrapes of a run that tell the generated tokens",
        )
    need = now.need.usual_blocks or (used / running if running else 1.0)
    load = Load(
        usable=usable,
        used=used,
        need=max(1.0, need),
        growth=growth / tokens_per_block,
        finished=_finished(now),
        queue=queue,
        running=running,
        most_running=max(now.course.of("requests_running"), default=None)
        if watched >= _ALONE_SECONDS
        else None,
    )
    peak_blocks = _peak_blocks(load, lengths_of, now.need, tokens_per_block)
    backlog_tokens = _backlog_tokens(now.queue, now.need.usual_tokens)
    if load.is_idle and load.free >= load.need:
        # Most engines of a fleet at most times.
        return Forecast(
            probabilities=dict.fromkeys(HORIZONS, 0.0),
            peak_blocks=peak_blocks,
            prefill_backlog_tokens=backlog_tokens,
            load=load,
        )
    chances = _without_room(now, load, for_blocks=for_blocks)
    areas = _areas(chances)
    median, earliest, latest = (_reached(chances, ratio) for ratio in (_MEDIAN, _EARLIEST, _LATEST))
    return Forecast(
        probabilities={name: _probability(load, areas, seconds) for name, seconds in HORIZONS.items()},
        exhaustion_seconds=median,
        earliest_seconds=earliest,
        latest_seconds=latest,
        peak_blocks=peak_blocks,
        prefill_backlog_tokens=backlog_tokens,
        load=load,
    )


def _tokens_per_block(now: Admission) -> float | None:
    """As vLLM itself counts the pool: with several KV groups that of a request of max_model_len, on average."""
    tokens, blocks = now.observation.pool_tokens, now.observation.num_blocks
    return tokens / blocks if tokens and blocks else None


def _growth(now: Admission) -> float | None:
    """Tokens generated a second: those of the last 10 s or of the last minute, whichever is more; None at a first scrape."""
    rates = []
    for since in (now.recent.seconds_10 or now.recent.previous, now.recent.seconds_60 or now.recent.oldest):
        grown = now.since(since)
        tokens = None if grown is None else grown.of("generation_tokens_total")
        if grown is not None and grown.seconds and tokens is not None:
            rates.append(tokens / grown.seconds)
    return max(rates, default=None)


def _finished(now: Admission) -> float | None:
    """Requests that finished a second, in the last five minutes."""
    grown = now.since(now.recent.oldest)
    requests = None if grown is None else grown.of("finished_requests_total")
    if grown is None or not grown.seconds or requests is None:
        return None
    return requests / grown.seconds if requests or grown.seconds >= _NONE_FINISHED_SECONDS else None


def _without_room(now: Admission, load: Load, *, for_blocks: bool) -> list[float]:
    """p(t) at each of _AHEAD: the probability that the usual request would not fit then.

    Args:
        for_blocks: whether what waits, waits for blocks.
    """
    need, at = load.need / load.usable, now.now.taken_at
    seen_before = _course(now.course)
    before = None if now.recent.previous is None else queue_at(now.recent.previous)
    # What is not known to have just come, asks one by one.
    came = 0.0 if before is None else load.queue - before
    demand = _demand(load.used / load.usable, load.queue, came, need)
    level, trend, scatter, stay, goes_on = demand, 0.0, 0.0, _USUAL_STAY, 1.0
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
    for ahead in _AHEAD:
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


def _probability(load: Load, areas: Sequence[float], seconds: float) -> float:
    """Of a preemption within so many seconds.

    Where the next one does not fit already, the free blocks are known: they are eaten up before anything finishes with a
    probability of exp(-finished x free / growth). What comes after the first end is as at any other time.

    Preemptions come in clusters, so a rate that is known badly is taken as exponentially distributed around what was worked out:
    1 - 1 / (1 + expected) in place of 1 - exp(-expected).
    """
    if load.is_alone:
        return 0.0
    first, begins = 0.0, 0.0
    if load.queue and load.free < load.need and load.growth > 0:
        # Where it is not known, each that runs stays as long as usual.
        finished = load.running / _USUAL_STAY if load.finished is None else load.finished
        begins = min(seconds, 1.0 / finished if finished else _USUAL_STAY)
        if load.free / load.growth < seconds:
            first = math.exp(-finished * load.free / load.growth)
    expected = load.growth / load.need * (_area(areas, seconds) - _area(areas, begins))
    return 1.0 - (1.0 - first) / (1.0 + expected)


def _areas(chances: Sequence[float]) -> list[float]:
    """Seconds without room to be expected from now to each of _AHEAD: the area under p(t)."""
    steps = [
        length * (one + other) / 2.0
        for length, one, other in zip(_LENGTHS, chances, chances[1:], strict=False)
    ]
    return list(accumulate(steps, initial=0.0))


def _area(areas: Sequence[float], until: float) -> float:
    """The same to any instant."""
    place = bisect_left(_AHEAD, until)
    if _AHEAD[place] == until:
        return areas[place]
    share = (until - _AHEAD[place - 1]) / _LENGTHS[place - 1]
    return areas[place - 1] + share * (areas[place] - areas[place - 1])


def _reached(chances: Sequence[float], ratio: float) -> float | None:
    """Seconds until p(t) is so much; None where it does not come to it."""
    place = next((place for place, chance in enumerate(chances) if chance >= ratio), None)
    if not place:
        return None if place is None else 0.0
    one, other = chances[place - 1], chances[place]
    return _AHEAD[place - 1] + _LENGTHS[place - 1] * (ratio - one) / (other - one)


def _peak_blocks(load: Load, lengths_of: Growth, need: Need, tokens_per_block: float) -> float | None:
    """Half of the usual answer is still to come of what runs, on average; of what waits for blocks, its prompt and all of it."""
    answer = mean_tokens(lengths_of, "finished_generation_tokens_total")
    if answer is None:
        return None
    prompt = load.need
    if need.usual_blocks is not None and need.usual_tokens is not None:
        # All of it, of whatever release: what does not have to fit at once is computed after that.
        prompt = need.usual_tokens / tokens_per_block
    return load.used + load.queue * prompt + (load.running / 2.0 + load.queue) * answer / tokens_per_block


def _backlog_tokens(queue: float, usual_tokens: float | None) -> float | None:
    if not queue:
        return 0.0
    return None if usual_tokens is None else queue * usual_tokens


def _running(load: Load) -> str:
    if not load.running:
        return (
            f"nothing runs now, and blocks were used up at {load.growth:,.1f} a second"
            if load.growth
            else "nothing runs"
        )
    run = "1 runs and grows" if load.running == 1 else f"{load.running:,.0f} run and grow"
    return f"{run} by {load.growth:,.1f} blocks a second"


def _after(seconds: float) -> str:
    return "now" if seconds < 0.5 else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
