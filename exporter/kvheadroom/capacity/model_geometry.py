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

_LARGEST_FIELD = 2**31

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
class ModelGeometry:
    """What one kind of attention in every layer needs.

    Attributes:
        architecture: `architectures[0]`.
        num_layers: layers that own a KV cache.
        num_heads: query heads of the whole model.
        dtype: the checkpoint's own dtype (`torch_dtype` or `dtype`), None when config.json names none.
        max_position_embeddings: the longest context of the model, None when config.json names none.
        declares_kv_scheme: the checkpoint carries a KV-cache quantization of its own.
    """

    architecture: str
    num_layers: int
    num_heads: int
    attention: FullAttention | LatentAttention
    dtype: str | None
    max_position_embeddings: int | None
    declares_kv_scheme: bool


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
    if architecture not in FULL_ATTENTION_ARCHITECTURES | LATENT_ATTENTION_ARCHITECTURES:
        known = ", ".join(sorted(FULL_ATTENTION_ARCHITECTURES | LATENT_ATTENTION_ARCHITECTURES))
        return UnknownGeometry(
            f"the KV-cache rules of {architecture} are not known to this version (known: {known})"
        )
    window = _sliding_window(config)
    if window is not None:
        return UnknownGeometry(f"{architecture} with {window}: only full attention is known to this version")

    try:
        num_layers = _count(config, "num_hidden_layers")
        if architecture in LATENT_ATTENTION_ARCHITECTURES:
            attention: FullAttention | LatentAttention = _latent_attention(config)
        else:
            attention = _full_attention(config, _FULL_ATTENTION_RULES[architecture])
        num_heads = _count(config, "num_attention_heads")
        positions = (
            None
            if config.get("max_position_embeddings") is None
            else _count(config, "max_position_embeddings")
        )
    except _BadFieldError as bad:
        return UnknownGeometry(str(bad))
    dtype = config.get("torch_dtype", config.get("dtype"))
    return ModelGeometry(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        attention=attention,
        dtype=dtype if isinstance(dtype, str) else None,
        max_position_embeddings=positions,
        declares_kv_scheme=_declares_kv_scheme(config),
    )


class _BadFieldError(ValueError):
    pass


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


def _declares_kv_scheme(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantization, Mapping):
        return False
    nested = quantization.get("quantization")
    places = [quantization, nested] if isinstance(nested, Mapping) else [quantization]
    return any(place.get(key) for place in places for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
