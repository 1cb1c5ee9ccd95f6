"""One planning case -> one answer: `kvheadroom plan --cases`, and whoever uses the core as a library.

A case is `{id, config, flags, gpu, vllm_version, available_bytes, lengths}`; the answer has exactly one of the three
forms of the reference: planned, refused, unknown.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvheadroom.capacity.facts import (
    NO_LENGTH_TO_FIT,
    PARALLEL_FLAGS,
    EngineFacts,
    OperatorFacts,
    ServerAnswers,
)
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpu_catalogue import GPUS, catalogue_name, not_modelled_because
from kvheadroom.capacity.kv_cache import KvLayout, Refusal, plan_layout
from kvheadroom.capacity.model_config import shown
from kvheadroom.capacity.parallelism import MOST_GPUS
from kvheadroom.capacity.prediction import PredictedPool, plan_pool
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.release_rules import rules_for
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.capacity.weights import target_bytes

_SIZES = (*PARALLEL_FLAGS, "data_parallel_size")
_COUNTS = (
    "block_size",
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
    "enforce_eager",
    "trust_remote_code",
)
_CONNECTORS = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_CONNECTOR_KEYS = frozenset(
    {
        "enable_permute_local_kv",
        "engine_id",
        "kv_buffer_device",
        "kv_connector",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "kv_load_failure_policy",
        "kv_port",
        "kv_role",
    }
)
# Types that neither transformers 5.19 nor vLLM 0.33.0 has a configuration class for: the repository brings one.
_NEED_REMOTE_CODE = frozenset(
    {
        "arctic",
        "baichuan",
        "bailing_hybrid",
        "bailing_moe",
        "bailing_moe_v2",
        "exaone",
        "internlm2",
        "internlm3",
        "iquestcoder",
        "mimo",
        "minicpm",
        "nemotron-nas",
        "orion",
        "pangu_ultra_moe",
        "phi3_v",
        "plamo2",
        "rwkv7",
        "solar",
        "telechat3",
        "teleflm",
        "xverse",
    }
)
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


def assumed_release(case: Mapping[str, Any]) -> str | None:
    """Why the rules that a case is planned by are an assumption; None where its release is verified."""
    version = case.get("vllm_version")
    if version is None:
        return "a case without vllm_version: the rules of the newest known release are taken"
    return rules_for(version).assumed_because if isinstance(version, str) else None


def _one_line(reason: str) -> str:
    """A reason may repeat words of the case, whatever they hold."""
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def _answer(case: Mapping[str, Any]) -> dict[str, Any]:
    flags = _flags(case.get("flags"))
    config, version = case.get("config"), case.get("vllm_version")
    if not isinstance(config, Mapping):
        raise _UnknownCaseError("`config` is no mapping (a parsed config.json)")
    if version is not None and not isinstance(version, str):
        raise _UnknownCaseError(f"`vllm_version` is {shown(version)}; a word such as 0.33.0 is needed")
    if needs_remote_code(config) and not flags.get("trust_remote_code"):
        error = f"the configuration of {shown(config.get('model_type'))} is the repository's own code: trust_remote_code"
        return {"refused": True, "error": error}
    auto_fit = flags.get("max_model_len") in (-1, "auto")
    if auto_fit:
        del flags["max_model_len"]
    length = flags.get("max_model_len")
    facts = resolve_facts(
        operator=OperatorFacts(flags=flags, gpu=_gpu(case)),
        answers=ServerAnswers(version=version),
        echoed=EchoedFlags(),
        model_files=ModelFiles(folder="", config=config),
        sizes_weights=False,
    )
    if facts.obstacles:
        raise _UnknownCaseError("; ".join(facts.obstacles))
    if facts.model is None:
        raise _UnknownCaseError("the model is not known")
    layout = plan_layout(facts)
    if isinstance(layout, Refusal):
        return {"refused": True, "error": "; ".join(layout.reasons)}
    usual = facts.model.usual_context
    if usual is None:
        raise _UnknownCaseError(facts.model.context_unknown)
    if auto_fit and facts.model.takes_any_length:
        return {
            "refused": True,
            "error": NO_LENGTH_TO_FIT,
        }
    if isinstance(layout, str) or layout is None:
        raise _UnknownCaseError(layout or "the layout is not known")
    pool = plan_pool(
        layout,
        _available(case, facts, layout),
        flags.get("num_gpu_blocks_override"),
        length or usual,
        fit_length=auto_fit,
        reserves_null_block=facts.rules.reserves_null_block,
    )
    if pool is None:
        raise _UnknownCaseError("`available_bytes` is missing")
    return _planned(layout, pool, _lengths(case), _weights(facts))


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Whether vLLM asks for `--trust-remote-code` before it reads the configuration (transformers_utils/config.py)."""
    classes, kind = config.get("auto_map"), config.get("model_type")
    return (
        isinstance(classes, Mapping)
        and "AutoConfig" in classes
        and isinstance(kind, str)
        and kind in _NEED_REMOTE_CODE
    )


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
        spelt = unknown[0].lstrip("-").replace("-", "_")
        hint = f"; write it {spelt}" if spelt in _KNOWN else ""
        raise _UnknownCaseError(f"the flag {unknown[0][:80]} is not known to this version{hint}")
    for names, is_right, wanted in _FLAG_TYPES:
        for name in names:
            if name in flags and not is_right(flags[name]):
                raise _UnknownCaseError(f"the flag {name} is {shown(flags[name])}; {wanted} is needed")
    return flags


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_parallel_size(value: Any) -> bool:
    return _is_count(value) and value <= MOST_GPUS


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_length(value: Any) -> bool:
    return _is_count(value) or value == "auto" or (isinstance(value, int) and value == -1)


