"""A tier in host memory that a planned start asks for: what it holds, what it takes of the host, and what it does not do."""

from dataclasses import dataclass

from kvheadroom.capacity.deployment import DeploymentPlan, Outcome
from kvheadroom.capacity.host_tier import HostNeed, HostUse, host_findings, host_need
from kvheadroom.capacity.offload_tier import OffloadTier, plan_tier
from kvheadroom.capacity.warm_findings import WarmFinding

DOES_NOT_HELP = "the tier in host memory does not help it to start: one request of max_model_len must fit in the GPU's pool"
"""Whatever is stored elsewhere (vLLM 0.33.0 `v1/core/kv_cache_planning.py` _check_enough_kv_cache_memory)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTier:
    """The tier of each engine of one start.

    Attributes:
        sessions: (tokens of a session, how many of them fit).
        findings: between the tiers of all its engines and the memory of the machine that it is planned on, should they run there.
    """

    tier: OffloadTier
    need: HostNeed
    sessions: tuple[tuple[int, float], ...]
    findings: tuple[tuple[WarmFinding, str], ...]


def planned_tier(plan: DeploymentPlan, host: HostUse | None = None) -> PlannedTier | str | None:
    """The tier of a start; a string says why it is not known; None where no flag asks for one.

    Args:
        host: the memory of the machine on which it is planned; None where that does not matter.
    """
    if plan.layout is None:
        return None
    tier = plan_tier(plan.facts, plan.layout)
    if not isinstance(tier, OffloadTier):
        return tier
    need = host_need(plan.facts, plan.layout, tier)
    return PlannedTier(
        tier=tier,
        need=need,
        sessions=tuple(
            (fit.session_tokens, tier.num_chunks / tier.chunks_per_session(fit.session_tokens))
            for fit in plan.fits
        ),
        findings=tuple(host_findings(need, tier, host, engines=plan.data_parallel, runs=False)),
    )


def why_no_help(plan: DeploymentPlan) -> str:
    """That a tier leaves a start that fails as it is; empty where none is asked for, or it starts."""
    fails = plan.outcome in (Outcome.TOO_LONG, Outcome.NO_ROOM)
    return DOES_NOT_HELP if fails and planned_tier(plan) is not None else ""
