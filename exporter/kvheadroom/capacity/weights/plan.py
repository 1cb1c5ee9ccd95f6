"""Facts -> the weights that each pipeline stage's first tensor-parallel rank holds."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.facts import Draft, EngineFacts, TensorInventory
from kvheadroom.capacity.families.multimodal import text_section
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.model_config import BadFieldError, ModelConfig
from kvheadroom.capacity.parallelism import pipeline_stages
from kvheadroom.capacity.settings_resolution import compute_dtype
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.contradiction import another_checkpoint
from kvheadroom.capacity.weights.parts import Blueprint, Part, Parts, Vocabulary
from kvheadroom.capacity.weights.quantization import read_scheme
from kvheadroom.capacity.weights.registry import BUILDS
from kvheadroom.capacity.weights.schemes import DTYPE_BYTES, Scheme
from kvheadroom.capacity.weights.shares import NotDivisibleError, Ranks, held_bytes, stored_bytes

# Built with transformers' own modeling, which makes all their parameters in the model's dtype
# (`init_parameters`, models/transformers/base.py).
_OF_TRANSFORMERS = frozenset(
    {
        "ArceeForCausalLM",
        "CwmForCausalLM",
        "Dots1ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPTBigCodeForCausalLM",
        "GPTNeoXForCausalLM",
        "GlmForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "Jais2ForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "PhiForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
# Files may hold buffers and scales of their own.
_TOLERANCE = 0.01
# Layers of multi-token prediction stand behind the others, or under a name of their own.
_LAYER_NUMBER = re.compile(r"^(?:model\.|language_model\.|model\.language_model\.)*layers\.(\d{1,6})\.")
_MTP_NAME = re.compile(r"(?:^|\.)mtp(?:\.|_)")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_Placed = list[tuple[str, Parts]]
"""Parts, each group with the beginning of its names."""
_MTP_LAYER = "model.layers.{}."
_HOPPER = (9, 0)
_BLACKWELL = 10  # major compute capability of the GPUs of data centres
_GENERATIONS = ((8, 0), _HOPPER, (_BLACKWELL, 0))
# Inner and hidden size, for Triton's kernels, and by major capability for Marlin's and FlashInfer's TRT-LLM ones.
_TRITON = (64, 1)
_MXFP4_MULTIPLES = {8: (128, 256), _BLACKWELL: (128, 256), 12: (128, 256)}
# It pads the attention sinks of DeepSeek-V4 by the heads of one rank (models/deepseek_v4/attention.py).
_PADS_LOCAL_HEADS = "FLASHINFER_MLA_SPARSE_DSV4"


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
        total_bytes: the checkpoint's, or, by config.json alone, what it would be.
        not_loaded_bytes: tensors of the checkpoint that this start does not load.
        replicated_bytes: what every rank holds whole, of the stage with the most.
        spare_bytes: the most that the checkpoint may hold beside total_bytes and no start loads: copies of the vocabulary
            in the layers of multi-token prediction, or such layers where they are not modelled.
        basis: `headers`, `index` or `config`.
    """

    stage_bytes: tuple[int, ...]
    draft_bytes: tuple[int, ...]
    total_bytes: int
    not_loaded_bytes: int
    replicated_bytes: int
    spare_bytes: int
    terms: tuple[WeightTerm, ...]
    basis: str


