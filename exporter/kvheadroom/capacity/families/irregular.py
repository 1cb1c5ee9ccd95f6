"""Models of plain attention in every layer whose config.json says so in words of its own.

Rules read in vllm/model_executor/models/ of 0.33.0; the file of each is named at its reader.
"""

from collections.abc import Mapping

from kvheadroom.capacity.families.attention import windowed_layers
from kvheadroom.capacity.layer_stack import BadFieldError, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import AttentionLayer, CrossAttentionLayer


def _uniform(
    config: ModelConfig,
    *,
    layers: int,
    num_kv_heads: int,
    head_size: int,
    whole_kv_heads: int | None = None,
    whole_head_size: int | None = None,
    in_model_dtype: bool = False,
) -> LayerStack:
    """Equal layers. None of these models has windows; a config with one would be windowed in all of them."""
    if config.has("sliding_window"):
        raise config.bad("sliding_window", "is not modelled for this architecture")
    if head_size < 1:
        raise _more_heads_than_elements()
    return LayerStack(
        layers=windowed_layers(
            (None,) * layers,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            in_model_dtype=in_model_dtype,
        ),
        num_kv_heads=whole_kv_heads or num_kv_heads,
        head_size=whole_head_size or head_size,
    )


def _more_heads_than_elements() -> BadFieldError:
    return BadFieldError("config.json: there are more attention heads than elements of the hidden size")


def _layers(config: ModelConfig, own_name: str) -> int:
    """The usual name wins where both are there (`attribute_map` of transformers)."""
    return config.layers("num_hidden_layers" if config.has("num_hidden_layers") else own_name)


def _falcon(config: ModelConfig) -> LayerStack:
    """falcon.py: one K/V head in the old architecture with multi-query attention.

    Its layers are not told the type of the cache, and keep the model's own.
    """
    if config.word("model_type", "falcon") != "falcon":
        raise config.bad("model_type", "is not falcon; the older config class is not modelled")
    heads = config.count("num_attention_heads")
    if config.flag("new_decoder_architecture"):
        num_kv_heads = config.count("num_kv_heads", heads)
    elif config.flag("multi_query", default=True):
        num_kv_heads = 1
    else:
        num_kv_heads = heads
    return _uniform(
        config,
        layers=config.layers(),
        num_kv_heads=num_kv_heads,
        head_size=config.count("hidden_size") // heads,
        in_model_dtype=True,
    )


def _chatglm(config: ModelConfig) -> LayerStack:
    """chatglm.py: K/V heads are called groups."""
    heads = config.count("num_attention_heads")
    grouped = config.flag("multi_query_attention")
    for key in ("original_rope", "seq_length"):
        if key not in config.values:
            raise config.bad(key, "is left out, and vLLM reads it")
    return _uniform(
        config,
        layers=_layers(config, "num_layers"),
        num_kv_heads=config.count("multi_query_group_num") if grouped else heads,
        # vLLM looks at the groups alone when it judges the model as a whole.
        whole_kv_heads=config.count("multi_query_group_num", heads),
        head_size=config.count("hidden_size") // heads,
    )


def _dbrx(config: ModelConfig) -> LayerStack:
    """dbrx.py: attention has a section of its own."""
    attention = config.section("attn_config")
    if attention is None:
        raise config.bad("attn_config", "is left out, a section is needed")
    if config.flag("tie_word_embeddings"):
        raise config.bad("tie_word_embeddings", "is true, which transformers does not take for this model")
    return _uniform(
        config,
        layers=_layers(config, "n_layers"),
        num_kv_heads=attention.count("kv_n_heads"),
        head_size=config.count_of("d_model", "hidden_size")
        // config.count_of("n_heads", "num_attention_heads"),
    )


