"""Which attention backend vLLM takes for a layer, and the block sizes that it leaves open.

Sources, vLLM 0.33.0: `platforms/cuda.py` (order of preference, get_attn_backend_cls), `v1/attention/backend.py`
(validate_configuration) and the backends' own answers in `v1/attention/backends/`. FlashInfer, FlashAttention 2 to 4
and FlashMLA are taken as present, as in vLLM's own images.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from kvheadroom.capacity.backend_query import DEFAULT_BLOCK_SIZE, KernelBlocks, Query, is_quantized
from kvheadroom.capacity.flash_attention import flash_blocks, flash_takes, flash_takes_causal


def _flashinfer_takes(query: Query) -> bool:
    if query.kv_dtype.startswith("nvfp4") and query.capability[0] in (8, 9, 12):
        return query.kv_dtype == "nvfp4" and query.head_size != 64 and not query.has_sink
    return True


def _sparse_fa4_takes(query: Query) -> bool:
    model = query.model
    # With context parallelism the heads of all its ranks are gathered.
    heads = (8, 16, 32, 64) if query.decode_context > 1 else (8, 16, 32, 64, 128)
    return (
        (model.kv_lora_rank, model.qk_rope_head_dim) == (512, 64)
        and model.index_topk is not None
        and model.index_topk % 128 == 0
        and model.query_heads * query.decode_context in heads
        and _sparse_flashinfer_takes(query)
    )


def _sparse_flashinfer_takes(query: Query) -> bool:
    model = query.model
    if (query.prefill_context > 1 and query.decode_context > 1) or model.index_topk is None:
        return False
    if model.qk_rope_head_dim == 0:
        return model.qk_nope_head_dim == 256 and model.kv_lora_rank == 512
    return model.qk_nope_head_dim in (128, 192)


def _flashmla_sparse_takes(query: Query) -> bool:
    major = query.capability[0]
    if query.head_size == 512:
        plain = query.kv_dtype in ("auto", "bfloat16", "fp8_ds_mla")
        return major == 9 and plain and query.model.qk_rope_head_dim == 0
    return query.kv_dtype != "nvfp4_ds_mla" or major == 10


def _sm90_sparse_takes(query: Query) -> bool:
    return query.model.kv_lora_rank == 512 and query.model.qk_rope_head_dim in (0, 64)


def _blocks(exact: tuple[int, ...] = (), multiples_of: int | None = None) -> Callable[[Query], KernelBlocks]:
    blocks = KernelBlocks(exact, multiples_of)
    return lambda _: blocks


_HALF = frozenset({"auto", "float16", "bfloat16"})
_FP8 = frozenset({"fp8", "fp8_e4m3"})
_SIXTEEN_BIT = frozenset({"float16", "bfloat16"})
_LATENT_SIZES = frozenset({320, 512, 576})  # MLACommonBackend, mla_attention.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One attention backend and what it takes.

    Attributes:
        capabilities: CUDA major versions, None: all.
        head_sizes: None: all, or `takes` decides.
        blocks: block sizes of its kernels.
        takes: what no table tells.
        sink: CUDA major versions on which it takes attention sinks.
    """

    name: str
    kv_dtypes: frozenset[str]
    blocks: Callable[[Query], KernelBlocks]
    capabilities: tuple[int, ...] | None = None
    compute_dtypes: frozenset[str] = _SIXTEEN_BIT
    head_sizes: frozenset[int] | None = None
    latent: bool = False
    sparse: bool = False
    sink: tuple[int, ...] = ()
    windows: bool = True
    cross: bool = False
    image_prefix: bool = False
    decode_context: bool = False
    prefill_context: bool = False
    takes: Callable[[Query], bool] = field(default=lambda _: True)

    def model_blocks(self, query: Query) -> KernelBlocks:
        """Block sizes as vLLM asks for them before it knows a layer: by what the model has as a whole."""
        model = query.model
        return self.blocks(
            replace(query, head_size=model.head_size, head_size_v=None, kv_dtype=model.cache_dtype)
        )

    def preferred_block(self, query: Query) -> int:
        """The block size that it asks for where it is the only one (`get_preferred_block_size`)."""
        blocks = self.model_blocks(query)
        # FlashAttention asks for whole kernel blocks where its kernel knows one size only.
        if self.blocks is flash_blocks and blocks.exact:
            return max(DEFAULT_BLOCK_SIZE, blocks.smallest)
        return DEFAULT_BLOCK_SIZE if blocks.takes(DEFAULT_BLOCK_SIZE) else blocks.smallest

    def refuses(self, query: Query) -> str:
        """The first reason why it does not take the layer, empty when it does."""
        major = query.capability[0]
        checks = (
            (self.capabilities is None or major in self.capabilities, "this GPU generation"),
            (query.latent == self.latent and query.sparse == self.sparse, "this kind of attention"),
            (self.head_sizes is None or query.head_size in self.head_sizes, f"heads of {query.head_size}"),
            (query.compute_dtype in self.compute_dtypes, f"a model in {query.compute_dtype}"),
            (query.kv_dtype in self.kv_dtypes, f"kv_cache_dtype={query.kv_dtype}"),
            (
                query.block_size is None or self.model_blocks(query).takes(query.block_size),
                f"blocks of {query.block_size} tokens",
            ),
            (not query.has_sink or major in self.sink, "attention sinks on this GPU"),
            (not query.window or self.windows, "sliding windows"),
            (not query.cross or self.cross, "cross attention"),
            (not query.model.image_prefix or self.image_prefix, "attention both ways over images"),
            (query.prefill_context == 1 or self.prefill_context, "prefill context parallelism"),
            (query.decode_context == 1 or self.decode_context, "decode context parallelism"),
            (self.takes(query), "this combination of head size, KV dtype and GPU"),
        )
        return next((what for passed, what in checks if not passed), "")


