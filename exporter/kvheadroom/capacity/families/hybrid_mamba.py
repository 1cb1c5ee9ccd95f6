"""Mamba's states, beside plain attention and alone: Nemotron-H, Granite 4, Falcon-H1, Zamba2, Jamba, Mamba, Mamba2.

Sources: vLLM 0.33.0's `model_executor/models/` (one file per architecture), `model_executor/layers/mamba/` and
`model_executor/models/config.py`; what transformers 5.19 fills in where config.json leaves a key out.
"""

from collections.abc import Mapping

from kvheadroom.capacity.families.hybrid import (
    LINEAR,
    Caches,
    arrange,
    derived_head_size,
    kv_heads_or_all,
    model_head_size,
    needs_aligned_blocks,
    state_dtype,
    types_of_layers,
)
from kvheadroom.capacity.families.text_config import FULL
from kvheadroom.capacity.layer_stack import Layers, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import AttentionLayer, Checkpoint, Mamba1State, Mamba2State, StateLayer
from kvheadroom.capacity.model_config import MOST_LAYERS, shown

# The letters of Nemotron-H's pattern; `-` and `E` keep nothing.
_NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _nemotron_h(config: ModelConfig) -> LayerStack:
    """nemotron_h.py: each layer is one of Mamba2, attention, MLP or MoE; their list decides, not a number."""
    attention = AttentionLayer(
        num_kv_heads=config.count("num_key_value_heads"),
        # 128 is the default of transformers' class; the first releases wrote it as `attention_head_dim`.
        head_size=config.count("head_dim", 128),
        window=config.count("sliding_window") if config.has("sliding_window") else None,
    )
    heads = config.count("mamba_num_heads")
    head_dim = config.count("mamba_head_dim")
    state = Mamba2State(
        intermediate_size=heads * head_dim,
        # The names that transformers' class prefers are those of other Mamba2 models.
        n_groups=config.count("mamba_n_groups" if config.has("mamba_n_groups") else "n_groups"),
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.count("ssm_state_size"),
        conv_kernel=config.count("mamba_d_conv" if config.has("mamba_d_conv") else "conv_kernel"),
    )
    caches: Caches = {FULL: (attention,), LINEAR: (_mamba2_layer(state),), "mlp": (), "moe": ()}
    _has_one_name_of_types(config)
    types = types_of_layers(config, "layers_block_type")
    if types is None:
        types = _nemotron_pattern(config, "hybrid_override_pattern")
    if not types:
        raise config.bad("layers_block_type", "is left out or empty, and so is `hybrid_override_pattern`")
    return LayerStack(
        layers=arrange(config, "layers_block_type", types, caches),
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        hybrid=needs_aligned_blocks(config, "layers_block_type", types, LINEAR, wrapped=False),
        mtp=_nemotron_mtp(config, caches),
        # `NemotronHForCausalLMConfig` (model_executor/models/config.py), after transformers' default.
        recurrent_dtype=state_dtype(config, "mamba_ssm_cache_dtype")
        if config.has("mamba_ssm_cache_dtype")
        else "float32",
    )


def _has_one_name_of_types(config: ModelConfig) -> None:
    """Transformers takes `layer_types` for another name of `layers_block_type`; which one wins is not modelled."""
    if config.has("layer_types"):
        raise config.bad("layer_types", "is not read for this model, `layers_block_type` is")


def _nemotron_pattern(config: ModelConfig, key: str) -> list[str] | None:
    pattern = config.word(key)
    if pattern is None:
        return None
    if not 0 < len(pattern) <= MOST_LAYERS or set(pattern) - set(_NEMOTRON_LETTERS):
        raise config.bad(
            key, f"is {shown(pattern)}, a letter of {''.join(_NEMOTRON_LETTERS)} per layer is needed"
        )
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _nemotron_mtp(config: ModelConfig, caches: Caches) -> Layers | None:
    """nemotron_h_mtp.py: one module alone, of attention and MoE layers."""
    if config.count("num_nextn_predict_layers", 0, smallest=0) != 1:
        return None
    usual = [FULL, "moe"]
    types = types_of_layers(config, "mtp_layers_block_type") or usual
    if types == usual:
        types = _nemotron_pattern(config, "mtp_hybrid_override_pattern") or usual
    if set(types) - set(usual):
        return None
    return tuple(caches[name] for name in types)


