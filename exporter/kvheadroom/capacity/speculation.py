"""`--speculative-config` -> the layers that a draft adds to the cache.

Source: vLLM 0.33.0 `config/speculative.py`; `config/model.py` for what a draft takes from its target.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvheadroom.capacity.checkpoint_types import kv_dtypes
from kvheadroom.capacity.facts import Draft, DraftModel
from kvheadroom.capacity.families import attention
from kvheadroom.capacity.layer_stack import Layers
from kvheadroom.capacity.layers import AttentionLayer, CacheLayer
from kvheadroom.capacity.model_config import BadFieldError, ModelConfig, shown
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.stored_model import TensorInventory

_MOST_TOKENS = 1000

# Keys that say nothing about the cache. Others change the draft's type, heads, backend or length.
HARMLESS_KEYS = frozenset(
    {
        "code_revision",
        "draft_sample_method",
        "enforce_eager",
        "model",
        "moe_backend",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "quantization",
        "rejection_sample_method",
        "revision",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
        "synthetic_acceptance_length",
        "synthetic_acceptance_rates",
    }
)
"""Keys of `speculative_config` that say nothing about the cache."""

_NUMBERS = (
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "synthetic_acceptance_length",
)
_CHOICES = {
    "draft_sample_method": ("greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "synthetic", "block", "fly"),
}

# Names that vLLM takes for `mtp`, whatever the model (`MTPModelTypes`).
_CALLED_MTP = frozenset(
    {
        "bailing_hybrid_mtp",
        "bailing_hybrid_v3_mtp",
        "deepseek_mtp",
        "dots3_note_mtp",
        "ernie_mtp",
        "exaone4_5_mtp",
        "exaone_moe_mtp",
        "gemma4_mtp",
        "glm4_moe_lite_mtp",
        "glm4_moe_mtp",
        "glm5_next_mtp",
        "glm_ocr_mtp",
        "hy_v3_mtp",
        "hy_v4_mtp",
        "inkling_mtp",
        "kimi_k3_mtp",
        "longcat_flash_mtp",
        "mimo_mtp",
        "mimo_v2_mtp",
        "minimax_m3_mtp",
        "mtp",
        "nemotron_h_mtp",
        "pangu_ultra_moe_mtp",
        "qwen3_5_mtp",
        "qwen3_next_mtp",
        "qwen4_exp_mtp",
        "step3p5_mtp",
        "step5_mtp",
    }
)

# Methods that draft without a model.
_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix"})
WITH_MODEL = frozenset({"draft_model", "eagle", "eagle3"})
"""Methods that draft by a model of their own."""

DRAFT_CONFIG = "draft_config"
"""Where a planning case gives the draft's config.json; vLLM itself is given a path or a name."""