def _is_connector(value: Any) -> bool:
    """KVTransferConfig of vLLM 0.33.0 `config/kv_transfer.py`; the names of `kv_connector/factory.py`."""
    if not isinstance(value, Mapping):
        return False
    name, module = value.get("kv_connector"), value.get("kv_connector_module_path")
    known = isinstance(name, str) and (name in _CONNECTORS or isinstance(module, str))
    if name == "MultiConnector":
        extra = value.get("kv_connector_extra_config")
        known = isinstance(extra, Mapping) and isinstance(extra.get("connectors"), list)
    return known and value.get("kv_role") in _ROLES and not set(map(str, value)) - _CONNECTOR_KEYS


def _is_state_dtype(value: Any) -> bool:
    return isinstance(value, str) and value in ("auto", "float32", "float16", "bfloat16")


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


_FLAG_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SIZES, _is_parallel_size, f"a whole number above 0, up to {MOST_GPUS}"),
    (_COUNTS, _is_count, "a whole number above 0"),
    (_TEXTS, lambda value: isinstance(value, str) and value.strip() != "", "a word"),
    (_STATE_DTYPES, _is_state_dtype, "auto, float32, float16 or bfloat16"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (("kv_cache_dtype_skip_layers",), _is_words, "a list of words"),
    (("kv_offloading_size",), _is_size, "a number of GiB above 0"),
    (("kv_offloading_backend",), lambda value: value in ("native", "lmcache"), "native or lmcache"),
    (("max_model_len",), _is_length, "a whole number above 0, or -1"),
    (("hf_overrides", "speculative_config"), lambda value: isinstance(value, Mapping), "a section"),
    (("kv_transfer_config",), _is_connector, "a section with a kv_connector and a kv_role that vLLM has"),
    # It decides available_bytes, which a case gives itself.
    (("gpu_memory_utilization",), lambda value: _is_size(value) and value <= 1, "a number above 0, up to 1"),
    # vLLM 0.32 took the mode `all` away; the two that are left follow prefix caching, whatever is said.
    (("mamba_cache_mode",), lambda value: value in ("align", "none"), "align or none"),
)
_KNOWN = frozenset(name for names, _, _ in _FLAG_TYPES for name in names)


def _gpu(case: Mapping[str, Any]) -> str:
    given = case.get("gpu")
    if given is None:
        raise _UnknownCaseError("`gpu` is missing")
    name = catalogue_name(given) if isinstance(given, str) else None
    reason = not_modelled_because(given) if isinstance(given, str) else None
    if reason is not None:
        raise _UnknownCaseError(f"`gpu` is {shown(given)}: {reason}")
    if name is None:
        raise _UnknownCaseError(
            f"`gpu` is {shown(given)}; a name of the catalogue is needed ({', '.join(GPUS)}, CPU)"
        )
    return name


def _available(case: Mapping[str, Any], facts: EngineFacts, layout: KvLayout) -> tuple[int, ...] | None:
    stages = len(layout.stage_layers)
    given: Any = case.get("available_bytes")
    values: tuple[Any, ...] = tuple(given) if isinstance(given, list) else (given,) * stages
    if given is not None and (len(values) != stages or not all(_is_count(value) for value in values)):
        raise _UnknownCaseError(
            "`available_bytes` is no number of bytes above 0, or no list of one per stage"
        )
    if facts.kv_cache_memory_bytes is not None:
        return (facts.kv_cache_memory_bytes.value,) * stages
    return None if given is None else values


def _lengths(case: Mapping[str, Any]) -> tuple[int, ...]:
    given = case.get("lengths")
    if given is None:
        return ()
    if not isinstance(given, list) or not all(_is_count(value) for value in given):
        raise _UnknownCaseError("`lengths` is no list of whole numbers above 0")
    return tuple(given)
