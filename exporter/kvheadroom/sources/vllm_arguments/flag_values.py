"""The words of the flags that decide the cache -> their values, in the terms of `OperatorFacts.flags`.

What a value may look like is narrow on purpose: it is shown on pages, and a command line may hold secrets anywhere. Of
sections (JSON) only the keys that a prediction knows are kept.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvheadroom.capacity.facts import AUTO_LENGTH
from kvheadroom.capacity.flag_numbers import readable_int
from kvheadroom.capacity.parallelism import MOST_GPUS
from kvheadroom.capacity.speculation import HARMLESS_KEYS

_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
_LARGEST = 2**53
_DTYPES = frozenset({"auto", "half", "float16", "bfloat16", "float", "float32"})
_STATE_DTYPES = frozenset({"auto", "float32", "float16", "bfloat16"})
OTHER_KEY = "a key that is not shown"
_DRAFT_KEYS: Mapping[str, Callable[[Any], bool]] = {
    "method": lambda value: isinstance(value, str) and bool(_WORD.fullmatch(value)),
    "num_speculative_tokens": lambda value: isinstance(value, int) and not isinstance(value, bool),
}


class BadValueError(ValueError):
    """It cannot be read; the message says what is needed and never what is there."""


def _number(least: int, most: int = _LARGEST) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = readable_int(text)
        if value is None or not least <= value <= most:
            raise BadValueError("it is no number that vLLM would take")
        return value

    return read


def _real(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise BadValueError("it is no number that vLLM would take")
        return value

    return read


def _length(text: str) -> int:
    if text.strip().lower() in ("-1", "auto"):
        return AUTO_LENGTH
    return _number(1)(text)


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise BadValueError("it is not one plain word")
    return text


def _one_of(words: frozenset[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise BadValueError(f"it is none of {', '.join(sorted(words))}")
        return text

    return read


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadValueError("it is no JSON object")
    return value


def _draft(text: str) -> dict[str, Any]:
    """The keys that decide the cache; others of the kind are told without their names (`SpeculativeConfig`)."""
    kept: dict[str, Any] = {}
    for key, value in _object(text).items():
        name = key.replace("-", "_")
        if value is None or name in HARMLESS_KEYS:
            continue
        known = name in _DRAFT_KEYS and _DRAFT_KEYS[name](value)
        kept[name if known else OTHER_KEY] = value if known else True
    return kept


def _connector(text: str) -> dict[str, Any]:
    """The connector's name, and of its settings those that decide the size of a tier in host memory."""
    return _connector_of(_object(text))


def _connector_of(section: Mapping[str, Any], *, is_child: bool = False) -> dict[str, Any]:
    kept: dict[str, Any] = {"kv_connector": _name_or_other(section.get("kv_connector"))}
    given = section.get("kv_connector_extra_config")
    if not isinstance(given, dict):
        return kept
    extra: dict[str, Any] = {name: given[name] for name in _TIER_NUMBERS if _is_size(given.get(name))}
    extra |= {name: _name_or_other(given[name]) for name in _TIER_WORDS if given.get(name) is not None}
    extra |= {name: given[name] for name in _TIER_SWITCHES if isinstance(given.get(name), bool)}
    children = given.get("connectors")
    if isinstance(children, list) and not is_child:
        extra["connectors"] = [
            _connector_of(child, is_child=True)
            for child in children[:_MOST_CONNECTORS]
            if isinstance(child, dict)
        ]
    return {**kept, "kv_connector_extra_config": extra} if extra else kept


_TIER_NUMBERS = ("cpu_bytes_to_use", "block_size", "blocks_per_chunk")
_TIER_WORDS = ("spec_name",)
_TIER_SWITCHES = ("offload_prompt_only",)
_MOST_CONNECTORS = 16


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _name_or_other(value: object) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else OTHER_KEY


_parallel = _number(1, MOST_GPUS)
_count = _number(1)

READERS: Mapping[str, Callable[[str], Any]] = {
    "tensor_parallel_size": _parallel,
    "pipeline_parallel_size": _parallel,
    "data_parallel_size": _parallel,
    "decode_context_parallel_size": _parallel,
    "prefill_context_parallel_size": _parallel,
    "kv_cache_dtype": _word,
    "dtype": _one_of(_DTYPES),
    "block_size": _count,
    "max_model_len": _length,
    "max_num_seqs": _count,
    "max_num_batched_tokens": _count,
    "gpu_memory_utilization": _real(1),
    "kv_cache_memory_bytes": _count,
    "num_gpu_blocks_override": _count,
    "mamba_cache_dtype": _one_of(_STATE_DTYPES),
    "mamba_ssm_cache_dtype": _one_of(_STATE_DTYPES),
    "mamba_block_size": _count,
    "kv_offloading_size": _real(1e9),
    "kv_offloading_backend": _one_of(frozenset({"native", "lmcache"})),
    "attention_backend": _word,
    "kv_transfer_config": _connector,
    "speculative_config": _draft,
}
"""Of flags with one value."""
SWITCHES = frozenset(
    {
        "enable_expert_parallel",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
        "disable_hybrid_kv_cache_manager",
        "enforce_eager",
    }
)
LISTS = frozenset({"kv_cache_dtype_skip_layers"})
# `optional_type` (engine/arg_utils.py): these words are none of the flag's own.
_NONE = frozenset({"", "None"})


def read_value(name: str, given: tuple[str, ...] | bool) -> Any:  # noqa: FBT001  a switch's value
    """The value of one flag; None where it says that it is not set.

    Raises:
        BadValueError: it cannot be read.
    """
    if isinstance(given, bool):
        return given
    if name in LISTS:
        return tuple(_word(text) for text in given)
    return None if given[0] in _NONE else READERS[name](given[0])