def plan_draft(
    config: Any, model: ModelGeometry | None, tensors: TensorInventory | None = None
) -> Draft | str:
    """The draft; a string says why it is not modelled.

    Args:
        tensors: those of a draft model's checkpoint, None where they are not known.
    """
    if config is None:
        return Draft()
    if not isinstance(config, Mapping):
        return f"speculative_config is {shown(config)}, a section is needed"
    others = sorted(
        str(key)
        for key, value in config.items()
        if value is not None and key not in HARMLESS_KEYS | {"method", "num_speculative_tokens", DRAFT_CONFIG}
    )
    if others:
        return f"speculative_config: {others[0][:80]} is not modelled"
    fault = _fault(config)
    if fault:
        return fault
    method, tokens = config.get("method"), config.get("num_speculative_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens <= _MOST_TOKENS:
        return (
            f"speculative_config: num_speculative_tokens is {shown(tokens)}, a whole number above 0 is needed"
        )
    if not isinstance(method, str):
        return f"speculative_config: method is {shown(method)}, a word is needed"
    if method in _WITHOUT_LAYERS:
        return Draft(method=method, tokens=tokens)
    if model is None:
        return "speculative decoding of a model that is not known is not modelled"
    if method in _CALLED_MTP:
        return _mtp(model, tokens)
    if method in WITH_MODEL:
        return _with_model(config, model, method, tokens, tensors)
    return f"speculative decoding by {shown(method)} is not modelled"


def _fault(config: Mapping[str, Any]) -> str:
    """What is wrong with a key that says nothing about the cache; empty where nothing is."""
    for key in sorted(HARMLESS_KEYS):
        value = config.get(key)
        if value is None:
            continue
        if (
            key.startswith(("prompt_lookup_", "suffix_decoding_max_"))
            and key != "suffix_decoding_max_spec_factor"
        ):
            smallest = 0 if key == "suffix_decoding_max_cached_requests" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                return f"speculative_config: {key} is {shown(value)}, a whole number from {smallest} on is needed"
        elif key in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                return f"speculative_config: {key} is {shown(value)}, a number is needed"
        elif key == "enforce_eager":
            if not isinstance(value, bool):
                return f"speculative_config: {key} is {shown(value)}, true or false is needed"
        elif key != "synthetic_acceptance_rates" and not (isinstance(value, str) and value):
            return f"speculative_config: {key} is {shown(value)}, a word is needed"
        elif key == "moe_backend" and value != "auto":
            return f"speculative_config: moe_backend={shown(value)} is not modelled"
        elif key in _CHOICES and value not in _CHOICES[key]:
            return f"speculative_config: {key} is {shown(value)}; vLLM has {', '.join(_CHOICES[key])}"
    least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        return f"speculative_config: prompt_lookup_min ({least}) is above prompt_lookup_max ({most})"
    return ""


def _mtp(model: ModelGeometry, tokens: int) -> Draft | str:
    if model.stack.mtp is None:
        return (
            f"what multi-token prediction adds to {model.architecture} is not known, or vLLM has none for it"
        )
    modules = len(model.stack.mtp)
    if tokens > modules and tokens % modules:
        return f"{tokens} speculative tokens are not divisible by the model's {modules} modules for them"
    return Draft(method="mtp", tokens=tokens, layers=model.stack.mtp)


def _with_model(
    config: Mapping[str, Any],
    model: ModelGeometry,
    method: str,
    tokens: int,
    tensors: TensorInventory | None,
) -> Draft | str:
    given = config.get(DRAFT_CONFIG)
    if not isinstance(given, Mapping):
        return f"the config.json of the draft model of method {method} is not known (`{DRAFT_CONFIG}`)"
    names = given.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    name = _called(name, method)
    reader = attention.DRAFT_READERS.get(name) or (
        attention.READERS.get(name) if method == "draft_model" else None
    )
    if reader is None:
        return f"the draft model {shown(name)} is not modelled"
    try:
        draft = ModelConfig(given, "draft_config.")
        stack, longest = reader(draft), _own_context(draft, method)
        if kv_dtypes(draft, draft) != ("auto", "auto"):
            return "a KV-cache scheme of the draft's own checkpoint is not modelled"
        heads = draft.count("num_attention_heads")
        kv_heads = draft.count("num_key_value_heads", heads)
        vocabulary = draft.count("vocab_size") if draft.has("vocab_size") else None
    except BadFieldError as bad:
        return f"speculative_config: {bad}"
    if name not in attention.DRAFT_READERS and any(
        _window(cache) for layer in stack.layers for cache in layer
    ):
        return f"the windows of the draft model {name} are not modelled"
    return Draft(
        method=method,
        tokens=tokens,
        layers=_windowed(stack.layers, model.model_window),
        longest_context=longest,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocabulary,
        model=DraftModel(
            architecture=name,
            config=given,
            stack=stack,
            quantization=config.get("quantization"),
            tensors=tensors,
        ),
    )


def _called(name: str, method: str) -> str:
    """The class that vLLM takes for a draft: people's drafts name that of their target (`EAGLEConfig`)."""
    if method == "eagle" and not name.startswith("Eagle"):
        return f"Eagle{name}"
    if method == "eagle3" and not name.startswith("Eagle3") and not name.endswith("Eagle3"):
        return f"Eagle3{name}"
    return name


# Rope types that a longer context needs nothing more of than a longer table (`_CACHE_ONLY_ROPE_TYPES`).
_STRETCHED = frozenset({"default", "linear", "llama3", "ntk", "proportional"})


def _own_context(draft: ModelConfig, method: str) -> int | None:
    """What the draft's own config.json limits the context to (`_limit_max_model_len_to_draft`, config/vllm.py)."""
    rope = draft.values.get("rope_parameters") or draft.values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
    stretched = isinstance(kind, str) and kind in _STRETCHED
    if (method != "draft_model" and stretched) or not draft.has("max_position_embeddings"):
        return None
    return draft.count("max_position_embeddings")


def _window(cache: CacheLayer) -> int | None:
    return cache.window if isinstance(cache, AttentionLayer) else None


def _windowed(layers: Layers, window: int | None) -> Layers:
    """A draft's layers take the window that the target has for all of its own."""
    return tuple(
        tuple(
            replace(cache, window=cache.window or window) if isinstance(cache, AttentionLayer) else cache
            for cache in layer
        )
        for layer in layers
    )
