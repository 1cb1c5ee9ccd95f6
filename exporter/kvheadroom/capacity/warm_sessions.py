"""Everything about warm sessions of one engine: how much each tier holds, how long, at what cost, and what it spared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.hit_reasons import hit_reasons
from kvheadroom.capacity.host_tier import HostNeed, HostUse, host_findings, host_need
from kvheadroom.capacity.lmcache_tier import lmcache_bytes
from kvheadroom.capacity.offload_tier import OffloadTier
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.sessions import SessionCapacity
from kvheadroom.capacity.warm_findings import LONG, WarmFinding, tier_findings
from kvheadroom.capacity.warmth import (
    Answer,
    HbmContent,
    Rates,
    ResumeCost,
    Retention,
    Tier,
    Tiers,
    external_hits,
    hbm_content,
    local_hits,
    measured_idle_seconds,
    rates,
    resume_costs,
    retentions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """How much one tier holds.

    Attributes:
        bytes: of HBM those of one GPU; of the host's memory those of the engine, all workers together, padding included.
        tokens: as vLLM counts them, of requests of max_model_len; None where that is not known.
        sessions: (tokens of a session, how many of them fit), one for each length that the server admits.
        is_told: the engine says so itself; else it is planned.
    """

    tier: Tier
    bytes: int | None
    tokens: int | None
    sessions: tuple[tuple[int, float], ...]
    is_told: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmAnswer:
    """Whether a session of so many tokens that was idle for so long is still in one tier."""

    tier: Tier
    session_tokens: int
    idle_seconds: float
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one tier spared since the server's start; nothing is said of host memory where other tiers supply tokens too.

    Attributes:
        tokens: of prompts that were found there.
        prefill_seconds: that they would have taken, by the speed since the start; None where none was measured.
    """

    tier: Tier
    tokens: float
    prefill_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """All of one engine.

    Attributes:
        host: the tier in host memory as it is planned; a string says why it is not known; None where no flag asks for one.
        host_need: what that tier takes of its host's memory; None where it is not planned.
        host_use: the memory of its host; None where that is no machine whose processes are seen here.
        answers: by the longest window there is.
        measured_idle_seconds: by window, what evicted blocks say.
        findings: each with one sentence.
        reuse: what was learned of the engine's past; a string says why nothing is known; None where nobody asks.
    """

    tiers: Tiers
    host: OffloadTier | str | None
    host_need: HostNeed | None
    host_use: HostUse | None
    capacities: tuple[TierCapacity, ...]
    content: HbmContent | None
    retentions: tuple[Retention, ...]
    answers: tuple[WarmAnswer, ...]
    rates: tuple[Rates, ...]
    costs: tuple[ResumeCost, ...]
    measured_idle_seconds: tuple[tuple[str, float], ...]
    saved: tuple[Saved, ...]
    findings: tuple[tuple[WarmFinding, str], ...]
    reuse: Reuse | str | None


def assess_warmth(
    facts: EngineFacts,
    tiers: Tiers,
    growths: Mapping[str, Growth],
    sessions: tuple[SessionCapacity, ...],
    *,
    idle_seconds: tuple[float, ...],
    granularity: int | None,
    reuse: Reuse | str | None,
    host_use: HostUse | None = None,
) -> Warmth:
    """Everything about how long sessions stay warm.

    Args:
        growths: by window, the shortest first.
        idle_seconds: to answer for, each once.
        granularity: tokens that a prefix hit is a multiple of; None where that is not known.
        reuse: what was learned of the past.
        host_use: the memory of the server's host, where it is seen.
    """
    host = tiers.host
    need = None
    if host is not None and tiers.layout is not None:
        need = host_need(facts, tiers.layout, host)
    lengths = tuple(row.session_tokens for row in sessions)
    capacities = tuple(_capacities(tiers, sessions, lmcache_bytes(facts)))
    kept = retentions(tiers, growths)
    measured = tuple(rates(window, grown) for window, grown in growths.items())
    idle = ((window, measured_idle_seconds(grown)) for window, grown in growths.items())
    return Warmth(
        tiers=tiers,
        host=tiers.planned,
        host_need=need,
        host_use=None if need is None else host_use,
        capacities=capacities,
        content=hbm_content(tiers),
        retentions=kept,
        answers=tuple(_answers(kept, capacities, tuple(sorted(set(idle_seconds))))),
        rates=tuple(one for one in measured if one.prefill_tokens_per_second or one.load_bytes_per_second),
        costs=resume_costs(facts, tiers, _longest_measured(measured), lengths),
        measured_idle_seconds=tuple((window, value) for window, value in idle if value is not None),
        saved=tuple(_saved(tiers)),
        findings=(
            *_findings(facts, tiers, growths, need, host_use),
            *hit_reasons(tiers, kept, granularity, growths.get(LONG), reuse),
        ),
        reuse=reuse,
    )


