"""Models with images, sound or video, whose language model is one of the plain ones.

The encoders keep nothing between tokens; what the language model keeps is read from its own section of config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvheadroom.capacity.families import attention, irregular, windowed
from kvheadroom.capacity.layer_stack import LayerStack, ModelConfig, Reader

_TEXT_READERS: Mapping[str, Reader] = {**attention.READERS, **windowed.READERS, **irregular.READERS}

# The class that vLLM builds for a text section without `architectures` (transformers' mapping for causal models).
_BY_MODEL_TYPE: Mapping[str, str] = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def _as(architecture: str, *, image_prefix: bool = False, pipeline: bool = True) -> Reader:
    """The rules of a text architecture that the wrapper names itself."""
    read_text = _TEXT_READERS[architecture]

    def read(config: ModelConfig) -> LayerStack:
        stack = read_text(config)
        return replace(
            stack,
            image_prefix=image_prefix or stack.image_prefix,
            pipeline=pipeline and stack.pipeline,
            mtp=None,
            mtp_modules=False,
        )

    return read


def _as_named(config: ModelConfig) -> LayerStack:
    """The rules of the architecture that the text section names, or that goes with its model type."""
    names = config.words("architectures")
    if names:
        name, key = names[0], "architectures"
    else:
        name, key = _BY_MODEL_TYPE.get(config.word("model_type") or "", ""), "model_type"
    if name not in _TEXT_READERS:
        raise config.bad(key, "names no language model whose rules are known")
    return _as(name)(config)


def _paligemma(config: ModelConfig) -> LayerStack:
    """paligemma.py: the model type decides, whatever `architectures` says."""
    return (_PALIGEMMA if config.word("model_type") == "gemma" else _PALIGEMMA2)(config)


# A video's 32 frames of 70 + 8 tokens (gemma4_mm.py, get_mm_max_tokens_per_item).
_GEMMA4_VIDEO_TOKENS = 32 * 78


def _gemma4(config: ModelConfig) -> LayerStack:
    stack = _GEMMA4(config)
    return replace(stack, largest_item_tokens=_GEMMA4_VIDEO_TOKENS if stack.image_prefix else 0)


_GEMMA4 = _as("Gemma4ForCausalLM")
_PALIGEMMA = _as("GemmaForCausalLM", image_prefix=True)
_PALIGEMMA2 = _as("Gemma2ForCausalLM", image_prefix=True)


def _sizes(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    positions: int,
    vocabulary: int,
    window: int | None = None,
) -> Mapping[str, int]:
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "sliding_window": window,
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
    }
    return {key: size for key, size in sizes.items() if size is not None}


TEXT_SECTIONS: Mapping[str, str] = {
    "DeepseekOCRForCausalLM": "language_config",
    "DeepseekVLV2ForCausalLM": "language_config",
    "Gemma3ForConditionalGeneration": "text_config",
    "Gemma3nForConditionalGeneration": "text_config",
    "Gemma4ForConditionalGeneration": "text_config",
    "Glm4vForConditionalGeneration": "text_config",
    "Glm4vMoeForConditionalGeneration": "text_config",
    "Idefics3ForConditionalGeneration": "text_config",
    "InternVLChatModel": "llm_config",
    "InternVLForConditionalGeneration": "text_config",
    "Llama4ForConditionalGeneration": "text_config",
    "LlavaForConditionalGeneration": "text_config",
    "LlavaNextForConditionalGeneration": "text_config",
    "Mistral3ForConditionalGeneration": "text_config",
    "PaliGemmaForConditionalGeneration": "text_config",
    "Phi3VForCausalLM": "",
    "Qwen2VLForConditionalGeneration": "text_config",
    "Qwen2_5_VLForConditionalGeneration": "text_config",
    "Qwen3VLForConditionalGeneration": "text_config",
    "Qwen3VLMoeForConditionalGeneration": "text_config",
    "SmolVLMForConditionalGeneration": "text_config",
}
"""Where the language model's keys stand; "" where config.json is flat, as older files of Qwen2-VL are too."""

