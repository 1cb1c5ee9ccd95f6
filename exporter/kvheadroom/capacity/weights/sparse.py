"""Blueprints of DeepSeek-V4, MiniMax-M3 and Qwen4-Exp.

Sources, vLLM 0.33.0: `models/deepseek_v4/` (attention.py, compressor.py, nvidia/model.py), `models/minimax_m3/nvidia/`
and `models/qwen4_exp/nvidia/`.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.layers import (
    CompressedIndexerLayer,
    CompressedLatentLayer,
    IndexKeyLayer,
)
from kvheadroom.capacity.weights.builders import (
    Build,
    Model,
    Places,
    decoder,
    experts,
    router,
    shared_experts,
    shared_mlp,
)
from kvheadroom.capacity.weights.hybrid import qwen_mixer
from kvheadroom.capacity.weights.moe import qwen_moe_mlp
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    CacheScales,
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
    row,
    whole,
)

_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def _float32(term: str, name: str, *shape: int) -> Tensor:
    return Tensor(term=term, name=name, shape=shape, dtype=FLOAT32)


def _compressor(model: Model, name: str, head_dim: int, ratio: int, term: str) -> Parts:
    """What makes one vector of `ratio` tokens; ratio 4 does so over windows that overlap (compressor.py)."""
    width = head_dim * (2 if ratio == 4 else 1)
    return (
        _float32(term, f"{name}.ape", ratio, width),
        whole(term, f"{name}.fused_wkv_wgate", model.hidden, {"wkv": width, "wgate": width}, quantized=False),
        *norm(f"{name}.norm", head_dim, term=term),
    )


def _v4_layer(model: Model, index: int | None) -> Parts:
    """One layer; None for a layer of multi-token prediction, which compresses nothing."""
    text, hidden, heads = model.text, model.hidden, model.heads
    head_dim, rank = text.count("head_dim"), text.count("q_lora_rank")
    groups, out_rank = text.count("o_groups"), text.count("o_lora_rank")
    parts: Parts = (
        _float32("attention", "attn.attn_sink", _padded_heads(heads)),
        whole("attention", "attn.fused_wqa_wkv", hidden, {"wq_a": rank, "wkv": head_dim}),
        *norm("attn.q_norm", rank),
        column("attention", "attn.wq_b", rank, heads * head_dim),
        *norm("attn.kv_norm", head_dim),
        column("attention", "attn.wo_a", heads * head_dim // groups, groups * out_rank),
        row("attention", "attn.wo_b", groups * out_rank, hidden),
    )
    for cache in () if index is None else model.stack.layers[index]:
        if isinstance(cache, CompressedIndexerLayer):
            index_heads = text.count("index_n_heads")
            parts += (
                whole("indexer", "attn.indexer.wq_b", rank, index_heads * cache.head_dim),
                whole("indexer", "attn.indexer.weights_proj", hidden, index_heads, quantized=False),
            )
            parts += _compressor(model, "attn.indexer.compressor", cache.head_dim, cache.ratio, "indexer")
        elif isinstance(cache, CompressedLatentLayer):
            parts += _compressor(model, "attn.compressor", cache.head_dim, cache.ratio, "attention")
    return parts + _v4_mlp(model, index) + norms(("attn_norm", "ffn_norm"), hidden) + _v4_mixing(model)


# The kernels of sparse attention take 64 or 128 heads (attention.py, `padded_heads`).
_HEADS_OF_KERNELS = (64, 128)


def _padded_heads(heads: int) -> int:
    return next((size for size in _HEADS_OF_KERNELS if heads <= size), heads)


def _v4_mlp(model: Model, index: int | None) -> Parts:
    text, hidden = model.text, model.hidden
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    hashed = index is not None and index < text.count("num_hash_layers", smallest=0)
    parts = router(hidden, count, name="ffn.gate")
    if hashed:
        chosen = text.count("num_experts_per_tok")
        parts += (
            Tensor(
                term="router",
                name="ffn.gate.tid2eid",
                shape=(text.count("vocab_size"), chosen),
                dtype="int32",
            ),
        )
    elif text.word("topk_method", "noaux_tc") == "noaux_tc":
        parts += (_float32("router", "ffn.gate.e_score_correction_bias", count),)
    return (
        parts
        + shared_mlp(hidden, inner * shared_experts(text), "ffn.shared_experts")
        + experts(model, count, inner, fast_routing=False, name="ffn.experts")
    )


def _v4_mixing(model: Model) -> Parts:
    streams = model.text.count("hc_mult")
    mixes = (2 + streams) * streams
    parts: Parts = ()
    for each in ("attn", "ffn"):
        parts += (
            _float32("hyper_connections", f"hc_{each}_fn", mixes, streams * model.hidden),
            _float32("hyper_connections", f"hc_{each}_base", mixes),
            _float32("hyper_connections", f"hc_{each}_scale", 3),
        )
    return parts


def _v4_head_mixing(model: Model) -> Parts:
    streams = model.text.count("hc_mult")
    return (
        _float32("hyper_connections", "hc_head_fn", streams, streams * model.hidden),
        _float32("hyper_connections", "hc_head_base", streams),
        _float32("hyper_connections", "hc_head_scale", 1),
    )


def _deepseek_v4(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    layers = [_v4_layer(model, index) for index in range(model.layers)]
    mtp = None
    if modules := len(model.stack.mtp or ()):
        rows = text.count("vocab_size")
        own: Parts = (
            *_v4_head_mixing(model),
            *norms(("enorm", "hnorm", "shared_head.norm"), hidden),
            whole("mtp", "e_proj", hidden, hidden),
            whole("mtp", "h_proj", hidden, hidden),
            *_v4_layer(model, None),
        )
        head = Vocabulary(term="lm_head", name="shared_head.head", rows=rows, width=hidden, quantized=True)
        embedding = Vocabulary(term="embedding", name="embed_tokens", rows=rows, width=hidden)
        mtp = Mtp(parts=own * modules, embedding=(embedding,), heads=(head,) * modules)
    blueprint = decoder(model, layers, tied=False, mtp=mtp)
    return replace(blueprint, around=(*blueprint.around, (Stage.ALL, _v4_head_mixing(model))))


def minimax_m3(model: Model) -> Blueprint:
    """MiniMax-M3's language model; some layers have an indexer, whose Q and K come with those of attention."""
    text, hidden = model.text, model.hidden
    sparse_config = text.section("sparse_attention_config")
    frequencies = text.counts("moe_layer_freq", model.layers, smallest=0)
    if sparse_config is None or frequencies is None:
        raise text.bad("moe_layer_freq", "or `sparse_attention_config` is left out")
    if text.flag("attention_output_gate"):
        raise text.bad("attention_output_gate", "is true, which is not modelled")
    index_heads = sparse_config.count("sparse_num_index_heads")
    count, inner = text.count("num_local_experts"), text.count("intermediate_size")
    layers = []
    for index, caches in enumerate(model.stack.layers):
        cache = model.attention(index)
        outs: tuple[Out, ...] = (
            Out("q_proj", model.heads * cache.head_size, cache.head_size),
            Out("k_proj", cache.num_kv_heads * cache.head_size, cache.head_size),
            Out("v_proj", cache.num_kv_heads * cache.head_size, cache.head_size),
        )
        names: tuple[str, ...] = _QK_NORMS
        keys = [each for each in caches if isinstance(each, IndexKeyLayer)]
        if keys:
            size = keys[0].head_dim
            outs += (Out("index_q_proj", index_heads * size, size), Out("index_k_proj", size, whole=True))
            names += ("self_attn.index_q_norm", "self_attn.index_k_norm")
        layer: Parts = (
            Linear(term="attention", name="self_attn.qkv_proj", inputs=hidden, outs=outs),
            row("attention", "self_attn.o_proj", model.heads * cache.head_size, hidden),
            # the classes of sparse attention register no scales
            CacheScales(name="self_attn.attn", quantized=not keys),
            *norms(names, cache.head_size),
            *norms(("input_layernorm", "post_attention_layernorm"), hidden),
        )
        if frequencies[index]:
            shared = text.count("shared_intermediate_size") * shared_experts(text)
            layer += router(
                hidden,
                count,
                name="block_sparse_moe.gate",
                dtype=FLOAT32,
                correction="block_sparse_moe.e_score_correction_bias"
                if text.flag("use_routing_bias")
                else None,
            )
            layer += shared_mlp(hidden, shared, "block_sparse_moe.shared_experts", divided=True)
            layer += experts(model, count, inner, fast_routing=False, name="block_sparse_moe.experts")
        else:
            layer += gated_mlp(hidden, text.count("dense_intermediate_size"))
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=False))


