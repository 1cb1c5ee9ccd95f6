"""Bytes of one GPU that vLLM gives to the KV pool.

Sources: vLLM 0.33.0 `v1/worker/gpu_worker.py` determine_available_memory, `v1/worker/utils.py`
request_memory: `requested = ceil(total * gpu_memory_utilization)`, then weights, activations, context
and CUDA graphs are taken off, on each GPU by itself. `kv_cache_memory_bytes` replaces the whole sum.
"""

import math
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.weights import WeightPlan, plan_weights

# Files may hold copies of shared tensors, buffers and their own headers beside the weights.
_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One line of the sum: what it is, its bytes (taken off when negative), where it comes from."""

    term: str
    bytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Bytes per GPU for KV blocks, and the sum that led there.

    Attributes:
        stage_available_bytes: on each pipeline stage.
        terms: of the stage that is left the fewest.
    """

    stage_available_bytes: tuple[int, ...]
    terms: tuple[MemoryTerm, ...]

    @property
    def available_bytes(self) -> int:
        """Bytes on the stage that is left the fewest."""
        return min(self.stage_available_bytes)


def plan_budget(facts: EngineFacts) -> PoolBudget | str | None:
    """The budget; a string says why there is none; None when facts are missing or a block count is given."""
    stages = facts.pipeline_parallel_size.value
    if facts.num_gpu_blocks_override is not None:
        return None
    if facts.kv_cache_memory_bytes is not None:
        fact = facts.kv_cache_memory_bytes
        said = MemoryTerm("kv_cache_memory_bytes", fact.value, fact.origin)
        return PoolBudget((fact.value,) * stages, (said,))
    if facts.hbm_bytes is None:
        return None
    weights = _weights(facts)
    if weights is None or isinstance(weights, str):
        return weights
    stage_weights, origin = weights
    utilization, overhead = facts.gpu_memory_utilization, facts.overhead_bytes
    requested = math.ceil(facts.hbm_bytes.value * utilization.value)
    terms = (
        MemoryTerm("hbm_total", facts.hbm_bytes.value, facts.hbm_bytes.origin),
        MemoryTerm("outside_utilization", requested - facts.hbm_bytes.value, utilization.origin),
        MemoryTerm("weights", -max(stage_weights), origin),
        MemoryTerm("overhead", -overhead.value, overhead.origin),
    )
    available = tuple(requested - held - overhead.value for held in stage_weights)
    if min(available) <= 0:
        return (
            f"weights ({max(stage_weights)} bytes per GPU) and overhead ({overhead.value}) leave nothing "
            f"of the {requested} bytes that gpu_memory_utilization={utilization.value:g} allows"
        )
    return PoolBudget(available, terms)


def _weights(facts: EngineFacts) -> tuple[tuple[int, ...], str] | str | None:
    """Bytes on a GPU of each stage, and where they are known from; a string or None says that they are not."""
    plan, given = plan_weights(facts), facts.weights_bytes
    if not isinstance(plan, str) and (given is None or _agrees(plan, given.value)):
        return plan.stage_bytes, Origin.MODEL_FILES
    if given is None:
        return None
    why = plan if isinstance(plan, str) else "config.json makes another size of weights"
    if facts.pipeline_parallel_size.value > 1:
        return f"how the weights are shared out over pipeline stages is not known: {why}"
    held = math.ceil(given.value / facts.tensor_parallel_size.value)
    return (held,), f"{given.origin}, divided by tensor_parallel_size: {why}"


def _agrees(plan: WeightPlan, given: int) -> bool:
    """Whether the size of a checkpoint is the plan's, with or without what this start does not load."""
    sizes = (plan.total_bytes, plan.total_bytes - plan.not_loaded_bytes)
    return any(abs(given - size) <= _TOLERANCE * size for size in sizes)
