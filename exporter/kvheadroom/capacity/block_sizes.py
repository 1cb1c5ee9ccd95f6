"""One block size for all attention layers, and what layers of other sizes are padded to.

Source: vLLM 0.33.0 `platforms/interface.py` update_block_size_for_backend, and what it calls.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvheadroom.capacity.backend_query import DEFAULT_BLOCK_SIZE
from kvheadroom.capacity.cache_bytes import aligned_state_bytes, checkpoint_grid, element_bytes, head_bytes
from kvheadroom.capacity.cache_settings import (
    CacheSettings,
    NotModelledError,
    PlacedLayer,
    VllmRefusesError,
)
from kvheadroom.capacity.kv_specs import ceil_div, round_up
from kvheadroom.capacity.layer_backends import CPU_BLOCK_SIZE, CPU_LATENT_BLOCK_SIZE, ChosenBackend
from kvheadroom.capacity.layers import StateLayer


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """Bytes that a block of a state, and of a layer left unquantized, is padded to; None: not padded."""

    state: int | None = None
    skipped: int | None = None


class BlockSizes:
    """Decides on the block size once every layer has its backend.

    Attributes of the constructor: the type of the cache as the backends left it, and whether some layers are left
    unquantized.
    """

    def __init__(
        self, layers: Sequence[PlacedLayer], settings: CacheSettings, cache_dtype: str, *, skips: bool
    ) -> None:
        self._layers = layers
        self._settings = settings
        self._cache_dtype = cache_dtype
        self._skips = skips

    def choose(self, chosen: Sequence[ChosenBackend]) -> tuple[int, PaddedBlocks]:
        """Tokens of a block of attention, and what layers of other sizes are padded to."""
        stages: dict[int, dict[str, ChosenBackend]] = {placed.stage: {} for placed in self._layers}
        for placed, one in zip(self._layers, chosen, strict=True):
            if not isinstance(placed.layer, StateLayer):
                stages[placed.stage].setdefault(one.name, one)
        # Every stage decides by the backends of its own layers.
        sizes = {self._block_size_of(list(backends.values())) for backends in stages.values()}
        if len(sizes) > 1:
            raise NotModelledError("pipeline stages that choose different block sizes are not modelled")
        return sizes.pop()

    def _block_size_of(self, backends: Sequence[ChosenBackend]) -> tuple[int, PaddedBlocks]:
        settings = self._settings
        if settings.capability is None and any(one.name == "CPU_MLA" for one in backends):
            return CPU_LATENT_BLOCK_SIZE, PaddedBlocks()
        if not backends:
            return settings.block_size or DEFAULT_BLOCK_SIZE, PaddedBlocks()
        block_size = settings.block_size or self._preferred(backends)
        said, padded = block_size, PaddedBlocks()
        if settings.hybrid:
            block_size, padded = self._aligned_with_states(backends, block_size)
        if self._skips:
            block_size, padded = self._aligned_with_skipped(backends, block_size, padded)
        if block_size != said:
            for one in backends:
                if not one.model_blocks.takes(block_size):
                    raise VllmRefusesError(
                        f"the backend {one.name} does not take blocks of {block_size} tokens"
                    )
        return block_size, padded

    def _preferred(self, backends: Sequence[ChosenBackend]) -> int:
        """The smallest size that every backend takes (`_preferred_block_size_for_backends`)."""
        if len(backends) == 1:
            return backends[0].preferred
        default = CPU_BLOCK_SIZE if self._settings.capability is None else DEFAULT_BLOCK_SIZE
        if all(one.model_blocks.takes(default) for one in backends):
            return default
        sizes = {
            math.lcm(*bases) for bases in itertools.product(*(one.model_blocks.bases for one in backends))
        }
        for size in sorted(sizes):
            if all(one.model_blocks.takes(size) for one in backends):
                return size
        raise VllmRefusesError("the attention backends share no block size")

    def _token_bytes(self, kv_dtype: str, backend: str) -> int:
        """Bytes of one token in one layer with the model's own heads."""
        traits = self._settings.traits
        if self._settings.latent:
            return traits.head_size * element_bytes(kv_dtype, self._settings)
        return (
            head_bytes(traits.head_size, traits.head_size, kv_dtype, backend, self._settings)
            * traits.kv_heads
        )

    def _aligned_with_states(
        self, backends: Sequence[ChosenBackend], block_size: int
    ) -> tuple[int, PaddedBlocks]:
        """A block as large as a state (`_align_hybrid_block_size`)."""
        first = backends[0]
        token_bytes = self._token_bytes(self._cache_dtype, first.name)
        states = [placed.layer for placed in self._layers if isinstance(placed.layer, StateLayer)]
        # The largest: a model may have states of several sizes.
        sizing = self._settings.sizing_states or tuple(dict.fromkeys(states))
        state_bytes = max((aligned_state_bytes(state, self._settings) for state in sizing), default=0)
        if state_bytes == 0:
            return block_size, PaddedBlocks()
        unit = max(first.model_blocks.smallest, block_size)
        if self._settings.latent:
            unit = max(unit, self._settings.least_latent_unit)
        if self._settings.prefix_caching:
            unit = math.lcm(unit, checkpoint_grid(states, self._settings))
        aligned = unit * ceil_div(state_bytes, unit * token_bytes)
        aligned = round_up(aligned, math.lcm(*(one.model_blocks.smallest for one in backends)))
        block_size = max(block_size, aligned)
        page = block_size * token_bytes
        return block_size, PaddedBlocks(state=None if page == state_bytes else page)

    def _aligned_with_skipped(
        self, backends: Sequence[ChosenBackend], block_size: int, padded: PaddedBlocks
    ) -> tuple[int, PaddedBlocks]:
        """A block of the quantized layers that covers one of the others (`_align_heterogeneous_kv_block_size`)."""
        first = backends[0]
        token_bytes = self._flat_token_bytes(self._cache_dtype, first.name)
        skipped_bytes = self._flat_token_bytes("auto", first.name)
        if skipped_bytes <= token_bytes:
            return block_size, padded
        smallest = first.model_blocks.smallest
        unit = max(smallest, block_size)
        needed = max(skipped_bytes * smallest, padded.state or 0)
        block_size = max(block_size, unit * ceil_div(needed, unit * token_bytes))
        page = block_size * token_bytes
        return block_size, PaddedBlocks(state=None if padded.state is None else page, skipped=page)

    def _flat_token_bytes(self, kv_dtype: str, backend: str) -> int:
        # As full attention even for latent attention: that is how vLLM counts here.
        traits = self._settings.traits
        return (
            head_bytes(traits.head_size, traits.head_size, kv_dtype, backend, self._settings)
            * traits.kv_heads
        )
