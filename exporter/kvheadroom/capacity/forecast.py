"""When the pool is full, and how likely a preemption is, from what one engine did in the last five minutes.

Two questions, one after the other; docs/forecast.md derives both and tells what else was tried:

1. Will there be room? `demand.py` has `p(t)`, the probability that at `t` fewer blocks are free than the usual request needs, so that
   the next one would not fit.
2. And then? While the next one does not fit, vLLM fills the pool to somewhere between 0 and `need` free blocks, each as likely,
   and answers grow into them by `growth` blocks a second. So the last block goes `growth / need` times a second (Rice's
   formula for how often a level is crossed: mean speed x density at the level).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise

from kvheadroom.capacity.binding_limit import Admission, BindingLimit, Limit, Need
from kvheadroom.capacity.demand import (
    AHEAD,
    USUAL_STAY_SECONDS,
    Load,
    chances_without_room,
    finished_requests,
    growth_tokens,
    tokens_per_block_of,
)
from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.prefix_cache import mean_tokens

HORIZONS: Mapping[str, float] = {"30s": 30.0, "2m": 120.0, "10m": 600.0}
"""By the value of the label `horizon`, in seconds."""

LEAST_WATCHED_SECONDS = 30.0
"""Of a load that has just begun no trend is known; a queue tells more, and does not wait for it."""
_LENGTHS = tuple(end - begin for begin, end in pairwise(AHEAD))
_EARLIEST, _MEDIAN, _LATEST = 0.1, 0.5, 0.9
_ALONE_SECONDS = 270.0
"""One that nothing has joined for so long is taken to stay alone; before, the next burst may be near."""


class NoForecast(StrEnum):
    """Why there is none. A closed list."""

    SLEEPING = "sleeping"
    NOT_TOLD = "not_told"
    WATCHED_TOO_SHORT = "watched_too_short"
    TOKENS_PER_BLOCK = "tokens_per_block_unknown"


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
    tokens_per_block = tokens_per_block_of(now)
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
    growth = growth_tokens(now)
    if growth is None:
        return Forecast(
            unavailable=NoForecast.WATCHED_TOO_SHORT,
            why_unavailable="how fast blocks are used up takes two scrapes of a run that tell the generated tokens",
        )
    need = now.need.prompt_blocks or (used / running if running else 1.0)
    load = Load(
        usable=usable,
        used=used,
        need=max(1.0, need),
        growth=growth / tokens_per_block,
        finished=finished_requests(now),
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
    chances = chances_without_room(now, load, for_blocks=for_blocks)
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
        finished = load.running / USUAL_STAY_SECONDS if load.finished is None else load.finished
        begins = min(seconds, 1.0 / finished if finished else USUAL_STAY_SECONDS)
        if load.free / load.growth < seconds:
            first = math.exp(-finished * load.free / load.growth)
    expected = load.growth / load.need * (_area(areas, seconds) - _area(areas, begins))
    return 1.0 - (1.0 - first) / (1.0 + expected)


def _areas(chances: Sequence[float]) -> list[float]:
    """Seconds without room to be expected from now to each of AHEAD: the area under p(t)."""
    steps = [
        length * (one + other) / 2.0
        for length, one, other in zip(_LENGTHS, chances, chances[1:], strict=False)
    ]
    return list(accumulate(steps, initial=0.0))


def _area(areas: Sequence[float], until: float) -> float:
    """The same to any instant."""
    place = bisect_left(AHEAD, until)
    if AHEAD[place] == until:
        return areas[place]
    share = (until - AHEAD[place - 1]) / _LENGTHS[place - 1]
    return areas[place - 1] + share * (areas[place] - areas[place - 1])


def _reached(chances: Sequence[float], ratio: float) -> float | None:
    """Seconds until p(t) is so much; None where it does not come to it."""
    place = next((place for place, chance in enumerate(chances) if chance >= ratio), None)
    if not place:
        return None if place is None else 0.0
    one, other = chances[place - 1], chances[place]
    return AHEAD[place - 1] + _LENGTHS[place - 1] * (ratio - one) / (other - one)


def _peak_blocks(load: Load, lengths_of: Growth, need: Need, tokens_per_block: float) -> float | None:
    """Half of the usual answer is still to come of what runs, on average; of what waits for blocks, its prompt and all of it."""
    answer = mean_tokens(lengths_of, "finished_generation_tokens_total")
    if answer is None:
        return None
    prompt = load.need
    tokens = mean_tokens(lengths_of, "finished_prompt_tokens_total")
    if need.prompt_blocks is not None and tokens is not None:
        # All of it, of whatever release: what does not have to fit at once is computed after that.
        prompt = tokens / tokens_per_block
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
