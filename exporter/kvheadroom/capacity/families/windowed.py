"""Models of plain attention with rules of their own for which layer looks how far, or shares another layer's cache.

Rules read in vllm/model_executor/models/ of 0.33.0; the file of each is named at its reader.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.families.attention import require_known_types, windowed_layers
from kvheadroom.capacity.families.text_config import FULL, SLIDING, TextConfig, read_text_config
from kvheadroom.capacity.layer_stack import Layers, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import DIFFKV_BACKEND, AttentionLayer
from kvheadroom.capacity.model_config import is_count, shown


def _stack(text: TextConfig, layers: Layers) -> LayerStack:
    return LayerStack(layers=layers, num_kv_heads=text.kv_heads, head_size=text.head_size)


def _typed_text(config: ModelConfig, usual_type: str) -> TextConfig:
    text = read_text_config(config, usual_type)
    require_known_types(text)
    return text


def _cohere2(config: ModelConfig) -> LayerStack:
    """commandr.py: a sliding layer of `sliding_window` tokens sees that many before the token itself."""
    text = _typed_text(config, "cohere2")
    if text.window is None:
        raise config.bad("sliding_window", "is null, which vLLM does not take for this architecture")
    windows = tuple(window and window + 1 for window in text.windows)
    return _stack(text, windowed_layers(windows, num_kv_heads=text.kv_heads, head_size=text.head_size))


def _gpt_oss(config: ModelConfig) -> LayerStack:
    """gpt_oss.py: every other layer slides, whatever `layer_types` says; all have sinks, and no head is repeated."""
    text = _typed_text(config, "gpt_oss")
    windows = tuple(text.model_window if layer % 2 else text.window for layer in range(text.layers))
    layers = windowed_layers(windows, num_kv_heads=text.kv_heads, head_size=text.head_size, has_sink=True)
    return replace(_stack(text, layers), repeats_heads=False)


def _granite(usual_type: str, *, ignores_head_dim: bool) -> Reader:
    """granite.py, granitemoe.py: with `layer_types` come attention sinks, unless `attention_sinks` denies them."""

    def read(config: ModelConfig) -> LayerStack:
        text = _typed_text(config, usual_type)
        layers = windowed_layers(
            text.windows,
            num_kv_heads=text.kv_heads,
            head_size=text.hidden_head_size if ignores_head_dim else text.head_size,
            has_sink=config.flag("attention_sinks", default=text.layer_types is not None),
        )
        return _stack(text, layers)

    return read


def _exaone_moe(config: ModelConfig) -> LayerStack:
    """exaone_moe.py, exaone_moe_mtp.py: a window for each layer where `sliding_windows` lists them.

    Layers of multi-token prediction are not told the type of the cache, and keep the model's own.
    """
    text = _typed_text(config, "exaone_moe")
    layers = windowed_layers(
        _exaone_windows(text, "layer_types", "sliding_windows", text.layers),
        num_kv_heads=text.kv_heads,
        head_size=text.head_size,
    )
    count = config.draft_layers()
    has_own = config.has("mtp_layer_types")
    mtp = windowed_layers(
        _exaone_windows(
            text,
            "mtp_layer_types" if has_own else "layer_types",
            "mtp_sliding_windows" if config.has("mtp_sliding_windows") else "sliding_windows",
            count,
        ),
        num_kv_heads=text.kv_heads,
        head_size=text.head_size,
        in_model_dtype=True,
    )
    return replace(_stack(text, layers), mtp=mtp or None, mtp_modules=count > 1)


def _exaone_windows(
    text: TextConfig, types_key: str, windows_key: str, layers: int
) -> tuple[int | None, ...]:
    types = text.layer_types if types_key == "layer_types" else text.section.words(types_key)
    windows = text.section.list_of(windows_key)
    if types is None or len(types) < layers or (windows is not None and len(windows) < layers):
        raise text.section.bad(types_key, "has fewer entries than there are layers")
    sizes: list[int | None] = []
    for layer in range(layers):
        size = text.window if windows is None else windows[layer]
        if types[layer] == FULL:
            size = None
        elif not is_count(size):
            raise text.section.bad(windows_key, f"is {shown(size)} for sliding layer {layer}")
        sizes.append(size)
    return tuple(sizes)


def _step3p5(config: ModelConfig) -> LayerStack:
    """step3p5.py: heads are called groups, and the layers' lists may go on with those for multi-token prediction."""
    if config.word("att_impl_type", "GQA") != "GQA":
        raise config.bad("att_impl_type", "is not GQA, which vLLM does not take")
    count = config.draft_layers()
    layers = config.layers()
    types = config.words("layer_types") or [FULL] * (layers + count)
    if len(types) == layers:
        types += config.words("mtp_layer_types", count) or []
    if len(types) not in (layers, layers + count):
        raise config.bad("layer_types", f"has {len(types)} entries for {layers} layers")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise config.bad("layer_types", f"has {shown(kind)}, which is not modelled for this architecture")
    window = config.count("sliding_window", 0, smallest=0) or None
    num_kv_heads = config.count_of("num_attention_groups", "num_key_value_heads")
    if config.count("num_key_value_heads", num_kv_heads) != num_kv_heads:
        raise config.bad("num_attention_groups", "and `num_key_value_heads`, another name of it, differ")
    head_size = config.count("head_dim")
    built = windowed_layers(
        (window if kind == SLIDING else None for kind in types),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    return LayerStack(
        layers=built[:layers],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        # a full layer after the last has no entry in the list that vLLM takes its number of heads from, and it fails
        mtp=None if FULL in types[layers:] else built[layers:] or None,
        mtp_modules=count > 1,
    )


def _gemma3n(config: ModelConfig) -> LayerStack:
    """gemma3n.py: the last layers use the cache of the last full or sliding layer before them."""
    text = _typed_text(config, "gemma3n_text")
    shared_from = text.layers - config.count("num_kv_shared_layers", smallest=0)
    layers = windowed_layers(text.windows, num_kv_heads=text.kv_heads, head_size=text.head_size)
    # the target stands 2 (sliding) or 1 (full) before the first that shares, if there is such a layer
    shares = tuple(
        layer >= shared_from >= (2 if window is not None else 1) for layer, window in enumerate(text.windows)
    )
    layers = tuple(() if shared else kept for kept, shared in zip(layers, shares, strict=True))
    return replace(_stack(text, layers), pipeline=False)


def _gemma4(config: ModelConfig) -> LayerStack:
    """gemma4.py: full layers have heads of their own size, the last layers share the cache of the last of their type.

    Images are looked at both ways where the config says so, in the text-only class too (Gemma4's convertor in
    model_arch_config_convertor.py).
    """
    both_ways = config.word("use_bidirectional_attention")
    if both_ways not in (None, "vision"):
        raise config.bad("use_bidirectional_attention", f"is {shown(both_ways)}, which is not modelled")
    text = _typed_text(config, "gemma4_text")
    types = _gemma4_types(text)
    shared_from = max(text.layers - config.count("num_kv_shared_layers", 0, smallest=0), 0)
    if not set(types[shared_from:]) <= set(types[:shared_from]):
        raise config.bad("num_kv_shared_layers", "leaves no layer of each type whose cache could be shared")
    own = gemma4_attention(config)
    return LayerStack(
        layers=tuple((kept,) if layer < shared_from else () for layer, kept in enumerate(own)),
        num_kv_heads=max(layer.num_kv_heads for layer in own),
        head_size=max(layer.head_size for layer in own),
        image_prefix=both_ways == "vision",
    )


def _gemma4_types(text: TextConfig) -> tuple[str, ...]:
    return (*(text.layer_types or ())[:-1], FULL)  # transformers makes the last layer a full one


def gemma4_attention(config: ModelConfig) -> tuple[AttentionLayer, ...]:
    """The attention of each layer, also of those that use the cache of another."""
    text = _typed_text(config, "gemma4_text")
    types = _gemma4_types(text)
    return tuple(
        AttentionLayer(num_kv_heads=heads, head_size=size, window=text.window if kind == SLIDING else None)
        for kind, (heads, size) in zip(types, _gemma4_heads(text, types), strict=True)
    )


def _gemma4_heads(text: TextConfig, types: tuple[str, ...]) -> list[tuple[int, int]]:
    """K/V heads and head size of each layer: `per_layer_config` where it is there, else two keys for full layers."""
    config = text.section
    usual = (text.kv_heads, text.head_size)
    overrides = config.section("per_layer_config")
    if overrides is None:
        full_heads = text.kv_heads
        if config.flag("attention_k_eq_v"):
            full_heads = config.count("num_global_key_value_heads", full_heads)
        # 512 is the size of all published models, and files of before the key existed mean it
        full = (full_heads, config.count("global_head_dim", 512))
        return [full if kind == FULL else usual for kind in types]
    heads = [usual] * text.layers
    for key in overrides.values:
        layer = int(key) if key.isdecimal() and len(key) < 6 else text.layers
        override = overrides.section(key)
        if layer >= text.layers or override is None or not override.values.keys() <= _GEMMA4_PER_LAYER:
            raise overrides.bad(
                key, "is not modelled: numbers of layers with `head_dim` and `num_key_value_heads` are"
            )
        heads[layer] = (override.count("num_key_value_heads", usual[0]), override.count("head_dim", usual[1]))
    return heads


_GEMMA4_PER_LAYER = {"head_dim", "num_key_value_heads"}


def _llama4(config: ModelConfig) -> LayerStack:
    """llama4.py: layers with position embedding attend within chunks, the others to everything."""
    text = read_text_config(config, "llama4_text")
    if "attention_chunk_size" not in config.values:
        raise config.bad(
            "attention_chunk_size", "is left out, which means chunks; say null if there are none"
        )
    chunk = config.count("attention_chunk_size", 0, smallest=0) or None
    rope = config.counts("no_rope_layers", smallest=0)
    if not rope:
        every = config.count("no_rope_layer_interval", 4)
        rope = [(layer + 1) % every for layer in range(text.layers)]
    if len(rope) < text.layers:
        raise config.bad("no_rope_layers", f"has {len(rope)} entries for {text.layers} layers")
    if text.model_window is not None:
        raise config.bad("sliding_window", "is not modelled for this architecture")
    local, everything = (
        (AttentionLayer(num_kv_heads=text.kv_heads, head_size=text.head_size, chunk=tokens),)
        for tokens in (chunk, None)
    )
    return _stack(text, tuple(local if has_rope else everything for has_rope in rope[: text.layers]))


def _mimo_v2(config: ModelConfig) -> LayerStack:
    """mimo_v2.py, mimo_v2_mtp.py: `swa_*` keys for the windowed layers, V narrower than K."""
    if config.has("vision_config"):
        raise config.bad("vision_config", "makes it the Omni model, which is not modelled")
    text = read_text_config(config, "mimo_v2_flash")
    pattern = config.counts("hybrid_layer_pattern", text.layers, smallest=0)
    if pattern is None:
        raise config.bad("hybrid_layer_pattern", "is left out, a list with an entry per layer is needed")
    full = _mimo_layer(text.kv_heads, config.count("head_dim"), config.count("v_head_dim"))
    sliding = _mimo_layer(
        config.count("swa_num_key_value_heads"),
        config.count("swa_head_dim"),
        config.count("swa_v_head_dim"),
        window=config.count("sliding_window_size"),
        has_sink=config.flag("add_swa_attention_sink_bias"),
    )
    return replace(
        _stack(text, tuple((sliding,) if kind == 1 else (full,) for kind in pattern)),
        mtp=((sliding,),),  # vLLM builds the first layer only, however many the checkpoint has
    )


def _mimo_layer(
    num_kv_heads: int, head_size: int, head_size_v: int, *, window: int | None = None, has_sink: bool = False
) -> AttentionLayer:
    same = head_size == head_size_v
    return AttentionLayer(
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=None if same else head_size_v,
        window=window,
        has_sink=has_sink,
        backend=None if same else DIFFKV_BACKEND,
    )


READERS: Mapping[str, Reader] = {
    "Cohere2ForCausalLM": _cohere2,
    "ExaoneMoEForCausalLM": _exaone_moe,
    "ExaoneMoeForCausalLM": _exaone_moe,
    "Gemma3nForCausalLM": _gemma3n,
    "Gemma4ForCausalLM": _gemma4,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite("granite", ignores_head_dim=False),
    "GraniteMoeForCausalLM": _granite("granitemoe", ignores_head_dim=True),
    "GraniteMoeSWAForCausalLM": _granite("granitemoe_swa", ignores_head_dim=True),
    "GraniteMoeSharedForCausalLM": _granite("granitemoeshared", ignores_head_dim=True),
    "GraniteSWAForCausalLM": _granite("granite_swa", ignores_head_dim=False),
    "Llama4ForCausalLM": _llama4,
    "MiMoV2FlashForCausalLM": _mimo_v2,
    "MiMoV2ForCausalLM": _mimo_v2,
    "Step3p5ForCausalLM": _step3p5,
}
