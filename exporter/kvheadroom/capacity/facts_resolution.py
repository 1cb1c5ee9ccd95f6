"""From everything that was said about an engine to its facts.

Precedence of a flag: echoed by the running engine > the operator's config > its command line > vLLM's default of the
release, which is marked assumed unless the command line was read whole. Facts are replaced as a whole, never patched.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.facts import (
    SILENT_FLAGS,
    STATE_FLAGS,
    WINDOW_FLAGS,
    CacheFlags,
    Draft,
    EngineFacts,
    Fact,
    MissingFact,
    OffloadFlags,
    OperatorFacts,
    Origin,
    ServerAnswers,
)
from kvheadroom.capacity.gpu_cards import LARGE, LARGEST, BatchDefaults
from kvheadroom.capacity.gpu_catalogue import CPU, GPUS
from kvheadroom.capacity.hardware import missing_for_pool, resolve_hardware
from kvheadroom.capacity.model_config import shown
from kvheadroom.capacity.model_geometry import ModelGeometry, UnknownGeometry, read_geometry
from kvheadroom.capacity.offload_rules import OFFLOADING_CONNECTOR
from kvheadroom.capacity.overhead import estimate_overhead
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.release_rules import ReleaseRules, rules_for
from kvheadroom.capacity.said_flags import SaidFlags, unread_flags
from kvheadroom.capacity.speculation import plan_draft
from kvheadroom.capacity.stored_model import ModelFiles, TensorInventory
from kvheadroom.capacity.weights import plan_weights

DEFAULT_OVERHEAD_BYTES = 12 * 10**9


def resolve_facts(
    *,
    operator: OperatorFacts,
    answers: ServerAnswers,
    echoed: EchoedFlags,
    model_files: ModelFiles | None,
    model_files_missing: MissingFact | None = None,
    draft_tensors: TensorInventory | None = None,
    command_line: CommandLine | None = None,
    local_gpu: str | None = None,
    sizes_weights: bool = True,
) -> EngineFacts:
    """Facts of one engine from everything that was said about it.

    Args:
        model_files_missing: why `model_files` is None.
        draft_tensors: of a draft model's checkpoint, None where they are not known.
        command_line: of a server on this machine; None where it could not be read.
        local_gpu: the card of this machine that it runs on, by its name in the catalogue.
        sizes_weights: make weights that nobody said from config.json; it takes time, and is of use only where the pool
            is what they leave over.
    """
    said = SaidFlags(operator.flags, command_line)
    flags = said.values
    rules = rules_for(answers.version)
    missing: list[MissingFact] = []
    obstacles: list[str] = []

    hardware = resolve_hardware(operator, command_line, answers.version, local_gpu)
    gpu, platform, hbm_bytes = hardware.gpu, hardware.platform, hardware.hbm_bytes
    model: ModelGeometry | None = None
    if model_files is None:
        if model_files_missing is not None:
            missing.append(model_files_missing)
    else:
        config = {key: value for key, value in model_files.config.items() if key not in rules.unread_keys}
        geometry = read_geometry(config)
        if isinstance(geometry, UnknownGeometry):
            obstacles.append(geometry.reason)
        else:
            model = geometry

    if flags.get("hf_overrides"):
        obstacles.append(f"the flag hf_overrides={shown(flags['hf_overrides'])} is not modelled")
    draft = plan_draft(flags.get("speculative_config"), model, draft_tensors)
    if isinstance(draft, str):
        obstacles.append(draft)
        draft = Draft()
    elif "speculative_config" not in flags and not said.is_whole:
        draft = Draft(note="none (vLLM's default)")
    kv_cache_memory_bytes = said.pool_bytes(echoed.kv_cache_memory_bytes, on_cpu=gpu == CPU)
    override = said.optional("num_gpu_blocks_override", echoed.num_gpu_blocks_override)
    weights_bytes = _weights(operator, model_files)
    if kv_cache_memory_bytes is None and override is None:
        missing += missing_for_pool(gpu, hbm_bytes, weights_bytes, model_files)

    max_model_len = said.optional("max_model_len", answers.max_model_len, Origin.SERVER)
    if max_model_len is None and model is not None and model.usual_context is not None:
        max_model_len = Fact(
            model.usual_context, Origin.ASSUMED, f"{model.usual_context} (the longest of config.json)"
        )
    if max_model_len is None:
        missing.append(
            MissingFact(
                "max_model_len",
                "the server did not tell it at /v1/models",
                "set `flags: {max_model_len: N}`, or `api_key_file` if the server asks for a key",
            )
        )

    if max_model_len is not None and (draft.longest_context or max_model_len.value) < max_model_len.value:
        obstacles.append(
            f"the draft model takes {draft.longest_context} tokens at most, and max_model_len is {max_model_len.value}; "
            f"say max_model_len: {draft.longest_context} or less, as vLLM would use it"
        )

    default_block_size = 128 if platform.value == CPU else 16
    batched_tokens = _batched_tokens(said, gpu, max_model_len, model, rules)
    offload = _offload_flags(flags, echoed)
    facts = EngineFacts(
        rules=rules,
        version=None if answers.version is None else Fact(answers.version, Origin.SERVER),
        model_folder=None
        if model_files is None
        else Fact(
            model_files.folder,
            Origin.ASSUMED if model_files.assumed_because else Origin.MODEL_FILES,
            model_files.assumed_because,
        ),
        model_files=model_files,
        model=model,
        max_model_len=max_model_len,
        platform=platform,
        gpu=gpu,
        capability=None if gpu is None or gpu == CPU else GPUS[gpu].capability,
        tensor_parallel_size=said.fact("tensor_parallel_size", None, 1),
        pipeline_parallel_size=said.fact("pipeline_parallel_size", None, 1),
        decode_context_parallel_size=said.fact("decode_context_parallel_size", None, 1),
        prefill_context_parallel_size=said.fact("prefill_context_parallel_size", None, 1),
        data_parallel_size=said.fact("data_parallel_size", None, 1),
        enable_expert_parallel=said.fact("enable_expert_parallel", None, False),  # noqa: FBT003
        kv_cache_dtype=said.fact("kv_cache_dtype", echoed.kv_cache_dtype, "auto"),
        dtype=said.fact("dtype", None, "auto"),
        flags=_cache_flags(flags, echoed, offload),
        offload=offload,
        draft=draft,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=_num_seqs(said, gpu, batched_tokens),
        block_size=said.fact("block_size", echoed.block_size, default_block_size),
        gpu_memory_utilization=said.fact(
            "gpu_memory_utilization",
            echoed.gpu_memory_utilization,
            rules.default_gpu_memory_utilization,
        ),
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=override,
        hbm_bytes=hbm_bytes,
        marketed_bytes=hardware.marketed_bytes,
        weights_bytes=weights_bytes,
        overhead_bytes=Fact(operator.overhead_bytes, Origin.CONFIG)
        if operator.overhead_bytes is not None
        else Fact(
            DEFAULT_OVERHEAD_BYTES,
            Origin.ASSUMED,
            f"{DEFAULT_OVERHEAD_BYTES / 1e9:g} GB (`overhead_gb`, a guess until it is measured)",
        ),
        silent_flags=tuple(_silent_flags(said, echoed, model)),
        missing=tuple(missing),
        command_line=command_line,
        told_flags=tuple(said.told(echoed, kv_cache_memory_bytes)),
        obstacles=tuple(obstacles),
    )
    facts = replace(facts, obstacles=(*facts.obstacles, *unread_flags(facts, said, echoed, answers)))
    facts = _with_overhead(facts)
    unsized = weights_bytes is None and hbm_bytes is not None and facts.pool_from_hbm
    return _with_weights(facts) if sizes_weights and unsized else facts


def _with_overhead(facts: EngineFacts) -> EngineFacts:
    """With the overhead that the model's shapes and the scheduler's limits make likely; where they are not known, the guess stays."""
    if not facts.overhead_bytes.assumed or not facts.pool_from_hbm:
        return facts
    estimate = estimate_overhead(facts)
    if isinstance(estimate, str):
        return facts
    note = (
        f"{estimate.total_bytes / 1e9:.2f} GB (`overhead_gb`; estimated, {estimate.low_bytes / 1e9:.1f} to "
        f"{estimate.high_bytes / 1e9:.1f} in eight of ten public starts)"
    )
    return replace(
        facts,
        overhead_bytes=Fact(estimate.total_bytes, Origin.ESTIMATED, note),
        overhead_estimate=estimate,
    )


def _with_weights(facts: EngineFacts) -> EngineFacts:
    """With the weights that config.json makes, where their rules are known."""
    if facts.has_empty_stages:
        return facts
    plan = plan_weights(facts)
    if isinstance(plan, str):
        told = (
            replace(fact, why=f"config.json does not tell the weights ({plan}), and {fact.why}")
            if fact.fact == "weights_bytes"
            else fact
            for fact in facts.missing
        )
        return replace(facts, missing=tuple(told))
    unread = "" if facts.model_files is None else facts.model_files.weights_unknown
    note = f"{plan.total_bytes / 1e9:.2f} GB, as config.json makes them" + (f" ({unread})" if unread else "")
    return replace(
        facts,
        weights_bytes=Fact(plan.total_bytes, Origin.ASSUMED, note),
        missing=tuple(fact for fact in facts.missing if fact.fact != "weights_bytes"),
    )


def _cache_flags(flags: Mapping[str, Any], echoed: EchoedFlags, offload: OffloadFlags) -> CacheFlags:
    skipped = echoed.kv_cache_dtype_skip_layers
    if skipped is None:
        skipped = tuple(flags.get("kv_cache_dtype_skip_layers") or ())
    prefix_caching = echoed.enable_prefix_caching
    if prefix_caching is None:
        prefix_caching = flags.get("enable_prefix_caching")
    return CacheFlags(
        attention_backend=_backend(flags.get("attention_backend")),
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=flags.get("enable_chunked_prefill"),
        disable_hybrid_kv_cache_manager=bool(flags.get("disable_hybrid_kv_cache_manager")),
        hybrid_manager_wanted=flags.get("disable_hybrid_kv_cache_manager") is False,
        async_scheduling=flags.get("async_scheduling") is not False,
        async_wanted=flags.get("async_scheduling") is True,
        expert_parallel=bool(flags.get("enable_expert_parallel")),
        kv_cache_dtype_skip_layers=skipped,
        mamba_cache_dtype=flags.get("mamba_cache_dtype") or "auto",
        mamba_ssm_cache_dtype=flags.get("mamba_ssm_cache_dtype") or "auto",
        mamba_block_size=flags.get("mamba_block_size"),
        max_num_seqs=flags.get("max_num_seqs"),
        offloading=_offloads(offload),
        connector=bool(offload.connector or offload.size_gib),
        enforce_eager=bool(flags.get("enforce_eager")),
    )


def _offloads(offload: OffloadFlags) -> bool:
    """Whether the connector is vLLM's own, which `--kv-offloading-size` puts in the place of any other."""
    if offload.size_gib:
        return offload.backend != "lmcache"
    return (offload.connector or {}).get("kv_connector") == OFFLOADING_CONNECTOR


