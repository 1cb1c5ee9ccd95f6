"""The encoders of images that stand before language models: what they hold.

Each function reads `vision_config` of config.json. Read in vllm/model_executor/models/ of 0.33.0; the file of each is
named at its function.
"""

from collections.abc import Callable, Mapping

from kvheadroom.capacity.layer_stack import ModelConfig
from kvheadroom.capacity.weights.builders import Model
from kvheadroom.capacity.weights.parts import Parts, column, norm, norms, qkv, row
from kvheadroom.capacity.weights.vision_parts import (
    VISION,
    gated,
    layered,
    linear,
    mlp,
    repeated,
    table,
    with_heads,
)

Tower = Callable[[Model, ModelConfig], Parts]
"""What stands before the language model: the encoder, and what brings its output to the size of the embedding."""


def _channels(vision: ModelConfig) -> int:
    return vision.count_of("in_channels", "in_chans", "num_channels", default=3)


def qwen2_vl(model: Model, vision: ModelConfig) -> Parts:
    """qwen2_vl.py."""
    width, merge = vision.count("embed_dim"), vision.count("spatial_merge_size", 2)
    heads, patch = vision.count("num_heads"), vision.count("patch_size")
    inner = width * vision.count("mlp_ratio")
    block = (
        *norms(("norm1", "norm2"), width, bias=True),
        qkv(width, heads, heads, width // heads, bias=True, name="attn.qkv"),
        row(VISION, "attn.proj", width, width, bias=True),
        *mlp(width, inner, "mlp.fc1", "mlp.fc2"),
    )
    pixels = _channels(vision) * vision.count("temporal_patch_size", 2) * patch * patch
    merged = width * merge**2
    return layered(
        "visual.",
        (
            table("patch_embed.proj.weight", width, pixels),
            *repeated("blocks", block, vision.layers("depth")),
            *norm("merger.ln_q", width, bias=True),
            *mlp(merged, merged, "merger.mlp.0", "merger.mlp.2", out=model.hidden),
        ),
    )


def qwen2_5_vl(model: Model, vision: ModelConfig) -> Parts:
    """qwen2_5_vl.py."""
    width, merge = vision.count("hidden_size"), vision.count("spatial_merge_size", 2)
    heads, patch = vision.count("num_heads"), vision.count("patch_size")
    block = (
        *norms(("norm1", "norm2"), width),
        qkv(width, heads, heads, width // heads, bias=True, name="attn.qkv"),
        row(VISION, "attn.proj", width, width, bias=True),
        *gated(width, vision.count("intermediate_size"), bias=True),
    )
    pixels = _channels(vision) * vision.count("temporal_patch_size", 2) * patch * patch
    merged = width * merge**2
    return layered(
        "visual.",
        (
            table("patch_embed.proj.weight", width, pixels),
            *repeated("blocks", block, vision.layers("depth")),
            *norm("merger.ln_q", width),
            *mlp(
                merged,
                merged,
                "merger.mlp.0",
                "merger.mlp.2",
                out=vision.count("out_hidden_size", model.hidden),
            ),
        ),
    )


def qwen3_vl(model: Model, vision: ModelConfig) -> Parts:
    """qwen3_vl.py, and Qwen3.5's, which goes without the deep mergers."""
    del model
    out = vision.count("out_hidden_size")
    merged, parts = _qwen3_vl_blocks(vision)
    for index in range(len(vision.list_of("deepstack_visual_indexes") or ())):
        name = f"deepstack_merger_list.{index}"
        parts += norm(f"{name}.norm", merged, bias=True)
        parts += mlp(merged, merged, f"{name}.linear_fc1", f"{name}.linear_fc2", out=out)
    parts += mlp(merged, merged, "merger.linear_fc1", "merger.linear_fc2", out=out)
    return layered("visual.", parts)


def _qwen3_vl_blocks(vision: ModelConfig) -> tuple[int, Parts]:
    width, heads = vision.count("hidden_size"), vision.count("num_heads")
    patch, merge = vision.count("patch_size"), vision.count("spatial_merge_size", 2)
    block = (
        *norms(("norm1", "norm2"), width, bias=True),
        qkv(width, heads, heads, width // heads, bias=True, name="attn.qkv"),
        row(VISION, "attn.proj", width, width, bias=True),
        *mlp(width, vision.count("intermediate_size"), "mlp.linear_fc1", "mlp.linear_fc2"),
    )
    pixels = _channels(vision) * vision.count("temporal_patch_size", 2) * patch * patch
    parts = (
        table("patch_embed.proj.weight", width, pixels),
        table("patch_embed.proj.bias", width),
        table("pos_embed.weight", vision.count("num_position_embeddings"), width),
        *norm("merger.norm", width, bias=True),
        *repeated("blocks", block, vision.layers("depth")),
    )
    return width * merge**2, parts


def bailing_vl(model: Model, vision: ModelConfig) -> Parts:
    """bailing_moe_v3_vl.py: Qwen3-VL's encoder, a projector of its own."""
    merged, parts = _qwen3_vl_blocks(vision)
    inner = vision.count("out_hidden_size", model.hidden)
    return (
        *layered("visual.", parts),
        linear("linear_proj.linear_fc1", merged, inner, bias=True, whole_matrix=False),
        row(VISION, "linear_proj.linear_fc2", inner, model.hidden, bias=True),
    )


def clip_layers(
    width: int,
    inner: int,
    heads: int,
    count: int,
    *,
    name: str = "encoder.layers",
    mlp_name: str = "mlp.",
    quantized_mlp: bool = True,
) -> Parts:
    """The layers of CLIP and SigLIP (clip.py, siglip.py)."""
    return repeated(
        name,
        (
            qkv(width, heads, heads, width // heads, bias=True),
            row(VISION, "self_attn.out_proj", width, width, bias=True),
            *norms(("layer_norm1", "layer_norm2"), width, bias=True),
            *mlp(width, inner, f"{mlp_name}fc1", f"{mlp_name}fc2", quantized=quantized_mlp),
        ),
        count,
    )


def _siglip(vision: ModelConfig, *, count: int | None = None, has_last_norm: bool = True) -> Parts:
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    if vision.flag("vision_use_head") and vision.word("model_type") != "siglip_vision_model":
        raise vision.bad("vision_use_head", "is true, which is not modelled")
    positions, inner = (vision.count("image_size") // patch) ** 2, vision.count("intermediate_size")
    layers = vision.layers() if count is None else count
    parts: Parts = (
        table("embeddings.patch_embedding.weight", width, _channels(vision) * patch * patch),
        table("embeddings.patch_embedding.bias", width),
        table("embeddings.position_embedding.weight", positions, width),
        *clip_layers(
            width,
            inner,
            vision.count("num_attention_heads"),
            layers,
            # siglip.py SiglipMLP
            quantized_mlp=width % 64 == 0 and inner % 64 == 0,
        ),
    )
    return parts + norm("post_layernorm", width, bias=True) if has_last_norm else parts


def _clip(vision: ModelConfig, count: int) -> Parts:
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    positions = (vision.count("image_size") // patch) ** 2 + 1
    return (
        table("embeddings.class_embedding", width),
        table("embeddings.patch_embedding.weight", width, _channels(vision) * patch * patch),
        table("embeddings.position_embedding.weight", positions, width),
        *norm("pre_layrnorm", width, bias=True),
        *clip_layers(width, vision.count("intermediate_size"), vision.count("num_attention_heads"), count),
    )


def _pixtral(vision: ModelConfig, count: int) -> Parts:
    """pixtral.py, transformers' form of it."""
    width, heads = vision.count("hidden_size"), vision.count("num_attention_heads")
    patch = vision.count("patch_size")
    head_dim = vision.count("head_dim", width // heads)
    layer: Parts = (
        qkv(width, heads, heads, head_dim, name="attention.qkv_proj"),
        row(VISION, "attention.o_proj", heads * head_dim, width),
        *norms(("attention_norm", "ffn_norm"), width),
        *gated(width, vision.count("intermediate_size"), name="feed_forward"),
    )
    return (
        table("patch_conv.weight", width, _channels(vision) * patch * patch),
        *norm("ln_pre", width),
        *repeated("transformer.layers", layer, count),
    )


def gemma3(model: Model, vision: ModelConfig) -> Parts:
    """gemma3_mm.py."""
    width = vision.count("hidden_size")
    return (
        *layered("vision_tower.vision_model.", _siglip(vision)),
        table("multi_modal_projector.mm_input_projection_weight", width, model.hidden),
        *norm("multi_modal_projector.mm_soft_emb_norm", width, term=VISION),
    )


def paligemma(model: Model, vision: ModelConfig) -> Parts:
    """paligemma.py."""
    del model
    out = vision.count("projection_dim")
    return (
        *layered("vision_tower.vision_model.", _siglip(vision)),
        linear("multi_modal_projector.linear", vision.count("hidden_size"), out, bias=True),
    )


def _llava_layers(model: Model, vision: ModelConfig) -> int:
    """The layers up to the one whose output is taken (llava.py, `_get_num_hidden_layers`)."""
    count = vision.layers()
    feature = model.whole.values.get("vision_feature_layer", -2)
    if isinstance(feature, bool) or not isinstance(feature, int):
        raise model.whole.bad("vision_feature_layer", "is no whole number, which is not modelled")
    taken = count + feature + 1 if feature < 0 else feature
    if not 0 < taken <= count:
        raise model.whole.bad("vision_feature_layer", f"names no layer of {count}")
    return taken


def _llava_tower(model: Model, vision: ModelConfig) -> Parts:
    kind = vision.word("model_type") or ""
    count = _llava_layers(model, vision)
    if kind == "clip_vision_model":
        return layered("vision_tower.vision_model.", _clip(vision, count))
    if kind == "siglip_vision_model":
        return layered("vision_tower.vision_model.", _siglip(vision, count=count, has_last_norm=False))
    if kind == "pixtral":
        return layered("vision_tower.", _pixtral(vision, count))
    raise vision.bad("model_type", "is none of clip_vision_model, siglip_vision_model and pixtral")


def llava(model: Model, vision: ModelConfig) -> Parts:
    """llava.py, llava_next.py."""
    bias = model.whole.flag("multimodal_projector_bias", default=True)
    return _llava_tower(model, vision) + layered(
        "multi_modal_projector.",
        mlp(vision.count("hidden_size"), model.hidden, "linear_1", "linear_2", bias=bias, out=model.hidden),
    )


def mistral3(model: Model, vision: ModelConfig) -> Parts:
    """mistral3.py."""
    width, merge = vision.count("hidden_size"), model.whole.count("spatial_merge_size", 2)
    bias = model.whole.flag("multimodal_projector_bias")
    projector: Parts = (
        *norm("norm", width),
        linear("patch_merger.merging_layer", width * merge**2, width),
        *mlp(width, model.hidden, "linear_1", "linear_2", bias=bias, out=model.hidden),
    )
    return _llava_tower(model, vision) + layered("multi_modal_projector.", projector)


def idefics3(model: Model, vision: ModelConfig) -> Parts:
    """idefics3.py, smolvlm.py."""
    scale = model.whole.count("scale_factor", 2)
    return (
        *layered("model.vision_model.", _siglip(vision)),
        linear(
            "model.connector.modality_projection.proj", vision.count("hidden_size") * scale**2, model.hidden
        ),
    )


def lfm2_vl(model: Model, vision: ModelConfig) -> Parts:
    """lfm2_vl.py, lfm2_siglip2.py: patches come as pixels, so that they are embedded by a matrix."""
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    factor, inner = (
        model.whole.count("downsample_factor", 2),
        model.whole.count("projector_hidden_size", 2560),
    )
    bias, merged = model.whole.flag("projector_bias", default=True), width * factor**2
    tower: Parts = (
        linear("embeddings.patch_embedding", _channels(vision) * patch * patch, width, bias=True),
        table("embeddings.position_embedding.weight", vision.count("num_patches"), width),
        *clip_layers(
            width, vision.count("intermediate_size"), vision.count("num_attention_heads"), vision.layers()
        ),
        *norm("post_layernorm", width, bias=True),
    )
    projector: Parts = (
        linear("linear_1", merged, inner, bias=bias),
        linear("linear_2", inner, model.hidden, bias=bias),
    )
    if model.whole.flag("projector_use_layernorm", default=True):
        projector += norm("layer_norm", merged, bias=True)
    return layered("vision_tower.vision_model.", tower) + layered("multi_modal_projector.", projector)


def internvl(model: Model, vision: ModelConfig) -> Parts:
    """interns1_vit.py, interns1.py: attention is not divided."""
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    image, patch = _square(vision, "image_size"), _square(vision, "patch_size")
    if vision.flag("use_qk_norm") or vision.word("norm_type", "layer_norm") != "layer_norm":
        raise vision.bad("norm_type", "or `use_qk_norm` is none that is modelled")
    bias = vision.flag("attention_bias")
    layer: Parts = (
        table("lambda_1", width),
        table("lambda_2", width),
        *(linear(f"attention.{name}_proj", width, width, bias=bias) for name in ("q", "k", "v")),
        linear("attention.projection_layer", width, width, bias=True),
        *mlp(width, inner, "mlp.fc1", "mlp.fc2"),
        *norms(("layernorm_before", "layernorm_after"), width, bias=True),
    )
    tower: Parts = (
        table("embeddings.cls_token", width),
        table("embeddings.position_embeddings", (image // patch) ** 2 + 1, width),
        table("embeddings.patch_embeddings.projection.weight", width, _channels(vision) * patch * patch),
        table("embeddings.patch_embeddings.projection.bias", width),
        *repeated("encoder.layer", layer, vision.layers()),
    )
    if not vision.flag("use_mean_pooling", default=True):
        tower += norm("layernorm", width, bias=True)
    merged = width * _inverse_square(model.whole)
    projector: Parts = (
        *norm("layer_norm", merged, bias=True),
        linear("linear_1", merged, model.hidden, bias=True),
        linear("linear_2", model.hidden, model.hidden, bias=True),
    )
    return layered("vision_tower.", tower) + layered("multi_modal_projector.", projector)


def _square(section: ModelConfig, key: str) -> int:
    """A size that may be given for both sides."""
    if not isinstance(section.values.get(key), list):
        return section.count(key)
    sides = set(section.counts(key) or ())
    if len(sides) != 1:
        raise section.bad(key, "differs between the sides, which is not modelled")
    return sides.pop()


def _inverse_square(whole_config: ModelConfig) -> int:
    """1 / `downsample_ratio` squared."""
    ratio = whole_config.values.get("downsample_ratio", 0.5)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise whole_config.bad("downsample_ratio", "is no ratio")
    return int(1 / ratio) ** 2


def llama4(model: Model, vision: ModelConfig) -> Parts:
    """mllama4.py."""
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    heads, inner = vision.count("num_attention_heads"), vision.count("intermediate_size")
    projected, out = vision.count("projector_input_dim"), vision.count("projector_output_dim")
    layer: Parts = (
        qkv(width, heads, heads, width // heads, bias=True),
        row(VISION, "self_attn.o_proj", width, width, bias=True),
        *mlp(width, inner, "mlp.fc1", "mlp.fc2"),
        *norms(("input_layernorm", "post_attention_layernorm"), width, bias=True),
    )
    tower: Parts = (
        table("class_embedding", width),
        table("positional_embedding_vlm", (vision.count("image_size") // patch) ** 2 + 1, width),
        column(VISION, "patch_embedding.linear", _channels(vision) * patch * patch, width, quantized=False),
        *norms(("layernorm_pre", "layernorm_post"), width, bias=True),
        *repeated("model.layers", layer, vision.layers()),
        *mlp(inner, projected, "vision_adapter.mlp.fc1", "vision_adapter.mlp.fc2", out=out, bias=False),
    )
    return (
        *layered("vision_model.", tower),
        column(VISION, "multi_modal_projector.linear_1", vision.count("vision_output_dim"), model.hidden),
    )


def glm4v(model: Model, vision: ModelConfig) -> Parts:
    """glm4_1v.py: the inner size of a block is the merger's width, and the other way round."""
    del model
    width, out = vision.count("hidden_size"), vision.count("out_hidden_size")
    image, patch, merge = (
        vision.count("image_size"),
        vision.count("patch_size"),
        vision.count("spatial_merge_size", 2),
    )
    block = _glm_block(vision, out, bias=vision.flag("attention_bias"))
    return layered(
        "visual.",
        (
            *_glm_ends(vision, out, vision.count("intermediate_size"), merge),
            table("embeddings.position_embedding.weight", (image // patch) ** 2, width),
            *norm("post_conv_layernorm", width),
            *repeated("blocks", block, vision.layers("depth")),
        ),
    )


def glm5_next(model: Model, vision: ModelConfig) -> Parts:
    """glm5next/common/multimodal.py: norms over each head, biases, no table of positions."""
    del model
    heads, width = vision.count("num_heads"), vision.count("hidden_size")
    block = _glm_block(vision, vision.count("intermediate_size"), bias=True, mlp_bias=True)
    block += norms(("attn.q_norm", "attn.k_norm"), width // heads)
    return layered(
        "visual.",
        _glm_ends(
            vision,
            vision.count("out_hidden_size"),
            vision.count("projection_intermediate_size"),
            vision.count("spatial_merge_size", 2),
        )
        + repeated("blocks", block, vision.layers("depth")),
    )


def _glm_block(vision: ModelConfig, inner: int, *, bias: bool, mlp_bias: bool = False) -> Parts:
    width, heads = vision.count("hidden_size"), vision.count("num_heads")
    return (
        *norms(("norm1", "norm2"), width),
        qkv(width, heads, heads, width // heads, bias=bias, name="attn.qkv"),
        row(VISION, "attn.proj", width, width, bias=bias),
        *gated(width, inner, bias=mlp_bias),
    )


def _glm_ends(vision: ModelConfig, out: int, inner: int, merge: int) -> Parts:
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    pixels = _channels(vision) * vision.count("temporal_patch_size", 2) * patch * patch
    return (
        table("patch_embed.proj.weight", width, pixels),
        table("patch_embed.proj.bias", width),
        column(VISION, "merger.proj", out, out),
        *norm("merger.post_projection_norm", out, bias=True),
        *gated(out, inner, name="merger"),
        table("downsample.weight", out, width * merge * merge),
        table("downsample.bias", out),
        *norm("post_layernorm", width),
    )


def moonvit(model: Model, vision: ModelConfig, *, projector: str) -> Parts:
    """moonvit.py, kimi_vl.py, kimi_k25_vit.py."""
    width, heads = vision.count("hidden_size"), vision.count("num_attention_heads")
    patch = vision.count("patch_size", 14)
    height = vision.count_of("init_pos_emb_height", "pos_emb_height", default=64)
    across = vision.count_of("init_pos_emb_width", "pos_emb_width", default=64)
    merge = vision.counts("merge_kernel_size") or [2, 2]
    if len(merge) != 2:
        raise vision.bad("merge_kernel_size", "is no pair")
    layer: Parts = (
        *norms(("norm0", "norm1"), width, bias=True),
        *mlp(width, vision.count("intermediate_size"), "mlp.fc0", "mlp.fc1"),
        qkv(width, heads, heads, width // heads, bias=True, name="wqkv"),
        row(VISION, "wo", width, width, bias=True),
    )
    tower: Parts = (
        table("patch_embed.proj.weight", width, 3 * patch * patch),
        table("patch_embed.proj.bias", width),
        table("patch_embed.pos_emb.weight", height * across, width),
        *repeated("encoder.blocks", layer, vision.layers()),
        *norm("encoder.final_layernorm", width, bias=True),
    )
    merged = width * merge[0] * merge[1]
    ends: Parts = (
        *norm("pre_norm", width, bias=True),
        linear("linear_1", merged, merged, bias=True),
        linear("linear_2", merged, model.hidden, bias=True),
    )
    return layered("vision_tower.", tower) + layered(f"{projector}.", ends)


def kimi_vl(model: Model, vision: ModelConfig) -> Parts:
    """kimi_vl.py."""
    return moonvit(model, vision, projector="multi_modal_projector")


def kimi_k25(model: Model, vision: ModelConfig) -> Parts:
    """kimi_k25.py."""
    return moonvit(model, vision, projector="mm_projector")


def kimi_k3(model: Model, vision: ModelConfig) -> Parts:
    """kimi_k3 over kimi_k25_vit.py: no biases, and norms without them."""
    width, heads = vision.count("vt_hidden_size"), vision.count("vt_num_attention_heads")
    inner, qkv_width = vision.count("vt_intermediate_size"), vision.count("qkv_hidden_size")
    if qkv_width != width or vision.count("mm_hidden_size", width) != width:
        raise vision.bad("qkv_hidden_size", "or `mm_hidden_size` is not `vt_hidden_size`, not modelled")
    patch = vision.count("patch_size", 14)
    layer: Parts = (
        *norms(("norm0", "norm1"), width),
        *mlp(width, inner, "mlp.fc0", "mlp.fc1", bias=False),
        qkv(width, heads, heads, width // heads, name="wqkv"),
        row(VISION, "wo", width, width),
    )
    tower: Parts = (
        table("patch_embed.proj.weight", width, 3 * patch * patch),
        table(
            "patch_embed.pos_emb.weight",
            vision.count("init_pos_emb_height", 64) * vision.count("init_pos_emb_width", 64),
            width,
        ),
        *repeated("encoder.blocks", with_heads(layer, heads), vision.layers("vt_num_hidden_layers")),
        *norm("encoder.final_layernorm", width),
    )
    merged = 4 * width
    ends: Parts = (
        linear("linear_1", merged, merged),
        linear("linear_2", merged, model.hidden),
        *norm("post_norm", model.hidden),
    )
    return layered("vision_tower.", tower) + layered("mm_projector.", ends)


def minimax_m3(model: Model, vision: ModelConfig) -> Parts:
    """minimax_m3/common/vision_tower.py: CLIP's layers without a table of positions."""
    width, patch = vision.count("hidden_size"), vision.count("patch_size")
    out = model.whole.count("projector_hidden_size", model.hidden)
    compression = vision.section("img_token_compression_config") or vision
    merge = compression.count("spatial_merge_size", 2)
    frames = compression.count("temporal_patch_size", 2)
    tower: Parts = (
        table(
            "vision_model.embeddings.patch_embedding.weight",
            width,
            _channels(vision) * frames * patch * patch,
        ),
        *norm("vision_model.pre_layrnorm", width, bias=True),
        *clip_layers(
            width,
            vision.count("intermediate_size"),
            vision.count("num_attention_heads"),
            vision.layers(),
            name="vision_model.encoder.layers",
            mlp_name="",
        ),
        *mlp(
            width, out, "multi_modal_projector.linear_1", "multi_modal_projector.linear_2", out=model.hidden
        ),
        *mlp(
            model.hidden * merge**2,
            out,
            "patch_merge_mlp.linear_1",
            "patch_merge_mlp.linear_2",
            out=model.hidden,
        ),
    )
    return layered("vision_tower.", tower)


def gemma4(model: Model, vision: ModelConfig) -> Parts:
    """gemma4_mm.py with transformers' encoder, which every rank holds whole."""
    if model.whole.has("audio_config"):
        raise model.whole.bad("audio_config", "makes it a model that hears, whose encoder is not modelled")
    width, heads = vision.count("hidden_size"), vision.count("num_attention_heads")
    head_dim, kv_heads = vision.count("head_dim"), vision.count("num_key_value_heads", heads)
    inner, patch = vision.count("intermediate_size"), vision.count("patch_size")
    if vision.flag("use_clipped_linears"):
        raise vision.bad("use_clipped_linears", "is true, which is not modelled")
    layer: Parts = (
        linear("self_attn.q_proj.linear", width, heads * head_dim),
        linear("self_attn.k_proj.linear", width, kv_heads * head_dim),
        linear("self_attn.v_proj.linear", width, kv_heads * head_dim),
        linear("self_attn.o_proj.linear", heads * head_dim, width),
        *norms(("self_attn.q_norm", "self_attn.k_norm"), head_dim),
        linear("mlp.gate_proj.linear", width, inner),
        linear("mlp.up_proj.linear", width, inner),
        linear("mlp.down_proj.linear", inner, width),
        *norms(
            (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            width,
        ),
    )
    tower: Parts = (
        table("patch_embedder.position_embedding_table", 2, vision.count("position_embedding_size"), width),
        linear("patch_embedder.input_proj", 3 * patch * patch, width),
        *repeated("encoder.layers", layer, vision.layers()),
    )
    return (
        *layered("vision_tower.", tower),
        linear("embed_vision.embedding_projection", width, model.hidden),
    )


def phi3_v(model: Model, vision: ModelConfig) -> Parts:
    """phi3v.py: a CLIP of fixed sizes, all layers but the last."""
    del vision
    processor = model.whole.section("img_processor")
    width = 1024
    if processor is None or processor.count("image_dim_out", width) != width:
        raise model.whole.bad("img_processor", "names none that is modelled")
    name = "vision_embed_tokens."
    tower: Parts = (
        table("embeddings.class_embedding", width),
        table("embeddings.patch_embedding.weight", width, 3 * 14 * 14),
        table("embeddings.position_embedding.weight", 24**2 + 1, width),
        *norm("pre_layrnorm", width, bias=True),
        *clip_layers(width, 4096, 16, 23),
    )
    ends: Parts = (
        table("glb_GN", 4 * width),
        table("sub_GN", 4 * width),
        linear("img_projection.0", 4 * width, model.hidden, bias=True, quantized=False),
        linear("img_projection.2", model.hidden, model.hidden, bias=True, quantized=False),
    )
    return layered(f"{name}img_processor.vision_model.", tower) + layered(name, ends)


_SAM_LAYERS = 12
_SAM_GLOBAL_EVERY = 3  # the last of three looks at the whole image


def deepseek_ocr(model: Model, vision: ModelConfig) -> Parts:
    """deepencoder.py: SAM-B, whole on every rank, before CLIP-L; config.json only names them."""
    sections = vision.section("width")
    if sections is None or not {"sam_vit_b", "clip-l-14-224"} <= sections.values.keys():
        raise vision.bad("width", "names none of the encoders that are modelled")
    width, clip = 768, 1024
    head_dim = width // 12
    block: Parts = (
        *norms(("norm1", "norm2"), width, bias=True),
        linear("attn.qkv", width, 3 * width, bias=True, quantized=False),
        linear("attn.proj", width, width, bias=True, quantized=False),
        linear("mlp.lin1", width, 4 * width, bias=True, quantized=False),
        linear("mlp.lin2", 4 * width, width, bias=True, quantized=False),
    )
    around_window, around_image = 2 * 14 - 1, 2 * 64 - 1
    sam: Parts = (
        table("pos_embed", 64, 64, width),
        table("patch_embed.proj.weight", width, 3 * 16 * 16),
        table("patch_embed.proj.bias", width),
        *repeated("blocks", block, _SAM_LAYERS),
        *(
            table(
                f"blocks.{number}.attn.rel_pos_{side}",
                around_window if (number + 1) % _SAM_GLOBAL_EVERY else around_image,
                head_dim,
            )
            for number in range(_SAM_LAYERS)
            for side in "hw"
        ),
        table("neck.0.weight", 256, width),
        table("neck.2.weight", 256, 256 * 9),
        *norms(("neck.1", "neck.3"), 256, bias=True),
        table("net_2.weight", 512, 256 * 9),
        table("net_3.weight", clip, 512 * 9),
    )
    tower: Parts = (
        table("embeddings.class_embedding", clip),
        table("embeddings.patch_embedding.weight", clip, 3 * 14 * 14),
        table("embeddings.position_embedding.weight", 16**2 + 1, clip),
        *norm("pre_layrnorm", clip, bias=True),
        *clip_layers(clip, 4096, 16, 24, name="transformer.layers"),
    )
    projector = model.whole.section("projector_config")
    if projector is None or projector.word("projector_type") != "linear":
        raise model.whole.bad("projector_config", "is none that is modelled")
    return (
        *layered("sam_model.", sam),
        *layered("vision_model.", tower),
        linear("projector.layers", projector.count("input_dim"), projector.count("n_embed"), bias=True),
        table("image_newline", projector.count("n_embed")),
        table("view_seperator", projector.count("n_embed")),
    )


# What transformers' config class makes of a key that `vision_config` leaves out (5.19), by architecture.
_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
VISION_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "BailingMoeV3VLForConditionalGeneration": {
        key: size for key, size in _QWEN3.items() if key != "out_hidden_size"
    },
    "Glm5NextForConditionalGeneration": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "out_hidden_size": 1536,
        "intermediate_size": 4096,
        "projection_intermediate_size": 10240,
    },
    "Qwen3VLForConditionalGeneration": {**_QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "Qwen3VLMoeForConditionalGeneration": {**_QWEN3, "deepstack_visual_indexes": [8, 16, 24]},
    "Qwen3_5ForConditionalGeneration": _QWEN3,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3,
    "Qwen4ExpForConditionalGeneration": _QWEN3,
    "KimiK25ForConditionalGeneration": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
    },
}
