"""DeepSeek-V4: latent vectors of a window in every layer, and in most layers one vector for many tokens beside them.

Sources: `models/deepseek_v4/attention.py`, `compressor.py`, `nvidia/mtp.py` of vLLM 0.33.0, and
`v1/attention/backends/mla/sparse_swa.py`; which layer compresses how: `DeepseekV4Config` of transformers 5.
"""

from collections.abc import Mapping

from kvheadroom.capacity.families.text_config import SLIDING
from kvheadroom.capacity.layer_stack import LayerStack, ModelConfig, Reader
from kvheadroom.capacity.layers import (
    CacheLayer,
    CompressedIndexerLayer,
    CompressedLatentLayer,
    CompressorStateLayer,
    SlidingLatentLayer,
)

# Kernels exist for these alone (compressor.py).
_HEAD_DIM = 512
_INDEX_HEAD_DIM = 128
_SPARSE_RATIO = 4
_HEAVY_RATIO = 128

_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"

# DeepseekV4Config: how older checkpoints say the kind of a layer, how much each kind compresses, and what it takes
# where nothing is said: the first layers heavy, then in turns.
_KIND_OF_RATIO = {0: SLIDING, _SPARSE_RATIO: _SPARSE, _HEAVY_RATIO: _HEAVY}
_DEFAULT_RATES = {_SPARSE: _SPARSE_RATIO, _HEAVY: _HEAVY_RATIO}
_FIRST_HEAVY = 2
_OLD_RATE_KEYS = {"compress_rate_csa": _SPARSE, "compress_rate_hca": _HEAVY}


def _deepseek_v4(config: ModelConfig) -> LayerStack:
    if config.count("vision_n_layers", 0, smallest=0):
        raise config.bad("vision_n_layers", "makes it a model that sees, which is not modelled")
    head_dim, index_head_dim = config.count("head_dim"), config.count("index_head_dim")
    if head_dim != _HEAD_DIM:
        raise config.bad("head_dim", f"is {head_dim}, only {_HEAD_DIM} is modelled")
    if index_head_dim != _INDEX_HEAD_DIM:
        raise config.bad("index_head_dim", f"is {index_head_dim}, only {_INDEX_HEAD_DIM} is modelled")
    window = SlidingLatentLayer(head_dim=head_dim, window=config.count("sliding_window"))
    caches: dict[int, tuple[CacheLayer, ...]] = {
        0: (window,),
        _SPARSE_RATIO: (
            CompressedIndexerLayer(head_dim=index_head_dim, ratio=_SPARSE_RATIO),
            CompressorStateLayer(head_dim=index_head_dim, ratio=_SPARSE_RATIO),
            window,
            CompressedLatentLayer(head_dim=head_dim, ratio=_SPARSE_RATIO),
            CompressorStateLayer(head_dim=head_dim, ratio=_SPARSE_RATIO),
        ),
        _HEAVY_RATIO: (
            window,
            CompressedLatentLayer(head_dim=head_dim, ratio=_HEAVY_RATIO),
            CompressorStateLayer(head_dim=head_dim, ratio=_HEAVY_RATIO),
        ),
    }
    rates = _rates(config)
    mtp_layers = config.draft_layers()
    return LayerStack(
        layers=tuple(caches[rates.get(kind, 0)] for kind in _kinds(config)),
        num_kv_heads=1,
        head_size=head_dim,
        latent=True,
        # Layers of multi-token prediction never compress.
        mtp=(caches[0],) * mtp_layers if mtp_layers else None,
        mtp_modules=mtp_layers > 1,
    )


def _rates(config: ModelConfig) -> dict[str, int]:
    """Tokens per vector for each kind of layer."""
    section = config.section("compress_rates")
    if section is None:
        rates = dict(_DEFAULT_RATES)
    else:
        rates = {
            kind: section.count(kind, smallest=0)
            for kind in section.values
            if kind in _KIND_OF_RATIO.values()
        }
    for key, kind in _OLD_RATE_KEYS.items():
        if config.has(key):
            rates[kind] = config.count(key, smallest=0)
    for kind, rate in rates.items():
        if rate not in _KIND_OF_RATIO:
            raise config.bad("compress_rates", f"says {rate} for {kind}, which no kernel of vLLM does")
    return rates


def _kinds(config: ModelConfig) -> list[str]:
    """The kind of each layer; lists may go on for the layers of multi-token prediction."""
    layers = config.layers()
    kinds, key = config.words("layer_types"), "layer_types"
    if kinds is None:
        ratios, key = config.counts("compress_ratios", smallest=0), "compress_ratios"
        if ratios is None:
            return [_HEAVY if layer < _FIRST_HEAVY or layer % 2 == 0 else _SPARSE for layer in range(layers)]
        kinds = [_KIND_OF_RATIO.get(ratio, f"ratio {ratio}") for ratio in ratios]
    if len(kinds) < layers:
        raise config.bad(key, f"has {len(kinds)} entries for {layers} layers")
    unknown = sorted(set(kinds) - set(_KIND_OF_RATIO.values()))
    if unknown:
        raise config.bad(key, f"holds {unknown[0]:.60}, which vLLM does not know")
    return kinds[:layers]


READERS: Mapping[str, Reader] = {"DeepseekV4ForCausalLM": _deepseek_v4}