def plan_weights(facts: EngineFacts) -> WeightPlan | str:
    """The weights that each GPU holds; a string says why they are not known."""
    model, files = facts.model, facts.model_files
    if model is None or files is None:
        return "the model is not known"
    if facts.obstacles:
        return "; ".join(facts.obstacles)
    if facts.pipeline_parallel_size.value > model.num_layers:
        return "there are more pipeline stages than layers"
    if facts.platform.value == CPU:
        return "weights on vLLM's CPU backend are not modelled"
    build = BUILDS.get(model.architecture)
    if build is None:
        return f"how the weights of {model.architecture} are divided is not modelled"
    if facts.flags.attention_backend == _PADS_LOCAL_HEADS:
        return f"the weights beside the backend {_PADS_LOCAL_HEADS} are not modelled"
    text, whole = text_section(model.architecture, files.config), ModelConfig(files.config)
    try:
        dtype = compute_dtype(facts, model)
        scheme = read_scheme(whole, text)
        if model.architecture in _OF_TRANSFORMERS:
            scheme = replace(scheme, float32_scales=0, own_scales=scheme.own_scales + scheme.float32_scales)
        weights = _Weights(
            architecture=model.architecture,
            blueprint=build(Model(text, whole, model.stack, dtype)),
            scheme=scheme,
            dtype=dtype,
            stored_dtype=model.dtype if model.dtype in DTYPE_BYTES else dtype,
        )
        plans = [_plan(facts, weights, ranks) for ranks in _possible_ranks(facts)]
    except (BadFieldError, NotDivisibleError, NotModelledError) as reason:
        return str(reason)
    if any(plan != plans[0] for plan in plans):
        return f"the weights of {model.architecture} depend on the GPU, which is not known"
    return _held_to_files(plans[0], files.tensors, len(weights.blueprint.layers))


def _held_to_files(plan: WeightPlan, tensors: TensorInventory | None, layers: int) -> WeightPlan | str:
    """The plan with what the checkpoint itself tells; a string where that is something else.

    Of files with a fault nothing is taken.
    """
    if tensors is None or tensors.problem:
        return plan
    total = tensors.total_bytes
    if total is None:
        has_mtp = any(_is_mtp(name, layers) for name in tensors.sizes)
        left_out = 0 if has_mtp else plan.not_loaded_bytes
        return replace(
            plan,
            total_bytes=plan.total_bytes - left_out,
            not_loaded_bytes=plan.not_loaded_bytes - left_out,
            spare_bytes=plan.spare_bytes if has_mtp else 0,
            basis="index",
        )
    mtp = sum(size or 0 for name, size in tensors.sizes.items() if _is_mtp(name, layers))
    copies = sum(
        size or 0
        for name, size in tensors.sizes.items()
        if name in _HEADS and all(term.name != "lm_head" for term in plan.terms)
    )
    loaded = total - mtp - copies
    expected = plan.total_bytes - plan.not_loaded_bytes - _drafted(plan)
    if abs(loaded - expected) > _TOLERANCE * expected:
        return another_checkpoint("weights to load", expected, loaded)
    return replace(
        plan,
        total_bytes=total,
        not_loaded_bytes=copies + (0 if any(plan.draft_bytes) else mtp),
        basis="headers",
    )


