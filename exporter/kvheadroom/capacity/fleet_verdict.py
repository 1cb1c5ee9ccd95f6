"""Who is in trouble, and how many more sessions fit: what a person asks of a whole fleet at first look.

One verdict for each engine, by what is worst of it; for a server that gives no numbers, one for the server. What is not known is a verdict of
its own and never counted as fine.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.engine_states import EngineState
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment, ReplicaState, is_stale
from kvheadroom.capacity.sessions import SessionCapacity

IMMINENT_RATIOS = {"30s": 0.4, "2m": 0.7}
"""By the value of the label `horizon`: from such a probability on a preemption within two minutes is likely."""
LIKELY_RATIOS = {"10m": 0.7}
"""The same within ten. Those of 30 seconds and of ten minutes are the alerts' own; docs/forecast.md tells how often each was right."""
_RANKED_BY = "2m"


class Urgency(StrEnum):
    """How much haste there is. A closed list, worst first."""

    NOW = "now"
    SOON = "soon"
    UNKNOWN = "unknown"
    FINE = "fine"


class Verdict(StrEnum):
    """What is worst of one engine, or of a server without numbers. A closed list, worst first."""

    DOWN = "down"
    WEDGED = "wedged"
    STALE = "stale"
    STALLED = "stalled"
    PREEMPTING = "preempting"
    PREEMPTION_IMMINENT = "preemption_imminent"
    PREEMPTION_LIKELY = "preemption_likely"
    WAITING_FOR_KV = "waiting_for_kv"
    NO_ROOM = "no_room"
    PREFIXES_EVICTED = "prefixes_evicted"
    STATS_DISABLED = "stats_disabled"
    STARTING = "starting"
    SCALING = "scaling"
    NOT_SCRAPED = "not_scraped"
    UNKNOWN = "unknown"
    SLEEPING = "sleeping"
    FINE = "fine"

    @property
    def urgency(self) -> Urgency:
        """How much haste it has."""
        return _URGENCIES[self]


