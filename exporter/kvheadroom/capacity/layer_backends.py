"""The attention backend of every kind of layer, with those that vLLM's model classes name themselves.

Sources, vLLM 0.33.0: `model_executor/layers/attention/`, `models/deepseek_v4/`, `models/minimax_m3/`,
`models/glm5next/`, `model_executor/models/mimo_v2.py`; `v1/attention/backends/utils.py` for layouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvheadroom.capacity.attention_backends import BACKENDS, choose_backend
from kvheadroom.capacity.backend_query import DEFAULT_BLOCK_SIZE, KernelBlocks, Query, is_quantized
from kvheadroom.capacity.cache_settings import (
    CacheSettings,
    NotModelledError,
    VllmRefusesError,
    layer_is_sparse,
)
from kvheadroom.capacity.layers import (
    M3_BACKEND,
    QSA_BACKEND,
    AttentionLayer,
    CacheLayer,
    CompressedIndexerLayer,
    CompressedLatentLayer,
    CompressorStateLayer,
    CrossAttentionLayer,
    IndexerLayer,
    IndexKeyLayer,
    LatentLayer,
    PooledKeyLayer,
    RawKeyRingLayer,
    RingLayer,
    ShortConvState,
    SlidingLatentLayer,
    StateLayer,
)

CPU_BLOCK_SIZE = 128
CPU_LATENT_BLOCK_SIZE = 16
"""The CPU's latent-attention kernel knows no other (platforms/cpu.py); with AMX there is no such rule."""

