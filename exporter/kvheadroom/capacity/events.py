"""What happened to a server between two good scrapes: restarts and changes of what it serves."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, lt

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.facts import Origin
from kvheadroom.capacity.fleet import Event, EventKind
from kvheadroom.capacity.readings import EngineSnapshot

COUNTERS = (
    "preemptions_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
_counters_of = attrgetter(*COUNTERS)

MAX_SERVERS = 16
"""That are remembered of one address."""

SEVERAL_SECONDS = 300.0
"""For so long it is told that several servers answered in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The last that was known of one engine; what a page leaves out stays as it was.

    Attributes:
        counters: in the order of COUNTERS; NaN where no page told one.
    """

    counters: Sequence[float] = (math.nan,) * len(COUNTERS)
    model_name: str | None = None
    pool: str | None = None
    max_model_len: str | None = None
    release: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """The last that was known of one server.

    Attributes:
        started_at: start time of its process, None where no page has told it.
        earlier: what stood there before, by its start time.
        came_back_at: unix seconds when one of those last stood there again.
    """

    started_at: float | None = None
    earlier: Mapping[float, Mapping[str, EngineMemory]] = field(default_factory=dict)
    engines: Mapping[str, EngineMemory] = field(default_factory=dict)
    came_back_at: float | None = None


def remember(
    before: ServerMemory, started_at: float | None, engines: tuple[Assessment, ...], at: float
) -> tuple[ServerMemory, tuple[Event, ...]]:
    """The memory after one more page, and the events that the page shows.

    A restart is known by the process's start time, or, where a multi-process server does not tell it, by a
    counter that fell. A start time that stood there before is another server behind the same address, and no restart.
    A page without engines changes nothing: the server is starting.
    """
    if not engines:
        return before, ()
    earlier, known = before.earlier, None
    moved = started_at is not None and before.started_at is not None and started_at != before.started_at
    if moved and started_at is not None and before.started_at is not None:
        others = {**earlier, before.started_at: before.engines}
        # A server that is there again is compared with what it was itself.
        known = others.pop(started_at, None)
        earlier = dict(list(others.items())[-MAX_SERVERS:])
    last = before.engines if known is None else known
    now = {a.snapshot.engine: _remembered(last.get(a.snapshot.engine), a) for a in engines}
    after = ServerMemory(
        started_at=before.started_at if started_at is None else started_at,
        earlier=earlier,
        engines=now,
        came_back_at=before.came_back_at if known is None else at,
    )
    if not last:
        return after, ()
    restarted = "its process started anew" if moved and known is None else None
    told_no_start = started_at is None or before.started_at is None
    if restarted is None and told_no_start and _any_fell(last, tuple(a.snapshot for a in engines)):
        restarted = "its counters began anew"
    changes = list(_changes(last, now))
    if restarted:
        changes.insert(0, (EventKind.RESTARTED, restarted))
    return after, tuple(Event(at=at, kind=kind, detail=detail) for kind, detail in changes)


def is_one_of_several(memory: ServerMemory, now: float) -> bool:
    """Whether, of late, a server stood there again after another one: several answer at one address."""
    return memory.came_back_at is not None and 0 <= now - memory.came_back_at < SEVERAL_SECONDS


def counters_fell(
    before: ServerMemory, started_at: float | None, engines: tuple[EngineSnapshot, ...]
) -> bool:
    """Whether a counter of any engine is smaller than it was, and no start time tells the processes apart."""
    if started_at is not None and started_at != before.started_at:
        return False
    return _any_fell(before.engines, engines)


def progress(engines: tuple[EngineSnapshot, ...]) -> tuple[tuple[float | None, ...], ...]:
    """The counters that move while an engine works; two equal ones mean that it stood still."""
    return tuple(map(_counters_of, engines))


def _remembered(before: EngineMemory | None, engine: Assessment) -> EngineMemory:
    before = before or EngineMemory()
    seen, facts = engine.snapshot, engine.facts
    # As the page says it: what is made of it changes with what else is known.
    block_size = seen.attention_block_size or seen.block_size
    pool = None if seen.num_blocks is None else f"{seen.num_blocks:,} blocks of {block_size}"
    # Only what the server says itself: a guess that gives way to knowledge is no change of the server.
    told = facts.max_model_len is not None and facts.max_model_len.origin is Origin.SERVER
    length = f"{facts.max_model_len.value:,}" if told and facts.max_model_len is not None else None
    return EngineMemory(
        counters=[
            old if new is None else new for old, new in zip(before.counters, _counters_of(seen), strict=True)
        ],
        model_name=seen.model_name or before.model_name,
        pool=pool or before.pool,
        max_model_len=length or before.max_model_len,
        release=before.release if facts.version is None else facts.version.value,
    )


def _any_fell(before: Mapping[str, EngineMemory], engines: tuple[EngineSnapshot, ...]) -> bool:
    return any(_counter_fell(before.get(engine.engine), engine) for engine in engines)


def _counter_fell(before: EngineMemory | None, engine: EngineSnapshot) -> bool:
    if before is None:
        return False
    now = [math.nan if told is None else told for told in _counters_of(engine)]
    # What is not a number is less than none.
    return any(map(lt, now, before.counters))


def _changes(
    before: Mapping[str, EngineMemory], after: Mapping[str, EngineMemory]
) -> Iterator[tuple[EventKind, str]]:
    both = [(name, before[name], after[name]) for name in after if name in before]
    if both and (change := _change(both[0][1].release, both[0][2].release)):
        yield EventKind.RELEASE_CHANGED, f"vLLM {change}"
    for name, old, new in both:
        if change := _change(old.model_name, new.model_name):
            yield EventKind.MODEL_CHANGED, f"engine {name}: model {change}"
        pool = _change(old.pool, new.pool)
        length = _change(old.max_model_len, new.max_model_len)
        parts = [f"pool {pool}"] if pool else []
        parts += [f"max_model_len {length}"] if length else []
        if parts:
            yield EventKind.CAPACITY_CHANGED, f"engine {name}: {', '.join(parts)}"
    if before.keys() != after.keys():
        yield EventKind.ENGINES_CHANGED, f"engines {', '.join(before)} -> {', '.join(after)}"


def _change(before: str | None, after: str | None) -> str | None:
    return f"{before} -> {after}" if before and after and before != after else None
