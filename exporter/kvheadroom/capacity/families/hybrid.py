"""Gated delta nets and short convolutions beside plain attention: Qwen3-Next, Qwen3.5, OLMo Hybrid, LFM2.

A layer with a state keeps the same for every request, however long it grows. vLLM takes it from the same pool as
attention, and makes the blocks large enough for it (`hybrid`).

Sources: vLLM 0.33.0's `model_executor/models/` (one file per architecture), `model_executor/layers/mamba/` and
`config/model.py`; what transformers 5.19 fills in where config.json leaves a key out.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from kvheadroom.capacity.families.text_config import FULL
from kvheadroom.capacity.layer_stack import Layers, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import (
    AttentionLayer,
    CacheLayer,
    Checkpoint,
    GatedDeltaState,
    ShortConvState,
    StateLayer,
)
from kvheadroom.capacity.model_config import shown

LINEAR = "linear_attention"

# transformers/configuration_utils.py, `remap_legacy_layer_types`.
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}

# What `mamba_ssm_cache_dtype` may be set to (vLLM, config/cache.py, `MambaDType`); "auto" leaves it to the model.
_STATE_DTYPES = ("float32", "float16", "bfloat16")

Caches = Mapping[str, tuple[CacheLayer, ...]]
"""What each type of layer keeps."""


def types_of_layers(config: ModelConfig, key: str, length: int | None = None) -> list[str] | None:
    """The list of types in `key` under their present names; None where it is left out."""
    types = config.words(key, length)
    return None if types is None else [_OLD_NAMES.get(name, name) for name in types]


def arrange(config: ModelConfig, key: str, types: Sequence[str], caches: Caches) -> Layers:
    """What each layer keeps, from its type, which `key` of config.json gives."""
    unknown = sorted(set(types) - set(caches))
    if unknown:
        raise config.bad(key, f"names {shown(unknown[0])}, which is none of {', '.join(sorted(caches))}")
    return tuple(caches[name] for name in types)


def needs_aligned_blocks(
    config: ModelConfig, key: str, types: Sequence[str], state: str, *, wrapped: bool
) -> bool:
    """What `ModelConfig.is_hybrid` answers: false where all layers are attention, as in the smallest Granite 4.

    It looks at the outermost section alone, so that a multimodal model (`wrapped`) is always one.
    """
    if not wrapped and all(name == FULL for name in types):
        return False
    if state not in types:
        raise config.bad(
            key, f"names no layer of type {state}; blocks are then sized for a state that is not there"
        )
    return True


def state_dtype(config: ModelConfig, key: str) -> str | None:
    """The dtype of recurrent states that config.json asks for."""
    dtype = config.word(key)
    if dtype is None or dtype == "auto":
        return None
    if dtype not in _STATE_DTYPES:
        raise config.bad(key, f"is {shown(dtype)}, one of {', '.join(_STATE_DTYPES)} is needed")
    return dtype


def kv_heads_or_all(config: ModelConfig) -> int:
    """`num_key_value_heads`; as many as query heads where it is left out."""
    return config.count("num_key_value_heads", config.count("num_attention_heads"))


def derived_head_size(config: ModelConfig) -> int:
    """The head size of classes that read no `head_dim`."""
    size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if size < heads:
        raise config.bad("hidden_size", f"is {size}, too little for {heads} heads")
    return size // heads


def model_head_size(config: ModelConfig) -> int:
    """`get_head_size` of transformers_utils/model_arch_config_convertor.py."""
    return config.count("head_dim", derived_head_size(config))


def _qwen(config: ModelConfig, *, mtp_layers: str, ssm_dtype: str = "", wrapped: bool = False) -> LayerStack:
    """Qwen3-Next and Qwen3.5 (qwen3_next.py, qwen3_5.py): gated delta nets, full attention every few layers."""
    requires_usual_attention(config)
    attention = AttentionLayer(
        num_kv_heads=config.count("num_key_value_heads"), head_size=config.count("head_dim")
    )
    state = StateLayer(state=gated_delta_state(config), checkpoint=Checkpoint.FLASHINFER)
    layers = config.layers()
    types = types_of_layers(config, "layer_types", layers)
    if types is None:
        # 4 where the key is left out too: transformers' default since the first release of either model.
        every = config.count("full_attention_interval", 4)
        types = [LINEAR if (index + 1) % every else FULL for index in range(layers)]
    # Qwen3-Next's config.json does not say how many, and both draft classes default to 1.
    modules = config.draft_layers(mtp_layers, 1)
    return LayerStack(
        layers=arrange(config, "layer_types", types, {FULL: (attention,), LINEAR: (state,)}),
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        hybrid=needs_aligned_blocks(config, "layer_types", types, LINEAR, wrapped=wrapped),
        mtp=((attention,),) * modules or None,
        recurrent_dtype=state_dtype(config, ssm_dtype) if ssm_dtype else None,
    )


def requires_usual_attention(config: ModelConfig) -> None:
    """Refuses keys that make another kind of attention."""
    for key in ("dual_chunk_attention_config", "is_causal"):
        if config.values.get(key) not in (None, True):
            raise config.bad(key, "changes the kind of attention, which is not modelled")


def gated_delta_state(config: ModelConfig) -> GatedDeltaState:
    """The state of a gated delta net, under the names that Qwen's models share."""
    return GatedDeltaState(
        num_k_heads=config.count("linear_num_key_heads"),
        num_v_heads=config.count("linear_num_value_heads"),
        head_k_dim=config.count("linear_key_head_dim"),
        head_v_dim=config.count("linear_value_head_dim"),
        conv_kernel=config.count("linear_conv_kernel_dim"),
    )


