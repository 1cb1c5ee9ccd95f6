"""Blueprints of models with recurrent states beside latent attention: Kimi-Linear and K3, GLM-5.3-Flash, Ling.

Sources, all of vLLM 0.33.0: `models/kimi_k3/nvidia/`, `models/glm5next/common/`,
`model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py`, `model_executor/models/bailing_moe_*.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.layers import KdaState, LinearAttentionState, State, StateLayer
from kvheadroom.capacity.weights.builders import (
    Build,
    Model,
    decoder,
    experts,
    has_fast_routing,
    router,
    shared_experts,
    shared_mlp,
)
from kvheadroom.capacity.weights.latent import deepseek_mtp, indexer, latent_attention
from kvheadroom.capacity.weights.moe import bailing_experts
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    Experts,
    Linear,
    Mtp,
    Out,
    Parts,
    Stage,
    Tensor,
    column,
    gated_mlp,
    norm,
    norms,
    row,
    whole,
)

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def _state(model: Model, layer: int) -> State | None:
    caches = model.stack.layers[layer]
    return next((cache.state for cache in caches if isinstance(cache, StateLayer)), None)


def _divided(name: str, *shape: int) -> Tensor:
    return Tensor(term="states", name=f"self_attn.{name}", shape=shape, divided=True, dtype=FLOAT32)


def _kda_numbers(state: KdaState) -> Parts:
    """What every form of Kimi delta attention keeps in float32, but for its convolutions."""
    width = state.num_heads * state.head_dim
    return (_divided("dt_bias", width), _divided("A_log", state.num_heads))


def _kimi_kda(model: Model, state: KdaState, *, full_rank: bool) -> Parts:
    """kimi_gdn_linear_attn.py; with a gate of full rank kimi_k3/nvidia/kda.py, whose rows are padded to 16."""
    hidden, width, size = model.hidden, state.num_heads * state.head_dim, state.head_dim
    outs = tuple(Out(f"{name}_proj", width) for name in ("q", "k", "v"))
    if full_rank:
        outs += (Out("g_proj", width), Out("f_a_proj", size, whole=True), Out("b_proj", state.num_heads))
    else:
        outs += (Out("b_proj", state.num_heads), Out("f_a_proj", size, whole=True))
    parts: Parts = (
        *_kda_numbers(state),
        Linear(
            term="states",
            name="self_attn.in_proj_qkvgfab",
            inputs=hidden,
            outs=outs,
            row_multiple=16 if full_rank else 1,
        ),
        column("states", "self_attn.f_b_proj", size, width),
        _divided("conv1d.weight", 3 * width, 1, state.conv_kernel),
        *norm("self_attn.o_norm", size, term="states"),
        row("states", "self_attn.o_proj", width, hidden),
    )
    if full_rank:
        return parts
    return (
        *parts,
        whole("states", "self_attn.g_a_proj", hidden, size),
        column("states", "self_attn.g_b_proj", size, width),
    )


# The slice of an expert that a tensor-parallel rank holds is at least so wide (kimi_k3/nvidia/model.py).
_KIMI_NARROWEST = 256


def _kimi_layer(model: Model, index: int, state: State | None) -> Parts:
    text, hidden = model.text, model.hidden
    linear = text.section("linear_attn_config")
    full_rank = linear is not None and linear.flag("use_full_rank_gate")
    if isinstance(state, KdaState):
        layer = _kimi_kda(model, state, full_rank=full_rank)
    else:
        layer = latent_attention(model)
        if text.flag("mla_use_output_gate"):
            gates = column("attention", "self_attn.g_proj", hidden, model.heads * text.count("v_head_dim"))
            layer += (gates,)
    first = text.count("first_k_dense_replace", smallest=0)
    if index < first or index % text.count("moe_layer_freq", 1):
        layer += gated_mlp(hidden, text.count("intermediate_size"), shared_expert=True)
    else:
        layer += _kimi_experts(model)
    if text.has("attn_res_block_size"):
        for each in ("self_attention_res", "mlp_res"):
            layer += norm(f"{each}_norm", hidden)
            layer += (whole("attention", f"{each}_proj", hidden, 1, quantized=False),)
    return layer + norms(_TWO_NORMS, hidden)


def _kimi_experts(model: Model) -> Parts:
    text, hidden = model.text, model.hidden
    count, inner = text.count("num_experts"), text.count("moe_intermediate_size")
    latent = text.count("routed_expert_hidden_size") if text.has("routed_expert_hidden_size") else None
    parts = router(
        hidden,
        count,
        name="block_sparse_moe.gate",
        correction="block_sparse_moe.gate.e_score_correction_bias",
    )
    parts += shared_mlp(
        hidden,
        inner * text.count("num_shared_experts", 0, smallest=0),
        "block_sparse_moe.shared_experts",
    )
    if latent:
        parts += (
            whole("experts", "block_sparse_moe.routed_expert_down_proj", hidden, latent),
            whole("experts", "block_sparse_moe.routed_expert_up_proj", latent, hidden),
        )
        if text.flag("latent_moe_use_norm"):
            parts += norm("block_sparse_moe.routed_expert_norm", latent)
    fast = text.word("hidden_act", "silu") == "silu" and has_fast_routing(
        text.word("moe_router_activation_func", "sigmoid"),
        renormalize=text.flag("moe_renormalize", default=True),
        corrected=True,
    )
    routed = Experts(
        name="block_sparse_moe.experts",
        count=count,
        hidden=latent or hidden,
        intermediate=inner,
        fast_routing=fast,
        narrowest_slice=text.count("min_moe_intermediate_per_partition", _KIMI_NARROWEST),
    )
    return (*parts, routed)


def kimi(model: Model) -> Blueprint:
    """Kimi-Linear, and the language model of Kimi-K3."""
    layers = [_kimi_layer(model, index, _state(model, index)) for index in range(model.layers)]
    blueprint = decoder(model, layers, tied=model.tied(default=False))
    if not model.text.has("attn_res_block_size"):
        return blueprint
    last: Parts = (
        *norm("model.output_attn_res_norm", model.hidden),
        whole("attention", "model.output_attn_res_proj", model.hidden, 1, quantized=False),
    )
    return replace(blueprint, around=(*blueprint.around, (Stage.LAST, last)))


def _glm_kda(model: Model, state: KdaState) -> Parts:
    """glm5next/common/kda.py; nothing of it is quantized."""
    hidden, width, size = model.hidden, state.num_heads * state.head_dim, state.head_dim
    return (
        *_kda_numbers(state),
        Linear(
            term="states",
            name="self_attn.in_proj_qkvbfg_a",
            inputs=hidden,
            outs=(
                *(Out(f"{name}_proj", width) for name in ("q", "k", "v")),
                Out("b_proj", state.num_heads),
                Out("f_a_proj", size, whole=True),
                Out("g_a_proj", size, whole=True),
            ),
            quantized=False,
        ),
        column("states", "self_attn.f_b_proj", size, width, quantized=False),
        column("states", "self_attn.g_b_proj", size, width, quantized=False),
        *(_divided(f"{name}_conv1d.weight", width, 1, state.conv_kernel) for name in ("q", "k", "v")),
        *norm("self_attn.o_norm", size, term="states"),
        row("states", "self_attn.o_proj", width, hidden, quantized=False),
    )


def _glm_latent(model: Model) -> Parts:
    """glm5next/common/model.py gives its latent attention no quantization."""
    text, hidden = model.text, model.hidden
    head_dim = text.count("index_head_dim")
    quantizable = latent_attention(model, rope=0) + indexer(model, head_dim)
    return (
        *(replace(part, quantized=False) if isinstance(part, Linear) else part for part in quantizable),
        *(
            Tensor(
                term="indexer",
                name="self_attn.indexer.index_kpool_compress_ape",
                shape=(text.count("index_kpool"), head_dim),
                dtype=FLOAT32,
            ),
            Tensor(
                term="indexer",
                name="self_attn.indexer.index_kpool_compress_gate",
                shape=(head_dim, hidden),
                dtype="bfloat16",
            ),
        ),
    )


def _hyper_connections(model: Model) -> Parts:
    """Mixing of residual streams (`mhc`), in float32."""
    text = model.text
    if not text.flag("mhc", default=True):
        return ()
    streams = text.count("hc_mult")
    mixes = (2 + streams) * streams
    parts: Parts = ()
    for each in ("attn", "ffn"):
        for name, shape in (
            ("fn", (mixes, streams * model.hidden)),
            ("base", (mixes,)),
            ("scale", (3,)),
        ):
            parts += (Tensor(term="hyper_connections", name=f"hc_{each}_{name}", shape=shape, dtype=FLOAT32),)
    return parts


def glm5_next(model: Model) -> Blueprint:
    """GLM-5.3-Flash."""
    text, hidden = model.text, model.hidden
    types = text.words("mlp_layer_types", model.layers)
    if types is None:
        raise text.bad("mlp_layer_types", "is left out, a list with an entry per layer is needed")
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    corrected = text.word("topk_method", "noaux_tc") == "noaux_tc"
    sparse = (
        router(hidden, count, correction="mlp.gate.e_score_correction_bias" if corrected else None)
        + shared_mlp(hidden, inner * shared_experts(text))
        + experts(
            model,
            count,
            inner,
            fast_routing=has_fast_routing(
                text.word("scoring_func", "sigmoid"),
                renormalize=text.flag("norm_topk_prob", default=True),
                corrected=corrected,
            ),
        )
    )
    dense = gated_mlp(hidden, text.count("intermediate_size"), shared_expert=True)
    mixing = _hyper_connections(model)
    layers = []
    for index, kind in enumerate(types):
        state = _state(model, index)
        mixer = _glm_kda(model, state) if isinstance(state, KdaState) else _glm_latent(model)
        layers.append(mixer + (sparse if kind == "sparse" else dense) + mixing + norms(_TWO_NORMS, hidden))
    mtp: Mtp | None = None
    if model.stack.mtp:
        block = _glm_latent(model) + (sparse if types[-1] == "sparse" else dense) + norms(_TWO_NORMS, hidden)
        # its output layer is the target's from the start
        mtp = replace(deepseek_mtp(model, block, len(model.stack.mtp)), heads=())
    return decoder(model, layers, tied=False, mtp=mtp)


def _bailing_latent(model: Model, *, out: str) -> Parts:
    """Latent attention whose output matrix has a name of its own."""
    text = model.text
    parts = tuple(
        replace(part, name=f"self_attn.{out}") if part.name == "self_attn.o_proj" else part
        for part in latent_attention(model)
    )
    gate = text.word("gated_attention_proj_granularity_type")
    if gate is not None:
        raise text.bad("gated_attention_proj_granularity_type", "is not null, which is not modelled")
    return parts


def _bailing_mlp(model: Model, index: int, *, float32_router: bool) -> Parts:
    text = model.text
    dense = index < text.count("first_k_dense_replace", smallest=0) or text.count("num_experts") == 1
    if dense:
        return gated_mlp(model.hidden, text.count("intermediate_size"), bias=text.flag("use_bias"))
    parts = bailing_experts(model)
    if float32_router and not text.has("router_dtype"):
        return tuple(
            replace(part, dtype=FLOAT32) if isinstance(part, Linear) and part.name == "mlp.gate" else part
            for part in parts
        )
    return parts


def _bailing_2_5(model: Model) -> Blueprint:
    """bailing_moe_linear.py."""
    text, hidden = model.text, model.hidden
    layers = []
    for index in range(model.layers):
        state = _state(model, index)
        if isinstance(state, LinearAttentionState):
            width = state.num_heads * state.head_dim
            mixer: Parts = (
                column(
                    "states",
                    "self_attn.query_key_value",
                    hidden,
                    {"q": width, "k": width, "v": width},
                    bias=text.flag("use_bias") or text.flag("use_qkv_bias"),
                ),
                column("states", "self_attn.g_proj", hidden, width),
                row("states", "self_attn.dense", width, hidden, bias=text.flag("use_bias")),
                Tensor(term="states", name="self_attn.g_norm.weight", shape=(width,), divided=True),
            )
            if text.flag("use_qk_norm"):
                mixer += norms(("self_attn.query_layernorm", "self_attn.key_layernorm"), state.head_dim)
        else:
            mixer = _bailing_latent(model, out="o_proj")
        layers.append(mixer + _bailing_mlp(model, index, float32_router=True) + norms(_TWO_NORMS, hidden))
    return decoder(model, layers, tied=False, embedding="model.word_embeddings")


def bailing_3(model: Model) -> Blueprint:
    """bailing_moe_v3.py."""
    hidden = model.hidden
    layers = []
    for index in range(model.layers):
        state = _state(model, index)
        if isinstance(state, KdaState):
            width, size = state.num_heads * state.head_dim, state.head_dim
            mixer: Parts = (
                *_kda_numbers(state),
                column(
                    "states",
                    "self_attn.qkvb_proj",
                    hidden,
                    {"q_proj": width, "k_proj": width, "v_proj": width, "b_proj": state.num_heads},
                ),
                column("states", "self_attn.f_proj", hidden, width),
                column("states", "self_attn.g_proj", hidden, width),
                *(_divided(f"{name}_conv1d.weight", width, 1, state.conv_kernel) for name in ("q", "k", "v")),
                *norm("self_attn.o_norm", size, term="states"),
                row("states", "self_attn.o_proj", width, hidden),
            )
        else:
            mixer = _bailing_latent(model, out="dense")
        layers.append(mixer + _bailing_mlp(model, index, float32_router=True) + norms(_TWO_NORMS, hidden))
    return decoder(model, layers, tied=False, embedding="model.word_embeddings")


BUILDS: Mapping[str, Build] = {
    "BailingMoeV2_5ForCausalLM": _bailing_2_5,
    "BailingMoeV3ForCausalLM": bailing_3,
    "Glm5NextForCausalLM": glm5_next,
    "KimiLinearForCausalLM": kimi,
}
