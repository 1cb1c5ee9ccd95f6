"""Blueprints of older decoders, and of those that name their parts in words of their own.

Read in vllm/model_executor/models/ of 0.33.0; where vLLM builds a model with transformers' own modeling, in
transformers 5.19.
It is long because it is a list: a function for each of vLLM's model files, read beside that file and without the others.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.layer_stack import ModelConfig
from kvheadroom.capacity.layers import AttentionLayer
from kvheadroom.capacity.weights.builders import (
    EVERYWHERE,
    Build,
    Model,
    attention_parts,
    decoder,
    relabelled,
)
from kvheadroom.capacity.weights.parts import (
    Blueprint,
    CacheScales,
    Linear,
    Parts,
    Stage,
    Tensor,
    column,
    gated_mlp,
    norm,
    norms,
    plain_mlp,
    qkv,
    row,
    whole,
)


def _table(name: str, rows: int, width: int) -> Tensor:
    """A table of positions, which every rank holds whole."""
    return Tensor(term="embedding", name=name, shape=(rows, width))


def _gpt2(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    inner = text.count("n_inner", 4 * hidden)
    layer = (
        attention_parts(
            model,
            model.attention(0),
            bias=True,
            out_bias=True,
            name="attn",
            qkv_name="c_attn",
            out="c_proj",
        )
        + plain_mlp(hidden, inner, names=("mlp.c_fc", "mlp.c_proj"), bias=True)
        + norms(("ln_1", "ln_2"), hidden, bias=True)
    )
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=True),
        final_norm=norm("transformer.ln_f", hidden, bias=True),
        places=EVERYWHERE,
        embedding="transformer.wte",
        extra=(
            _table("transformer.wpe.weight", text.count_of("n_positions", "max_position_embeddings"), hidden),
        ),
    )


def _gpt_bigcode(model: Model) -> Blueprint:
    """Transformers' GPTBigCodeBlock, which has no plan to divide its MLP, nor attention of as many K/V as Q heads."""
    text, hidden = model.text, model.hidden
    inner = text.count("n_inner", 4 * hidden)
    attention = (
        attention_parts(
            model,
            model.attention(0),
            bias=True,
            out_bias=True,
            name="attn",
            qkv_name="c_attn",
            out="c_proj",
        )
        if text.flag("multi_query", default=True)
        else (
            whole("attention", "attn.c_attn", hidden, 3 * hidden, bias=True),
            whole("attention", "attn.c_proj", hidden, hidden, bias=True),
            CacheScales(name="attn"),
        )
    )
    layer = (
        *attention,
        whole("mlp", "mlp.c_fc", hidden, inner, bias=True),
        whole("mlp", "mlp.c_proj", inner, hidden, bias=True),
        *norms(("ln_1", "ln_2"), hidden, bias=True),
    )
    blueprint = decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=True),
        final_norm=norm("transformer.ln_f", hidden, bias=True),
        embedding="transformer.wte",
    )
    positions = _table(
        "transformer.wpe.weight", text.count_of("n_positions", "max_position_embeddings"), hidden
    )
    return Blueprint(
        layers=blueprint.layers, around=(*blueprint.around, (blueprint.around[0][0], (positions,)))
    )


def _gptj(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    layer = (
        attention_parts(model, model.attention(0), name="attn", out="out_proj")
        + plain_mlp(hidden, text.count("n_inner", 4 * hidden), names=("mlp.fc_in", "mlp.fc_out"), bias=True)
        + norm("ln_1", hidden, bias=True)
    )
    return decoder(
        model,
        [layer] * model.layers,
        tied=False,
        final_norm=norm("transformer.ln_f", hidden, bias=True),
        places=EVERYWHERE,
        embedding="transformer.wte",
        head_bias=True,
    )


def _gpt_neox(model: Model) -> Blueprint:
    """Transformers' GPTNeoXLayer; its one matrix for Q, K and V is divided as any other."""
    text, hidden = model.text, model.hidden
    bias = text.flag("attention_bias", default=True)
    layer = (
        column("attention", "attention.query_key_value", hidden, 3 * hidden, bias=bias),
        row("attention", "attention.dense", hidden, hidden, bias=bias),
        CacheScales(name="attention"),
        *plain_mlp(
            hidden,
            text.count("intermediate_size"),
            names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            bias=True,
        ),
        *norms(("input_layernorm", "post_attention_layernorm"), hidden, bias=True),
    )
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=False),
        final_norm=norm("gpt_neox.final_layer_norm", hidden, bias=True),
        embedding="gpt_neox.embed_in",
    )


def _phi(model: Model) -> Blueprint:
    """Transformers' PhiDecoderLayer."""
    text, hidden = model.text, model.hidden
    cache = model.attention(0)
    layer = (
        attention_parts(model, cache, bias=True, out_bias=True, out="dense")
        + plain_mlp(hidden, text.count("intermediate_size"), names=("mlp.fc1", "mlp.fc2"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
    )
    if text.flag("qk_layernorm"):
        layer += norms(("self_attn.q_layernorm", "self_attn.k_layernorm"), cache.head_size, bias=True)
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=False),
        final_norm=norm("model.final_layernorm", hidden, bias=True),
    )


