"""MiniMax-M3: full attention, in most layers with a lightning indexer whose plain key stands before K and V.

Sources: `models/minimax_m3/nvidia/model.py`, `nvidia/mtp.py`, `common/indexer.py` of vLLM 0.33.0.
"""

from collections.abc import Mapping

from kvheadroom.capacity.layer_stack import LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import M3_BACKEND, AttentionLayer, IndexKeyLayer

# One page of the cache is one block that the indexer chooses, and its kernels know one size of head.
_SPARSE_BLOCK_SIZE = 128
_HEAD_SIZE = 128


def _minimax_m3(config: ModelConfig) -> LayerStack:
    sparse_config = config.section("sparse_attention_config")
    if sparse_config is None:
        raise config.bad("sparse_attention_config", "is left out, and which layers are sparse depends on it")
    heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim")
    for section, key, size in (
        (config, "head_dim", _HEAD_SIZE),
        (sparse_config, "sparse_index_dim", _HEAD_SIZE),
        (sparse_config, "sparse_block_size", _SPARSE_BLOCK_SIZE),
        (sparse_config, "sparse_num_index_heads", heads),
    ):
        if section.count(key) != size:
            raise section.bad(key, f"is {section.count(key)}, only {size} is modelled")
    dense = (AttentionLayer(num_kv_heads=heads, head_size=head_dim),)
    sparse = (
        IndexKeyLayer(head_dim=sparse_config.count("sparse_index_dim")),
        AttentionLayer(num_kv_heads=heads, head_size=head_dim, backend=M3_BACKEND),
    )
    frequencies = sparse_config.counts("sparse_attention_freq", smallest=0) or []
    sparse_layers = {layer for layer, frequency in enumerate(frequencies) if frequency}
    # MiniMaxM3TextConfig (transformers_utils/configs/minimax_m3.py) takes one module where none is said.
    mtp_modules = config.draft_layers("num_mtp_modules", 1)
    return LayerStack(
        layers=tuple(sparse if layer in sparse_layers else dense for layer in range(config.layers())),
        num_kv_heads=heads,
        head_size=head_dim,
        # Layers of multi-token prediction are always sparse.
        mtp=(sparse,) * mtp_modules if mtp_modules else None,
        # Not by the number of its modules: `use_multi_module_mtp` (config/speculative.py) reads this key.
        mtp_modules=config.count("num_nextn_predict_layers", 1, smallest=0) > 1,
    )


READERS: Mapping[str, Reader] = {"MiniMaxM3SparseForConditionalGeneration": _minimax_m3}
