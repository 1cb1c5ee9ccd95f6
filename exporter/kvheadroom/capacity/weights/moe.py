"""Blueprints of decoders of plain attention with routed experts.

Read in vllm/model_executor/models/ of 0.33.0; where vLLM builds a model with transformers' own modeling, in
transformers 5.19.
It is long because it is a list: a function for each of vLLM's model files, read beside that file and without the others.
"""

from collections.abc import Mapping

from kvheadroom.capacity.layer_stack import ModelConfig
from kvheadroom.capacity.weights.builders import (
    EVERYWHERE,
    STAGED,
    Build,
    Model,
    attention_parts,
    decoder,
    experts,
    has_fast_routing,
    router,
    shared_experts,
    shared_mlp,
)
from kvheadroom.capacity.weights.latent import deepseek_mtp
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    CacheScales,
    Experts,
    Parts,
    Tensor,
    column,
    gated_mlp,
    norm,
    norms,
    qkv,
    row,
    whole,
)
from kvheadroom.capacity.weights.plain import sinks

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_QK_NORMS = ("q_norm", "k_norm")


def _is_sparse(text: ModelConfig, layer: int) -> bool:
    """Qwen's rule: every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    dense = text.counts("mlp_only_layers", smallest=0) or []
    step = text.count("decoder_sparse_step", 1)
    return layer not in dense and (layer + 1) % step == 0


def _mixtral(model: Model) -> Blueprint:
    hidden, text = model.hidden, model.text
    moe: Parts = router(hidden, text.count("num_local_experts"), name="block_sparse_moe.gate") + experts(
        model,
        text.count("num_local_experts"),
        text.count("intermediate_size"),
        fast_routing=True,
        name="block_sparse_moe.experts",
    )
    layer = attention_parts(model, model.attention(0)) + moe + norms(_TWO_NORMS, hidden)
    return decoder(model, [layer] * model.layers, tied=model.tied(default=False), places=EVERYWHERE)


def qwen_moe_mlp(
    model: Model, *, shared: int, count: int, renormalize: bool, quantized_router: bool = False
) -> Parts:
    """Qwen's sparse MLP: experts, and a shared one behind a gate of its own."""
    hidden = model.hidden
    parts = router(hidden, count, quantized=quantized_router)
    if shared:
        parts += (whole("router", "mlp.shared_expert_gate", hidden, 1, quantized=False),)
        parts += shared_mlp(hidden, shared, "mlp.shared_expert")
    return parts + experts(model, count, model.text.count("moe_intermediate_size"), fast_routing=renormalize)


def _qwen3_moe(model: Model, *, tied: bool = False) -> Blueprint:
    text, hidden = model.text, model.hidden
    count = text.count_of("num_experts", "num_local_experts")
    layers = []
    for index in range(model.layers):
        layer = attention_parts(
            model, model.attention(index), bias=text.flag("attention_bias"), head_norms=_QK_NORMS
        ) + norms(_TWO_NORMS, hidden)
        if _is_sparse(text, index):
            layer += qwen_moe_mlp(
                model,
                shared=model.count_or("shared_expert_intermediate_size", 0),
                count=count,
                renormalize=text.flag("norm_topk_prob"),
                quantized_router=True,
            )
        else:
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=tied), places=EVERYWHERE)


def _qwen2_moe(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    if not text.flag("qkv_bias", default=True):
        raise text.bad("qkv_bias", "is false, which vLLM does not read")
    layers = []
    for index in range(model.layers):
        layer = attention_parts(model, model.attention(index), bias=True) + norms(_TWO_NORMS, hidden)
        if _is_sparse(text, index):
            shared = text.count("shared_expert_intermediate_size", smallest=0)
            layer += qwen_moe_mlp(
                model, shared=shared, count=text.count("num_experts"), renormalize=text.flag("norm_topk_prob")
            )
        else:
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=False), places=EVERYWHERE)


