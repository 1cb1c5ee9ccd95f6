"""Every intermediate figure of a plan, in the order in which it is made, with its formula and source."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvheadroom.capacity.article import SimpleSum
from kvheadroom.capacity.deployment import DeploymentPlan
from kvheadroom.capacity.memory import PoolBudget

Value = int | float | str | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number.

    Attributes:
        value: a tuple, first stage first, where pipeline stages differ.
        unit: `B`, `tokens`, `blocks`, `sessions`, `GPUs`, ... or empty.
        how: the formula, or what it is.
        source: where the number or the formula is from.
    """

    name: str
    value: Value
    unit: str
    how: str
    source: str


PLANNING = "vLLM 0.33.0 v1/core/kv_cache_planning.py"


def figures(plan: DeploymentPlan) -> tuple[Figure, ...]:
    """As many as could be made."""
    return (*_memory(plan), *_layout(plan), *_pool(plan), *_sessions(plan), *_fleet(plan))


def _memory(plan: DeploymentPlan) -> Iterator[Figure]:
    facts = plan.facts
    if facts.pool_from_hbm and facts.hbm_bytes is not None:
        hbm = facts.hbm_bytes
        yield Figure(
            name="gpu_memory_total",
            value=hbm.value,
            unit="B",
            how="of one GPU, as CUDA reports it",
            source=hbm.note or str(hbm.origin),
        )
        yield Figure(
            name="gpu_memory_utilization",
            value=facts.gpu_memory_utilization.value,
            unit="",
            how="share of it that vLLM may use",
            source=facts.gpu_memory_utilization.note or "given",
        )
    weights = plan.weights
    if weights is not None and weights.plan is not None:
        for kind in weights.plan.terms:
            copied = "the same on every GPU" if kind.replicated else "one GPU's share"
            yield Figure(
                name=f"weights of {kind.name}",
                value=_staged(kind.stage_bytes),
                unit="B",
                how=copied,
                source=weights.origin,
            )
    for term in plan.terms:
        value: Value = term.bytes
        if term.term == "weights" and weights is not None:
            value = _staged(tuple(-held for held in weights.stage_bytes))
        yield Figure(name=term.term, value=value, unit="B", how="a term of the sum", source=term.origin)
    if isinstance(plan.budget, PoolBudget):
        yield Figure(
            name="kv_cache_memory",
            value=_staged(plan.budget.stage_available_bytes),
            unit="B",
            how="sum of the terms: what one GPU has for KV blocks",
            source="vLLM 0.33.0 v1/worker/gpu_worker.py determine_available_memory",
        )


def _layout(plan: DeploymentPlan) -> Iterator[Figure]:
    layout = plan.layout
    if layout is None:
        return
    yield Figure(
        name="kv_cache_dtype",
        value=layout.kv_dtype,
        unit="",
        how="type of the cache, as vLLM reports it",
        source=plan.facts.kv_cache_dtype.note or "given",
    )
    yield Figure(
        name="block_size",
        value=layout.block_size,
        unit="tokens",
        how="of one block on one GPU",
        source="vLLM 0.33.0 platforms/interface.py update_block_size_for_backend",
    )
    yield Figure(
        name="bytes_per_block",
        value=_staged(layout.stage_bytes_per_block),
        unit="B",
        how=layout.how,
        source=f"{PLANNING} get_kv_cache_config_from_groups",
    )
    yield Figure(
        name="bytes_per_token",
        value=_staged(layout.stage_bytes_per_token),
        unit="B",
        how="what each further token of a long session takes of one GPU"
        + ("" if layout.holds_every_token else "; a fixed part per session is not in it"),
        source="bytes_per_block / tokens of a block",
    )


def _pool(plan: DeploymentPlan) -> Iterator[Figure]:
    layout, pool = plan.layout, plan.pool
    if layout is None or pool is None:
        return
    given = plan.facts.num_gpu_blocks_override is not None
    yield Figure(
        name="num_blocks",
        value=pool.num_blocks,
        unit="blocks",
        how="given" if given else "kv_cache_memory // bytes_per_block, the fewest of all stages",
        source=f"{PLANNING} get_kv_cache_configs",
    )
    yield Figure(
        name="null_block",
        value=1,
        unit="blocks",
        how="counted in num_blocks and never handed out",
        source="vLLM 0.33.0 v1/core/block_pool.py BlockPool",
    )
    if isinstance(plan.budget, PoolBudget):
        stages = zip(plan.budget.stage_available_bytes, layout.stage_bytes_per_block, strict=True)
        yield Figure(
            name="unused",
            value=_staged(tuple(available - pool.num_blocks * size for available, size in stages)),
            unit="B",
            how="left over after the last whole block",
            source="kv_cache_memory - num_blocks x bytes_per_block",
        )
    if (
        pool.max_model_len is None
        or pool.pool_tokens is None
        or pool.blocks_per_request is None
        or pool.max_concurrency is None
        or pool.needed_bytes is None
        or pool.longest_bootable is None
    ):
        return
    length = plan.facts.max_model_len
    yield Figure(
        name="max_model_len",
        value=pool.max_model_len,
        unit="tokens",
        how="the longest request",
        source="given" if length is None else length.note or "given",
    )
    yield Figure(
        name="blocks_per_request",
        value=pool.blocks_per_request,
        unit="blocks",
        how="of one request of max_model_len, over all groups of layers",
        source="vLLM 0.33.0 v1/kv_cache_interface.py",
    )
    yield Figure(
        name="needed",
        value=_staged(pool.needed_bytes),
        unit="B",
        how="bytes_per_block x blocks of one request of the max_model_len that was asked for; vLLM starts if "
        "kv_cache_memory - bytes_per_block >= needed on every stage",
        source=f"{PLANNING} get_kv_cache_configs",
    )
    yield Figure(
        name="longest_max_model_len",
        value=pool.longest_bootable,
        unit="tokens",
        how="the longest that starts, up to max_model_len",
        source=f"{PLANNING} get_kv_cache_configs",
    )
    yield Figure(
        name="max_concurrency",
        value=pool.max_concurrency,
        unit="requests",
        how="num_blocks / blocks_per_request",
        source="vLLM 0.33.0 v1/core/kv_cache_utils.py update_kv_cache_capacity",
    )
    yield Figure(
        name="kv_cache_size_tokens",
        value=pool.pool_tokens,
        unit="tokens",
        how="int(max_concurrency x max_model_len): the pool as vLLM reports it, of one engine",
        source="vLLM 0.33.0 v1/core/kv_cache_utils.py update_kv_cache_capacity",
    )


