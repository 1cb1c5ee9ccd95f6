"""What vLLM refuses at start before it looks at single layers: flags and models that do not go together.

Sources: vLLM 0.33.0 `config/model.py` verify_with_parallel_config and `_get_and_verify_max_len`, `config/parallel.py`,
`config/scheduler.py` verify_max_model_len, `config/vllm.py`, `distributed/utils.py` (divide). What backends and blocks refuse is found where they are chosen (`layer_specs`).
"""

from collections.abc import Iterator

from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.kv_specs import round_up
from kvheadroom.capacity.layers import PooledKeyLayer
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.parallelism import Parallelism, pipeline_stages

# Classes that count their experts before they share them out (each one's MoE block in model_executor/models/).
_COUNT_EXPERTS = frozenset(
    {
        "Ernie4_5_MoeForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Lfm2MoeForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Step3p5ForCausalLM",
    }
)

# Classes that fail where a pipeline stage holds no layer with experts.
_WANT_EXPERTS_EVERYWHERE = frozenset(
    {
        "AfmoeForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Lfm2MoeForCausalLM",
        "PanguUltraMoEForCausalLM",
        "Step3p5ForCausalLM",
    }
)

# Classes whose layers do not all have the same number of query heads.
_UNLIKE_QUERY_HEADS = frozenset(
    {
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
        "WhisperForConditionalGeneration",
    }
)

VOCABULARY_PADDING = 64


def refusals(model: ModelGeometry, facts: EngineFacts) -> tuple[str, ...]:
    """Reasons, each one sentence; empty when vLLM would go on."""
    return tuple(_reasons(model, facts))