def glm4_moe_layer(model: Model, index: int) -> Parts:
    """glm4_moe.py; layers from `first_k_dense_replace` on have experts."""
    text, hidden = model.text, model.hidden
    layer = attention_parts(
        model,
        model.attention(min(index, model.layers - 1)),
        bias=text.flag("attention_bias", default=text.word("model_type") == "glm4v_moe_text"),
        head_norms=_QK_NORMS if text.flag("use_qk_norm") else None,
    ) + norms(_TWO_NORMS, hidden)
    if index < text.count("first_k_dense_replace", smallest=0):
        return layer + gated_mlp(hidden, text.count("intermediate_size"))
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    return (
        layer
        + router(hidden, count, dtype=FLOAT32, correction="mlp.gate.e_score_correction_bias")
        + shared_mlp(hidden, inner * shared_experts(text), divided=True)
        + experts(model, count, inner, fast_routing=text.flag("norm_topk_prob", default=True))
    )


def _glm4_moe(model: Model) -> Blueprint:
    layers = [glm4_moe_layer(model, index) for index in range(model.layers)]
    mtp = None
    if modules := len(model.stack.mtp or ()):
        mtp = deepseek_mtp(model, glm4_moe_layer(model, model.layers), modules)
    return decoder(model, layers, tied=False, mtp=mtp)


def _minimax_m2(model: Model) -> Blueprint:
    """minimax_m2.py: norms over all of Q and K, divided like the heads."""
    text, hidden, cache = model.text, model.hidden, model.attention(0)
    count = text.count("num_local_experts")
    layer = (
        *attention_parts(model, cache, bias=text.flag("attention_bias")),
        Tensor(
            term="norms", name="self_attn.q_norm.weight", shape=(model.heads * cache.head_size,), divided=True
        ),
        Tensor(
            term="norms",
            name="self_attn.k_norm.weight",
            shape=(cache.num_kv_heads, cache.head_size),
            divided=True,
            units=cache.num_kv_heads,
        ),
        *router(
            hidden,
            count,
            name="block_sparse_moe.gate",
            dtype=FLOAT32,
            correction="block_sparse_moe.e_score_correction_bias" if text.flag("use_routing_bias") else None,
        ),
        *experts(
            model,
            count,
            text.count("intermediate_size"),
            fast_routing=has_fast_routing(
                text.word("scoring_func", "sigmoid"),
                renormalize=True,
                corrected=text.flag("use_routing_bias"),
            ),
            name="block_sparse_moe.experts",
        ),
        *norms(_TWO_NORMS, hidden),
    )
    return decoder(model, [layer] * model.layers, tied=False)


