"""Facts of one engine on one kind of GPU -> the settings that its cache is planned from.

Sources, vLLM 0.33.0: `config/model.py`, `model_executor/models/config.py` (hooks of architectures),
`utils/torch_utils.py` and `config/vllm.py` (dtypes).
"""

from kvheadroom.capacity.backend_query import ModelTraits
from kvheadroom.capacity.cache_settings import CacheSettings, NotModelledError, VllmRefusesError
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.layers import AttentionLayer
from kvheadroom.capacity.model_config import shown
from kvheadroom.capacity.model_geometry import ModelGeometry

_WIDEST_FLASH_HEAD = 512


def resolve_settings(
    facts: EngineFacts, model: ModelGeometry, capability: tuple[int, int] | None
) -> CacheSettings:
    """What flags, model and GPU make of one another.

    Args:
        capability: CUDA compute capability; None for vLLM's CPU backend.

    Raises:
        VllmRefusesError, NotModelledError: with the reason.
    """
    flags, stack, tp = facts.flags, model.stack, facts.tensor_parallel_size.value
    model_dtype = compute_dtype(facts, model)
    cache_dtype = _cache_dtype(facts, model, capability)
    if cache_dtype in ("float16", "bfloat16") and cache_dtype != model_dtype:
        raise VllmRefusesError(f"kv_cache_dtype={cache_dtype} is incompatible with a model in {model_dtype}")
    prefix_caching = flags.enable_prefix_caching
    if prefix_caching is None:
        # Models of recurrent states alone have it off (`is_prefix_caching_supported`, config/model.py).
        prefix_caching = not model.has_states or (stack.hybrid and facts.rules.caches_hybrid_prefixes)
    if model.has_states and not facts.rules.aligns_states:
        prefix_caching = False
    state_block_size = flags.mamba_block_size if not stack.hybrid else None
    if not prefix_caching:
        state_block_size = None if facts.max_model_len is None else facts.max_model_len.value
    several_modules = stack.mtp_modules and facts.draft.method == "mtp"
    return CacheSettings(
        capability=capability,
        parallelism=facts.parallelism,
        cache_dtype=cache_dtype,
        said_dtype=facts.kv_cache_dtype.value,
        compute_dtype=model_dtype,
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
        saves_states=facts.rules.saves_states,
        saves_delta_states=facts.rules.saves_delta_states,
        least_latent_unit=facts.rules.least_latent_unit,
        hybrid=stack.hybrid,
        sizing_states=stack.sizing_states,
        latent=stack.latent,
    )


def _unlike_heads(model: ModelGeometry) -> frozenset[int]:
    """The head sizes of a Gemma 4 whose layers differ in them; empty where they do not."""
    sizes = frozenset(cache.head_size for cache in model.caches() if isinstance(cache, AttentionLayer))
    return sizes if model.architecture.startswith("Gemma4") and len(sizes) > 1 else frozenset()


def _takes_one_flash(sizes: frozenset[int], capability: tuple[int, int]) -> bool:
    """FlashAttention 4 runs on these generations, for heads up to 512."""
    return capability[0] in (9, 10, 11) and max(sizes) <= _WIDEST_FLASH_HEAD


def _flash_version(
    model: ModelGeometry, capability: tuple[int, int] | None, cache_dtype: str, wanted: str | None
) -> int | None:
    """Gemma 4's heads differ in size, so that its hook asks for one FlashAttention (`Gemma4Config`, models/config.py)."""
    sizes = _unlike_heads(model)
    if capability is None or not sizes or not _takes_one_flash(sizes, capability):
        return None
    if wanted not in (None, "FLASH_ATTN") or (capability[0] == 9 and cache_dtype.startswith("fp8")):
        return None
    return 4


def _hooked_backend(model: ModelGeometry, capability: tuple[int, int] | None) -> str | None:
    """The backend that the architecture's hook sets where no flag does."""
    sizes = _unlike_heads(model)
    if capability is not None and sizes and not _takes_one_flash(sizes, capability):
        return "TRITON_ATTN"
    return None


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
    if model.architecture == "DeepseekV32ForCausalLM" and dtype.startswith(facts.rules.v32_packed_dtypes):
        return "fp8_ds_mla"
    if model.architecture == "DeepseekV32ForCausalLM" and dtype == "bfloat16":
        dtype = "auto"
    if dtype == "auto" and model.kv_dtype_of_attention != "auto" and model.has_chunks:
        # Its layers choose their backend before the scheme is read.
        raise NotModelledError("a checkpoint's own KV-cache scheme with chunked attention is not modelled")
    if dtype == "auto" and model.kv_heads:
        if model.kv_dtype_of_attention is None:
            raise NotModelledError(
                "the checkpoint's own KV-cache scheme is none of those that are modelled; say --kv-cache-dtype"
            )
        dtype = model.kv_dtype_of_attention
    return dtype


def compute_dtype(facts: EngineFacts, model: ModelGeometry) -> str:
    """`--dtype`; a float32 checkpoint, or one that names no dtype, runs in 16 bits (`_resolve_auto_dtype`)."""
    flagged = facts.dtype.value != "auto"
    said = facts.dtype.value if flagged else model.dtype
    float16 = said in ("float16", "half")
    if facts.dtype.value == "auto" and (
        said in (None, "float32", "float") or (float16 and not model.takes_float16)
    ):
        return "bfloat16"
    named = {"half": "float16", "float": "float32"}.get(str(said), str(said))
    if named not in ("float16", "bfloat16", "float32"):
        whose = "the flag dtype" if flagged else "the dtype of config.json"
        raise NotModelledError(f"{whose} is {shown(named)}; float16, bfloat16 and float32 are modelled")
    return named