def _offload_flags(flags: Mapping[str, Any], echoed: EchoedFlags) -> OffloadFlags:
    size = echoed.kv_offloading_size
    return OffloadFlags(
        size_gib=flags.get("kv_offloading_size") if size is None else size,
        backend=echoed.kv_offloading_backend or flags.get("kv_offloading_backend"),
        connector=flags.get("kv_transfer_config"),
    )


def _backend(name: str | None) -> str | None:
    """As vLLM reads it: in whatever case, `auto` is its own choice (`AttentionConfig.validate_backend_before`)."""
    return None if name is None or name.lower() == "auto" else name.upper()


def _silent_flags(
    said: SaidFlags, echoed: EchoedFlags, model: ModelGeometry | None
) -> Iterator[tuple[str, str]]:
    """Flags that may matter for this model and that nobody said, with vLLM's default."""
    if said.is_whole:
        return
    candidates = dict(SILENT_FLAGS)
    if model is not None and model.has_windows:
        candidates |= WINDOW_FLAGS
    if model is not None and model.has_states:
        candidates |= STATE_FLAGS
    for name, default in candidates.items():
        told = name == "kv_cache_dtype_skip_layers" and echoed.kv_cache_dtype_skip_layers is not None
        if name not in said.values and not told:
            yield name, default


