"""Sentences of the core, which name settings as a config file has them -> as the command line has them."""

import re
from typing import Any

# `gpu: H200`, `overhead_gb`, `flags: {max_num_batched_tokens: N}`
_SETTING = re.compile(
    r"`(?:flags: \{(?P<flag>\w+): (?P<flag_value>[^}`]+)\}"
    r"|(?P<name>api_key_file|gpu|hbm_bytes|overhead_gb|session_tokens|weights_bytes)(?:: (?P<value>[^`]+))?)`"
)


def as_options(sentence: str) -> str:
    """The sentence with options in place of settings: `gpu: H200` is --gpu H200."""
    return _SETTING.sub(_option, sentence)


def _option(setting: re.Match[str]) -> str:
    name = setting["flag"] or setting["name"]
    value = setting["flag_value"] or setting["value"]
    return "--" + name.replace("_", "-") + (f" {value}" if value else "")


def with_options(document: Any) -> Any:
    """Every sentence of a document so; keys stay."""
    if isinstance(document, str):
        return as_options(document)
    if isinstance(document, dict):
        return {key: with_options(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [with_options(value) for value in document]
    return document
