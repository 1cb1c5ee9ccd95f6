"""Blueprints of decoders of plain attention and dense MLPs.

Read in vllm/model_executor/models/ of 0.33.0; where vLLM builds a model with transformers' own modeling, in
transformers 5.19.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvheadroom.capacity.layer_stack import ModelConfig
from kvheadroom.capacity.weights.builders import (
    EVERYWHERE,
    STAGED,
    Build,
    Model,
    Places,
    attention_parts,
    decoder,
)
from kvheadroom.capacity.weights.parts import Blueprint, Parts, Tensor, gated_mlp, norm, norms, plain_mlp

_Flag = Callable[[ModelConfig], bool]


def _never(_text: ModelConfig) -> bool:
    return False


def _always(_text: ModelConfig) -> bool:
    return True


def _key(name: str, *, default: bool = False) -> _Flag:
    return lambda text: text.flag(name, default=default)


def llama_bias(text: ModelConfig) -> bool:
    """`attention_bias`, or by an older name `bias`."""
    return text.flag("attention_bias") or text.flag("bias")


def llama_qkv_bias(text: ModelConfig) -> bool:
    """`qkv_bias` alone decides about Q, K and V where it is there (llama.py)."""
    return text.flag("qkv_bias") if "qkv_bias" in text.values else llama_bias(text)


def _glm4_bias(text: ModelConfig) -> bool:
    """The config class of the model that sees has no such key, and vLLM then takes none (glm4.py)."""
    return text.flag("attention_bias", default=text.word("model_type", "glm4") == "glm4")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """What tells one class of plain decoders from another.

    Attributes:
        qkv_bias, out_bias, mlp_bias, head_bias: which matrices have a bias.
        head_norms: names of the norms over each head of Q and K.
        gated: the MLP has three matrices, else two.
        norms: names of a layer's norms.
        norm_bias: they have a bias; so has the final one.
        tied: `tie_word_embeddings` where config.json leaves it out.
        always_tied: the class has no output layer of its own, whatever `tie_word_embeddings` says.
    """

    qkv_bias: _Flag = _never
    out_bias: _Flag = _never
    mlp_bias: _Flag = _never
    head_bias: bool = False
    head_norms: tuple[str, str] | None = None
    gated: bool = True
    mlp_names: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    final_norm: str | None = "model.norm"
    tied: bool = False
    always_tied: bool = False
    places: Places = STAGED
    embedding: str = "model.embed_tokens"
    attention: str = "self_attn"
    qkv_name: str = "qkv_proj"
    out: str = "o_proj"


def _build(style: _Style) -> Build:
    def build(model: Model) -> Blueprint:
        return decoder(
            model,
            [_layer(style, model, index) for index in range(model.layers)],
            tied=style.always_tied or model.tied(default=style.tied),
            final_norm=norm(style.final_norm, model.hidden, bias=style.norm_bias) if style.final_norm else (),
            places=style.places,
            embedding=style.embedding,
            head_bias=style.head_bias,
        )

    return build


def _layer(style: _Style, model: Model, index: int) -> Parts:
    text = model.text
    inner, bias = text.count("intermediate_size"), style.mlp_bias(text)
    attention = attention_parts(
        model,
        model.attention(index),
        bias=style.qkv_bias(text),
        out_bias=style.out_bias(text),
        head_norms=style.head_norms,
        name=style.attention,
        qkv_name=style.qkv_name,
        out=style.out,
    )
    mlp = (
        gated_mlp(model.hidden, inner, bias=bias)
        if style.gated
        else plain_mlp(model.hidden, inner, names=style.mlp_names, bias=bias)
    )
    return attention + mlp + norms(style.norms, model.hidden, bias=style.norm_bias)


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_QK_NORMS = ("q_norm", "k_norm")
_LLAMA = _Style(qkv_bias=llama_qkv_bias, out_bias=llama_bias, mlp_bias=_key("mlp_bias"))

_STYLES: Mapping[str, _Style] = {
    **dict.fromkeys(
        (
            "IQuestCoderForCausalLM",
            "InternLM3ForCausalLM",
            "LLaMAForCausalLM",
            "LlamaForCausalLM",
            "Ministral3ForCausalLM",
            "MistralForCausalLM",
            "TeleChat3ForCausalLM",
            "TeleFLMForCausalLM",
            "Phi3ForCausalLM",
        ),
        _LLAMA,
    ),
    "Qwen2ForCausalLM": _Style(qkv_bias=_always),
    "Qwen3ForCausalLM": _Style(qkv_bias=_key("attention_bias"), head_norms=_QK_NORMS),
    "GemmaForCausalLM": _Style(tied=True, places=EVERYWHERE),
    "Gemma2ForCausalLM": _Style(
        qkv_bias=_key("attention_bias"),
        out_bias=_key("attention_bias"),
        norms=_FOUR_NORMS,
        always_tied=True,
        places=EVERYWHERE,
    ),
    "Gemma3ForCausalLM": _Style(
        qkv_bias=_key("attention_bias"),
        out_bias=_key("attention_bias"),
        head_norms=_QK_NORMS,
        norms=_FOUR_NORMS,
        tied=True,
        places=EVERYWHERE,
    ),
    "Cohere2ForCausalLM": _Style(norms=("input_layernorm",), always_tied=True, places=EVERYWHERE),
    "StableLmForCausalLM": _Style(qkv_bias=_key("use_qkv_bias"), norm_bias=True, places=EVERYWHERE),
    "SolarForCausalLM": _Style(
        qkv_bias=llama_bias, out_bias=llama_bias, mlp_bias=_key("mlp_bias"), tied=True
    ),
    "ExaoneForCausalLM": _Style(
        qkv_bias=llama_bias, out_bias=llama_bias, mlp_bias=_key("mlp_bias"), tied=True
    ),
    "Exaone4ForCausalLM": _Style(
        qkv_bias=llama_bias,
        out_bias=llama_bias,
        mlp_bias=_key("mlp_bias"),
        head_norms=_QK_NORMS,
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "InternLM2ForCausalLM": _Style(places=EVERYWHERE, tied=True),
    "OrionForCausalLM": _Style(norm_bias=True, places=EVERYWHERE, tied=True),
    "NemotronForCausalLM": _Style(
        qkv_bias=llama_bias,
        out_bias=llama_bias,
        mlp_bias=_key("mlp_bias"),
        gated=False,
        norm_bias=True,
    ),
    "Glm4ForCausalLM": _Style(
        qkv_bias=_glm4_bias,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "MiMoForCausalLM": _Style(qkv_bias=_always, tied=True),
    "MiniCPMForCausalLM": _Style(places=EVERYWHERE, tied=True),
    "Ernie4_5ForCausalLM": _Style(qkv_bias=_key("use_bias"), mlp_bias=_key("use_bias"), tied=True),
    # built with transformers' own modeling
    "ArceeForCausalLM": _Style(
        qkv_bias=_key("attention_bias"),
        out_bias=_key("attention_bias"),
        mlp_bias=_key("mlp_bias"),
        gated=False,
    ),
    "CwmForCausalLM": _Style(),
    "GlmForCausalLM": _Style(qkv_bias=_key("attention_bias", default=True)),
    "HunYuanDenseV1ForCausalLM": _Style(
        qkv_bias=_key("attention_bias"),
        out_bias=_key("attention_bias"),
        head_norms=("query_layernorm", "key_layernorm"),
    ),
    "Jais2ForCausalLM": _Style(
        qkv_bias=_key("attention_bias", default=True),
        out_bias=_key("attention_bias", default=True),
        mlp_bias=_key("mlp_bias", default=True),
        gated=False,
        norm_bias=True,
    ),
    "OlmoForCausalLM": _Style(
        qkv_bias=_key("attention_bias"), out_bias=_key("attention_bias"), norms=(), final_norm=None
    ),
    "SeedOssForCausalLM": _Style(
        qkv_bias=_key("attention_bias", default=True),
        out_bias=_key("attention_out_bias"),
        mlp_bias=_key("mlp_bias"),
    ),
    "SmolLM3ForCausalLM": _Style(
        qkv_bias=_key("attention_bias"),
        out_bias=_key("attention_bias"),
        mlp_bias=_key("mlp_bias"),
        tied=True,
    ),
    "Starcoder2ForCausalLM": _Style(
        qkv_bias=_key("use_bias", default=True),
        out_bias=_key("use_bias", default=True),
        mlp_bias=_key("use_bias", default=True),
        gated=False,
        mlp_names=("mlp.c_fc", "mlp.c_proj"),
        norm_bias=True,
        tied=True,
    ),
}


def _granite(*, tied: bool) -> Build:
    """granite.py: layers with attention sinks have one number per head."""

    def build(model: Model) -> Blueprint:
        layers = [_layer(_GRANITE, model, index) + sinks(model, index) for index in range(model.layers)]
        return decoder(model, layers, tied=model.tied(default=tied))

    return build


def sinks(model: Model, index: int) -> Parts:
    """Attention sinks of one layer, where it has them."""
    if not model.attention(index).has_sink:
        return ()
    return (Tensor(term="attention", name="self_attn.sinks", shape=(model.heads,), divided=True),)


_GRANITE = _Style(qkv_bias=llama_bias, out_bias=llama_bias, mlp_bias=_key("mlp_bias"))


def _cohere(model: Model) -> Blueprint:
    """commandr.py: norms over Q and K are matrices of a row per head, and divided like the heads."""
    layers = []
    for index in range(model.layers):
        cache = model.attention(index)
        layer = _layer(_COHERE, model, index)
        if model.text.flag("use_qk_norm"):
            layer += tuple(
                Tensor(
                    term="norms",
                    name=f"self_attn.{name}.weight",
                    shape=(heads, cache.head_size),
                    divided=True,
                )
                for name, heads in (("q_norm", model.heads), ("k_norm", cache.num_kv_heads))
            )
        layers.append(layer)
    return decoder(model, layers, tied=True, places=EVERYWHERE)


_COHERE = _Style(norms=("input_layernorm",))


def _apertus(model: Model) -> Blueprint:
    """apertus.py: two numbers of the activation in each layer."""
    alphas = tuple(
        Tensor(term="mlp", name=f"mlp.act_fn.{name}", shape=(1,)) for name in ("alpha_p", "alpha_n")
    )
    layers = [_layer(_APERTUS, model, index) + alphas for index in range(model.layers)]
    return decoder(model, layers, tied=model.tied(default=False))


_APERTUS = _Style(
    qkv_bias=llama_qkv_bias,
    out_bias=llama_bias,
    mlp_bias=_key("mlp_bias"),
    head_norms=_QK_NORMS,
    gated=False,
    norms=("attention_layernorm", "feedforward_layernorm"),
)


def _olmo2(model: Model) -> Blueprint:
    """Transformers' Olmo2Attention: norms over all of Q and K, which every rank holds whole."""
    layers = []
    for index in range(model.layers):
        cache = model.attention(index)
        layers.append(
            _layer(_OLMO2, model, index)
            + norm("self_attn.q_norm", model.heads * cache.head_size)
            + norm("self_attn.k_norm", cache.num_kv_heads * cache.head_size)
        )
    return decoder(model, layers, tied=model.tied(default=False))


_OLMO2 = _Style(
    qkv_bias=_key("attention_bias"),
    out_bias=_key("attention_bias"),
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)

BUILDS: Mapping[str, Build] = {
    **{architecture: _build(style) for architecture, style in _STYLES.items()},
    "ApertusForCausalLM": _apertus,
    "CohereForCausalLM": _cohere,
    "GraniteForCausalLM": _granite(tied=False),
    "GraniteSWAForCausalLM": _granite(tied=True),
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo2,
}
