"""Facts -> how the KV cache of an engine is cut: bytes of a block, blocks of a session.

The steps are vLLM's own, in its order: dtypes and backends (`layer_specs`), groups (`kv_groups`), bytes and blocks.
Source: vLLM 0.33.0 `v1/core/kv_cache_planning.py`, `v1/engine/core.py` (_initialize_kv_caches).
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from kvheadroom.capacity.cache_settings import (
    NotModelledError,
    PlacedLayer,
    VllmRefusesError,
)
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import CPU, GPUS
from kvheadroom.capacity.kv_groups import CannotGroupError, KvGroup, bytes_per_block, group_layers
from kvheadroom.capacity.kv_specs import HOLDS_BATCHES, HOLDS_EVERY_TOKEN, Kind, RequestShape
from kvheadroom.capacity.layer_specs import PlannedSpecs, plan_specs
from kvheadroom.capacity.layers import Mamba1State, Mamba2State, StateLayer
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.offload_rules import Hybrids
from kvheadroom.capacity.offloading import offloading_refusal
from kvheadroom.capacity.parallelism import pipeline_stages
from kvheadroom.capacity.refusals import refusals
from kvheadroom.capacity.settings_resolution import resolve_settings

# Every generation: where the GPU is not said, they must agree. 8.6 plans as 8.0 does: within 8.x vLLM tells 8.9 apart and
# nothing else. Its tests there are `has_device_capability(89)` (platforms/cuda.py supports_fp8, backends/triton_attn.py,
# mla/triton_mla.py), floors of 8.0 or less, and families, which are whole major versions.
_GENERATIONS = tuple(dict.fromkeys(gpu.capability for gpu in GPUS.values() if gpu.capability != (8, 6)))

# Classes with attention of their own, which goes its own way with `--kv-cache-dtype-skip-layers`.
_OWN_ATTENTION = ("KimiK3", "MiniMaxM3")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How the KV cache of one GPU is cut, with every number that led there.

    Attributes:
        groups: layers with a block table of their own each; they share the pool.
        stage_layers: caches on each pipeline stage; one stage without pipeline parallelism.
        stage_bytes_per_block: bytes of one block on one GPU of each stage.
        how: the cut in words, for people.
        kv_dtype: vLLM's word for the type of the cache, as it reports it.
        block_size: tokens of one block on one GPU, as vLLM reports it: the smallest of all groups that take part in
            prefix caching.
        shape: what a request's blocks depend on beside its length.
    """

    groups: tuple[KvGroup, ...]
    stage_layers: tuple[int, ...]
    stage_bytes_per_block: tuple[int, ...]
    how: str
    kv_dtype: str
    block_size: int
    shape: RequestShape

    @property
    def num_kv_groups(self) -> int:
        """KV cache groups that share the pool; 1 where all layers hold every token."""
        return len(self.groups)

    @property
    def decode_context(self) -> int:
        """GPUs over which the tokens of a context are spread."""
        return self.shape.decode_context

    @property
    def bytes_per_block(self) -> int:
        """The most that one block takes on a GPU."""
        return max(self.stage_bytes_per_block)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the pool of one GPU that each further token of a long session takes, the stage with the most.

        With decode context parallelism the GPU's share. 0 where no layer holds every token; a fixed part per session
        is not in it.
        """
        return max(self.stage_bytes_per_token)

    @property
    def stage_bytes_per_token(self) -> tuple[float, ...]:
        """The same for each pipeline stage."""
        exact = (
            sum(
                (Fraction(size, group.block_size * self.decode_context) for group in self._growing()),
                Fraction(),
            )
            for size in self.stage_bytes_per_block
        )
        return tuple(value.numerator if value.denominator == 1 else float(value) for value in exact)

    @property
    def block_tokens(self) -> int:
        """Tokens of one context that a block holds, over all GPUs that share it, where every token is held."""
        growing = self._growing()
        return growing[0].block_size * self.decode_context if growing else self.block_size

    @property
    def holds_every_token(self) -> bool:
        """Whether all layers hold every token in the same blocks, so that blocks x block size are tokens."""
        return len(self.groups) == 1 and _holds_every_token(self.groups[0])

    def _growing(self) -> list[KvGroup]:
        return [group for group in self.groups if _holds_every_token(group)]

    def blocks_per_session(self, tokens: int) -> int:
        """Blocks that one session of `tokens` tokens holds, over all groups."""
        return sum(group.blocks(tokens, self.shape) for group in self.groups)

    def longest_session(self, blocks: int, at_most: int) -> int:
        """The longest session, up to `at_most` tokens, that `blocks` blocks hold; 0 if none does."""
        if at_most < 1 or self.blocks_per_session(1) > blocks:
            return 0
        low, high = 1, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_per_session(middle) <= blocks else (low, middle - 1)
        return low


def _holds_every_token(group: KvGroup) -> bool:
    return group.specs[0].kind in HOLDS_EVERY_TOKEN


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why vLLM would not start with these facts, each one sentence."""

    reasons: tuple[str, ...]


