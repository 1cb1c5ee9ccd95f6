"""What one start of an engine tells of the overhead, and which starts tell nothing.

vLLM gives the pool what the budget leaves (`v1/worker/gpu_worker.py` determine_available_memory, 0.33.0), so one start measures
`overhead = ceil(total * gpu_memory_utilization) - weights - pool`, with total and weights as the raw prediction has them. What those are wrong
by is in it, and so it corrects the prediction of the next start of the same kind. A start is never used for its own calibrated figure.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.overhead import EDITION, estimate_overhead
from kvheadroom.capacity.rank_weights import RankWeights, weights_of
from kvheadroom.capacity.readings import EngineSnapshot

MOST_FOREIGN_RATIO = 0.05
"""Share of a GPU that may be taken before vLLM's first look at it: its context, and NCCL from 0.11.0 on, take up to 4.0% in public logs."""
MOST_OVERHEAD_RATIO = 0.5
"""Share of a GPU that an overhead may be; of 107 public starts the largest but one is 14%, and one of 40% kept workspaces for a million tokens."""


class Exclusion(StrEnum):
    """Why a start is no sample. A closed list."""

    COLD_START = "cold_start"
    FAILED_START = "failed_start"
    UNFINISHED_START = "unfinished_start"
    FOREIGN_MEMORY = "foreign_memory"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    IMPOSSIBLE = "impossible"
    POOL_BY_FLAG = "pool_by_flag"
    PIPELINE_STAGES = "pipeline_stages"
    UNKNOWN = "unknown"


class SampleSource(StrEnum):
    """Where a sample was taken. A closed list."""

    LOG = "log"
    FLEET = "fleet"
    PROMETHEUS = "prometheus"


@dataclass(frozen=True, slots=True)
class Excluded:
    """A start that is no sample; `detail` is one sentence."""

    reason: Exclusion
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSample:
    """One start of one engine.

    Attributes:
        start: what tells the start from every other; never used for its own prediction.
        overhead_bytes: of one GPU, beside the weights and in the total that the raw prediction has; of the rank that left the least.
        uncertainty_bytes: by so much it may be off: the last decimal of a log, or what is rounded down to whole blocks.
        estimated_bytes: what was estimated before, None where nothing could be, by this `edition` of the estimate.
        measured_weights_bytes: of one GPU, where a log tells; None elsewhere.
        is_cold: the model was compiled anew, which only a log tells.
        measured_at: unix seconds; None where only the day of a year is told.
        model: its name, for people.
        evidence: where it stands, for people.
    """

    key: CalibrationKey
    start: str
    source: SampleSource
    overhead_bytes: int
    uncertainty_bytes: int
    estimated_bytes: int | None
    edition: int = EDITION
    measured_weights_bytes: int | None = None
    is_cold: bool = False
    measured_at: float | None = None
    model: str
    evidence: str

    @property
    def residual_bytes(self) -> int | None:
        """Measured minus estimated; None where it would be estimated otherwise now."""
        if self.estimated_bytes is None or self.edition != EDITION:
            return None
        return self.overhead_bytes - self.estimated_bytes


def sample_of_engine(
    facts: EngineFacts,
    snapshot: EngineSnapshot,
    observation: Observation,
    *,
    start: str,
    foreign_bytes: int | None,
    measured_at: float,
    evidence: str,
) -> CalibrationSample | Excluded:
    """What the pool of a running engine tells.

    Args:
        foreign_bytes: of other processes on its GPUs now, the most of one; None where nobody knows.
    """
    if snapshot.sleeping:
        return Excluded(Exclusion.ASLEEP, "it sleeps, and has given its memory up")
    base = basis_of(facts)
    if isinstance(base, Excluded):
        return base
    if facts.pipeline_parallel_size.value > 1:
        return Excluded(Exclusion.PIPELINE_STAGES, "which pipeline stage left the least is not told")
    if foreign_bytes is not None and foreign_bytes > MOST_FOREIGN_RATIO * base.total_bytes:
        return Excluded(
            Exclusion.FOREIGN_MEMORY, f"other processes hold {foreign_bytes / GIB:,.2f} GiB of its GPU"
        )
    if snapshot.blocks_are_shared:
        return Excluded(Exclusion.UNKNOWN, "its page adds up the blocks of several engines")
    if not observation.pool_bytes or not observation.num_blocks:
        return Excluded(Exclusion.UNKNOWN, observation.unknown or "the bytes of its pool are not known")
    overhead = base.requested_bytes - max(base.weights.stage_bytes) - observation.pool_bytes
    rounding = observation.pool_bytes // observation.num_blocks - 1
    return checked_sample(
        facts,
        base,
        overhead,
        rounding,
        start=start,
        source=SampleSource.FLEET,
        model=snapshot.model_name or "",
        measured_at=measured_at,
        evidence=evidence,
    )


@dataclass(frozen=True, slots=True)
class Basis:
    """What the raw prediction says, in bytes of one GPU."""

    key: CalibrationKey
    total_bytes: int
    requested_bytes: int
    weights: RankWeights


def basis_of(facts: EngineFacts) -> Basis | Excluded:
    """What a start of such an engine is measured against; or why none tells anything.

    Args:
        facts: as the raw prediction takes them.
    """
    if not facts.pool_from_hbm:
        return Excluded(Exclusion.POOL_BY_FLAG, "a flag gives the pool, and nothing is left over")
    if facts.obstacles:
        return Excluded(Exclusion.UNKNOWN, facts.obstacles[0])
    key = key_of(facts)
    if isinstance(key, str):
        return Excluded(Exclusion.UNKNOWN, key)
    weights = weights_of(facts)
    if weights is None or isinstance(weights, str):
        return Excluded(Exclusion.UNKNOWN, weights or "the model's weights are not known")
    if facts.hbm_bytes is None:
        return Excluded(Exclusion.UNKNOWN, "the GPU is not known")
    total = facts.hbm_bytes.value
    requested = math.ceil(total * facts.gpu_memory_utilization.value)
    return Basis(key, total, requested, weights)


def checked_sample(
    facts: EngineFacts,
    base: Basis,
    overhead_bytes: int,
    uncertainty_bytes: int,
    *,
    settings: str = "",
    **rest: Any,
) -> CalibrationSample | Excluded:
    """A sample, unless no GPU can have such an overhead.

    Args:
        base: of the facts.
        overhead_bytes: as it was measured; a rounded pool may leave it a little below zero.
        settings: put to those of the key, as `name=value`.
        rest: of the sample.
    """
    if overhead_bytes < -uncertainty_bytes:
        return Excluded(
            Exclusion.IMPOSSIBLE,
            f"weights and pool are {-overhead_bytes / GIB:,.2f} GiB more than gpu_memory_utilization allows: the weights, the GPU's memory or "
            "the utilization are not what is taken here",
        )
    if overhead_bytes > MOST_OVERHEAD_RATIO * base.total_bytes:
        return Excluded(
            Exclusion.IMPOSSIBLE,
            f"{overhead_bytes / GIB:,.2f} GiB of overhead are more than half of the GPU: the weights, the GPU's memory or the parallel sizes "
            "are not what is taken here",
        )
    estimate = estimate_overhead(facts)
    key = base.key
    if settings:
        together = " ".join(sorted([*key.settings.split(), settings]))
        key = CalibrationKey(key.geometry, key.weight_format, key.gpu, key.parallelism, key.release, together)
    return CalibrationSample(
        key=key,
        overhead_bytes=max(0, overhead_bytes),
        uncertainty_bytes=uncertainty_bytes,
        estimated_bytes=None if isinstance(estimate, str) else estimate.total_bytes,
        **rest,
    )
