"""Composition root of `kvheadroom calibrate`: a source of starts -> samples of the overhead -> what is learned, and the file that keeps it.

Each source gives a `Looked`: logs (log_calibrator.py), a Prometheus (history_calibrator.py), and here the running fleet. One function
learns from it and stores it, whatever the source was.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvheadroom.app import look_once
from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.calibration_run import CalibrationRun, Looked, LookedAt, learn
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, Exclusion, sample_of_engine
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment, ReplicaState
from kvheadroom.capacity.own_start import start_of
from kvheadroom.capacity.readings import one_line
from kvheadroom.config import Config
from kvheadroom.monitor.calibration_store import StoredSamples, add_samples, read_samples


def known_before(out: Path | None, read: Iterable[str | Path | None]) -> StoredSamples:
    """What the file that is to keep the samples holds already, looked at before any work is done.

    Args:
        read: the files that the run is told to read, which it must not set aside as damaged samples.

    Raises:
        OperatorError: it cannot be added to.
    """
    if out is None:
        return StoredSamples()
    for one in read:
        if one is not None and _is_same_file(out, Path(one)):
            raise OperatorError(f"--out: {out}: this is a file to read; name another one for the samples")
    stored = read_samples(out)
    if stored.problem and not stored.damaged:
        raise OperatorError(f"--out: {stored.problem}")
    return stored


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def calibrate(looked: Looked, out: Path | None, before: StoredSamples) -> CalibrationRun:
    """What is learned from all that was looked at, and kept where a file for it was given."""
    learned = learn(looked, before.samples)
    run = CalibrationRun(looked=looked, learned=learned, out="" if out is None else str(out))
    if out is None or not looked.samples:
        return run
    try:
        told = add_samples(out, looked.samples)
    except OSError as error:
        return replace(run, not_kept=f"{out}: it cannot be written ({error.strerror or error})")
    held = {(one.key, one.start) for one in read_samples(out).samples}
    return replace(run, told=told, kept=len({(one.key, one.start) for one in looked.samples} & held))


async def look_at_fleet(config: Config) -> Looked:
    """Every engine of every replica, once.

    Raises:
        ConfigError: a file that the config names cannot be read.
    """
    fleet, started_at = await look_once(config)
    starts, problems = [], []
    for replica in fleet.replicas:
        problems += [
            f"{replica.replica}: {source.failure.detail}"
            for source in replica.sources
            if source.failure is not None
        ]
        if not replica.engines and all(source.up for source in replica.sources):
            problems.append(f"{replica.replica}: its page tells of no engine")
        starts += [
            _look_at_engine(fleet, replica, engine, started_at.get(replica.replica))
            for engine in replica.engines
        ]
    if not fleet.replicas:
        problems.append("no vLLM server was found; name one with --target URL or --config FILE")
    problems += [
        f"{one.source}: {one.failure.detail}" for one in fleet.discoveries if one.failure is not None
    ]
    return Looked(tuple(starts), tuple(problems))


_NOT_SETTLED = (ReplicaState.STARTING, ReplicaState.SCALING)


def _look_at_engine(
    fleet: FleetAssessment, replica: ReplicaAssessment, engine: Assessment, started_at: float | None
) -> LookedAt:
    start = start_of(replica.replica, engine.snapshot.engine, started_at, engine.snapshot.num_blocks)
    outcome: CalibrationSample | Excluded
    if replica.state in _NOT_SETTLED:
        outcome = Excluded(Exclusion.RESTARTING, f"it is {replica.state}, and its pool may still change")
    else:
        outcome = sample_of_engine(
            engine.facts,
            engine.snapshot,
            engine.observation,
            start=start,
            foreign_bytes=None if fleet.gpus is None else fleet.gpus.foreign_bytes(replica.replica),
            measured_at=engine.taken_at,
            evidence=f"{replica.url}, engine {engine.snapshot.engine}",
        )
    version, missing = engine.facts.version, engine.facts.missing
    return LookedAt(
        evidence=f"{replica.replica}, engine {engine.snapshot.engine}",
        model=one_line(engine.snapshot.model_name or ""),
        release="" if version is None else one_line(version.value),
        outcome=outcome,
        facts=engine.facts,
        notes=tuple(f"{fact.fact}: {fact.why}; {fact.way_out}" for fact in missing)
        if isinstance(outcome, Excluded)
        else (),
    )