# The sizes that a nested section may leave out: transformers writes there only what differs from its class.
# max_position_embeddings and vocab_size are for readers of the section other than those here.
TEXT_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": _sizes(3072, 28, 16, 16, 256, positions=8192, vocabulary=256_000),
    "gemma2": _sizes(2304, 26, 8, 4, 256, window=4096, positions=8192, vocabulary=256_000),
    "gemma3_text": _sizes(2304, 26, 8, 4, 256, window=4096, positions=131_072, vocabulary=262_208),
    "gemma3n_text": {
        **_sizes(2048, 35, 8, 2, 256, window=512, positions=32_768, vocabulary=262_400),
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": _sizes(2304, 30, 8, 4, 256, window=512, positions=131_072, vocabulary=262_144),
    "glm4v_moe_text": _sizes(4096, 46, 96, 8, positions=65_536, vocabulary=151_424),
    "glm4v_text": _sizes(4096, 40, 32, 2, positions=32_768, vocabulary=151_552),
    "llama": _sizes(4096, 32, 32, positions=2048, vocabulary=32_000),
    "llama4_text": {
        **_sizes(5120, 48, 40, 8, 128, positions=131_072, vocabulary=202_048),
        "attention_chunk_size": 8192,
    },
    "ministral3": _sizes(4096, 34, 32, 8, 128, positions=262_144, vocabulary=131_072),
    "mistral": _sizes(4096, 32, 32, 8, window=4096, positions=131_072, vocabulary=32_000),
    "phi3": _sizes(3072, 32, 32, positions=4096, vocabulary=32_064),
    "qwen2": _sizes(4096, 32, 32, 32, window=4096, positions=32_768, vocabulary=151_936),
    "qwen2_5_vl_text": _sizes(8192, 80, 64, 8, window=4096, positions=32_768, vocabulary=152_064),
    "qwen2_vl_text": _sizes(8192, 80, 64, 8, window=4096, positions=32_768, vocabulary=152_064),
    "qwen3": _sizes(4096, 32, 32, 32, 128, window=4096, positions=32_768, vocabulary=151_936),
    "qwen3_moe": _sizes(2048, 24, 32, 4, window=4096, positions=32_768, vocabulary=151_936),
    "qwen3_vl_moe_text": _sizes(2048, 24, 16, 16, positions=128_000, vocabulary=151_936),
    "qwen4_exp_text": {
        **_sizes(2048, 40, 16, 2, 256, positions=32_768, vocabulary=248_320),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "hc_count": 4,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
    },
    "qwen3_vl_text": _sizes(4096, 32, 32, 32, 128, positions=128_000, vocabulary=151_936),
}


def text_section(architecture: str, config: Mapping[str, Any]) -> ModelConfig:
    """The section of config.json that the reader of `architecture` takes, sizes of its class filled in."""
    key = TEXT_SECTIONS.get(architecture, "text_config")
    nested = ModelConfig(config).section(key) if key else None
    if nested is None:
        return ModelConfig(config)
    defaults = TEXT_DEFAULTS.get(nested.word("model_type") or "", {})
    return ModelConfig({**defaults, **nested.values}, f"{key}.")


READERS: Mapping[str, Reader] = {
    "Gemma3ForConditionalGeneration": _as("Gemma3ForCausalLM", image_prefix=True),
    "Gemma3nForConditionalGeneration": _as("Gemma3nForCausalLM"),
    "Gemma4ForConditionalGeneration": _gemma4,
    "Glm4vForConditionalGeneration": _as("Glm4ForCausalLM"),
    "Glm4vMoeForConditionalGeneration": _as("Glm4MoeForCausalLM"),
    "Idefics3ForConditionalGeneration": _as("LlamaForCausalLM", pipeline=False),
    "InternVLChatModel": _as_named,
    "InternVLForConditionalGeneration": _as_named,
    "Llama4ForConditionalGeneration": _as("Llama4ForCausalLM"),
    "LlavaForConditionalGeneration": _as_named,
    "LlavaNextForConditionalGeneration": _as_named,
    "Mistral3ForConditionalGeneration": _as_named,
    "PaliGemmaForConditionalGeneration": _paligemma,
    "Phi3VForCausalLM": _as("LlamaForCausalLM"),
    "Qwen2VLForConditionalGeneration": _as("Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": _as("Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": _as("Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": _as("Qwen3MoeForCausalLM"),
    "SmolVLMForConditionalGeneration": _as("LlamaForCausalLM", pipeline=False),
}
