"""What to ask of an engine's past: how much of its prompts a tier of another size in host memory would find."""

import math

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.offload_tier import OffloadTier, tier_of_size
from kvheadroom.capacity.reuse import ReuseQuestion, TierContent, TierSize
from kvheadroom.capacity.warmth import Tiers

NO_TIER = TierSize(bytes=0, tokens=0.0)


def ask(facts: EngineFacts, tiers: Tiers, tier_bytes: tuple[int, ...]) -> ReuseQuestion | str:
    """For each size, for none, and for the one that there is; a string says why nothing can be asked.

    Args:
        tier_bytes: of one engine's tier.
    """
    layout, usable, each = tiers.layout, tiers.observation.usable_blocks, tiers.blocks_per_token
    if tiers.caches is False:
        return "prefix caching is off"
    if layout is None:
        return "how its model keeps its cache is not known, and so not how many tokens fit in a tier"
    if each is None:
        return "it keeps recurrent states, and how many of them vLLM keeps is not modelled"
    if not usable:
        return "the engine does not tell its blocks"
    is_told = tiers.snapshot.told_tier is not None
    if isinstance(tiers.planned, str) or (tiers.planned is None and is_told):
        return f"the tier that there is: {tiers.planned or 'no flag that is known asks for it'}"
    sizes = [NO_TIER]
    for size in sorted({*tier_bytes, *(() if tiers.planned is None else (tiers.planned.given_bytes,))}):
        tier = tier_of_size(facts, layout, size)
        if isinstance(tier, str):
            return tier
        tokens = _tokens(tier, tier.num_chunks)
        if tokens is None:
            return "some of its layers look back over a part of the context alone, and what they keep in a tier is not modelled"
        sizes.append(TierSize(bytes=size, tokens=tokens))
    own = tiers.planned
    told = tiers.snapshot.told_tier
    chunks = 0 if own is None else own.num_chunks
    if told is not None and told.num_chunks is not None:
        chunks = told.num_chunks
    return ReuseQuestion(
        pool_tokens=usable / each,
        tier=TierContent(
            tokens=0.0 if own is None else _tokens(own, chunks) or 0.0,
            stores_answers=not facts.rules.offload.prompts_only if own is None else own.stores_answers,
        ),
        sizes=tuple(sizes),
    )


def _tokens(tier: OffloadTier, num_chunks: int) -> float | None:
    """Of contexts, in all groups; None where a group keeps a part of them."""
    if any(most is not None for _, most in tier.group_chunks):
        return None
    return num_chunks / math.fsum(1 / tokens for tokens, _ in tier.group_chunks)
