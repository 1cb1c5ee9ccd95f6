"""What vLLM asks an attention backend, and the block sizes that one answers with.

Source: vLLM 0.33.0 `v1/attention/selector.py` (AttentionSelectorConfig), `v1/attention/backend.py`.
"""

from dataclasses import dataclass

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """The block sizes that a kernel takes: some exact ones, and the multiples of some.

    A larger block is split into kernel blocks, so any multiple of an exact size will do as well.
    """

    exact: tuple[int, ...] = ()
    multiples_of: int | None = None

    @property
    def bases(self) -> tuple[int, ...]:
        """The smallest size of each kind."""
        return self.exact if self.multiples_of is None else (*self.exact, self.multiples_of)

    @property
    def smallest(self) -> int:
        """The smallest block it takes."""
        return min(self.bases)

    def takes(self, block_size: int) -> bool:
        """Whether blocks of that size can be read, split or whole."""
        return any(block_size % base == 0 for base in self.bases)

    def largest_within(self, tokens: int) -> int:
        """The largest unsplit block of at most `tokens` tokens, the smallest of all where none is."""
        sizes = list(self.exact)
        if self.multiples_of is not None:
            sizes.append(max(self.multiples_of, tokens // self.multiples_of * self.multiples_of))
        return max((size for size in sizes if size <= tokens), default=min(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What backends ask of the model as a whole, whatever the layer.

    Attributes:
        head_size: as vLLM takes it for the whole model.
        query_heads, kv_heads: on one GPU.
        qk_nope_head_dim, v_head_dim, index_topk: of latent attention, None where config.json has no such key.
        softcap: the model caps its attention logits.
        image_prefix: attention looks both ways over images.
        flash_version: the FlashAttention version that vLLM's hook for the architecture sets.
        cache_dtype: `--kv-cache-dtype` as resolved for the whole model.
    """

    head_size: int
    query_heads: int
    kv_heads: int
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    kv_lora_rank: int | None = None
    index_topk: int | None = None
    softcap: bool = False
    image_prefix: bool = False
    flash_version: int | None = None
    cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What vLLM asks for: one layer on one kind of GPU.

    Attributes:
        capability: CUDA compute capability.
        compute_dtype: dtype that the model runs in.
        kv_dtype: vLLM's word for the type of this layer's cache.
        block_size: as the operator says it, None where vLLM chooses.
        latent, sparse: MLA, and its sparse kind.
    """

    capability: tuple[int, int]
    head_size: int
    compute_dtype: str
    kv_dtype: str
    model: ModelTraits
    head_size_v: int | None = None
    block_size: int | None = None
    latent: bool = False
    sparse: bool = False
    has_sink: bool = False
    window: bool = False
    cross: bool = False
    decode_context: int = 1
    prefill_context: int = 1


def is_quantized(kv_dtype: str) -> bool:
    """Whether a KV dtype is more than the plain numbers of the model (`is_quantized_kv_cache`)."""
    return kv_dtype not in ("auto", "float16", "bfloat16", "half", "float", "float32")
