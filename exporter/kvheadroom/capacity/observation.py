"""What the running engine says, in blocks, tokens and bytes. vLLM's own figures first."""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.kv_specs import ceil_div
from kvheadroom.capacity.readings import EngineSnapshot

TOLD, OF_BLOCKS = "kv_cache_size_tokens", "blocks"
"""What the pool's tokens are: vLLM's own figure, or made of its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One engine, now.

    Attributes:
        num_blocks: with the null block; usable_blocks is one less.
        block_size: tokens per block of the full-attention group, context parallelism included; None where what
            the page says of it cannot be.
        pool_tokens: vLLM's own `kv_cache_size_tokens` (0.24 and later), which counts the null block; before that made of
            the blocks by vLLM's rule, where the pool has one KV group.
        pool_tokens_basis: TOLD or OF_BLOCKS, None where there are no tokens.
        pool_bytes: blocks x predicted bytes per block at the observed block size, one GPU: vLLM exports no
            bytes, so this needs the model's geometry.
        used_tokens, free_tokens: blocks x block size, only where the pool has one KV group.
        contradiction: why the page's block size cannot be, one sentence; nothing here is made of it then.
    """

    num_blocks: int | None
    usable_blocks: int | None
    block_size: int | None
    pool_tokens: int | None
    pool_tokens_basis: str | None
    max_concurrency: float | None
    pool_bytes: int | None
    used_blocks: int | None
    free_blocks: int | None
    used_tokens: int | None
    free_tokens: int | None
    contradiction: str | None = None

    @property
    def unknown(self) -> str | None:
        """Why the pool's size is not known, one sentence; None where its blocks or tokens are told."""
        if self.num_blocks is not None or self.pool_tokens is not None:
            return None
        return (
            "the server's page does not tell how many blocks the pool has; none does before the engine has started, in V1 of 0.8, "
            "with several API servers up to 0.19, or with the Rust front end"
        )


SHARED_BLOCKS_TOLERANCE = 0.1
"""Data-parallel engines have about as many blocks each: what their GPUs leave differs by a few percent."""


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
    block_size = snapshot.attention_block_size
    if block_size is None and snapshot.block_size is not None:
        # The label is what one GPU stores; with context parallelism a block holds more tokens.
        block_size = snapshot.block_size * facts.decode_context_parallel_size.value
    max_model_len = None if facts.max_model_len is None else facts.max_model_len.value
    one_group = _has_one_group(snapshot, layout, block_size, max_model_len)
    contradiction = None
    if block_size is not None and snapshot.attention_block_size is None and one_group:
        contradiction = _contradiction(snapshot, facts, block_size)
        if contradiction is not None:
            block_size = None
    in_tokens = block_size if one_group and block_size is not None else None
    pool_tokens, basis = snapshot.pool_tokens, None
    if pool_tokens is not None:
        basis = TOLD
    elif blocks is not None and in_tokens is not None:
        pool_tokens, basis = _tokens_of_blocks(blocks, in_tokens, max_model_len), OF_BLOCKS
    return Observation(
        num_blocks=blocks,
        usable_blocks=usable,
        block_size=block_size,
        pool_tokens=pool_tokens,
        pool_tokens_basis=basis,
        max_concurrency=snapshot.max_concurrency,
        pool_bytes=None if contradiction is not None else _pool_bytes(snapshot, layout),
        used_blocks=used,
        free_blocks=free,
        used_tokens=None if used is None or in_tokens is None else used * in_tokens,
        free_tokens=None if free is None or in_tokens is None else free * in_tokens,
        contradiction=contradiction,
    )


def _tokens_of_blocks(blocks: int, block_size: int, max_model_len: int | None) -> int:
    """What vLLM would report of a pool with one KV group (`update_kv_cache_capacity`, v1/core/kv_cache_utils.py)."""
    if max_model_len is None:
        return blocks * block_size
    return int(blocks / ceil_div(max_model_len, block_size) * max_model_len)


def _pool_bytes(snapshot: EngineSnapshot, layout: KvLayout | None) -> int | None:
    """Blocks x bytes per block; blocks of another size than predicted are scaled where all layers share them."""
    if layout is None or snapshot.num_blocks is None or snapshot.block_size is None:
        return None
    if snapshot.block_size == layout.block_size:
        return snapshot.num_blocks * layout.bytes_per_block
    if not layout.holds_every_token:
        return None
    return snapshot.num_blocks * layout.bytes_per_block * snapshot.block_size // layout.block_size


def _contradiction(snapshot: EngineSnapshot, facts: EngineFacts, block_size: int) -> str | None:
    """Why blocks of `block_size` tokens cannot be those of a pool with one group and vLLM's own number of tokens.

    vLLM's number is int(num_blocks / ceil(max_model_len / block_size) x max_model_len), and was num_blocks x block_size.
    Before 0.20 the label could keep the size that a hybrid model's blocks had before they were enlarged.
    """
    blocks, tokens = snapshot.num_blocks, snapshot.pool_tokens
    if blocks is None or tokens is None:
        return None
    most = blocks * block_size
    length = facts.max_model_len
    if length is None or length.assumed:
        # A request of any length from one block on fills more than half of its blocks.
        least = most // 2
    else:
        # One less: vLLM rounds a product of floats down.
        least = blocks * length.value // ceil_div(length.value, block_size) - 1
    slack = SHARED_BLOCKS_TOLERANCE if snapshot.blocks_are_shared else 0.0
    if least * (1 - slack) <= tokens <= most * (1 + slack):
        return None
    return (
        f"{blocks:,} blocks of block_size {block_size:,} are {most:,} tokens, and kv_cache_size_tokens says {tokens:,}: "
        "tokens in use, bytes of the pool and sessions by block size are not given"
    )


def _has_one_group(
    snapshot: EngineSnapshot, layout: KvLayout | None, block_size: int | None, max_model_len: int | None
) -> bool:
    """Whether blocks x block size are tokens, as they are only with a single KV cache group.

    The model's layout says it; without one the engine's own figures do: its blocks per request of
    max_model_len are ceil(max_model_len / block_size) exactly when there is one group of attention blocks.
    """
    if layout is not None:
        return layout.holds_every_token
    if not (snapshot.num_blocks and snapshot.max_concurrency and block_size and max_model_len):
        return False
    return round(snapshot.num_blocks / snapshot.max_concurrency) == ceil_div(max_model_len, block_size)
