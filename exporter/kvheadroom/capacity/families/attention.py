"""Models whose every layer is vLLM's `Attention` and whose layers differ, if at all, by a sliding window only.

Rules read in vllm/model_executor/models/ of 0.33.0; the file of each architecture stands in models/registry.py there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvheadroom.capacity.families.text_config import FULL, SLIDING, TextConfig, read_text_config
from kvheadroom.capacity.layer_stack import Layers, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import AttentionLayer
from kvheadroom.capacity.model_config import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelClass:
    """What a model class of vLLM does with the config.

    Attributes:
        model_type: that its configs carry, which says what left-out keys mean.
        follows_layer_types: each layer's window follows `layer_types`; else no layer names a window.
        ignores_head_dim: heads have hidden_size / heads elements whatever `head_dim` says.
        refuses_mixed_types: it builds no model with windows in some layers only.
        pipeline_unties: it fails over pipeline stages where the two embeddings are tied, as they are unless said.
        mtp: `num_nextn_predict_layers` layers like the others follow for multi-token prediction.
    """

    model_type: str
    follows_layer_types: bool = False
    ignores_head_dim: bool = False
    refuses_mixed_types: bool = False
    pipeline_unties: bool = False
    mtp: bool = False


def _plain(model_type: str) -> _ModelClass:
    return _ModelClass(model_type=model_type)


def _hidden(model_type: str) -> _ModelClass:
    return _ModelClass(model_type=model_type, ignores_head_dim=True)


def _typed(model_type: str) -> _ModelClass:
    return _ModelClass(model_type=model_type, follows_layer_types=True)


_MODEL_CLASSES: Mapping[str, _ModelClass] = {
    "AfmoeForCausalLM": _typed("afmoe"),
    "ApertusForCausalLM": _typed("apertus"),
    "BailingMoeForCausalLM": _plain("bailing_moe"),
    "BailingMoeV2ForCausalLM": _plain("bailing_moe_v2"),
    "BloomForCausalLM": _hidden("bloom"),
    "CohereForCausalLM": _plain("cohere"),
    "Ernie4_5ForCausalLM": _typed("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": _ModelClass(model_type="ernie4_5_moe", mtp=True, pipeline_unties=True),
    "Exaone4ForCausalLM": _typed("exaone4"),
    "ExaoneForCausalLM": _plain("exaone"),
    "GPT2LMHeadModel": _hidden("gpt2"),
    "GPTJForCausalLM": _hidden("gptj"),
    "Gemma2ForCausalLM": _typed("gemma2"),
    "Gemma3ForCausalLM": _typed("gemma3_text"),
    "GemmaForCausalLM": _plain("gemma"),
    "Glm4ForCausalLM": _plain("glm4"),
    "Glm4MoeForCausalLM": _ModelClass(model_type="glm4_moe", mtp=True),
    "IQuestCoderForCausalLM": _typed("iquestcoder"),
    "InternLM2ForCausalLM": _hidden("internlm2"),
    "InternLM3ForCausalLM": _typed("internlm3"),
    "LLaMAForCausalLM": _typed("llama"),
    "LlamaForCausalLM": _typed("llama"),
    "MiMoForCausalLM": _ModelClass(
        model_type="mimo", ignores_head_dim=True, refuses_mixed_types=True, mtp=True
    ),
    "MiniCPMForCausalLM": _hidden("minicpm"),
    "MiniMaxM2ForCausalLM": _plain("minimax_m2"),
    "Ministral3ForCausalLM": _typed("ministral3"),
    "MistralForCausalLM": _typed("mistral"),
    "MixtralForCausalLM": _plain("mixtral"),
    "NemotronForCausalLM": _plain("nemotron"),
    "OPTForCausalLM": _hidden("opt"),
    "OlmoeForCausalLM": _hidden("olmoe"),
    "OrionForCausalLM": _hidden("orion"),
    "Phi3ForCausalLM": _typed("phi3"),
    "PhiMoEForCausalLM": _plain("phimoe"),
    "Qwen2ForCausalLM": _ModelClass(model_type="qwen2", ignores_head_dim=True, refuses_mixed_types=True),
    "Qwen2MoeForCausalLM": _hidden("qwen2_moe"),
    "Qwen3ForCausalLM": _ModelClass(model_type="qwen3", refuses_mixed_types=True),
    "Qwen3MoeForCausalLM": _plain("qwen3_moe"),
    "SolarForCausalLM": _plain("solar"),
    "StableLmForCausalLM": _hidden("stablelm"),
    "TeleChat3ForCausalLM": _typed("telechat3"),
    "TeleFLMForCausalLM": _typed("teleflm"),
    # vLLM builds these with transformers' own modeling (models/transformers/base.py, _create_attention_instances).
    "ArceeForCausalLM": _typed("arcee"),
    "CwmForCausalLM": _typed("cwm"),
    "Dots1ForCausalLM": _typed("dots1"),
    "FlexOlmoForCausalLM": _typed("flex_olmo"),
    "GPTNeoXForCausalLM": _typed("gpt_neox"),
    "GlmForCausalLM": _typed("glm"),
    "HunYuanDenseV1ForCausalLM": _typed("hunyuan_v1_dense"),
    "HunYuanMoEV1ForCausalLM": _typed("hunyuan_v1_moe"),
    "Jais2ForCausalLM": _typed("jais2"),
    "Olmo2ForCausalLM": _typed("olmo2"),
    "Olmo3ForCausalLM": _typed("olmo3"),
    "OlmoForCausalLM": _typed("olmo"),
    "PhiForCausalLM": _typed("phi"),
    "SeedOssForCausalLM": _typed("seed_oss"),
    "SmolLM3ForCausalLM": _typed("smollm3"),
    "Starcoder2ForCausalLM": _typed("starcoder2"),
}

# The last version that had them (models/registry.py, _PREVIOUSLY_SUPPORTED_MODELS), where transformers has no class
# that vLLM could take instead.
_REMOVED: Mapping[str, str] = {
    "AquilaForCausalLM": "0.24.0",
    "AquilaModel": "0.24.0",
    "ArcticForCausalLM": "0.28.0",
    "BaiChuanForCausalLM": "0.23.0",
    "BaichuanForCausalLM": "0.23.0",
    "Grok1ForCausalLM": "0.24.0",
    "Grok1ModelForCausalLM": "0.24.0",
    "InternLMForCausalLM": "0.23.0",
    "JAISLMHeadModel": "0.22.0",
    "MPTForCausalLM": "0.28.0",
    "MotifForCausalLM": "0.10.2",
    "MptForCausalLM": "0.28.0",
    "OuroForCausalLM": "0.26.0",
    "Phi3SmallForCausalLM": "0.9.2",
    "QWenLMHeadModel": "0.23.0",
    "RWForCausalLM": "0.28.0",
    "StableLMEpochForCausalLM": "0.28.0",
    "TeleChatForCausalLM": "0.25.0",
    "XverseForCausalLM": "0.23.0",
}


def windowed_layers(
    windows: Iterable[int | None],
    *,
    num_kv_heads: int,
    head_size: int,
    has_sink: bool = False,
    in_model_dtype: bool = False,
) -> Layers:
    """One attention layer for each window, equal ones shared."""
    windows = tuple(windows)
    kept = {
        window: (
            AttentionLayer(
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                window=window,
                has_sink=has_sink,
                in_model_dtype=in_model_dtype,
            ),
        )
        for window in set(windows)
    }
    return tuple(kept[window] for window in windows)


def require_known_types(text: TextConfig) -> None:
    """Refuses layers that are neither full nor sliding, of which these models' classes know nothing."""
    for kind in text.layer_types or ():
        if kind not in (FULL, SLIDING):
            raise text.section.bad(
                "layer_types", f"has {shown(kind)}, which is not modelled for this architecture"
            )


