"""What `kvheadroom check` prints: per replica what each source gives, what is assumed, what is missing."""

from collections.abc import Iterator

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.discovery import DiscoveryStatus
from kvheadroom.capacity.fleet import CalibrationFile, FleetAssessment, GpuAssessment, ReplicaAssessment
from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments
from kvheadroom.capacity.planned_tier import DOES_NOT_HELP
from kvheadroom.capacity.prediction import PredictedPool
from kvheadroom.capacity.remote_gpus import RemoteGpus
from kvheadroom.capacity.warm_sessions import Warmth
from kvheadroom.outputs.numbers import count, seconds, signed, size


def is_complete(fleet: FleetAssessment) -> bool:
    """Whether nothing is missing anywhere: there are replicas, and their sources and this machine's GPUs told all."""
    return (
        bool(fleet.replicas)
        and all(_is_complete(replica) for replica in fleet.replicas)
        and all(source.up and not source.left_out for source in fleet.discoveries)
        and (fleet.calibration is None or fleet.calibration.failure is None)
        and not (fleet.gpus is not None and (fleet.gpus.reading.failures or fleet.gpus.runs.not_here))
        and _is_told(fleet.remote_gpus)
    )


def _is_told(remote: RemoteGpus) -> bool:
    """Whether every exporter answered, and every GPU that the config means is known by its memory."""
    return (
        all(one.taken_at is not None and one.failure is None for one in remote.exporters)
        and not remote.failures
        and not remote.runs.not_here
        and not remote.runs.unassigned
        and not any(gpu.unknown for gpu in remote.gpus)
    )


def _is_complete(replica: ReplicaAssessment) -> bool:
    """Whether every source answered, nothing was wrong on the page, and a whole prediction was made."""
    return (
        bool(replica.engines)
        and all(source.up for source in replica.sources)
        and not replica.problems
        and not any(engine.prediction.cannot_predict or engine.facts.missing for engine in replica.engines)
    )


def check_report(fleet: FleetAssessment) -> Iterator[str]:
    """One line after the other."""
    for replica in fleet.replicas:
        yield f"replica {replica.replica}  {replica.url}  {replica.state}"
        for source in replica.sources:
            if source.failure is None:
                yield _row(source.source, "ok" + _gives(source.source, replica))
            else:
                yield _row(source.source, f"FAILED, {source.failure.reason}: {source.failure.detail}")
        for problem in replica.problems:
            yield _row("problem", f"{problem.reason}: {problem.detail}")
        for engine in replica.engines:
            yield from _engine(engine)
        yield ""
    for discovery in fleet.discoveries:
        yield from _discovery(discovery)
    if fleet.calibration is not None:
        yield from _calibration(fleet.calibration)
    if fleet.gpus is not None:
        yield from _gpus(fleet, fleet.gpus)
    yield from _remote_gpus(fleet)
    complete = sum(_is_complete(replica) for replica in fleet.replicas)
    share = "" if fleet.shard is None else f" (share {fleet.shard} of all)"
    yield f"{complete} of {len(fleet.replicas)} replicas complete{share}"


def _discovery(source: DiscoveryStatus) -> Iterator[str]:
    replicas = "1 replica" if source.targets == 1 else f"{count(source.targets)} replicas"
    yield f"source {source.source}: {replicas}"
    if source.failure is not None:
        yield _row("", f"FAILED, {source.failure.reason}: {source.failure.detail}")
    if source.note is not None:
        yield _row("", source.note)
    for sentence in source.left_out:
        yield _row("left out", sentence)
    yield ""


def _calibration(file: CalibrationFile) -> Iterator[str]:
    starts = "1 start" if file.samples == 1 else f"{count(file.samples)} starts"
    yield f"calibration {file.path}: {starts}"
    if file.failure is not None:
        yield _row("", f"FAILED, {file.failure.reason}: {file.failure.detail}")
    yield ""


def _row(name: str, text: str) -> str:
    return f"  {name:<12}{text}"


def _gives(source: str, replica: ReplicaAssessment) -> str:
    if not replica.engines:
        return ""
    facts = replica.engines[0].facts
    if source == "metrics":
        engines = "1 engine" if len(replica.engines) == 1 else f"{len(replica.engines)} engines"
        return f", {engines}, {seconds(replica.scrape_duration_seconds)}"
    if source == "version" and facts.version is not None:
        return f", vLLM {facts.version.value}"
    if source == "models" and facts.max_model_len is not None:
        return f", max_model_len {count(facts.max_model_len.value)}"
    if source == "model_files" and facts.model_folder is not None:
        architecture = "an architecture not known here" if facts.model is None else facts.model.architecture
        return f", {architecture} in {facts.model_folder.value}"
    return ""


