"""Facts -> what vLLM would allocate. Flags, files and hardware in; never a result of the live engine."""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.kv_cache import KvLayout, Refusal, plan_layout
from kvheadroom.capacity.memory import NoRoom, PoolBudget, plan_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPool:
    """The pool of one engine.

    Attributes:
        num_blocks: with the null block, as vLLM counts; with pipeline parallelism the fewest of all stages; 0 where the
            bytes are less than one block, and then there are neither tokens nor a concurrency.
        max_model_len: tokens; the longest that fits where vLLM is told to find it. None when it is not known,
            and with it all that follows.
        blocks_per_request: blocks of one request of max_model_len.
        pool_tokens: vLLM's `kv_cache_size_tokens`.
        max_concurrency: requests of max_model_len that fit.
        pool_bytes: `num_blocks * bytes_per_block`, the GPU of the widest stage.
        unused_bytes: what the budget leaves there after the last whole block; None when the number of blocks
            is given by a flag.
        needed_bytes: bytes of one request of the max_model_len that was asked for, for each pipeline stage.
        boots: whether vLLM starts: one such request fits beside the null block on every stage.
        longest_bootable: the longest max_model_len, up to the given one, that starts; 0 if none does.
    """

    num_blocks: int
    max_model_len: int | None
    blocks_per_request: int | None
    pool_tokens: int | None
    max_concurrency: float | None
    pool_bytes: int
    unused_bytes: int | None
    needed_bytes: tuple[int, ...] | None
    boots: bool | None
    longest_bootable: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """As much as can be predicted, and why not more.

    Attributes:
        cannot_predict: what is known but not modelled, or refused by vLLM, each one sentence. What is not
            known stands in `EngineFacts.missing`.
    """

    layout: KvLayout | None
    budget: PoolBudget | None
    pool: PredictedPool | None
    cannot_predict: tuple[str, ...]


def predict(facts: EngineFacts, known: Prediction | None = None) -> Prediction:
    """What vLLM would allocate for these facts.

    Args:
        known: of facts that differ in their overhead alone: its layout and weights are these ones', and planning weights takes time.
    """
    reasons = list(facts.obstacles)
    layout = plan_layout(facts) if known is None or known.layout is None else known.layout
    if isinstance(layout, Refusal):
        reasons += [f"vLLM refuses: {reason}" for reason in layout.reasons]
        layout = None
    elif isinstance(layout, str):
        reasons.append(layout)
        layout = None
    budget = plan_budget(facts, None if known is None or known.budget is None else known.budget.weights)
    if isinstance(budget, str | NoRoom):
        reasons.append(str(budget))
        budget = None
    pool = None
    if layout is not None:
        override = facts.num_gpu_blocks_override
        length = None if facts.max_model_len is None else facts.max_model_len.value
        available = None if budget is None else budget.stage_available_bytes
        planned = plan_pool(
            layout,
            available,
            None if override is None else override.value,
            length,
            reserves_null_block=facts.rules.reserves_null_block,
        )
        if planned is not None and planned.num_blocks < 1:
            reasons.append(less_than_a_block(planned, layout))
        else:
            pool = planned
    return Prediction(layout=layout, budget=budget, pool=pool, cannot_predict=tuple(reasons))


def plan_pool(
    layout: KvLayout,
    available_bytes: tuple[int, ...] | None,
    num_blocks_override: int | None,
    max_model_len: int | None,
    *,
    fit_length: bool = False,
    reserves_null_block: bool = True,
) -> PredictedPool | None:
    """Bytes -> blocks, tokens, and whether vLLM starts; None where there is neither a number of bytes nor of blocks.

    `num_blocks = available // bytes_per_block`, the fewest of all stages; one block of it is the null block, so
    a start needs `available - bytes_per_block >= bytes_per_block * blocks(max_model_len)` on every stage;
    `max_concurrency = num_blocks / blocks(max_model_len)`; `tokens = int(max_concurrency * max_model_len)`.
    vLLM 0.33.0: `v1/core/kv_cache_planning.py` get_kv_cache_configs, `v1/core/kv_cache_utils.py`
    update_kv_cache_capacity.

    Args:
        available_bytes: per GPU, for each pipeline stage; None when only a block count is given.
        num_blocks_override: `--num-gpu-blocks-override`; it stands for the bytes in every sum.
        fit_length: `--max-model-len -1`: take the longest length up to max_model_len that starts.
        reserves_null_block: a start needs room for the null block as well (`ReleaseRules.reserves_null_block`).
    """
    per_block = layout.stage_bytes_per_block
    if num_blocks_override is not None:
        available_bytes = tuple(num_blocks_override * size for size in per_block)
    if available_bytes is None:
        return None
    blocks = [have // size for have, size in zip(available_bytes, per_block, strict=True)]
    num_blocks = min(blocks)
    longest = boots = needed = requests = tokens = blocks_per_request = None
    if max_model_len is not None:
        # The null block is set aside; what is left of each stage must hold the whole request.
        longest = layout.longest_session(max(0, num_blocks - reserves_null_block), max_model_len)
        needed = tuple(size * layout.blocks_per_session(max_model_len) for size in per_block)
        if fit_length and longest:
            max_model_len = longest
        boots = longest >= max_model_len
        blocks_per_request = layout.blocks_per_session(max_model_len)
        # Of a pool without a block vLLM never gets to say a number.
        if num_blocks:
            requests = num_blocks / blocks_per_request
            tokens = int(requests * max_model_len)
    pool_bytes = num_blocks * layout.bytes_per_block
    return PredictedPool(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        blocks_per_request=blocks_per_request,
        pool_tokens=tokens,
        max_concurrency=requests,
        pool_bytes=pool_bytes,
        unused_bytes=None
        if num_blocks_override is not None
        else available_bytes[per_block.index(layout.bytes_per_block)] - pool_bytes,
        needed_bytes=needed,
        boots=boots,
        longest_bootable=longest,
    )


def less_than_a_block(pool: PredictedPool, layout: KvLayout) -> str:
    """Why a pool has no block, one sentence."""
    return f"the pool's {pool.unused_bytes} bytes are less than one block of {layout.bytes_per_block} bytes"


def logged_tokens(pool: PredictedPool, layout: KvLayout, facts: EngineFacts) -> int | None:
    """Tokens that the start-up log of the release names; None where max_model_len is not known.

    They are the pool's tokens from 0.20.1 on. Before: blocks // groups x the smallest block size of a group, over all
    GPUs that share a context (`v1/core/kv_cache_utils.py` _report_kv_cache_config of 0.20.0). Where groups differ, such
    tokens are those of no request.
    """
    if facts.rules.logs_tokens_by_concurrency:
        return pool.pool_tokens
    smallest = min(group.block_size for group in layout.groups)
    parallelism = facts.parallelism
    sharing = parallelism.decode_context * parallelism.prefill_context
    return pool.num_blocks // layout.num_kv_groups * smallest * sharing
