"""A draft model of its own -> the weights that it adds on each tensor-parallel rank.

It is divided as its target is: `draft_tensor_parallel_size` is the target's where it is left out (vLLM 0.33.0
`config/speculative.py`), and its dtype is the target's.
"""

from dataclasses import replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.checkpoint_types import quantization_method
from kvheadroom.capacity.facts import DraftModel
from kvheadroom.capacity.model_config import BadFieldError, ModelConfig
from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.contradiction import size_text
from kvheadroom.capacity.weights.drafts import DRAFT_BUILDS, EMBEDDING, as_loaded, head_rows, owned, without
from kvheadroom.capacity.weights.files import held_to_files
from kvheadroom.capacity.weights.model_weights import plan_stages, read_weights
from kvheadroom.capacity.weights.parts import Blueprint, Vocabulary
from kvheadroom.capacity.weights.registry import BUILDS
from kvheadroom.capacity.weights.schemes import DTYPE_BYTES
from kvheadroom.capacity.weights.shares import NotDivisibleError, Ranks
from kvheadroom.capacity.weights.weight_plan import DRAFT_MODEL, WeightPlan, WeightTerm

_LEFT_OUT = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")


def plan_draft_weights(
    draft: DraftModel, target: Blueprint, ranks: list[Ranks], dtype: str
) -> WeightPlan | str:
    """The draft's weights on each rank; a string says why they are not known.

    Args:
        target: the model that it drafts for.
        ranks: how they are divided, on each GPU that it may be.
        dtype: that of the target.
    """
    config = ModelConfig(draft.config, "draft_config.")
    model = Model(config, config, draft.stack, dtype)
    try:
        method = quantization_method(config, config)
        if draft.quantization not in (None, method):
            return f"a draft model quantized by {draft.quantization} as it is loaded is not modelled"
        blueprint, tensors, doubts = _blueprint(draft, model, target)
        weights, read = read_weights(
            draft.architecture, model, blueprint, tensors, config.word("dtype", config.word("torch_dtype"))
        )
        plans = [plan_stages(weights, each) for each in ranks]
    except (BadFieldError, NotDivisibleError, NotModelledError) as reason:
        return str(reason)
    if any(plan != plans[0] for plan in plans):
        return "they depend on the GPU, which is not known"
    plan = held_to_files(plans[0], read)
    if isinstance(plan, str):
        return plan
    return replace(plan, doubt="; ".join(filter(None, (plan.doubt, *doubts))))


def with_draft(plan: WeightPlan, draft: WeightPlan | str) -> WeightPlan:
    """The target's weights with those of the draft, on one stage."""
    if isinstance(draft, str):
        return replace(plan, draft_unknown=draft)
    doubts = (plan.doubt, draft.doubt and f"the draft model: {draft.doubt}")
    loaded = draft.total_bytes - draft.not_loaded_bytes
    term = WeightTerm(name=DRAFT_MODEL, total_bytes=loaded, stage_bytes=draft.stage_bytes, replicated=False)
    (held,), (added,) = plan.stage_bytes, draft.stage_bytes
    return replace(
        plan,
        stage_bytes=(held + added,),
        draft_bytes=draft.stage_bytes,
        terms=(*plan.terms, term),
        doubt="; ".join(filter(None, doubts)),
    )


def _blueprint(
    draft: DraftModel, model: Model, target: Blueprint
) -> tuple[Blueprint, TensorInventory | None, tuple[str, ...]]:
    """The draft's parts, its tensors by vLLM's names, and what cannot be known about what it shares."""
    build = DRAFT_BUILDS.get(draft.architecture)
    if build is None:
        # A model of its own shares nothing (v1/spec_decode/draft_model.py).
        whole = BUILDS.get(draft.architecture)
        if whole is None:
            raise NotModelledError(f"how the weights of {draft.architecture} are divided is not modelled")
        return whole(model), draft.tensors, ()
    section = model.whole.section("quantization_config")
    if section is not None and any(section.values.get(key) for key in _LEFT_OUT):
        # Their names count on from the target's layers.
        raise NotModelledError("layers that a quantized draft leaves out are not modelled")
    if draft.tensors is None or draft.tensors.problem:
        why = "its files are not known" if draft.tensors is None else draft.tensors.problem
        raise NotModelledError(
            f"whether it has an embedding and an output layer of its own is not known ({why})"
        )
    (embedding, head), rows = _vocabularies(target), model.text.count("vocab_size")
    own = owned(draft.tensors, embedding.rows)
    if not own.embedding and embedding.width != model.hidden:
        raise NotModelledError("it has no embedding of its own, and the target's has another width")
    doubts, tensors = [], as_loaded(draft.tensors)
    if own.embedding and (rows, model.hidden) == (embedding.rows, embedding.width):
        own, tensors = replace(own, embedding=False), without(tensors, EMBEDDING)
        doubts.append(_alike("an embedding", rows * model.hidden * DTYPE_BYTES[model.dtype], "did not"))
    if own.head and (head_rows(model), model.hidden) == (head.rows, head.width):
        doubts.append(_alike("an output layer", head.rows * head.width * DTYPE_BYTES[model.dtype], "did"))
    return build(model, own), tensors, tuple(doubts)


def _vocabularies(target: Blueprint) -> tuple[Vocabulary, Vocabulary]:
    """The target's embedding and output layer, which may be the same."""
    found = {part.term: part for _, parts in target.around for part in parts if isinstance(part, Vocabulary)}
    if "embedding" not in found:
        raise NotModelledError("the target's embedding is not modelled beside a draft")
    return found["embedding"], found.get("lm_head", found["embedding"])


def _alike(what: str, size_bytes: int, counted_as_if: str) -> str:
    """What only the values tell, which headers do not have."""
    return (
        f"it has {what} of its own ({size_text(size_bytes)}) of the shape of the target's: vLLM holds it only where the two "
        f"differ, and it is counted as if they {counted_as_if}"
    )
