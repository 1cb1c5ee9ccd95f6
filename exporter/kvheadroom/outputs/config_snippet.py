"""Lines of config as YAML that can be copied: what nobody said of an engine, where its replica's settings stand."""

import json
from collections.abc import Iterable, Iterator

from kvheadroom.capacity.fleet import ReplicaAssessment
from kvheadroom.capacity.known_facts import NUMBER, ConfigLine, LineKind, Value
from kvheadroom.capacity.readings import one_line


def config_snippet(replica: ReplicaAssessment, source: str, lines: tuple[ConfigLine, ...]) -> str:
    """The settings of one replica, or of its list where one is the source; empty without lines.

    Args:
        source: where the replica comes from: `config`, or what lists it.
    """
    if not lines:
        return ""
    listed = source != "config"
    head = [f"# under `replica:` of {source}"] if listed else ["replicas:", f"- url: {_yaml(replica.url)}"]
    body = [] if listed else [f"name: {_yaml(replica.replica)}"]
    body += _settings(line for line in lines if not line.is_flag)
    flags = list(_settings(line for line in lines if line.is_flag))
    if flags:
        said = any(not line.startswith("#") for line in flags)
        body.append("flags:" if said else "# flags:")
        body += [f"  {line}" if said else f"#   {line.removeprefix('# ')}" for line in flags]
    indent = "" if listed else "  "
    return "\n".join([*head, *(indent + line for line in body)]) + "\n"


def _settings(lines: Iterable[ConfigLine]) -> Iterator[str]:
    for line in lines:
        why = one_line(line.why)
        if line.kind is LineKind.CONFIRM:
            yield f"{line.name}: {_yaml(line.value)}  # {why}"
        elif line.kind is LineKind.FILL_IN:
            # Ours, and no value: it stands there until somebody writes one.
            yield f"# missing: {why}"
            yield f"{line.name}: {line.value}"
        else:
            yield f"# if you know better: {why}"
            yield f"# {line.name}: {NUMBER if line.value is None else _yaml(line.value)}"


def _yaml(value: Value) -> str:
    """As YAML reads it back: JSON, in which what cannot be printed stands escaped."""
    if not isinstance(value, str):
        return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    plain = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain)