# (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) of latent attention that a prefill kernel exists for
# (v1/attention/backends/mla/prefill/).
_PREFILL_HEADS = frozenset({(128, 64, 128), (192, 64, 256), (64, 64, 128), (256, 0, 256)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBackend:
    """A backend that has been chosen for a layer.

    Attributes:
        model_blocks: block sizes as it names them before it knows the layer; blocks: for the layer.
        preferred: the block size that it asks for where it is alone.
        kv_dtype: type of the layer's cache, as the backend stores it.
        layouts: memory layouts that it can read, the one it likes best first; empty: all.
    """

    name: str
    model_blocks: KernelBlocks
    blocks: KernelBlocks
    preferred: int
    kv_dtype: str
    layouts: tuple[str, ...] = ()


class BackendChooser:
    """Chooses layer by layer, as vLLM builds them.

    Attributes:
        cache_dtype: `--kv-cache-dtype` as vLLM reports it: a backend that packs its own format changes it, for all
            layers that are built after it.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self.cache_dtype = settings.cache_dtype

    def choose(self, layer: CacheLayer, kv_dtype: str) -> ChosenBackend:
        """The backend of one layer with a cache of type `kv_dtype`.

        Raises:
            VllmRefusesError, NotModelledError: with the reason.
        """
        if isinstance(layer, StateLayer):
            self._check_state(layer)
            any_size = KernelBlocks(multiples_of=1)
            return ChosenBackend(
                name="state", model_blocks=any_size, blocks=any_size, preferred=1, kv_dtype=kv_dtype
            )
        if self._settings.capability is None:
            return self._choose_on_cpu(layer, kv_dtype)
        if isinstance(layer, IndexerLayer):
            return self._choose_indexer(layer)
        if isinstance(layer, RingLayer):
            return _fixed("KPOOL_TAIL", KernelBlocks(multiples_of=1), kv_dtype="bfloat16", layouts=("BLHNC",))
        if isinstance(layer, PooledKeyLayer | RawKeyRingLayer):
            return self._choose_pooled(layer.pooled_tokens)
        if isinstance(layer, IndexKeyLayer):
            return _fixed("MINIMAX_M3_SPARSE_INDEXER", KernelBlocks(exact=(128,)), kv_dtype="bfloat16")
        if isinstance(layer, CompressedIndexerLayer):
            return _fixed("DEEPSEEK_V4_INDEXER", KernelBlocks(exact=(256,)), layouts=("BLHNC", "BLNHC"))
        if isinstance(layer, CompressedLatentLayer | SlidingLatentLayer | CompressorStateLayer):
            return self._choose_deepseek_v4(layer, kv_dtype)
        return self._choose_attention(layer, kv_dtype)

    def _check_state(self, layer: StateLayer) -> None:
        """On a CPU with AVX512-BF16 vLLM keeps recurrent states in float32, whatever is said (platforms/cpu.py)."""
        recurrent = layer.recurrent_dtype or self._settings.recurrent_dtype
        if (
            self._settings.capability is None
            and recurrent != "float32"
            and not isinstance(layer.state, ShortConvState)
        ):
            raise NotModelledError(
                "the dtype of recurrent states depends on the CPU; say --mamba-ssm-cache-dtype float32"
            )

    def _choose_on_cpu(self, layer: CacheLayer, kv_dtype: str) -> ChosenBackend:
        if isinstance(layer, LatentLayer) and not layer.sparse:
            return _fixed("CPU_MLA", KernelBlocks(exact=(CPU_LATENT_BLOCK_SIZE,)), kv_dtype=kv_dtype)
        if not isinstance(layer, AttentionLayer) or layer.backend is not None:
            raise NotModelledError("this kind of layer is not modelled on vLLM's CPU backend")
        blocks = KernelBlocks(multiples_of=32)
        return _fixed("CPU_ATTN", blocks, kv_dtype=kv_dtype, preferred=CPU_BLOCK_SIZE)

    def _choose_indexer(self, layer: IndexerLayer) -> ChosenBackend:
        if layer.pooled_tokens == 1:
            return _fixed("DEEPSEEK_V32_INDEXER", KernelBlocks(exact=(64,)))
        pages = (64,) if self._settings.major == 12 else (32, 64)
        return _fixed("GLM5NEXT_INDEXER", KernelBlocks(exact=tuple(layer.pooled_tokens * n for n in pages)))

    def _choose_pooled(self, pooled_tokens: int) -> ChosenBackend:
        block_size = self._settings.block_size or DEFAULT_BLOCK_SIZE
        if block_size % pooled_tokens:
            # As the layer is built, before the size is aligned with states.
            raise VllmRefusesError(
                f"block_size={block_size} is no multiple of the {pooled_tokens} tokens that share one index key"
            )
        return _fixed(
            "QWEN4_EXP_EXP_QSA_STATE",
            KernelBlocks(multiples_of=1),
            kv_dtype="bfloat16",
            layouts=("BLNHC", "BLHNC"),
        )

    def _choose_deepseek_v4(
        self, layer: CompressedLatentLayer | SlidingLatentLayer | CompressorStateLayer, kv_dtype: str
    ) -> ChosenBackend:
        """models/deepseek_v4/nvidia/model.py _select_dsv4_attn_cls, attention.py _resolve_dsv4_kv_cache_dtype."""
        wanted = self._settings.attention_backend
        if wanted in ("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"):
            raise VllmRefusesError(f"{wanted} is no attention backend of DeepSeek-V4")
        packed = wanted != "FLASHINFER_MLA_SPARSE_DSV4" or self._settings.major == 12
        if packed and kv_dtype != "auto" and not kv_dtype.startswith("fp8"):
            raise VllmRefusesError(
                f"DeepSeek-V4's packed cache takes kv_cache_dtype fp8 only, not {kv_dtype}; say "
                "--kv-cache-dtype fp8"
            )
        if packed:
            kv_dtype = self.cache_dtype = "fp8_ds_mla"
        if isinstance(layer, CompressorStateLayer):
            return _fixed("CompressorBackend", KernelBlocks(multiples_of=1), kv_dtype=kv_dtype)
        if isinstance(layer, SlidingLatentLayer):
            return _fixed(
                "DEEPSEEK_SPARSE_SWA", KernelBlocks(multiples_of=32), kv_dtype=kv_dtype, preferred=256
            )
        return _fixed("DEEPSEEK_V4_SPARSE", KernelBlocks(exact=(256,)), kv_dtype=kv_dtype)

    def _choose_attention(
        self, layer: AttentionLayer | LatentLayer | CrossAttentionLayer, kv_dtype: str
    ) -> ChosenBackend:
        query = self._query(layer, kv_dtype)
        wanted = self._settings.attention_backend
        if isinstance(layer, AttentionLayer) and layer.backend is not None:
            return self._choose_own(layer.backend, query)
        if wanted is not None and wanted not in BACKENDS:
            raise NotModelledError(f"the attention backend {wanted[:40]} is not modelled")
        backend = choose_backend(query, wanted)
        if isinstance(backend, str):
            # The operator sees only `auto`, and vLLM's message does not say what became of it.
            hidden = (
                kv_dtype != self._settings.said_dtype
                and f"kv_cache_dtype={kv_dtype}" in backend
                and "blocks of" not in backend
            )
            hint = (
                f" ({kv_dtype} is what auto becomes here; say --kv-cache-dtype, e.g. fp8)" if hidden else ""
            )
            raise VllmRefusesError(backend + hint)
        self._check_kernel(backend.name, query)
        if layer_is_sparse(layer):
            kv_dtype = self._sparse_dtype(backend.name, kv_dtype)
        return ChosenBackend(
            name=backend.name,
            model_blocks=backend.model_blocks(query),
            blocks=backend.blocks(query),
            preferred=backend.preferred_block(query),
            kv_dtype=kv_dtype,
            layouts=self._layouts(backend.name),
        )

    def _check_kernel(self, backend: str, query: Query) -> None:
        """What a backend takes when it is asked and refuses when it is built."""
        if backend.startswith("TRITON_") and query.kv_dtype.startswith("fp8") and query.capability < (8, 9):
            raise VllmRefusesError(
                f"kv_cache_dtype={query.kv_dtype} needs compute capability 8.9 with the backend {backend}"
            )
        plain = not is_quantized(query.kv_dtype)
        if backend == "FLASHMLA_SPARSE" and plain and query.decode_context > 1:
            raise VllmRefusesError(
                "sparse attention with decode context parallelism needs an fp8 cache; say --kv-cache-dtype fp8"
            )
        model = query.model
        dims = (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)
        if query.latent and not query.sparse and dims not in _PREFILL_HEADS:
            raise VllmRefusesError(
                f"no kernel for the prefill of latent attention has heads of {dims[0]} + {dims[1]} and {dims[2]}"
            )

    def _layouts(self, backend: str) -> tuple[str, ...]:
        if backend in ("FLASHINFER", "TRITON_FLASHINFER") and self._settings.major == 10:
            return ("LBHNC", "BLHNC")
        return ("LBNHC",) if backend in ("FLEX_ATTENTION", "TURBOQUANT") else ()

    def _choose_own(self, name: str, query: Query) -> ChosenBackend:
        """A backend that the model class names itself."""
        kv_dtype, major = query.kv_dtype, query.capability[0]
        if name == M3_BACKEND:
            if kv_dtype.startswith("nvfp4") and major != 10:
                raise VllmRefusesError(
                    f"MiniMax-M3 takes kv_cache_dtype={kv_dtype} on GPUs of capability 10.x only"
                )
            if kv_dtype.startswith("turboquant_"):
                raise NotModelledError("TurboQuant with MiniMax-M3 is not modelled")
            return _fixed(name, KernelBlocks(exact=(128,)), kv_dtype=kv_dtype)
        if name == QSA_BACKEND:
            return self._choose_qsa(query)
        if kv_dtype.startswith("turboquant_") or self.cache_dtype.startswith("turboquant_"):
            raise NotModelledError(f"TurboQuant with the backend {name} is not modelled")
        wanted = self._settings.attention_backend or ""
        flash = wanted == name if wanted.endswith("_DIFFKV") else major in (9, 10)
        takes_fp8 = major == 9 if flash else query.capability >= (8, 9)
        if is_quantized(kv_dtype) and not (kv_dtype in ("fp8", "fp8_e4m3") and takes_fp8):
            raise VllmRefusesError(
                f"the backend of heads whose K and V differ does not take kv_cache_dtype={kv_dtype}"
            )
        return _fixed(
            name if flash else "TRITON_ATTN_DIFFKV", KernelBlocks(multiples_of=16), kv_dtype=kv_dtype
        )

    def _choose_qsa(self, query: Query) -> ChosenBackend:
        """models/qwen4_exp/nvidia/qsa.py."""
        if self.cache_dtype not in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
            raise VllmRefusesError(
                f"Qwen4-Exp takes kv_cache_dtype bfloat16 and fp8 only, not {self.cache_dtype}"
            )
        if query.compute_dtype != "bfloat16":
            raise VllmRefusesError(f"Qwen4-Exp runs in bfloat16 only, not {query.compute_dtype}")
        if query.decode_context > 1 or query.prefill_context > 1:
            raise VllmRefusesError("Qwen4-Exp's sparse attention does not support context parallelism")
        return _fixed(QSA_BACKEND, KernelBlocks(multiples_of=16), kv_dtype=query.kv_dtype)

    def _query(self, layer: AttentionLayer | LatentLayer | CrossAttentionLayer, kv_dtype: str) -> Query:
        settings = self._settings
        if settings.capability is None:
            raise NotModelledError("the GPU is not known")
        head_size = layer.elements if isinstance(layer, LatentLayer) else layer.head_size
        plain = layer if isinstance(layer, AttentionLayer) else None
        return Query(
            capability=settings.capability,
            head_size=head_size,
            head_size_v=None if plain is None else plain.head_size_v,
            compute_dtype=settings.compute_dtype,
            kv_dtype=kv_dtype,
            model=replace(settings.traits, cache_dtype=self.cache_dtype),
            block_size=settings.block_size,
            latent=isinstance(layer, LatentLayer),
            sparse=layer_is_sparse(layer),
            has_sink=plain is not None and plain.has_sink,
            window=plain is not None and plain.window is not None,
            cross=isinstance(layer, CrossAttentionLayer),
            decode_context=settings.parallelism.decode_context,
            prefill_context=settings.parallelism.prefill_context,
        )

    def _sparse_dtype(self, backend: str, kv_dtype: str) -> str:
        """What a sparse backend stores (`_canonicalize_sparse_mla_kv_cache_dtype`); it changes the reported type."""
        packs = (
            backend == "FLASHMLA_SPARSE" and is_quantized(kv_dtype) and kv_dtype != "nvfp4_ds_mla"
        ) or backend == "FLASHINFER_MLA_SPARSE_SM120"
        if packs and kv_dtype != "fp8_ds_mla":
            self.cache_dtype = "fp8_ds_mla"
        return "fp8_ds_mla" if packs else kv_dtype


# Letters name layers, blocks, heads, tokens and content, from the outside in (KVCacheLayout).
_USUAL_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
_ALL_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def shared_layouts(chosen: Iterable[ChosenBackend]) -> tuple[str, ...]:
    """Layouts that all backends read, best first (`get_supported_kv_cache_layouts`)."""
    asked = [one.layouts for one in chosen if one.layouts] or [_USUAL_LAYOUTS]
    if len(set(asked)) == 1:
        return asked[0]
    firsts = [layouts[0] for layouts in asked]
    shared = [layout for layout in _ALL_LAYOUTS if all(layout in layouts for layouts in asked)]
    return tuple(sorted(shared, key=lambda layout: -firsts.count(layout)))


def _fixed(
    name: str,
    blocks: KernelBlocks,
    *,
    kv_dtype: str = "uint8",
    layouts: tuple[str, ...] = (),
    preferred: int | None = None,
) -> ChosenBackend:
    """A backend that no selector chooses."""
    usual = DEFAULT_BLOCK_SIZE if blocks.takes(DEFAULT_BLOCK_SIZE) else blocks.smallest
    return ChosenBackend(
        name=name,
        model_blocks=blocks,
        blocks=blocks,
        preferred=usual if preferred is None else preferred,
        kv_dtype=kv_dtype,
        layouts=layouts,
    )
