"""What vLLM prints of its arguments and its config -> the flags that decide the cache, and nothing else.

Three lines tell them: `non-default args: {...}` (from 0.9), `args: Namespace(...)` (up to 0.8) and the config of the engine
(`VllmConfig.__str__`). They may hold keys, tokens and paths: a value is kept only where its flag is known and it looks as
that flag's values look.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from kvheadroom.capacity.facts import AUTO_LENGTH
from kvheadroom.capacity.readings import one_line
from kvheadroom.sources.vllm_arguments.flag_values import LISTS, READERS, SWITCHES, BadValueError, read_value

_MOST_CHARACTERS = 4096
# A quoted text that does not end takes the rest of the line with it, so that nothing is read twice.
_TOKEN = re.compile(
    r"'[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?\Z)|\"[^\"\\]*(?:\\.[^\"\\]*)*(?:\"|\\?\Z)|[\[({]|[\])}]|,", re.DOTALL
)
_ITEM = re.compile(r"\s*(['\"]?)([A-Za-z_][A-Za-z0-9_]{0,80})\1\s*[:=]\s*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}", re.ASCII)
_QUOTED = re.compile(r"'([^'\\]{0,1024})'|\"([^\"\\]{0,1024})\"")
_NUMBER = re.compile(r"-?\d{1,20}(?:\.\d{1,20})?(?:e-?\d{1,2})?", re.ASCII)
_OTHER_NAMES = {
    "max_seq_len": "max_model_len",
    "chunked_prefill_enabled": "enable_chunked_prefill",
    "num_spec_tokens": "num_speculative_tokens",
}
_CLOSED = ("'", '"', ")", "]", "}")
_DRAFT = "speculative_config"
_WORDS = frozenset({"quantization"})


def read_arguments(text: str) -> tuple[dict[str, Any], str | None]:
    """The flags, and the model.

    Args:
        text: a dict or a namespace as Python prints it, or the `name=value, ...` of a config.
    """
    flags: dict[str, Any] = {}
    model: str | None = None
    draft: dict[str, Any] = {}
    for given, value in _items(text):
        name = _OTHER_NAMES.get(given, given)
        if name in ("model", "model_tag"):
            model = _text(value) or model
        elif name == "num_speculative_tokens":
            # A flag of its own up to 0.8.
            draft |= _draft({"num_speculative_tokens": _scalar(value)})
        elif name == _DRAFT:
            draft |= _draft(_object(value))
        else:
            read = _flag(name, value)
            if read is not None:
                flags[name] = read
    if draft:
        flags[_DRAFT] = draft
    return flags, None if model is None else one_line(model)


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Each `name: value` or `name=value` of the outermost level."""
    start = text.find("{") if text.lstrip().startswith("{") else -1
    if start < 0 and (found := re.match(r"\s*[A-Za-z]{1,40}\(", text)):
        start = found.end() - 1
    at, depth = start + 1, 0
    for token in _TOKEN.finditer(text, at):
        mark = token[0]
        if mark in "[({":
            depth += 1
        elif mark in "])}":
            depth -= 1
        if depth < 0 or (depth == 0 and mark == ","):
            yield from _item(text[at : token.start()])
            at = token.end()
        if depth < 0:
            return
    if start < 0 and text.rstrip().endswith(_CLOSED):
        # Of a config the last value ends with the line, which may be cut there; an object that is not closed was cut.
        yield from _item(text[at:])


def _item(text: str) -> Iterator[tuple[str, str]]:
    found = _ITEM.match(text)
    if found is not None and len(text) <= _MOST_CHARACTERS:
        yield found[2], text[found.end() :].strip()


def _scalar(text: str) -> str | bool | None:
    """A word, a number in its own spelling, True or False; None for None and whatever else stands there."""
    if text in ("True", "False"):
        return text == "True"
    quoted = _QUOTED.fullmatch(text)
    word = (quoted[1] if quoted[1] is not None else quoted[2]) if quoted is not None else text
    if word == "None" or not (_NUMBER.fullmatch(word) or _WORD.fullmatch(word)):
        return None
    return word.removeprefix("torch.")


def _text(text: str) -> str | None:
    quoted = _QUOTED.fullmatch(text)
    return None if quoted is None else quoted[1] or quoted[2]


def _flag(name: str, text: str) -> Any:
    if name in LISTS:
        found = _QUOTED.findall(text)
        given: Any = tuple(one or other for one, other in found)
    elif name == "kv_transfer_config":
        connector = _object(text).get("kv_connector")
        given = json.dumps({"kv_connector": connector}) if connector else None
    else:
        given = _scalar(text)
    if name in SWITCHES:
        return given if isinstance(given, bool) else None
    if name in _WORDS:
        return given if isinstance(given, str) else None
    if not given or isinstance(given, bool) or (name not in READERS and name not in LISTS):
        return None
    try:
        value = read_value(name, given if isinstance(given, tuple) else (given,))
    except BadValueError:
        return None
    return None if value == AUTO_LENGTH else value


def _object(text: str) -> dict[str, Any]:
    """A dict as Python or JSON writes it, or the `SpeculativeConfig(...)` of a config."""
    if text.startswith("SpeculativeConfig("):
        return {_OTHER_NAMES.get(name, name): _scalar(value) for name, value in _items(text)}
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[1] or quoted[2] or ""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
    # An escape could be one that Python warns of.
    if not text.startswith("{") or "\\" in text:
        return {}
    try:
        content = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _draft(said: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    method, tokens = said.get("method"), said.get("num_speculative_tokens")
    if isinstance(method, str) and _WORD.fullmatch(method):
        kept["method"] = method
    if isinstance(tokens, str) and tokens.isdecimal():
        tokens = int(tokens)
    if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 < tokens < 2**16:
        kept["num_speculative_tokens"] = tokens
    return kept
