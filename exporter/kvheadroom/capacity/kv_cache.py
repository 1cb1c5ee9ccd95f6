"""Facts -> how the KV cache of an engine is cut: bytes of a block, blocks of a session.

The steps are vLLM's own, in its order: dtypes and backends (`layer_specs`), groups (`kv_groups`), bytes and blocks.
Source: vLLM 0.33.0 `v1/core/kv_cache_planning.py`, `v1/engine/core.py` (_initialize_kv_caches).
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from kvheadroom.capacity.attention_backends import ModelTraits
from kvheadroom.capacity.cache_settings import (
    CacheSettings,
    NotModelledError,
    PlacedLayer,
    VllmRefusesError,
)
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import CPU, GPUS
from kvheadroom.capacity.kv_groups import CannotGroupError, KvGroup, bytes_per_block, group_layers
from kvheadroom.capacity.kv_specs import HOLDS_BATCHES, HOLDS_EVERY_TOKEN, Kind, RequestShape
from kvheadroom.capacity.layer_specs import PlannedSpecs, plan_specs
from kvheadroom.capacity.layers import AttentionLayer
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.offloading import offloading_refusal
from kvheadroom.capacity.parallelism import pipeline_stages
from kvheadroom.capacity.refusals import refusals

# One card of every generation: where the GPU is not said, they must agree.
_GENERATIONS = tuple(dict.fromkeys(gpu.capability for gpu in GPUS.values()))

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
        """Bytes of the pool of one GPU that each further token of a long session takes.

        With decode context parallelism the GPU's share. 0 where no layer holds every token; a fixed part per session
        is not in it.
        """
        exact = sum(
            (
                Fraction(self.bytes_per_block, group.block_size * self.decode_context)
                for group in self._growing()
            ),
            Fraction(),
        )
        return exact.numerator if exact.denominator == 1 else float(exact)

    @property
    def block_tokens(self) -> int:
        """Tokens of one context that a block holds, over all GPUs that share it, where every token is held."""
        growing = self._growing()
        return growing[0].block_size * self.decode_context if growing else self.block_size

    @property
    def holds_every_token(self) -> bool:
        """Whether all layers hold every token in the same blocks, so that blocks x block size are tokens."""
        return len(self.groups) == 1 and len(self._growing()) == 1

    def _growing(self) -> list[KvGroup]:
        return [group for group in self.groups if group.specs[0].kind in HOLDS_EVERY_TOKEN]

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
        "with this model and these flags the GPU decides how the cache is cut; say it (`gpu: H200`; "
        f"known: {', '.join(GPUS)})"
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
        settings = _settings(facts, model, capability)
        planned = plan_specs(layers, settings)
        groups = group_layers(
            planned.specs,
            block_outermost=planned.block_outermost,
            promote_windows=_promotes_windows(facts, model),
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


def _not_modelled(facts: EngineFacts, model: ModelGeometry) -> str:
    """What of these facts goes beyond the rules, whatever the layers; empty where nothing does."""
    flags, parallelism = facts.flags, facts.parallelism
    spread, stages = parallelism.decode_context > 1, parallelism.pipeline > 1
    vision = model.vision_heads is not None and model.vision_heads % parallelism.tensor
    turboquant = facts.kv_cache_dtype.value.startswith("turboquant_")
    checks = (
        (
            flags.connector and len(set(model.caches())) > 1,
            "a KV connector may switch the hybrid KV cache manager off, which is not modelled with layers of several kinds",
        ),
        (
            bool(flags.kv_cache_dtype_skip_layers) and model.architecture.startswith(_OWN_ATTENTION),
            f"layers left unquantized are not modelled for {model.architecture}, whose attention is its own",
        ),
        (
            spread and flags.disable_hybrid_kv_cache_manager and _has_chunks(model),
            "decode context parallelism without the hybrid KV cache manager is not modelled",
        ),
        (
            spread and facts.draft.method in ("draft_model", "eagle", "eagle3"),
            "a draft model beside decode context parallelism is not modelled",
        ),
        (
            stages and model.architecture.startswith("Qwen4Exp"),
            "Qwen4-Exp over pipeline stages is not modelled",
        ),
        (stages and turboquant, "TurboQuant over pipeline stages is not modelled"),
        (
            bool(vision),
            f"{model.vision_heads} heads of vision with tensor_parallel_size={parallelism.tensor} are not modelled",
        ),
    )
    return next((reason for applies, reason in checks if applies), "")


def _promotes_windows(facts: EngineFacts, model: ModelGeometry) -> bool:
    """Whether windows keep every token: by flag, or because of chunks beside a draft (config/vllm.py)."""
    drafts = facts.draft.method in ("eagle", "eagle3", "mtp")
    return facts.flags.disable_hybrid_kv_cache_manager or (drafts and _has_chunks(model))


def _has_chunks(model: ModelGeometry) -> bool:
    return any(isinstance(cache, AttentionLayer) and cache.chunk for cache in model.caches())


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


def _settings(facts: EngineFacts, model: ModelGeometry, capability: tuple[int, int] | None) -> CacheSettings:
    flags, stack, tp = facts.flags, model.stack, facts.tensor_parallel_size.value
    compute_dtype = _compute_dtype(facts, model)
    cache_dtype = _cache_dtype(facts, model, capability)
    if {cache_dtype, compute_dtype} == {"float16", "bfloat16"}:
        raise VllmRefusesError(
            f"kv_cache_dtype={cache_dtype} is incompatible with a model in {compute_dtype}"
        )
    prefix_caching = flags.enable_prefix_caching
    if prefix_caching is None:
        # Models of recurrent states alone have it off (`is_prefix_caching_supported`, config/model.py).
        prefix_caching = stack.hybrid or not model.has_states
    state_block_size = flags.mamba_block_size if not stack.hybrid else None
    if not prefix_caching:
        state_block_size = None if facts.max_model_len is None else facts.max_model_len.value
    several_modules = stack.mtp_modules and facts.draft.method == "mtp"
    return CacheSettings(
        capability=capability,
        parallelism=facts.parallelism,
        cache_dtype=cache_dtype,
        said_dtype=facts.kv_cache_dtype.value,
        compute_dtype=compute_dtype,
        traits=ModelTraits(
            head_size=stack.head_size,
            query_heads=(model.num_heads or 0) // tp,
            kv_heads=1 if stack.latent else max(1, stack.num_kv_heads // tp),
            qk_nope_head_dim=model.qk_nope_head_dim,
            qk_rope_head_dim=model.qk_rope_head_dim,
            v_head_dim=model.v_head_dim,
            kv_lora_rank=model.kv_lora_rank,
            index_topk=model.index_topk,
            softcap=model.softcap,
            image_prefix=stack.image_prefix,
            flash_version=_flash_version(model, capability, cache_dtype, flags.attention_backend),
        ),
        block_size=None if facts.block_size.assumed else facts.block_size.value,
        attention_backend=flags.attention_backend or _hooked_backend(model, capability),
        skip_layers=frozenset(flags.kv_cache_dtype_skip_layers),
        prefix_caching=prefix_caching,
        speculative_tokens=facts.draft.tokens,
        extra_window_tokens=max(0, facts.draft.tokens - 1) if several_modules else 0,
        conv_dtype=flags.mamba_cache_dtype,
        recurrent_dtype=flags.mamba_ssm_cache_dtype
        if flags.mamba_ssm_cache_dtype != "auto"
        else stack.recurrent_dtype or "auto",
        state_block_size=state_block_size,
        recurrent_flag=flags.mamba_ssm_cache_dtype,
        saves_delta_states=facts.rules.saves_delta_states,
        hybrid=stack.hybrid,
        sizing_states=stack.sizing_states,
        latent=stack.latent,
    )


_WIDE_HEADS = 256


def _has_unlike_heads(model: ModelGeometry) -> bool:
    sizes = {getattr(cache, "head_size", None) for cache in model.caches()}
    return model.architecture.startswith("Gemma4") and len(sizes) > 1


def _flash_version(
    model: ModelGeometry, capability: tuple[int, int] | None, cache_dtype: str, wanted: str | None
) -> int | None:
    """Gemma 4's heads differ in size, so that its hook asks for one FlashAttention (`Gemma4Config`, models/config.py)."""
    if capability is None or not _has_unlike_heads(model) or capability[0] not in (9, 10, 11):
        return None
    if wanted not in (None, "FLASH_ATTN") or (capability[0] == 9 and cache_dtype.startswith("fp8")):
        return None
    return 4