def _phimoe(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    count = text.count("num_local_experts")
    layer = (
        attention_parts(model, model.attention(0), bias=True, out_bias=True)
        + router(hidden, count, name="block_sparse_moe.gate")
        + experts(
            model, count, text.count("intermediate_size"), fast_routing=False, name="block_sparse_moe.experts"
        )
        + norms(_TWO_NORMS, hidden, bias=True)
    )
    return decoder(
        model,
        [layer] * model.layers,
        tied=False,
        final_norm=norm("model.norm", hidden, bias=True),
        places=EVERYWHERE,
        head_bias=True,
    )


def ernie_layer(model: Model, index: int) -> Parts:
    """ernie45_moe.py."""
    text, hidden = model.text, model.hidden
    bias = text.flag("use_bias")
    layer = attention_parts(model, model.attention(0), bias=bias) + norms(_TWO_NORMS, hidden)
    first, last = (
        text.count("moe_layer_start_index", 0, smallest=0),
        text.count("moe_layer_end_index", model.layers - 1, smallest=0),
    )
    sparse = first <= index <= last and (index + 1) % text.count("moe_layer_interval", 1) == 0
    if not sparse:
        return layer + gated_mlp(hidden, text.count("intermediate_size"), bias=bias)
    count, inner = text.count_of("moe_num_experts", "num_experts"), text.count("moe_intermediate_size")
    return (
        layer
        + router(hidden, count, dtype=FLOAT32, correction="mlp.gate.e_score_correction_bias")
        + shared_mlp(hidden, inner * model.count_or("moe_num_shared_experts", 0), divided=True)
        + experts(model, count, inner, fast_routing=False)
    )


def _ernie_moe(model: Model) -> Blueprint:
    layers = [ernie_layer(model, index) for index in range(model.layers)]
    return decoder(model, layers, tied=model.tied(default=True))


def _olmoe(model: Model) -> Blueprint:
    """olmoe.py: norms over all of Q and K, which every rank holds whole; an output layer of its own always."""
    text, hidden, cache = model.text, model.hidden, model.attention(0)
    layer = (
        attention_parts(model, cache)
        + norm("self_attn.q_norm", model.heads * cache.head_size)
        + norm("self_attn.k_norm", cache.num_kv_heads * cache.head_size)
        + router(hidden, text.count("num_experts"))
        + experts(model, text.count("num_experts"), text.count("intermediate_size"), fast_routing=False)
        + norms(_TWO_NORMS, hidden)
    )
    return decoder(model, [layer] * model.layers, tied=False, places=EVERYWHERE)


def _flex_olmo(model: Model) -> Blueprint:
    """Transformers' FlexOlmoDecoderLayer."""
    text, hidden, cache = model.text, model.hidden, model.attention(0)
    bias = text.flag("attention_bias")
    count = text.count_of("num_experts", "num_local_experts")
    layer = (
        attention_parts(model, cache, bias=bias, out_bias=bias)
        + norm("self_attn.q_norm", model.heads * cache.head_size)
        + norm("self_attn.k_norm", cache.num_kv_heads * cache.head_size)
        + router(hidden, count)
        + experts(model, count, text.count("intermediate_size"), fast_routing=text.flag("norm_topk_prob"))
        + norms(("post_attention_layernorm", "post_feedforward_layernorm"), hidden)
    )
    return decoder(model, [layer] * model.layers, tied=model.tied(default=False))


def _bailing_moe(model: Model) -> Blueprint:
    """bailing_moe.py, for Ling 1 and 2."""
    text, hidden = model.text, model.hidden
    bias = text.flag("use_bias")
    cache = model.attention(0)
    layers = []
    for index in range(model.layers):
        layer = attention_parts(
            model,
            cache,
            bias=bias or text.flag("use_qkv_bias"),
            out_bias=bias,
            name="attention",
            qkv_name="query_key_value",
            out="dense",
            scales=False,
        ) + norms(_TWO_NORMS, hidden)
        if text.flag("use_qk_norm"):
            layer += norms(
                ("attention.query_layernorm", "attention.key_layernorm"),
                cache.head_size,
                bias=not text.flag("use_rmsnorm"),
            )
        if index < text.count("first_k_dense_replace", smallest=0):
            layer += gated_mlp(hidden, text.count("intermediate_size"), bias=bias)
        else:
            layer += bailing_experts(model)
        layers.append(layer)
    return decoder(
        model, layers, tied=model.tied(default=True), embedding="model.word_embeddings", places=STAGED
    )


def bailing_experts(model: Model) -> Parts:
    """Experts of Ling's models, whose router may be in float32 and have a bias for each expert."""
    text, hidden = model.text, model.hidden
    count, inner = text.count("num_experts"), text.count("moe_intermediate_size")
    shared = text.count("moe_shared_expert_intermediate_size", inner) * model.count_or(
        "num_shared_experts", 0
    )
    dtype = text.word("router_dtype")
    if dtype not in (None, "fp32", "bf16"):
        raise text.bad("router_dtype", "is none of fp32 and bf16")
    return (
        router(
            hidden,
            count,
            dtype={"fp32": FLOAT32, "bf16": "bfloat16"}.get(dtype or ""),
            correction="mlp.gate.expert_bias" if text.flag("moe_router_enable_expert_bias") else None,
        )
        + shared_mlp(hidden, shared, divided=True)
        + experts(
            model,
            count,
            inner,
            fast_routing=has_fast_routing(
                text.word("score_function", "softmax"),
                renormalize=text.flag("norm_topk_prob"),
                corrected=text.flag("moe_router_enable_expert_bias"),
            ),
        )
    )


def _afmoe(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    count, inner = text.count("num_experts"), text.count("moe_intermediate_size")
    layers = []
    for index in range(model.layers):
        cache = model.attention(index)
        layer = (
            *attention_parts(model, cache, head_norms=_QK_NORMS),
            column("attention", "self_attn.gate_proj", hidden, model.heads * cache.head_size),
            *norms((*_TWO_NORMS, "pre_mlp_layernorm", "post_mlp_layernorm"), hidden),
        )
        if index < text.count("num_dense_layers", smallest=0):
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        else:
            layer += (
                router(hidden, count, name="mlp.router.gate", dtype=FLOAT32, correction="mlp.expert_bias")
                + shared_mlp(hidden, inner * text.count("num_shared_experts", smallest=0), divided=True)
                + experts(
                    model,
                    count,
                    inner,
                    fast_routing=text.word("score_func", "sigmoid") == "sigmoid"
                    and text.flag("route_norm", default=True),
                )
            )
        layers.append(layer)
    return decoder(model, layers, tied=False)


def _exaone_moe(model: Model) -> Blueprint:
    layers = [exaone_moe_layer(model, index) for index in range(model.layers)]
    return decoder(model, layers, tied=model.tied(default=False))


def exaone_moe_layer(model: Model, index: int) -> Parts:
    """exaone_moe.py."""
    text, hidden = model.text, model.hidden
    bias = text.flag("attention_bias") or text.flag("bias")
    layer = attention_parts(
        model,
        model.attention(min(index, model.layers - 1)),
        bias=bias,
        out_bias=bias,
        head_norms=_QK_NORMS,
    ) + norms(_TWO_NORMS, hidden)
    types = text.words("mlp_layer_types", model.layers)
    if types is None:
        sparse = index >= text.count("first_k_dense_replace", smallest=0)
    else:
        sparse = index >= model.layers or types[index] == "sparse"
    if not sparse:
        return layer + gated_mlp(hidden, text.count("intermediate_size"), bias=text.flag("mlp_bias"))
    count, inner = text.count("num_experts"), text.count("moe_intermediate_size")
    return (
        layer
        + router(hidden, count, correction="mlp.e_score_correction_bias")
        + shared_mlp(hidden, inner * model.count_or("num_shared_experts", 0), divided=True)
        + experts(model, count, inner, fast_routing=text.flag("norm_topk_prob", default=True))
    )


def _granite_moe(*, tied: bool, shared: bool = False) -> Build:
    def build(model: Model) -> Blueprint:
        text, hidden = model.text, model.hidden
        count, inner = text.count("num_local_experts"), text.count("intermediate_size")
        layers = []
        for index in range(model.layers):
            layer = (
                attention_parts(model, model.attention(index))
                + sinks(model, index)
                + router(hidden, count, name="block_sparse_moe.gate")
                + experts(model, count, inner, fast_routing=True, name="block_sparse_moe.experts")
                + norms(_TWO_NORMS, hidden)
            )
            if shared:
                layer += granite_shared_mlp(model)
            layers.append(layer)
        return decoder(model, layers, tied=model.tied(default=tied), places=EVERYWHERE)

    return build


def granite_shared_mlp(model: Model) -> Parts:
    """granitemoeshared.py."""
    inner, hidden = model.count_or("shared_intermediate_size", 0), model.hidden
    if not inner:
        return ()
    return (
        column("mlp", "shared_mlp.input_linear", hidden, {"input_linear": inner, "input_linear_up": inner}),
        row("mlp", "shared_mlp.output_linear", inner, hidden),
    )


def _dbrx(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    section = text.section("ffn_config")
    if section is None:
        raise text.bad("ffn_config", "is left out, a section is needed")
    count = section.count("moe_num_experts")
    layer = (
        attention_parts(
            model, model.attention(0), name="norm_attn_norm.attn", qkv_name="Wqkv", out="out_proj"
        )
        + norms(("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"), hidden)
        + router(hidden, count, name="ffn.router.layer")
        + experts(model, count, section.count("ffn_hidden_size"), fast_routing=True, name="ffn.experts")
    )
    return decoder(
        model,
        [layer] * model.layers,
        tied=False,
        final_norm=norm("transformer.norm_f", hidden),
        places=EVERYWHERE,
        embedding="transformer.wte",
    )


def _gpt_oss(model: Model) -> Blueprint:
    """gpt_oss.py: every matrix has a bias, and every head a sink."""
    text, hidden = model.text, model.hidden
    count = text.count("num_local_experts")
    layer = (
        *attention_parts(model, model.attention(0), bias=True, out_bias=True, name="attn"),
        Tensor(term="attention", name="attn.sinks", shape=(model.heads,), divided=True),
        Experts(
            name="mlp.experts",
            count=count,
            hidden=hidden,
            intermediate=text.count("intermediate_size"),
            bias=True,
        ),
        *router(hidden, count, name="mlp.router", bias=True),
        *norms(_TWO_NORMS, hidden),
    )
    return decoder(model, [layer] * model.layers, tied=False, places=EVERYWHERE)


def _llama4(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    count, inner = text.count("num_local_experts"), text.count("intermediate_size")
    step = text.count("interleave_moe_layer_step", 1, smallest=0)
    listed = text.counts("moe_layers", smallest=0)
    layers = []
    for index in range(model.layers):
        sparse = step > 0 and (index + 1) % step == 0
        if listed is not None and (index in listed) != sparse:
            raise text.bad("moe_layers", "does not match `interleave_moe_layer_step`, by which vLLM goes")
        layer = attention_parts(model, model.attention(index)) + norms(_TWO_NORMS, hidden)
        if sparse:
            layer += (
                router(hidden, count, name="feed_forward.router")
                + shared_mlp(hidden, inner, "feed_forward.shared_expert")
                + experts(model, count, inner, fast_routing=True, name="feed_forward.experts")
            )
        else:
            layer += gated_mlp(hidden, text.count("intermediate_size_mlp"), name="feed_forward")
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=False))


def _dots1(model: Model) -> Blueprint:
    """Transformers' Dots1DecoderLayer; the router's correction is no parameter there.

    In float16 vLLM leaves the choice of experts to transformers (models/transformers/moe.py).
    """
    text, hidden = model.text, model.hidden
    bias = text.flag("attention_bias")
    layers = []
    for index in range(model.layers):
        layer = attention_parts(
            model, model.attention(index), bias=bias, out_bias=bias, head_norms=_QK_NORMS
        ) + norms(_TWO_NORMS, hidden)
        if index < text.count("first_k_dense_replace", smallest=0):
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        else:
            count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
            layer += (
                router(hidden, count)
                + shared_mlp(hidden, inner * text.count("n_shared_experts"), divided=True)
                + experts(
                    model, count, inner, fast_routing=text.flag("norm_topk_prob") and model.dtype != "float16"
                )
            )
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=False))