def _olmo_hybrid(config: ModelConfig) -> LayerStack:
    """olmo_hybrid.py: gated delta nets that always run without checkpoints inside a prefill."""
    if not config.flag("linear_use_gate", default=True):
        raise config.bad("linear_use_gate", "is false, which vLLM refuses")
    heads = config.count("num_attention_heads")
    attention = AttentionLayer(num_kv_heads=kv_heads_or_all(config), head_size=derived_head_size(config))
    key_heads = config.count("linear_num_key_heads", heads)
    key_size = config.count("linear_key_head_dim", config.count("hidden_size") * 3 // (4 * key_heads))
    state = GatedDeltaState(
        num_k_heads=key_heads,
        num_v_heads=config.count("linear_num_value_heads", heads),
        head_k_dim=key_size,
        head_v_dim=config.count("linear_value_head_dim", 2 * key_size),
        conv_kernel=config.count("linear_conv_kernel_dim"),
    )
    layers = config.layers()
    types = types_of_layers(config, "layer_types", layers)
    if types is None:
        types = [FULL if index % 4 == 3 else LINEAR for index in range(layers)]
    if not {FULL, LINEAR} <= set(types):
        raise config.bad("layer_types", "needs layers of both types, transformers refuses others")
    return LayerStack(
        layers=arrange(
            config, "layer_types", types, {FULL: (attention,), LINEAR: (StateLayer(state=state),)}
        ),
        num_kv_heads=attention.num_kv_heads,
        head_size=model_head_size(config),
        hybrid=True,
    )


_LFM2_WIDTHS = {"Lfm2ForCausalLM": "conv_dim", "Lfm2MoeForCausalLM": "hidden_size"}


def _lfm2(config: ModelConfig, *, width: str, wrapped: bool = False) -> LayerStack:
    """lfm2.py, lfm2_moe.py: short convolutions instead of recurrent states."""
    layers = config.layers()
    attention = AttentionLayer(
        num_kv_heads=config.count("num_key_value_heads"), head_size=derived_head_size(config)
    )
    state = StateLayer(
        state=ShortConvState(width=config.count(width), conv_kernel=config.count("conv_L_cache"))
    )
    types = types_of_layers(config, "layer_types", layers)
    if types is None:
        attending = config.counts("full_attn_idxs", smallest=0)
        if attending is None:
            raise config.bad("layer_types", "is left out")
        recurrent = set(range(layers)).difference(attending)
        types = ["conv" if index in recurrent else FULL for index in range(layers)]
    return LayerStack(
        layers=arrange(config, "layer_types", types, {FULL: (attention,), "conv": (state,)}),
        num_kv_heads=attention.num_kv_heads,
        head_size=model_head_size(config),
        hybrid=needs_aligned_blocks(config, "layer_types", types, "conv", wrapped=wrapped),
    )


def _lfm2_vl(config: ModelConfig) -> LayerStack:
    """lfm2_vl.py: the class of the text model is the one that its own section names."""
    names = config.words("architectures") or [""]
    width = _LFM2_WIDTHS.get(names[0])
    if width is None:
        raise config.bad("architectures", f"names none of {', '.join(_LFM2_WIDTHS)}")
    if config.count(width) != config.count("hidden_size"):
        raise config.bad(width, "is not `hidden_size`, for which vLLM sizes the blocks of this model")
    return _lfm2(config, width=width, wrapped=True)


_qwen3_next = partial(_qwen, mtp_layers="num_nextn_predict_layers")
_qwen3_5 = partial(_qwen, mtp_layers="mtp_num_hidden_layers", ssm_dtype="mamba_ssm_dtype")

READERS: Mapping[str, Reader] = {
    **{name: partial(_lfm2, width=width) for name, width in _LFM2_WIDTHS.items()},
    "Lfm2VlForConditionalGeneration": _lfm2_vl,
    "OlmoHybridForCausalLM": _olmo_hybrid,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": partial(_qwen3_5, wrapped=True),
    "Qwen3_5MoeForCausalLM": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": partial(_qwen3_5, wrapped=True),
}
