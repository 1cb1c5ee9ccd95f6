"""Blueprints of models with recurrent states beside attention, or alone: delta nets, short convolutions, Mamba.

Sources, vLLM 0.33.0: `model_executor/models/` (one file per architecture) and `model_executor/layers/mamba/`.
It is long because it is a list: a function for each of vLLM's model files, read beside that file and without the others.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.layer_stack import ModelConfig
from kvheadroom.capacity.layers import (
    AttentionLayer,
    GatedDeltaState,
    Mamba1State,
    Mamba2State,
    ShortConvState,
    State,
    StateLayer,
)
from kvheadroom.capacity.weights.builders import (
    EVERYWHERE,
    Build,
    Model,
    Places,
    attention_parts,
    decoder,
    experts,
    has_fast_routing,
    router,
)
from kvheadroom.capacity.weights.moe import granite_shared_mlp, qwen_moe_mlp
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    ROUTER_DTYPE,
    Blueprint,
    CacheScales,
    Experts,
    Linear,
    Mtp,
    Out,
    Parts,
    Stage,
    Tensor,
    Vocabulary,
    column,
    gated_mlp,
    norm,
    norms,
    plain_mlp,
    qkv,
    row,
    whole,
)

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def _state(model: Model, layer: int) -> State | None:
    """The recurrent state of one layer."""
    caches = model.stack.layers[layer]
    return next((cache.state for cache in caches if isinstance(cache, StateLayer)), None)


def _divided(term: str, name: str, *shape: int, dtype: str | None = None) -> Tensor:
    return Tensor(term=term, name=name, shape=shape, divided=True, dtype=dtype)


def delta_net(
    model: Model, state: GatedDeltaState, *, name: str = "linear_attn", fused: bool = False
) -> Parts:
    """Gated delta net (qwen_gdn_linear_attn.py); Qwen3-Next's checkpoint has its inputs in two matrices."""
    keys, values = state.num_k_heads * state.head_k_dim, state.num_v_heads * state.head_v_dim
    hidden = model.hidden
    return (
        _divided("states", f"{name}.dt_bias", state.num_v_heads),
        _divided("states", f"{name}.A_log", state.num_v_heads, dtype=FLOAT32),
        _divided("states", f"{name}.conv1d.weight", 2 * keys + values, 1, state.conv_kernel),
        column(
            "states",
            f"{name}.in_proj_qkvz",
            hidden,
            2 * keys + 2 * values
            if fused
            else {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values, "in_proj_z": values},
        ),
        column(
            "states",
            f"{name}.in_proj_ba",
            hidden,
            2 * state.num_v_heads
            if fused
            else {"in_proj_b": state.num_v_heads, "in_proj_a": state.num_v_heads},
        ),
        *norm(f"{name}.norm", state.head_v_dim, term="states"),
        row("states", f"{name}.out_proj", values, hidden),
    )


def qwen_attention(model: Model, cache: AttentionLayer) -> Parts:
    """Attention whose output passes a gate, which comes with the queries (qwen3_next.py)."""
    text, hidden = model.text, model.hidden
    gates = 2 if text.flag("attn_output_gate", default=True) else 1
    return (
        qkv(
            hidden,
            model.heads * gates,
            cache.num_kv_heads,
            cache.head_size,
            bias=text.flag("qkv_bias"),
        ),
        row("attention", "self_attn.o_proj", model.heads * cache.head_size, hidden),
        CacheScales(name="self_attn.attn"),
        *norms(("self_attn.q_norm", "self_attn.k_norm"), cache.head_size),
    )


def qwen_mixer(model: Model, layer: int, *, fused: bool = False) -> Parts:
    """The attention or the delta net of one layer."""
    state = _state(model, layer)
    if isinstance(state, GatedDeltaState):
        return delta_net(model, state, fused=fused)
    return qwen_attention(model, model.attention(layer))


def _layer_scale(model: Model) -> Parts:
    if not model.text.flag("layer_scale"):
        return ()
    return tuple(
        Tensor(term="norms", name=name, shape=(1, 1, model.hidden))
        for name in ("attn_layer_scale", "ffn_layer_scale")
    )


