"""One planning case -> one answer: `kvheadroom plan --cases`, and whoever uses the core as a library.

A case is `{id, config, flags, gpu, vllm_version, available_bytes, lengths}`; the answer has exactly one of the three
forms of the reference: planned, refused, unknown.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvheadroom.capacity.facts import (
    PARALLEL_FLAGS,
    EngineFacts,
    ModelFiles,
    OperatorFacts,
    ServerAnswers,
)
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpu_catalogue import ALIASES, CPU, GPUS
from kvheadroom.capacity.kv_cache import KvLayout, Refusal, plan_layout
from kvheadroom.capacity.model_config import shown
from kvheadroom.capacity.prediction import PredictedPool, plan_pool
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.weights import target_bytes

# Flags that leave the KV cache and the weights as they are.
WITHOUT_EFFECT = frozenset({"mamba_cache_mode", "trust_remote_code"})
_COUNTS = (
    *PARALLEL_FLAGS,
    "block_size",
    "data_parallel_size",
    "kv_cache_memory_bytes",
    "mamba_block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
)
_TEXTS = ("attention_backend", "dtype", "kv_cache_dtype")
_STATE_DTYPES = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
_SWITCHES = (
    "async_scheduling",
    "disable_hybrid_kv_cache_manager",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_prefix_caching",
)
_OTHERS = (
    "hf_overrides",
    "kv_cache_dtype_skip_layers",
    "kv_offloading_size",
    "kv_transfer_config",
    "max_model_len",
    "speculative_config",
)
_KNOWN = frozenset({*_COUNTS, *_TEXTS, *_STATE_DTYPES, *_SWITCHES, *_OTHERS, *WITHOUT_EFFECT})
_LARGEST = 2**53
_LONGEST_REASON = 500


class _UnknownCaseError(Exception):
    pass


def plan_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one case; it never raises for what a case holds."""
    name = case.get("id")
    identity = {"id": name if isinstance(name, str) else None}
    try:
        answer = _answer(case)
    except _UnknownCaseError as reason:
        answer = {"unknown": str(reason)}
    for key in ("error", "unknown"):
        if key in answer:
            answer[key] = _one_line(answer[key])
    return identity | answer


def _one_line(reason: str) -> str:
    """A reason may repeat words of the case, whatever they hold."""
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def _answer(case: Mapping[str, Any]) -> dict[str, Any]:
    flags = _flags(case.get("flags"))
    config, version = case.get("config"), case.get("vllm_version")
    if not isinstance(config, Mapping):
        raise _UnknownCaseError("`config` is no mapping (a parsed config.json)")
    auto_fit = flags.get("max_model_len") in (-1, "auto")
    if auto_fit:
        del flags["max_model_len"]
    length = flags.get("max_model_len")
    facts = resolve_facts(
        operator=OperatorFacts(flags=flags, gpu=_gpu(case)),
        answers=ServerAnswers(version=version if isinstance(version, str) else None),
        echoed=EchoedFlags(),
        model_files=ModelFiles(folder="", config=config),
    )
    if facts.obstacles:
        raise _UnknownCaseError("; ".join(facts.obstacles))
    if facts.model is None:
        raise _UnknownCaseError("the model is not known")
    layout = plan_layout(facts)
    if isinstance(layout, Refusal):
        return {"refused": True, "error": "; ".join(layout.reasons)}
    longest, usual = facts.model.longest_context, facts.model.usual_context
    if longest is None or usual is None:
        raise _UnknownCaseError("config.json does not tell the longest context in a way that is modelled")
    if length is not None and length > longest:
        error = f"max_model_len ({length}) is greater than the model's longest context ({longest})"
        return {"refused": True, "error": error}
    if isinstance(layout, str) or layout is None:
        raise _UnknownCaseError(layout or "the layout is not known")
    pool = plan_pool(
        layout,
        _available(case, facts, layout),
        flags.get("num_gpu_blocks_override"),
        length or usual,
        fit_length=auto_fit,
    )
    if isinstance(pool, str):
        return {"refused": True, "error": pool}
    if pool is None:
        raise _UnknownCaseError("`available_bytes` is missing")
    return _planned(layout, pool, _lengths(case), _weights(facts))


