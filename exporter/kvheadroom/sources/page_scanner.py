"""The bytes of a metrics page -> its wanted lines, and what they say.

Of the 700 lines of an engine's page some 16 are wanted. One search over the bytes finds them all, whatever stands
where; no layout is taken for granted. Tests hold the samples equal to those of `prometheus_client.parser`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvheadroom.sources.metric_names import BY_NAME, NAMES

MAX_LABEL_CHARACTERS = 4096

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(?:,|(?=\}))')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_ESCAPE = re.compile(r'\\[\\"n]')


@dataclass(frozen=True, slots=True)
class Series:
    """What stands in front of a value.

    Attributes:
        metric: vLLM's name without `vllm:`.
        server: the server among several that a page of Ray tells of; empty on vLLM's own page.
        engine: the label `engine`, `"0"` where there is none; with the server in front where there is one.
        field: of EngineSnapshot; None where the sample fills none.
        most: the largest value that can be true.
    """

    metric: str
    labels: Mapping[str, str]
    server: str
    engine: str
    field: str | None
    most: float


class BadLineError(ValueError):
    """A line of a wanted metric that is no sample."""


def wanted_lines(body: bytes) -> list[tuple[bytes, bytes]]:
    """Each line of a wanted metric in the order of the page: up to its last space, and the rest.

    The first part begins with the newline before the line.
    """
    # The search wants a line's beginning as a byte of its own.
    whole = body if body[:4] not in (b"vllm", b"ray_") else b"\n" + body
    return _WANTED_LINES.findall(whole) or _RAYS_LINES.findall(whole)


def series_before(text: bytes) -> Series:
    """The series of the first part of a line.

    Raises:
        BadLineError: it is more or less than a series and a space; the line must be read whole.
    """
    series, rest = _read_series(text[1:])
    if rest != " ":
        raise BadLineError("no value after the series")
    return series


def read_line(line: bytes) -> tuple[Series, float]:
    """The sample of a whole line, however it is written.

    Raises:
        BadLineError: with the fault, for a person.
    """
    series, rest = _read_series(line.rstrip(b"\r"))
    fields = rest.split()
    if not fields:
        raise BadLineError("it has no value")
    number = number_of(fields[0])
    if number is None:
        raise BadLineError(f"{fields[0]!r} is no number")
    return series, number


def read_labels(text: str) -> tuple[dict[str, str], str]:
    """The labels at the beginning of what follows a metric's name, and the rest of the line.

    Raises:
        BadLineError: with the fault, for a person.
    """
    labels: dict[str, str] = {}
    if not text.startswith("{"):
        if text[:1] not in (" ", "\t"):
            raise BadLineError("no value after the name")
        return labels, text
    position = 1
    while label := _LABEL.match(text, position):
        value = label[2]
        if len(value) > MAX_LABEL_CHARACTERS:
            raise BadLineError(f"its label {label[1]} has {len(value)} characters")
        labels[label[1]] = _ESCAPE.sub(lambda m: _ESCAPES[m[0]], value) if "\\" in value else value
        position = label.end()
    end = text[position:].lstrip()
    if not end.startswith("}"):
        raise BadLineError("its labels are not well formed")
    return labels, end[1:]


def number_of(text: str) -> float | None:
    """A number of the exposition format, which "1_000" is not; None for what is none."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _read_series(raw: bytes) -> tuple[Series, str]:
    """The series at the beginning of a line, and the rest of the line."""
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError(f"it is no UTF-8 ({error.reason})") from error
    found = _NAME.match(line)
    if found is None:
        raise BadLineError("no value after the name")
    labels, rest = read_labels(line[found.end() :])
    return _series(found[2], labels, by_ray=found[1] is not None), rest


def _series(metric: str, labels: Mapping[str, str], *, by_ray: bool) -> Series:
    field, most = None, 0.0
    for wanted in BY_NAME[metric]:
        if wanted.when is None or labels.get(wanted.when[0]) == wanted.when[1]:
            field, most = wanted.field, wanted.most
    server, engine = "", labels.get("engine", "0")
    if by_ray:
        # Ray's agents tell of all servers on their machine (v1/metrics/ray_wrappers.py; ReplicaId from 0.12).
        server = labels.get("ReplicaId") or labels.get("WorkerId") or ""
        engine = f"{server}/{engine}" if server else engine
    return Series(metric, labels, server, engine, field, most)


def _tree_of(names: Iterable[str]) -> str:
    """A pattern that matches exactly these names and tries each beginning once."""
    tree: dict[str, Any] = {}
    for name in names:
        branch = tree
        for character in name:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _pattern_of(tree)


def _pattern_of(tree: Mapping[str, Any]) -> str:
    ends = "" in tree
    branches = [character + _pattern_of(branch) for character, branch in tree.items() if character]
    if not branches:
        return ""
    if len(branches) == 1 and not ends:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if ends else ''}"


_TREE = _tree_of(NAMES)
_REST_OF_LINE = r"(?![a-zA-Z0-9_:])(?:[^\n]* )?)([^\n]*)"
_WANTED_LINES = re.compile(rf"(\nvllm[:_]{_TREE}{_REST_OF_LINE}".encode())
_RAYS_LINES = re.compile(rf"(\nray_vllm[:_]{_TREE}{_REST_OF_LINE}".encode())
_NAME = re.compile(rf"(ray_)?vllm[:_]({_TREE})(?![a-zA-Z0-9_:])")
