"""Layers and flags -> the spec of every layer's cache, in vLLM's own order of decisions.

Dtypes, then the backend of every layer, then one block size for all, then the specs. Sources, vLLM 0.33.0:
`model_executor/layers/attention/` (get_kv_cache_spec), `v1/worker/utils.py` (customize_attention_spec),
`v1/attention/backends/utils.py` (resolve_kv_cache_layout).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvheadroom.capacity.backend_query import is_quantized
from kvheadroom.capacity.block_sizes import BlockSizes, PaddedBlocks
from kvheadroom.capacity.cache_bytes import (
    element_bytes,
    head_bytes,
    saved_by,
    state_bytes,
)
from kvheadroom.capacity.cache_settings import (
    DTYPE_BYTES,
    CacheSettings,
    NotModelledError,
    PlacedLayer,
    VllmRefusesError,
)
from kvheadroom.capacity.kv_specs import Kind, KvSpec, ceil_div
from kvheadroom.capacity.layer_backends import BackendChooser, ChosenBackend, shared_layouts
from kvheadroom.capacity.layers import (
    AttentionLayer,
    CacheLayer,
    Checkpoint,
    CompressedIndexerLayer,
    CompressedLatentLayer,
    CompressorStateLayer,
    CrossAttentionLayer,
    IndexerLayer,
    IndexKeyLayer,
    LatentLayer,
    PooledKeyLayer,
    RawKeyRingLayer,
    ReplicatedConvState,
    RingLayer,
    SlidingLatentLayer,
    StateLayer,
)

# What `--kv-cache-dtype` takes (`CacheDType`, config/cache.py), but for what other hardware has alone.
_KV_DTYPES = frozenset({"auto", *DTYPE_BYTES} - {"float32", "float", "half"})

_TURBOQUANT_NATIVE_LAYERS = 2  # at either end (quantization/turboquant/config.py)

# Bytes of one token where a backend packs vector, rotary part and scales into one (mla_attention.py).
_PACKED_LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_PACKED_V4_BYTES = 584  # the same for DeepSeek-V4's vectors of 512 (sparse_swa.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpecs:
    """What the layers keep, decided.

    Attributes:
        specs: one for each layer given, in their order.
        cache_dtype: as vLLM reports it once every layer is built.
        block_outermost: the memory layout keeps all layers' parts of one block together.
    """

    specs: tuple[KvSpec, ...]
    cache_dtype: str
    block_outermost: bool


def plan_specs(layers: Sequence[PlacedLayer], settings: CacheSettings) -> PlannedSpecs:
    """The spec of every layer.

    Raises:
        VllmRefusesError, NotModelledError: with the reason.
    """
    return _Planner(layers, settings).plan()


class _Planner:
    def __init__(self, layers: Sequence[PlacedLayer], settings: CacheSettings) -> None:
        self._layers = layers
        self._settings = settings
        self._cache_dtype = settings.cache_dtype
        if self._cache_dtype not in _KV_DTYPES:
            raise VllmRefusesError(
                f"kv_cache_dtype={self._cache_dtype[:40]} is no type that vLLM has on this hardware"
            )
        if settings.hybrid and self._cache_dtype.startswith("turboquant_"):
            raise NotModelledError("TurboQuant beside recurrent states is not modelled")
        self._skip_layers = settings.skip_layers | self._turboquant_native_layers()

    def plan(self) -> PlannedSpecs:
        seen: dict[tuple[CacheLayer, str], ChosenBackend] = {}
        chosen = []
        chooser = BackendChooser(self._settings)
        for placed in self._layers:
            # A backend that packs its own format changes the type of all that follow.
            self._cache_dtype = chooser.cache_dtype
            key = (placed.layer, self._dtype_of(placed))
            if key not in seen:
                seen[key] = chooser.choose(placed.layer, key[1])
            chosen.append(seen[key])
        self._cache_dtype = chooser.cache_dtype
        block_size, padded = BlockSizes(
            self._layers, self._settings, self._cache_dtype, skips=bool(self._skip_layers)
        ).choose(chosen)
        specs: list[KvSpec] = []
        built: dict[tuple[CacheLayer, str, bool], KvSpec] = {}
        for placed, one in zip(self._layers, chosen, strict=True):
            padded_layer = padded.skipped if self._is_skipped(placed) else None
            place = (placed.layer, one.kv_dtype, padded_layer is not None)
            if place not in built:
                built[place] = self._spec(placed.layer, one, block_size, padded, padded_layer)
                if built[place].unit_bytes < 1:
                    raise NotModelledError("a layer whose cache takes no bytes is not modelled")
            specs.append(built[place])
        return PlannedSpecs(
            specs=tuple(specs),
            cache_dtype=self._cache_dtype,
            block_outermost=self._block_outermost(chosen, specs),
        )

    def _turboquant_native_layers(self) -> frozenset[str]:
        """TurboQuant leaves the first and the last two layers as they are."""
        if not self._cache_dtype.startswith("turboquant_"):
            return frozenset()
        count = 1 + max((placed.index for placed in self._layers if not placed.draft), default=0)
        native = min(_TURBOQUANT_NATIVE_LAYERS, count // 2)
        return frozenset(str(i) for i in (*range(native), *range(count - native, count)))

    def _is_skipped(self, placed: PlacedLayer) -> bool:
        if isinstance(placed.layer, AttentionLayer) and placed.layer.in_model_dtype:
            return False
        if not isinstance(placed.layer, AttentionLayer | LatentLayer) or not self._skip_layers:
            return False
        windowed = isinstance(placed.layer, AttentionLayer) and placed.layer.window is not None
        return (windowed and "sliding_window" in self._skip_layers) or str(placed.index) in self._skip_layers

    def _dtype_of(self, placed: PlacedLayer) -> str:
        plain = isinstance(placed.layer, AttentionLayer) and placed.layer.in_model_dtype
        return "auto" if plain or self._is_skipped(placed) else self._cache_dtype

    def _state_spec(self, layer: StateLayer, block_size: int, padded: PaddedBlocks) -> KvSpec:
        settings = self._settings
        states = [placed.layer for placed in self._layers if isinstance(placed.layer, StateLayer)]
        saves = saved_by(layer, settings)
        if Checkpoint.NEVER in {saved_by(state, settings) for state in dict.fromkeys(states)}:
            # The scheduler takes a checkpoint only where every state can be saved.
            saves = Checkpoint.NEVER
        saved = 0 if saves is Checkpoint.NEVER else 1
        content = state_bytes(layer, settings)
        if padded.state is not None and content > padded.state:
            raise VllmRefusesError(
                f"a recurrent state of {content} bytes is larger than the block of {padded.state} made for it"
            )
        drafted = settings.speculative_tokens
        size = settings.state_block_size
        if size is None:
            size = block_size
        return KvSpec(
            kind=Kind.STATE,
            block_size=size,
            unit_bytes=content,
            padded_bytes=padded.state,
            request_blocks=(2 + drafted + saved) if settings.prefix_caching else 1 + drafted,
            dcp_sharded=False,
            identity=(layer,),
            type_key=(drafted, saved, saves, isinstance(layer.state, ReplicatedConvState)),
        )

    def _spec(
        self,
        layer: CacheLayer,
        chosen: ChosenBackend,
        block_size: int,
        padded: PaddedBlocks,
        skipped: int | None,
    ) -> KvSpec:
        match layer:
            case AttentionLayer():
                return self._attention_spec(layer, chosen, block_size, skipped)
            case CrossAttentionLayer():
                heads = self._local_heads(layer.num_kv_heads)
                unit = heads * head_bytes(
                    layer.head_size, layer.head_size, chosen.kv_dtype, chosen.name, self._settings
                )
                return KvSpec(
                    kind=Kind.CROSS,
                    block_size=block_size,
                    unit_bytes=unit,
                    identity=(heads, layer.head_size, chosen.kv_dtype),
                ).with_kernel(chosen.blocks)
            case LatentLayer():
                return self._latent_spec(layer, chosen, block_size)
            case IndexerLayer():
                row = layer.head_dim + layer.head_dim // 128 * 4
                return KvSpec(
                    kind=Kind.LATENT,
                    block_size=block_size,
                    unit_bytes=row,
                    tokens_per_unit=layer.pooled_tokens,
                    identity=("indexer", row),
                ).with_kernel(chosen.blocks)
            case IndexKeyLayer():
                return KvSpec(
                    kind=Kind.LATENT,
                    block_size=block_size,
                    unit_bytes=layer.head_dim * 2,
                    identity=("index key", layer.head_dim),
                ).with_kernel(chosen.blocks)
            case PooledKeyLayer():
                return KvSpec(
                    kind=Kind.LATENT,
                    block_size=block_size,
                    unit_bytes=layer.head_dim * 2,
                    tokens_per_unit=layer.pooled_tokens,
                    identity=("pooled key", layer.head_dim),
                )
            case RingLayer() | RawKeyRingLayer():
                return self._ring_spec(layer, block_size)
            case StateLayer():
                return self._state_spec(layer, block_size, padded)
            case _:
                return self._deepseek_v4_spec(layer, chosen, block_size)

    def _local_heads(self, num_kv_heads: int) -> int:
        return max(1, num_kv_heads // self._settings.parallelism.tensor)

    def _attention_spec(
        self, layer: AttentionLayer, chosen: ChosenBackend, block_size: int, skipped: int | None
    ) -> KvSpec:
        head_v = layer.head_size if layer.head_size_v is None else layer.head_size_v
        heads = self._local_heads(layer.num_kv_heads)
        spec = KvSpec(
            kind=Kind.FULL,
            block_size=block_size,
            unit_bytes=heads
            * head_bytes(layer.head_size, head_v, chosen.kv_dtype, chosen.name, self._settings),
            identity=(heads, layer.head_size, head_v, chosen.kv_dtype),
        )
        if layer.window is not None:
            budget = skipped or spec.unit_bytes * block_size
            # A window has a block size of its own, the largest of its backend that fits.
            spec = replace(
                spec,
                kind=Kind.WINDOW,
                block_size=chosen.blocks.largest_within(budget // spec.unit_bytes),
                padded_bytes=skipped,
                window=layer.window,
                extra_tokens=self._settings.extra_window_tokens,
            )
        elif layer.chunk is not None:
            spec = replace(spec, kind=Kind.CHUNKED, chunk=layer.chunk)
        return spec.with_kernel(chosen.blocks)

    def _latent_spec(self, layer: LatentLayer, chosen: ChosenBackend, block_size: int) -> KvSpec:
        row = _PACKED_LATENT_BYTES.get(
            chosen.kv_dtype, layer.elements * element_bytes(chosen.kv_dtype, self._settings)
        )
        spec = KvSpec(
            kind=Kind.LATENT,
            block_size=block_size,
            unit_bytes=row,
            identity=("latent", layer.elements, chosen.kv_dtype, layer.owns_indexer),
        )
        if not layer.sparse:
            return spec.with_kernel(chosen.blocks)
        if chosen.name == "FLASHMLA_SPARSE" and is_quantized(chosen.kv_dtype) and self._settings.major != 10:
            return replace(spec, kernel_tokens=64)
        # Sparse kernels read rows, or pages of rows, that lie whole steps apart (sparse_utils.py).
        rows = {
            "FLASHINFER_MLA_SPARSE": 32,
            "FLASHINFER_MLA_SPARSE_SM120": 64,
            "FLASH_ATTN_MLA_SPARSE_FA4": 64,
        }
        return replace(spec, stride_bytes=rows.get(chosen.name, 1) * row)

    def _ring_spec(self, layer: RingLayer | RawKeyRingLayer, block_size: int) -> KvSpec:
        """Room for the drafted tokens beside the pool that is being filled, in bfloat16.

        `Glm5NextTailCache` of models/glm5next/common/attention.py, `QSAKeyStateCache` of
        models/qwen4_exp/common/qsa_cache.py.
        """
        pools = ceil_div(layer.pooled_tokens + self._settings.speculative_tokens, layer.pooled_tokens)
        if isinstance(layer, RingLayer):
            pools = 1 << (pools - 1).bit_length()
            elements = 2 * layer.head_dim  # a key and a gate score
        else:
            elements = layer.elements
        ring = layer.pooled_tokens * pools
        if block_size % ring:
            raise VllmRefusesError(f"blocks of {block_size} tokens are no multiple of the ring of {ring}")
        return KvSpec(
            kind=Kind.RING,
            block_size=ring,
            unit_bytes=elements * 2,
            request_blocks=1,
            dcp_sharded=False,
            identity=(layer,),
            prefix_cacheable=False,
        )

    def _deepseek_v4_spec(self, layer: CacheLayer, chosen: ChosenBackend, block_size: int) -> KvSpec:
        packed = chosen.kv_dtype == "fp8_ds_mla"
        # A block is a whole number of what the kernels read at once (`_apply_alignment_padding`).
        page_multiple = 576 if self._cache_dtype == "fp8_ds_mla" else 512
        element = 1 if chosen.kv_dtype.startswith("fp8") else 2
        match layer:
            case SlidingLatentLayer():
                spec = KvSpec(
                    kind=Kind.LATENT_WINDOW,
                    block_size=64,
                    unit_bytes=_PACKED_V4_BYTES if packed else layer.head_dim * element,
                    window=layer.window,
                    identity=("latent", chosen.kv_dtype),
                )
            case CompressorStateLayer():
                spec = KvSpec(
                    kind=Kind.LATENT_WINDOW,
                    block_size=layer.block_size,
                    unit_bytes=layer.elements * 4,
                    window=layer.window,
                    identity=("state", layer),
                )
            case CompressedIndexerLayer() | CompressedLatentLayer():
                indexer = isinstance(layer, CompressedIndexerLayer)
                if indexer:
                    unit = layer.head_dim + layer.head_dim // 128 * 4
                else:
                    unit = _PACKED_V4_BYTES if packed else layer.head_dim * element
                spec = KvSpec(
                    kind=Kind.LATENT,
                    block_size=block_size,
                    unit_bytes=unit,
                    tokens_per_unit=layer.ratio,
                    identity=("indexer" if indexer else "latent", chosen.kv_dtype),
                    kernel_tokens=256,
                )
                if block_size < layer.ratio:
                    raise VllmRefusesError(
                        f"blocks of {block_size} tokens are smaller than what one vector stands for"
                    )
                if math.gcd(256, block_size) < layer.ratio:
                    raise NotModelledError(
                        f"blocks of {block_size} tokens, of which no whole kernel block can be made, are not modelled"
                    )
            case _:
                raise NotModelledError(f"{type(layer).__name__} is not modelled")
        if spec.window is not None:
            spec = replace(spec, extra_tokens=self._settings.extra_window_tokens)
        return replace(spec, page_multiple=page_multiple)

    def _block_outermost(self, chosen: Sequence[ChosenBackend], specs: Sequence[KvSpec]) -> bool:
        """Whether the layout keeps all layers' parts of a block together (`resolve_kv_cache_layout`)."""
        stages: dict[int, dict[str, ChosenBackend]] = {}
        for placed, one in zip(self._layers, chosen, strict=True):
            stages.setdefault(placed.stage, {})[one.name] = one
        candidates = {shared_layouts(stage.values()) for stage in stages.values()}
        if len(candidates) > 1:
            raise VllmRefusesError(
                "the pipeline stages have attention backends that share no order of layouts"
            )
        layouts = candidates.pop()
        if self._settings.parallelism.decode_context > 1:
            # Layers that are spread and layers that are not need groups of their own.
            addressed = {spec.dcp_sharded for spec in specs if spec.kind not in (Kind.STATE, Kind.RING)}
            if len(addressed) > 1 and len({spec.page_bytes for spec in specs}) > 1:
                layouts = tuple(layout for layout in layouts if layout.startswith("B"))
        if not layouts:
            raise VllmRefusesError("the attention backends share no memory layout")
        return layouts[0].startswith("B")
