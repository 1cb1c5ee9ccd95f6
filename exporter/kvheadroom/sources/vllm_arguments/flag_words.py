"""The words of a vLLM command line -> which flag has which value, as vLLM's parser takes them apart.

vLLM's own additions to argparse are in `FlexibleArgumentParser` (0.33.0 `utils/argparse_utils.py`): `_` for `-` in the
names of flags, dotted keys for sections, `-O3`. The rest is argparse's: any beginning of a name that fits no other flag,
`--flag=value`, `-tp=4`, `-n4`, several values, the last of repeated flags.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvheadroom.capacity.flag_numbers import readable_int
from kvheadroom.sources.vllm_arguments.flag_names import OPTIONS, Arity, Flag

_MODEL = re.compile(r"--model(=.+)?", re.DOTALL)
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_TRUE_OR_FALSE = {"true": True, "false": False}

# Anybody can start a process of any words: taking these apart ends in a fraction of a second. vLLM has 330 flags, and what
# stands in lists (`--lora-modules`) begins with no dash. `/proc` is read further, so that no line is cut short unseen.
_MOST_FLAGS = 1000
_MOST_CHARACTERS = 1024**2

NOT_A_FLAG = "a flag is not known to kvheadroom, from another release or a plugin"
NO_VALUE = "a flag has no value"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagWords:
    """What a command line says, taken apart. Values may be secrets: they are shown nowhere.

    Attributes:
        values: the words of each flag; True or False for a switch.
        model: the word that stands alone.
        unclear: flags that may be set, each with why it is not known to what.
        doubts: why there may be more flags than these, each one sentence.
    """

    values: Mapping[str, tuple[str, ...] | bool] = field(repr=False)
    model: str | None = field(repr=False)
    unclear: Mapping[str, str]
    doubts: tuple[str, ...]


def model_first(words: Sequence[str]) -> list[str]:
    """Of `vllm serve`: the model of `--model` in front, where vLLM puts it before anything else is read."""
    for index, word in enumerate(words):
        match = _MODEL.fullmatch(word)
        if match is None:
            continue
        if match[1]:
            return [match[1][1:], *words[:index], *words[index + 1 :]]
        if index + 1 < len(words):
            return [words[index + 1], *words[:index], *words[index + 2 :]]
    return list(words)


def named_config(words: Sequence[str]) -> str | None:
    """The file that `--config FILE` names; vLLM opens it for exactly these two words and for no other spelling."""
    for word, after in pairwise(words):
        if word == "--config":
            return after
    return None


def with_config(words: Sequence[str], from_file: Sequence[str]) -> list[str]:
    """With the words that stand for the config file before all flags, so that the command line wins."""
    if "--config" not in words:
        return list(words)
    index = words.index("--config")
    # Only a model that stands before it stays in front; one right after it follows what the file says.
    at = 0 if words[0].startswith("-") else 1
    return [*words[:at], *from_file, *words[at:index], *words[index + 2 :]]


def read_words(words: Sequence[str]) -> FlagWords:
    """Which flag has which value. Nothing is raised: what cannot be read is told without the words themselves."""
    if sum(map(len, words)) > _MOST_CHARACTERS or sum(word.startswith("-") for word in words) > _MOST_FLAGS:
        return _unread("it is longer than kvheadroom reads")
    try:
        reader = _Reader(_joined_sections([*_dashed(words)]))
        reader.read()
    except RecursionError:
        return _unread("a section of it is nested too deeply")
    alone = reader.alone
    doubts = list(dict.fromkeys(reader.doubts))
    if len(alone) > 1:
        doubts.append("more than one word stands alone, where vLLM takes one, the model")
    return FlagWords(
        values=reader.values,
        model=alone[0] if len(alone) == 1 else None,
        unclear=reader.unclear,
        doubts=tuple(doubts),
    )


def _unread(why: str) -> FlagWords:
    """Of a line that is not taken apart nothing is known, and no default is taken for sure."""
    return FlagWords(values={}, model=None, unclear={"port": why}, doubts=(why,))


def _dashed(words: Sequence[str]) -> Iterator[str]:
    """Dashes for underscores in names, up to the first dot; `-O3` in its long form."""
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            before, dot, keys = name.partition(".")
            yield before.replace("_", "-") + dot + keys + equals + value
        elif word.startswith("-O") and word != "-O":
            yield "--optimization-level"
            yield word[2:].removeprefix("=")
        elif word == "-O" and words[index + 1 : index + 2] in (["0"], ["1"], ["2"], ["3"]):
            yield "--optimization-level"
        else:
            yield word


def _joined_sections(words: list[str]) -> list[str]:
    """`--flag.key value` of one flag as one JSON object, which comes last and so wins over one that is given whole."""
    kept: list[str] = []
    sections: dict[str, dict[str, Any]] = {}
    rest = iter(range(len(words)))
    for index in rest:
        name, equals, value = words[index].partition("=")
        if not name.startswith("-") or "." not in name:
            kept.append(words[index])
            continue
        if not equals:
            if index + 1 == len(words):
                kept.append(words[index])
                continue
            value = words[index + 1]
            next(rest)
        if name.endswith("+"):
            name, value = name[:-1], json.dumps(value.split(","))
        flag, *keys = name.split(".")
        piece: Any = _of_json(value)
        for key in reversed(keys):
            piece = {key: piece}
        _merge(sections.setdefault(flag, {}), piece)
    for flag, section in sections.items():
        kept += [flag, json.dumps(section)]
    return kept


def _of_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = readable_int(text)
        return text if number is None else number


def _merge(into: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for key, value in piece.items():
        before = into.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            before += value
        else:
            into[key] = value


@dataclass(frozen=True, slots=True)
class _Option:
    """A word that is a flag: what it may stand for, and the value in the same word.

    Attributes:
        flags: several where the word is a beginning of several, none where it is one of none.
    """

    flags: tuple[Flag, ...]
    value: str | None = None


def _option(word: str) -> _Option | None:
    """A word as argparse sorts it (`ArgumentParser._parse_optional`); None where it is a value."""
    if not word.startswith("-") or word == "-":
        return None
    if word in OPTIONS:
        return _Option((OPTIONS[word],))
    name, equals, value = word.partition("=")
    explicit = value if equals else None
    if name in OPTIONS:
        return _Option((OPTIONS[name],), explicit)
    if word.startswith("--"):
        found = [_Option((flag,), explicit) for option, flag in OPTIONS.items() if option.startswith(name)]
    else:
        # A short flag with its value in the same word, or the beginning of a longer one.
        found = [_Option((flag,)) for option, flag in OPTIONS.items() if option.startswith(word)]
        if word[:2] in OPTIONS:
            found.append(_Option((OPTIONS[word[:2]],), word[2:]))
    if len(found) == 1:
        return found[0]
    if found:
        return _Option(tuple(dict.fromkeys(one.flags[0] for one in found)), explicit)
    return None if _NEGATIVE_NUMBER.fullmatch(word) or " " in word else _Option(())


class _Reader:
    """Goes through the words once."""

    def __init__(self, words: list[str]) -> None:
        self.values: dict[str, tuple[str, ...] | bool] = {}
        self.unclear: dict[str, str] = {}
        self.doubts: list[str] = []
        self.alone: list[str] = []
        self._words = words
        self._at = 0

    def read(self) -> None:
        while self._at < len(self._words):
            word = self._words[self._at]
            self._at += 1
            option = _option(word)
            if word == "--":
                self.doubts.append("a `--` stands alone in it")
            elif option is None:
                self.alone.append(word)
            elif len(option.flags) == 1:
                self._take(option.flags[0], option.value)
            else:
                self._skip(option)

    def _following(self, most: int | None) -> tuple[str, ...]:
        """The values that follow, at most so many."""
        start = self._at
        while (
            self._at < len(self._words)
            and (most is None or self._at - start < most)
            and _option(self._words[self._at]) is None
        ):
            self._at += 1
        return tuple(self._words[start : self._at])

    def _take(self, flag: Flag, value: str | None) -> None:
        self.unclear.pop(flag.name, None)
        if flag.arity is Arity.SWITCH:
            self._switch(flag, value)
            return
        most = None if flag.arity is Arity.SEVERAL else 1
        given = self._following(most) if value is None else (value,)
        self.values[flag.name] = given
        if not given and flag.arity is not Arity.AT_MOST_ONE:
            self.unclear[flag.name] = NO_VALUE

    def _switch(self, flag: Flag, value: str | None) -> None:
        following = self._words[self._at].lower() if self._at < len(self._words) else ""
        if value is None and following in _TRUE_OR_FALSE:
            # Some switches of releases up to 0.8 take the word (`StoreBoolean`); for later ones no model has that name.
            value = following
            self._at += 1
        said = True if value is None else _TRUE_OR_FALSE.get(value.lower())
        if said is None:
            self.unclear[flag.name] = "it is neither true nor false"
            return
        self.values[flag.name] = said is flag.switched

    def _skip(self, option: _Option) -> None:
        """A flag that is not known, or a beginning of several: what follows is no one's value for sure."""
        if option.value is None:
            self._following(None)
        if not option.flags:
            self.doubts.append(NOT_A_FLAG)
        names = dict.fromkeys(flag.name for flag in option.flags)
        for name in names:
            self.unclear[name] = f"an abbreviation fits it and {len(names) - 1} other flags"