def plan_layout(facts: EngineFacts) -> KvLayout | Refusal | str | None:
    """The layout vLLM would choose; a string says why it cannot be predicted; None when facts are missing."""
    model = facts.model
    if facts.obstacles or model is None:
        return None
    refused = refusals(model, facts)
    if refused:
        return Refusal(refused)
    if facts.platform.value == CPU or facts.capability is not None:
        return _plan_on(facts, model, facts.capability)
    plans = [_without_kernels(_plan_on(facts, model, capability)) for capability in _GENERATIONS]
    if all(plan == plans[0] for plan in plans):
        return plans[0]
    return (
        "with this model and these flags the GPU decides how the cache is cut; say it (`gpu: H200`, or what "
        "`nvidia-smi -L` calls it)"
    )


def _without_kernels(plan: KvLayout | Refusal | str) -> KvLayout | Refusal | str:
    """The same plan without what kernels ask for, which a block's bytes have in them already."""
    if not isinstance(plan, KvLayout):
        return plan
    cut = {
        spec: replace(spec, kernel_tokens=None, stride_bytes=None)
        for group in plan.groups
        for spec in group.distinct
    }
    groups = (KvGroup(group.layers, tuple(cut[spec] for spec in group.specs)) for group in plan.groups)
    return replace(plan, groups=tuple(groups))


def _plan_on(
    facts: EngineFacts, model: ModelGeometry, capability: tuple[int, int] | None
) -> KvLayout | Refusal | str:
    unmodelled = _not_modelled(facts, model)
    if unmodelled:
        return unmodelled
    try:
        layers = _placed_layers(facts, model)
        settings = resolve_settings(facts, model, capability)
        if settings.prefix_caching and facts.rules.keeps_mamba_states and _has_mamba(model):
            return "prefix caching of Mamba states before vLLM 0.28 is not modelled; without prefix caching it is"
        planned = plan_specs(layers, settings)
        groups = group_layers(
            planned.specs,
            block_outermost=planned.block_outermost,
            promote_windows=_promotes_windows(facts, model),
            largest_kind_factor=facts.rules.largest_kind_factor,
        )
        kinds = {group.specs[0].kind for group in groups}
        if kinds & HOLDS_BATCHES and facts.max_num_batched_tokens is None:
            return (
                "windows hold the tokens of a batch, and how many that are depends on the GPU; say it (`gpu: H200`) or "
                "`flags: {max_num_batched_tokens: N}`"
            )
        windows = kinds & {Kind.WINDOW, Kind.LATENT_WINDOW}
        if windows and facts.parallelism.decode_context > 1:
            return Refusal(("decode context parallelism does not support sliding windows",))
        if facts.flags.offloading:
            refused = offloading_refusal(
                groups,
                decode_context=facts.decode_context_parallel_size.value,
                prefix_caching=settings.prefix_caching,
                rings_too=facts.rules.offloading_checks_rings,
            )
            if refused is not None:
                return Refusal((refused,))
        return _layout(facts, layers, planned, groups)
    except (VllmRefusesError, CannotGroupError) as reason:
        return Refusal((str(reason),))
    except NotModelledError as reason:
        return str(reason)


def _keeps_hybrid_manager(facts: EngineFacts) -> bool:
    """Whether layers of several kinds stay in groups of their own beside the connector (`config/vllm.py` __post_init__)."""
    keeps = facts.rules.offload.keeps_hybrid_manager
    is_of_size_alone = facts.offload.size_gib is not None and not facts.offload.connector
    return facts.flags.offloading and (
        keeps is Hybrids.ALWAYS or (keeps is Hybrids.BY_SIZE and is_of_size_alone)
    )