def _hunyuan_moe(model: Model) -> Blueprint:
    """Transformers' HunYuanMoEV1DecoderLayer; lists of one number per layer stand for that number."""
    text, hidden = model.text, model.hidden
    bias = text.flag("attention_bias")
    count = _one_of_all(text, "num_experts")
    inner = _one_of_all(text, "intermediate_size")
    layer = (
        attention_parts(
            model,
            model.attention(0),
            bias=bias,
            out_bias=bias,
            head_norms=("query_layernorm", "key_layernorm"),
        )
        + router(hidden, count, name="mlp.gate.wg")
        + shared_mlp(hidden, inner, "mlp.shared_mlp", divided=True)
        + experts(model, count, inner, fast_routing=False)
        + norms(_TWO_NORMS, hidden)
    )
    return decoder(model, [layer] * model.layers, tied=model.tied(default=False))


def _one_of_all(text: ModelConfig, key: str) -> int:
    if not isinstance(text.values.get(key), list):
        return text.count(key)
    values = set(text.counts(key) or ())
    if len(values) != 1:
        raise text.bad(key, "differs between layers, which is not modelled")
    return values.pop()


def _step3(model: Model) -> Blueprint:
    """step3_text.py: queries of low rank, one K and V head on every rank, no norm over either."""
    text, hidden, heads = model.text, model.hidden, model.heads
    head_dim, rank = text.count("head_dim"), text.count("share_q_dim")
    attention: Parts = (
        whole(
            "attention",
            "self_attn.qkv_proj",
            hidden,
            {"q_proj": rank, "k_proj": head_dim, "v_proj": head_dim},
        ),
        *norm("self_attn.inter_norm", rank),
        column("attention", "self_attn.wq", rank, heads * head_dim),
        row("attention", "self_attn.o_proj", heads * head_dim, hidden),
        CacheScales(name="self_attn.attn", quantized=False),
    )
    sparse = _listed_layers(text, "moe_layers_enum", range(1, model.layers))
    count, inner = text.count("moe_num_experts"), text.count("moe_intermediate_size")
    layers = []
    for index in range(model.layers):
        layer = attention + norms(_TWO_NORMS, hidden)
        if index in sparse:
            layer += (
                router(hidden, count, name="moe.gate")
                + shared_mlp(hidden, text.count("share_expert_dim"), "share_expert", divided=True)
                + experts(
                    model, count, inner, fast_routing=text.flag("norm_expert_weight"), name="moe.experts"
                )
            )
        else:
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=True), own_head=True)


