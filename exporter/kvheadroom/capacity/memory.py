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


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A sum that leaves no byte for KV blocks; as text, by how much, in GB (10^9 bytes)."""

    utilization: float
    terms: tuple[MemoryTerm, ...]

    @property
    def missing_bytes(self) -> int:
        """Bytes of one GPU that weights and overhead are over what the utilization allows."""
        return -sum(term.bytes for term in self.terms)

    def __str__(self) -> str:
        """One sentence."""
        size = {term.term: term.bytes for term in self.terms}
        weights, overhead = -size["weights"], -size["overhead"]
        requested = size["hbm_total"] + size["outside_utilization"]
        allowed = f"the {requested / 1e9:.2f} GB that gpu_memory_utilization={self.utilization:g} allows"
        if weights > requested:
            over = (weights - requested) / 1e9
            return f"the weights alone ({weights / 1e9:.2f} GB per GPU) exceed {allowed}, by {over:.2f} GB"
        return (
            f"weights ({weights / 1e9:.2f} GB per GPU) and overhead ({overhead / 1e9:.2f} GB) leave nothing of {allowed}: "
            f"{self.missing_bytes / 1e9:.2f} GB too much"
        )


def plan_budget(facts: EngineFacts) -> PoolBudget | NoRoom | str | None:
    """The budget; a string says why it is not known; None when facts are missing or a block count is given."""
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
        return NoRoom(utilization.value, terms)
    return PoolBudget(available, terms)
