"""Facts -> the weights that each pipeline stage's first tensor-parallel rank holds."""

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
from kvheadroom.capacity.weights.files import held_to_files, read_files
from kvheadroom.capacity.weights.own_types import AS_CONFIGURED, OwnTypes
from kvheadroom.capacity.weights.parts import Blueprint, Part, Parts, Vocabulary
from kvheadroom.capacity.weights.quantization import read_scheme, scheme_by_headers
from kvheadroom.capacity.weights.registry import BUILDS
from kvheadroom.capacity.weights.schemes import DTYPE_BYTES, Scheme
from kvheadroom.capacity.weights.shares import NotDivisibleError, Ranks, held_bytes, stored_bytes
from kvheadroom.capacity.weights.weight_plan import WeightPlan, WeightTerm

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
        scheme = _scheme(whole, text, files.tensors)
        if model.architecture in _OF_TRANSFORMERS:
            scheme = replace(scheme, float32_scales=0, own_scales=scheme.own_scales + scheme.float32_scales)
        blueprint = build(Model(text, whole, model.stack, dtype))
        read = read_files(blueprint, scheme, files.tensors)
        weights = _Weights(
            architecture=model.architecture,
            blueprint=blueprint,
            scheme=scheme,
            dtype=dtype,
            stored_dtype=model.dtype if model.dtype in DTYPE_BYTES else dtype,
            own=read.own,
        )
        plans = [_plan(facts, weights, ranks) for ranks in _possible_ranks(facts)]
    except (BadFieldError, NotDivisibleError, NotModelledError) as reason:
        return str(reason)
    if any(plan != plans[0] for plan in plans):
        return f"the weights of {model.architecture} depend on the GPU, which is not known"
    return held_to_files(plans[0], read)


def _scheme(whole: ModelConfig, text: ModelConfig, tensors: TensorInventory | None) -> Scheme:
    try:
        return read_scheme(whole, text)
    except NotModelledError:
        by_headers = scheme_by_headers(whole, text)
        if by_headers is None or tensors is None or not tensors.stored:
            raise
        return by_headers


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
    own: OwnTypes = AS_CONFIGURED

    @property
    def layers(self) -> int:
        return len(self.blueprint.layers)

    def held(self, placed: _Placed, ranks: Ranks) -> dict[str, int]:
        """Bytes on the first rank, by term."""

        def held(part: Part, prefix: str) -> int:
            if self.own.covers((prefix, part.name)):
                return self.own.held_bytes(part, ranks, self.dtype, prefix)
            return held_bytes(part, ranks, self.scheme, self.dtype, prefix)

        return self._sums(placed, held)

    def stored(self, placed: _Placed) -> dict[str, int]:
        """Bytes in the checkpoint, by term."""

        def stored(part: Part, prefix: str) -> int:
            if self.own.covers((prefix, part.name)):
                return self.own.stored_bytes(part, self.stored_dtype, prefix)
            return stored_bytes(part, self.scheme, self.stored_dtype, prefix)

        return self._sums(placed, stored)

    def _sums(self, placed: _Placed, size: Callable[[Part, str], int]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        # Most layers are alike; where the checkpoint leaves some out by name, each is looked at.
        known: dict[Parts, Counter[str]] = {}
        for prefix, parts in placed:
            sums = None if self.scheme.skips or self.own else known.get(parts)
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
        quantized = weights.scheme.linear is not None or weights.scheme.by_headers
        if quantized and (weights.scheme.by_headers or not blueprint.mtp.quantizable):
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
