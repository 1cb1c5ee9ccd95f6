"""Bytes of one head of one token, and of one recurrent state, on one GPU.

Sources, vLLM 0.33.0: the backends' `customize_spec`, `layers/mamba/mamba_utils.py`, `quantization/turboquant/config.py`.
"""

from collections.abc import Iterable

from kvheadroom.capacity.cache_settings import DTYPE_BYTES, CacheSettings, VllmRefusesError
from kvheadroom.capacity.kv_specs import ceil_div, round_up
from kvheadroom.capacity.layers import M3_BACKEND, Checkpoint, NotDivisibleError, ShortConvState, StateLayer

# TurboQuant: bits of a key's and a value's element (quantization/turboquant/config.py).
_TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}


def element_bytes(kv_dtype: str, settings: CacheSettings) -> int:
    """Bytes of one stored number."""
    return DTYPE_BYTES[settings.compute_dtype if kv_dtype == "auto" else kv_dtype]


def head_bytes(head_size: int, head_size_v: int, kv_dtype: str, backend: str, settings: CacheSettings) -> int:
    """Bytes of one K/V head of one token, as the backend packs it (`customize_spec`)."""
    if backend in ("FLASHINFER", M3_BACKEND) and kv_dtype in ("nvfp4", "nvfp4_4over6"):
        # 4-bit numbers and an 8-bit scale for each 16 of them (nvfp4_kv_cache_full_dim).
        return 2 * (head_size // 2 + head_size // 16)
    if backend == "TRITON_ATTN" and kv_dtype.endswith("_per_token_head"):
        if kv_dtype.startswith("int4"):
            head_size, head_size_v = head_size // 2, head_size_v // 2
        return head_size + head_size_v + 2 * 4  # a scale of 4 bytes for K and one for V
    if backend == "TURBOQUANT" and kv_dtype in _TURBOQUANT_BITS:
        key_bits, value_bits = _TURBOQUANT_BITS[kv_dtype]
        key = head_size if key_bits == 8 else ceil_div(head_size * key_bits, 8) + 2
        slot = key + ceil_div(head_size * value_bits, 8) + 4
        return round_up(slot, 2)
    return (head_size + head_size_v) * element_bytes(kv_dtype, settings)


def state_bytes(layer: StateLayer, settings: CacheSettings) -> int:
    """Bytes of one state as its layer keeps it."""
    recurrent = layer.recurrent_dtype or settings.recurrent_dtype
    return _array_bytes(layer, settings.speculative_tokens, recurrent, settings)


def aligned_state_bytes(layer: StateLayer, settings: CacheSettings) -> int:
    """What blocks are sized for (`get_mamba_state_shape_from_config` of the model class)."""
    # It leaves drafted tokens out for short convolutions, and follows the flag where Kimi's own layer does not.
    drafted = 0 if isinstance(layer.state, ShortConvState) else settings.speculative_tokens
    flag = settings.recurrent_flag
    recurrent = flag if layer.aligned_by_flag and flag != "auto" else layer.recurrent_dtype
    return _array_bytes(layer, drafted, recurrent or settings.recurrent_dtype, settings)


def _array_bytes(layer: StateLayer, drafted: int, recurrent: str, settings: CacheSettings) -> int:
    conv = settings.compute_dtype if settings.conv_dtype == "auto" else settings.conv_dtype
    if recurrent == "auto":
        recurrent = conv
    try:
        arrays = layer.state.arrays(settings.parallelism.tensor, drafted)
        return sum(array.elements * DTYPE_BYTES[conv if array.convolution else recurrent] for array in arrays)
    except NotDivisibleError as error:
        raise VllmRefusesError(str(error)) from error


def checkpoint_grid(states: Iterable[StateLayer], settings: CacheSettings) -> int:
    """Tokens that a block must be a multiple of, so that every state can be saved at its end."""
    exported = {saved_by(state, settings) for state in states}
    return 64 if Checkpoint.FLASHINFER in exported and Checkpoint.NEVER not in exported else 1


def saved_by(layer: StateLayer, settings: CacheSettings) -> Checkpoint:
    """How this GPU saves a state inside a prefill."""
    capability = settings.capability or (0, 0)
    checkpoint = layer.checkpoint if settings.saves_states else Checkpoint.NEVER
    if checkpoint is Checkpoint.FLASHINFER:
        kernel = settings.saves_delta_states and _flashinfer_saves(layer, capability)
        return checkpoint if kernel else Checkpoint.NEVER
    flash_kda = capability[0] in (9, 10, 12) and settings.compute_dtype == "bfloat16"
    if checkpoint is Checkpoint.FLASHKDA and not flash_kda:
        return Checkpoint.NEVER
    return checkpoint


def _flashinfer_saves(layer: StateLayer, capability: tuple[int, int]) -> bool:
    key_size = getattr(layer.state, "head_k_dim", None)
    return capability == (9, 0) or (capability[0] in (10, 12) and key_size == 128)