def qwen4_exp(model: Model) -> Blueprint:
    """Qwen4-Exp's language model without n-gram embeddings: delta nets, an indexer, mixed residual streams."""
    text, hidden = model.text, model.hidden
    if text.counts("ple_layer_ids"):
        raise text.bad("ple_layer_ids", "gives layers n-gram embeddings, whose tables are not modelled")
    streams, rank = text.count("hc_count"), text.count("hc_lowrank")
    wide = streams * hidden
    mixing: Parts = ()
    for each in ("attn_hyper_connection", "mlp_hyper_connection"):
        mixing += (
            *norm(f"{each}.hc_norm", wide, term="hyper_connections"),
            Linear(
                term="hyper_connections",
                name=f"{each}.input_mix_weight_down_block_inject",
                inputs=wide,
                outs=(
                    Out("input_mix_weight_down", rank, whole=True),
                    Out("block_inject", streams, whole=True),
                ),
                row_multiple=16,
                quantized=False,
            ),
            whole("hyper_connections", f"{each}.input_mix_weight_up", rank, wide),
        )
    mlp = qwen_moe_mlp(
        model,
        shared=text.count("shared_expert_intermediate_size", smallest=0),
        count=text.count("num_experts"),
        renormalize=text.flag("norm_topk_prob", default=True),
    )
    layers = [_qwen4_mixer(model, index) + mlp + mixing for index in range(model.layers)]
    last: Parts = (
        *norm("model.hyper_connection_mixer.hc_norm", wide, term="hyper_connections"),
        whole("hyper_connections", "model.hyper_connection_mixer.input_mix_weight_down", wide, rank),
        whole("hyper_connections", "model.hyper_connection_mixer.input_mix_weight_up", rank, wide),
    )
    return decoder(model, layers, tied=False, final_norm=last, places=_QWEN4)


_QWEN4 = Places(Stage.ALL, Stage.LAST, Stage.ALL)


def _qwen4_mixer(model: Model, index: int) -> Parts:
    """Full attention has the indexer's Q and K in the same matrix, whole on every rank."""
    text = model.text
    parts = qwen_mixer(model, index)
    if not text.has("indexer_n_heads") or parts[0].name != "self_attn.qkv_proj":
        return parts
    attention, size = parts[0], text.count("indexer_head_dim")
    if not isinstance(attention, Linear):
        return parts
    indexed = (
        Out("indexer_q", text.count("indexer_n_heads") * size, whole=True),
        Out("indexer_k", text.count("indexer_kv_heads") * size, whole=True),
    )
    return (
        replace(attention, outs=attention.outs + indexed),
        # the class of sparse attention registers no scales
        *(part for part in parts[1:] if not isinstance(part, CacheScales)),
        *norms(("self_attn.indexer.q_layernorm", "self_attn.indexer.k_layernorm"), size),
    )


BUILDS: Mapping[str, Build] = {
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "Qwen4ExpForCausalLM": qwen4_exp,
}
