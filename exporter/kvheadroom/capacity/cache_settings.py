"""What the cache of a model is planned from: its layers, placed, and the flags and hardware that decide."""

from dataclasses import dataclass

from kvheadroom.capacity.backend_query import ModelTraits
from kvheadroom.capacity.layers import CacheLayer, LatentLayer, StateLayer
from kvheadroom.capacity.parallelism import Parallelism

# Bytes of one stored number (`STR_DTYPE_TO_TORCH_DTYPE`, utils/torch_utils.py).
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_ds_mla": 1,
    "nvfp4": 1,
    "nvfp4_4over6": 1,
    "nvfp4_ds_mla": 1,
    "int4_per_token_head": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "turboquant_k8v4": 1,
    "turboquant_4bit_nc": 1,
    "turboquant_k3v4_nc": 1,
    "turboquant_3bit_nc": 1,
}


class VllmRefusesError(ValueError):
    """Why vLLM would not start, one sentence."""


class NotModelledError(ValueError):
    """What this version does not know how to predict, one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """One cache of the model and where it stands.

    Attributes:
        index: number of the model's layer, by which `--kv-cache-dtype-skip-layers` names it.
        stage: pipeline stage.
        draft: it belongs to the draft of speculative decoding.
    """

    layer: CacheLayer
    index: int
    stage: int
    draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Flags and hardware, as far as they decide the cache.

    Attributes:
        capability: CUDA compute capability; None for vLLM's CPU backend.
        cache_dtype: `--kv-cache-dtype`, with what checkpoint and architecture make of `auto`; said_dtype without.
        compute_dtype: dtype that the model runs in.
        block_size: `--block-size`, None where vLLM chooses.
        attention_backend: `--attention-backend`, or what the architecture's hook sets; None: vLLM chooses.
        skip_layers: `--kv-cache-dtype-skip-layers`.
        prefix_caching: it is on, so states are kept at block boundaries (`mamba_cache_mode` align).
        speculative_tokens: tokens drafted per step.
        extra_window_tokens: tokens that windows keep below their edge, for several draft modules.
        conv_dtype, recurrent_dtype: of recurrent states (`--mamba-cache-dtype`, `--mamba-ssm-cache-dtype`);
            `auto` for the first is the model's own, for the second that of the first.
        state_block_size: tokens of a state's block where they do not follow those of attention.
        recurrent_flag: `--mamba-ssm-cache-dtype` as it was said.
        saves_states: the release saves recurrent states inside a prefill.
        saves_delta_states: the release saves states of gated delta nets inside a prefill.
        least_latent_unit: tokens that a block of latent attention beside states is at least a multiple of.
        hybrid: blocks are sized so that a recurrent state fits one.
        sizing_states: these states; empty: those that layers keep.
        latent: vLLM's `use_mla`.
    """

    capability: tuple[int, int] | None
    parallelism: Parallelism
    cache_dtype: str
    said_dtype: str
    compute_dtype: str
    traits: ModelTraits
    block_size: int | None = None
    attention_backend: str | None = None
    skip_layers: frozenset[str] = frozenset()
    prefix_caching: bool = True
    speculative_tokens: int = 0
    extra_window_tokens: int = 0
    conv_dtype: str = "auto"
    recurrent_dtype: str = "auto"
    state_block_size: int | None = None
    recurrent_flag: str = "auto"
    saves_states: bool = True
    saves_delta_states: bool = True
    least_latent_unit: int = 128
    hybrid: bool = False
    sizing_states: tuple[StateLayer, ...] = ()
    latent: bool = False

    @property
    def major(self) -> int:
        """CUDA major version of the GPU; 0 for vLLM's CPU backend."""
        return 0 if self.capability is None else self.capability[0]


def layer_is_sparse(layer: CacheLayer) -> bool:
    """Whether it is DeepSeek's sparse attention."""
    return isinstance(layer, LatentLayer) and layer.sparse
