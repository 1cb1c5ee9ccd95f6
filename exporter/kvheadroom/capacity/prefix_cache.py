"""How many of the prompt tokens were found in a cache, by the counters that a release counts right.

vLLM counts twice. `prefix_cache_queries` and `_hits` as a request is looked up: once, on its admission, from 0.27.0 on
(v1/core/sched/scheduler.py); up to 0.26 at every step that it waits for blocks; up to 0.11.0 once more after each
preemption, when it finds its own tokens again. `prompt_tokens_by_source` (from 0.16.0) as its first prefill ends: once,
whatever happens to it (v1/metrics/stats.py PromptTokenStats).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvheadroom.capacity.history import Growth, growth_since_start, moment_of
from kvheadroom.capacity.readings import EngineSnapshot, PageProblem, ProblemReason, VllmPage
from kvheadroom.capacity.release_rules import ReleaseRules, rules_for

LOOKUPS, BY_SOURCE, LMCACHE = "prefix_cache_queries", "prompt_tokens_by_source", "lmcache:num_lookup_tokens"
"""Which counters a hit rate is made of."""

FINDINGS_WINDOW = "5m"
ENOUGH_REQUESTS = 10
"""A mean over fewer finished requests tells little of those that run."""
COUNTED_AGAIN_FACTOR = 1.2
"""Look-ups of so many times the prompts: more than what is being prefilled at the window's ends explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Tokens asked for and found, over one window.

    Attributes:
        lookup_tokens: above 0.
        hit_tokens: at most lookup_tokens.
        basis: LOOKUPS, BY_SOURCE or LMCACHE.
        doubt: why this is not the share of prompts that was found, one sentence; empty where it is.
    """

    lookup_tokens: float
    hit_tokens: float
    basis: str
    doubt: str = ""

    @property
    def ratio(self) -> float:
        """Found / asked for."""
        return self.hit_tokens / self.lookup_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HitWindow:
    """One window that reaches back without a gap or a restart, and in which something was looked up.

    Attributes:
        window: its name in WINDOWS.
        seconds: how long it is: to the scrape that is nearest to its beginning.
        local: of this engine's prefix cache; None where nothing was looked up, or the counters are not told.
        external: of the KV connector, asked for what the engine's own cache had not.
        lmcache: of LMCache by its own counters, asked for whole prompts, so that what the engine's own cache had is among what it finds.
    """

    window: str
    seconds: float
    local: Hits | None
    external: Hits | None
    lmcache: Hits | None = None


def hit_windows(
    now: EngineSnapshot, rules: ReleaseRules, growths: Mapping[str, Growth]
) -> tuple[HitWindow, ...]:
    """The windows in which something was looked up, in the order of `growths`."""
    windows = []
    for name, grown in growths.items():
        found = local_hits(now, rules, grown), _external(now, grown), _lmcache(grown)
        if grown.seconds is not None and any(one is not None for one in found):
            local, external, lmcache = found
            windows.append(
                HitWindow(window=name, seconds=grown.seconds, local=local, external=external, lmcache=lmcache)
            )
    return tuple(windows)


def findings(
    now: EngineSnapshot, rules: ReleaseRules, granularity: int | None, grown: Growth
) -> tuple[PageProblem, ...]:
    """What makes the hit counters of an engine mean something else than they seem to, each with its reason.

    Args:
        granularity: tokens that a hit is a multiple of; None where that is not known.
        grown: in the window for findings, else since the server's start.
    """
    when = "since the server's start" if grown.seconds is None else "in the last 5 minutes"
    found = [*_not_wired(now), *_below_one_block(now, grown, granularity, when)]
    if grown.seconds is not None and _is_inflated(rules, grown):
        again = f"{_whole(grown.of('preemptions_total'))} preemptions {when}: {_INFLATED}"
        found.append((ProblemReason.INFLATED_BY_RECOMPUTE, again))
    return tuple(PageProblem(reason, f"engine {now.engine}: {detail}") for reason, detail in found)


def page_findings(page: VllmPage) -> tuple[PageProblem, ...]:
    """What one page alone tells of them; which release it is of is not known."""
    return tuple(
        found
        for engine in page.engines
        for found in findings(
            engine,
            rules_for(None),
            hit_granularity(engine, context_parallel=1),
            growth_since_start(moment_of(engine, math.nan)),
        )
    )


def hit_granularity(engine: EngineSnapshot, context_parallel: int) -> int | None:
    """Tokens that a prefix hit is at least a multiple of; None where the page tells no block size.

    One block where all layers share a size. Where layers differ, hits lie on the largest common divisor of their sizes or
    on the least common multiple (v1/core/kv_cache_utils.py resolve_cache_hit_alignment_tokens): the smallest that is told.

    Args:
        context_parallel: GPUs over which the tokens of a block are spread.
    """
    if engine.prefix_match_unit is not None:
        return engine.prefix_match_unit
    of_a_gpu = None if engine.block_size is None else engine.block_size * context_parallel
    told = [size for size in (of_a_gpu, engine.attention_block_size) if size is not None]
    return min(told, default=None)


_INFLATED = (
    "this vLLM counts what a preempted request finds again of its own tokens as prefix hits, so the hit rate is inflated "
    "by recompute (from 0.11.1 it does not)"
)


def local_hits(now: EngineSnapshot, rules: ReleaseRules, grown: Growth) -> Hits | None:
    """Prompt tokens asked for and found in the engine's own cache; None where nothing was asked for, or it is not told."""
    not_wired = _local_is_not_wired(now)
    if not_wired or rules.lookups_per_attempt:
        by_source = _hits(grown, "prompt_tokens_total", "prompt_tokens_local_cache_hit_total", BY_SOURCE)
        if not_wired or by_source is not None:
            return by_source
    doubt = ""
    if _is_inflated(rules, grown):
        doubt = _INFLATED
    elif rules.lookups_per_attempt and _counted_again(grown):
        doubt = (
            "this vLLM counts a look-up at every step that a request waits for blocks, so requests that waited weigh more "
            "(from 0.27 it counts one)"
        )
    return _hits(grown, "prefix_cache_queries_total", "prefix_cache_hits_total", LOOKUPS, doubt)