def _mamba2_layer(state: Mamba2State) -> StateLayer:
    return StateLayer(state=state, checkpoint=Checkpoint.ANYWHERE)


def _mamba2_state(config: ModelConfig, inner_size: int) -> Mamba2State:
    """Under the names that Granite 4 and Falcon-H1 share."""
    heads = config.count("mamba_n_heads")
    follows = config.values.get("mamba_d_head") in (None, "auto")
    head_dim = inner_size // heads if follows else config.count("mamba_d_head")
    if head_dim * heads != inner_size:
        raise config.bad("mamba_n_heads", f"is {heads}, which times {head_dim} is not {inner_size}")
    return Mamba2State(
        intermediate_size=inner_size,
        n_groups=config.count("mamba_n_groups"),
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.count("mamba_d_state"),
        conv_kernel=config.count("mamba_d_conv"),
    )


def _granite(config: ModelConfig) -> LayerStack:
    """granitemoehybrid.py: Mamba2 or attention in each layer."""
    if config.has("layers_block_type"):
        raise config.bad("layers_block_type", "is another name of `layer_types`, and is not modelled")
    layers = config.layers()
    attention = AttentionLayer(num_kv_heads=kv_heads_or_all(config), head_size=derived_head_size(config))
    state = _mamba2_state(config, config.count("mamba_expand") * config.count("hidden_size"))
    types = types_of_layers(config, "layer_types", layers) or [LINEAR] * layers
    caches: Caches = {FULL: (attention,), LINEAR: (_mamba2_layer(state),)}
    return LayerStack(
        layers=arrange(config, "layer_types", types, caches),
        num_kv_heads=attention.num_kv_heads,
        head_size=model_head_size(config),
        hybrid=needs_aligned_blocks(config, "layer_types", types, LINEAR, wrapped=False),
    )


def _falcon_h1(config: ModelConfig) -> LayerStack:
    """falcon_h1.py: attention and Mamba2 side by side in every layer."""
    # Null stands for what other keys give, and a key left out for a constant of transformers.
    if config.values.get("num_key_value_heads", 0) is None:
        kv_heads = config.count("num_attention_heads")
    else:
        kv_heads = config.count("num_key_value_heads")
    if config.values.get("mamba_d_ssm", 0) is None:
        inner_size = config.count("mamba_expand") * config.count("hidden_size")
    else:
        inner_size = config.count("mamba_d_ssm")
    attention = AttentionLayer(num_kv_heads=kv_heads, head_size=model_head_size(config))
    state = _mamba2_layer(_mamba2_state(config, inner_size))
    return LayerStack(
        layers=((attention, state),) * config.layers(),
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        hybrid=True,
    )


