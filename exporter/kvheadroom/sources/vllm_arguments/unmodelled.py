"""Flags that change the cache, or what is left for it, by rules that are not modelled here."""

import json
from collections.abc import Iterator, Mapping

Values = Mapping[str, tuple[str, ...] | bool]

# Values that change nothing. `_OFF` stands for a switch that is off, a number that is 0, or nothing at all.
_OFF = frozenset({"", "None", "none", "{}", "0", "0.0"})
_CACHE: Mapping[str, frozenset[str]] = {
    "additional_config": _OFF,
    "config_format": frozenset({"auto", "hf"}),
    "diffusion_config": _OFF,
    "disable_sliding_window": _OFF,
    "engram_config": _OFF,
    "hf_config_path": _OFF,
    "hf_overrides": _OFF,
    "mamba_cache_mode": frozenset(),
    "model_class_overrides": _OFF,
    "model_impl": frozenset({"auto", "vllm"}),
    "num_lookahead_slots": _OFF,
    "num_speculative_tokens": _OFF,
    "prefix_match_unit": _OFF,
    "speculative_model": _OFF,
    "use_replayssm": _OFF,
}
_WEIGHTS: Mapping[str, frozenset[str]] = {
    "cpu_offload_gb": _OFF,
    "enable_eplb": _OFF,
    "enable_lora": _OFF,
    "language_model_only": _OFF,
    "limit_mm_per_prompt": _OFF,
    "mm_encoder_only": _OFF,
    "mm_ipc_gpu_memory_gb": _OFF,
    "num_redundant_experts": _OFF,
    "offload_group_size": _OFF,
    "quantization": _OFF,
    "quantization_config": _OFF,
}
FLAGS = frozenset({*_CACHE, *_WEIGHTS, "attention_config"})
# Environment variables, and the values of theirs that change nothing.
_ENVIRONMENT: Mapping[str, frozenset[str]] = {
    "VLLM_MLA_DISABLE": frozenset({"", "0"}),
    "VLLM_MODEL_REDIRECT_PATH": frozenset({""}),
    "VLLM_PP_LAYER_PARTITION": frozenset({""}),
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": frozenset({"1"}),
    "VLLM_USE_V1": frozenset({"", "1"}),
}
VARIABLES = frozenset(_ENVIRONMENT)


def unmodelled(values: Values, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Of these, what changes the cache."""
    found = list(_set(values, _CACHE))
    found += [
        name
        for name, harmless in _ENVIRONMENT.items()
        if name in environment and environment[name] not in harmless
    ]
    if _has_more_than_a_backend(values.get("attention_config")):
        found.append("attention_config")
    return tuple(found)


def unweighed(values: Values) -> tuple[str, ...]:
    """Of these, what changes the weights' share of the memory."""
    return tuple(_set(values, _WEIGHTS))


def _set(values: Values, table: Mapping[str, frozenset[str]]) -> Iterator[str]:
    for name, harmless in table.items():
        given = values.get(name, False)
        if given is True or (given and given[0] not in harmless):
            yield name


def _has_more_than_a_backend(given: tuple[str, ...] | bool | None) -> bool:  # noqa: FBT001  a switch's value
    if not isinstance(given, tuple):
        return False
    section = attention_section(given)
    return section is None or bool(section.keys() - {"backend"})


def attention_section(given: tuple[str, ...]) -> dict[str, object] | None:
    """The JSON object of `--attention-config`; None where it is none."""
    try:
        section = json.loads(given[0]) if given else None
    except (ValueError, RecursionError):
        return None
    return section if isinstance(section, dict) else None
