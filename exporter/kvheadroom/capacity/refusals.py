"""What vLLM refuses at start, with its reason: flags and models that do not go together.

Sources: vLLM 0.33.0 `config/model.py` verify_with_parallel_config, `config/parallel.py`,
`model_executor/models/llama.py` (LlamaAttention), `distributed/utils.py` (divide), `platforms/cuda.py`
(backend selection), `attention/mla_attention.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.model_geometry import (
    FullAttention,
    LatentAttention,
    ModelGeometry,
    SparseAttention,
)
from kvheadroom.capacity.parallelism import Parallelism

VOCABULARY_PADDING = 64

# KV dtypes that no backend of latent attention takes, dense as these models have it (platforms/cuda.py).
_NOT_FOR_LATENT = frozenset({"fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFlags:
    """The flags and the hardware that vLLM's start-up checks look at.

    Attributes:
        capability: CUDA compute capability, None when the GPU is not known.
        attention_backend: as given by the operator, None when vLLM chooses it; `block_size` likewise.
    """

    parallelism: Parallelism
    platform: str
    capability: tuple[int, int] | None
    kv_cache_dtype: str
    attention_backend: str | None
    block_size: int | None


def refusals(model: ModelGeometry, flags: StartFlags) -> tuple[str, ...]:
    """Reasons, each one sentence; empty when vLLM would go on."""
    return tuple(_reasons(model, flags))


def _reasons(model: ModelGeometry, flags: StartFlags) -> Iterator[str]:
    parallelism, kv_cache_dtype, block_size = flags.parallelism, flags.kv_cache_dtype, flags.block_size
    tp, pp = parallelism.tensor, parallelism.pipeline
    if model.num_heads % tp:
        yield f"the {model.num_heads} attention heads are not divisible by tensor_parallel_size={tp}"
    elif isinstance(model.attention, FullAttention):
        heads = model.attention.num_kv_heads
        if max(heads, tp) % min(heads, tp):
            yield f"the {heads} KV heads and tensor_parallel_size={tp} do not divide one another"
    if model.vocab_size is not None:
        padded = -(-model.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
        if padded % tp:
            yield f"the vocabulary of {padded} padded entries is not divisible by tensor_parallel_size={tp}"
    if pp > model.num_layers:
        yield f"pipeline_parallel_size={pp} is more than the {model.num_layers} layers"
    yield from _context_parallelism(model, parallelism)
    half = ("float16", "bfloat16")
    if kv_cache_dtype in half and model.dtype in half and kv_cache_dtype != model.dtype:
        yield f"kv_cache_dtype={kv_cache_dtype} is incompatible with the model's dtype {model.dtype}"
    if isinstance(model.attention, LatentAttention) and kv_cache_dtype in _NOT_FOR_LATENT:
        yield f"no backend of dense latent attention takes kv_cache_dtype={kv_cache_dtype}"
    if isinstance(model.attention, SparseAttention):
        yield from _sparse_attention(model, flags)
    if flags.platform != CPU and block_size is not None and block_size % 16:
        yield f"no attention backend takes blocks of {block_size} tokens; a multiple of 16 is needed"


def _sparse_attention(model: ModelGeometry, flags: StartFlags) -> Iterator[str]:
    kv_cache_dtype, capability = flags.kv_cache_dtype, flags.capability
    if flags.platform == CPU or (capability is not None and capability[0] == 8):
        yield "no attention backend on this hardware supports sparse attention"
    if kv_cache_dtype in ("fp8_e5m2", "nvfp4"):
        yield f"no backend of sparse attention takes kv_cache_dtype={kv_cache_dtype}"
    if flags.block_size == 16:
        yield "no backend of sparse attention takes blocks of 16 tokens"
    glm_on_blackwell = (
        model.architecture == "GlmMoeDsaForCausalLM" and capability is not None and capability[0] == 10
    )
    auto_is_e4m3 = kv_cache_dtype == "auto" and (model.declares_fp8_kv or glm_on_blackwell)
    if flags.attention_backend == "FLASHMLA_SPARSE" and (auto_is_e4m3 or kv_cache_dtype == "fp8_e4m3"):
        # The operator sees only `auto`; vLLM's message names the backend and not what auto became.
        yield (
            f"FLASHMLA_SPARSE does not take fp8_e4m3{', which auto becomes here' if auto_is_e4m3 else ''}; "
            "say --kv-cache-dtype fp8"
        )


def _context_parallelism(model: ModelGeometry, parallelism: Parallelism) -> Iterator[str]:
    tp, dcp, pcp = parallelism.tensor, parallelism.decode_context, parallelism.prefill_context
    latent = not isinstance(model.attention, FullAttention)
    if pcp > 1:
        if not latent:
            yield "no attention backend of this model supports prefill context parallelism"
        elif dcp > 1:
            yield "latent attention does not support prefill together with decode context parallelism"
        return
    if dcp > 1 and tp % dcp:
        yield f"tensor_parallel_size={tp} is not divisible by decode_context_parallel_size={dcp}"
    if dcp > 1 and isinstance(model.attention, FullAttention):
        heads = model.attention.num_kv_heads
        if tp <= heads:
            yield (f"decode context parallelism needs tensor_parallel_size ({tp}) above the {heads} KV heads")
        elif dcp > tp // heads:
            yield f"decode_context_parallel_size={dcp} is above tensor_parallel_size / KV heads = {tp // heads}"
        elif (model.num_heads // heads) % dcp:
            yield (
                f"the {model.num_heads // heads} query heads per KV head are not divisible by "
                f"decode_context_parallel_size={dcp}"
            )
