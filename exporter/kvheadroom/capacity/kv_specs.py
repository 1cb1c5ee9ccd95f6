"""One layer's cache as vLLM plans it: how large a block is, and how many of them a request holds.

Source: vLLM 0.33.0 `v1/kv_cache_interface.py`, the classes named at each kind.
"""

import enum
import math
from dataclasses import dataclass, replace

from kvheadroom.capacity.backend_query import KernelBlocks


class Kind(enum.Enum):
    """The classes of `kv_cache_interface.py`, in the words of the field."""

    FULL = "full attention"  # FullAttentionSpec
    LATENT = "latent attention"  # MLAAttentionSpec
    WINDOW = "sliding window"  # SlidingWindowSpec
    LATENT_WINDOW = "latent sliding window"  # SlidingWindowMLASpec
    CHUNKED = "chunked local attention"  # ChunkedLocalAttentionSpec
    STATE = "recurrent state"  # MambaSpec
    RING = "circular buffer"  # CircularBufferSpec
    CROSS = "cross attention"  # CrossAttentionSpec


# What holds every token of a request: one type, whatever the sizes (`uniform_type_base_spec`).
HOLDS_EVERY_TOKEN = frozenset({Kind.FULL, Kind.LATENT})
# What holds the tokens of a batch.
HOLDS_BATCHES = frozenset({Kind.WINDOW, Kind.LATENT_WINDOW, Kind.CHUNKED, Kind.CROSS})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What a request's blocks depend on beside its length.

    Attributes:
        decode_context: GPUs over which the tokens of one context are spread.
        in_flight_tokens: tokens scheduled but not yet settled, which windows must keep
            (`VllmConfig.max_in_flight_tokens`).
        encoder_tokens: tokens that cross attention reserves.
    """

    decode_context: int = 1
    in_flight_tokens: int = 0
    encoder_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """The cache of one layer on one GPU.

    Attributes:
        block_size: tokens of one block.
        unit_bytes: bytes of one stored unit, which covers `tokens_per_unit` tokens; of the whole state of a
            recurrent layer.
        padded_bytes: bytes that a block is padded to; None: none.
        page_multiple: bytes that a block is rounded up to a multiple of; 1: none.
        window, chunk: tokens that sliding-window and chunked layers look back.
        extra_tokens: tokens that a window keeps below its edge (several modules of multi-token prediction).
        request_blocks: blocks of one request where its length does not matter.
        dcp_sharded: decode context parallelism spreads its tokens.
        stride_bytes: bytes that blocks lie apart by a multiple of; None: kernel_tokens decides.
        kernel_tokens: blocks are split into kernel blocks of at most that many tokens, which lie whole.
        identity: what else two layers must have in common to be the same (dtype, heads, role).
        type_key: what two recurrent layers must have in common to be of one type.
        prefix_cacheable: the group takes part in prefix caching, so its block size is one that vLLM reports.
    """

    kind: Kind
    block_size: int
    unit_bytes: int
    tokens_per_unit: int = 1
    padded_bytes: int | None = None
    page_multiple: int = 1
    window: int | None = None
    chunk: int | None = None
    extra_tokens: int = 0
    request_blocks: int | None = None
    dcp_sharded: bool = True
    stride_bytes: int | None = None
    kernel_tokens: int | None = None
    identity: tuple[object, ...] = ()
    type_key: tuple[object, ...] = ()
    prefix_cacheable: bool = True

    @property
    def unpadded_bytes(self) -> int:
        """Bytes of one block as its content needs them (`unpadded_page_size_bytes`)."""
        if self.kind is Kind.STATE:
            return self.unit_bytes
        return self.block_size // self.tokens_per_unit * self.unit_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer (`page_size_bytes`)."""
        if self.padded_bytes is not None:
            return self.padded_bytes
        return round_up(self.unpadded_bytes, self.page_multiple)

    @property
    def stride_multiple(self) -> int:
        """Bytes that blocks lie apart by a multiple of (`get_block_stride_alignment`)."""
        if self.stride_bytes is not None:
            return self.stride_bytes
        if self.kernel_tokens is None:
            return 1
        kernel_block = math.gcd(self.kernel_tokens, self.block_size)
        return 1 if kernel_block == self.block_size else replace(self, block_size=kernel_block).page_bytes

    @property
    def stride(self) -> int:
        """Bytes from one block of this layer to the next where a layer's blocks lie together."""
        return round_up(self.page_bytes, self.stride_multiple)

    def blocks(self, tokens: int, shape: RequestShape) -> int:
        """Blocks of this layer's group that a request of `tokens` tokens needs (`max_memory_usage_bytes`)."""
        if self.request_blocks is not None:
            return self.request_blocks
        if self.kind in (Kind.WINDOW, Kind.LATENT_WINDOW) and self.window is not None:
            held = self.window - 1 + self.extra_tokens + shape.in_flight_tokens
            # One more: the window need not begin where a block does.
            return ceil_div(min(held, tokens), self.block_size) + 1
        if self.kind is Kind.CHUNKED and self.chunk is not None:
            return ceil_div(min(self.chunk + shape.in_flight_tokens, tokens), self.block_size)
        if self.kind is Kind.CROSS:
            return ceil_div(shape.encoder_tokens, self.block_size)
        local = ceil_div(tokens, shape.decode_context) if self.dcp_sharded else tokens
        return ceil_div(local, self.block_size)

    def with_kernel(self, blocks: KernelBlocks) -> "KvSpec":
        """Packed blocks must keep kernel blocks whole where only exact sizes are taken."""
        if self.stride_bytes is None and self.kernel_tokens is None and blocks.multiples_of is None:
            return replace(self, kernel_tokens=max(blocks.exact, default=None))
        return self


def ceil_div(value: int, by: int) -> int:
    """`value / by`, rounded up."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """`value`, rounded up to a multiple."""
    return -(-value // multiple) * multiple