def _listed_layers(text: ModelConfig, key: str, usual: range) -> frozenset[int]:
    """Layers named as `3,4,5`."""
    listed = text.word(key)
    if listed is None:
        return frozenset(usual)
    numbers = [word.strip() for word in listed.split(",")]
    if not all(number.isdecimal() and len(number) < 6 for number in numbers):
        raise text.bad(key, "is no list of layers as `3,4,5`")
    return frozenset(map(int, numbers))


def step3p5_layer(model: Model, index: int, *, sliding: bool, sparse: bool) -> Parts:
    """step3p5.py: windowed layers have heads of a number of their own."""
    text, hidden = model.text, model.hidden
    heads = model.heads
    if sliding:
        other = text.section("attention_other_setting")
        if text.has("num_sliding_attention_heads"):
            heads = text.count("num_sliding_attention_heads")
        elif other is not None and other.word("attention_type") == "sliding_attention":
            heads = other.count("num_attention_heads")
    cache = model.attention(min(index, model.layers - 1))
    layer = attention_parts(
        model, cache, heads=heads, bias=text.flag("attention_bias"), head_norms=_QK_NORMS
    ) + norms(_TWO_NORMS, hidden)
    if text.flag("use_head_wise_attn_gate"):
        layer += (column("attention", "self_attn.g_proj", hidden, heads),)
    if not sparse:
        return layer + gated_mlp(hidden, text.count("intermediate_size"))
    count = text.count_of("moe_num_experts", "n_routed_experts")
    return (
        layer
        + router(hidden, count, name="moe.gate", dtype=FLOAT32, correction="moe.router_bias")
        + shared_mlp(
            hidden, text.count_of("share_expert_dim", "share_expert_dims"), "moe.share_expert", divided=True
        )
        + experts(
            model,
            count,
            text.count("moe_intermediate_size"),
            fast_routing=has_fast_routing(
                text.word("moe_router_activation", "sigmoid"),
                renormalize=text.flag("norm_expert_weight"),
                corrected=True,
            ),
            name="moe.experts",
        )
    )


