"""Blueprints of Gemma 3n and 4, whose last layers use the K and V of others.

Read in vllm/model_executor/models/gemma3n.py and gemma4.py of 0.33.0.
"""

from collections.abc import Mapping

from kvheadroom.capacity.families.windowed import gemma4_attention
from kvheadroom.capacity.layers import AttentionLayer
from kvheadroom.capacity.weights.builders import (
    EVERYWHERE,
    Build,
    Model,
    attention_parts,
    decoder,
    experts,
)
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    CacheScales,
    Parts,
    Stage,
    Tensor,
    Vocabulary,
    column,
    gated_mlp,
    norm,
    norms,
    row,
    whole,
)

_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _attention(model: Model, cache: AttentionLayer, *, shares: bool) -> Parts:
    """A layer that uses another's K and V has queries only; V's norm has no weights."""
    bias = model.text.flag("attention_bias")
    if not shares:
        return attention_parts(model, cache, bias=bias, out_bias=bias, head_norms=("q_norm", "k_norm"))
    width = model.heads * cache.head_size
    return (
        column("attention", "self_attn.q_proj", model.hidden, width, bias=bias),
        row("attention", "self_attn.o_proj", width, model.hidden, bias=bias),
        CacheScales(name="self_attn.attn"),
        *norm("self_attn.q_norm", cache.head_size),
    )


def _per_layer_inputs(model: Model, size: int) -> Parts:
    """What a layer does with the embedding of its own that every token has."""
    hidden = model.hidden
    return (
        whole("per_layer_inputs", "per_layer_input_gate", hidden, size),
        whole("per_layer_inputs", "per_layer_projection", size, hidden),
        *norm("post_per_layer_input_norm", hidden),
    )


def _per_layer_tables(model: Model, size: int) -> Parts:
    wide = size * model.layers
    return (
        Vocabulary(
            term="embedding",
            name="model.embed_tokens_per_layer",
            rows=model.text.count("vocab_size_per_layer_input"),
            width=wide,
        ),
        column("per_layer_inputs", "model.per_layer_model_projection", model.hidden, wide),
        *norm("model.per_layer_projection_norm", size),
    )


def gemma4(model: Model) -> Blueprint:
    """gemma4.py, its language model."""
    text, hidden = model.text, model.hidden
    shared_from = model.layers - model.count_or("num_kv_shared_layers", 0)
    wide = text.flag("use_double_wide_mlp")
    size = text.count("hidden_size_per_layer_input", smallest=0)
    inner = text.count("intermediate_size")
    layers = []
    for index, cache in enumerate(gemma4_attention(text)):
        shares = index >= shared_from > 0
        layer = _attention(model, cache, shares=shares)
        layer += gated_mlp(hidden, 2 * inner if wide and shares else inner)
        layer += norms(_FOUR_NORMS, hidden)
        if text.has("num_experts"):
            layer += _gemma4_experts(model)
        if size:
            layer += _per_layer_inputs(model, size)
        layers.append(layer)
    return decoder(
        model,
        layers,
        tied=model.tied(default=True),
        places=EVERYWHERE,
        extra=_per_layer_tables(model, size) if size else (),
    )


def _gemma4_experts(model: Model) -> Parts:
    text, hidden = model.text, model.hidden
    count = text.count("num_experts")
    inner = text.count_of("moe_intermediate_size", "expert_intermediate_size")
    return (
        Tensor(term="router", name="router.scale", shape=(hidden,)),
        Tensor(term="router", name="router.per_expert_scale", shape=(count,)),
        whole("router", "router.proj", hidden, count, quantized=False),
        *experts(model, count, inner, fast_routing=False, name="experts"),
        *norms(
            (
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
            ),
            hidden,
        ),
    )


def _gemma3n(model: Model) -> Blueprint:
    """gemma3n.py: several streams of the residual (AltUp), and a low-rank side path (Laurel)."""
    text, hidden = model.text, model.hidden
    streams, rank = text.layers("altup_num_inputs"), text.count("laurel_rank")
    size = text.count("hidden_size_per_layer_input")
    inners = _inner_sizes(model)
    shared_from = model.layers - text.count("num_kv_shared_layers", smallest=0)
    own = next(cache for layer in model.stack.layers for cache in layer if isinstance(cache, AttentionLayer))
    altup: Parts = (
        Tensor(term="altup", name="altup.correct_output_scale", shape=(hidden,), dtype=FLOAT32),
        whole("altup", "altup.correction_coefs", streams, streams),
        whole("altup", "altup.prediction_coefs", streams, streams**2),
        whole("altup", "altup.modality_router", hidden, streams),
        *norm("altup.router_norm", hidden),
    )
    laurel: Parts = (
        column("laurel", "laurel.linear_left", hidden, rank),
        row("laurel", "laurel.linear_right", rank, hidden),
        *norm("laurel.post_laurel_norm", hidden),
    )
    layers = [
        _attention(model, own, shares=index >= shared_from)
        + gated_mlp(hidden, inner)
        + norms(_FOUR_NORMS, hidden)
        + altup
        + laurel
        + _per_layer_inputs(model, size)
        for index, inner in enumerate(inners)
    ]
    projections = tuple(
        column("altup", f"model.{name}.{stream}", hidden, hidden)
        for name in ("altup_projections", "altup_unembed_projections")
        for stream in range(streams - 1)
    )
    blueprint = decoder(model, layers, tied=True, places=EVERYWHERE, extra=_per_layer_tables(model, size))
    return Blueprint(layers=blueprint.layers, around=(*blueprint.around, (Stage.ALL, projections)), mtp=None)


def _inner_sizes(model: Model) -> list[int]:
    text = model.text
    if not isinstance(text.values.get("intermediate_size"), list):
        return [text.count("intermediate_size")] * model.layers
    return text.counts("intermediate_size", model.layers) or []


BUILDS: Mapping[str, Build] = {
    "Gemma3nForCausalLM": _gemma3n,
    "Gemma4ForCausalLM": gemma4,
}