_URGENCIES = {
    Verdict.DOWN: Urgency.NOW,
    Verdict.WEDGED: Urgency.NOW,
    Verdict.STALE: Urgency.NOW,
    Verdict.STALLED: Urgency.NOW,
    Verdict.PREEMPTING: Urgency.NOW,
    Verdict.PREEMPTION_IMMINENT: Urgency.SOON,
    Verdict.PREEMPTION_LIKELY: Urgency.SOON,
    Verdict.WAITING_FOR_KV: Urgency.SOON,
    Verdict.NO_ROOM: Urgency.SOON,
    Verdict.PREFIXES_EVICTED: Urgency.SOON,
    Verdict.STATS_DISABLED: Urgency.UNKNOWN,
    Verdict.STARTING: Urgency.UNKNOWN,
    Verdict.SCALING: Urgency.UNKNOWN,
    Verdict.NOT_SCRAPED: Urgency.UNKNOWN,
    Verdict.UNKNOWN: Urgency.UNKNOWN,
    Verdict.SLEEPING: Urgency.FINE,
    Verdict.FINE: Urgency.FINE,
}
_ORDER = {verdict: place for place, verdict in enumerate(Verdict)}
_ACCEPTS_NOTHING = (Verdict.STALLED, Verdict.SLEEPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One engine and what is worst of it.

    Attributes:
        engine: None of a server that gives no numbers.
        why: the numbers, one sentence without a full stop.
    """

    replica: ReplicaAssessment
    engine: Assessment | None
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRoom:
    """How many more sessions of one length fit now.

    Attributes:
        session_tokens: of the lengths that are counted the one that most engines take, and of these the longest.
        sessions: whole ones, of all `engines` together.
        engines: those that take the length and tell what is free.
        shorter_engines: those whose max_model_len is shorter.
        unknown_engines: those of which it is not known, or that take no request now.
    """

    session_tokens: int
    sessions: int
    engines: int
    shorter_engines: int
    unknown_engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVerdict:
    """The first line of every board, as values.

    Attributes:
        urgency: of what is worst; unknown where there is nothing to see.
        servers: all of them.
        engines: of the servers that give numbers; how many the others have nobody knows.
        server_verdicts: of the servers without numbers, how many have which, worst first.
        engine_verdicts: the same of the engines.
        room: None where no engine tells what is free.
    """

    urgency: Urgency
    servers: int
    engines: int
    server_verdicts: tuple[tuple[Verdict, int], ...]
    engine_verdicts: tuple[tuple[Verdict, int], ...]
    room: FleetRoom | None


def fleet_verdict(fleet: FleetAssessment, now: float) -> FleetVerdict:
    """The whole fleet in a few numbers.

    Args:
        now: unix seconds.
    """
    ranked = tuple(_rank(fleet, now))
    engines = [one for one in ranked if one.engine is not None]
    urgencies = {one.verdict.urgency for one in ranked}
    return FleetVerdict(
        urgency=next((urgency for urgency in Urgency if urgency in urgencies), Urgency.UNKNOWN),
        servers=len(fleet.replicas),
        engines=len(engines),
        server_verdicts=_counts(one.verdict for one in ranked if one.engine is None),
        engine_verdicts=_counts(one.verdict for one in engines),
        room=_room(engines),
    )


def worst_first(fleet: FleetAssessment, now: float) -> tuple[Ranked, ...]:
    """Every engine, and every server without numbers, in the order in which they want to be looked at.

    Those of one verdict by how likely a preemption is within two minutes, then by how full the pool is.

    Args:
        now: unix seconds.
    """
    return tuple(sorted(_rank(fleet, now), key=_place))


def _place(one: Ranked) -> tuple[int, float, float, str]:
    engine = one.engine
    likely = 0.0 if engine is None else engine.forecast.probabilities.get(_RANKED_BY, 0.0)
    usage = 0.0 if engine is None else engine.snapshot.kv_usage_ratio or 0.0
    return _ORDER[one.verdict], -likely, -usage, one.replica.replica


def _counts(verdicts: Iterable[Verdict]) -> tuple[tuple[Verdict, int], ...]:
    counted = Counter(verdicts)
    return tuple((verdict, counted[verdict]) for verdict in Verdict if counted[verdict])


def _rank(fleet: FleetAssessment, now: float) -> Iterator[Ranked]:
    for replica in fleet.replicas:
        of_server = _of_server(replica, now)
        if of_server is not None:
            verdict, why = of_server
            yield Ranked(replica=replica, engine=None, verdict=verdict, why=why)
            continue
        for engine in replica.engines:
            verdict, why = _of_engine(engine)
            yield Ranked(replica=replica, engine=engine, verdict=verdict, why=why)


def _of_server(replica: ReplicaAssessment, now: float) -> tuple[Verdict, str] | None:
    """None where its engines have numbers that may be shown."""
    failure = next((one.failure for one in replica.sources if one.failure is not None), None)
    told = "it does not answer" if failure is None else failure.detail
    match replica.state:
        case ReplicaState.DOWN:
            return Verdict.DOWN, told
        case ReplicaState.WEDGED:
            return Verdict.WEDGED, "/health fails and its counters stand still"
        case ReplicaState.STATS_DISABLED:
            return Verdict.STATS_DISABLED, "it runs without metrics (--disable-log-stats)"
        case ReplicaState.SCALING:
            return Verdict.SCALING, "it answers 503 to all but /health"
        case ReplicaState.STARTING:
            return Verdict.STARTING, "its engine has no metrics yet"
        case _:
            pass
    if not replica.attempted:
        return Verdict.NOT_SCRAPED, "it was not scraped yet"
    if is_stale(replica, now) or not replica.engines:
        last = replica.last_success_at
        age = "none came yet" if last is None else f"the last ones are {max(0.0, now - last):,.0f} s old"
        return Verdict.STALE, f"it gives no current numbers; {age}"
    return None


def _of_engine(engine: Assessment) -> tuple[Verdict, str]:
    if engine.snapshot.sleeping:
        return Verdict.SLEEPING, "it sleeps, and its memory is given up"
    states = {found.state: found.why for found in engine.states}
    for state, verdict in (
        (EngineState.SCHEDULER_STALLED, Verdict.STALLED),
        (EngineState.REPREFILL_LOOP, Verdict.STALLED),
        (EngineState.THRASH, Verdict.PREEMPTING),
        (EngineState.PREEMPTING, Verdict.PREEMPTING),
    ):
        if state in states:
            return verdict, states[state]
    return _of_forecast(engine, states) or _of_unknown(engine) or (Verdict.FINE, engine.forecast.why)


def _of_forecast(engine: Assessment, states: dict[EngineState, str]) -> tuple[Verdict, str] | None:
    """What is to be expected of an engine that preempts nothing yet."""
    for verdict, ratios in (
        (Verdict.PREEMPTION_IMMINENT, IMMINENT_RATIOS),
        (Verdict.PREEMPTION_LIKELY, LIKELY_RATIOS),
    ):
        for horizon, least in ratios.items():
            likely = engine.forecast.probabilities.get(horizon, 0.0)
            if likely >= least:
                return verdict, f"{likely:.0%} for a preemption within {horizon}; {engine.forecast.why}"
    if engine.binding_limit.limit is Limit.KV_POOL:
        return Verdict.WAITING_FOR_KV, engine.binding_limit.why
    if EngineState.POOL_BELOW_ONE_SESSION in states:
        return Verdict.NO_ROOM, states[EngineState.POOL_BELOW_ONE_SESSION]
    shortest = min(_counted(engine), key=lambda row: row.session_tokens, default=None)
    if shortest is not None and shortest.headroom == 0:
        free = engine.observation.free_blocks
        why = f"a session of {shortest.session_tokens:,} tokens takes {shortest.blocks_per_session:,} blocks, and "
        return Verdict.NO_ROOM, why + ("1 is free" if free == 1 else f"{free:,} are free")
    if EngineState.WORKING_SET_EXCEEDS_POOL in states:
        return Verdict.PREFIXES_EVICTED, states[EngineState.WORKING_SET_EXCEEDS_POOL]
    return None


def _of_unknown(engine: Assessment) -> tuple[Verdict, str] | None:
    """Why nobody can say that it is fine."""
    if engine.forecast.unavailable is not None:
        return Verdict.UNKNOWN, f"no forecast: {engine.forecast.why}"
    if not _counted(engine):
        return (
            Verdict.UNKNOWN,
            f"how many sessions fit is not known: {engine.observation.unknown or 'no length is known to count them by'}",
        )
    return None


def _counted(engine: Assessment) -> list[SessionCapacity]:
    """The lengths of which it is known how many more fit."""
    return [row for row in engine.sessions if row.headroom is not None]


def _room(ranked: list[Ranked]) -> FleetRoom | None:
    open_ones = [
        one.engine for one in ranked if one.engine is not None and one.verdict not in _ACCEPTS_NOTHING
    ]
    fit = [{row.session_tokens: row.headroom or 0 for row in _counted(engine)} for engine in open_ones]
    taken_by = Counter(tokens for rows in fit for tokens in rows)
    if not taken_by:
        return None
    length = max(taken_by, key=lambda tokens: (taken_by[tokens], tokens))
    shorter = sum(
        length not in rows
        and engine.facts.max_model_len is not None
        and engine.facts.max_model_len.value < length
        for engine, rows in zip(open_ones, fit, strict=True)
    )
    return FleetRoom(
        session_tokens=length,
        sessions=sum(rows.get(length, 0) for rows in fit),
        engines=taken_by[length],
        shorter_engines=shorter,
        unknown_engines=len(ranked) - taken_by[length] - shorter,
    )
