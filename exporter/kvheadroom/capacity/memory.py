"""Bytes of one GPU that vLLM gives to the KV pool.

Sources: vLLM 0.33.0 `v1/worker/gpu_worker.py` determine_available_memory, `v1/worker/utils.py`
request_memory: `requested = ceil(total * gpu_memory_utilization)`, then weights, activations, context
and CUDA graphs are taken off. `kv_cache_memory_bytes` replaces the whole sum.
"""

import math
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One line of the sum: what it is, its bytes (taken off when negative), where it comes from."""

    term: str
    bytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Bytes per GPU for KV blocks, and the sum that led there."""

    available_bytes: int
    terms: tuple[MemoryTerm, ...]


def plan_budget(facts: EngineFacts) -> PoolBudget | str | None:
    """The budget; a string says why there is none; None when facts are missing or a block count is given."""
    if facts.num_gpu_blocks_override is not None:
        return None
    if facts.kv_cache_memory_bytes is not None:
        fact = facts.kv_cache_memory_bytes
        return PoolBudget(fact.value, (MemoryTerm("kv_cache_memory_bytes", fact.value, fact.origin),))
    if facts.hbm_bytes is None or facts.weights_bytes is None:
        return None
    if facts.pipeline_parallel_size.value > 1:
        return "how the weights are shared out over pipeline stages is not modelled by this version"
    utilization, tp = facts.gpu_memory_utilization, facts.tensor_parallel_size
    requested = math.ceil(facts.hbm_bytes.value * utilization.value)
    weights = math.ceil(facts.weights_bytes.value / tp.value)
    terms = (
        MemoryTerm("hbm_total", facts.hbm_bytes.value, facts.hbm_bytes.origin),
        MemoryTerm("outside_utilization", requested - facts.hbm_bytes.value, utilization.origin),
        MemoryTerm("weights", -weights, facts.weights_bytes.origin),
        MemoryTerm("overhead", -facts.overhead_bytes.value, facts.overhead_bytes.origin),
    )
    available = sum(term.bytes for term in terms)
    if available <= 0:
        return (
            f"weights ({weights} bytes per GPU) and overhead ({facts.overhead_bytes.value}) leave nothing "
            f"of the {requested} bytes that gpu_memory_utilization={utilization.value:g} allows"
        )
    return PoolBudget(available, terms)