def _capacities(
    tiers: Tiers, sessions: tuple[SessionCapacity, ...], lmcache: int | None
) -> Iterable[TierCapacity]:
    observation, told, host = tiers.observation, tiers.snapshot.told_tier, tiers.host
    if observation.pool_tokens is not None or observation.pool_bytes is not None:
        yield TierCapacity(
            tier=Tier.HBM,
            bytes=observation.pool_bytes,
            tokens=observation.pool_tokens,
            sessions=tuple(
                (row.session_tokens, row.observed) for row in sessions if row.observed is not None
            ),
            is_told=True,
        )
    if told is not None:
        yield TierCapacity(
            tier=Tier.HOST,
            bytes=told.size_bytes,
            tokens=told.size_tokens,
            sessions=_sessions(host, told.num_chunks, sessions),
            is_told=True,
        )
    elif host is not None:
        yield TierCapacity(
            tier=Tier.HOST,
            bytes=host.bytes,
            tokens=host.tokens,
            sessions=_sessions(host, host.num_chunks, sessions),
            is_told=False,
        )
    elif lmcache is not None:
        yield TierCapacity(tier=Tier.HOST, bytes=lmcache, tokens=None, sessions=(), is_told=False)


def _sessions(
    host: OffloadTier | None, chunks: int | None, sessions: tuple[SessionCapacity, ...]
) -> tuple[tuple[int, float], ...]:
    if host is None or chunks is None:
        return ()
    lengths = (row.session_tokens for row in sessions)
    return tuple((length, chunks / host.chunks_per_session(length)) for length in lengths)


def _answers(
    kept: tuple[Retention, ...], capacities: tuple[TierCapacity, ...], idle_seconds: tuple[float, ...]
) -> Iterable[WarmAnswer]:
    for capacity in capacities:
        of_tier = [one for one in kept if one.tier is capacity.tier]
        if not of_tier:
            continue
        for tokens, fit in capacity.sessions:
            for idle in idle_seconds:
                # What is longer than the tier was never in it as a whole.
                answer = of_tier[-1].answer(idle) if fit >= 1 else Answer.NO
                yield WarmAnswer(tier=capacity.tier, session_tokens=tokens, idle_seconds=idle, answer=answer)


def _longest_measured(measured: tuple[Rates, ...]) -> Rates:
    """Of each rate the one of the longest window in which it was measured."""
    longest = Rates(window="", prefill_tokens_per_second=None, load_bytes_per_second=None)
    for one in measured:
        longest = Rates(
            window=one.window,
            prefill_tokens_per_second=one.prefill_tokens_per_second or longest.prefill_tokens_per_second,
            load_bytes_per_second=one.load_bytes_per_second or longest.load_bytes_per_second,
        )
    return longest


def _saved(tiers: Tiers) -> Iterable[Saved]:
    ever = tiers.since_start
    speed = rates("", ever).prefill_tokens_per_second
    host = tiers.host
    is_of_host = bool(tiers.snapshot.told_tier) if host is None else host.is_alone
    for tier, tokens in ((Tier.HBM, local_hits(ever)), (Tier.HOST, external_hits(ever))):
        if tokens is not None and (tier is Tier.HBM or is_of_host):
            yield Saved(tier=tier, tokens=tokens, prefill_seconds=None if speed is None else tokens / speed)


def _findings(
    facts: EngineFacts,
    tiers: Tiers,
    growths: Mapping[str, Growth],
    need: HostNeed | None,
    use: HostUse | None,
) -> Iterable[tuple[WarmFinding, str]]:
    longest = None if facts.max_model_len is None else facts.max_model_len.value
    yield from tier_findings(tiers, growths, longest)
    if need is not None and tiers.host is not None:
        # Where nobody tells how many engines this host has, of one at least it is sure.
        engines = 1 if use is None or use.engines is None else use.engines
        yield from host_findings(need, tiers.host, use, engines=engines, runs=True)
