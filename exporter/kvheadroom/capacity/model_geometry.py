"""config.json -> what decides the size of the KV cache.

Only what vLLM's own model classes read is read here. An architecture whose rules are not known gives
`UnknownGeometry` with the reason: a wrong number is worse than none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvheadroom.capacity.checkpoint_types import kv_dtypes, quantization_method, weight_block
from kvheadroom.capacity.context_length import LARGEST_LENGTH, context_lengths
from kvheadroom.capacity.families.multimodal import text_section
from kvheadroom.capacity.families.registry import KNOWN_ARCHITECTURES, READERS
from kvheadroom.capacity.layer_stack import LayerStack
from kvheadroom.capacity.layers import AttentionLayer, CacheLayer, LatentLayer, StateLayer
from kvheadroom.capacity.model_config import BadFieldError, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """One model, before any flag.

    Attributes:
        architecture: `architectures[0]`.
        stack: what each layer keeps.
        num_heads: query heads, None for a model without attention.
        num_experts: routed experts of a layer, None where config.json names none.
        first_dense_layers: layers at the start without experts, of a model that has them.
        takes_float16: it can run in float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`, config/model.py).
        vocab_size: entries of the vocabulary, None when config.json does not say.
        dtype: the checkpoint's own dtype (`torch_dtype` or `dtype`), None when config.json names none.
        longest_context: tokens, the longest `--max-model-len` that vLLM takes; None when config.json does not tell.
        usual_context: tokens, what vLLM takes without the flag; None where the longest is.
        context_unknown: why config.json does not tell the longest context, empty where it does.
        kv_dtype: what the checkpoint makes of kv_cache_dtype=auto: `auto`, or a type; None where that is not
            modelled.
        kv_dtype_of_attention: the same, but for plain attention only.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank, index_topk, softcap: what attention backends
            ask config.json for.
        vision_heads: attention heads of the vision tower, None without one.
        deepstack_layers: first layers into which images go, which must stand on one pipeline stage.
        quantization: the checkpoint's `quant_method` as vLLM reads it, None without one.
        hidden_size, mlp_size, expert_size: `hidden_size`, `intermediate_size` and `moe_intermediate_size`, None where config.json has no
            such number.
        experts_per_token: experts that each token goes through, None where config.json names none.
        takes_videos: it has an encoder that takes videos.
        shared_size: inner values of the shared experts of a layer together, None without them.
        weight_block: rows and columns of a block that shares a scale, of fp8 checkpoints that have such.
        model_window: tokens of the window that layers take which name none of their own, also those of a draft.
    """

    architecture: str
    stack: LayerStack
    num_heads: int | None
    num_experts: int | None
    vocab_size: int | None
    dtype: str | None
    longest_context: int | None
    usual_context: int | None
    context_unknown: str
    kv_dtype: str | None
    kv_dtype_of_attention: str | None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    kv_lora_rank: int | None = None
    index_topk: int | None = None
    softcap: bool = False
    first_dense_layers: int = 0
    takes_float16: bool = True
    vision_heads: int | None = None
    deepstack_layers: int = 0
    model_window: int | None = None
    quantization: str | None = None
    hidden_size: int | None = None
    mlp_size: int | None = None
    experts_per_token: int | None = None
    takes_videos: bool = False
    expert_size: int | None = None
    shared_size: int | None = None
    weight_block: tuple[int, int] | None = None

    @property
    def takes_any_length(self) -> bool:
        """Whether config.json names no longest context, and every length is taken."""
        return self.longest_context == LARGEST_LENGTH

    @property
    def num_layers(self) -> int:
        """Layers of the model, also those that keep nothing."""
        return len(self.stack.layers)

    def caches(self) -> Iterable[CacheLayer]:
        """Everything that its layers keep."""
        return (cache for layer in self.stack.layers for cache in layer)

    @property
    def has_windows(self) -> bool:
        """Whether what a request holds depends on how many tokens are in flight."""
        return any(getattr(cache, "window", None) or getattr(cache, "chunk", None) for cache in self.caches())

    @property
    def has_chunks(self) -> bool:
        """Whether some layers attend within chunks."""
        return any(isinstance(cache, AttentionLayer) and cache.chunk for cache in self.caches())

    @property
    def is_latent(self) -> bool:
        """Whether it is dense latent attention in every layer."""
        return all(isinstance(cache, LatentLayer) and not cache.sparse for cache in self.caches())

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a recurrent state."""
        return any(isinstance(cache, StateLayer) for cache in self.caches())

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The numbers of K/V heads that its attention layers have."""
        return tuple(
            dict.fromkeys(cache.num_kv_heads for cache in self.caches() if isinstance(cache, AttentionLayer))
        )


@dataclass(frozen=True, slots=True)
class UnknownGeometry:
    """Why config.json gives no geometry."""

    reason: str


def read_geometry(config: Mapping[str, Any]) -> ModelGeometry | UnknownGeometry:
    """The geometry of a parsed config.json, by the rules of vLLM 0.33.0."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        return UnknownGeometry("config.json names no architecture (key `architectures`)")
    architecture = architectures[0]
    if architecture not in KNOWN_ARCHITECTURES:
        return UnknownGeometry(
            f"the KV-cache rules of {architecture[:80]} are not known to this version "
            f"(it knows {len(KNOWN_ARCHITECTURES)} architectures; docs/capacity-model.md lists them)"
        )
    whole = ModelConfig(config)
    try:
        text = text_section(architecture, config)
        return _read(architecture, whole, text, READERS[architecture](text))
    except BadFieldError as bad:
        return UnknownGeometry(str(bad))


_WITHOUT_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
# Their classes do not tell the attention layers how the checkpoint is quantized (`Attention(quant_config=...)`).
_UNAWARE_OF_SCHEME = frozenset(
    {
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "JambaForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Step3TextForCausalLM",
        "Zamba2ForCausalLM",
    }
)
_DENSE_KEYS = ("first_k_dense_replace", "num_dense_layers")
_CHOSEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "top_k_experts",
    "moe_top_k",
    "moe_k",
)
_EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def _read(architecture: str, whole: ModelConfig, text: ModelConfig, stack: LayerStack) -> ModelGeometry:
    names = ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads")
    context = context_lengths(text, whole)
    longest, usual = (None, None) if isinstance(context, str) else context
    attends = any(not isinstance(cache, StateLayer) for layer in stack.layers for cache in layer)
    if attends and not any(text.has(name) for name in names):
        raise text.bad("num_attention_heads", "is left out, a whole number above 0 is needed")
    everywhere, attention = kv_dtypes(whole, text)
    for key in _SIZES:
        if isinstance(text.values.get(key), int | float | str):
            text.count(key, smallest=0)
    if not _UNAWARE_OF_SCHEME.isdisjoint({architecture, *(text.words("architectures") or ())}):
        attention = everywhere
    return ModelGeometry(
        architecture=architecture,
        stack=stack,
        num_heads=next((text.count(name) for name in names if text.has(name)), None),
        num_experts=next((text.count(name, smallest=0) for name in _EXPERT_KEYS if text.has(name)), None),
        vocab_size=text.count("vocab_size") if text.has("vocab_size") else None,
        dtype=_dtype(whole) or _dtype(text),
        longest_context=longest,
        usual_context=usual,
        context_unknown=context if isinstance(context, str) else "",
        kv_dtype=everywhere,
        kv_dtype_of_attention=attention,
        qk_nope_head_dim=_size(text, "qk_nope_head_dim"),
        qk_rope_head_dim=_size(text, "qk_rope_head_dim"),
        v_head_dim=_size(text, "v_head_dim"),
        kv_lora_rank=_size(text, "kv_lora_rank"),
        index_topk=_size(text, "index_topk"),
        softcap=bool(text.values.get("attn_logit_softcapping")),
        first_dense_layers=_first_dense_layers(text),
        takes_float16=whole.word("model_type") not in _WITHOUT_FLOAT16,
        vision_heads=_vision_heads(whole),
        deepstack_layers=_deepstack_layers(architecture, whole),
        model_window=_model_window(text, stack),
        quantization=quantization_method(whole, text),
        hidden_size=_first_number(text, "hidden_size", "n_embd", "d_model"),
        mlp_size=_number(text, "intermediate_size"),
        experts_per_token=_first_number(text, *_CHOSEN_KEYS),
        takes_videos=any(whole.has(key) for key in ("video_token_id", "video_token_index")),
        expert_size=_number(text, "moe_intermediate_size"),
        shared_size=_shared_size(text),
        weight_block=weight_block(whole),
    )


def _vision_heads(whole: ModelConfig) -> int | None:
    vision = whole.section("vision_config")
    if vision is None:
        return None
    names = ("num_heads", "num_attention_heads")
    return next((vision.count(name) for name in names if vision.has(name)), None)


_DEEPSTACK_LAYERS = 3  # transformers' Qwen3VLVisionConfig


def _deepstack_layers(architecture: str, whole: ModelConfig) -> int:
    if not architecture.startswith("Qwen3VL"):
        return 0
    vision = whole.section("vision_config")
    indexes = None if vision is None else vision.list_of("deepstack_visual_indexes")
    return _DEEPSTACK_LAYERS if indexes is None else len(indexes)


def _model_window(text: ModelConfig, stack: LayerStack) -> int | None:
    """VLLM sets one only where no layer is of another type (engine/arg_utils.py, `cache_config.sliding_window`)."""
    attention = [cache for layer in stack.layers for cache in layer if isinstance(cache, AttentionLayer)]
    if not attention or not all(cache.window for cache in attention):
        return None
    return text.count("sliding_window", 0, smallest=0) or None


def _first_dense_layers(text: ModelConfig) -> int:
    listed = text.values.get("moe_layers_enum")  # Step-3.5: "3,4,5"
    if isinstance(listed, str) and listed.split(",")[0].strip().isdecimal():
        return int(listed.split(",")[0])
    return next((text.count(name, smallest=0) for name in _DENSE_KEYS if text.has(name)), 0)


def _size(text: ModelConfig, key: str) -> int | None:
    return text.count(key, smallest=0) if text.has(key) else None


def _dtype(section: ModelConfig) -> str | None:
    for key in ("dtype", "torch_dtype"):
        if section.has(key):
            return section.word(key)
    return None


# Sizes that some class reads, and no class takes below 0. A list of them is read where it is wanted.
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_key_value_heads",
    "num_experts_per_tok",
)


def _number(text: ModelConfig, key: str) -> int | None:
    return text.count(key, smallest=0) if isinstance(text.values.get(key), int | float) else None


def _first_number(text: ModelConfig, *keys: str) -> int | None:
    return next((number for key in keys if (number := _number(text, key)) is not None), None)


def _shared_size(text: ModelConfig) -> int | None:
    together, each = _number(text, "shared_expert_intermediate_size"), _number(text, "moe_intermediate_size")
    count = _number(text, "n_shared_experts")
    return together or (each * count if each and count else None)
