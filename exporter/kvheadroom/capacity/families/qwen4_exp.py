"""Qwen4-Exp: gated delta nets, n-gram embeddings in some layers, full attention that an indexer narrows (QSA).

A layer with an n-gram embedding (PLE) keeps a second state, the window of a convolution over all residual streams.
QSA keeps three caches a layer: the raw keys of the tokens that are not yet pooled, a pooled key per few tokens, and K
and V as usual.

Sources, vLLM 0.33.0: `models/qwen4_exp/nvidia/` (model.py, ple_layer.py, qsa.py, indexer_qsa.py, mtp.py),
`models/qwen4_exp/common/qsa_cache.py`, `model_executor/models/config.py`; config class of transformers 5.19.
"""

from collections.abc import Mapping
from functools import partial

from kvheadroom.capacity.families.hybrid import (
    LINEAR,
    gated_delta_state,
    requires_usual_attention,
    state_dtype,
    types_of_layers,
)
from kvheadroom.capacity.families.text_config import FULL
from kvheadroom.capacity.kv_specs import round_up
from kvheadroom.capacity.layer_stack import Layers, LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import (
    QSA_BACKEND,
    AttentionLayer,
    CacheLayer,
    Checkpoint,
    PooledKeyLayer,
    RawKeyRingLayer,
    ReplicatedConvState,
    StateLayer,
)
from kvheadroom.capacity.model_config import shown

_INDEXED = "indexed_attention"
# Older names, which transformers renames: the first stands in the real checkpoint.
_NAMES_OF_INDEXED = {FULL: _INDEXED, "qwen_sparse_attention": _INDEXED}
_DEFAULT_INTERVAL = 4
_INDEXER_KEYS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
_AXES = 3
_POSITION_ELEMENTS = 4  # a position of 64 bits among numbers of 16


def _qwen4_exp(config: ModelConfig, *, wrapped: bool = False) -> LayerStack:
    requires_usual_attention(config)
    delta_net = StateLayer(
        state=gated_delta_state(config),
        checkpoint=Checkpoint.FLASHINFER,
    )
    embedding = StateLayer(
        state=ReplicatedConvState(
            width=config.count("hidden_size") * config.count("hc_count", smallest=2),
            tokens=(config.count("ple_conv_kernel_size") - 1) * config.count("ngram_size", smallest=2),
        ),
        # It is no more than the last inputs, which can be saved after any token on every GPU.
        checkpoint=Checkpoint.ANYWHERE,
    )
    num_kv_heads, head_size = config.count("num_key_value_heads"), config.count("head_dim")
    attention = _attention(config, num_kv_heads, head_size, three_axes=wrapped and _has_three_axes(config))
    types = _types(config)
    embedded = _embedded_layers(config, types)
    layers: Layers = tuple(
        attention if name == _INDEXED else (embedding, delta_net) if index in embedded else (delta_net,)
        for index, name in enumerate(types)
    )
    return LayerStack(
        layers=layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        # Whatever its layers: `indexed_attention` is no full attention to `ModelConfig.is_hybrid`.
        hybrid=True,
        mtp=_draft(config, attention),
        recurrent_dtype=state_dtype(config, "mamba_ssm_dtype"),
        # Later stages do not get the tokens that embeddings need.
        pipeline=not embedded,
        # `get_mamba_specs_from_config` has both in any case.
        sizing_states=(delta_net, embedding),
    )


def _attention(
    config: ModelConfig, num_kv_heads: int, head_size: int, *, three_axes: bool
) -> tuple[CacheLayer, ...]:
    """What a layer of full attention keeps; side caches first, as vLLM registers them."""
    if not config.has("indexer_n_heads"):
        for key in _INDEXER_KEYS:
            if config.has(key):
                raise config.bad(key, "is set without `indexer_n_heads`, which transformers refuses")
        return (AttentionLayer(num_kv_heads=num_kv_heads, head_size=head_size),)
    _, kv_heads, head_dim, budget, pool = (config.count(key) for key in _INDEXER_KEYS)
    if kv_heads != 1:
        raise config.bad("indexer_kv_heads", f"is {kv_heads}, which transformers refuses: it takes 1 only")
    if budget % pool:
        raise config.bad("indexer_budget", "is no multiple of `indexer_compress_ratio`")
    elements = head_dim
    if three_axes:
        elements = round_up(head_dim, _POSITION_ELEMENTS) + _AXES * _POSITION_ELEMENTS
    return (
        RawKeyRingLayer(elements=elements, pooled_tokens=pool),
        PooledKeyLayer(head_dim=head_dim, pooled_tokens=pool),
        AttentionLayer(num_kv_heads=num_kv_heads, head_size=head_size, backend=QSA_BACKEND),
    )


def _has_three_axes(config: ModelConfig) -> bool:
    """Positions in images (`uses_mrope`); vLLM takes them from the text model alone (models/config.py)."""
    sections = (config.section("rope_parameters"), config.section("rope_scaling"))
    return any(isinstance(one.values.get("mrope_section"), list) for one in sections if one is not None)


def _types(config: ModelConfig) -> list[str]:
    layers = config.layers()
    types = types_of_layers(config, "layer_types", layers)
    if types is None:
        every = config.count("full_attention_interval", _DEFAULT_INTERVAL)
        return [LINEAR if (index + 1) % every else _INDEXED for index in range(layers)]
    types = [_NAMES_OF_INDEXED.get(name, name) for name in types]
    unknown = sorted(set(types) - {LINEAR, _INDEXED})
    if unknown:
        raise config.bad("layer_types", f"names {shown(unknown[0])}, which vLLM does not know")
    return types


def _embedded_layers(config: ModelConfig, types: list[str]) -> frozenset[int]:
    """Layers with an n-gram embedding; config.json counts them from 1."""
    embedded = frozenset(number - 1 for number in config.counts("ple_layer_ids") or ())
    for index in embedded:
        if index >= len(types) or types[index] != LINEAR:
            raise config.bad("ple_layer_ids", f"names layer {index + 1}, which is no layer of type {LINEAR}")
    return embedded


def _draft(config: ModelConfig, attention: tuple[CacheLayer, ...]) -> Layers | None:
    """Layers of `Qwen4ExpMTP`: one where config.json does not say, and full attention all of them."""
    if (
        not config.has("mtp_num_hidden_layers")
        and config.count("num_nextn_predict_layers", 1, smallest=0) != 1
    ):
        # vLLM then checks the number of drafted tokens against the one key and builds layers by the other.
        return None
    return (attention,) * config.draft_layers("mtp_num_hidden_layers", 1) or None


READERS: Mapping[str, Reader] = {
    "Qwen4ExpForCausalLM": _qwen4_exp,
    "Qwen4ExpForConditionalGeneration": partial(_qwen4_exp, wrapped=True),
}
