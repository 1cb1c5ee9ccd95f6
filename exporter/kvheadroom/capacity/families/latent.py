"""Multi-head latent attention: DeepSeek-V2 to V3.2 and the models built on their classes.

One latent vector per token in every layer. With DeepSeek's sparse attention some layers keep a key for the indexer
beside it; vLLM registers that key before the vector.

Sources, all of vLLM 0.33.0: `model_executor/models/deepseek_v2.py`, `glm4_moe_lite.py`, `longcat_flash.py`,
`openpangu.py`, `AXK1.py`, `deepseek_vl2.py`, and `models/deepseek_v32/attention.py`. What multi-token prediction
adds: `config/speculative.py` (`hf_config_override`), `deepseek_mtp.py`, `longcat_flash_mtp.py`, `openpangu_mtp.py`.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvheadroom.capacity.layer_stack import Layers, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import AttentionLayer, IndexerLayer, LatentLayer
from kvheadroom.capacity.model_config import shown

# Types whose latent vectors vLLM caches as such (`is_deepseek_mla`, transformers_utils/
# model_arch_config_convertor.py). For any other the same classes keep K and V of every head.
_CACHES_LATENT_VECTORS = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "longcat_flash",
        "pangu_ultra_moe",
    }
)

# Of these, the types that `hf_config_override` turns into a draft of as many layers as the checkpoint has.
_HAS_MTP = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "pangu_ultra_moe"})

_SUBLAYERS_OF_LONGCAT = 2


def _dense(config: ModelConfig) -> LayerStack:
    layer = (_latent_layer(config),)
    return _stack(config, (layer,) * config.layers(), mtp_layer=layer)


def _sparse(config: ModelConfig) -> LayerStack:
    """Layers that own an indexer, and layers that use the choice of the one before them."""
    if "index_topk" not in config.values:
        raise config.bad("index_topk", "is left out, and attention backends go by it")
    indexer = IndexerLayer(head_dim=config.count("index_head_dim"))
    owner = (indexer, _latent_layer(config, sparse=True, owns_indexer=True))
    sharer = (_latent_layer(config, sparse=True),)
    layers = tuple(owner if owns else sharer for owns in _indexer_owners(config))
    # A layer of multi-token prediction always owns an indexer.
    return _stack(config, layers, mtp_layer=owner)


def _deepseek(config: ModelConfig) -> LayerStack:
    """The classes of deepseek_v2.py are sparse where config.json has `index_topk`, even as null."""
    return _sparse(config) if "index_topk" in config.values else _dense(config)


def _deepseek_v32(config: ModelConfig) -> LayerStack:
    config.count("index_topk")  # the architecture's hook asserts that it is there (models/config.py)
    return _sparse(config)


def _deepseek_in_multimodal(config: ModelConfig) -> LayerStack:
    """A draft is looked for by the type of the whole model, and vLLM knows none for these."""
    return replace(_deepseek(config), mtp=None)


def _deepseek_vl2(config: ModelConfig) -> LayerStack:
    """The small ones of DeepSeek-VL2 and DeepSeek-OCR have plain attention (`DeepseekAttention`)."""
    if config.values.get("qk_nope_head_dim") != 0 or config.values.get("qk_rope_head_dim") != 0:
        return _deepseek_in_multimodal(config)
    if config.has("kv_lora_rank"):
        raise config.bad("kv_lora_rank", "is given for attention without latent vectors, not modelled")
    heads, hidden_size = config.count("num_attention_heads"), config.count("hidden_size")
    if heads > hidden_size:
        raise config.bad("num_attention_heads", "is larger than `hidden_size`")
    attention = AttentionLayer(
        num_kv_heads=config.count("num_key_value_heads", heads),
        head_size=hidden_size // heads,
    )
    return LayerStack(
        layers=((attention,),) * config.layers(),
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
    )


def _longcat(config: ModelConfig) -> LayerStack:
    """Two attention sublayers per layer; the draft is one layer of DeepSeek's, whatever the checkpoint has."""
    if "index_topk" in config.values:
        raise config.bad("index_topk", "would make attention sparse, not modelled for LongCat-Flash")
    latent = _latent_layer(config)
    # transformers takes `num_hidden_layers` for the sublayers, and it wins over `num_layers`.
    if config.has("num_hidden_layers"):
        layers = config.layers() // _SUBLAYERS_OF_LONGCAT
    else:
        layers = config.layers("num_layers")
    stack = _stack(config, ((latent,) * _SUBLAYERS_OF_LONGCAT,) * layers, mtp_layer=(latent,))
    return replace(stack, mtp=((latent,),))


def _latent_layer(config: ModelConfig, *, sparse: bool = False, owns_indexer: bool = False) -> LatentLayer:
    if not config.flag("is_causal", default=True):
        raise config.bad("is_causal", "is false: attention that keeps no cache is not modelled")
    model_type = config.word("model_type")
    if model_type is not None and model_type not in _CACHES_LATENT_VECTORS:
        raise config.bad(
            "model_type", f"is {shown(model_type)}: vLLM does not cache its latent vectors, not modelled"
        )
    needs_head_sizes(config)
    return LatentLayer(
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        sparse=sparse,
        owns_indexer=owns_indexer,
    )


def needs_head_sizes(config: ModelConfig) -> None:
    """Backends go by them; where they are left out, by a default of transformers' config class, not modelled."""
    for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        config.count(key, smallest=0)


def _indexer_owners(config: ModelConfig) -> tuple[bool, ...]:
    """By `index_topk_pattern`, else every `index_topk_freq`-th from an offset on; `indexer_types` is not read."""
    layers = config.layers()
    pattern = config.values.get("index_topk_pattern")
    if pattern is None:
        frequency = config.count("index_topk_freq", 1)
        offset = config.count("index_skip_topk_offset", 2, smallest=0)
        return tuple(max(layer - offset + 1, 0) % frequency == 0 for layer in range(layers))
    if not isinstance(pattern, str | list):
        raise config.bad("index_topk_pattern", f"is {shown(pattern)}, one letter per layer is needed")
    # Layers past the end of the pattern own one.
    return tuple(layer >= len(pattern) or pattern[layer] != "S" for layer in range(layers))


def _stack(
    config: ModelConfig, layers: Layers, mtp_layer: tuple[IndexerLayer | LatentLayer, ...]
) -> LayerStack:
    mtp_layers = config.draft_layers()
    has_mtp = mtp_layers > 0 and config.word("model_type") in (None, *_HAS_MTP)
    return LayerStack(
        layers=layers,
        num_kv_heads=1,
        head_size=config.count("kv_lora_rank") + config.count("qk_rope_head_dim"),
        latent=True,
        mtp=(mtp_layer,) * mtp_layers if has_mtp else None,
        mtp_modules=mtp_layers > 1,
    )


READERS: Mapping[str, Reader] = {
    "AXK1ForCausalLM": _dense,
    "DeepseekOCRForCausalLM": _deepseek_vl2,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV32ForCausalLM": _deepseek_v32,
    "DeepseekV3ForCausalLM": _deepseek,
    "DeepseekVLV2ForCausalLM": _deepseek_vl2,
    "Glm4MoeLiteForCausalLM": _deepseek,
    "GlmMoeDsaForCausalLM": _sparse,
    "KimiK25ForConditionalGeneration": _deepseek_in_multimodal,
    "KimiVLForConditionalGeneration": _deepseek_in_multimodal,
    "LongcatFlashForCausalLM": _longcat,
    "LongcatFlashNgramForCausalLM": _longcat,
    "PanguUltraMoEForCausalLM": _dense,
}