def _external(now: EngineSnapshot, grown: Growth) -> Hits | None:
    # Of a connector vLLM has always counted on admission, and never after a preemption.
    lookups = "external_prefix_cache_queries_total"
    if _external_is_not_wired(now):
        return _hits(grown, lookups, "prompt_tokens_external_kv_transfer_total", BY_SOURCE)
    return _hits(grown, lookups, "external_prefix_cache_hits_total", LOOKUPS)


def _lmcache(grown: Growth) -> Hits | None:
    return _hits(grown, "lmcache_lookup_tokens_total", "lmcache_lookup_hits_total", LMCACHE)


def _hits(grown: Growth, lookups: str, hits: str, basis: str, doubt: str = "") -> Hits | None:
    asked = grown.of(lookups)
    found = grown.of(hits) if asked else None
    if not asked or found is None or found > asked:
        return None
    return Hits(lookup_tokens=asked, hit_tokens=found, basis=basis, doubt=doubt)


def _is_inflated(rules: ReleaseRules, grown: Growth) -> bool:
    return (
        rules.lookups_after_preemption
        and bool(grown.of("preemptions_total"))
        and bool(grown.of("prefix_cache_hits_total"))
    )


def _counted_again(grown: Growth) -> bool:
    lookups, prompts = grown.of("prefix_cache_queries_total"), grown.of("prompt_tokens_total")
    return lookups is not None and prompts is not None and lookups > COUNTED_AGAIN_FACTOR * prompts


def _local_is_not_wired(now: EngineSnapshot) -> bool:
    """Whether prompts were found in the engine's cache that its hit counter has never counted.

    Up to 0.19 a prompt of one token counts as found although it is computed: what was neither computed nor transferred has
    to tell it as well.
    """
    prompts, computed = now.prompt_tokens_total, now.prompt_tokens_local_compute_total
    if now.prefix_cache_hits_total != 0 or not now.prompt_tokens_local_cache_hit_total:
        return False
    if prompts is None or computed is None:
        return False
    return prompts - computed - (now.prompt_tokens_external_kv_transfer_total or 0) > 0


def _external_is_not_wired(now: EngineSnapshot) -> bool:
    return now.external_prefix_cache_hits_total == 0 and bool(now.prompt_tokens_external_kv_transfer_total)


def _not_wired(now: EngineSnapshot) -> Iterator[tuple[ProblemReason, str]]:
    if _local_is_not_wired(now):
        found = now.prompt_tokens_local_cache_hit_total
        yield ProblemReason.COUNTER_NOT_WIRED, _stays_0("prefix_cache_hits_total", "local_cache_hit", found)
    if _external_is_not_wired(now):
        found = now.prompt_tokens_external_kv_transfer_total
        counter = "external_prefix_cache_hits_total"
        yield ProblemReason.COUNTER_NOT_WIRED, _stays_0(counter, "external_kv_transfer", found)


def _stays_0(counter: str, source: str, found: float | None) -> str:
    return (
        f"{counter} stays 0 while prompt_tokens_by_source_total tells {_whole(found)} tokens of {source}: "
        "the counter is not wired, so the hit rate is made of the other one"
    )


def _below_one_block(
    now: EngineSnapshot, grown: Growth, granularity: int | None, when: str
) -> Iterator[tuple[ProblemReason, str]]:
    if granularity is None or grown.of("prefix_cache_hits_total") != 0 or _local_is_not_wired(now):
        return
    prompts = mean_tokens(grown, "finished_prompt_tokens_total")
    if prompts is None or not grown.of("prefix_cache_queries_total"):
        return
    # The last token of a prompt is always computed, so one of just a block finds nothing either.
    if prompts <= granularity:
        detail = (
            f"no prefix hits {when}: prompts are below one block, {prompts:,.0f} tokens on average, and only whole "
            f"blocks of {granularity:,} are found again; prefix caching is on"
        )
        yield ProblemReason.BELOW_ONE_BLOCK, detail


def mean_tokens(grown: Growth, of: str) -> float | None:
    """Tokens of a finished request on average; None where too few have finished."""
    requests = grown.of("finished_requests_total")
    if requests is None or requests < ENOUGH_REQUESTS:
        return None
    tokens = grown.of(of)
    return None if tokens is None else tokens / requests


def _whole(number: float | None) -> str:
    return f"{number or 0:,.0f}"
