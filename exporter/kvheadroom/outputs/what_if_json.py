"""A running engine and other ways to start it as JSON. Absent is null; bytes and counts are whole numbers."""

from dataclasses import asdict
from typing import Any

from kvheadroom.capacity.calibration_samples import CalibrationSample
from kvheadroom.capacity.reuse import Reuse
from kvheadroom.capacity.what_if_answer import NOT_MODELLED, Now, WhatIf, WhatIfRow
from kvheadroom.outputs.json_report import reuse_json, to_json
from kvheadroom.outputs.plan_json import calibrated_json, plan_fields
from kvheadroom.outputs.plan_words import with_options


def what_if_json(answer: WhatIf) -> str:
    """`plan --from URL --json`."""
    return to_json(
        {
            "from": with_options(_now(answer, answer.now)),
            "gpus": answer.gpus,
            "session_tokens": list(answer.session_tokens),
            "rows": [with_options(_row(row)) for row in answer.rows],
            "reuse": reuse_json(answer.reuse) if isinstance(answer.reuse, Reuse) else None,
            "reuse_unknown": answer.reuse if isinstance(answer.reuse, str) else None,
            "not_modelled": list(NOT_MODELLED),
        },
        indent=2,
    )


def _now(answer: WhatIf, now: Now) -> dict[str, Any]:
    observation, sample = now.observation, now.sample
    measured = sample if isinstance(sample, CalibrationSample) else None
    facts = now.plan.facts
    return {
        "replica": answer.server.replica,
        "url": answer.server.url,
        "model_name": now.snapshot.model_name,
        "version": None if facts.version is None else facts.version.value,
        "engine": now.snapshot.engine,
        "engines": now.engines,
        "told": [asdict(flag) for flag in facts.told_flags],
        "assumed": dict(facts.assumed()),
        "missing": [asdict(fact) for fact in facts.missing],
        "observed": {
            "num_blocks": observation.num_blocks,
            "block_size": observation.block_size,
            "kv_cache_size_tokens": observation.pool_tokens,
            "pool_bytes_per_gpu": observation.pool_bytes,
            "sessions": [asdict(one) for one in now.sessions],
        },
        "replicas": now.replicas,
        "predicted": plan_fields(now.plan),
        "overhead": {
            "measured_bytes": None if measured is None else measured.overhead_bytes,
            "uncertainty_bytes": None if measured is None else measured.uncertainty_bytes,
            "estimated_bytes": None if measured is None else measured.estimated_bytes,
            "reason": None if isinstance(sample, CalibrationSample) else sample.detail,
        },
        "observed_to_predicted_ratio": now.off_ratio,
    }


def _row(row: WhatIfRow) -> dict[str, Any]:
    check = row.kv_cache
    return {
        "changes": row.change.label,
        "changed_flags": dict(row.change.flags),
        "starts": row.starts,
        "is_sure": row.is_sure,
        "plan": plan_fields(row.plan),
        "raw": plan_fields(row.raw),
        "calibrated": calibrated_json(row.calibrated),
        "sessions": [asdict(one) for one in row.sessions],
        "replicas": row.replicas,
        "free_memory": asdict(row.memory),
        "kv_cache_check": None
        if check is None
        else {**asdict(check), "passes": check.passes, "error": check.error or None},
        "notes": list(row.notes),
    }