def _reader(rules: _ModelClass) -> Reader:
    def read(config: ModelConfig) -> LayerStack:
        text = read_text_config(config, rules.model_type)
        require_known_types(text)
        windows = text.windows if rules.follows_layer_types else (text.model_window,) * text.layers
        head_size = text.hidden_head_size if rules.ignores_head_dim else text.head_size
        mtp = config.draft_layers() if rules.mtp else 0
        layers = windowed_layers(
            (*windows, *(text.model_window,) * mtp), num_kv_heads=text.kv_heads, head_size=head_size
        )
        return LayerStack(
            layers=layers[: text.layers],
            num_kv_heads=text.kv_heads,
            head_size=text.head_size,
            mtp=layers[text.layers :] or None,
            mtp_modules=mtp > 1,
            pipeline=not (rules.pipeline_unties and config.flag("tie_word_embeddings", default=True)),
            refused=_mixed_types(text) if rules.refuses_mixed_types else "",
        )

    return read


def _mixed_types(text: TextConfig) -> str:
    """Qwen2Model (qwen2.py) takes layers of two types only where `max_window_layers` says all are full."""
    if len(set(text.layer_types or ())) < 2 or text.section.count("max_window_layers") == text.layers:
        return ""
    return "vLLM does not take a sliding window in some of this model's layers (`max_window_layers`)"


def _gptj(config: ModelConfig) -> LayerStack:
    tied = config.flag("tie_word_embeddings")
    return replace(_READ_GPTJ(config), refused="vLLM takes no GPT-J with tied embeddings" if tied else "")


_READ_GPTJ = _reader(_MODEL_CLASSES["GPTJForCausalLM"])


def _gemma3(config: ModelConfig) -> LayerStack:
    # halves the window in transformers' config class; for embedding models
    if config.flag("use_bidirectional_attention"):
        raise config.bad("use_bidirectional_attention", "is true, which is not modelled")
    return _READ_GEMMA3(config)


_READ_GEMMA3 = _reader(_MODEL_CLASSES["Gemma3ForCausalLM"])


def _llama_draft(config: ModelConfig) -> LayerStack:
    """llama_eagle3.py, llama_eagle.py: a draft keeps its windows where its own `layer_types` say so.

    For its other layers a draft of any kind goes by the target's `TextConfig.model_window`, not by its own.
    """
    text = read_text_config(config, "llama")
    require_known_types(text)
    windows = text.windows if text.layer_types else (None,) * text.layers
    return LayerStack(
        layers=windowed_layers(windows, num_kv_heads=text.kv_heads, head_size=text.head_size),
        num_kv_heads=text.kv_heads,
        head_size=text.head_size,
        pipeline=False,
    )


def _removed(architecture: str, last: str) -> Reader:
    stack = LayerStack(
        layers=(),
        num_kv_heads=1,
        head_size=1,
        refused=f"vLLM had {architecture} until {last} and no longer has it",
    )
    return lambda _config: stack


READERS: Mapping[str, Reader] = {
    **{architecture: _reader(rules) for architecture, rules in _MODEL_CLASSES.items()},
    **{architecture: _removed(architecture, last) for architecture, last in _REMOVED.items()},
    "GPTJForCausalLM": _gptj,
    "Gemma3ForCausalLM": _gemma3,
}

DRAFT_READERS: Mapping[str, Reader] = dict.fromkeys(
    (
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "EagleLlamaForCausalLM",
        "LlamaForCausalLMEagle3",
    ),
    _llama_draft,
)
"""Drafts of `--speculative-config` that are no models of their own."""