def _gpt_bigcode(config: ModelConfig) -> LayerStack:
    """models/transformers/base.py, with transformers' GPTBigCodeConfig."""
    heads = config.count_of("n_head", "num_attention_heads")
    return _uniform(
        config,
        layers=_layers(config, "n_layer"),
        num_kv_heads=1 if config.flag("multi_query", default=True) else heads,
        head_size=config.count_of("n_embd", "hidden_size") // heads,
    )


def _minicpm3(config: ModelConfig) -> LayerStack:
    """minicpm3.py: latent attention that is unfolded into K and V of every head before it is cached."""
    rope = config.count("qk_rope_head_dim")
    return _uniform(
        config,
        layers=config.layers(),
        num_kv_heads=config.count("num_attention_heads"),
        head_size=config.count("qk_nope_head_dim") + rope,
        whole_head_size=rope,
    )


def _step3(config: ModelConfig) -> LayerStack:
    """step3_text.py: one K/V head, written into the class."""
    if config.count_of("num_key_value_heads", "num_attention_groups", default=1) != 1:
        raise config.bad("num_attention_groups", "is not 1, which vLLM does not take")
    return _uniform(config, layers=config.layers(), num_kv_heads=1, head_size=config.count("head_dim"))


def _decilm(config: ModelConfig) -> LayerStack:
    """nemotron_nas.py: each block has K/V heads of its own or no attention at all."""
    heads = config.count("num_attention_heads")
    head_size = config.count("head_dim", config.count("hidden_size") // heads)
    if head_size < 1:
        raise _more_heads_than_elements()
    blocks = config.list_of("block_configs", config.layers())
    if blocks is None or config.has("sliding_window"):
        raise config.bad(
            "block_configs", "is left out, or stands beside a `sliding_window`, which is not modelled"
        )
    kv_heads = [_block_kv_heads(config, block, heads) for block in blocks]
    kept: dict[int, tuple[AttentionLayer, ...]] = {
        count: (AttentionLayer(num_kv_heads=count, head_size=head_size),) for count in kv_heads if count
    }
    if not kept:
        raise config.bad("block_configs", "has no block with attention, which vLLM does not take")
    return LayerStack(
        layers=tuple(kept.get(count, ()) for count in kv_heads),
        num_kv_heads=next(iter(kept)),  # of the first block that has attention
        head_size=head_size,
    )


def _block_kv_heads(config: ModelConfig, block: object, heads: int) -> int:
    """K/V heads of one entry of `block_configs`, 0 where it has no attention."""
    attention = (
        ModelConfig(block, "block_configs.").section("attention") if isinstance(block, Mapping) else None
    )
    if attention is None or attention.flag("replace_with_linear"):
        raise config.bad(
            "block_configs", "has an entry without `attention`, or with a linear layer in its place"
        )
    return 0 if attention.flag("no_op") else heads // attention.count("n_heads_in_group")


def _whisper(config: ModelConfig) -> LayerStack:
    """whisper.py: the decoder's own cache and one of the encoder's output; the encoder itself keeps nothing."""
    heads = config.count("decoder_attention_heads")
    width = config.count("d_model")
    whole = config.count("encoder_attention_heads")
    if width < max(heads, whole):
        raise _more_heads_than_elements()
    layer = (
        AttentionLayer(num_kv_heads=heads, head_size=width // heads),
        CrossAttentionLayer(num_kv_heads=heads, head_size=width // heads),
    )
    return LayerStack(
        layers=(layer,) * config.layers("decoder_layers"),
        num_kv_heads=whole,
        head_size=width // whole,
        pipeline=False,
    )


READERS: Mapping[str, Reader] = {
    "ChatGLMForConditionalGeneration": _chatglm,
    "ChatGLMModel": _chatglm,
    "DbrxForCausalLM": _dbrx,
    "DeciLMForCausalLM": _decilm,
    "FalconForCausalLM": _falcon,
    "GPTBigCodeForCausalLM": _gpt_bigcode,
    "MiniCPM3ForCausalLM": _minicpm3,
    "Step3TextForCausalLM": _step3,
    "WhisperForConditionalGeneration": _whisper,
}