def _qwen3_next(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    dense = text.counts("mlp_only_layers", smallest=0) or []
    step = text.count("decoder_sparse_step", 1)
    layers = []
    for index in range(model.layers):
        layer = qwen_mixer(model, index, fused=True) + norms(_TWO_NORMS, hidden) + _layer_scale(model)
        if index not in dense and (index + 1) % step == 0 and text.count("num_experts", smallest=0):
            layer += _qwen_experts(model)
        else:
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        layers.append(layer)
    mtp = _qwen_mtp(model, _qwen_experts(model)) if model.stack.mtp else None
    return decoder(model, layers, tied=False, places=_QWEN3_NEXT, mtp=mtp)


def _qwen_mtp(model: Model, mlp: Parts) -> Mtp:
    """qwen3_next_mtp.py, qwen3_5_mtp.py: layers of attention behind a projection of embedding and hidden state."""
    hidden, rows = model.hidden, model.text.count("vocab_size")
    names = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    parts: Parts = (column("mtp", "fc", 2 * hidden, hidden), *norms(names, hidden))
    for caches in model.stack.mtp or ():
        cache = next(each for each in caches if isinstance(each, AttentionLayer))
        parts += qwen_attention(model, cache) + norms(_TWO_NORMS, hidden) + _layer_scale(model) + mlp
    embedding = Vocabulary(term="embedding", name="embed_tokens", rows=rows, width=hidden)
    return Mtp(parts=parts, embedding=(embedding,), quantizable=False)


def _qwen_experts(model: Model) -> Parts:
    text = model.text
    return qwen_moe_mlp(
        model,
        shared=text.count("shared_expert_intermediate_size", smallest=0),
        count=text.count("num_experts"),
        renormalize=text.flag("norm_topk_prob", default=True),
    )


_LFM2 = Places(Stage.ALL, Stage.LAST, Stage.LAST)
_QWEN3_NEXT = Places(Stage.ALL, Stage.LAST, Stage.ALL)
QWEN3_5 = Places(Stage.ALL, Stage.LAST, Stage.LAST)


def qwen3_5_layers(model: Model) -> list[Parts]:
    """The language model's layers (qwen3_5.py)."""
    text, hidden = model.text, model.hidden
    sparse = text.has("num_experts")
    return [
        qwen_mixer(model, index)
        + norms(_TWO_NORMS, hidden)
        + _layer_scale(model)
        + (_qwen_experts(model) if sparse else gated_mlp(hidden, text.count("intermediate_size")))
        for index in range(model.layers)
    ]


def qwen3_5(model: Model) -> Blueprint:
    """qwen3_5.py, its language model alone."""
    mtp = qwen3_5_mtp(model)
    return decoder(model, qwen3_5_layers(model), tied=model.tied(default=False), places=QWEN3_5, mtp=mtp)


def qwen3_5_mtp(model: Model) -> Mtp | None:
    """qwen3_5_mtp.py."""
    if not model.stack.mtp:
        return None
    sparse = model.text.has("num_experts")
    dense = () if sparse else gated_mlp(model.hidden, model.text.count("intermediate_size"))
    return _qwen_mtp(model, _qwen_experts(model) if sparse else dense)


def _olmo_hybrid(model: Model) -> Blueprint:
    """olmo_hybrid.py: norms over all of Q and K, one after attention and MLP instead of before."""
    text, hidden = model.text, model.hidden
    inner = text.count("intermediate_size")
    layers = []
    for index in range(model.layers):
        state = _state(model, index)
        if isinstance(state, GatedDeltaState):
            keys, values = state.num_k_heads * state.head_k_dim, state.num_v_heads * state.head_v_dim
            layer: Parts = (
                _divided("states", "linear_attn.dt_bias", state.num_v_heads),
                _divided("states", "linear_attn.A_log", state.num_v_heads),
                column(
                    "states",
                    "linear_attn.in_proj_qkvg",
                    hidden,
                    {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values},
                ),
                column("states", "linear_attn.b_proj", hidden, state.num_v_heads),
                column("states", "linear_attn.a_proj", hidden, state.num_v_heads),
                _divided("states", "linear_attn.conv1d.weight", 2 * keys + values, 1, state.conv_kernel),
                *norm("linear_attn.o_norm", state.head_v_dim, term="states"),
                row("states", "linear_attn.o_proj", values, hidden),
                *norms(_TWO_NORMS, hidden),
            )
        else:
            cache = model.attention(index)
            layer = (
                attention_parts(model, cache)
                + norm("self_attn.k_norm", cache.num_kv_heads * cache.head_size)
                + norm("self_attn.q_norm", model.heads * cache.head_size)
                + norms(("post_attention_layernorm", "post_feedforward_layernorm"), hidden)
            )
        layers.append(layer + gated_mlp(hidden, inner))
    return decoder(model, layers, tied=model.tied(default=False), places=EVERYWHERE)


def lfm2(model: Model) -> Blueprint:
    """lfm2.py, lfm2_moe.py."""
    text, hidden = model.text, model.hidden
    bias = text.flag("conv_bias")
    moe = text.has("num_experts")
    layers = []
    for index in range(model.layers):
        state = _state(model, index)
        if isinstance(state, ShortConvState):
            width = state.width
            layer: Parts = (
                _divided("states", "short_conv.conv.weight", width, 1, state.conv_kernel),
                column(
                    "states",
                    "short_conv.in_proj",
                    hidden,
                    {"in_proj_b": width, "in_proj_c": width, "in_proj_x": width},
                    bias=bias,
                ),
                row("states", "short_conv.out_proj", width, hidden, bias=bias),
            )
            if bias:
                layer += (_divided("states", "short_conv.conv.bias", width),)
        else:
            layer = attention_parts(
                model,
                model.attention(index),
                head_norms=("q_layernorm", "k_layernorm"),
                out="out_proj",
                scales=False,
            )
        sparse = moe and index >= text.count("num_dense_layers", smallest=0)
        inner = text.count("intermediate_size") if moe else _lfm2_inner(text)
        layer += _lfm2_experts(model) if sparse else _lfm2_mlp(hidden, inner)
        layers.append(layer + norms(("operator_norm", "ffn_norm"), hidden))
    return decoder(
        model,
        layers,
        tied=True,
        final_norm=norm("model.embedding_norm", hidden),
        places=_LFM2,
    )


def _lfm2_mlp(hidden: int, inner: int) -> Parts:
    return (
        column("mlp", "feed_forward.w13", hidden, {"w1": inner, "w3": inner}),
        row("mlp", "feed_forward.w2", inner, hidden),
    )


def _lfm2_experts(model: Model) -> Parts:
    text = model.text
    count = text.count("num_experts")
    corrected = text.flag("use_expert_bias", default=True)
    return router(
        model.hidden,
        count,
        name="feed_forward.gate",
        correction="feed_forward.expert_bias" if corrected else None,
        quantized=True,
    ) + experts(
        model,
        count,
        text.count("moe_intermediate_size"),
        fast_routing=has_fast_routing(
            "sigmoid", renormalize=text.flag("norm_topk_prob", default=True), corrected=corrected
        ),
        name="feed_forward.experts",
    )


def _lfm2_inner(text: ModelConfig) -> int:
    """`Lfm2MLP`: two thirds, times a factor, rounded up."""
    inner = text.count_of("block_ff_dim", "intermediate_size")
    if not text.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    factor = text.values.get("block_ffn_dim_multiplier", 1.0)
    if factor is not None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1000:
            raise text.bad("block_ffn_dim_multiplier", "is no number above 0")
        inner = int(factor * inner)
    multiple = text.count("block_multiple_of", 256)
    return -(-inner // multiple) * multiple


def mamba2(
    model: Model,
    state: Mamba2State,
    *,
    name: str,
    conv_bias: bool,
    bias: bool,
    has_norm: bool = True,
) -> Parts:
    """Mamba2 (mamba_mixer2.py); its groups are repeated where there is one."""
    hidden, inner, size = model.hidden, state.intermediate_size, state.state_size
    groups = state.n_groups * size
    # every rank holds a whole group at least
    convolution = (Out("x", inner), Out("B", groups, size), Out("C", groups, size))
    parts: Parts = (
        _divided("states", f"{name}.A", state.num_heads, dtype=FLOAT32),
        _divided("states", f"{name}.D", state.num_heads),
        _divided("states", f"{name}.dt_bias", state.num_heads),
        Linear(
            term="states",
            name=f"{name}.conv1d",
            inputs=state.conv_kernel,
            outs=convolution,
            bias=conv_bias,
            quantized=False,
        ),
        Linear(
            term="states",
            name=f"{name}.in_proj",
            inputs=hidden,
            outs=(Out("z", inner), *convolution, Out("dt", state.num_heads)),
            bias=bias,
        ),
        row("states", f"{name}.out_proj", inner, hidden, bias=bias),
    )
    return (*parts, _divided("states", f"{name}.norm.weight", inner)) if has_norm else parts


def mamba1(model: Model, state: Mamba1State, *, name: str, rank: int, conv_bias: bool, bias: bool) -> Parts:
    """Mamba1 (mamba_mixer.py)."""
    hidden, inner, size = model.hidden, state.intermediate_size, state.state_size
    return (
        _divided("states", f"{name}.A", inner, size, dtype=FLOAT32),
        _divided("states", f"{name}.D", inner),
        column("states", f"{name}.conv1d", state.conv_kernel, inner, bias=conv_bias, quantized=False),
        column("states", f"{name}.in_proj", hidden, {"in_proj_x": inner, "in_proj_z": inner}, bias=bias),
        row("states", f"{name}.x_proj", inner, rank + 2 * size),
        column("states", f"{name}.dt_proj", rank, inner, bias=True),
        row("states", f"{name}.out_proj", inner, hidden, bias=bias),
    )


def _time_rank(text: ModelConfig, key: str, hidden: int) -> int:
    """`auto` is a sixteenth of the hidden size."""
    if text.values.get(key) in (None, "auto"):
        return math.ceil(hidden / 16)
    return text.count(key)


def _jamba(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    rank = _time_rank(text, "mamba_dt_rank", hidden)
    every, first = text.count("expert_layer_period"), text.count("expert_layer_offset", smallest=0)
    count, inner = text.count("num_experts"), text.count("intermediate_size")
    layers = []
    for index in range(model.layers):
        state = _state(model, index)
        if isinstance(state, Mamba1State):
            layer = (
                mamba1(
                    model,
                    state,
                    name="mamba",
                    rank=rank,
                    conv_bias=text.flag("mamba_conv_bias", default=True),
                    bias=text.flag("mamba_proj_bias"),
                )
                + norm("mamba.dt_layernorm", rank)
                + norms(("mamba.b_layernorm", "mamba.c_layernorm"), state.state_size)
            )
            # The class does not tell its mixers how the checkpoint is quantized (jamba.py).
            layer = tuple(
                replace(part, quantized=False) if isinstance(part, Linear) else part for part in layer
            )
        else:
            layer = attention_parts(model, model.attention(index), scales=False)
        if count > 1 and index % every == first:
            layer += router(hidden, count, name="feed_forward.router") + experts(
                model, count, inner, fast_routing=False, name="feed_forward.experts"
            )
        else:
            layer += gated_mlp(hidden, inner, name="feed_forward")
        layers.append(layer + norms(("input_layernorm", "pre_ff_layernorm"), hidden))
    return decoder(
        model,
        layers,
        tied=False,
        final_norm=norm("model.final_layernorm", hidden),
        places=EVERYWHERE,
    )


def _granite_hybrid(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    count, inner = text.count("num_local_experts", smallest=0), text.count("intermediate_size")
    bias = text.flag("attention_bias")
    layers = []
    for index in range(model.layers):
        state = _state(model, index)
        if isinstance(state, Mamba2State):
            layer = mamba2(
                model,
                state,
                name="mamba",
                conv_bias=text.flag("mamba_conv_bias", default=True),
                bias=text.flag("mamba_proj_bias"),
            )
        else:
            layer = attention_parts(model, model.attention(index), bias=bias, out_bias=bias)
        if count:
            layer += router(hidden, count, name="block_sparse_moe.gate")
            layer += experts(model, count, inner, fast_routing=True, name="block_sparse_moe.experts")
        layers.append(layer + granite_shared_mlp(model) + norms(_TWO_NORMS, hidden))
    return decoder(model, layers, tied=model.tied(default=False), places=EVERYWHERE)


def _falcon_h1(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    state = _state(model, 0)
    if not isinstance(state, Mamba2State):
        raise text.bad("mamba_d_ssm", "gives no Mamba layer")
    layer = (
        attention_parts(model, model.attention(0))
        + mamba2(
            model,
            state,
            name="mamba.mamba",
            conv_bias=text.flag("mamba_conv_bias", default=True),
            bias=text.flag("mamba_proj_bias"),
            has_norm=text.flag("mamba_rms_norm"),
        )
        + gated_mlp(hidden, text.count("intermediate_size"), name="feed_forward", bias=text.flag("mlp_bias"))
        + norms(("input_layernorm", "pre_ff_layernorm"), hidden)
    )
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=False),
        final_norm=norm("model.final_layernorm", hidden),
    )


def _nemotron_h(model: Model) -> Blueprint:
    """nemotron_h.py: each layer is one of Mamba2, attention, MLP and experts, with a norm before it."""
    text, hidden = model.text, model.hidden
    pattern = text.word("hybrid_override_pattern") or ""
    layers, mlps = [], 0
    for index, caches in enumerate(model.stack.layers):
        state = _state(model, index)
        if isinstance(state, Mamba2State):
            layer = mamba2(
                model,
                state,
                name="mixer",
                conv_bias=text.flag("use_conv_bias", default=True),
                bias=text.flag("use_bias"),
            )
        elif caches:
            layer = attention_parts(model, model.attention(index), name="mixer")
        elif _nemotron_is_moe(model, pattern, index):
            layer = nemotron_experts(model)
        else:
            layer = plain_mlp(
                hidden,
                _nemotron_inner(text, mlps),
                names=("mixer.up_proj", "mixer.down_proj"),
                bias=text.flag("mlp_bias"),
            )
            mlps += 1
        layers.append(layer + norm("norm", hidden))
    return decoder(
        model,
        layers,
        tied=False,
        final_norm=norm("model.norm_f", hidden),
        places=EVERYWHERE,
    )


def _nemotron_is_moe(model: Model, pattern: str, index: int) -> bool:
    types = model.text.words("layers_block_type")
    if types is not None:
        return types[index] == "moe"
    return pattern[index : index + 1] == "E"


def _nemotron_inner(text: ModelConfig, mlp: int) -> int:
    if not isinstance(text.values.get("intermediate_size"), list):
        return text.count("intermediate_size")
    sizes = text.counts("intermediate_size") or []
    if len(sizes) == 1:
        return sizes[0]
    if mlp >= len(sizes):
        raise text.bad("intermediate_size", "has fewer entries than there are MLPs")
    return sizes[mlp]


def nemotron_experts(model: Model) -> Parts:
    """`NemotronHMoE`: experts of two matrices, in a space of their own where there is a latent size."""
    text, hidden = model.text, model.hidden
    count = text.count("n_routed_experts")
    latent = text.count("moe_latent_size") if text.has("moe_latent_size") else None
    shared = text.count("n_shared_experts", 0, smallest=0)
    parts = router(
        hidden,
        count,
        name="mixer.gate",
        dtype=ROUTER_DTYPE,
        correction="mixer.gate.e_score_correction_bias",
    )
    if shared:
        inner = text.count("moe_shared_expert_intermediate_size") * shared
        parts += tuple(
            replace(part, shared_expert=True) if isinstance(part, Linear) else part
            for part in plain_mlp(
                hidden,
                inner,
                names=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
            )
        )
    if latent:
        bias = text.flag("mlp_bias")
        parts += (
            whole("experts", "mixer.fc1_latent_proj", hidden, latent, bias=bias),
            whole("experts", "mixer.fc2_latent_proj", latent, hidden, bias=bias),
        )
    routed = Experts(
        name="mixer.experts",
        count=count,
        hidden=latent or hidden,
        intermediate=text.count("moe_intermediate_size"),
        gated=False,
        fast_routing=text.flag("norm_topk_prob", default=True),
    )
    return (*parts, routed)


def _zamba2(model: Model) -> Blueprint:
    """zamba2.py: a few blocks of attention and MLP that take turns, each of their places with adapters of its own."""
    text, hidden = model.text, model.hidden
    types = text.words("layers_block_type") or []
    states = [cache for layer in model.stack.layers for cache in layer if isinstance(cache, StateLayer)]
    state = states[0].state if states else None
    shared = types.count("hybrid")
    cache = model.attention(0) if shared else None
    if not isinstance(state, Mamba2State) or cache is None:
        raise text.bad("layers_block_type", "has no layer of either kind")
    bias = text.flag("add_bias_linear")
    mamba = mamba2(
        model,
        state,
        name="mamba",
        conv_bias=text.flag("use_conv_bias", default=True),
        bias=bias,
    ) + norm("input_layernorm", hidden)
    blocks = min(text.count("num_mem_blocks", 1), shared)
    inner, rank = text.count("intermediate_size"), text.count("adapter_rank", 128)
    if text.flag("use_shared_attention_adapter"):
        raise text.bad("use_shared_attention_adapter", "is true, which is not modelled")
    block: Parts = (
        qkv(2 * hidden, model.heads, cache.num_kv_heads, cache.head_size),
        row("attention", "self_attn.o_proj", model.heads * cache.head_size, hidden),
        column(
            "mlp",
            "feed_forward.gate_up_proj",
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            bias=bias,
        ),
        row("mlp", "feed_forward.down_proj", inner, hidden, bias=bias),
        *norm("input_layernorm", 2 * hidden),
        *norm("pre_ff_layernorm", hidden),
    )
    place: Parts = (
        column("mlp", "feed_forward.gate_up_proj_adapter.A", hidden, rank),
        column(
            "mlp",
            "feed_forward.gate_up_proj_adapter.B",
            rank,
            {"B_gate": inner, "B_up": inner},
        ),
        whole("attention", "linear", hidden, hidden),
        CacheScales(name="self_attn.attn", quantized=False),
    )
    return decoder(
        model,
        (mamba,) * len(types),
        tied=True,
        final_norm=norm("model.final_layernorm", hidden),
        places=EVERYWHERE,
        extra=block * blocks + place * shared,
    )


def _mamba(model: Model) -> Blueprint:
    """mamba.py: Mamba1 and Falcon-Mamba, whose norms inside have no weights."""
    text, hidden = model.text, model.hidden
    state = _state(model, 0)
    if not isinstance(state, Mamba1State):
        raise text.bad("state_size", "gives no Mamba layer")
    layer = mamba1(
        model,
        state,
        name="mixer",
        rank=_time_rank(text, "time_step_rank", hidden),
        conv_bias=text.flag("use_conv_bias", default=True),
        bias=text.flag("use_bias"),
    ) + norm("norm", hidden)
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=True),
        final_norm=norm("backbone.norm_f", hidden),
        places=EVERYWHERE,
        embedding="backbone.embeddings",
    )


def _mamba2(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    state = _state(model, 0)
    if not isinstance(state, Mamba2State):
        raise text.bad("state_size", "gives no Mamba layer")
    layer = mamba2(
        model,
        state,
        name="mixer",
        conv_bias=text.flag("use_conv_bias", default=True),
        bias=text.flag("use_bias"),
    ) + norm("norm", hidden)
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=False),
        final_norm=norm("backbone.norm_f", hidden),
        places=EVERYWHERE,
        embedding="backbone.embeddings",
    )


BUILDS: Mapping[str, Build] = {
    "FalconH1ForCausalLM": _falcon_h1,
    "FalconMambaForCausalLM": _mamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "JambaForCausalLM": _jamba,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2,
    "Mamba2ForCausalLM": _mamba2,
    "MambaForCausalLM": _mamba,
    "NemotronHForCausalLM": _nemotron_h,
    "OlmoHybridForCausalLM": _olmo_hybrid,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5,
    "Zamba2ForCausalLM": _zamba2,
}
