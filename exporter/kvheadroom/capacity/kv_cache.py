"""Facts -> the layout of the KV cache: bytes of a token, bytes of a block, blocks of a session.

Sources: vLLM 0.33.0 `v1/kv_cache_interface.py` (AttentionSpec.page_size_bytes, FullAttentionSpec, MLAAttentionSpec),
`config/model.py` (get_num_kv_heads), `platforms/cpu.py` (block size), `v1/core/kv_cache_utils.py`.
"""

from dataclasses import dataclass, replace

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.model_geometry import FullAttention, LatentAttention, ModelGeometry

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
        elements_per_layer: numbers that one layer keeps for one token on one GPU.
        elements_are: how they come about, for people.
        kv_dtype_bytes: bytes of one of them.
        bytes_per_token: all layers, one GPU.
        bytes_per_block: `bytes_per_token * block_size`, one GPU.
        num_kv_groups: KV cache groups that share the pool; 1 where all layers are alike.
    """

    num_layers: int
    elements_per_layer: int
    elements_are: str
    kv_dtype: str
    kv_dtype_bytes: int
    block_size: int
    num_kv_groups: int = 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, one GPU."""
        return self.num_layers * self.elements_per_layer * self.kv_dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers, one GPU."""
        return self.bytes_per_token * self.block_size

    def blocks_per_session(self, tokens: int) -> int:
        """Blocks that one session of `tokens` tokens holds."""
        return -(-tokens // self.block_size)

    def with_block_size(self, block_size: int) -> "KvLayout":
        """The same cache cut into blocks of another size, e.g. the one that the engine really uses."""
        return replace(self, block_size=block_size)


def plan_layout(facts: EngineFacts) -> KvLayout | str | None:
    """The layout vLLM would choose; a string says why it cannot be predicted; None when facts are missing."""
    model = facts.model
    if facts.obstacles or model is None:
        return None
    kv_dtype = _resolve_kv_dtype(facts, model)
    if kv_dtype is None:
        return (
            "the checkpoint carries a KV-cache scheme of its own, and what vLLM makes of kv_cache_dtype=auto then "
            "is not modelled by this version; it is with --kv-cache-dtype fp8 or bfloat16 on vLLM's command line"
        )
    if kv_dtype not in KV_DTYPE_BYTES:
        return f"the rules of a KV cache of type {kv_dtype[:40]!r} are not known to this version"
    block_size = facts.block_size.value
    if isinstance(model.attention, LatentAttention):
        if facts.platform.value == CPU:
            block_size = CPU_MLA_BLOCK_SIZE
        elif facts.block_size.assumed:
            return (
                "with latent attention on a GPU the attention backend chooses the block size, which this "
                "version does not model; set `flags: {block_size: N}` as vLLM's start-up log says"
            )
    elements, elements_are = _elements(model.attention, facts.tensor_parallel_size.value)
    return KvLayout(
        num_layers=model.num_layers,
        elements_per_layer=elements,
        elements_are=elements_are,
        kv_dtype=kv_dtype,
        kv_dtype_bytes=KV_DTYPE_BYTES[kv_dtype],
        block_size=block_size,
    )


def _elements(attention: FullAttention | LatentAttention, tensor_parallel_size: int) -> tuple[int, str]:
    """(elements of one token in one layer on one GPU, how they come about)."""
    if isinstance(attention, LatentAttention):
        rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        return rank + rope, f"(kv_lora_rank {rank} + qk_rope_head_dim {rope}, a full copy on every GPU)"
    # Heads are shared out; beyond one head per GPU they are replicated, never split.
    heads = max(1, attention.num_kv_heads // tensor_parallel_size)
    return (
        2 * heads * attention.head_size,
        f"2 (K and V) × {heads} KV heads per GPU × {attention.head_size}",
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
