"""What vLLM checks as it starts: memory that is free before it loads anything, and a KV cache for one longest request.

Sources: vLLM 0.33.0 `v1/worker/utils.py` request_memory, `v1/core/kv_cache_planning.py` _check_enough_kv_cache_memory.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.deployment import DeploymentPlan
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.memory import PoolBudget

OWN_RATIO = 0.04
"""Share of a GPU that vLLM's own context, cuBLAS and NCCL take before it looks at what is free; the most in public logs."""


class FreeMemory(StrEnum):
    """Whether enough is free as a start begins. A closed list.

    `close`: only just, and what the start's own context takes decides; `as_now`: it asks for no more than the start that runs did.
    """

    ENOUGH = "enough"
    CLOSE = "close"
    TOO_LITTLE = "too_little"
    AS_NOW = "as_now"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """Free memory against `ceil(total * gpu_memory_utilization)`, of one GPU.

    Attributes:
        requested_bytes: None on a CPU, or where the GPU is not known.
        free_bytes: at most, once the engine that runs has ended; None where nobody knows what others use.
        more_gpus: that it needs beside those of the replica that runs; of them nothing is known.
    """

    verdict: FreeMemory
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    more_gpus: int = 0


def check_memory(plan: DeploymentPlan, others_bytes: int | None, running: DeploymentPlan) -> MemoryCheck:
    """Whether a start finds enough free memory in place of the engine that runs.

    vLLM asks so much whether or not a flag sizes the pool.

    Args:
        others_bytes: what anything else uses on one of its GPUs, the most; None where nobody knows.
        running: the engine that runs.
    """
    facts, now = plan.facts, running.facts
    more = max(0, plan.fleet.gpus_per_replica - running.fleet.gpus_per_replica)
    if facts.platform.value == CPU or facts.hbm_bytes is None:
        return MemoryCheck(verdict=FreeMemory.UNKNOWN)
    total = facts.hbm_bytes.value
    requested = math.ceil(total * facts.gpu_memory_utilization.value)
    same = facts.gpu == now.gpu and now.hbm_bytes is not None and now.hbm_bytes.value == total
    free = total - others_bytes if same and others_bytes is not None else None
    if free is not None and requested > free:
        verdict = FreeMemory.TOO_LITTLE
    elif free is not None and requested <= free - OWN_RATIO * total:
        verdict = FreeMemory.ENOUGH
    elif same and facts.gpu_memory_utilization.value <= now.gpu_memory_utilization.value:
        verdict = FreeMemory.AS_NOW
    else:
        verdict = FreeMemory.UNKNOWN if free is None else FreeMemory.CLOSE
    return MemoryCheck(
        verdict=verdict,
        requested_bytes=requested,
        total_bytes=total,
        free_bytes=free,
        more_gpus=more if same else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCheck:
    """The KV cache of one request of max_model_len against what is there, on the pipeline stage with the least to spare.

    Attributes:
        available_bytes: without the null block, where the release sets it aside.
        longest: the longest up to max_model_len that starts, 0 where none does; None where that is not known.
    """

    max_model_len: int
    needed_bytes: int
    available_bytes: int
    longest: int | None

    @property
    def passes(self) -> bool:
        """Whether vLLM goes on."""
        return self.needed_bytes <= self.available_bytes

    @property
    def error(self) -> str:
        """The first sentences of vLLM's own error; empty where it goes on."""
        if self.passes:
            return ""
        estimated = (
            f" Based on the available memory, the estimated maximum model length is {self.longest}."
            if self.longest
            else ""
        )
        return (
            f"To serve at least one request with the model's max seq len ({self.max_model_len}), ({_gib(self.needed_bytes)} GiB KV "
            f"cache is needed, which is larger than the available KV cache memory ({_gib(self.available_bytes)} GiB).{estimated}"
        )


def _gib(size: int) -> str:
    """As vLLM's `format_gib` writes it."""
    return f"{round(size / GIB, 2)}"


def check_kv_cache(plan: DeploymentPlan) -> KvCheck | None:
    """The check of a planned start; None where the pool or the length is not known, or there is no room at all."""
    layout, pool = plan.layout, plan.pool
    if layout is None or pool is None or pool.max_model_len is None or pool.blocks_per_request is None:
        return None
    sizes = layout.stage_bytes_per_block
    override = plan.facts.num_gpu_blocks_override
    if isinstance(plan.budget, PoolBudget):
        available = plan.budget.stage_available_bytes
    elif override is not None:
        available = tuple(override.value * size for size in sizes)
    else:
        return None
    blocks = pool.blocks_per_request
    reserved = 1 if plan.facts.rules.reserves_null_block else 0
    stages = [
        (have - reserved * size - blocks * size, blocks * size, have - reserved * size)
        for have, size in zip(available, sizes, strict=True)
    ]
    _, needed, left = min(stages)
    return KvCheck(
        max_model_len=pool.max_model_len,
        needed_bytes=needed,
        available_bytes=left,
        longest=pool.longest_bootable,
    )