def _zamba2(config: ModelConfig) -> LayerStack:
    """zamba2.py: Mamba2 in every layer, and before some of them a shared attention, with a cache of its own.

    vLLM registers all attention first, and numbers the layers with a state after it.
    """
    layers = config.layers()
    _has_one_name_of_types(config)
    types = types_of_layers(config, "layers_block_type", layers)
    if types is None:
        raise config.bad("layers_block_type", "is left out")
    arrange(config, "layers_block_type", types, {LINEAR: (), "hybrid": ()})
    shared = [index for index, name in enumerate(types) if name == "hybrid"]
    listed = config.counts("hybrid_layer_ids", smallest=0)
    if listed is not None and listed != shared:
        raise config.bad("hybrid_layer_ids", "does not match `layers_block_type`")
    heads = config.count("num_attention_heads")
    attention = AttentionLayer(
        num_kv_heads=heads,
        head_size=config.count("attention_head_dim", 2 * config.count("hidden_size") // heads),
    )
    inner_size = config.count("mamba_expand") * config.count("hidden_size")
    mamba_heads = config.count("n_mamba_heads")
    head_dim = inner_size // mamba_heads
    if config.count("mamba_headdim", head_dim) != head_dim:
        raise config.bad("mamba_headdim", f"is not the {head_dim} that other keys give")
    state = _mamba2_layer(
        Mamba2State(
            intermediate_size=inner_size,
            n_groups=config.count("mamba_ngroups"),
            num_heads=mamba_heads,
            head_dim=head_dim,
            state_size=config.count("mamba_d_state"),
            conv_kernel=config.count("mamba_d_conv"),
        )
    )
    return LayerStack(
        layers=((attention,),) * len(shared) + ((state,),) * layers,
        num_kv_heads=kv_heads_or_all(config),
        head_size=attention.head_size,
        hybrid=True,
        pipeline=False,
    )


def _jamba(config: ModelConfig) -> LayerStack:
    """jamba.py: Mamba1, attention every few layers."""
    attention = AttentionLayer(
        num_kv_heads=config.count("num_key_value_heads"), head_size=derived_head_size(config)
    )
    state = StateLayer(
        state=Mamba1State(
            intermediate_size=config.count("mamba_expand") * config.count("hidden_size"),
            state_size=config.count("mamba_d_state"),
            conv_kernel=config.count("mamba_d_conv"),
        )
    )
    every = config.count("attn_layer_period")
    first = config.count("attn_layer_offset", smallest=0)
    if first >= every:
        raise config.bad("attn_layer_offset", f"is {first}, and the period only {every}")
    types = [FULL if index % every == first else LINEAR for index in range(config.layers())]
    return LayerStack(
        layers=arrange(config, "attn_layer_period", types, {FULL: (attention,), LINEAR: (state,)}),
        num_kv_heads=attention.num_kv_heads,
        head_size=model_head_size(config),
        hybrid=needs_aligned_blocks(config, "attn_layer_period", types, LINEAR, wrapped=False),
    )


def _mamba(config: ModelConfig) -> LayerStack:
    """mamba.py: Mamba1 and Falcon-Mamba, no attention at all."""
    state = Mamba1State(
        intermediate_size=_inner_size(config),
        state_size=config.count("state_size"),
        conv_kernel=config.count("conv_kernel"),
    )
    return LayerStack(layers=((StateLayer(state=state),),) * config.layers(), num_kv_heads=0, head_size=0)


def _mamba2(config: ModelConfig) -> LayerStack:
    """mamba2.py."""
    heads = config.count("num_heads")
    head_dim = config.count("head_dim")
    if heads * head_dim != config.count("expand") * config.count("hidden_size"):
        raise config.bad(
            "num_heads", f"is {heads}, which times {head_dim} is not `expand` times `hidden_size`"
        )
    state = Mamba2State(
        intermediate_size=_inner_size(config),
        n_groups=config.count("n_groups"),
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.count("state_size"),
        conv_kernel=config.count("conv_kernel"),
    )
    return LayerStack(
        layers=((_mamba2_layer(state),),) * config.layers(),
        num_kv_heads=0,
        head_size=head_dim,
        pipeline=False,
    )


def _inner_size(config: ModelConfig) -> int:
    """Both Mamba classes take `intermediate_size` where it is there."""
    if config.has("intermediate_size"):
        return config.count("intermediate_size")
    return config.count("expand") * config.count("hidden_size")


READERS: Mapping[str, Reader] = {
    "FalconH1ForCausalLM": _falcon_h1,
    "FalconMambaForCausalLM": _mamba,
    "GraniteMoeHybridForCausalLM": _granite,
    "JambaForCausalLM": _jamba,
    "Mamba2ForCausalLM": _mamba2,
    "MambaForCausalLM": _mamba,
    "NemotronHForCausalLM": _nemotron_h,
    "Zamba2ForCausalLM": _zamba2,
}
