"""What the layers of a model keep between tokens, as vLLM's model classes declare it: whole model, before any flag.

One class per kind of cache. Numbers are those of the whole model; `kv_specs` divides them over GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

# Backends that vLLM's model classes name themselves: models/minimax_m3/, models/qwen4_exp/,
# model_executor/models/mimo_v2.py.
M3_BACKEND = "MINIMAX_M3_SPARSE"
QSA_BACKEND = "QWEN4_EXP_QSA_TRITON"
DIFFKV_BACKEND = "FLASH_ATTN_DIFFKV"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """MHA, GQA or MQA: K and V of every head, for every token or for the last ones only.

    Attributes:
        num_kv_heads: K/V heads of the whole model, before tensor parallelism.
        head_size: elements of one K head of one token; head_size_v those of V, None where they are the same.
        window: tokens that a sliding-window layer looks back; None: all.
        chunk: tokens of one chunk of chunked local attention; None: none.
        has_sink: attention sinks, which not every attention backend takes.
        backend: the one backend that the model class itself names, None where vLLM chooses.
        in_model_dtype: kept in the model's own dtype, whatever the type of the cache.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    window: int | None = None
    chunk: int | None = None
    has_sink: bool = False
    backend: str | None = None
    in_model_dtype: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """MLA: one latent vector per token, the same on every tensor-parallel rank.

    Attributes:
        sparse: DeepSeek's sparse attention, which has backends of its own.
        owns_indexer: an `IndexerLayer` of its own stands beside it; the others use the one before them.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    sparse: bool = False
    owns_indexer: bool = False

    @property
    def elements(self) -> int:
        """Elements of the latent vector of one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLayer:
    """The key by which sparse attention chooses tokens: 8-bit numbers and a 4-byte scale for each 128 of them.

    Attributes:
        pooled_tokens: tokens that share one key.
    """

    head_dim: int
    pooled_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKeyLayer:
    """A plain key per token beside full attention, in 16 bits whatever the type of the cache (MiniMax-M3)."""

    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayer:
    """A circular buffer per request: the raw keys of the tokens that are not yet pooled (GLM-5.3-Flash)."""

    pooled_tokens: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledKeyLayer:
    """One key for `pooled_tokens` tokens, in bfloat16 whatever the type of the cache (Qwen4-Exp)."""

    head_dim: int
    pooled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RawKeyRingLayer:
    """A circular buffer per request: the raw keys of the tokens that are not yet pooled (Qwen4-Exp).

    Attributes:
        elements: bfloat16 numbers of one token: its key, and its place in an image where positions have three axes.
    """

    elements: int
    pooled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionLayer:
    """K and V of the encoder's tokens, which every request of an encoder-decoder model reserves in full."""

    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArray:
    """One array of a recurrent state on one GPU.

    Attributes:
        elements: on one GPU.
        convolution: it is the convolution's window, in the dtype of the cache; else the recurrent state itself.
    """

    elements: int
    convolution: bool


class NotDivisibleError(ValueError):
    """Tensor parallelism does not divide what it has to."""


