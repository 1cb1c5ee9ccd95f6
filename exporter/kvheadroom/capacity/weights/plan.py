"""Facts -> the weights that each pipeline stage's first tensor-parallel rank holds."""

from dataclasses import replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.facts import Draft, EngineFacts
from kvheadroom.capacity.families.multimodal import text_section
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.model_config import BadFieldError, ModelConfig
from kvheadroom.capacity.settings_resolution import compute_dtype
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.contradiction import NotTakenError, why_unknown
from kvheadroom.capacity.weights.draft_plan import plan_draft_weights, with_draft
from kvheadroom.capacity.weights.files import held_to_files
from kvheadroom.capacity.weights.model_weights import plan_stages, read_weights
from kvheadroom.capacity.weights.quantization import read_scheme, scheme_by_headers
from kvheadroom.capacity.weights.registry import BUILDS
from kvheadroom.capacity.weights.shares import NotDivisibleError, Ranks
from kvheadroom.capacity.weights.weight_plan import WeightPlan

_HOPPER = (9, 0)
_BLACKWELL = 10  # major compute capability of the GPUs of data centres
_GENERATIONS = ((8, 0), _HOPPER, (_BLACKWELL, 0))
# Inner and hidden size, for Triton's kernels, and by major capability for Marlin's and FlashInfer's TRT-LLM ones.
_TRITON = (64, 1)
_MXFP4_MULTIPLES = {8: (128, 256), _BLACKWELL: (128, 256), 12: (128, 256)}
# It pads the attention sinks of DeepSeek-V4 by the heads of one rank (models/deepseek_v4/attention.py).
_PADS_LOCAL_HEADS = "FLASHINFER_MLA_SPARSE_DSV4"


def plan_weights(facts: EngineFacts) -> WeightPlan | str:
    """The weights that each GPU holds; a string says why they are not known."""
    model, files = facts.model, facts.model_files
    if model is None or files is None:
        return "the model is not known"
    if facts.obstacles:
        return "; ".join(facts.obstacles)
    stages = facts.pipeline_parallel_size.value
    if stages > model.num_layers:
        return "there are more pipeline stages than layers"
    if facts.platform.value == CPU:
        return "weights on vLLM's CPU backend are not modelled"
    build = BUILDS.get(model.architecture)
    if build is None:
        return f"how the weights of {model.architecture} are divided is not modelled"
    if facts.flags.attention_backend == _PADS_LOCAL_HEADS:
        return f"the weights beside the backend {_PADS_LOCAL_HEADS} are not modelled"
    if stages > 1 and facts.draft.model is not None:
        return "the weights of a draft model beside several pipeline stages are not modelled"
    text, whole = text_section(model.architecture, files.config), ModelConfig(files.config)
    ranks = _possible_ranks(facts)
    try:
        dtype = compute_dtype(facts, model)
        of_model = Model(text, whole, model.stack, dtype)
        blueprint = build(of_model)
        weights, read = read_weights(model.architecture, of_model, blueprint, files.tensors, model.dtype)
        plans = [
            plan_stages(
                weights,
                each,
                pipeline=stages,
                mtp_modules=len(model.stack.mtp or ()),
                drafts_by_mtp=facts.draft.method == "mtp",
            )
            for each in ranks
        ]
    except (BadFieldError, NotDivisibleError, NotModelledError) as reason:
        return why_unknown(reason)
    if any(plan != plans[0] for plan in plans):
        return f"the weights of {model.architecture} depend on the GPU, which is not known"
    plan = held_to_files(plans[0], read)
    if isinstance(plan, str) or facts.draft.model is None:
        return plan
    return with_draft(plan, plan_draft_weights(facts.draft.model, blueprint, ranks, dtype))


def headers_may_tell(facts: EngineFacts) -> bool:
    """Whether only how layers are quantized is not read from config.json, which headers of the files tell."""
    model, files = facts.model, facts.model_files
    if model is None or files is None or model.architecture not in BUILDS:
        return False
    text, whole = text_section(model.architecture, files.config), ModelConfig(files.config)
    try:
        read_scheme(whole, text)
    except (BadFieldError, NotTakenError):
        return False
    except NotModelledError:
        return scheme_by_headers(whole, text) is not None
    return False


def target_bytes(facts: EngineFacts) -> tuple[int, ...] | str:
    """The weights of the model alone, without what a draft adds, on each stage's first rank."""
    if facts.pipeline_parallel_size.value == 1:
        facts = replace(facts, draft=Draft())
    # With several stages some classes keep their embedding on the last one as well, for the draft
    # (`spec_decode_needs_target_embed`, models/utils.py): then both are known, or neither is.
    plan = plan_weights(facts)
    if isinstance(plan, str):
        return plan
    return tuple(held - drafted for held, drafted in zip(plan.stage_bytes, plan.draft_bytes, strict=True))


def _possible_ranks(facts: EngineFacts) -> list[Ranks]:
    """How the weights are divided, on the GPU or, where that is not known, on each generation of them.

    Experts are divided over data-parallel and prefill-context-parallel ranks as well.
    """
    tensor, data = facts.tensor_parallel_size.value, facts.data_parallel_size.value
    experts = tensor * data * facts.prefill_context_parallel_size.value
    spread = facts.enable_expert_parallel.value
    capabilities = _GENERATIONS if facts.capability is None else (facts.capability,)
    return [
        Ranks(
            tensor=tensor,
            experts=experts,
            expert_parallel=spread and experts > 1,
            whole_shared_experts=spread and tensor > 1 and data > 1,
            trtllm=capability[0] == _BLACKWELL,
            float32_routers=capability != _HOPPER and capability[0] != _BLACKWELL,
            mxfp4_multiples=_TRITON if capability == _HOPPER else _MXFP4_MULTIPLES.get(capability[0]),
        )
        for capability in capabilities
    ]
