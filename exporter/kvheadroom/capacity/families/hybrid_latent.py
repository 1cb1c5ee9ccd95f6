"""Recurrent states beside multi-head latent attention: Kimi-Linear, Kimi-K3, GLM-5.3-Flash, Ling.

Sources, all of vLLM 0.33.0: `models/kimi_k3/nvidia/`, `models/glm5next/common/`,
`model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py`, `model_executor/models/bailing_moe_*.py` and
`config/speculative.py` (`hf_config_override`); config classes of vLLM (`transformers_utils/configs/`) for Kimi, of
transformers 5.19 for GLM.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvheadroom.capacity.families.hybrid import (
    LINEAR,
    arrange,
    needs_aligned_blocks,
    types_of_layers,
)
from kvheadroom.capacity.families.latent import needs_head_sizes
from kvheadroom.capacity.families.text_config import FULL
from kvheadroom.capacity.layer_stack import LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import (
    Checkpoint,
    IndexerLayer,
    KdaState,
    LatentLayer,
    LinearAttentionState,
    RingLayer,
    StateLayer,
)

_INDEXED = "indexed_attention"
# Older names of layers with sparse attention, which transformers renames.
_NAMES_OF_INDEXED = {FULL: _INDEXED, "deepseek_sparse_attention": _INDEXED}

_FLASHKDA_HEAD_DIM = 128


def _kda_checkpoint(head_dim: int, *, bounded_gate: bool) -> Checkpoint:
    """FlashKDA runs on one head size and a gate with a lower bound only; what else it needs is the GPU's part."""
    return Checkpoint.FLASHKDA if bounded_gate and head_dim == _FLASHKDA_HEAD_DIM else Checkpoint.NEVER


def _kimi(config: ModelConfig, *, wrapped: bool = False) -> LayerStack:
    """Kimi-Linear and, `wrapped` into a multimodal model, Kimi-K3. Layers are listed by number, from 1 on."""
    if config.word("model_type", "kimi_linear") != "kimi_linear":
        raise config.bad("model_type", "is not kimi_linear, whose attention alone vLLM takes for latent here")
    linear = config.section("linear_attn_config")
    if linear is None:
        raise config.bad("linear_attn_config", "is left out, and vLLM needs it for the size of a state")
    head_dim = linear.count("head_dim")
    needs_head_sizes(config)
    latent = LatentLayer(
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_rope_head_dim=config.count("qk_rope_head_dim", smallest=0),
    )
    full_rank = linear.flag("use_full_rank_gate")
    state = StateLayer(
        state=KdaState(
            num_heads=linear.count("num_heads"),
            head_dim=head_dim,
            conv_kernel=linear.count("short_conv_kernel_size"),
        ),
        # The class that Kimi-Linear shares with other models has Triton's kernel only, and ignores the flag for
        # the dtype of states (kimi_gdn_linear_attn.py); K3's own is chosen by its gate.
        checkpoint=_kda_checkpoint(head_dim, bounded_gate=linear.has("gate_lower_bound"))
        if full_rank
        else Checkpoint.NEVER,
        recurrent_dtype=None if full_rank else "float32",
        aligned_by_flag=not full_rank,
    )
    layers = config.layers()
    numbers = linear.counts("kda_layers")
    if numbers is None or not linear.has("full_attn_layers"):
        raise linear.bad("kda_layers", "and `full_attn_layers` are both needed")
    modules = config.draft_layers() if wrapped else 0
    recurrent = set(numbers)
    types = [LINEAR if number in recurrent else FULL for number in range(1, layers + modules + 1)]
    if FULL in types and not config.flag("mla_use_nope"):
        raise config.bad("mla_use_nope", "is not true, and vLLM has this attention without positions only")
    caches = arrange(config, "num_hidden_layers", types, {FULL: (latent,), LINEAR: (state,)})
    needs_aligned_blocks(linear, "kda_layers", types[:layers], LINEAR, wrapped=True)
    return LayerStack(
        layers=caches[:layers],
        num_kv_heads=1,
        head_size=latent.elements,
        latent=True,
        hybrid=True,
        # vLLM has no draft for Kimi-Linear alone.
        mtp=caches[layers:] or None,
        recurrent_dtype="float32",
    )


