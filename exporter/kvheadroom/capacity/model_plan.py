"""One model in several ways to start it -> all that a planner asks: what vLLM does, the sum on paper, other ways."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvheadroom.capacity.alternatives import Alternative, alternatives
from kvheadroom.capacity.article import (
    BridgeStep,
    SimpleSum,
    as_the_sum_takes_it,
    bridge,
    checkpoint_bytes,
    simple_sum,
)
from kvheadroom.capacity.calibrated_plan import CalibratedPlan, calibrate
from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.cases import needs_remote_code
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, PlanRequest, plan_deployment
from kvheadroom.capacity.facts import Origin
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.planned_tier import PlannedTier, planned_tier
from kvheadroom.capacity.rank_weights import RankWeights
from kvheadroom.capacity.speculation import WITH_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """One way to start it, by vLLM's rules and by the sum on paper.

    Attributes:
        simple: a string says why the sum has no answer.
        simple_plan: the start whose bytes per token the sum takes; another than `plan` where vLLM refuses `plan`.
        bridge: from the sum to vLLM's figures.
        calibrated: `plan` with what was learned; a string says why nothing was, None: nobody asked.
        tier: in host memory; a string says why it is not known, None: none is asked for.
    """

    plan: DeploymentPlan
    simple: SimpleSum | str
    simple_plan: DeploymentPlan
    bridge: tuple[BridgeStep, ...]
    calibrated: CalibratedPlan | str | None = None
    tier: PlannedTier | str | None = None

    def tokens(self, *, by_sum: bool) -> int | None:
        """Pool tokens of one replica."""
        if not by_sum:
            return self.plan.fleet.replica_tokens
        return None if isinstance(self.simple, str) else self.simple.tokens

    def fleet_tokens(self, *, by_sum: bool) -> int | None:
        """Pool tokens of all replicas."""
        tokens = self.tokens(by_sum=by_sum)
        return None if tokens is None else tokens * self.plan.fleet.replicas

    def too_long(self, *, by_sum: bool) -> tuple[int, ...]:
        """Of the lengths that were asked for, those above max_model_len."""
        plan = self.simple_plan if by_sum else self.plan
        longest = None if plan.pool is None else plan.pool.max_model_len
        return tuple(n for n in plan.request.session_tokens if longest is not None and n > longest)

    def starts(self, *, by_sum: bool) -> bool:
        """Whether one request of max_model_len fits, and there are GPUs for a replica."""
        if self.plan.fleet.replicas == 0:
            return False
        if not by_sum:
            return self.plan.outcome is Outcome.STARTS
        length = self.simple_plan.facts.max_model_len
        return not isinstance(self.simple, str) and length is not None and self.simple.starts(length.value)

    @property
    def starts_as_learned(self) -> bool:
        """Whether it starts with what was learned, too; what was not learned says nothing against it."""
        return not isinstance(self.calibrated, CalibratedPlan) or self.calibrated.starts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One model.

    Attributes:
        name: as it was asked for.
        where: where its files were found.
        weights_bytes: all weights of the checkpoint, None where they are not known.
        doubts: what to look at before it is started: files that do not fit together, code of its own.
        others: other ways on the GPUs of `others_than`.
    """

    name: str
    where: str
    weights_bytes: int | None
    doubts: tuple[str, ...]
    rows: tuple[PlannedRow, ...]
    others: tuple[Alternative, ...]
    others_than: DeploymentPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row among all rows of one or two models, ordered by what their fleets hold.

    Attributes:
        tokens: of the whole fleet, or of each GPU where no fleet was asked for.
        ratio: against the rung below, None for the first.
    """

    model: str
    label: str
    replicas: int
    tokens: float
    ratio: float | None


def plan_model(
    name: str,
    where: str,
    requests: tuple[PlanRequest, ...],
    *,
    by_sum: bool,
    calibration: Calibration | None = None,
    host: HostUse | None = None,
) -> ModelPlan:
    """All rows of one model, and the other ways to use the GPUs of the largest replica.

    Args:
        calibration: what was learned, to be shown beside each row.
        host: the memory of this machine, for tiers in it.
    """
    rows = tuple(_row(request, calibration, host) for request in requests)
    there_is_room = [row for row in rows if row.plan.fleet.replicas > 0]
    widest = max(there_is_room or rows, key=lambda row: row.plan.fleet.gpus_per_replica)
    base = widest.plan
    if by_sum and not isinstance(widest.simple, str) and widest.simple.kv_bytes > 0:
        # The same bytes for each: an even share of the weights, as the sum has it.
        base = plan_deployment(
            widest.simple_plan.request.with_flags({"kv_cache_memory_bytes": int(widest.simple.kv_bytes)})
        )
    return ModelPlan(
        name=name,
        where=where,
        weights_bytes=checkpoint_bytes(widest.plan),
        doubts=_doubts(widest.plan, rows),
        rows=rows,
        others=alternatives(base) if there_is_room else (),
        others_than=base,
    )


def _doubts(plan: DeploymentPlan, rows: tuple[PlannedRow, ...]) -> tuple[str, ...]:
    files = plan.request.model_files
    doubts = list(files.weights_doubts)
    if files.weights_faulty:
        doubts.append(f"{files.weights_unknown}; {_taken_instead(plan)}")
    elif files.tensors is not None and files.tensors.problem and not doubts:
        doubts.append(f"{files.tensors.problem}; {_taken_instead(plan)}")
    weights = [row.plan.weights for row in rows if row.plan.weights is not None]
    doubts += dict.fromkeys(one.doubt for one in weights if one.doubt)
    if plan.facts.draft.method in WITH_MODEL:
        doubts += _uncounted_draft(plan, weights)
    if needs_remote_code(files.config):
        doubts.append(
            "its configuration is the repository's own code: vLLM starts with --trust-remote-code only"
        )
    return tuple(doubts)


def _uncounted_draft(plan: DeploymentPlan, weights: list[RankWeights]) -> Iterator[str]:
    """That the weights of a draft model are not counted, and why; nothing where they are."""
    reasons = dict.fromkeys(
        "the model's own are an even share" if one.plan is None else one.plan.draft_unknown for one in weights
    )
    stored = None if plan.request.draft_files is None else plan.request.draft_files.weights_bytes
    size = "their size is not known" if stored is None else f"its checkpoint has {stored / 1e9:.2f} GB"
    for reason in filter(None, reasons):
        yield (
            f"the draft model's own weights are not counted ({size}; {reason}): each GPU has less for KV by what it holds of "
            "them"
        )


def _taken_instead(plan: DeploymentPlan) -> str:
    """What the weights are taken from where the files have a fault, one clause."""
    said = plan.facts.weights_bytes
    if said is not None and not said.assumed:
        source = "that you said" if said.origin is Origin.CONFIG else "that the index speaks of"
        return f"the {said.value:,} bytes of weights {source} are taken instead"
    total = checkpoint_bytes(plan)
    if total is not None:
        return f"the weights that config.json makes, {total / 1e9:.2f} GB, are taken instead"
    return "nothing else tells the weights"


def _row(request: PlanRequest, calibration: Calibration | None, host: HostUse | None) -> PlannedRow:
    plan = plan_deployment(request)
    taken = as_the_sum_takes_it(plan)
    simple = simple_sum(taken)
    return PlannedRow(
        plan=plan,
        simple=simple,
        simple_plan=taken,
        bridge=() if isinstance(simple, str) else bridge(plan, simple),
        calibrated=None if calibration is None else calibrate(plan, calibration),
        tier=planned_tier(plan, host),
    )


def ladder(models: tuple[ModelPlan, ...], *, by_sum: bool) -> tuple[Rung, ...]:
    """Rows that hold something, least first, each against the one below."""
    found = []
    for model in models:
        for row in model.rows:
            fleet = row.plan.fleet
            tokens: float | None = row.fleet_tokens(by_sum=by_sum)
            if row.plan.request.gpus is None and tokens is not None:
                tokens /= fleet.gpus_per_replica
            if tokens:
                found.append((tokens, model.name, row.plan.label, fleet.replicas))
    found.sort(key=lambda one: one[0])
    ratios = [None, *(above[0] / below[0] for below, above in pairwise(found))]
    return tuple(
        Rung(model=name, label=label, replicas=replicas, tokens=tokens, ratio=ratio)
        for (tokens, name, label, replicas), ratio in zip(found, ratios, strict=False)
    )


def weights_ratio(models: tuple[ModelPlan, ...]) -> float | None:
    """The first model's weights against the second's; None with one model, or where they are not known."""
    if len(models) < 2:
        return None
    first, second = models[0].weights_bytes, models[1].weights_bytes
    return first / second if first and second else None
