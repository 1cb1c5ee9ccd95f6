"""States of an engine that have a name, each by an exact definition: docs/forecast.md has them in words, with why.

All but the last go by earlier scrapes of the same run: after a restart or a gap they are silent until their time is over again.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.binding_limit import Admission, queue_at
from kvheadroom.capacity.history import Growth, Moment, between
from kvheadroom.capacity.prefix_cache import local_hits
from kvheadroom.capacity.sessions import SessionCapacity

JUST_NOW_SECONDS, JUST_NOW_SCRAPES = 15.0, 3
"""Preemptions counted within the longer of the two are going on."""
LEAST_PREEMPTIONS = 10
"""A minute: fewer are a busy moment, however few requests there are."""
RISING_FACTOR = 1.1
"""Generated tokens of a half minute differ by so much by themselves."""
FALL_RATIO = 0.2
"""A hit rate that falls by so much, of all prompt tokens: a fifth more of the prompts is computed."""
HIGH_USAGE_RATIO = 0.6
"""Mean usage from which running requests leave idle prefixes the smaller part of the pool; one scrape swings too much."""
LEAST_BEFORE_SECONDS = 60.0
"""How long a hit rate before the fall is made of, at least."""
LEAST_LOOKUPS_FACTOR = 0.5
"""A hit rate of fewer look-ups a second than so much of those before tells of single requests."""


class EngineState(StrEnum):
    """A closed list."""

    PREEMPTING = "preempting"
    SCHEDULER_STALLED = "scheduler_stalled"
    REPREFILL_LOOP = "reprefill_loop"
    THRASH = "thrash"
    WORKING_SET_EXCEEDS_POOL = "working_set_exceeds_pool"
    POOL_BELOW_ONE_SESSION = "pool_below_one_session"


@dataclass(frozen=True, slots=True)
class StateFound:
    """A state that an engine is in.

    Attributes:
        why: the numbers, one sentence.
    """

    state: EngineState
    why: str


def find_states(
    now: Admission,
    past: Mapping[str, Moment],
    growths: Mapping[str, Growth],
    sessions: tuple[SessionCapacity, ...],
) -> tuple[StateFound, ...]:
    """The states that the engine is in.

    Args:
        past: where each window begins, by its name in WINDOWS.
        growths: over the same windows.
    """
    if now.snapshot.sleeping:
        return ()
    found = (
        (EngineState.PREEMPTING, _preempts(now)),
        (EngineState.SCHEDULER_STALLED, _stalled(now, past, growths)),
        (EngineState.REPREFILL_LOOP, _prefills_again(now, past, growths)),
        (EngineState.THRASH, _thrashes(now, past, growths)),
        (EngineState.WORKING_SET_EXCEEDS_POOL, _exceeds(now, growths)),
        (EngineState.POOL_BELOW_ONE_SESSION, _below_one(now, sessions)),
    )
    return tuple([StateFound(state, why) for state, why in found if why is not None])


def _preempts(now: Admission) -> str | None:
    """Preemptions were counted just now."""
    course, previous, at = now.course, now.recent.previous, now.now.taken_at
    if previous is None or not course.times:
        return None
    since = at - max(JUST_NOW_SECONDS, JUST_NOW_SCRAPES * (at - previous.taken_at))
    # The last scrape before that time: what it had counted already is not new.
    place = max(0, bisect_left(course.times, since) - 1)
    counted, earlier = now.snapshot.preemptions_total, course.of("preemptions_total")[place]
    if counted is None or not counted > earlier:
        return None
    return f"{counted - earlier:,.0f} preempted in the last {at - course.times[place]:.0f} s"


def _stalled(now: Admission, past: Mapping[str, Moment], growths: Mapping[str, Growth]) -> str | None:
    """Requests wait for room, there is room, and nothing is computed: for a minute, or for five while some run."""
    snapshot, half_minute, minute = now.snapshot, now.recent.seconds_30, past.get("1m")
    if half_minute is None or minute is None or not _nothing_computed(growths["1m"]):
        return None
    if snapshot.requests_waiting_capacity is None and snapshot.external_prefix_cache_queries_total:
        # What a connector still loads may be all that waits; releases before 0.20 do not tell.
        return None
    if not now.queue or not (queue_at(half_minute) and queue_at(minute)):
        return None
    room = _room(now, minute)
    if room is None:
        return None
    ran = (
        snapshot.requests_running,
        half_minute.of("requests_running"),
        minute.of("requests_running"),
    )
    waits = f"{now.queue:,.0f} wait although {room}"
    if ran == (0, 0, 0):
        return f"{waits}, none runs, and nothing was computed for a minute"
    five = past.get("5m")
    usages = {snapshot.kv_usage_ratio} | {
        moment.of("kv_usage_ratio") for moment in (half_minute, minute, five) if moment is not None
    }
    # A long prompt under way takes blocks; where their number stands still, it is not.
    if (
        five is None
        or None in ran
        or len(usages) > 1
        or not queue_at(five)
        or not _nothing_computed(growths["5m"])
    ):
        return None
    return f"{waits}, {ran[0]:,.0f} run, and neither a token nor a block was added for five minutes"


def _nothing_computed(grown: Growth) -> bool:
    """Whether both counters of tokens are told and stood still."""
    return grown.of("prompt_tokens_total") == 0 == grown.of("generation_tokens_total")


def _room(now: Admission, before: Moment) -> str | None:
    """That any request would fit, now and then; None where it is not so, or not known."""
    free, usable = now.observation.free_blocks, now.observation.usable_blocks
    usage, longest = before.of("kv_usage_ratio"), now.need.longest_blocks
    if free is None or usable is None or usage is None:
        return None
    if usage == 0 and free == usable:
        return f"all {free:,} blocks are free"
    if longest is None or min(free, usable * (1 - usage)) < longest:
        return None
    return f"{free:,} blocks are free and a request takes {longest:,} at most"


def _prefills_again(now: Admission, past: Mapping[str, Moment], growths: Mapping[str, Growth]) -> str | None:
    """Prompts are computed, again and again, and no token comes of it; nothing finishes, as it would where none is to come."""
    half_minute, minute, five = now.recent.seconds_30, past.get("1m"), growths.get("5m")
    if half_minute is None or minute is None or five is None or five.of("generation_tokens_total") != 0:
        return None
    since_half = now.since(half_minute)
    if since_half is None:
        return None
    grown = growths["1m"]
    ran = (now.snapshot.requests_running, *(at.of("requests_running") for at in (half_minute, minute)))
    prompts, earlier = grown.of("prompt_tokens_total"), between(grown, since_half).of("prompt_tokens_total")
    later = since_half.of("prompt_tokens_total")
    still = (
        five.of("finished_requests_total"),
        five.of("preemptions_total"),
    )
    if still != (0, 0) or not all(ran) or not earlier or not later:
        return None
    return (
        f"{ran[0]:,.0f} run and {prompts:,.0f} prompt tokens were computed in a minute, but in five minutes no token was "
        "generated and no request finished"
    )


def _thrashes(now: Admission, past: Mapping[str, Moment], growths: Mapping[str, Growth]) -> str | None:
    """More preemptions in a minute than requests are there, all the minute long, and no more tokens for it."""
    minute, half_minute, ten = past.get("1m"), now.recent.seconds_30, now.recent.seconds_10
    running, queue = now.snapshot.requests_running, now.queue
    if not queue or running is None or minute is None or half_minute is None or ten is None:
        return None
    grown = growths["1m"]
    preempted = grown.of("preemptions_total")
    if not preempted or not all(map(queue_at, (minute, half_minute, ten))):
        return None
    since_half, since_ten = now.since(half_minute), now.since(ten)
    if since_half is None or since_ten is None:
        return None
    first, middle = between(grown, since_half), between(since_half, since_ten)
    if preempted < LEAST_PREEMPTIONS or preempted <= running + queue:
        return None
    if not all(part.of("preemptions_total") for part in (first, middle, since_ten)):
        return None
    before, after = first.of("generation_tokens_total"), since_half.of("generation_tokens_total")
    if before is None or after is None or after > RISING_FACTOR * before:
        return None
    return (
        f"{preempted:,.0f} preemptions in a minute, and {running + queue:,.0f} requests are there; {after:,.0f} tokens were "
        f"generated in the last half minute, {before:,.0f} in the one before"
    )


def _exceeds(now: Admission, growths: Mapping[str, Growth]) -> str | None:
    """Fewer prompt tokens are found than before, while requests hold much of the pool and the rest was written over."""
    minute, usage = growths.get("1m"), now.recent.usage_of_30_seconds
    if minute is None or minute.of("preemptions_total") != 0 or usage is None or usage < HIGH_USAGE_RATIO:
        return None
    lately, whole = now.since(now.recent.seconds_30), now.since(now.recent.oldest)
    if lately is None or whole is None:
        return None
    earlier = between(whole, lately)
    seconds, seconds_before = lately.seconds or 0.0, earlier.seconds or 0.0
    if seconds_before < LEAST_BEFORE_SECONDS:
        return None
    rules = now.facts.rules
    found, found_before = (local_hits(now.snapshot, rules, grown) for grown in (lately, earlier))
    if found is None or found_before is None or found.doubt or found_before.doubt:
        return None
    if found.lookup_tokens / seconds < LEAST_LOOKUPS_FACTOR * found_before.lookup_tokens / seconds_before:
        return None
    if found_before.ratio - found.ratio < FALL_RATIO:
        return None
    written, room = _written(now, whole), now.observation.free_tokens
    if written is None or room is None or written < room:
        return None
    return (
        f"{found.ratio:.0%} of prompt tokens were found in the prefix cache in the last 30 s, {found_before.ratio:.0%} before; the "
        f"pool is {usage:.0%} in use on average, and {written:,.0f} tokens were written where {room:,} are free"
    )


def _written(now: Admission, grown: Growth) -> float | None:
    """Tokens that were computed and stored: prompts that were not found, and answers."""
    hits, generated = local_hits(now.snapshot, now.facts.rules, grown), grown.of("generation_tokens_total")
    return None if hits is None or generated is None else hits.lookup_tokens - hits.hit_tokens + generated


def _below_one(now: Admission, sessions: tuple[SessionCapacity, ...]) -> str | None:
    """The shortest length that is served and that the pool cannot hold once."""
    usable = now.observation.usable_blocks
    for row in sessions:
        if row.whole_sessions == 0:
            return (
                f"one session of {row.session_tokens:,} tokens takes {row.blocks_per_session:,} blocks, and the pool has "
                f"{usable:,} to give"
            )
        if row.whole_sessions is None and row.observed is not None and row.observed < 1:
            return f"the pool holds {row.observed:.2f} sessions of {row.session_tokens:,} tokens"
    return None
