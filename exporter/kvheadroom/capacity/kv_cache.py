"""Facts -> the layout of the KV cache: bytes of a token, bytes of a block, blocks of a session.

Sources: vLLM 0.33.0 `v1/kv_cache_interface.py` (AttentionSpec.page_size_bytes, FullAttentionSpec, MLAAttentionSpec),
`config/model.py` (get_num_kv_heads), `platforms/cpu.py` (block size), `v1/core/kv_cache_utils.py`.
"""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.model_geometry import (
    FullAttention,
    LatentAttention,
    ModelGeometry,
    SparseAttention,
)
from kvheadroom.capacity.parallelism import pipeline_stages

# Bytes of one element. fp8 stores no scales with the blocks.
KV_DTYPE_BYTES = {
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


CPU_MLA_BLOCK_SIZE = 16
"""The CPU's latent-attention kernel knows no other (vllm/platforms/cpu.py); with AMX there is no such rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How the KV cache of one GPU is cut, with every number that led there.

    Attributes:
        stage_layers: layers with a cache on each pipeline stage; one stage without pipeline parallelism.
        stage_bytes_per_token: bytes that one token takes on a GPU that stores it, for each stage.
        how: the formula of the widest stage in words, for people.
        kv_dtype: vLLM's word for the type of the cache, as it reports it.
        block_size: tokens of one block on one GPU.
        decode_context: GPUs over which the tokens of a context are spread: a block holds that many times more.
        num_kv_groups: KV cache groups that share the pool; 1 where all layers hold every token.
    """

    stage_layers: tuple[int, ...]
    stage_bytes_per_token: tuple[int, ...]
    how: str
    kv_dtype: str
    block_size: int
    decode_context: int = 1
    num_kv_groups: int = 1

    @property
    def stage_bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block on one GPU of each pipeline stage."""
        return tuple(per_token * self.block_size for per_token in self.stage_bytes_per_token)

    @property
    def bytes_per_token(self) -> int:
        """The most that one token takes on a GPU that stores it."""
        return max(self.stage_bytes_per_token)

    @property
    def bytes_per_block(self) -> int:
        """The most that one block takes on a GPU."""
        return max(self.stage_bytes_per_block)

    @property
    def block_tokens(self) -> int:
        """Tokens of one context that a block holds over all GPUs that share it."""
        return self.block_size * self.decode_context

    def blocks_per_session(self, tokens: int) -> int:
        """Blocks that one session of `tokens` tokens holds: ceil(ceil(tokens / dcp) / block_size)."""
        return -(-tokens // self.block_tokens)


class _NotModelled(Exception):  # noqa: N818  it is an answer, not an error
    """Why no layout can be given, one sentence."""


def plan_layout(facts: EngineFacts) -> KvLayout | str | None:
    """The layout vLLM would choose; a string says why it cannot be predicted; None when facts are missing."""
    model = facts.model
    if facts.obstacles or facts.refused or model is None:
        return None
    try:
        if isinstance(model.attention, SparseAttention):
            return _sparse_layout(facts, model, model.attention)
        return _dense_layout(facts, model, model.attention)
    except _NotModelled as reason:
        return str(reason)


def _dense_layout(
    facts: EngineFacts, model: ModelGeometry, attention: FullAttention | LatentAttention
) -> KvLayout:
    kv_dtype = _resolve_kv_dtype(facts, model)
    if kv_dtype not in KV_DTYPE_BYTES:
        raise _NotModelled(f"the rules of a KV cache of type {kv_dtype[:40]!r} are not known to this version")
    size = KV_DTYPE_BYTES[kv_dtype]
    if isinstance(attention, LatentAttention):
        block_size = _latent_block_size(facts, size)
        rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        elements = rank + rope
        how = f"(kv_lora_rank {rank} + qk_rope_head_dim {rope}, a full copy on every GPU)"
    else:
        block_size = facts.block_size.value
        # Heads are shared out; beyond one head per GPU they are replicated, never split.
        heads = max(1, attention.num_kv_heads // facts.tensor_parallel_size.value)
        elements = 2 * heads * attention.head_size
        how = f"2 (K and V) × {heads} KV heads per GPU × {attention.head_size}"
    stages = _stages(facts, model)
    return _layout(
        facts,
        stage_layers=stages,
        stage_bytes=tuple(layers * elements * size for layers in stages),
        how=f"{max(stages)} layers × {how} × {size} B ({kv_dtype})",
        kv_dtype=facts.kv_cache_dtype.value,
        block_size=block_size,
    )


def _sparse_layout(facts: EngineFacts, model: ModelGeometry, attention: SparseAttention) -> KvLayout:
    row, kv_dtype = _sparse_row(facts, model, attention)
    # The indexer's key is stored as 8-bit numbers with a 4-byte scale for each 128 of them (deepseek_v2.py).
    indexer = attention.index_head_dim + attention.index_head_dim // 128 * 4
    stages = _stages(facts, model)
    # A layer of multi-token prediction always owns an indexer.
    owners = (*attention.indexers, *(True,) * facts.draft_layers.value)
    stage_bytes, stage_indexers, first = [], [], 0
    for layers in stages:
        indexers = sum(owners[first : first + layers])
        stage_bytes.append(layers * row + indexers * indexer)
        stage_indexers.append(indexers)
        first += layers
    widest = stage_bytes.index(max(stage_bytes))
    return _layout(
        facts,
        stage_layers=stages,
        stage_bytes=tuple(stage_bytes),
        how=f"{stages[widest]} layers × {row} B ({kv_dtype}, a full copy on every GPU) + "
        f"{stage_indexers[widest]} indexers × {indexer} B",
        kv_dtype=kv_dtype,
        block_size=_sparse_block_size(facts, row),
    )


def _layout(
    facts: EngineFacts,
    *,
    stage_layers: tuple[int, ...],
    stage_bytes: tuple[int, ...],
    how: str,
    kv_dtype: str,
    block_size: int,
) -> KvLayout:
    return KvLayout(
        stage_layers=stage_layers,
        stage_bytes_per_token=stage_bytes,
        how=how,
        kv_dtype=kv_dtype,
        block_size=block_size,
        decode_context=facts.decode_context_parallel_size.value,
    )


def _stages(facts: EngineFacts, model: ModelGeometry) -> tuple[int, ...]:
    """Layers of each stage; those of multi-token prediction stand on the last one."""
    stages = pipeline_stages(model.num_layers, facts.pipeline_parallel_size.value)
    return (*stages[:-1], stages[-1] + facts.draft_layers.value)


def _latent_block_size(facts: EngineFacts, dtype_bytes: int) -> int:
    """Tokens per block of dense latent attention, by the backend that platforms/cuda.py chooses."""
    if facts.platform.value == CPU:
        return CPU_MLA_BLOCK_SIZE
    said = None if facts.block_size.assumed else facts.block_size.value
    major = None if facts.capability is None else facts.capability[0]
    if said is not None:
        if major == 10 and said % 32:
            raise _NotModelled(f"what vLLM makes of blocks of {said} tokens on this GPU is not modelled")
        return said
    if major is None:
        raise _NotModelled(
            "with latent attention on a GPU the attention backend chooses the block size; "
            "say the GPU (`gpu: H200`), or `flags: {block_size: N}` as vLLM's start-up log says"
        )
    if major == 9:
        # FLASHMLA takes fp8, FLASH_ATTN_MLA does not
        return 64 if dtype_bytes == 1 else 16
    # FLASHINFER_MLA on Blackwell for data centres, TRITON_MLA elsewhere
    return 32 if major == 10 else 16


_FP8 = frozenset({"fp8", "fp8_e4m3"})


def _sparse_row(facts: EngineFacts, model: ModelGeometry, attention: SparseAttention) -> tuple[int, str]:
    """(bytes of one token in one layer, the type of the cache as vLLM reports it).

    Backends by GPU generation: platforms/cuda.py; what `auto` becomes: models/config.py (GlmMoeDsa, since
    0.32) and utils/torch_utils.py. The packed rows (656 and 352
    bytes, model_executor/layers/attention/mla_attention.py, 0.33.0) are those of a 512 + 64 vector: they carry their scales and
    an unquantized rope part.
    """
    elements = attention.kv_lora_rank + attention.qk_rope_head_dim
    if facts.capability is None:
        raise _NotModelled("with sparse attention the GPU decides the backend; say it (`gpu: B200`)")
    if elements != 576:
        raise _NotModelled(f"sparse attention with a latent vector of {elements} elements is not modelled")
    major, backend = facts.capability[0], facts.attention_backend
    dtype = facts.kv_cache_dtype.value
    if dtype == "auto" and model.declares_kv_scheme:
        if not model.declares_fp8_kv:
            raise _NotModelled("the checkpoint's own KV-cache scheme is not modelled for sparse attention")
        dtype = "fp8_e4m3"
    elif dtype == "auto" and major == 10 and model.architecture == "GlmMoeDsaForCausalLM":
        dtype = "fp8_e4m3"
    sixteen_bit = dtype in ("auto", "bfloat16") and model.dtype in (None, "bfloat16")
    reported = "auto" if sixteen_bit and model.architecture == "DeepseekV32ForCausalLM" else dtype
    known: dict[tuple[int, str | None], dict[str, tuple[int, str]]] = {
        (9, None): {"fp8": (656, "fp8_ds_mla"), "fp8_ds_mla": (656, "fp8_ds_mla"), "fp8_e4m3": (576, dtype)},
        (9, "FLASHMLA_SPARSE"): {"fp8": (656, "fp8_ds_mla"), "fp8_ds_mla": (656, "fp8_ds_mla")},
        (9, "FLASHINFER_MLA_SPARSE_SM90"): {"fp8": (576, dtype), "fp8_e4m3": (576, dtype)},
        (10, None): {"fp8": (576, dtype), "fp8_e4m3": (576, dtype)},
        (10, "FLASHMLA_SPARSE"): {
            "fp8": (656, "fp8_ds_mla"),
            "fp8_ds_mla": (656, "fp8_ds_mla"),
            "nvfp4_ds_mla": (352, "nvfp4_ds_mla"),
        },
        (12, None): {"auto": (656, "fp8_ds_mla"), "fp8": (656, "fp8_ds_mla")},
    }
    rows = known.get((major, backend))
    if rows is not None and dtype in rows:
        return rows[dtype]
    if sixteen_bit and backend in (None, "FLASHMLA_SPARSE") and major in (9, 10):
        if facts.decode_context_parallel_size.value > 1:
            raise _NotModelled("sparse attention with a 16-bit cache and context parallelism is not modelled")
        if major == 10 or backend is None:
            return 2 * elements, reported
    raise _NotModelled(
        f"kv_cache_dtype={dtype[:40]} with the backend {(backend or 'that vLLM chooses')[:40]} on this GPU is "
        "not modelled for sparse attention"
    )


def _sparse_block_size(facts: EngineFacts, row: int) -> int:
    """64 unless said otherwise; the indexer takes no blocks of 16 (DEEPSEEK_V32_INDEXER)."""
    if facts.block_size.assumed:
        return 64
    said = facts.block_size.value
    on_blackwell = facts.capability is not None and facts.capability[0] == 10
    if said in (64, 128, 256) or (said == 32 and on_blackwell and row == 576):
        return said
    raise _NotModelled(f"sparse attention with blocks of {said} tokens on this GPU is not modelled")


def _resolve_kv_dtype(facts: EngineFacts, model: ModelGeometry) -> str:
    """`auto` is the dtype the model runs in.

    A float32 checkpoint runs in 16 bits unless `--dtype` says otherwise (config/model.py
    `_resolve_auto_dtype`); so does one that names no dtype.
    """
    if facts.kv_cache_dtype.value != "auto":
        return facts.kv_cache_dtype.value
    if model.declares_kv_scheme:
        raise _NotModelled(
            "the checkpoint carries a KV-cache scheme of its own, and what vLLM makes of kv_cache_dtype=auto then "
            "is not modelled by this version; it is with --kv-cache-dtype fp8 or bfloat16 on vLLM's command line"
        )
    if facts.dtype.value != "auto":
        return facts.dtype.value
    if model.dtype in (None, "float32", "float"):
        return "bfloat16"
    return model.dtype