def _engine(engine: Assessment) -> Iterator[str]:
    snapshot, prediction, observation = engine.snapshot, engine.prediction, engine.observation
    yield _row(f"engine {snapshot.engine}", f"{snapshot.model_name or 'model not told'}")
    predicted = None if prediction.pool is None else prediction.pool.pool_tokens
    calibrated = None if engine.calibrated is None else engine.calibrated.prediction.pool
    difference = None if engine.difference is None else engine.difference.tokens
    yield _row(
        "  pool",
        f"predicted {count(predicted)} tokens, "
        + (f"calibrated {count(calibrated.pool_tokens)}, " if calibrated is not None else "")
        + f"observed {count(observation.pool_tokens)}, "
        f"difference {signed(difference)}",
    )
    for origin, flags in engine.facts.flags_by_origin():
        yield _row("  flags", f"{origin}: {', '.join(f'{flag.name} {flag.value}' for flag in flags)}")
    for name, what in engine.facts.assumed():
        yield _row("  assumed", f"{name}: {what}")
    for fact in engine.facts.missing:
        yield _row("  missing", f"{fact.fact}: {fact.why}")
        yield _row("", f"  way out: {fact.way_out}")
    if prediction.pool is not None and prediction.pool.boots is False:
        yield _row("  start", _does_not_start(prediction.pool, engine.warmth))
    for reason in prediction.cannot_predict:
        yield _row("  cannot", f"predict: {reason}")
    for finding, why in engine.warmth.findings:
        yield _row("  tier", f"{finding}: {why}")


def _does_not_start(pool: PredictedPool, warmth: Warmth) -> str:
    longest = f"; the longest that starts is {count(pool.longest_bootable)}" if pool.longest_bootable else ""
    tier = "" if warmth.host is None else f"; {DOES_NOT_HELP}"
    return f"with the predicted pool vLLM does NOT start at max_model_len {count(pool.max_model_len)}{longest}{tier}"


def _how_known(one: Assignment) -> str:
    return (
        one.replica
        + {"config": "", "process": " (its processes are on it)", "pod": " (its pod has it)"}[one.by]
    )


def _serves(assigned: tuple[Assignment, ...], gpu: str) -> str:
    serves = ", ".join(_how_known(one) for one in assigned if one.gpu == gpu)
    return serves or "no replica (give it to one with `gpus: [UUID]`)"


def _gpus(fleet: FleetAssessment, gpus: GpuAssessment) -> Iterator[str]:
    if gpus.reading.driver_absent:
        yield "GPUs of this machine: no NVIDIA driver is installed, which is fine on a machine without GPUs"
    else:
        yield f"GPUs of this machine: {len(gpus.reading.gpus)} read"
    for gpu in gpus.reading.gpus:
        serves = _serves(gpus.runs.assigned, gpu.gpu)
        free = fleet.free_bytes(gpu)
        told = "free memory not told, an engine sleeps" if free is None else f"{size(free)} free"
        yield _row("gpu", f"{gpu.gpu} {gpu.name}, {told}, serves {serves}")
        for xid, times in gpus.xids_of(gpu.gpu) or ():
            yield _row("", f"  Xid {xid} × {times}")
    for failure in gpus.reading.failures:
        yield _row("gpu", f"FAILED, {failure.reason}: {failure.detail}")
    for divided in gpus.empty_divided():
        yield _row("gpu", f"{divided} is in MIG mode, and no MIG device of it can be read")
    yield from _not_assigned(gpus.runs)
    yield ""


def _remote_gpus(fleet: FleetAssessment) -> Iterator[str]:
    remote = fleet.remote_gpus
    for one in remote.exporters:
        yield f"{one.source}  {one.url}: {'1 GPU' if len(one.gpus) == 1 else f'{len(one.gpus)} GPUs'}"
        if one.failure is not None:
            yield _row("", f"FAILED, {one.failure.reason}: {one.failure.detail}")
    for gpu in remote.gpus:
        free = fleet.free_bytes(gpu)
        told = "free memory not told" if free is None else f"{size(free)} free"
        told += ", an engine sleeps" if free is None and gpu.free_bytes is not None else ""
        where = f" on {gpu.host}" if gpu.host else ""
        serves = _serves(remote.runs.assigned, gpu.gpu)
        yield _row("gpu", f"{gpu.gpu} {gpu.name}{where}, {told}, serves {serves}")
        for sentence in gpu.unknown:
            yield _row("", f"  {sentence}")
    for failure in remote.failures:
        yield _row("gpu", f"FAILED, {failure.reason}: {failure.detail}")
    yield from _not_assigned(remote.runs)
    if remote.exporters:
        yield ""


def _not_assigned(runs: GpuAssignments) -> Iterator[str]:
    for missing in runs.not_here:
        yield _row("gpu", f"MISSING, {missing.gpu} of replica {missing.replica} {missing.why}")
    for unassigned in runs.unassigned:
        yield _row("gpus", f"of replica {unassigned.replica} not known: {unassigned.why}")