def _batched_tokens(
    said_flags: SaidFlags,
    gpu: str | None,
    max_model_len: Fact[int] | None,
    model: ModelGeometry | None,
    rules: ReleaseRules,
) -> Fact[int] | None:
    """`--max-num-batched-tokens`; vLLM's default goes by the memory of the GPU (engine/arg_utils.py)."""
    flags = said_flags.values
    said = said_flags.optional("max_num_batched_tokens", None)
    if said is not None:
        return said
    batch = _batch_defaults(flags, gpu)
    if batch is None:
        return None
    if batch is LARGEST and not rules.largest_batches:
        batch = LARGE
    tokens, seqs = batch.max_num_batched_tokens, flags.get("max_num_seqs") or batch.max_num_seqs
    if max_model_len is not None:
        if flags.get("enable_chunked_prefill") is False:
            tokens = max(tokens, max_model_len.value)
        if model is not None:
            tokens = max(tokens, model.stack.largest_item_tokens)
        tokens = min(tokens, seqs * max_model_len.value)
    return Fact(tokens, Origin.DEFAULT, f"{tokens} (vLLM's default on this hardware)")


def _batch_defaults(flags: Mapping[str, Any], gpu: str | None) -> BatchDefaults | None:
    """What vLLM schedules at once where no flag says it; None when only a GPU's name would tell."""
    if gpu == CPU:
        world = (flags.get("tensor_parallel_size") or 1) * (flags.get("pipeline_parallel_size") or 1)
        return BatchDefaults(2048 * world, 128 * world)
    return None if gpu is None else GPUS[gpu].batch


def _num_seqs(said_flags: SaidFlags, gpu: str | None, batched_tokens: Fact[int] | None) -> Fact[int] | None:
    """`--max-num-seqs`; vLLM's default is never more than the tokens of a step (engine/arg_utils.py)."""
    said = said_flags.optional("max_num_seqs", None)
    if said is not None:
        return said
    batch = _batch_defaults(said_flags.values, gpu)
    if batch is None:
        return None
    seqs = batch.max_num_seqs if batched_tokens is None else min(batch.max_num_seqs, batched_tokens.value)
    return Fact(seqs, Origin.DEFAULT, f"{seqs} (vLLM's default on this hardware)")


def _weights(operator: OperatorFacts, model_files: ModelFiles | None) -> Fact[int] | None:
    if operator.weights_bytes is not None:
        return Fact(operator.weights_bytes, Origin.CONFIG)
    if model_files is not None and model_files.weights_bytes is not None:
        return Fact(model_files.weights_bytes, Origin.MODEL_FILES)
    return None