def _step3p5(model: Model) -> Blueprint:
    text = model.text
    if text.has("per_layer_config"):
        raise text.bad("per_layer_config", "is not modelled for this architecture")
    types = text.words("mlp_layer_types")
    sparse = (
        frozenset(index for index, kind in enumerate(types) if kind == "sparse")
        if types is not None
        else _listed_layers(text, "moe_layers_enum", range(1, model.layers))
    )
    layers = [
        step3p5_layer(model, index, sliding=model.attention(index).window is not None, sparse=index in sparse)
        for index in range(model.layers)
    ]
    return decoder(model, layers, tied=model.tied(default=False), own_head=True)


def _mimo_v2(model: Model) -> Blueprint:
    """mimo_v2.py: windowed layers have heads of other numbers and sizes, and sinks."""
    text, hidden = model.text, model.hidden
    bias = text.flag("attention_bias")
    frequencies = text.counts("moe_layer_freq", model.layers, smallest=0)
    if frequencies is None:
        raise text.bad("moe_layer_freq", "is left out, a list with an entry per layer is needed")
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    layers = []
    for index in range(model.layers):
        cache = model.attention(index)
        heads = text.count("swa_num_attention_heads") if cache.window else model.heads
        size_v = cache.head_size_v or cache.head_size
        layer: Parts = (
            qkv(
                hidden,
                heads,
                cache.num_kv_heads,
                cache.head_size,
                head_size_v=cache.head_size_v,
                bias=bias,
            ),
            row("attention", "self_attn.o_proj", heads * size_v, hidden),
            CacheScales(name="self_attn.attn"),
        )
        sink = "add_swa_attention_sink_bias" if cache.window else "add_full_attention_sink_bias"
        if text.flag(sink):
            layer += (
                Tensor(term="attention", name="self_attn.attention_sink_bias", shape=(heads,), divided=True),
            )
        if frequencies[index]:
            layer += router(
                hidden, count, dtype=FLOAT32, correction="mlp.gate.e_score_correction_bias"
            ) + experts(model, count, inner, fast_routing=text.flag("norm_topk_prob", default=True))
        else:
            layer += gated_mlp(hidden, text.count("intermediate_size"))
        layers.append(layer + norms(_TWO_NORMS, hidden))
    return decoder(model, layers, tied=False)


