"""Why prompts are not found again, where more of them could be."""

from collections.abc import Iterable, Iterator

from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.prefix_cache import mean_tokens
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.warm_findings import LONG, WarmFinding
from kvheadroom.capacity.warmth import Retention, Tier, Tiers, external_hits, local_hits

MUCH = 0.1
"""Of all prompt tokens: a difference that is worth a sentence."""
_NEXT_TO_NOTHING = 0.01
_MANY_REQUESTS = 100
_MANY_BLOCKS = 4
_STAYS_SECONDS = 300.0


def hit_reasons(
    tiers: Tiers,
    kept: Iterable[Retention],
    granularity: int | None,
    hour: Growth | None,
    reuse: Reuse | str | None,
) -> Iterator[tuple[WarmFinding, str]]:
    """Each with one sentence, without its full stop.

    Args:
        granularity: tokens that a prefix hit is a multiple of; None where that is not known.
        hour: what the counters grew by in the last hour; None where it does not reach back whole.
    """
    if isinstance(reuse, Reuse):
        yield from _churn(tiers, reuse)
        yield from _less(reuse)
    if hour is not None and tiers.caches and granularity is not None:
        yield from _blocks(hour, granularity)
        yield from _different(hour, kept, granularity)


def _churn(tiers: Tiers, reuse: Reuse) -> Iterator[tuple[WarmFinding, str]]:
    present = 0 if tiers.host is None else tiers.host.given_bytes
    for one in reuse.expected:
        if one.size.bytes > present and one.low_ratio >= reuse.found_ratio + MUCH:
            why = (
                f"{reuse.found_ratio:.0%} of the prompt tokens of the last {reuse.seconds / 3600:.0f} h were found in a cache, and with a tier of "
                f"{one.size.bytes / 1e9:,.4g} GB in host memory {one.low_ratio:.0%} or more would have been: content is evicted before it is "
                "asked for again"
            )
            yield WarmFinding.EVICTED_BY_CHURN, why
            return


def _less(reuse: Reuse) -> Iterator[tuple[WarmFinding, str]]:
    lately = reuse.lately
    if lately is not None and lately.found_ratio < lately.expected_ratio - MUCH:
        why = (
            f"{lately.found_ratio:.0%} of the prompt tokens of the last hour were found in a cache, and by how soon prompts came back before it would "
            f"have been {lately.expected_ratio:.0%}: prompts begin differently now, other work came, or the caches were reset"
        )
        yield WarmFinding.FINDS_LESS_THAN_BEFORE, why


def _blocks(hour: Growth, granularity: int) -> Iterator[tuple[WarmFinding, str]]:
    prompt = mean_tokens(hour, "finished_prompt_tokens_total")
    # Up to one block nothing can be found at all, which is said elsewhere.
    if prompt is not None and granularity < prompt and granularity / 2 >= MUCH * prompt:
        why = (
            f"prompts are found again in whole blocks of {granularity:,} tokens, and have {prompt:,.0f} tokens on average: half a block of "
            f"each, {granularity / 2 / prompt:.0%}, is computed again on average however often it comes"
        )
        yield WarmFinding.BLOCKS_TOO_BIG, why


def _different(
    hour: Growth, kept: Iterable[Retention], granularity: int
) -> Iterator[tuple[WarmFinding, str]]:
    prompts, found = hour.of("prompt_tokens_total"), local_hits(hour)
    mean, requests = mean_tokens(hour, "finished_prompt_tokens_total"), hour.of("finished_requests_total")
    if not prompts or found is None or mean is None or requests is None or requests < _MANY_REQUESTS:
        return
    if not any(map(_stays, kept)) or mean < _MANY_BLOCKS * granularity:
        return
    if found + (external_hits(hour) or 0.0) < _NEXT_TO_NOTHING * prompts:
        why = (
            f"{requests:,.0f} prompts of {mean:,.0f} tokens on average came in the last hour, content stays for minutes, and next to nothing was "
            "found again: each begins differently (a date, a name or an id in front), or nobody came back"
        )
        yield WarmFinding.PREFIXES_DIFFER, why


def _stays(one: Retention) -> bool:
    """Whether what nobody asks for stays in the pool for so long that somebody could come back to it."""
    if one.tier is not Tier.HBM or one.window != LONG:
        return False
    return one.high_seconds is None or (one.low_seconds is not None and one.low_seconds >= _STAYS_SECONDS)
