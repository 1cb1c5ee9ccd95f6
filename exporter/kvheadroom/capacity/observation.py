"""What the running engine says, in blocks, tokens and bytes. vLLM's own figures first."""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.readings import EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One engine, now.

    Attributes:
        num_blocks: with the null block; usable_blocks is one less.
        block_size: tokens per block of the full-attention group.
        pool_tokens: vLLM's own `kv_cache_size_tokens`; it counts the null block.
        pool_bytes: blocks x predicted bytes per block at the observed block size, one GPU: vLLM exports no
            bytes, so this needs the model's geometry.
        used_tokens, free_tokens: blocks x block size, only where the pool has one KV group.
    """

    num_blocks: int | None
    usable_blocks: int | None
    block_size: int | None
    pool_tokens: int | None
    max_concurrency: float | None
    pool_bytes: int | None
    used_blocks: int | None
    free_blocks: int | None
    used_tokens: int | None
    free_tokens: int | None


def observe(snapshot: EngineSnapshot, facts: EngineFacts, layout: KvLayout | None) -> Observation:
    """Block arithmetic of `vllm/v1/core/block_pool.py` (0.33.0): usage = 1 - free / (num_blocks - 1).

    Up to 0.10.1 it was 1 - free / num_blocks. Block 0 is the null block: it is never handed out, so `usable = num_blocks - 1` and
    `used = round(usage * usable)` is exact.
    """
    blocks = snapshot.num_blocks
    usable = blocks - 1 if blocks is not None and blocks > 1 else None
    used = free = None
    # A sleeping engine has given its memory up: blocks that it calls free are not there to be used.
    if usable is not None and snapshot.kv_usage_ratio is not None and not snapshot.sleeping:
        if facts.rules.usage_counts_null_block:
            used = max(0, round(snapshot.kv_usage_ratio * (usable + 1)) - 1)
        else:
            used = round(snapshot.kv_usage_ratio * usable)
        free = usable - used
    block_size = snapshot.attention_block_size or snapshot.block_size
    max_model_len = None if facts.max_model_len is None else facts.max_model_len.value
    one_group = _has_one_group(snapshot, layout, block_size, max_model_len)
    in_tokens = block_size if one_group and block_size is not None else None
    return Observation(
        num_blocks=blocks,
        usable_blocks=usable,
        block_size=block_size,
        pool_tokens=snapshot.pool_tokens,
        max_concurrency=snapshot.max_concurrency,
        # With context parallelism a block holds more tokens than the block_size that one GPU stores.
        pool_bytes=None
        if layout is None or blocks is None or snapshot.block_size is None
        else blocks * snapshot.block_size * layout.bytes_per_token,
        used_blocks=used,
        free_blocks=free,
        used_tokens=None if used is None or in_tokens is None else used * in_tokens,
        free_tokens=None if free is None or in_tokens is None else free * in_tokens,
    )


def _has_one_group(
    snapshot: EngineSnapshot, layout: KvLayout | None, block_size: int | None, max_model_len: int | None
) -> bool:
    """Whether blocks x block size are tokens, as they are only with a single KV cache group.

    The model's layout says it; without one the engine's own figures do: its blocks per request of
    max_model_len are ceil(max_model_len / block_size) exactly when there is one group of attention blocks.
    """
    if layout is not None:
        return layout.num_kv_groups == 1
    if not (snapshot.num_blocks and snapshot.max_concurrency and block_size and max_model_len):
        return False
    return round(snapshot.num_blocks / snapshot.max_concurrency) == -(-max_model_len // block_size)