def divide(value: int, by: int, what: str) -> int:
    """`value / by`; vLLM refuses what does not divide evenly (distributed/utils.py, `divide`)."""
    if value % by:
        raise NotDivisibleError(f"{what} ({value}) is not divisible by tensor_parallel_size={by}")
    return value // by


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1State:
    """`MambaStateShapeCalculator.mamba1_state_shape` of `layers/mamba/mamba_utils.py` (0.33.0)."""

    intermediate_size: int
    state_size: int
    conv_kernel: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its arrays on one GPU."""
        del speculative_tokens  # Mamba1 keeps no window for drafted tokens
        width = divide(self.intermediate_size, tensor_parallel, "Mamba's inner size")
        yield StateArray(elements=width * (self.conv_kernel - 1), convolution=True)
        yield StateArray(elements=width * self.state_size, convolution=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2State:
    """`mamba2_state_shape` of the same file. One group is repeated, several have to divide (`mamba_mixer2.py`)."""

    intermediate_size: int
    n_groups: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_kernel: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its arrays on one GPU."""
        if self.n_groups % tensor_parallel and self.n_groups != 1:
            raise NotDivisibleError(
                f"the number of Mamba groups ({self.n_groups}) is neither 1 nor divisible by "
                f"tensor_parallel_size={tensor_parallel}"
            )
        groups = self.n_groups if self.n_groups % tensor_parallel == 0 else tensor_parallel
        width = divide(
            self.intermediate_size + 2 * groups * self.state_size,
            tensor_parallel,
            "the width of Mamba's convolution",
        )
        heads = divide(self.num_heads, tensor_parallel, "the number of Mamba heads")
        yield StateArray(elements=width * (self.conv_kernel - 1 + speculative_tokens), convolution=True)
        yield StateArray(elements=heads * self.head_dim * self.state_size, convolution=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaState:
    """`gated_delta_net_state_shape` of the same file."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its arrays on one GPU."""
        width = divide(
            2 * self.head_k_dim * self.num_k_heads + self.head_v_dim * self.num_v_heads,
            tensor_parallel,
            "the width of the delta net's convolution",
        )
        heads = divide(self.num_v_heads, tensor_parallel, "the number of linear-attention value heads")
        yield StateArray(elements=width * (self.conv_kernel - 1 + speculative_tokens), convolution=True)
        yield StateArray(elements=heads * self.head_v_dim * self.head_k_dim, convolution=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaState:
    """`kda_state_shape` of the same file; the recurrent state is float32 unless said otherwise."""

    num_heads: int
    head_dim: int
    conv_kernel: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its arrays on one GPU."""
        width = divide(
            3 * self.num_heads * self.head_dim,
            tensor_parallel,
            "the width of the linear attention's convolution",
        )
        heads = divide(self.num_heads, tensor_parallel, "the number of linear-attention heads")
        yield StateArray(elements=width * (self.conv_kernel - 1 + speculative_tokens), convolution=True)
        yield StateArray(elements=heads * self.head_dim * self.head_dim, convolution=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvState:
    """`short_conv_state_shape` of the same file: a convolution's window and nothing else."""

    width: int
    conv_kernel: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its one array on one GPU."""
        width = divide(self.width, tensor_parallel, "the width of the short convolution")
        yield StateArray(elements=width * (self.conv_kernel - 1 + speculative_tokens), convolution=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionState:
    """`linear_attention_state_shape` of the same file (MiniMax-01, Bailing); stored in the dtype of the cache."""

    num_heads: int
    head_dim: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its one array on one GPU."""
        del speculative_tokens
        yield StateArray(
            elements=self.num_heads // tensor_parallel * self.head_dim * self.head_dim, convolution=True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedConvState:
    """A convolution's window that every tensor-parallel rank keeps whole (`Qwen4ExpPLELayer.get_state_shape`).

    Attributes:
        tokens: tokens of the window, drafted ones aside.
    """

    width: int
    tokens: int

    def arrays(self, tensor_parallel: int, speculative_tokens: int) -> Iterator[StateArray]:
        """Its one array on one GPU."""
        del tensor_parallel
        yield StateArray(elements=self.width * (self.tokens + speculative_tokens), convolution=True)


State = (
    Mamba1State
    | Mamba2State
    | GatedDeltaState
    | KdaState
    | ShortConvState
    | LinearAttentionState
    | ReplicatedConvState
)


class Checkpoint(Enum):
    """Who can save a state inside a prefill, in the mode that serves prefix caching. It takes one block more."""

    NEVER = "never"
    ANYWHERE = "anywhere"
    """On every GPU, after any token: Mamba2's own kernels, and windows of convolutions that are no more than input."""
    FLASHINFER = "flashinfer"
    """FlashInfer's gated delta rule: compute capability 9.0, and 10.x and 12.x with keys of 128 elements. Every 64
    tokens; blocks become a multiple of that."""
    FLASHKDA = "flashkda"
    """FlashKDA: compute capability 9.x, 10.x and 12.x, a model in bfloat16. Blocks are not aligned to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """A recurrent state per request, kept in blocks of the same pool.

    Attributes:
        recurrent_dtype: dtype of the recurrent state of this layer whatever the flags; None: they decide.
        aligned_by_flag: blocks are sized by the flag all the same.
    """

    state: State
    checkpoint: Checkpoint = Checkpoint.NEVER
    recurrent_dtype: str | None = None
    aligned_by_flag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLatentLayer:
    """DeepSeek-V4: one latent vector for `ratio` tokens, the same on every tensor-parallel rank."""

    head_dim: int
    ratio: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLatentLayer:
    """DeepSeek-V4: the latent vectors of the last `window` tokens, in blocks of a size of their own."""

    head_dim: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedIndexerLayer:
    """DeepSeek-V4: the indexer's key of `ratio` tokens, stored as that of an `IndexerLayer`."""

    head_dim: int
    ratio: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorStateLayer:
    """DeepSeek-V4: what the tokens not yet compressed have summed up to, float32, `CompressorStateCache`.

    Attributes:
        head_dim: elements of the vector that comes out.
    """

    head_dim: int
    ratio: int

    @property
    def _overlap(self) -> int:
        """Ratio 4 compresses windows that overlap, so that twice as much is kept."""
        return 2 if self.ratio == 4 else 1

    @property
    def elements(self) -> int:
        """Elements of one token: a value and a score for each of the vector's."""
        return 2 * self._overlap * self.head_dim

    @property
    def window(self) -> int:
        """Tokens that it keeps."""
        return self._overlap * self.ratio

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return 4 if self.ratio == 4 else 8


CacheLayer = (
    AttentionLayer
    | LatentLayer
    | IndexerLayer
    | IndexKeyLayer
    | RingLayer
    | PooledKeyLayer
    | RawKeyRingLayer
    | CrossAttentionLayer
    | StateLayer
    | CompressedLatentLayer
    | SlidingLatentLayer
    | CompressedIndexerLayer
    | CompressorStateLayer
)
"""One cache; a layer of the model has none, one, or several."""