def _hooked_backend(model: ModelGeometry, capability: tuple[int, int] | None) -> str | None:
    """The backend that the architecture's hook sets where no flag does."""
    if capability is not None and _has_unlike_heads(model) and capability[0] not in (9, 10, 11):
        return "TRITON_ATTN"
    return model.stack.attention_backend


def _cache_dtype(facts: EngineFacts, model: ModelGeometry, capability: tuple[int, int] | None) -> str:
    """`--kv-cache-dtype` with what checkpoint and architecture make of it, in vLLM's order."""
    dtype = facts.kv_cache_dtype.value
    if dtype == "auto":
        if model.kv_dtype is None:
            raise NotModelledError(
                "what vLLM makes of the checkpoint's own KV-cache scheme with kv_cache_dtype=auto is not modelled; "
                "it is with --kv-cache-dtype fp8 or bfloat16 on vLLM's command line"
            )
        dtype = model.kv_dtype
    on_blackwell = capability is not None and capability[0] == 10
    if dtype == "auto" and on_blackwell and model.architecture in facts.rules.blackwell_kv_dtypes:
        if facts.draft.layers and facts.draft.method != "mtp":
            # vLLM leaves such a draft at auto.
            raise NotModelledError(
                "a draft model whose KV dtype differs from its target's is not modelled; say --kv-cache-dtype"
            )
        dtype = facts.rules.blackwell_kv_dtypes[model.architecture]
    if model.architecture == "DeepseekV32ForCausalLM" and dtype == "bfloat16":
        dtype = "auto"
    if dtype == "auto" and model.kv_dtype_of_attention != "auto" and _has_chunks(model):
        # Its layers choose their backend before the scheme is read.
        raise NotModelledError("a checkpoint's own KV-cache scheme with chunked attention is not modelled")
    if dtype == "auto" and model.kv_heads:
        if model.kv_dtype_of_attention is None:
            raise NotModelledError(
                "the checkpoint's own KV-cache scheme is none of those that are modelled; say --kv-cache-dtype"
            )
        dtype = model.kv_dtype_of_attention
    return dtype


def _compute_dtype(facts: EngineFacts, model: ModelGeometry) -> str:
    """`--dtype`; a float32 checkpoint, or one that names no dtype, runs in 16 bits (`_resolve_auto_dtype`)."""
    said = facts.dtype.value if facts.dtype.value != "auto" else model.dtype
    float16 = said in ("float16", "half")
    if facts.dtype.value == "auto" and (
        said in (None, "float32", "float") or (float16 and not model.takes_float16)
    ):
        return "bfloat16"
    named = {"half": "float16", "float": "float32"}.get(str(said), str(said))
    if named not in ("float16", "bfloat16", "float32"):
        raise NotModelledError(f"a model in {named[:40]} is not modelled")
    return named


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
