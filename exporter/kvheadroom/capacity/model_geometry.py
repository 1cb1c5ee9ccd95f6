"""config.json -> the geometry that decides the size of the KV cache.

Only what vLLM's own model classes read is read here. An architecture whose rules are not known gives
`UnknownGeometry` with the reason: a wrong number is worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class _FullAttentionRules:
    """How vLLM reads config.json where a key may be left out.

    Left-out keys take the defaults of transformers' config classes. Where that default is a number of its own
    rather than one that follows from the others, the key is asked for: the default may change with transformers.

    Attributes:
        kv_heads_default_to_heads: no `num_key_value_heads` means as many as heads.
        head_dim: `optional` (hidden_size / heads without it), `needed`, or `ignored` (always hidden_size / heads).
        window_needed: a left-out `sliding_window` is a window, so null must be said.
    """

    kv_heads_default_to_heads: bool = False
    head_dim: Literal["optional", "needed", "ignored"] = "optional"
    window_needed: bool = False


# Architectures whose every layer is one full-attention layer (vLLM's FullAttentionSpec), as long as no
# sliding window is configured. Read in vllm/model_executor/models/ of 0.33.0 (llama.py, mistral.py,
# mixtral.py, qwen2.py, qwen2_moe.py, qwen3.py, qwen3_moe.py, phi3.py, glm4_moe.py) and the config classes of
# transformers 5; each is held to vLLM's own planning functions in tests/capacity.
_FULL_ATTENTION_RULES: Mapping[str, _FullAttentionRules] = {
    "LlamaForCausalLM": _FullAttentionRules(kv_heads_default_to_heads=True),
    "MistralForCausalLM": _FullAttentionRules(window_needed=True),
    "MixtralForCausalLM": _FullAttentionRules(),
    "Qwen2ForCausalLM": _FullAttentionRules(head_dim="ignored"),
    "Qwen2MoeForCausalLM": _FullAttentionRules(head_dim="ignored"),
    "Qwen3ForCausalLM": _FullAttentionRules(head_dim="needed"),
    "Qwen3MoeForCausalLM": _FullAttentionRules(head_dim="needed"),
    "Phi3ForCausalLM": _FullAttentionRules(),
    "Glm4MoeForCausalLM": _FullAttentionRules(head_dim="needed"),
}
FULL_ATTENTION_ARCHITECTURES = frozenset(_FULL_ATTENTION_RULES)

# Architectures whose every layer is one dense latent-attention layer (vLLM's MLAAttentionSpec) when
# `kv_lora_rank` is set: deepseek_v2.py of 0.33.0, `is_deepseek_mla` in model_arch_config_convertor.py.
LATENT_ATTENTION_ARCHITECTURES = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})

# Sparse attention in every layer: models/deepseek_v32/attention.py of 0.33.0 (DeepSeek-V3.2, GLM-5 to 5.3).
SPARSE_ATTENTION_ARCHITECTURES = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
KNOWN_ARCHITECTURES = (
    FULL_ATTENTION_ARCHITECTURES | LATENT_ATTENTION_ARCHITECTURES | SPARSE_ATTENTION_ARCHITECTURES
)

_LARGEST_FIELD = 2**31
_MOST_LAYERS = 10_000

# Models of Qwen's family carry `sliding_window` also where it is switched off.
_SLIDING_WINDOW_SWITCH = "use_sliding_window"


@dataclass(frozen=True, slots=True)
class FullAttention:
    """MHA, GQA or MQA: K and V of every head.

    Attributes:
        num_kv_heads: K/V heads of the whole model, before tensor parallelism.
        head_size: elements of one K or V head of one token; K and V have the same.
    """

    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: one latent vector per token, the same on every tensor-parallel rank."""

    kv_lora_rank: int
    qk_rope_head_dim: int


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """DeepSeek's sparse attention: a latent vector per token, and in some layers a key of the indexer.

    Attributes:
        indexers: for each layer whether it owns an indexer; the others use the one before them.
        index_head_dim: elements of the indexer's key.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    indexers: tuple[bool, ...]
    index_head_dim: int


Attention = FullAttention | LatentAttention | SparseAttention


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What one kind of attention in every layer needs.

    Attributes:
        architecture: `architectures[0]`.
        num_layers: layers that own a KV cache.
        num_heads: query heads of the whole model.
        vocab_size: entries of the vocabulary, None when config.json does not say.
        dtype: the checkpoint's own dtype (`torch_dtype` or `dtype`), None when config.json names none.
        longest_context: tokens; None when config.json does not tell, or tells it in a way not modelled.
        declares_kv_scheme: the checkpoint carries a KV-cache quantization of its own.
        declares_fp8_kv: and it is ModelOpt's, of 8-bit floats.
        mtp_layers: layers for multi-token prediction that the checkpoint has beside the others.
    """

    architecture: str
    num_layers: int
    num_heads: int
    vocab_size: int | None
    attention: Attention
    dtype: str | None
    longest_context: int | None
    declares_kv_scheme: bool
    declares_fp8_kv: bool
    mtp_layers: int


@dataclass(frozen=True, slots=True)
class UnknownGeometry:
    """Why config.json gives no geometry."""

    reason: str