def _weights(facts: EngineFacts) -> int | list[int] | None:
    """The target's weights on the first tensor-parallel rank of each stage, without what a draft adds."""
    stages = target_bytes(facts)
    return None if isinstance(stages, str) else _per_stage(stages)


def _planned(
    layout: KvLayout, pool: PredictedPool, lengths: tuple[int, ...], weights: int | list[int] | None
) -> dict[str, Any]:
    return {
        "kv_cache_dtype": layout.kv_dtype,
        "block_size": layout.block_size,
        "bytes_per_block": _per_stage(layout.stage_bytes_per_block),
        "num_blocks": pool.num_blocks,
        "kv_cache_size_tokens": pool.pool_tokens,
        "max_concurrency": pool.max_concurrency,
        "needed_bytes_for_max_model_len": _per_stage(pool.needed_bytes or ()),
        "boots": pool.boots,
        "estimated_max_model_len": pool.longest_bootable,
        "at_len": {
            str(length): {
                "tokens": int(pool.num_blocks / layout.blocks_per_session(length) * length),
                "concurrency": pool.num_blocks / layout.blocks_per_session(length),
                "blocks_per_request": layout.blocks_per_session(length),
            }
            for length in lengths
        },
        "weight_bytes_rank0": weights,
    }


def _per_stage(values: tuple[int, ...]) -> int | list[int]:
    return values[0] if len(values) == 1 else list(values)


def _flags(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _UnknownCaseError("`flags` is no mapping")
    flags = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(map(str, flags)) - _KNOWN)
    if unknown:
        raise _UnknownCaseError(f"the flag {unknown[0][:80]} is not known to this version")
    for names, is_right, wanted in _FLAG_TYPES:
        for name in names:
            if name in flags and not is_right(flags[name]):
                raise _UnknownCaseError(f"the flag {name} is {shown(flags[name])}; {wanted} is needed")
    return flags


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_state_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in ("auto", "float32", "float16", "bfloat16")


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


_FLAG_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_COUNTS, _is_count, "a whole number above 0"),
    (_TEXTS, lambda value: isinstance(value, str), "a word"),
    (_STATE_DTYPES, _is_state_dtype, "auto, float32, float16 or bfloat16"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (("kv_cache_dtype_skip_layers",), _is_words, "a list of words"),
    (("kv_offloading_size",), _is_size, "a number of GiB above 0"),
    (
        ("max_model_len",),
        lambda value: value in (-1, "auto") or _is_count(value),
        "a whole number above 0, or -1",
    ),
)


def _gpu(case: Mapping[str, Any]) -> str:
    name = case.get("gpu")
    if not isinstance(name, str):
        raise _UnknownCaseError("`gpu` is missing")
    name = ALIASES.get(name, name)
    if name.lower() == CPU:
        return CPU
    if name not in GPUS:
        raise _UnknownCaseError(f"the GPU {shown(name)} is not in the catalogue ({', '.join(GPUS)}, CPU)")
    return name


def _available(case: Mapping[str, Any], facts: EngineFacts, layout: KvLayout) -> tuple[int, ...] | None:
    stages = len(layout.stage_layers)
    given = case.get("available_bytes")
    if facts.kv_cache_memory_bytes is not None:
        given = facts.kv_cache_memory_bytes.value
    if given is None:
        return None
    values = tuple(given) if isinstance(given, list) else (given,) * stages
    if len(values) != stages or not all(_is_count(value) for value in values):
        raise _UnknownCaseError(
            "`available_bytes` is no number of bytes above 0, or no list of one per stage"
        )
    return values


def _lengths(case: Mapping[str, Any]) -> tuple[int, ...]:
    given = case.get("lengths") or []
    if not isinstance(given, list) or not all(_is_count(value) for value in given):
        raise _UnknownCaseError("`lengths` is no list of whole numbers above 0")
    return tuple(given)
