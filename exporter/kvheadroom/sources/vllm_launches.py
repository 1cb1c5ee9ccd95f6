"""The words of a process -> whether it is a vLLM server, and which of them are the server's own.

Launchers that stay (`uv run`, `conda run`, shells) start the server as a process of its own, so they are none. A Python
program that calls vLLM itself is none either: its words are not vLLM's flags.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?", re.ASCII)
_OPTION_WITH_WORD = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_IN_ONE_WORD = ("-W", "-X")
# The second is what the first leads to since 0.32.
_API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry")
_COMMANDS = frozenset({"vllm.entrypoints.cli.main", "vllm.scripts"})
_ENGINE = re.compile(r"[^\s:]{1,64}::(?:DP)?EngineCore", re.ASCII)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server was started.

    Attributes:
        words: what follows `vllm serve`, or the name of the API server's module. They may hold secrets.
        is_serve: it was `vllm serve`.
    """

    words: tuple[str, ...] = field(repr=False)
    is_serve: bool


def launch_of(words: Sequence[str]) -> Launch | None:
    """The launch of a vLLM server; None for every other process."""
    if not words:
        return None
    program = _base(words[0])
    if program == "vllm":
        return _serve(words[1:])
    if not _PYTHON.fullmatch(program):
        return None
    at = 1
    while at < len(words) and words[at].startswith("-"):
        option = words[at]
        if option in _OPTION_WITH_WORD:
            at += 2
        elif option.startswith(("--", *_IN_ONE_WORD)):
            at += 1
        elif "m" in option:
            # `-um NAME` and `-mNAME` are allowed too.
            named = option.partition("m")[2]
            return _module(*((named, words[at + 1 :]) if named else (_at(words, at + 1), words[at + 2 :])))
        elif "c" in option or option == "-":
            return None
        else:
            at += 1
    return _script(_at(words, at), words[at + 1 :])


def is_engine(words: Sequence[str]) -> bool:
    """Whether this is the title that a vLLM engine gives its process from 0.10.1 on (`v1/engine/core.py`)."""
    return bool(words) and _ENGINE.match(words[0]) is not None


def _module(name: str, rest: Sequence[str]) -> Launch | None:
    if name in _API_SERVERS:
        return Launch(tuple(rest), is_serve=False)
    return _serve(rest) if name in _COMMANDS else None


def _script(path: str, rest: Sequence[str]) -> Launch | None:
    if _base(path) == "vllm":
        return _serve(rest)
    for name in (*_API_SERVERS, *_COMMANDS):
        if f"/{path}".endswith(f"/{name.replace('.', '/')}.py"):
            return _module(name, rest)
    return None


def _serve(rest: Sequence[str]) -> Launch | None:
    return Launch(tuple(rest[1:]), is_serve=True) if _at(rest, 0) == "serve" else None


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _at(words: Sequence[str], index: int) -> str:
    return words[index] if index < len(words) else ""