def _glm5_next(config: ModelConfig, *, wrapped: bool = False) -> LayerStack:
    """GLM-5.3-Flash: sparse latent attention without positions, whose indexer pools the keys of some tokens.

    Until a pool is full its keys stay in a ring. vLLM registers indexer and ring before the latent vector.
    """
    if config.count("qk_rope_head_dim", 0, smallest=0):
        raise config.bad("qk_rope_head_dim", "is above 0, which transformers refuses for this model")
    if config.count("num_key_value_heads") != config.count("num_attention_heads"):
        raise config.bad("num_key_value_heads", "is not `num_attention_heads`, which transformers refuses")
    config.count("index_topk")  # backends go by it
    pool = config.count("index_kpool", smallest=2)
    if not config.flag("index_kpool_always_select_tail", default=True):
        raise config.bad("index_kpool_always_select_tail", "is false, which vLLM refuses")
    needs_head_sizes(config)
    latent = LatentLayer(
        kv_lora_rank=config.count("kv_lora_rank"), qk_rope_head_dim=0, sparse=True, owns_indexer=True
    )
    index_head_dim = config.count("index_head_dim")
    attention = (
        IndexerLayer(head_dim=index_head_dim, pooled_tokens=pool),
        RingLayer(pooled_tokens=pool, head_dim=index_head_dim),
        latent,
    )
    layers = config.layers()
    types = types_of_layers(config, "layer_types", layers)
    if types is None:
        types = [_INDEXED if index % 4 == 3 else LINEAR for index in range(layers)]
    types = [_NAMES_OF_INDEXED.get(name, name) for name in types]
    # The whole model is one of type glm5_next, and only that has a draft; a text model may be either.
    has_draft = wrapped or config.word("model_type") == "glm5_next"
    modules = config.draft_layers() if has_draft else 0
    return LayerStack(
        layers=arrange(config, "layer_types", types, {_INDEXED: attention, LINEAR: (_glm_state(config),)}),
        num_kv_heads=1,
        head_size=latent.elements,
        latent=True,
        hybrid=needs_aligned_blocks(config, "layer_types", types, LINEAR, wrapped=wrapped),
        mtp=(attention,) * modules or None,
        recurrent_dtype="float32",
    )


def _glm_state(config: ModelConfig) -> StateLayer:
    """A section `linear_attn_config` goes before single keys (transformers, `Glm5NextTextConfig`)."""
    section = config.section("linear_attn_config")

    def size(key: str, key_of_section: str) -> int:
        if section is not None and section.has(key_of_section):
            return section.count(key_of_section)
        return config.count(key)

    # Left out it is -5.0; null takes the bound away, unless the section keeps the gate safe, as it does by default.
    bounded = config.values.get("linear_lower_bound", -5.0) is not None
    if section is not None:
        bound = section.values.get("gate_lower_bound", bounded or None)
        bounded = bound is not None or section.values.get("safe_gate", True) is True
    head_dim = size("linear_head_dim", "head_dim")
    return StateLayer(
        state=KdaState(
            num_heads=size("linear_num_heads", "num_heads"),
            head_dim=head_dim,
            conv_kernel=size("linear_conv_kernel_dim", "short_conv_kernel_size"),
        ),
        checkpoint=_kda_checkpoint(head_dim, bounded_gate=bounded),
    )


def _bailing_2_5(config: ModelConfig) -> LayerStack:
    """Ling and Ring 2.5 (bailing_moe_linear.py): linear attention, latent attention at the end of each group."""
    heads = config.count("num_attention_heads")
    state = StateLayer(
        state=LinearAttentionState(
            num_heads=heads, head_dim=config.count("head_dim", config.count("hidden_size") // heads)
        )
    )
    group = config.count("layer_group_size")
    types = [LINEAR if (index + 1) % group else FULL for index in range(config.layers())]
    return _bailing(config, types, state)


def _bailing_3(config: ModelConfig) -> LayerStack:
    """Ling 3 (bailing_moe_v3.py): KDA instead, and latent attention too in the layers left over after the groups."""
    if not config.flag("no_kda_lora"):
        raise config.bad("no_kda_lora", "is not true, which vLLM refuses")
    state = StateLayer(
        state=KdaState(
            num_heads=config.count("num_attention_heads"),
            head_dim=config.count("head_dim"),
            conv_kernel=config.count("short_conv_kernel_size"),
        ),
        recurrent_dtype="float32",
    )
    layers, group = config.layers(), config.count("layer_group_size")
    grouped = layers // group * group
    types = [LINEAR if (index + 1) % group and index < grouped else FULL for index in range(layers)]
    return replace(_bailing(config, types, state), recurrent_dtype="float32")


def _bailing(config: ModelConfig, types: list[str], state: StateLayer) -> LayerStack:
    if config.word("model_type") != "bailing_hybrid":
        raise config.bad(
            "model_type", "is not bailing_hybrid, whose attention alone vLLM takes for latent here"
        )
    for key in ("layer_types", "layers_block_type"):
        if types_of_layers(config, key) not in (None, types):
            raise config.bad(key, "does not match `layer_group_size`, by which vLLM goes")
    needs_head_sizes(config)
    latent = LatentLayer(
        kv_lora_rank=config.count("kv_lora_rank"), qk_rope_head_dim=config.count("qk_rope_head_dim")
    )
    return LayerStack(
        layers=arrange(config, "layer_group_size", types, {FULL: (latent,), LINEAR: (state,)}),
        num_kv_heads=1,
        head_size=latent.elements,
        latent=True,
        hybrid=needs_aligned_blocks(config, "layer_group_size", types, LINEAR, wrapped=True),
        mtp=((latent,),) * config.draft_layers() or None,
    )


READERS: Mapping[str, Reader] = {
    "BailingMoeV2_5ForCausalLM": _bailing_2_5,
    "BailingMoeV3ForCausalLM": _bailing_3,
    "BailingMoeV3VLForConditionalGeneration": _bailing_3,
    "Glm5NextForCausalLM": _glm5_next,
    "Glm5NextForConditionalGeneration": partial(_glm5_next, wrapped=True),
    "KimiK3ForConditionalGeneration": partial(_kimi, wrapped=True),
    "KimiLinearForCausalLM": _kimi,
}
