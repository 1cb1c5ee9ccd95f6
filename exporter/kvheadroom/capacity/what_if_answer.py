"""What `what_if` answers: the engine that runs, beside other ways to start it."""

from dataclasses import dataclass

from kvheadroom.capacity.calibrated_plan import CalibratedPlan, PlannedInterval
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.running_server import Change, RunningServer
from kvheadroom.capacity.startup_check import FreeMemory, KvCheck, MemoryCheck

NOT_MODELLED = (
    "Room is planned, not speed: no latency, no throughput, no quality of the answers with another type or draft.",
    "Other processes on the GPUs are taken to stay as they are.",
    "Overheads move with drivers, kernels, the sizes that CUDA graphs are captured for, and what libraries buffer.",
    "Flags that nobody told are taken as vLLM's defaults, before and after.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Sessions of one length.

    Attributes:
        of_engine: of one engine, `fewest` to `most` over the interval of the overhead; of the engine that runs, as observed.
        whole: that really fit at once, the null block set aside.
        per_gpu: of a replica, over its GPUs.
        in_all: on the same number of GPUs for all rows, in whole replicas.
    """

    session_tokens: int
    of_engine: float
    whole: int
    fewest: float
    most: float
    per_gpu: float
    in_all: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The engine that runs.

    Attributes:
        plan: what is predicted of it, without any of its results.
        sample: what its pool tells of its overhead; `Excluded` says why nothing.
        engines: behind the address.
    """

    plan: DeploymentPlan
    snapshot: EngineSnapshot
    observation: Observation
    engines: int
    sample: CalibrationSample | Excluded
    sessions: tuple[Sessions, ...]
    replicas: int

    @property
    def knows_gpus(self) -> bool:
        """Whether somebody told how many GPUs share a layer; a page of vLLM does not."""
        return not self.plan.facts.tensor_parallel_size.assumed

    @property
    def off_ratio(self) -> float | None:
        """Observed pool tokens / predicted - 1; None where one is not known."""
        observed = self.observation.pool_tokens
        predicted = None if self.plan.pool is None else self.plan.pool.pool_tokens
        return observed / predicted - 1 if observed is not None and predicted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRow(PlannedInterval):
    """One other start, with the overhead that is known best and at the ends of its interval.

    Attributes:
        raw: as it is predicted, with the estimated overhead.
        calibrated: where `plan` is from; a string says why nothing that was measured is used.
        notes: what the change does that is easily overlooked, each one sentence.
    """

    change: Change
    raw: DeploymentPlan
    calibrated: CalibratedPlan | str
    memory: MemoryCheck
    kv_cache: KvCheck | None
    sessions: tuple[Sessions, ...]
    replicas: int
    notes: tuple[str, ...]

    @property
    def starts(self) -> bool:
        """Whether vLLM starts, by all that is known, and there are GPUs for a replica."""
        has_memory = self.memory.verdict is not FreeMemory.TOO_LITTLE
        return self.plan.outcome is Outcome.STARTS and has_memory and self.replicas > 0

    @property
    def too_long(self) -> tuple[int, ...]:
        """Of the lengths that were asked for, those above max_model_len."""
        longest = None if self.plan.pool is None else self.plan.pool.max_model_len
        return tuple(n for n in self.plan.request.session_tokens if longest is not None and n > longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A running engine and other ways to start it.

    Attributes:
        gpus: of which all rows are counted together.
        session_tokens: lengths that sessions are counted of.
        reuse: what a tier of another size would find; a string says why that is not known; None where nobody asks.
    """

    server: RunningServer
    now: Now
    rows: tuple[WhatIfRow, ...]
    gpus: int
    session_tokens: tuple[int, ...]
    reuse: Reuse | str | None = None
