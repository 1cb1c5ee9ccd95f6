"""Everything about warm sessions of one engine: how much each tier holds, how long, at what cost, and what it spared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.hit_reasons import LONG, WarmFinding, hit_reasons
from kvheadroom.capacity.offload_tier import GIB, OffloadTier
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.sessions import SessionCapacity
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
        answers: by the longest window there is.
        measured_idle_seconds: by window, what evicted blocks say.
        findings: each with one sentence.
        reuse: what was learned of the engine's past; a string says why nothing is known; None where nobody asks.
    """

    tiers: Tiers
    host: OffloadTier | str | None
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
) -> Warmth:
    """Everything about how long sessions stay warm.

    Args:
        growths: by window, the shortest first.
        idle_seconds: to answer for, each once.
        granularity: tokens that a prefix hit is a multiple of; None where that is not known.
        reuse: what was learned of the past.
    """
    lengths = tuple(row.session_tokens for row in sessions)
    capacities = tuple(_capacities(tiers, sessions))
    kept = retentions(tiers, growths)
    measured = tuple(rates(window, grown) for window, grown in growths.items())
    idle = ((window, measured_idle_seconds(grown)) for window, grown in growths.items())
    return Warmth(
        tiers=tiers,
        host=tiers.planned,
        capacities=capacities,
        content=hbm_content(tiers),
        retentions=kept,
        answers=tuple(_answers(kept, capacities, tuple(sorted(set(idle_seconds))))),
        rates=tuple(one for one in measured if one.prefill_tokens_per_second or one.load_bytes_per_second),
        costs=resume_costs(facts, tiers, _longest_measured(measured), lengths),
        measured_idle_seconds=tuple((window, value) for window, value in idle if value is not None),
        saved=tuple(_saved(tiers)),
        findings=(
            *_findings(tiers, growths),
            *hit_reasons(tiers, kept, granularity, growths.get(LONG), reuse),
        ),
        reuse=reuse,
    )


def _capacities(tiers: Tiers, sessions: tuple[SessionCapacity, ...]) -> Iterable[TierCapacity]:
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


def _findings(tiers: Tiers, growths: Mapping[str, Growth]) -> Iterable[tuple[WarmFinding, str]]:
    """What a tier in host memory does otherwise than its size promises."""
    host, told = tiers.host, tiers.snapshot.told_tier
    if host is None and told is None:
        return
    if (told.num_chunks if told is not None else host and host.num_chunks) == 0:
        yield WarmFinding.TIER_TOO_SMALL, "not one chunk fits in the tier in host memory; make it larger"
    failed = ((window, grown.of("offload_allocation_failures_total")) for window, grown in growths.items())
    for window, failures in failed:
        if failures:
            why = (
                f"{failures:,.0f} stores found no room in the last {window}: more was moved at once than the tier in host memory has chunks "
                "that no transfer holds; make it larger"
            )
            yield WarmFinding.TIER_TOO_SMALL, why
            break
    hour = growths.get(LONG)
    if hour is None:
        return
    stored, loaded = hour.of("offload_store_bytes_total"), hour.of("offload_load_bytes_total")
    # The counter may be absent until the first load.
    if stored and (loaded == 0 or not tiers.snapshot.offload_load_bytes_total):
        why = (
            f"{stored / GIB:,.2f} GiB were stored in the tier in host memory in the last hour, and nothing was loaded from it: prompts are "
            "found in the pool already, or come back after they were evicted"
        )
        yield WarmFinding.TIER_NOT_PAYING, why
    prompts = hour.of("prompt_tokens_total")
    if stored == 0 and prompts and host is not None and prompts > _MANY_CHUNKS * host.group_chunks[0][0]:
        why = (
            f"{prompts:,.0f} prompt tokens came in the last hour, and nothing was stored in the tier in host memory; only whole chunks of "
            f"{host.group_chunks[0][0]:,} tokens are"
        )
        yield WarmFinding.NOTHING_STORED, why


_MANY_CHUNKS = 1000
"""So many chunks' tokens must have come before it is odd that none was stored."""
