"""config.json -> how long a context vLLM takes, with and without a flag (`_get_and_verify_max_len`, config/model.py)."""

from collections.abc import Mapping

from kvheadroom.capacity.model_config import ModelConfig, shown

LARGEST_LENGTH = 2**31
_FEW = 8

# What `get_rope` makes (model_executor/layers/rotary_embedding/__init__.py), and what it calls by another name.
_ROPE_TYPES = frozenset(
    {
        "bailing_mrope",
        "deepseek_llama_scaling",
        "deepseek_yarn",
        "default",
        "dynamic",
        "linear",
        "llama3",
        "longrope",
        "mllama4",
        "mrope",
        "ntk",
        "openpangu",
        "proportional",
        "su",
        "yarn",
    }
)
_NEED_A_FACTOR = frozenset({"linear", "llama3", "ntk", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})

# Where config.json may say how long a context is (`derive_max_model_len_and_key`); the smallest counts.
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_WITHOUT_ANY_KEY = 2048
_WITHOUT_LENGTH = frozenset({"bloom", "falcon_mamba", "mamba", "mamba2"})

# Kinds of rope scaling whose length is already the scaled one (`_get_and_verify_max_len`, config/model.py).
_ALREADY_SCALED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def context_lengths(text: ModelConfig, whole: ModelConfig) -> tuple[int, int] | str:
    """(the longest, the usual) context; a string says why config.json does not tell it."""
    lengths = [text.count(key) for key in _LENGTH_KEYS if text.has(key)]
    if not lengths:
        if text.word("model_type") not in _WITHOUT_LENGTH:
            # The config class has a number of its own.
            return "config.json does not say the longest context (max_position_embeddings)"
        # Any length is taken then; without a flag a usual one.
        return LARGEST_LENGTH, _WITHOUT_ANY_KEY
    length = min(lengths)
    if text.has("model_max_length"):
        length = text.count("model_max_length")
    ropes = _ropes(text)
    if isinstance(ropes, str):
        return f"config.json does not tell the longest context: {ropes}"
    factor = 1.0
    gemma3 = "gemma3" in (whole.word("model_type") or "")
    for kind, given in ropes if not gemma3 else ():
        if kind not in _ALREADY_SCALED and given is not None:
            factor = given
    longest = int(length * factor)
    usual = longest
    if any(kind == "longrope" for kind, _ in ropes):
        # Shorter unless asked for: the longer positions cost quality.
        usual = whole.count("original_max_position_embeddings", longest)
    return longest, usual


def _ropes(text: ModelConfig) -> list[tuple[str, float | None]] | str:
    """(kind, factor) of each rope scaling; a string says which one cannot be read."""
    key = "rope_parameters" if text.values.get("rope_parameters") else "rope_scaling"
    section = text.values.get(key)
    if section is None:
        return []
    if not isinstance(section, Mapping):
        return f"{key} is {shown(section)}, a section is needed"
    nested = [value for value in section.values() if isinstance(value, Mapping)]
    sections = nested if nested and not {"rope_type", "type"} & set(section) else [section]
    found: list[tuple[str, float | None]] = []
    for one in sections[:_FEW]:
        kind, factor = one.get("rope_type", one.get("type", "default")), one.get("factor")
        if not isinstance(kind, str):
            return f"the rope_type of {key} is {shown(kind)}, a word is needed"
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if factor is not None and not (number and 0 < factor <= LARGEST_LENGTH):
            return f"the factor of {key} is {shown(factor)}, a number above 0 is needed"
        if kind not in _ROPE_TYPES:
            return f"the rope_type of {key} is {shown(kind)}, which vLLM does not have"
        if factor is None and kind in _NEED_A_FACTOR:
            return f"the factor of {key} is left out, and rope_type {kind} needs one"
        found.append((kind, factor))
    return found