def _opt(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    bias, affine = (
        text.flag("enable_bias", default=True),
        text.flag("layer_norm_elementwise_affine", default=True),
    )
    width = text.count("word_embed_proj_dim")
    layer = attention_parts(model, model.attention(0), bias=bias, out_bias=bias, out="out_proj") + plain_mlp(
        hidden, text.count("ffn_dim"), names=("fc1", "fc2"), bias=bias
    )
    if affine:
        layer += norms(("self_attn_layer_norm", "final_layer_norm"), hidden, bias=True)
    has_norm = text.flag("do_layer_norm_before", default=True) and not text.flag("_remove_final_layer_norm")
    extra: Parts = (
        # OPT's positions are counted from 2 on.
        _table("model.decoder.embed_positions.weight", text.count("max_position_embeddings") + 2, hidden),
    )
    if width != hidden:
        extra += (
            whole("embedding", "model.decoder.project_in", width, hidden),
            whole("embedding", "model.decoder.project_out", hidden, width),
        )
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=True),
        final_norm=norm("model.decoder.final_layer_norm", hidden, bias=True) if has_norm and affine else (),
        places=EVERYWHERE,
        embedding="model.decoder.embed_tokens",
        width=width,
        extra=extra,
    )


def _falcon(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    bias, new = text.flag("bias"), text.flag("new_decoder_architecture")
    layer = attention_parts(
        model,
        model.attention(0),
        bias=bias,
        out_bias=bias,
        name="self_attention",
        qkv_name="query_key_value",
        out="dense",
    ) + plain_mlp(
        hidden,
        text.count("ffn_hidden_size", 4 * hidden),
        names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        bias=bias,
    )
    parallel_norms = text.count("num_ln_in_parallel_attn", 2 if new else 1)
    if parallel_norms == 2 and new:
        layer += norms(("ln_attn", "ln_mlp"), hidden, bias=True)
    else:
        layer += norm("input_layernorm", hidden, bias=True)
        if not text.flag("parallel_attn", default=True):
            layer += norm("post_attention_layernorm", hidden, bias=True)
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=True),
        final_norm=norm("transformer.ln_f", hidden, bias=True),
        places=EVERYWHERE,
        embedding="transformer.word_embeddings",
    )


def _chatglm(model: Model) -> Blueprint:
    text, hidden = model.text, model.hidden
    bias = text.flag("add_bias_linear")
    layer_norm = not text.flag("rmsnorm", default=True)
    inner = text.count("ffn_hidden_size")
    layer = (
        *attention_parts(
            model,
            model.attention(0),
            bias=bias or text.flag("add_qkv_bias"),
            out_bias=bias,
            name="self_attention",
            qkv_name="query_key_value",
            out="dense",
        ),
        column(
            "mlp", "mlp.dense_h_to_4h", hidden, {"dense_h_to_4h": inner, "dense_h_to_4h_up": inner}, bias=bias
        ),
        row("mlp", "mlp.dense_4h_to_h", inner, hidden, bias=bias),
        *norms(("input_layernorm", "post_attention_layernorm"), hidden, bias=layer_norm),
    )
    last = text.flag("post_layer_norm", default=True)
    return decoder(
        model,
        [layer] * model.layers,
        tied=model.tied(default=False),
        final_norm=norm("transformer.encoder.final_layernorm", hidden, bias=layer_norm) if last else (),
        places=EVERYWHERE,
        embedding="transformer.embedding.word_embeddings",
        head="transformer.output_layer",
        rows=text.count("padded_vocab_size"),
    )


