"""What keeps a tier in host memory from doing what its size promises; why prompts are not found is in `hit_reasons`."""

from collections.abc import Iterator, Mapping
from enum import StrEnum

from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.offload_tier import OffloadTier
from kvheadroom.capacity.warmth import Tiers


class WarmFinding(StrEnum):
    """A closed list."""

    TIER_NOT_PAYING = "tier_not_paying"
    TIER_TOO_SMALL = "tier_too_small"
    NOTHING_STORED = "nothing_stored"
    HOST_MEMORY_ABOVE_TIER = "host_memory_above_tier"
    TIER_ABOVE_SHM = "tier_above_shm"
    TIER_ABOVE_HOST_MEMORY = "tier_above_host_memory"
    EVICTED_BY_CHURN = "evicted_by_churn"
    BLOCKS_TOO_BIG = "blocks_too_big"
    PREFIXES_DIFFER = "prefixes_differ"
    FINDS_LESS_THAN_BEFORE = "finds_less_than_before"


LONG = "1h"
_MANY_CHUNKS = 1000
"""So many chunks' tokens must have come before it is odd that none was stored."""


def tier_findings(
    tiers: Tiers, growths: Mapping[str, Growth], longest_tokens: int | None
) -> Iterator[tuple[WarmFinding, str]]:
    """What the counters tell of a tier in host memory, each with one sentence.

    Args:
        longest_tokens: max_model_len; None where it is not known.
    """
    host, told = tiers.host, tiers.snapshot.told_tier
    if host is None and told is None:
        return
    larger = _larger(host, longest_tokens)
    if (told.num_chunks if told is not None else host and host.num_chunks) == 0:
        chunk = "" if host is None else f" ({in_gib(host.chunk_bytes)})"
        yield (
            WarmFinding.TIER_TOO_SMALL,
            f"not one chunk{chunk} fits in the tier in host memory; make it larger{larger}",
        )
    failed = ((window, grown.of("offload_allocation_failures_total")) for window, grown in growths.items())
    for window, failures in failed:
        if failures:
            why = (
                f"{failures:,.0f} stores found no room in the last {window}: more was moved at once than the tier in host memory has chunks "
                f"that no transfer holds; make it larger{larger}"
            )
            yield WarmFinding.TIER_TOO_SMALL, why
            break
    hour = growths.get(LONG)
    if hour is not None:
        yield from _of_the_hour(tiers, hour)


def _larger(host: OffloadTier | None, longest_tokens: int | None) -> str:
    """What the longest prompt takes: to come back it must be in the tier as a whole, and none of it may be evicted while it is loaded."""
    if host is None or longest_tokens is None:
        return ""
    needed = host.chunks_per_session(longest_tokens)
    size = in_gib(needed * host.chunk_bytes)
    if needed > host.num_chunks:
        return f", at least {size}, which is what one prompt of {longest_tokens:,} tokens takes"
    return (
        f": it has room for {host.num_chunks / needed:,.1f} prompts of {longest_tokens:,} tokens, {size} each, and needs as much for "
        "each that is stored or loaded at once"
    )


def _of_the_hour(tiers: Tiers, hour: Growth) -> Iterator[tuple[WarmFinding, str]]:
    host = tiers.host
    stored, loaded = hour.of("offload_store_bytes_total"), hour.of("offload_load_bytes_total")
    # The counter may be absent until the first load.
    if stored and (loaded == 0 or not tiers.snapshot.offload_load_bytes_total):
        why = (
            f"{in_gib(stored)} were stored in the tier in host memory in the last hour, and nothing was loaded from it: prompts are "
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


def in_gib(size: float) -> str:
    """A small one in MiB, so that it is not told as 0."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:,.2f} MiB"
