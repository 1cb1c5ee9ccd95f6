"""Bytes of one GPU that vLLM gives to the KV pool.

Sources: vLLM 0.33.0 `v1/worker/gpu_worker.py` determine_available_memory, `v1/worker/utils.py`
request_memory: `requested = ceil(total * gpu_memory_utilization)`, then weights, activations, context
and CUDA graphs are taken off. `kv_cache_memory_bytes` replaces the whole sum.
"""

import math
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.overhead_parts import OverheadEstimate
from kvheadroom.capacity.rank_weights import RankWeights, weights_of


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
        stage_available_bytes: for each pipeline stage.
        terms: of the stage with the least.
        weights: what of it the weights are; None where a flag gives the bytes.
        overhead: what the overhead is made of; None where a flag gives the bytes, and where the overhead was said or guessed as a whole.
    """

    stage_available_bytes: tuple[int, ...]
    terms: tuple[MemoryTerm, ...]
    weights: RankWeights | None = None
    overhead: OverheadEstimate | None = None

    @property
    def available_bytes(self) -> int:
        """Of the stage with the least."""
        return min(self.stage_available_bytes)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A sum that leaves no byte for KV blocks; as text, by how much, in GB (10^9 bytes)."""

    utilization: float
    terms: tuple[MemoryTerm, ...]
    weights: RankWeights | None

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


def plan_budget(facts: EngineFacts, known: RankWeights | None = None) -> PoolBudget | NoRoom | str | None:
    """The budget; a string says why it is not known; None when facts are missing or a block count is given.

    Args:
        known: the weights, where they have been planned already.
    """
    if facts.num_gpu_blocks_override is not None or facts.has_empty_stages:
        return None
    stages = facts.pipeline_parallel_size.value
    if facts.kv_cache_memory_bytes is not None:
        fact = facts.kv_cache_memory_bytes
        return PoolBudget(
            (fact.value,) * stages, (MemoryTerm("kv_cache_memory_bytes", fact.value, fact.origin),)
        )
    weights = known or weights_of(facts)
    if facts.hbm_bytes is None or weights is None or isinstance(weights, str):
        return weights if isinstance(weights, str) else None
    utilization = facts.gpu_memory_utilization
    requested = math.ceil(facts.hbm_bytes.value * utilization.value)
    terms = (
        MemoryTerm("hbm_total", facts.hbm_bytes.value, facts.hbm_bytes.origin),
        MemoryTerm("outside_utilization", requested - facts.hbm_bytes.value, utilization.origin),
        MemoryTerm("weights", -max(weights.stage_bytes), weights.origin),
        MemoryTerm("overhead", -facts.overhead_bytes.value, facts.overhead_bytes.origin),
    )
    available = tuple(requested - held - facts.overhead_bytes.value for held in weights.stage_bytes)
    if min(available) <= 0:
        return NoRoom(utilization.value, terms, weights)
    return PoolBudget(available, terms, weights, facts.overhead_estimate)
