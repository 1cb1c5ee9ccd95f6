"""The weights that one GPU holds: planned tensor by tensor where that is known, else an even share of what was said."""

import math
from dataclasses import dataclass, replace

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.weights import WeightPlan, headers_may_tell, plan_weights
from kvheadroom.capacity.weights.contradiction import AnotherCheckpoint, RefusedByVllm, another_checkpoint

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
        doubt: what config.json and the checkpoint say differently, one sentence; empty where they agree.
    """

    stage_bytes: tuple[int, ...]
    plan: WeightPlan | None
    origin: str
    note: str = ""
    doubt: str = ""


def weights_of(facts: EngineFacts) -> RankWeights | str | None:
    """The weights; a string says why they are not known; None when nobody said how many there are."""
    plan, said = plan_weights(facts), facts.weights_bytes
    if isinstance(plan, WeightPlan) and said is not None:
        plan = _held_to(plan, said.value)
    if isinstance(plan, WeightPlan):
        basis = {"headers": "the files' headers", "index": "the index", "config": "config.json"}[plan.basis]
        return RankWeights(plan.stage_bytes, plan, f"tensor by tensor, by {basis}", doubt=plan.doubt)
    if isinstance(plan, RefusedByVllm):
        return plan
    if said is None:
        return None
    if facts.pipeline_parallel_size.value > 1:
        return f"how the weights are shared out over pipeline stages is not known: {plan}"
    if facts.data_parallel_size.value > 1 and (facts.model is None or facts.model.num_experts):
        return f"how the experts are shared out over data-parallel engines is not known: {plan}"
    share = math.ceil(said.value / facts.tensor_parallel_size.value)
    return RankWeights(
        (share,),
        None,
        f"{said.origin}, an even share for each GPU",
        note=f"an even share for each GPU: {plan}",
        doubt=f"{plan}: {_ANOTHER}" if isinstance(plan, AnotherCheckpoint) else "",
    )


def wants_headers(facts: EngineFacts) -> bool:
    """Whether the headers of files whose index alone is known would tell what it does not: the size, or the types."""
    files = facts.model_files
    if files is None or files.tensors is None or files.tensors.problem or files.tensors.stored:
        return False
    if files.weights_bytes is None:
        return True
    plan = plan_weights(facts)
    if isinstance(plan, str):
        return headers_may_tell(facts)
    return isinstance(_held_to(plan, files.weights_bytes), AnotherCheckpoint)


_ANOTHER = (
    "one of them is not this model's, or the checkpoint is stored in another way than config.json says; each GPU is "
    "given an even share of the checkpoint"
)


def _held_to(plan: WeightPlan, said_bytes: int) -> WeightPlan | AnotherCheckpoint:
    """The plan, where config.json makes the checkpoint whose size was said, with or without layers left out."""
    if plan.basis == "headers":
        return plan
    total, loaded = plan.total_bytes, plan.total_bytes - plan.not_loaded_bytes
    if any(abs(said_bytes - size) <= TOLERANCE * size for size in (total, loaded)):
        return plan
    more = said_bytes - total
    if 0 < more <= plan.spare_bytes + TOLERANCE * total:
        return replace(plan, total_bytes=said_bytes, not_loaded_bytes=plan.not_loaded_bytes + more)
    return another_checkpoint("weights", total, said_bytes)
