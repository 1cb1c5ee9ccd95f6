"""Plans of models as JSON: every row with every figure. Absent is null; bytes and counts are whole numbers."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from kvheadroom.capacity.alternatives import TRADES
from kvheadroom.capacity.article import SimpleSum
from kvheadroom.capacity.calibrated_plan import CalibratedPlan
from kvheadroom.capacity.deployment import DeploymentPlan
from kvheadroom.capacity.model_plan import ModelPlan, PlannedRow, ladder, weights_ratio
from kvheadroom.capacity.plan_figures import figures, sum_figures
from kvheadroom.capacity.planned_tier import PlannedTier
from kvheadroom.outputs.json_report import to_json
from kvheadroom.outputs.plan_words import with_options

SUM_KEYS = (
    *(field.name for field in fields(SimpleSum)),
    "reason",
    "weights_bytes_per_gpu",
    "budget_bytes_per_gpu",
    "kv_bytes_per_gpu",
    "weights_over_budget_bytes",
    "tokens",
    "sessions",
    "replicas",
    "fleet_tokens",
    "boots",
    "figures",
)
"""Keys of the sum on paper; all null but `reason` where it has no answer."""


def plan_json(models: Sequence[ModelPlan], *, by_sum: bool) -> str:
    """`plan MODEL --json`."""
    return to_json(
        {
            "assumptions": "article" if by_sum else "vllm",
            "models": [with_options(_model(model)) for model in models],
            "weights_ratio": weights_ratio(tuple(models)),
            "ladder": [asdict(rung) for rung in ladder(tuple(models), by_sum=by_sum)],
        },
        indent=2,
    )


def _model(model: ModelPlan) -> dict[str, Any]:
    return {
        "model": model.name,
        "where": model.where,
        "weights_bytes": model.weights_bytes,
        "doubts": list(model.doubts),
        "plans": [_row(row) for row in model.rows],
        "alternatives": [
            {
                "changes": other.flags,
                "tokens": other.tokens,
                "ratio": other.ratio,
                "kind": str(other.kind),
                "trade": TRADES[other.kind],
                **plan_fields(other.plan),
            }
            for other in model.others
        ],
        "alternatives_to": plan_fields(model.others_than),
    }


def _row(row: PlannedRow) -> dict[str, Any]:
    return {
        "label": row.plan.label,
        **plan_fields(row.plan),
        "article": _simple(row),
        "calibrated": None if row.calibrated is None else calibrated_json(row.calibrated),
        "host_tier": tier_json(row.tier),
        "bridge": [asdict(step) for step in row.bridge],
        "figures": [asdict(figure) for figure in figures(row.plan)],
        "assumed": dict(row.plan.facts.assumed()),
        "missing": [asdict(fact) for fact in row.plan.facts.missing],
    }


def tier_json(tier: PlannedTier | str | None) -> dict[str, Any] | None:
    """A tier in host memory; `reason` says why it is not known."""
    if not isinstance(tier, PlannedTier):
        return None if tier is None else {"reason": tier}
    return {
        "reason": None,
        "given_bytes": tier.tier.given_bytes,
        "bytes": tier.tier.bytes,
        "num_chunks": tier.tier.num_chunks,
        "chunk_bytes": tier.tier.chunk_bytes,
        "tokens": tier.tier.tokens,
        "sessions": [{"session_tokens": tokens, "sessions": fit} for tokens, fit in tier.sessions],
        "host_low_bytes": tier.need.low_bytes,
        "host_high_bytes": tier.need.high_bytes,
        "in_shared_memory": tier.need.in_shared_memory,
        "notes": list(tier.tier.notes),
        "findings": [{"finding": str(finding), "detail": why} for finding, why in tier.findings],
    }


CALIBRATED_KEYS = (
    "reason",
    "overhead_bytes",
    "overhead_low_bytes",
    "overhead_high_bytes",
    "starts_measured",
    "reliability",
    "clamp",
    "differences",
    "note",
    "outcome",
    "outcome_reason",
    "is_sure",
    "kv_bytes_per_gpu",
    "num_blocks",
    "kv_cache_size_tokens",
    "kv_cache_size_tokens_fewest",
    "kv_cache_size_tokens_most",
    "estimated_max_model_len",
    "sessions",
)
"""Keys of what was learned; all null but `reason` where nothing was."""


def calibrated_json(calibrated: CalibratedPlan | str) -> dict[str, Any]:
    """A start with what was learned."""
    if isinstance(calibrated, str):
        return dict.fromkeys(CALIBRATED_KEYS) | {"reason": calibrated}
    learned, plan, pool = calibrated.learned, calibrated.plan, calibrated.plan.pool
    _, fewest, most = calibrated.tokens
    return {
        "reason": None,
        "overhead_bytes": learned.overhead_bytes,
        "overhead_low_bytes": learned.low_bytes,
        "overhead_high_bytes": learned.high_bytes,
        "starts_measured": learned.samples,
        "reliability": str(learned.reliability),
        "clamp": None if learned.clamp is None else str(learned.clamp),
        "differences": list(learned.differences),
        "note": learned.note,
        "outcome": str(plan.outcome),
        "outcome_reason": plan.reason or None,
        "is_sure": calibrated.is_sure,
        "kv_bytes_per_gpu": plan.kv_bytes,
        "num_blocks": None if pool is None else pool.num_blocks,
        "kv_cache_size_tokens": None if pool is None else pool.pool_tokens,
        "kv_cache_size_tokens_fewest": fewest,
        "kv_cache_size_tokens_most": most,
        "estimated_max_model_len": None if pool is None else pool.longest_bootable,
        "sessions": [asdict(fit) for fit in calibrated.fits],
    }


def plan_fields(plan: DeploymentPlan) -> dict[str, Any]:
    """One start."""
    layout, pool, sizes = plan.layout, plan.pool, plan.facts.parallelism
    return {
        "flags": dict(plan.request.operator.flags),
        "gpu": plan.request.operator.gpu,
        "tensor_parallel_size": sizes.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "data_parallel_size": plan.data_parallel,
        "decode_context_parallel_size": sizes.decode_context,
        "prefill_context_parallel_size": sizes.prefill_context,
        "outcome": str(plan.outcome),
        "reason": plan.reason or None,
        "weights_bytes_per_gpu": plan.weights_bytes,
        "weights_by": None if plan.weights is None else plan.weights.origin,
        "kv_bytes_per_gpu": plan.kv_bytes,
        "kv_cache_dtype": None if layout is None else layout.kv_dtype,
        "block_size": None if layout is None else layout.block_size,
        "bytes_per_block": None if layout is None else list(layout.stage_bytes_per_block),
        "bytes_per_token": None if layout is None else list(layout.stage_bytes_per_token),
        "num_blocks": None if pool is None else pool.num_blocks,
        "kv_cache_size_tokens": None if pool is None else pool.pool_tokens,
        "max_model_len": None if pool is None else pool.max_model_len,
        "max_concurrency": None if pool is None else pool.max_concurrency,
        "boots": None if pool is None else pool.boots,
        "estimated_max_model_len": None if pool is None else pool.longest_bootable,
        "sessions": [asdict(fit) for fit in plan.fits],
        "fleet": asdict(plan.fleet),
    }


def _simple(row: PlannedRow) -> dict[str, Any]:
    simple = row.simple
    if not isinstance(simple, SimpleSum):
        return dict.fromkeys(SUM_KEYS) | {"reason": simple}
    fits = simple.tokens is not None
    return {
        **asdict(simple),
        "reason": None,
        "weights_bytes_per_gpu": simple.weights_per_gpu_bytes,
        "budget_bytes_per_gpu": simple.budget_bytes,
        "kv_bytes_per_gpu": simple.kv_bytes if fits else None,
        "weights_over_budget_bytes": max(0, simple.weights_over_budget_bytes),
        "tokens": simple.tokens,
        "sessions": [
            {
                "session_tokens": fit.session_tokens,
                "session_bytes": simple.session_bytes(fit.session_tokens),
                "sessions": simple.sessions(fit.session_tokens),
            }
            for fit in row.simple_plan.fits
        ],
        "replicas": row.plan.fleet.replicas,
        "fleet_tokens": row.fleet_tokens(by_sum=True),
        "boots": row.starts(by_sum=True),
        "figures": [
            asdict(figure)
            for figure in sum_figures(simple, tuple(fit.session_tokens for fit in row.simple_plan.fits))
        ],
    }