_ALL = (7, 8, 9, 10, 11, 12)
_LATENT_DTYPES = _HALF | _FP8

_dense_mla = partial(
    Backend, latent=True, head_sizes=_LATENT_SIZES, decode_context=True, prefill_context=True
)
_sparse_mla = partial(Backend, latent=True, sparse=True, prefill_context=True)

_TABLE = (
    Backend(
        name="FLASH_ATTN",
        kv_dtypes=_HALF | _FP8,
        capabilities=(8, 9, 10, 11, 12),
        blocks=flash_blocks,
        sink=(9, 10),
        cross=True,
        image_prefix=True,
        decode_context=True,
        takes=flash_takes,
    ),
    Backend(
        name="FLASHINFER",
        # The last by its name alone: it is asked for what begins with nvfp4.
        kv_dtypes=_HALF | _FP8 | {"fp8_e5m2", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla"},
        capabilities=(8, 9, 10, 11, 12),
        head_sizes=frozenset({64, 128, 256, 512}),
        # Larger ones are there for Blackwell, but not yet when the layers are asked.
        blocks=_blocks((16, 32, 64)),
        sink=(9, 10, 12),
        decode_context=True,
        takes=_flashinfer_takes,
    ),
    Backend(
        name="TRITON_ATTN",
        kv_dtypes=_HALF
        | _FP8
        | {"fp8_e5m2", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"},
        compute_dtypes=_SIXTEEN_BIT | {"float32"},
        blocks=_blocks(multiples_of=16),
        sink=_ALL,
        cross=True,
        image_prefix=True,
        takes=lambda query: query.head_size >= 32,
    ),
    Backend(
        name="FLEX_ATTENTION",
        kv_dtypes=_HALF,
        compute_dtypes=_SIXTEEN_BIT | {"float32"},
        blocks=_blocks(multiples_of=16),
        image_prefix=True,
    ),
    Backend(
        name="TURBOQUANT",
        kv_dtypes=frozenset(
            {"turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"}
        ),
        blocks=_blocks((16, 32, 64, 128)),
        windows=False,
    ),
    # Images through Triton, everything else through the other.
    Backend(
        name="TRITON_FLASHINFER",
        kv_dtypes=_HALF | _FP8 | {"fp8_e5m2"},
        capabilities=(10,),
        head_sizes=frozenset({256, 512}),
        blocks=_blocks((64,)),
        sink=(10,),
        image_prefix=True,
    ),
    Backend(
        name="TRITON_FLASH_ATTN",
        kv_dtypes=_HALF | _FP8,
        capabilities=(9,),
        head_sizes=frozenset({256, 512}),
        blocks=flash_blocks,
        sink=(9,),
        image_prefix=True,
        takes=flash_takes_causal,
    ),
    _dense_mla(
        name="FLASH_ATTN_MLA",
        kv_dtypes=_HALF,
        capabilities=(9,),
        blocks=_blocks(multiples_of=16),
    ),
    _dense_mla(
        name="FLASHMLA",
        kv_dtypes=_LATENT_DTYPES,
        capabilities=(9,),
        blocks=_blocks((64,)),
    ),
    _dense_mla(
        name="FLASHINFER_MLA",
        kv_dtypes=_LATENT_DTYPES,
        capabilities=(10,),
        blocks=_blocks((32, 64)),
        takes=lambda query: query.model.qk_nope_head_dim in (64, 128, 192),
    ),
    _dense_mla(
        name="TOKENSPEED_MLA",
        kv_dtypes=_FP8,
        capabilities=(10,),
        blocks=_blocks((32, 64)),
        takes=lambda query: (
            (query.model.qk_nope_head_dim, query.model.qk_rope_head_dim, query.model.v_head_dim)
            == (128, 64, 128)
        ),
    ),
    _dense_mla(
        name="CUTLASS_MLA",
        kv_dtypes=_LATENT_DTYPES,
        capabilities=(10,),
        blocks=_blocks((128,)),
    ),
    _dense_mla(
        name="TRITON_MLA",
        kv_dtypes=_LATENT_DTYPES,
        blocks=_blocks(multiples_of=16),
        head_sizes=None,
    ),
    _sparse_mla(
        name="FLASH_ATTN_MLA_SPARSE",
        kv_dtypes=_HALF,
        capabilities=(9,),
        blocks=_blocks(multiples_of=64),
        takes=lambda query: query.model.index_topk is not None,
    ),
    _sparse_mla(
        name="FLASHMLA_SPARSE",
        kv_dtypes=frozenset({"auto", "bfloat16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla"}),
        compute_dtypes=frozenset({"bfloat16"}),
        capabilities=(9, 10),
        head_sizes=frozenset({512, 576}),
        blocks=_blocks(multiples_of=64),
        decode_context=True,
        takes=_flashmla_sparse_takes,
    ),
    _sparse_mla(
        name="FLASHINFER_MLA_SPARSE",
        kv_dtypes=_LATENT_DTYPES,
        capabilities=(10,),
        head_sizes=frozenset({512, 576}),
        blocks=_blocks(multiples_of=32),
        decode_context=True,
        takes=_sparse_flashinfer_takes,
    ),
    _sparse_mla(
        name="FLASH_ATTN_MLA_SPARSE_FA4",
        kv_dtypes=frozenset({"auto", "bfloat16"}),
        compute_dtypes=frozenset({"bfloat16"}),
        capabilities=(10,),
        head_sizes=frozenset({576}),
        blocks=_blocks(multiples_of=64),
        decode_context=True,
        takes=_sparse_fa4_takes,
    ),
    _sparse_mla(
        name="FLASHINFER_MLA_SPARSE_SM90",
        kv_dtypes=frozenset({"auto", "bfloat16"}) | _FP8,
        compute_dtypes=frozenset({"bfloat16"}),
        capabilities=(9,),
        head_sizes=frozenset({512, 576}),
        blocks=_blocks(multiples_of=64),
        takes=_sm90_sparse_takes,
    ),
    _sparse_mla(
        name="FLASHINFER_MLA_SPARSE_SM120",
        kv_dtypes=frozenset({"auto", "fp8_ds_mla"}) | _FP8,
        compute_dtypes=frozenset({"bfloat16"}),
        capabilities=(12,),
        head_sizes=frozenset({512, 576}),
        blocks=_blocks(multiples_of=64),
        takes=lambda query: query.model.index_topk == 2048,
    ),
)
BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in _TABLE}


def choose_backend(query: Query, wanted: str | None) -> Backend | str:
    """The backend that vLLM takes; a string says why it would not start.

    Args:
        wanted: `--attention-backend`, None where vLLM chooses. It is one of BACKENDS.
    """
    if wanted is not None:
        backend = BACKENDS[wanted]
        reason = backend.refuses(query)
        return f"the attention backend {wanted} does not take {reason}" if reason else backend
    for name in _order(query):
        if not BACKENDS[name].refuses(query):
            return BACKENDS[name]
    kind = "sparse latent attention" if query.sparse else "latent attention" if query.latent else "attention"
    asked = f" with blocks of {query.block_size} tokens" if query.block_size is not None else ""
    return f"no attention backend takes {kind} with kv_cache_dtype={query.kv_dtype}{asked} on this GPU"


def _order(query: Query) -> tuple[str, ...]:
    """Names in the order of preference (`_get_backend_priorities` of platforms/cuda.py)."""
    major = query.capability[0]
    if not query.latent:
        rest = ("TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")
        if major == 10:
            images = ("TRITON_FLASHINFER",) if query.model.image_prefix else ()
            return (*images, "FLASHINFER", "FLASH_ATTN", *rest)
        images = ("TRITON_FLASH_ATTN",) if major == 9 and query.model.image_prefix else ()
        return (*images, "FLASH_ATTN", "FLASHINFER", *rest)
    if not query.sparse:
        if major == 10:
            return ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "TRITON_MLA")
        return ("TRITON_MLA",) if major == 12 else ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
    if major == 12:
        return ("FLASHINFER_MLA_SPARSE_SM120",)
    if major == 10:
        if is_quantized(query.kv_dtype):
            return ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
        if query.model.query_heads <= 16:
            return ("FLASH_ATTN_MLA_SPARSE_FA4", "FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
        return ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
    tail = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")
    return (
        ("FLASHINFER_MLA_SPARSE_SM90", *tail)
        if query.head_size == 512
        else (*tail, "FLASHINFER_MLA_SPARSE_SM90")
    )