BUILDS: Mapping[str, Build] = {
    "AfmoeForCausalLM": _afmoe,
    "BailingMoeForCausalLM": _bailing_moe,
    "BailingMoeV2ForCausalLM": _bailing_moe,
    "DbrxForCausalLM": _dbrx,
    "Dots1ForCausalLM": _dots1,
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "ExaoneMoEForCausalLM": _exaone_moe,
    "ExaoneMoeForCausalLM": _exaone_moe,
    "FlexOlmoForCausalLM": _flex_olmo,
    "Glm4MoeForCausalLM": _glm4_moe,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteMoeForCausalLM": _granite_moe(tied=False),
    "GraniteMoeSWAForCausalLM": _granite_moe(tied=False),
    "GraniteMoeSharedForCausalLM": _granite_moe(tied=False, shared=True),
    "HunYuanMoEV1ForCausalLM": _hunyuan_moe,
    "Llama4ForCausalLM": _llama4,
    "MiMoV2FlashForCausalLM": _mimo_v2,
    "MiMoV2ForCausalLM": _mimo_v2,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "MixtralForCausalLM": _mixtral,
    "OlmoeForCausalLM": _olmoe,
    "PhiMoEForCausalLM": _phimoe,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Step3TextForCausalLM": _step3,
    "Step3p5ForCausalLM": _step3p5,
}