def _sessions(plan: DeploymentPlan) -> Iterator[Figure]:
    for fit in plan.fits:
        length = f"{fit.session_tokens:,}"
        yield Figure(
            name=f"blocks of {length} tokens",
            value=fit.blocks,
            unit="blocks",
            how="of one session, over all groups of layers",
            source="vLLM 0.33.0 v1/kv_cache_interface.py",
        )
        yield Figure(
            name=f"bytes of {length} tokens",
            value=fit.session_bytes,
            unit="B",
            how=f"blocks x bytes_per_block of one GPU, {fit.bytes_per_token:,.1f} B per token",
            source="of the widest stage",
        )
        yield Figure(
            name=f"sessions of {length} tokens",
            value=fit.sessions,
            unit="sessions",
            how="num_blocks / blocks of one session, of one engine",
            source="vLLM 0.33.0 v1/core/kv_cache_utils.py update_kv_cache_capacity",
        )
        yield Figure(
            name=f"whole sessions of {length} tokens",
            value=fit.whole_sessions,
            unit="sessions",
            how="floor((num_blocks - 1) / blocks of one session)",
            source="the null block set aside",
        )


def _fleet(plan: DeploymentPlan) -> Iterator[Figure]:
    fleet = plan.fleet
    yield Figure(
        name="gpus_per_replica",
        value=fleet.gpus_per_replica,
        unit="GPUs",
        how="TP x PP x PCP x DP",
        source="vLLM 0.33.0 config/parallel.py world_size_across_dp",
    )
    yield Figure(
        name="replicas",
        value=fleet.replicas,
        unit="replicas",
        how=f"{fleet.gpus} GPUs // gpus_per_replica, {fleet.idle_gpus} GPUs idle",
        source="--gpus" if plan.request.gpus is not None else "one replica",
    )
    if fleet.tokens is not None:
        yield Figure(
            name="fleet_tokens",
            value=fleet.tokens,
            unit="tokens",
            how=f"kv_cache_size_tokens x {fleet.engines} engines x replicas",
            source="sum",
        )


def _staged(values: tuple[float, ...]) -> Value:
    return values[0] if len(set(values)) == 1 else values


def sum_figures(simple: SimpleSum, session_tokens: tuple[int, ...]) -> Iterator[Figure]:
    """The sum on paper, line by line."""
    lines: tuple[tuple[str, float, str, str], ...] = (
        ("gpu_memory_marketed", simple.hbm_bytes, "B", "GB on the box of one GPU, 1 GB = 10^9 B"),
        ("gpu_memory_utilization", simple.utilization, "", "share of it that vLLM may use"),
        ("budget", simple.budget_bytes, "B", "gpu_memory_marketed x gpu_memory_utilization"),
        ("overhead", simple.overhead_bytes, "B", "per GPU, neither weights nor KV"),
        ("weights", simple.weights_bytes, "B", "of the whole checkpoint"),
        ("weights_per_gpu", simple.weights_per_gpu_bytes, "B", f"weights / TP {simple.tensor_parallel}"),
        ("kv", simple.kv_bytes, "B", "budget - overhead - weights_per_gpu"),
        ("bytes_per_token", simple.bytes_per_token, "B", "of one GPU, all layers"),
    )
    for name, value, unit, how in lines:
        yield Figure(name=name, value=value, unit=unit, how=how, source="the sum on paper")
    if simple.tokens is None:
        return
    yield Figure(
        name="tokens",
        value=simple.tokens,
        unit="tokens",
        how=f"kv x DCP {simple.decode_context} / bytes_per_token",
        source="the sum on paper",
    )
    for length in session_tokens:
        sessions = simple.sessions(length)
        if sessions is not None:
            yield Figure(
                name=f"sessions of {length:,} tokens",
                value=sessions,
                unit="sessions",
                how="tokens / tokens of a session",
                source="the sum on paper",
            )
