"""A running engine -> what it would hold, and whether vLLM would start it, with other flags, another GPU or another release.

The engine that runs measures its own overhead by its pool. That figure is used for other starts alone: as it is where the change leaves
what the overhead depends on, and moved by the difference of the two estimates where it does not (`Calibration.learned`, `.carried`). Every
row is planned like any start: facts, layout, budget, pool. Nothing of it is scaled from what the engine holds now.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvheadroom.capacity.alternatives import spelt
from kvheadroom.capacity.calibrated_plan import CalibratedPlan, calibrate
from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, sample_of_engine
from kvheadroom.capacity.command_line import FITTED_LENGTH
from kvheadroom.capacity.deployment import (
    USUAL_SESSION_TOKENS,
    DeploymentPlan,
    Outcome,
    PlanRequest,
    plan_deployment,
)
from kvheadroom.capacity.facts import (
    AUTO_LENGTH,
    EngineFacts,
    Fact,
    MissingFact,
    OperatorFacts,
    Origin,
    ServerAnswers,
)
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.observation import Observation, observe
from kvheadroom.capacity.overhead import estimate_overhead
from kvheadroom.capacity.overhead_parts import OverheadEstimate
from kvheadroom.capacity.own_start import start_of as start_of_engine
from kvheadroom.capacity.own_start import without_replica
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot
from kvheadroom.capacity.sessions import count_sessions
from kvheadroom.capacity.startup_check import (
    FreeMemory,
    KvCheck,
    MemoryCheck,
    check_kv_cache,
    check_memory,
)
from kvheadroom.capacity.stored_model import ModelFiles

NOT_MODELLED = (
    "Room is planned, not speed: no latency, no throughput, no quality of the answers with another type or draft.",
    "Other processes on the GPUs are taken to stay as they are.",
    "Overheads move with drivers, kernels, the sizes that CUDA graphs are captured for, and what libraries buffer.",
    "Flags that nobody told are taken as vLLM's defaults, before and after.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """One server as it runs.

    Attributes:
        operator: what the operator says of it.
        facts: of one of its engines, as they were resolved.
        model_files: None where nobody has them.
        others_bytes: what anything else uses on one of its GPUs, the most; None where nobody knows.
        started_at, taken_at: unix seconds; None where the page tells no start.
    """

    replica: str
    url: str
    operator: OperatorFacts
    facts: EngineFacts
    snapshots: tuple[EngineSnapshot, ...]
    model_files: ModelFiles | None
    model_files_missing: MissingFact | None = None
    others_bytes: int | None = None
    started_at: float | None = None
    taken_at: float

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine with the fewest blocks: it is the first that is full."""
        told = [one for one in self.snapshots if one.num_blocks is not None]
        return min(told, key=lambda one: one.num_blocks or 0) if told else self.snapshots[0]

    @property
    def start(self) -> str:
        """What tells its start from every other."""
        return start_of_engine(self.replica, self.snapshot.engine, self.started_at, self.snapshot.num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done otherwise.

    Attributes:
        flags: by vLLM's names; None takes one away.
        draft_files: of a draft model that the flags name.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    gpu: str | None = None
    hbm_bytes: int | None = None
    version: str | None = None
    draft_files: ModelFiles | None = None

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self != Change()

    @property
    def label(self) -> str:
        """As on a command line."""
        words = [_spelt(name, value) for name, value in self.flags.items()]
        if self.gpu is not None:
            words.append(f"on {self.gpu}")
        if self.hbm_bytes is not None:
            words.append(f"on a GPU of {self.hbm_bytes / 1e9:.2f} GB")
        if self.version is not None:
            words.append(f"vLLM {self.version}")
        return " ".join(words) or "the same start again"


def _spelt(name: str, value: Any) -> str:
    if name == "speculative_config":
        draft = value or {"method": "mtp", "num_speculative_tokens": 0}
        tokens = draft.get("num_speculative_tokens")
        return f"--mtp {tokens}" if draft.get("method") == "mtp" else f"drafting by {draft.get('method')}"
    return spelt({name: value}) if value is not None else f"--{name.replace('_', '-')} 0"


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
class WhatIfRow:
    """One other start.

    Attributes:
        raw: as it is predicted, with the estimated overhead.
        plan: with the overhead that is known best; `fewest` and `most` at the ends of its interval.
        calibrated: where `plan` is from; a string says why nothing that was measured is used.
        notes: what the change does that is easily overlooked, each one sentence.
    """

    change: Change
    raw: DeploymentPlan
    plan: DeploymentPlan
    fewest: DeploymentPlan
    most: DeploymentPlan
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
    def is_sure(self) -> bool:
        """Whether both ends of the interval say the same."""
        return len({one.outcome is Outcome.STARTS for one in (self.fewest, self.plan, self.most)}) == 1

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
    """

    server: RunningServer
    now: Now
    rows: tuple[WhatIfRow, ...]
    gpus: int
    session_tokens: tuple[int, ...]


def what_if(
    server: RunningServer,
    changes: tuple[Change, ...],
    *,
    session_tokens: tuple[int, ...] = (),
    gpus: int | None = None,
    learned: Calibration | None = None,
) -> WhatIf:
    """Each change as a start of its own, beside the engine that runs.

    Args:
        session_tokens: empty: the usual length, at most the max_model_len of every row.
        gpus: None: as many as the largest replica has.
        learned: from other starts; the engine's own comes to it.
    """
    lengths = session_tokens or (min(_longest(server, changes)),)
    now_plan = _planned(server, Change(), lengths)
    layout = now_plan.layout
    observation = observe(server.snapshot, now_plan.facts, layout)
    sample = sample_of_engine(
        now_plan.facts,
        server.snapshot,
        observation,
        start=server.start,
        foreign_bytes=server.others_bytes,
        measured_at=server.taken_at,
        evidence=server.url,
    )
    known = [] if learned is None else [one for these in learned.samples.values() for one in these]
    if isinstance(sample, CalibrationSample):
        # A daemon may have kept this start under the name that its config has for the server: it is one start all the same.
        own = without_replica(sample)
        known = [one for one in known if own is None or without_replica(one) != own]
        known.append(sample)
    calibration = Calibration.of(known)
    made = [(change, _planned(server, change, lengths)) for change in changes]
    plans = [now_plan, *(plan for _, plan in made)]
    on_gpus = gpus or max(plan.fleet.gpus_per_replica for plan in plans)
    return WhatIf(
        server=server,
        now=Now(
            plan=now_plan,
            snapshot=server.snapshot,
            observation=observation,
            engines=len(server.snapshots),
            sample=sample,
            sessions=_observed(now_plan, observation, lengths, on_gpus),
            replicas=on_gpus // now_plan.fleet.gpus_per_replica,
        ),
        rows=tuple(
            _row(server, change, plan, now_plan, calibration=calibration, sample=sample, gpus=on_gpus)
            for change, plan in made
        ),
        gpus=on_gpus,
        session_tokens=lengths,
    )


def _longest(server: RunningServer, changes: tuple[Change, ...]) -> Iterator[int]:
    yield USUAL_SESSION_TOKENS
    if server.facts.max_model_len is not None:
        yield server.facts.max_model_len.value
    for change in changes:
        length = change.flags.get("max_model_len")
        if length is not None and length != AUTO_LENGTH:
            yield length


def _planned(server: RunningServer, change: Change, lengths: tuple[int, ...]) -> DeploymentPlan:
    request, facts = start_of(server, change, lengths)
    return plan_deployment(request, facts)


_ECHOED = frozenset(one.name for one in fields(EchoedFlags))


def start_of(
    server: RunningServer, change: Change, session_tokens: tuple[int, ...] = ()
) -> tuple[PlanRequest, EngineFacts]:
    """Another start of the same server: what is known of the one that runs stays, but for the change."""
    facts, line = server.facts, server.facts.command_line
    flags, length = dict(change.flags), facts.max_model_len
    said = {**_engines(server), **server.operator.flags, **flags}
    echoed = replace(server.snapshot.echoed, **dict.fromkeys(_ECHOED & flags.keys()))
    told = length.value if length is not None and length.origin is Origin.SERVER else None
    fits = flags.get("max_model_len") == AUTO_LENGTH
    if "max_model_len" in flags:
        told = None
    elif change and line is not None and line.unclear.get("max_model_len") == FITTED_LENGTH:
        # What was fitted to the one that runs is fitted anew.
        told, fits = None, "max_model_len" not in server.operator.flags
    if fits:
        said["max_model_len"] = None
    operator = replace(server.operator, flags=said)
    if change.gpu is not None or change.hbm_bytes is not None:
        operator = replace(operator, gpu=change.gpu or operator.gpu, hbm_bytes=change.hbm_bytes)
    version = change.version or (None if facts.version is None else facts.version.value)
    resolved = resolve_facts(
        operator=operator,
        answers=ServerAnswers(version=version, max_model_len=told),
        echoed=echoed,
        model_files=server.model_files,
        model_files_missing=server.model_files_missing,
        draft_tensors=None if change.draft_files is None else change.draft_files.tensors,
        command_line=line,
        local_gpu=facts.gpu,
    )
    all_flags = {
        **({} if line is None else line.flags),
        **({} if told is None else {"max_model_len": told}),
        **said,
        **{name: value for name in sorted(_ECHOED) if (value := getattr(echoed, name)) is not None},
        **({"max_model_len": AUTO_LENGTH} if fits else {}),
    }
    request = PlanRequest(
        model_files=server.model_files or ModelFiles(folder="", config={}),
        operator=replace(
            operator,
            flags={name: value for name, value in all_flags.items() if value is not None},
            gpu=resolved.gpu,
        ),
        version=version,
        session_tokens=session_tokens,
        draft_files=change.draft_files,
    )
    return request, resolved


def _engines(server: RunningServer) -> dict[str, int]:
    """The engines behind the address, where no flag tells them."""
    line = server.facts.command_line
    told = line is not None and "data_parallel_size" in line.flags
    return {} if told or len(server.snapshots) < 2 else {"data_parallel_size": len(server.snapshots)}


def _observed(
    plan: DeploymentPlan, observation: Observation, lengths: tuple[int, ...], gpus: int
) -> tuple[Sessions, ...]:
    """What the engine that runs holds, by its own blocks."""
    rows = {
        row.session_tokens: row
        for row in count_sessions(plan.facts, predict(plan.facts), observation, lengths)
    }
    return tuple(
        _sessions(plan, gpus, length, row.whole_sessions or 0, (row.observed,) * 3)
        for length in lengths
        if (row := rows.get(length)) is not None and row.observed is not None
    )


def _sessions(
    plan: DeploymentPlan, gpus: int, length: int, whole: int, values: tuple[float, float, float]
) -> Sessions:
    of_engine, fewest, most = values
    fleet = plan.fleet
    of_replica = of_engine * fleet.engines
    return Sessions(
        session_tokens=length,
        of_engine=of_engine,
        whole=whole,
        fewest=fewest,
        most=most,
        per_gpu=of_replica / fleet.gpus_per_replica,
        in_all=of_replica * (gpus // fleet.gpus_per_replica),
    )


def _row(
    server: RunningServer,
    change: Change,
    raw: DeploymentPlan,
    now: DeploymentPlan,
    *,
    calibration: Calibration,
    sample: CalibrationSample | Excluded,
    gpus: int,
) -> WhatIfRow:
    calibrated: CalibratedPlan | str = (
        calibrate(raw, calibration) if calibration.samples or isinstance(sample, CalibrationSample) else ""
    )
    if calibrated == "" and isinstance(sample, Excluded):
        calibrated = sample.detail
    if isinstance(calibrated, CalibratedPlan):
        plan, fewest, most = calibrated.plan, calibrated.fewest, calibrated.most
    else:
        plan, (fewest, most) = raw, _ends(raw)
    return WhatIfRow(
        change=change,
        raw=raw,
        plan=plan,
        fewest=fewest,
        most=most,
        calibrated=calibrated,
        memory=check_memory(raw, server.others_bytes, now),
        kv_cache=check_kv_cache(plan),
        sessions=_planned_sessions(plan, fewest, most, gpus),
        replicas=gpus // raw.fleet.gpus_per_replica,
        notes=tuple(_notes(change, plan, now)),
    )


def _ends(raw: DeploymentPlan) -> tuple[DeploymentPlan, DeploymentPlan]:
    """With the most and with the least overhead that is estimated; the same twice where none is."""
    facts = raw.facts
    estimate = estimate_overhead(facts)
    if (
        not facts.pool_from_hbm
        or facts.overhead_bytes.origin is not Origin.ESTIMATED
        or isinstance(estimate, str)
    ):
        return raw, raw
    fewest, most = (
        plan_deployment(
            raw.request,
            replace(facts, overhead_bytes=Fact(size, Origin.ESTIMATED), overhead_estimate=None),
        )
        for size in (estimate.high_bytes, estimate.low_bytes)
    )
    return fewest, most


def _planned_sessions(
    plan: DeploymentPlan, fewest: DeploymentPlan, most: DeploymentPlan, gpus: int
) -> tuple[Sessions, ...]:
    own = {fit.session_tokens: fit for fit in plan.fits}
    least = {fit.session_tokens: fit.sessions for fit in fewest.fits}
    return tuple(
        _sessions(
            plan,
            gpus,
            fit.session_tokens,
            mine.whole_sessions if (mine := own.get(fit.session_tokens)) is not None else 0,
            (0.0 if mine is None else mine.sessions, least.get(fit.session_tokens, 0.0), fit.sessions),
        )
        for fit in most.fits
    )


def _notes(change: Change, plan: DeploymentPlan, now: DeploymentPlan) -> Iterator[str]:
    facts, flags = plan.facts, change.flags
    for name, value in (
        ("kv_cache_memory_bytes", facts.kv_cache_memory_bytes),
        ("num_gpu_blocks_override", facts.num_gpu_blocks_override),
    ):
        if value is None:
            continue
        if "gpu_memory_utilization" in flags:
            yield (
                f"{name}={value.value} sizes the pool, and gpu_memory_utilization does not; the start still wants that share of the GPU "
                "free (request_memory)"
            )
        elif facts.parallelism != now.facts.parallelism and name not in flags:
            yield f"{name} stays {value.value}, as it is set; what each GPU has to spare changes with the parallel sizes"
        break
    if facts.pool_from_hbm and (change.gpu is not None or change.hbm_bytes is not None):
        yield (
            "nothing was measured on that GPU, and what the engine takes where it runs is not carried over: on public starts the estimate alone "
            "was nearer"
        )
    if change.version is not None:
        yield facts.rules.assumed_because or f"by the rules of vLLM {change.version}"
    yield from _grown(facts, now.facts)
    seqs = facts.max_num_seqs
    most = max((fit.whole_sessions for fit in plan.fits), default=0)
    if seqs is not None and most > seqs.value:
        yield f"no more than {seqs.value} requests run at once (max_num_seqs), however many fit"
    layout, before = plan.layout, now.layout
    if isinstance(layout, KvLayout) and isinstance(before, KvLayout):
        if layout.kv_dtype != before.kv_dtype:
            yield f"the cache is {layout.kv_dtype} in place of {before.kv_dtype}"
        if layout.block_size != before.block_size:
            yield f"blocks hold {layout.block_size:,} tokens in place of {before.block_size:,}"


def _grown(facts: EngineFacts, now: EngineFacts) -> Iterator[str]:
    """The parts of the overhead that are estimated otherwise."""
    if not facts.pool_from_hbm:
        return
    after, before = estimate_overhead(facts), estimate_overhead(now)
    if not isinstance(after, OverheadEstimate) or not isinstance(before, OverheadEstimate):
        return
    changed = [
        f"{part.value.replace('_', ' ')} from {before.of(part) / 1e9:.2f} to {size / 1e9:.2f} GB"
        for part, size in after.parts
        if size != before.of(part)
    ]
    if changed:
        yield f"estimated overhead: {', '.join(changed)}"