def _reasons(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    parallelism, dtype = facts.parallelism, facts.kv_cache_dtype.value
    if parallelism.prefill_context > 1 and model.architecture.startswith("Kimi") and model.has_states:
        yield f"{model.architecture} does not support prefill context parallelism"
    if model.stack.refused:
        yield model.stack.refused
    yield from _length(model, facts)
    yield from _batch(facts)
    yield from _division(model, parallelism.tensor)
    yield from _stages(model, parallelism.pipeline)
    yield from _context_parallelism(model, parallelism)
    if model.architecture.startswith("Qwen4Exp"):
        yield from _qwen4_exp(model, facts)
    if model.architecture.startswith("LongcatFlash") and (
        facts.flags.kv_cache_dtype_skip_layers or dtype.startswith("turboquant_")
    ):
        yield f"layers of {model.architecture} cannot be skipped: each has two attention layers of one number"
    if facts.dtype.value in ("half", "float16") and not model.takes_float16:
        yield f"{model.architecture} does not run in float16"
    block, length = facts.flags.mamba_block_size, facts.max_model_len
    if block and facts.flags.enable_prefix_caching is False and length is not None and block != length.value:
        yield f"mamba_block_size={block} without prefix caching must be max_model_len ({length.value})"
    if facts.flags.enable_chunked_prefill is False:
        yield from _whole_prompts(model, facts)
    if model.stack.latent and dtype.startswith("nvfp4") and not dtype.endswith("_ds_mla"):
        yield f"latent attention does not take kv_cache_dtype={dtype}"


def _length(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """Of a length that was asked for: one that a running server tells has been accepted."""
    length, longest = facts.max_model_len, model.longest_context
    if (
        length is not None
        and length.origin is Origin.CONFIG
        and longest is not None
        and length.value > longest
    ):
        yield f"max_model_len ({length.value}) is greater than the model's longest context ({longest})"


def _batch(facts: EngineFacts) -> Iterator[str]:
    if facts.max_num_batched_tokens is None:
        return
    tokens, seqs, ahead = (
        facts.max_num_batched_tokens.value,
        facts.flags.max_num_seqs,
        facts.draft.lookahead_tokens,
    )
    if seqs is not None and tokens < seqs:
        yield f"max_num_batched_tokens ({tokens}) must not be below max_num_seqs ({seqs})"
    if tokens <= ahead:
        yield f"max_num_batched_tokens ({tokens}) must be above the {ahead} tokens that are drafted per step"


def _qwen4_exp(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """`Qwen4ExpForConditionalGenerationConfig` of models/config.py, and models/qwen4_exp/nvidia/qsa.py."""
    if facts.draft.method not in (None, "mtp", "ngram", "ngram_gpu"):
        yield f"Qwen4-Exp drafts by mtp and ngram only, not by {facts.draft.method}"
    scheme = model.kv_dtype == "auto" and model.kv_dtype_of_attention != "auto"
    if scheme and any(isinstance(cache, PooledKeyLayer) for cache in model.caches()):
        yield "Qwen4-Exp's sparse attention takes no checkpoint with a KV-cache scheme of its own"


def _whole_prompts(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """Without chunked prefill a prompt is scheduled whole (config/scheduler.py)."""
    length = facts.max_model_len
    if length is not None and facts.max_num_batched_tokens is not None:
        tokens = facts.max_num_batched_tokens.value
        if tokens < length.value:
            yield f"without chunked prefill max_num_batched_tokens ({tokens}) must not be below {length.value} (max_model_len)"
    if model.has_states and facts.flags.enable_prefix_caching is not False:
        yield "prefix caching of recurrent states needs chunked prefill"


def _division(model: ModelGeometry, tp: int) -> Iterator[str]:
    if model.num_heads is not None and model.num_heads % tp:
        yield f"the {model.num_heads} attention heads are not divisible by tensor_parallel_size={tp}"
    else:
        unlike = model.architecture in _UNLIKE_QUERY_HEADS
        for heads in model.kv_heads:
            if max(heads, tp) % min(heads, tp) or (tp > heads and not model.stack.repeats_heads):
                yield f"the {heads} KV heads and tensor_parallel_size={tp} do not divide one another"
            elif (model.num_heads or 0) // tp % max(1, heads // tp) and not unlike:
                yield f"the {model.num_heads} attention heads are not divisible by the {heads} KV heads"
    if model.vocab_size is not None:
        padded = round_up(model.vocab_size, VOCABULARY_PADDING)
        if padded % tp:
            yield f"the vocabulary of {padded} padded entries is not divisible by tensor_parallel_size={tp}"
    if model.num_experts and tp > model.num_experts and model.architecture in _COUNT_EXPERTS:
        yield f"tensor_parallel_size={tp} is more than the {model.num_experts} experts"


def _stages(model: ModelGeometry, pp: int) -> Iterator[str]:
    if pp > 1 and not model.stack.pipeline:
        yield f"vLLM has no pipeline parallelism for {model.architecture}"
        return
    if pp > model.num_layers:
        yield f"pipeline_parallel_size={pp} is more than the {model.num_layers} layers"
        return
    first = pipeline_stages(model.num_layers, pp)[0]
    if pp > 1 and first < model.deepstack_layers:
        yield f"the first pipeline stage has {first} layers, and images go into the first {model.deepstack_layers}"
    if model.architecture in _WANT_EXPERTS_EVERYWHERE and first <= model.first_dense_layers:
        yield f"the first pipeline stage has {first} layers, and none of them has experts"


def _context_parallelism(model: ModelGeometry, parallelism: Parallelism) -> Iterator[str]:
    tp, dcp, pcp = parallelism.tensor, parallelism.decode_context, parallelism.prefill_context
    if pcp == 1 and tp % dcp:
        yield f"tensor_parallel_size={tp} is not divisible by decode_context_parallel_size={dcp}"
    elif pcp > 1 and dcp not in (1, pcp, tp * pcp):
        yield (
            f"beside prefill_context_parallel_size={pcp} decode_context_parallel_size must be 1, {pcp} or "
            f"{tp * pcp}, not {dcp}"
        )
    elif pcp > 1 and dcp > 1 and model.is_latent:
        yield "latent attention does not support prefill together with decode context parallelism"
    elif dcp > 1 and not model.stack.latent:
        yield from _shared_heads(model, tp, dcp)


def _shared_heads(model: ModelGeometry, tp: int, dcp: int) -> Iterator[str]:
    heads = model.stack.num_kv_heads
    if model.num_heads is None or heads == 0:
        yield "a model without attention has no context that could be spread"
    elif tp <= heads:
        yield f"decode context parallelism needs tensor_parallel_size ({tp}) above the {heads} KV heads"
    elif dcp > tp // heads:
        yield f"decode_context_parallel_size={dcp} is above tensor_parallel_size / KV heads = {tp // heads}"
    elif model.num_heads // heads % dcp:
        yield (
            f"the {model.num_heads // heads} query heads per KV head are not divisible by "
            f"decode_context_parallel_size={dcp}"
        )
