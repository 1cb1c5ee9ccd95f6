"""What vLLM refuses at start before it looks at single layers: flags and models that do not go together.

Sources: vLLM 0.33.0 `config/model.py` verify_with_parallel_config and `_get_and_verify_max_len`, `config/parallel.py`,
`config/scheduler.py` verify_max_model_len, `config/vllm.py`, `distributed/utils.py` (divide). What backends and blocks refuse is found where they are chosen (`layer_specs`).
"""

from collections.abc import Iterator

from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.kv_specs import round_up
from kvheadroom.capacity.layers import KdaState, PooledKeyLayer, StateLayer
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

# model_executor/layers/quantization/__init__.py
_METHODS = frozenset(
    {
        "auto-round",  # InCConfig takes it over
        "auto_awq",
        "auto_gptq",
        "awq",
        "awq_marlin",
        "compressed-tensors",
        "deepseek_v4_fp8",
        "experts_int8",
        "fp8",
        "fp8_per_block",
        "fp8_per_channel",
        "fp8_per_tensor",
        "gpt_oss_mxfp4",
        "gptq",
        "gptq_marlin",
        "humming",
        "inc",
        "int8_per_channel_weight_only",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
        "modelopt_mxfp8",
        "moe_wna16",
        "mxfp4",
        "mxfp8",
        "nvfp4_per_token",
        "online",
        "quark",
        "torchao",
    }
)
_DEPRECATED_METHODS = frozenset({"fbgemm_fp8", "fp_quant"})
# Whose `get_supported_act_dtypes` names 16-bit types only.
_WITHOUT_FLOAT32 = frozenset({"auto_awq", "auto_gptq", "awq", "fp8", "gptq"})


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
    yield from _draft(model, facts)
    yield from _quantization(model, facts)
    yield from _scheduling(model, facts)
    yield from _mlp(model, facts)
    yield from _division(model, parallelism.tensor)
    yield from _stages(model, facts)
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
    cached = facts.flags.enable_prefix_caching
    without = cached is False or (cached is None and model.has_states and not model.stack.hybrid)
    if block and without and length is not None and block != length.value:
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


def _draft(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """A draft shares the tensor-parallel GPUs of its target (config/speculative.py; config/model.py for its heads)."""
    draft, tp = facts.draft, facts.tensor_parallel_size.value
    if draft.num_heads is not None and draft.num_heads % tp:
        yield f"the draft's {draft.num_heads} attention heads are not divisible by tensor_parallel_size={tp}"
    elif draft.num_kv_heads is not None and max(draft.num_kv_heads, tp) % min(draft.num_kv_heads, tp):
        yield f"the draft's {draft.num_kv_heads} KV heads and tensor_parallel_size={tp} do not divide one another"
    vocabularies = (draft.vocab_size, model.vocab_size)
    if draft.method == "draft_model" and None not in vocabularies and vocabularies[0] != vocabularies[1]:
        yield f"the draft's vocabulary ({draft.vocab_size}) must be its target's ({model.vocab_size})"


def _quantization(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """`ModelConfig._verify_quantization`; of the releases whose methods were read."""
    method = model.quantization
    if method is None or facts.rules.assumed_because is not None:
        return
    if method in _DEPRECATED_METHODS:
        yield f"the quantization method {method} is deprecated and needs --allow-deprecated-quantization"
    elif method not in _METHODS:
        yield f"vLLM has no quantization method {method[:40]}"
    elif facts.dtype.value in ("float", "float32") and method in _WITHOUT_FLOAT32:
        yield f"the quantization method {method} does not run in float32"


def _may_have_experts(model: ModelGeometry) -> bool:
    """A configuration class of hybrids, and of mixtures of experts, has a number of its own where config.json has none."""
    return bool(model.num_experts) or model.has_states or "moe" in model.architecture.lower()


def _mlp(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """How feed-forward layers are split.

    `divide` of distributed/utils.py, `FusedMoEConfig.__post_init__` of fused_moe/config.py; that blocks with a scale each
    stay whole, where they do not belong to experts, `validate_fp8_block_shape` of quantization/utils/fp8_utils.py.
    """
    tp = facts.tensor_parallel_size.value
    sharing = 1 if facts.flags.expert_parallel else tp * facts.prefill_context_parallel_size.value
    if model.num_experts and model.expert_size and model.expert_size % sharing:
        yield f"the experts' {model.expert_size} inner values are not divisible by the {sharing} GPUs that share them"
    dense = None if _may_have_experts(model) else model.mlp_size
    for size, what in ((dense, "intermediate_size"), (model.shared_size, "the shared experts' inner values")):
        if size and size % tp:
            yield f"{what} ({size}) is not divisible by tensor_parallel_size={tp}"
        elif (
            size and tp > 1 and model.weight_block and any(size // tp % block for block in model.weight_block)
        ):
            blocks = " x ".join(map(str, model.weight_block))
            yield f"{what} ({size}) over {tp} GPUs is no whole number of blocks of {blocks} that have a scale each"


def _scheduling(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    """What flags of scheduling and parallelism exclude (config/vllm.py; config/model.py verify_with_parallel_config)."""
    flags, parallelism, suffix = facts.flags, facts.parallelism, facts.draft.method == "suffix"
    if flags.expert_parallel and not _may_have_experts(model):
        yield f"enable_expert_parallel: {model.architecture} has no experts"
    if suffix and flags.async_wanted:
        yield "suffix decoding does not run with async_scheduling"
    if suffix and parallelism.prefill_context > 1:
        yield "suffix decoding does not run with prefill context parallelism"
    if flags.hybrid_manager_wanted and model.has_chunks and facts.draft.method in ("eagle", "eagle3", "mtp"):
        yield "the hybrid KV cache manager, which is asked for, does not support chunks beside a draft"
    if flags.attention_backend == "FLEX_ATTENTION" and model.architecture.startswith("Gemma3n"):
        yield "FLEX_ATTENTION does not support layers that share the cache of others"
    if flags.mamba_ssm_cache_dtype == "float16" and any(
        isinstance(cache, StateLayer) and isinstance(cache.state, KdaState) for cache in model.caches()
    ):
        yield "the recurrent states of KDA take mamba_ssm_cache_dtype auto, float32 or bfloat16"


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


def _stages(model: ModelGeometry, facts: EngineFacts) -> Iterator[str]:
    pp = facts.parallelism.pipeline
    if pp > 1 and not model.stack.pipeline:
        yield f"vLLM has no pipeline parallelism for {model.architecture}"
        return
    if facts.has_empty_stages:
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
