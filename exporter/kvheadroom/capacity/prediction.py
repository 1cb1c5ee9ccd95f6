"""Facts -> what vLLM would allocate. Flags, files and hardware in; never a result of the live engine."""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.memory import PoolBudget, plan_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPool:
    """The pool of one engine.

    Attributes:
        num_blocks: with the null block, as vLLM counts.
        blocks_per_request: blocks of one request of max_model_len; None when that is not known.
        pool_tokens: vLLM's `kv_cache_size_tokens`; None when max_model_len is not known.
        max_concurrency: requests of max_model_len that fit; None when max_model_len is not known.
        pool_bytes: `num_blocks * bytes_per_block`, one GPU.
        unused_bytes: what the budget leaves after the last whole block, one GPU; None when the
            number of blocks is given by a flag.
    """

    num_blocks: int
    blocks_per_request: int | None
    pool_tokens: int | None
    max_concurrency: float | None
    pool_bytes: int
    unused_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """As much as can be predicted, and why not more.

    Attributes:
        cannot_predict: what is known but not modelled, each one sentence. What is not known stands in
            `EngineFacts.missing`.
    """

    layout: KvLayout | None
    budget: PoolBudget | None
    pool: PredictedPool | None
    cannot_predict: tuple[str, ...]


def predict(facts: EngineFacts) -> Prediction:
    """What vLLM would allocate for these facts.

    `num_blocks = available // bytes_per_block`; `max_concurrency = num_blocks / blocks(max_model_len)`;
    `tokens = int(max_concurrency * max_model_len)`. vLLM 0.33.0: `v1/core/kv_cache_planning.py`
    get_kv_cache_configs, `v1/core/kv_cache_utils.py` update_kv_cache_capacity.
    """
    reasons = list(facts.obstacles)
    layout = plan_layout(facts)
    if isinstance(layout, str):
        reasons.append(layout)
        layout = None
    budget = plan_budget(facts)
    if isinstance(budget, str):
        reasons.append(budget)
        budget = None
    pool = None
    if layout is not None:
        num_blocks = None
        if facts.num_gpu_blocks_override is not None:
            num_blocks = facts.num_gpu_blocks_override.value
        elif budget is not None:
            num_blocks = budget.available_bytes // layout.bytes_per_block
        if num_blocks is not None and num_blocks < 1:
            reasons.append(
                f"the pool's {budget.available_bytes if budget else 0} bytes are less than one block "
                f"of {layout.bytes_per_block} bytes"
            )
        elif num_blocks is not None:
            pool = _pool(facts, layout, budget, num_blocks)
    return Prediction(layout=layout, budget=budget, pool=pool, cannot_predict=tuple(reasons))


def _pool(facts: EngineFacts, layout: KvLayout, budget: PoolBudget | None, num_blocks: int) -> PredictedPool:
    max_concurrency = pool_tokens = blocks_per_request = None
    if facts.max_model_len is not None:
        length = facts.max_model_len.value
        blocks_per_request = layout.blocks_per_session(length)
        max_concurrency = num_blocks / blocks_per_request
        pool_tokens = int(max_concurrency * length)
    pool_bytes = num_blocks * layout.bytes_per_block
    return PredictedPool(
        num_blocks=num_blocks,
        blocks_per_request=blocks_per_request,
        pool_tokens=pool_tokens,
        max_concurrency=max_concurrency,
        pool_bytes=pool_bytes,
        unused_bytes=None if budget is None else budget.available_bytes - pool_bytes,
    )
