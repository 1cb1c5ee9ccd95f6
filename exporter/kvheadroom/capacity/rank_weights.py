"""The weights that one GPU holds: planned tensor by tensor where that is known, else an even share of what was said."""

import math
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.weights import WeightPlan, plan_weights

TOLERANCE = 0.01
"""A checkpoint that differs more from what its config.json makes is stored in another way than config.json says; files may
hold copies of shared tensors, buffers and their own headers beside the weights."""


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Weights of one GPU.

    Attributes:
        stage_bytes: for each pipeline stage.
        plan: tensor by tensor; None for an even share.
        origin: where they are known from, for people.
        note: what a reader should know about an even share; empty where they are planned.
    """

    stage_bytes: tuple[int, ...]
    plan: WeightPlan | None
    origin: str
    note: str = ""


def weights_of(facts: EngineFacts) -> RankWeights | str | None:
    """The weights; a string says why they are not known; None when nobody said how many there are."""
    plan, said = plan_weights(facts), facts.weights_bytes
    if isinstance(plan, WeightPlan) and (said is None or not _contradicts(plan, said.value)):
        basis = {"headers": "the files' headers", "index": "the index", "config": "config.json"}[plan.basis]
        return RankWeights(plan.stage_bytes, plan, f"tensor by tensor, by {basis}")
    if said is None:
        return None
    reason = plan if isinstance(plan, str) else _contradiction(plan, said.value)
    if facts.pipeline_parallel_size.value > 1:
        return f"how the weights are shared out over pipeline stages is not known: {reason}"
    if facts.data_parallel_size.value > 1 and (facts.model is None or facts.model.num_experts):
        return f"how the experts are shared out over data-parallel engines is not known: {reason}"
    share = math.ceil(said.value / facts.tensor_parallel_size.value)
    return RankWeights(
        (share,),
        None,
        f"{said.origin}, an even share for each GPU",
        f"an even share for each GPU: {reason}",
    )


def _contradiction(plan: WeightPlan, said_bytes: int) -> str:
    return f"config.json would make {plan.total_bytes / 1e9:.2f} GB of weights, and the checkpoint has {said_bytes / 1e9:.2f} GB"


def _contradicts(plan: WeightPlan, said_bytes: int) -> bool:
    """Whether config.json makes another checkpoint than the one whose size was said, with or without layers left out."""
    sizes = (plan.total_bytes, plan.total_bytes - plan.not_loaded_bytes)
    return plan.basis != "headers" and all(abs(said_bytes - size) > TOLERANCE * size for size in sizes)