def _is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor of the checkpoint belongs to multi-token prediction."""
    found = _LAYER_NUMBER.search(name)
    return _MTP_NAME.search(name) is not None or (found is not None and int(found[1]) >= layers)


def _drafted(plan: WeightPlan) -> int:
    return sum(term.total_bytes for term in plan.terms if term.name == "draft")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """What a model's weights are, whoever holds them."""

    architecture: str
    blueprint: Blueprint
    scheme: Scheme
    dtype: str
    stored_dtype: str

    @property
    def layers(self) -> int:
        return len(self.blueprint.layers)

    def held(self, placed: _Placed, ranks: Ranks) -> dict[str, int]:
        """Bytes on the first rank, by term."""
        return self._sums(
            placed, lambda part, prefix: held_bytes(part, ranks, self.scheme, self.dtype, prefix)
        )

    def stored(self, placed: _Placed) -> dict[str, int]:
        """Bytes in the checkpoint, by term."""
        return self._sums(
            placed, lambda part, prefix: stored_bytes(part, self.scheme, self.stored_dtype, prefix)
        )

    def _sums(self, placed: _Placed, size: Callable[[Part, str], int]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        # Most layers are alike; where the checkpoint leaves some out by name, each is looked at.
        known: dict[Parts, Counter[str]] = {}
        for prefix, parts in placed:
            sums = None if self.scheme.skips else known.get(parts)
            if sums is None:
                sums = known[parts] = Counter()
                for part in parts:
                    sums[part.term] += size(part, prefix)
            totals.update(sums)
        return totals


def _plan(facts: EngineFacts, weights: _Weights, ranks: Ranks) -> WeightPlan:
    blueprint = weights.blueprint
    stages = _stages(blueprint, facts.pipeline_parallel_size.value)
    held = [weights.held(placed, ranks) for placed in stages]
    stored = weights.stored(
        [("", parts) for _, parts in blueprint.around]
        + [(f"model.layers.{index}.", parts) for index, parts in enumerate(blueprint.layers)]
    )
    whole = [
        weights.held([(prefix, tuple(filter(ranks.holds_whole, parts))) for prefix, parts in placed], ranks)
        for placed in stages
    ]
    mtp: _Placed = [] if blueprint.mtp is None else [(_MTP_LAYER.format(weights.layers), blueprint.mtp.parts)]
    stored_mtp = sum(weights.stored(mtp).values())
    draft = [0] * len(stages)
    if facts.draft.method == "mtp":
        if blueprint.mtp is None:
            raise NotModelledError(
                f"the weights of multi-token prediction of {weights.architecture} are not modelled"
            )
        if weights.scheme.linear is not None and not blueprint.mtp.quantizable:
            raise NotModelledError(
                f"the weights of multi-token prediction of {weights.architecture} are not modelled when quantized"
            )
        if len(stages) > 1 and not blueprint.mtp.shares_over_stages:
            mtp.append(("", blueprint.mtp.embedding))
        draft[-1] = sum(weights.held(mtp, ranks).values())
    elif facts.draft.layers:
        raise NotModelledError("the weights of a draft model are not modelled")
    terms = [
        WeightTerm(
            name=name,
            total_bytes=total,
            stage_bytes=tuple(stage.get(name, 0) for stage in held),
            replicated=all(
                stage.get(name, 0) == kept.get(name, 0) for stage, kept in zip(held, whole, strict=True)
            ),
        )
        for name, total in stored.items()
    ]
    if any(draft):
        terms.append(
            WeightTerm(name="draft", total_bytes=stored_mtp, stage_bytes=tuple(draft), replicated=False)
        )
    return WeightPlan(
        stage_bytes=tuple(sum(stage.values()) + drafted for stage, drafted in zip(held, draft, strict=True)),
        draft_bytes=tuple(draft),
        total_bytes=sum(stored.values()) + stored_mtp,
        not_loaded_bytes=0 if any(draft) else stored_mtp,
        replicated_bytes=max(sum(stage.values()) for stage in whole),
        spare_bytes=_spare_bytes(weights, 0 if facts.model is None else len(facts.model.stack.mtp or ())),
        terms=tuple(terms),
        basis="config",
    )


def _spare_bytes(weights: _Weights, modules: int) -> int:
    """As in `WeightPlan`; a module that is not modelled is at most a layer with a joint projection and a vocabulary."""
    blueprint = weights.blueprint
    if blueprint.mtp is not None:
        return sum(weights.stored([("", blueprint.mtp.embedding * modules + blueprint.mtp.heads)]).values())
    if not modules:
        return 0
    vocabulary = [part for _, parts in blueprint.around for part in parts if isinstance(part, Vocabulary)]
    rows, width = max((part.rows, part.width) for part in vocabulary)
    around = (2 * rows * width + 2 * width * width) * DTYPE_BYTES[weights.stored_dtype]
    layers = enumerate(blueprint.layers)
    largest = max(
        sum(weights.stored([(f"model.layers.{index}.", parts)]).values()) for index, parts in layers
    )
    return modules * (largest + around)


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


def _stages(blueprint: Blueprint, pipeline: int) -> list[_Placed]:
    """The parts of each pipeline stage, with the name of what they stand in."""
    stages, first = [], 0
    for stage, count in enumerate(pipeline_stages(len(blueprint.layers), pipeline)):
        around = [("", parts) for where, parts in blueprint.around if where.holds(stage, pipeline)]
        layers = [
            (f"model.layers.{index}.", blueprint.layers[index]) for index in range(first, first + count)
        ]
        stages.append(around + layers)
        first += count
    return stages