def _not_modelled(facts: EngineFacts, model: ModelGeometry) -> str:
    """What of these facts goes beyond the rules, whatever the layers; empty where nothing does."""
    flags, parallelism = facts.flags, facts.parallelism
    spread, stages = parallelism.decode_context > 1, parallelism.pipeline > 1
    vision = model.vision_heads is not None and model.vision_heads % parallelism.tensor
    turboquant = facts.kv_cache_dtype.value.startswith("turboquant_")
    kimi_k3 = model.architecture.startswith("KimiK3")
    checks = (
        (
            flags.connector and len(set(model.caches())) > 1 and not _keeps_hybrid_manager(facts),
            "a KV connector may switch the hybrid KV cache manager off, which is not modelled with layers of several kinds",
        ),
        (
            bool(flags.kv_cache_dtype_skip_layers) and model.architecture.startswith(_OWN_ATTENTION),
            f"layers left unquantized are not modelled for {model.architecture}, whose attention is its own",
        ),
        (
            spread and flags.disable_hybrid_kv_cache_manager and model.has_chunks,
            "decode context parallelism without the hybrid KV cache manager is not modelled",
        ),
        (
            spread and facts.draft.method in ("draft_model", "eagle", "eagle3"),
            "a draft model beside decode context parallelism is not modelled",
        ),
        (
            stages and facts.draft.method == "draft_model",
            "a draft model over pipeline stages is not modelled",
        ),
        (
            stages and model.architecture.startswith("Qwen4Exp"),
            "Qwen4-Exp over pipeline stages is not modelled",
        ),
        (
            kimi_k3 and not facts.rules.saves_states,
            "Kimi-K3 before vLLM 0.32, which saved its states by rules of its own, is not modelled",
        ),
        (stages and turboquant, "TurboQuant over pipeline stages is not modelled"),
        (
            bool(vision),
            f"{model.vision_heads} heads of vision with tensor_parallel_size={parallelism.tensor} are not modelled",
        ),
    )
    return next((reason for applies, reason in checks if applies), "")


def _has_mamba(model: ModelGeometry) -> bool:
    states = (cache.state for cache in model.caches() if isinstance(cache, StateLayer))
    return any(isinstance(state, Mamba1State | Mamba2State) for state in states)


def _promotes_windows(facts: EngineFacts, model: ModelGeometry) -> bool:
    """Whether windows keep every token: by flag, because of chunks beside a draft, or of any chunks in old releases.

    `config/vllm.py`.
    """
    drafts = facts.draft.method in ("eagle", "eagle3", "mtp")
    whole_chunks = model.has_chunks and (drafts or not facts.rules.chunks_are_local)
    return facts.flags.disable_hybrid_kv_cache_manager or whole_chunks


def _placed_layers(facts: EngineFacts, model: ModelGeometry) -> list[PlacedLayer]:
    """The model's caches stage by stage, the draft's on the last one."""
    stages = pipeline_stages(model.num_layers, facts.pipeline_parallel_size.value)
    placed, index = [], 0
    for stage, count in enumerate(stages):
        for caches in model.stack.layers[index : index + count]:
            placed += [PlacedLayer(layer=cache, index=index, stage=stage) for cache in caches]
            index += 1
    for caches in facts.draft.layers:
        placed += [
            PlacedLayer(layer=cache, index=index, stage=len(stages) - 1, draft=True) for cache in caches
        ]
        index += 1
    return placed


def _layout(
    facts: EngineFacts,
    layers: list[PlacedLayer],
    planned: PlannedSpecs,
    groups: tuple[KvGroup, ...],
) -> KvLayout:
    stages = facts.pipeline_parallel_size.value
    places = [[i for i, placed in enumerate(layers) if placed.stage == stage] for stage in range(stages)]
    if not all(places):
        raise NotModelledError("a pipeline stage without a KV cache is not modelled")
    sizes = tuple(
        bytes_per_block(
            [group.of_stage(range(place[0], place[-1] + 1)) for group in groups],
            block_outermost=planned.block_outermost,
            packed=facts.rules.packed_blocks,
        )
        for place in places
    )
    cached = [group.block_size for group in groups if group.specs[0].prefix_cacheable]
    layout = KvLayout(
        groups=groups,
        stage_layers=tuple(map(len, places)),
        stage_bytes_per_block=sizes,
        how="",
        kv_dtype=planned.cache_dtype,
        block_size=min(cached or [group.block_size for group in groups]),
        shape=RequestShape(
            decode_context=facts.decode_context_parallel_size.value,
            in_flight_tokens=facts.in_flight_tokens,
            encoder_tokens=facts.batched_tokens,
        ),
    )
    return replace(layout, how=_how(layout))


def _how(layout: KvLayout) -> str:
    """The cut in words: what every group holds."""
    return "; ".join(
        f"{len(group.specs)} × {group.specs[0].kind.value} in blocks of {group.block_size:,} tokens, "
        f"{sum(spec.page_bytes for spec in group.specs):,} B"
        for group in layout.groups
    )
