"""The weights of one engine, planned."""

from dataclasses import dataclass

DRAFT_MODEL = "draft_model"
"""The term of a draft model, whose checkpoint is another than its target's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTerm:
    """One kind of weights.

    Attributes:
        name: `attention`, `mlp`, `experts`, `router`, `norms`, `embedding`, `lm_head`, ...
        total_bytes: of the whole model.
        stage_bytes: on the first tensor-parallel rank of each pipeline stage.
        replicated: every tensor-parallel rank holds all of it.
    """

    name: str
    total_bytes: int
    stage_bytes: tuple[int, ...]
    replicated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The weights of one engine; bytes of parameters as vLLM creates them, before kernels repack any.

    Attributes:
        stage_bytes: on the first tensor-parallel rank of each pipeline stage, with the draft's.
        draft_bytes: of them, what speculative decoding adds.
        total_bytes: the checkpoint's, or, by config.json alone, what it would be; a draft model's own is not in it.
        not_loaded_bytes: tensors of the checkpoint that this start does not load.
        replicated_bytes: what every rank holds whole, of the stage with the most, without a draft model.
        spare_bytes: the most that the checkpoint may hold beside total_bytes and no start loads: copies of the vocabulary
            in the layers of multi-token prediction, or such layers where they are not modelled.
        basis: `headers`, `index` or `config`.
        doubt: what the headers have otherwise than config.json says, one sentence; empty where nothing.
        draft_unknown: why the weights of a draft model are not counted; empty where they are, or there is none.
    """

    stage_bytes: tuple[int, ...]
    draft_bytes: tuple[int, ...]
    total_bytes: int
    not_loaded_bytes: int
    replicated_bytes: int
    spare_bytes: int
    terms: tuple[WeightTerm, ...]
    basis: str
    doubt: str = ""
    draft_unknown: str = ""

    @property
    def draft_model_bytes(self) -> int:
        """What a draft model adds on the first rank; 0 without one."""
        return sum(sum(term.stage_bytes) for term in self.terms if term.name == DRAFT_MODEL)
