"""`calibrate --json`: the run as one document; bytes are integers, absent is null."""

from dataclasses import asdict
from typing import Any

from kvheadroom.capacity.calibration_run import CalibrationRun, Learned, LookedAt
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded
from kvheadroom.capacity.logged_figures import Beside, LoggedFigures
from kvheadroom.outputs.calibration_report import overhead_yaml


def calibration_document(run: CalibrationRun) -> dict[str, Any]:
    """The whole run."""
    return {
        "starts": [_start(one) for one in run.looked.starts],
        "problems": list(run.looked.problems),
        "excluded": {str(reason): number for reason, number in run.looked.excluded()},
        "learned": [_learned(one) for one in run.learned],
        "out": run.out or None,
        "kept": run.kept,
        "not_kept": run.not_kept or None,
        "set_aside": run.told or None,
    }


def _start(one: LookedAt) -> dict[str, Any]:
    outcome = one.outcome
    return {
        "evidence": one.evidence,
        "model": one.model or None,
        "release": one.release or None,
        "sample": _sample(outcome) if isinstance(outcome, CalibrationSample) else None,
        "excluded": {"reason": str(outcome.reason), "detail": outcome.detail}
        if isinstance(outcome, Excluded)
        else None,
        "figures": None if one.figures is None else _figures(one.figures),
        "notes": list(one.notes),
    }


def _sample(sample: CalibrationSample) -> dict[str, Any]:
    return {
        "start": sample.start,
        "source": str(sample.source),
        "key": asdict(sample.key),
        "overhead_bytes": sample.overhead_bytes,
        "uncertainty_bytes": sample.uncertainty_bytes,
        "estimated_bytes": sample.estimated_bytes,
        "measured_weights_bytes": sample.measured_weights_bytes,
        "is_cold": sample.is_cold,
    }


def _figures(figures: LoggedFigures) -> dict[str, Any]:
    graphs = figures.graphs
    return {
        "binding_rank": figures.binding or None,
        "utilization": figures.utilization,
        "gpu_total": _beside(figures.total),
        "budget": _beside(figures.budget),
        "weights": _beside(figures.weights),
        "overhead": _beside(figures.overhead),
        "kv_cache": _beside(figures.pool),
        "kv_cache_tokens": figures.pool_tokens,
        "predicted_kv_cache_tokens": figures.predicted_pool_tokens,
        "parts": [{"name": part.name, "bytes": part.size.bytes} for part in figures.parts],
        "cuda_graphs": None
        if graphs is None
        else {
            "estimated_bytes": graphs.estimated.bytes,
            "took_bytes": graphs.took.bytes,
            "off_ratio": graphs.off_ratio,
        },
        "unused_by_rank": [{"rank": spare.label, "bytes": spare.size.bytes} for spare in figures.spares],
        "left_less_by_a_silent_rank_bytes": None if figures.unseen is None else figures.unseen.bytes,
    }


def _beside(figure: Beside) -> dict[str, Any]:
    measured = figure.measured
    return {
        "measured_bytes": None if measured is None else measured.bytes,
        "uncertainty_bytes": None if measured is None else measured.uncertainty_bytes,
        "predicted_bytes": figure.predicted_bytes,
    }


def _learned(learned: Learned) -> dict[str, Any]:
    overhead = learned.overhead
    return {
        "key": asdict(learned.key),
        "model": learned.model or None,
        "overhead_bytes": overhead.overhead_bytes,
        "low_bytes": overhead.low_bytes,
        "high_bytes": overhead.high_bytes,
        "samples": overhead.samples,
        "reliability": str(overhead.reliability),
        "clamp": None if overhead.clamp is None else str(overhead.clamp),
        "measured_weights_bytes": overhead.measured_weights_bytes,
        "config": list(overhead_yaml(learned)),
    }
