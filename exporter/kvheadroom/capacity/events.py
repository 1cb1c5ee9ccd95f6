"""What happened to a replica between two good scrapes: restarts and changes of what it serves."""

from collections.abc import Iterator

from kvheadroom.capacity.assessment import Assessment, Event, EventKind, ReplicaAssessment
from kvheadroom.capacity.readings import EngineSnapshot

COUNTERS = (
    "preemptions_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)


def events_between(before: ReplicaAssessment, after: ReplicaAssessment, at: float) -> tuple[Event, ...]:
    """The events that two assessments of one replica show; none when there was nothing before.

    A restart is known by the process's start time, or, where a multi-process server does not tell it, by a
    counter that fell.
    """
    if not before.engines:
        return ()
    return tuple(Event(at=at, kind=kind, detail=detail) for kind, detail in _changes(before, after))


def progress(engines: tuple[EngineSnapshot, ...]) -> tuple[tuple[float | None, ...], ...]:
    """The counters that move while an engine works; two equal ones mean that it stood still."""
    return tuple(tuple(getattr(engine, name) for name in COUNTERS) for engine in engines)


def counters_fell(before: tuple[EngineSnapshot, ...], after: tuple[EngineSnapshot, ...]) -> bool:
    """Whether a counter of any engine, matched by name, is smaller than it was: another process counts."""
    old = {engine.engine: engine for engine in before}
    return any(_fell(old[engine.engine], engine) for engine in after if engine.engine in old)


def _changes(before: ReplicaAssessment, after: ReplicaAssessment) -> Iterator[tuple[EventKind, str]]:
    old = {engine.snapshot.engine: engine for engine in before.engines}
    new = {engine.snapshot.engine: engine for engine in after.engines}
    both = [(old[name], new[name]) for name in new if name in old]
    if (
        before.process_start_time_seconds is not None
        and after.process_start_time_seconds is not None
        and before.process_start_time_seconds != after.process_start_time_seconds
    ):
        yield EventKind.RESTARTED, "its process started anew"
    elif counters_fell(tuple(a.snapshot for a, _ in both), tuple(b.snapshot for _, b in both)):
        yield EventKind.RESTARTED, "its counters began anew"
    if both and (change := _change(*(_release(engine) for engine in both[0]))):
        yield EventKind.RELEASE_CHANGED, f"vLLM {change}"
    for a, b in both:
        if change := _change(a.snapshot.model_name, b.snapshot.model_name):
            yield EventKind.MODEL_CHANGED, f"engine {b.snapshot.engine}: model {change}"
        pool = _change(_pool(a), _pool(b))
        length = _change(_max_model_len(a), _max_model_len(b))
        if pool or length:
            parts = [f"pool {pool}"] if pool else []
            parts += [f"max_model_len {length}"] if length else []
            yield EventKind.CAPACITY_CHANGED, f"engine {b.snapshot.engine}: {', '.join(parts)}"
    if old.keys() != new.keys():
        yield EventKind.ENGINES_CHANGED, f"engines {', '.join(old)} -> {', '.join(new)}"


def _fell(before: EngineSnapshot, after: EngineSnapshot) -> bool:
    pairs = ((getattr(before, name), getattr(after, name)) for name in COUNTERS)
    return any(a is not None and b is not None and b < a for a, b in pairs)


def _change(before: str | None, after: str | None) -> str | None:
    return f"{before} -> {after}" if before and after and before != after else None


def _release(engine: Assessment) -> str | None:
    return None if engine.facts.version is None else engine.facts.version.value


def _pool(engine: Assessment) -> str | None:
    seen = engine.observation
    if seen.num_blocks is None:
        return None
    return f"{seen.num_blocks:,} blocks of {seen.block_size}"


def _max_model_len(engine: Assessment) -> str | None:
    return None if engine.facts.max_model_len is None else f"{engine.facts.max_model_len.value:,}"
