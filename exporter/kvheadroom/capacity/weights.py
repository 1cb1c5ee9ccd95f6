"""Bytes of the weights that one GPU holds."""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTerm:
    """One kind of weights."""

    name: str
    total_bytes: int
    stage_bytes: tuple[int, ...]
    replicated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The weights of one rank, per pipeline stage."""

    stage_bytes: tuple[int, ...]
    draft_bytes: tuple[int, ...]
    total_bytes: int
    not_loaded_bytes: int
    replicated_bytes: int
    terms: tuple[WeightTerm, ...]
    basis: str


def plan_weights(facts: EngineFacts) -> WeightPlan | str:
    """The weights of one rank; a string says why they are not known."""
    del facts
    return "the weights of a rank are not modelled by this version"
