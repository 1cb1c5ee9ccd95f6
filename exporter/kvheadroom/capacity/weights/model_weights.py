"""One model's weights, whoever holds them, and what pipeline stages and ranks hold of them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.model_config import ModelConfig
from kvheadroom.capacity.parallelism import pipeline_stages
from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.contradiction import NotTakenError
from kvheadroom.capacity.weights.files import ReadFiles, read_files
from kvheadroom.capacity.weights.own_types import AS_CONFIGURED, OwnTypes
from kvheadroom.capacity.weights.parts import Blueprint, Part, Parts, Vocabulary
from kvheadroom.capacity.weights.quantization import read_scheme, scheme_by_headers
from kvheadroom.capacity.weights.schemes import DTYPE_BYTES, Scheme
from kvheadroom.capacity.weights.shares import Ranks, held_bytes, stored_bytes
from kvheadroom.capacity.weights.weight_plan import WeightPlan, WeightTerm

Placed = list[tuple[str, Parts]]
"""Parts, each group with the beginning of its names."""
_MTP_LAYER = "model.layers.{}."
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a model's weights are, whoever holds them."""

    architecture: str
    blueprint: Blueprint
    scheme: Scheme
    dtype: str
    stored_dtype: str
    own: OwnTypes = AS_CONFIGURED

    def held(self, placed: Placed, ranks: Ranks) -> dict[str, int]:
        """Bytes on the first rank, by term."""

        def held(part: Part, prefix: str) -> int:
            if self.own.covers((prefix, part.name)):
                return self.own.held_bytes(part, ranks, self.dtype, prefix)
            return held_bytes(part, ranks, self.scheme, self.dtype, prefix)

        return self._sums(placed, held)

    def stored(self, placed: Placed) -> dict[str, int]:
        """Bytes in the checkpoint, by term."""

        def stored(part: Part, prefix: str) -> int:
            if self.own.covers((prefix, part.name)):
                return self.own.stored_bytes(part, self.stored_dtype, prefix)
            return stored_bytes(part, self.scheme, self.stored_dtype, prefix)

        return self._sums(placed, stored)

    def _sums(self, placed: Placed, size: Callable[[Part, str], int]) -> dict[str, int]:
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


def read_weights(
    architecture: str,
    model: Model,
    blueprint: Blueprint,
    tensors: TensorInventory | None,
    checkpoint_dtype: str | None,
) -> tuple[Weights, ReadFiles]:
    """The weights of a model, and what its files tell of them.

    Args:
        checkpoint_dtype: that of config.json, None where it names none.

    Raises:
        BadFieldError, NotModelledError: how they are quantized is not known.
    """
    scheme = _scheme(model.whole, model.text, tensors)
    if architecture in _OF_TRANSFORMERS:
        scheme = replace(scheme, float32_scales=0, own_scales=scheme.own_scales + scheme.float32_scales)
    read = read_files(blueprint, scheme, tensors)
    weights = Weights(
        architecture=architecture,
        blueprint=blueprint,
        scheme=scheme,
        dtype=model.dtype,
        stored_dtype=checkpoint_dtype if checkpoint_dtype in DTYPE_BYTES else model.dtype,
        own=read.own,
    )
    return weights, read


def _scheme(whole: ModelConfig, text: ModelConfig, tensors: TensorInventory | None) -> Scheme:
    try:
        return read_scheme(whole, text)
    except NotTakenError:
        raise
    except NotModelledError:
        by_headers = scheme_by_headers(whole, text)
        if by_headers is None or tensors is None or not tensors.stored:
            raise
        return by_headers


def plan_stages(
    weights: Weights, ranks: Ranks, *, pipeline: int = 1, mtp_modules: int = 0, drafts_by_mtp: bool = False
) -> WeightPlan:
    """The weights of one model on the first tensor-parallel rank of each of `pipeline` stages, by config.json.

    Args:
        mtp_modules: modules of multi-token prediction that the checkpoint has.
        drafts_by_mtp: they are loaded.

    Raises:
        NotDivisibleError, NotModelledError: they are not known.
    """
    blueprint = weights.blueprint
    stages = _stages(blueprint, pipeline)
    held = [weights.held(placed, ranks) for placed in stages]
    stored = weights.stored(
        [("", parts) for _, parts in blueprint.around]
        + [(f"model.layers.{index}.", parts) for index, parts in enumerate(blueprint.layers)]
    )
    whole = [
        weights.held([(prefix, tuple(filter(ranks.holds_whole, parts))) for prefix, parts in placed], ranks)
        for placed in stages
    ]
    mtp: Placed = (
        [] if blueprint.mtp is None else [(_MTP_LAYER.format(len(blueprint.layers)), blueprint.mtp.parts)]
    )
    stored_mtp = sum(weights.stored(mtp).values())
    draft = [0] * len(stages)
    if drafts_by_mtp:
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
        spare_bytes=_spare_bytes(weights, mtp_modules),
        terms=tuple(terms),
        basis="config",
    )


def _spare_bytes(weights: Weights, modules: int) -> int:
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


def _stages(blueprint: Blueprint, pipeline: int) -> list[Placed]:
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