def read_geometry(config: Mapping[str, Any]) -> ModelGeometry | UnknownGeometry:
    """The geometry of a parsed config.json, by the rules of vLLM 0.33.0 (vllm/config/model.py)."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        return UnknownGeometry("config.json names no architecture (key `architectures`)")
    architecture = architectures[0]
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(sorted(KNOWN_ARCHITECTURES))
        return UnknownGeometry(
            f"the KV-cache rules of {architecture} are not known to this version (known: {known})"
        )
    window = _sliding_window(config)
    if window is not None:
        return UnknownGeometry(f"{architecture} with {window}: only full attention is known to this version")

    try:
        num_layers = _count(config, "num_hidden_layers")
        if architecture in LATENT_ATTENTION_ARCHITECTURES:
            attention: Attention = _latent_attention(config)
        elif architecture in SPARSE_ATTENTION_ARCHITECTURES:
            attention = _sparse_attention(config, num_layers)
        else:
            attention = _full_attention(config, _FULL_ATTENTION_RULES[architecture])
        num_heads = _count(config, "num_attention_heads")
        positions = _longest_context(config)
        mtp_layers = 0
        if config.get("num_nextn_predict_layers"):
            mtp_layers = _count(config, "num_nextn_predict_layers")
        vocab_size = None if config.get("vocab_size") is None else _count(config, "vocab_size")
    except _BadFieldError as bad:
        return UnknownGeometry(str(bad))
    dtype = config.get("torch_dtype", config.get("dtype"))
    return ModelGeometry(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        attention=attention,
        dtype=dtype if isinstance(dtype, str) else None,
        longest_context=positions,
        declares_kv_scheme=_declares_kv_scheme(config),
        declares_fp8_kv=_declares_fp8_kv(config),
        mtp_layers=mtp_layers,
    )


class _BadFieldError(ValueError):
    pass


# Kinds of rope scaling whose `max_position_embeddings` is already the scaled length.
_ALREADY_SCALED = frozenset({"default", "llama3", "mrope", "su", "yarn", "deepseek_yarn"})


def _longest_context(config: Mapping[str, Any]) -> int | None:
    """vllm/config/model.py _get_and_verify_max_len (0.33.0): other rope scaling lengthens the positions."""
    if config.get("max_position_embeddings") is None:
        return None
    positions = _count(config, "max_position_embeddings")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in _ALREADY_SCALED:
        return positions
    factor = rope.get("factor")
    if kind in ("linear", "dynamic") and isinstance(factor, int | float) and 1 <= factor <= _LARGEST_FIELD:
        return int(positions * factor)
    # longrope starts at another length than it admits
    return None


def _full_attention(config: Mapping[str, Any], rules: _FullAttentionRules) -> FullAttention:
    num_heads = _count(config, "num_attention_heads")
    if rules.window_needed and "sliding_window" not in config:
        raise _BadFieldError(
            "config.json: `sliding_window` is left out, which means a window; say null if there is none"
        )
    if rules.head_dim == "ignored" or (rules.head_dim == "optional" and config.get("head_dim") is None):
        head_size = _count(config, "hidden_size") // num_heads
        if head_size < 1:
            raise _BadFieldError("config.json: `num_attention_heads` is larger than `hidden_size`")
    else:
        head_size = _count(config, "head_dim")
    return FullAttention(
        num_kv_heads=_count(
            config, "num_key_value_heads", default=num_heads if rules.kv_heads_default_to_heads else None
        ),
        head_size=head_size,
    )


def _latent_attention(config: Mapping[str, Any]) -> LatentAttention:
    if config.get("is_causal") is False:
        raise _BadFieldError("`is_causal` is false: vLLM does not use latent attention then, not modelled")
    return LatentAttention(
        kv_lora_rank=_count(config, "kv_lora_rank"),
        qk_rope_head_dim=_count(config, "qk_rope_head_dim"),
    )


def _count(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_FIELD:
        shown = repr(value) if not isinstance(value, int) or abs(value) <= _LARGEST_FIELD else "out of range"
        raise _BadFieldError(f"config.json: `{key}` is {shown[:60]}, a whole number above 0 is needed")
    return value


def _sparse_attention(config: Mapping[str, Any], num_layers: int) -> SparseAttention:
    """Which layers own an indexer: `index_topk_pattern`, else every `index_topk_freq`-th from an offset on."""
    if num_layers > _MOST_LAYERS:
        raise _BadFieldError(f"config.json: {num_layers} layers are more than any model has")
    pattern = config.get("index_topk_pattern")
    if pattern is None:
        frequency = _count(config, "index_topk_freq", default=1)
        offset = _count(config, "index_skip_topk_offset", default=2)
        indexers = tuple(max(i - offset + 1, 0) % frequency == 0 for i in range(num_layers))
    elif isinstance(pattern, str | list) and len(pattern) == num_layers:
        indexers = tuple(kind != "S" for kind in pattern)
    else:
        raise _BadFieldError("config.json: `index_topk_pattern` does not have one entry per layer")
    return SparseAttention(
        kv_lora_rank=_count(config, "kv_lora_rank"),
        qk_rope_head_dim=_count(config, "qk_rope_head_dim"),
        indexers=indexers,
        index_head_dim=_count(config, "index_head_dim"),
    )


def _sliding_window(config: Mapping[str, Any]) -> str | None:
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if other:
            return f"layers of type {', '.join(other)}"
    if config.get("attention_chunk_size"):
        return f"attention_chunk_size {config['attention_chunk_size']}"
    if config.get("dual_chunk_attention_config"):
        return "dual chunk attention"
    window = config.get("sliding_window")
    if window and config.get(_SLIDING_WINDOW_SWITCH, True):
        return f"a sliding window of {window} tokens"
    return None


def _declares_fp8_kv(config: Mapping[str, Any]) -> bool:
    """utils/torch_utils.py resolve_kv_cache_dtype_string (0.33.0): ModelOpt's checkpoints only."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or "modelopt" not in str(quantization.get("quant_method", "")):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return quantization.get("kv_cache_quant_algo") == "FP8"


def _declares_kv_scheme(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantization, Mapping):
        return False
    nested = quantization.get("quantization")
    places = [quantization, nested] if isinstance(nested, Mapping) else [quantization]
    return any(place.get(key) for place in places for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
