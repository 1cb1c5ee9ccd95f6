"""Facts -> the layout of the KV cache: bytes of a token, bytes of a block, blocks of a session.

Sources: vLLM 0.33.0 `v1/kv_cache_interface.py` (AttentionSpec.page_size_bytes, FullAttentionSpec),
`config/model.py` (get_num_kv_heads), `platforms/cpu.py` (block size), `v1/core/kv_cache_utils.py`.
"""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.model_geometry import ModelGeometry

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How the KV cache of one GPU is cut, with every number that led there.

    Attributes:
        kv_heads_per_gpu: after tensor parallelism; at least 1 (heads are replicated beyond that).
        kv_dtype_bytes: bytes of one K or V element.
        bytes_per_token: all layers, one GPU.
        bytes_per_block: `bytes_per_token * block_size`, one GPU.
        num_kv_groups: KV cache groups that share the pool; 1 for full attention.
    """

    num_layers: int
    kv_heads_per_gpu: int
    head_size: int
    kv_dtype: str
    kv_dtype_bytes: int
    block_size: int
    bytes_per_token: int
    bytes_per_block: int
    num_kv_groups: int = 1

    def blocks_per_session(self, tokens: int) -> int:
        """Blocks that one session of `tokens` tokens holds."""
        return -(-tokens // self.block_size)

    def with_block_size(self, block_size: int) -> "KvLayout":
        """The same cache cut into blocks of another size, e.g. the one that the engine really uses."""
        return KvLayout(
            num_layers=self.num_layers,
            kv_heads_per_gpu=self.kv_heads_per_gpu,
            head_size=self.head_size,
            kv_dtype=self.kv_dtype,
            kv_dtype_bytes=self.kv_dtype_bytes,
            block_size=block_size,
            bytes_per_token=self.bytes_per_token,
            bytes_per_block=self.bytes_per_token * block_size,
            num_kv_groups=self.num_kv_groups,
        )


def plan_layout(facts: EngineFacts) -> KvLayout | str | None:
    """The layout vLLM would choose; a string says why it cannot be predicted; None when facts are missing."""
    model = facts.model
    if facts.obstacles or model is None:
        return None
    kv_dtype = _resolve_kv_dtype(facts, model)
    if kv_dtype not in KV_DTYPE_BYTES:
        return (
            f"the rules of kv_cache_dtype={facts.kv_cache_dtype.value} are not known to this version"
            if kv_dtype is not None
            else "the checkpoint carries a KV-cache scheme of its own, which this version does not model; "
            "set `flags: {kv_cache_dtype: fp8}` if vLLM's start-up log says so"
        )
    kv_heads = max(1, model.num_kv_heads // facts.tensor_parallel_size.value)
    bytes_per_token = model.num_layers * 2 * kv_heads * model.head_size * KV_DTYPE_BYTES[kv_dtype]
    return KvLayout(
        num_layers=model.num_layers,
        kv_heads_per_gpu=kv_heads,
        head_size=model.head_size,
        kv_dtype=kv_dtype,
        kv_dtype_bytes=KV_DTYPE_BYTES[kv_dtype],
        block_size=facts.block_size.value,
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_token * facts.block_size.value,
    )


def _resolve_kv_dtype(facts: EngineFacts, model: ModelGeometry) -> str | None:
    """`auto` is the dtype the model runs in; None when the checkpoint's own scheme would decide.

    A float32 checkpoint runs in 16 bits unless `--dtype` says otherwise (config/model.py
    `_resolve_auto_dtype`); so does one that names no dtype.
    """
    if facts.kv_cache_dtype.value != "auto":
        return facts.kv_cache_dtype.value
    if model.declares_kv_scheme:
        return None
    if facts.dtype.value != "auto":
        return facts.dtype.value
    if model.dtype in (None, "float32", "float"):
        return "bfloat16"
    return model.dtype