def _minicpm3(model: Model) -> Blueprint:
    """minicpm3.py: latent attention whose latent is not kept."""
    text, hidden, heads = model.text, model.hidden, model.heads
    q_rank, rank = text.count("q_lora_rank"), text.count("kv_lora_rank")
    nope, rope, value = (text.count(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    layer = (
        whole("attention", "self_attn.q_a_proj", hidden, q_rank),
        *norm("self_attn.q_a_layernorm", q_rank),
        column("attention", "self_attn.q_b_proj", q_rank, heads * (nope + rope)),
        whole("attention", "self_attn.kv_a_proj_with_mqa", hidden, rank + rope),
        *norm("self_attn.kv_a_layernorm", rank),
        column("attention", "self_attn.kv_b_proj", rank, heads * (nope + value)),
        row("attention", "self_attn.o_proj", heads * value, hidden),
        *gated_mlp(hidden, text.count("intermediate_size")),
        *norms(("input_layernorm", "post_attention_layernorm"), hidden),
    )
    return decoder(model, [layer] * model.layers, tied=model.tied(default=True), places=EVERYWHERE)


def _decilm(model: Model) -> Blueprint:
    """nemotron_nas.py: each block may go without attention or without MLP, or have one of its own width."""
    text, hidden = model.text, model.hidden
    blocks = text.list_of("block_configs", model.layers) or []
    qkv_bias = text.flag("attention_bias") or text.flag("bias")
    out_bias = qkv_bias
    if "qkv_bias" in text.values:
        qkv_bias = text.flag("qkv_bias")
    layers = []
    for caches, block in zip(model.stack.layers, blocks, strict=True):
        layer: Parts = ()
        if caches and isinstance(caches[0], AttentionLayer):
            layer += attention_parts(model, caches[0], bias=qkv_bias, out_bias=out_bias)
            layer += norm("input_layernorm", hidden)
        mlp = ModelConfig(block, "block_configs.").section("ffn")
        if mlp is None or mlp.flag("replace_with_linear"):
            raise text.bad("block_configs", "has an entry without `ffn`, or with a linear layer in its place")
        if not mlp.flag("no_op"):
            layer += gated_mlp(hidden, _decilm_inner(text, mlp, hidden), bias=text.flag("mlp_bias"))
            layer += norm("post_attention_layernorm", hidden)
        layers.append(layer)
    return decoder(model, layers, tied=model.tied(default=True))


def _decilm_inner(text: ModelConfig, mlp: ModelConfig, hidden: int) -> int:
    """`_ffn_mult_to_intermediate_size`: two thirds of the multiple, rounded up to 256."""
    if mlp.has("intermediate_size"):
        return mlp.count("intermediate_size")
    multiple = mlp.values.get("ffn_mult")
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple <= 1000:
        raise text.bad("block_configs", "has an `ffn` without a usable `ffn_mult`")
    return -(-int(2 * multiple * hidden / 3) // 256) * 256


def _whisper(model: Model) -> Blueprint:
    """whisper.py: an encoder of sound, and a decoder that also attends to what the encoder made."""
    text = model.text
    width, mels = text.count("d_model"), text.count("num_mel_bins")

    def attention(heads: int) -> Parts:
        return (
            # K has no bias in the checkpoint, but vLLM's one matrix for all three has.
            qkv(width, heads, heads, width // heads, bias=True),
            row("attention", "self_attn.out_proj", width, width, bias=True),
        )

    def mlp(key: str) -> Parts:
        return plain_mlp(width, text.count(key), names=("mlp.fc1", "mlp.fc2"), bias=True)

    heads = text.count("decoder_attention_heads")
    decoder_layer: Parts = (
        *attention(heads),
        CacheScales(name="self_attn.attn"),
        column("attention", "encoder_attn.q_proj", width, width, bias=True),
        qkv_without_q(width, heads),
        row("attention", "encoder_attn.out_proj", width, width, bias=True),
        CacheScales(name="encoder_attn.attn"),
        *mlp("decoder_ffn_dim"),
        *norms(("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"), width, bias=True),
    )
    encoder_layer: Parts = (
        *attention(text.count("encoder_attention_heads")),
        *mlp("encoder_ffn_dim"),
        *norms(("self_attn_layer_norm", "final_layer_norm"), width, bias=True),
    )
    around: Parts = (
        Tensor(term="audio", name="model.encoder.conv1.weight", shape=(width, mels, 3)),
        Tensor(term="audio", name="model.encoder.conv1.bias", shape=(width,)),
        Tensor(term="audio", name="model.encoder.conv2.weight", shape=(width, width, 3)),
        Tensor(term="audio", name="model.encoder.conv2.bias", shape=(width,)),
        *norm("model.encoder.layer_norm", width, bias=True),
        *norm("model.decoder.layer_norm", width, bias=True),
        _table("model.encoder.embed_positions.weight", text.count("max_source_positions"), width),
        _table("model.decoder.embed_positions.weight", text.count("max_target_positions"), width),
        # the decoder's embedding, which is the output layer as well, is divided nowhere
        _table("model.decoder.embed_tokens.weight", text.count("vocab_size"), width),
    )
    encoder = tuple(
        relabelled(part, f"model.encoder.layers.{layer}.", "audio")
        for layer in range(text.layers("encoder_layers"))
        for part in encoder_layer
    )
    return Blueprint(layers=(decoder_layer,) * model.layers, around=((Stage.ALL, around + encoder),))


def qkv_without_q(width: int, heads: int) -> Linear:
    """K and V of attention to the encoder's output."""
    both = qkv(width, heads, heads, width // heads, bias=True, name="encoder_attn.kv_proj")
    return replace(both, outs=both.outs[1:])


BUILDS: Mapping[str, Build] = {
    "ChatGLMForConditionalGeneration": _chatglm,
    "ChatGLMModel": _chatglm,
    "DeciLMForCausalLM": _decilm,
    "FalconForCausalLM": _falcon,
    "GPT2LMHeadModel": _gpt2,
    "GPTBigCodeForCausalLM": _gpt_bigcode,
    "GPTJForCausalLM": _gptj,
    "GPTNeoXForCausalLM": _gpt_neox,
    "MiniCPM3ForCausalLM": _minicpm3,
    "OPTForCausalLM": _opt,
    "PhiForCausalLM": _phi,
    "WhisperForConditionalGeneration": _whisper,
}
