"""Blueprints of models of latent attention: DeepSeek-V2 to V3.2 and the models built on their classes.

Sources, vLLM 0.33.0: `model_executor/models/deepseek_v2.py`, `glm4_moe_lite.py`, `longcat_flash.py`, `openpangu.py`,
`AXK1.py`, `deepseek_mtp.py`, and `models/deepseek_v32/attention.py`.
"""

from collections.abc import Mapping

from kvheadroom.capacity.layer_stack import ModelConfig
from kvheadroom.capacity.layers import AttentionLayer, IndexerLayer
from kvheadroom.capacity.model_config import MOST_LAYERS
from kvheadroom.capacity.weights.builders import (
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
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    CacheScales,
    Mtp,
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

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def latent_attention(model: Model, *, name: str = "self_attn", rope: int | None = None) -> Parts:
    """Latent attention; what makes the latents is not divided (`DeepseekV2MLAAttention`)."""
    text, hidden, heads = model.text, model.hidden, model.heads
    rank, value = text.count("kv_lora_rank"), text.count("v_head_dim")
    nope = text.count("qk_nope_head_dim")
    rope = text.count("qk_rope_head_dim", smallest=0) if rope is None else rope
    if "q_lora_rank" not in text.values:
        raise text.bad("q_lora_rank", "is left out; say null if queries have no low rank")
    q_rank = text.count("q_lora_rank") if text.has("q_lora_rank") else None
    query: Parts
    if q_rank is None:
        query = (
            whole("attention", f"{name}.kv_a_proj_with_mqa", hidden, rank + rope),
            column("attention", f"{name}.q_proj", hidden, heads * (nope + rope)),
        )
    else:
        query = (
            whole(
                "attention",
                f"{name}.fused_qkv_a_proj",
                hidden,
                {"q_a_proj": q_rank, "kv_a_proj_with_mqa": rank + rope},
            ),
            *norm(f"{name}.q_a_layernorm", q_rank),
            column("attention", f"{name}.q_b_proj", q_rank, heads * (nope + rope)),
        )
    return (
        *query,
        *norm(f"{name}.kv_a_layernorm", rank),
        column("attention", f"{name}.kv_b_proj", rank, heads * (nope + value)),
        row("attention", f"{name}.o_proj", heads * value, hidden),
        CacheScales(name=name, latent=True),
    )


def indexer(model: Model, head_dim: int) -> Parts:
    """The indexer of sparse attention, whole on every rank (`Indexer`, models/deepseek_v32/attention.py)."""
    text = model.text
    heads = text.count("index_n_heads")
    return (
        whole("indexer", "self_attn.indexer.wq_b", text.count("q_lora_rank"), heads * head_dim),
        whole(
            "indexer",
            "self_attn.indexer.wk_weights_proj",
            model.hidden,
            {"wk": head_dim, "weights_proj": heads},
            quantized=False,
        ),
        *norm("self_attn.indexer.k_norm", head_dim, bias=True, dtype=FLOAT32, term="indexer"),
    )


def _mlp(model: Model, *, sparse: bool) -> Parts:
    text, hidden = model.text, model.hidden
    if not sparse:
        # models/deepseek_v32/ holds dense layers whole as well where experts are spread over data-parallel ranks.
        return gated_mlp(hidden, text.count("intermediate_size"), shared_expert="index_topk" in text.values)
    corrected = text.word("topk_method") == "noaux_tc"
    renormalize = text.flag("norm_topk_prob", default=text.word("model_type") != "deepseek_v2")
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    fast = has_fast_routing(
        text.word("scoring_func", "softmax"), renormalize=renormalize, corrected=corrected
    )
    return (
        router(hidden, count, correction="mlp.gate.e_score_correction_bias" if corrected else None)
        + shared_mlp(hidden, inner * shared_experts(text))
        + experts(model, count, inner, fast_routing=fast)
    )


def _is_sparse(text: ModelConfig, layer: int) -> bool:
    if text.has("mlp_layer_types"):
        raise text.bad("mlp_layer_types", "is not modelled, `first_k_dense_replace` is")
    if "n_routed_experts" in text.values and not text.has("n_routed_experts"):
        return False
    first = text.count("first_k_dense_replace", smallest=0)
    return layer >= first and layer % text.count("moe_layer_freq", 1) == 0


def attention_of(model: Model, layer: int | None) -> Parts:
    """Attention of one layer; None for a layer of multi-token prediction, which has an indexer wherever any has."""
    stack = model.stack
    caches = stack.layers[layer] if layer is not None else (stack.mtp or stack.layers)[0]
    plain = [cache for cache in caches if isinstance(cache, AttentionLayer)]
    if plain:
        return attention_parts(model, plain[0])
    parts = latent_attention(model)
    for cache in caches:
        if isinstance(cache, IndexerLayer):
            parts += indexer(model, cache.head_dim)
    return parts


def deepseek(model: Model) -> Blueprint:
    """deepseek_v2.py."""
    text, hidden = model.text, model.hidden
    layers = [
        attention_of(model, index) + _mlp(model, sparse=_is_sparse(text, index)) + norms(_TWO_NORMS, hidden)
        for index in range(model.layers)
    ]
    mtp = None
    if model.stack.mtp:
        block = attention_of(model, None) + _mlp(model, sparse=True) + norms(_TWO_NORMS, hidden)
        mtp = deepseek_mtp(model, block, len(model.stack.mtp))
    return decoder(model, layers, tied=False, mtp=mtp)


def deepseek_mtp(model: Model, block: Parts, modules: int) -> Mtp:
    """deepseek_mtp.py: each module is a layer behind a joint projection, with an output layer of the target's."""
    hidden, rows = model.hidden, model.text.count("vocab_size")
    own = (
        *norms(("enorm", "hnorm", "shared_head.norm"), hidden),
        whole("mtp", "eh_proj", 2 * hidden, hidden, quantized=False),
        *block,
    )
    head = Vocabulary(term="lm_head", name="shared_head.head", rows=rows, width=hidden, quantized=True)
    embedding = Vocabulary(term="embedding", name="embed_tokens", rows=rows, width=hidden)
    return Mtp(parts=own * modules, embedding=(embedding,), heads=(head,) * modules)


def _glm4_moe_lite(model: Model) -> Blueprint:
    """glm4_moe_lite.py: DeepSeek's attention, GLM-4.5's experts."""
    text, hidden = model.text, model.hidden
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    sparse = (
        router(hidden, count, dtype=FLOAT32, correction="mlp.gate.e_score_correction_bias")
        + shared_mlp(hidden, inner * shared_experts(text), divided=True)
        + experts(model, count, inner, fast_routing=text.flag("norm_topk_prob", default=True))
    )
    dense = gated_mlp(hidden, text.count("intermediate_size"))
    layers = [
        attention_of(model, index)
        + (sparse if _is_sparse(text, index) else dense)
        + norms(_TWO_NORMS, hidden)
        for index in range(model.layers)
    ]
    mtp = None
    if model.stack.mtp:
        block = attention_of(model, None) + sparse + norms(_TWO_NORMS, hidden)
        mtp = deepseek_mtp(model, block, len(model.stack.mtp))
    return decoder(model, layers, tied=False, mtp=mtp)


def _axk1(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    layers = [
        latent_attention(model)
        + _mlp(model, sparse=_is_sparse(text, index))
        + norms((*_TWO_NORMS, "post_mlp_layernorm"), hidden)
        for index in range(model.layers)
    ]
    return decoder(model, layers, tied=False)


def _pangu(model: Model) -> Blueprint:
    """openpangu.py."""
    text, hidden = model.text, model.hidden
    count, inner = text.count("n_routed_experts"), text.count("moe_intermediate_size")
    corrected = text.flag("router_enable_expert_bias")
    sparse = (
        router(hidden, count, correction="mlp.gate.e_score_correction_bias" if corrected else None)
        + shared_mlp(hidden, inner * shared_experts(text))
        + experts(
            model,
            count,
            inner,
            fast_routing=has_fast_routing(
                "sigmoid", renormalize=text.flag("norm_topk_prob"), corrected=corrected
            ),
        )
    )
    dense = gated_mlp(hidden, text.count("intermediate_size"))
    names: tuple[str, ...] = _TWO_NORMS
    if text.flag("sandwich_norm"):
        names += ("pre_mlp_layernorm", "post_mlp_layernorm")
    first = text.count("first_k_dense_replace", smallest=0)
    layers = [
        latent_attention(model) + (sparse if index >= first else dense) + norms(names, hidden)
        for index in range(model.layers)
    ]
    return decoder(model, layers, tied=model.tied(default=False))


def _longcat(model: Model) -> Blueprint:
    """longcat_flash.py: each layer is two of attention and MLP around one of experts, some of which do nothing."""
    text, hidden = model.text, model.hidden
    count = text.count("n_routed_experts")
    inner = text.count_of("expert_ffn_hidden_size", "moe_intermediate_size")
    dense = text.count_of("ffn_hidden_size", "intermediate_size")
    routed = count + text.count("zero_expert_num", smallest=0)
    halves: Parts = ()
    for half in range(2):
        halves += latent_attention(model, name=f"self_attn.{half}")
        halves += gated_mlp(hidden, dense, name=f"mlps.{half}")
        halves += norms((f"input_layernorm.{half}", f"post_attention_layernorm.{half}"), hidden)
    layer = (
        halves
        + router(
            hidden,
            routed,
            name="mlp.router.classifier",
            dtype=FLOAT32,
            correction="mlp.router.e_score_correction_bias",
        )
        + experts(model, count, inner, fast_routing=False)
    )
    extra = _ngrams(model) if text.has("ngram_vocab_size_ratio") else ()
    blueprint = decoder(model, [layer] * model.layers, tied=False)
    return Blueprint(layers=blueprint.layers, around=(*blueprint.around, (Stage.FIRST, extra)))


def _ngrams(model: Model) -> Parts:
    """longcat_flash_ngram.py: one long table for all lengths of n-grams, and a projection for each part of it."""
    text, hidden = model.text, model.hidden
    rows = text.count("ngram_vocab_size_ratio") * text.count("vocab_size")
    tables = text.count("emb_split_num") * (text.count("emb_neighbor_num") - 1)
    if not 0 < tables <= min(hidden, MOST_LAYERS):
        raise text.bad("emb_neighbor_num", "leaves no n-grams, or more than the hidden size can be split for")
    width = hidden // tables
    return (
        Vocabulary(
            term="embedding",
            name="model.ngram_embeddings.oe_embedder",
            rows=sum(rows + 2 * table + 1 for table in range(tables)),
            width=width,
        ),
        Tensor(
            term="embedding",
            name="model.ngram_embeddings.oe_projection",
            shape=(tables, width, hidden),
        ),
    )


BUILDS: Mapping[str, Build] = {
    "AXK1ForCausalLM": _axk1,
    "DeepseekV2ForCausalLM": deepseek,
    "DeepseekV32ForCausalLM": deepseek,
    "DeepseekV3ForCausalLM": deepseek,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "GlmMoeDsaForCausalLM": deepseek,
    "LongcatFlashForCausalLM": _longcat,
    "LongcatFlashNgramForCausalLM": _longcat,
    "PanguUltraMoEForCausalLM": _pangu,
}
