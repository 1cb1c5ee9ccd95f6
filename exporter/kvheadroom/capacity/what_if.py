"""A running engine -> what it would hold, and whether vLLM would start it, with other flags, another GPU or another release.

The engine that runs measures its own overhead by its pool. That figure is used for other starts alone: as it is where the change leaves
what the overhead depends on, and moved by the difference of the two estimates where it does not (`Calibration.learned`, `.carried`). Every
row is planned like any start: facts, layout, budget, pool. Nothing of it is scaled from what the engine holds now.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvheadroom.capacity.calibrated_plan import CalibratedPlan, IntervalFit, PlannedInterval, calibrate
from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, sample_of_engine
from kvheadroom.capacity.deployment import USUAL_SESSION_TOKENS, DeploymentPlan, Fleet, plan_deployment
from kvheadroom.capacity.facts import AUTO_LENGTH, EngineFacts, Fact, Origin
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.observation import Observation, observe
from kvheadroom.capacity.overhead import estimate_overhead
from kvheadroom.capacity.overhead_parts import OverheadEstimate
from kvheadroom.capacity.own_start import without_replica
from kvheadroom.capacity.planned_tier import why_no_help
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.running_server import Change, RunningServer, start_with
from kvheadroom.capacity.sessions import count_sessions
from kvheadroom.capacity.startup_check import check_kv_cache, check_memory
from kvheadroom.capacity.what_if_answer import Now, Sessions, WhatIf, WhatIfRow


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
    request, facts = start_with(server, change, lengths)
    return plan_deployment(request, facts)


def _observed(
    plan: DeploymentPlan, observation: Observation, lengths: tuple[int, ...], gpus: int
) -> tuple[Sessions, ...]:
    """What the engine that runs holds, by its own blocks."""
    rows = {
        row.session_tokens: row
        for row in count_sessions(plan.facts, predict(plan.facts), observation, lengths)
    }
    return tuple(
        _sessions(
            IntervalFit(
                session_tokens=length,
                sessions=row.observed,
                whole_sessions=row.whole_sessions or 0,
                fewest=row.observed,
                most=row.observed,
            ),
            plan.fleet,
            gpus,
        )
        for length in lengths
        if (row := rows.get(length)) is not None and row.observed is not None
    )


def _sessions(fit: IntervalFit, fleet: Fleet, gpus: int) -> Sessions:
    of_replica = fit.sessions * fleet.engines
    return Sessions(
        session_tokens=fit.session_tokens,
        of_engine=fit.sessions,
        whole=fit.whole_sessions,
        fewest=fit.fewest,
        most=fit.most,
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
    calibrated = calibrate(raw, calibration) if calibration.samples else ""
    if not calibrated and isinstance(sample, Excluded):
        calibrated = sample.detail
    over = calibrated if isinstance(calibrated, CalibratedPlan) else _estimated(raw)
    return WhatIfRow(
        change=change,
        raw=raw,
        plan=over.plan,
        fewest=over.fewest,
        most=over.most,
        calibrated=calibrated,
        memory=check_memory(raw, server.others_bytes, now),
        kv_cache=check_kv_cache(over.plan),
        sessions=tuple(_sessions(fit, raw.fleet, gpus) for fit in over.fits),
        replicas=gpus // raw.fleet.gpus_per_replica,
        notes=tuple(_notes(change, over.plan, now)),
    )


def _estimated(raw: DeploymentPlan) -> PlannedInterval:
    """Over the interval of the estimate; of one figure where nothing is estimated."""
    facts = raw.facts
    estimate = estimate_overhead(facts)
    if (
        not facts.pool_from_hbm
        or facts.overhead_bytes.origin is not Origin.ESTIMATED
        or isinstance(estimate, str)
    ):
        return PlannedInterval(plan=raw, fewest=raw, most=raw)
    fewest, most = (
        plan_deployment(
            raw.request,
            replace(facts, overhead_bytes=Fact(size, Origin.ESTIMATED), overhead_estimate=None),
        )
        for size in (estimate.high_bytes, estimate.low_bytes)
    )
    return PlannedInterval(plan=raw, fewest=fewest, most=most)


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
    yield from filter(None, (why_no_help(plan),))
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
