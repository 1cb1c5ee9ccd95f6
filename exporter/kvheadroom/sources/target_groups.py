"""Lists of targets in Prometheus's form (`file_sd_configs`, `http_sd_configs`) -> groups of addresses with labels.

The form: `[{"targets": ["host:port", ...], "labels": {"name": "value", ...}}, ...]`, as JSON or YAML
(https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config). A list that is not of this
form is refused as a whole, as Prometheus does it: half of a list is another list.
"""

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kvheadroom.strict_yaml import YamlFaultError, parse_yaml

MAX_TARGETS = 5000


class BadTargetsError(ValueError):
    """What is wrong with a list, to be put after its name; of its content only places are told."""


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """Addresses that have the same labels.

    Attributes:
        labels: those that begin with `__` included.
    """

    targets: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)


def parse_target_groups(text: str, *, as_json: bool) -> tuple[TargetGroup, ...]:
    """The groups of one list.

    Raises:
        BadTargetsError: it is none.
    """
    try:
        content = _json(text) if as_json else parse_yaml(text, only_texts=True)
    except YamlFaultError as error:
        raise BadTargetsError(str(error)) from error
    if as_json and content is None:
        content = []
    if not isinstance(content, list):
        raise BadTargetsError("is no list of target groups (`[{targets: [host:port]}]`)")
    groups = tuple(_group(index, group) for index, group in enumerate(content))
    count = sum(len(group.targets) for group in groups)
    if count > MAX_TARGETS:
        raise BadTargetsError(f"holds {count} targets; at most {MAX_TARGETS} are taken")
    return groups


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except json.JSONDecodeError as error:
        raise BadTargetsError(
            f"is no valid JSON, line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise BadTargetsError("is nested too deeply") from error
    except BadTargetsError:
        raise
    except ValueError as error:
        raise BadTargetsError("is no list of target groups: it holds a number of too many digits") from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadTargetsError(f"has the key {twice[:40]!r} twice in one mapping")
    return found


def _group(index: int, group: object) -> TargetGroup:
    place = f"group {index + 1}"
    if not isinstance(group, dict):
        raise BadTargetsError(f"{place} is no mapping with `targets` and `labels`")
    odd = next((key for key in group if key not in ("targets", "labels")), None)
    if odd is not None:
        raise BadTargetsError(f"{place} has the key {str(odd)[:40]!r}; only `targets` and `labels` are known")
    targets, labels = group.get("targets"), group.get("labels")
    # What is written as nothing, in JSON and in YAML, is nothing to Prometheus too; programs in Go write empty lists so.
    if "targets" in group and _is_nothing(targets):
        targets = []
    if _is_nothing(labels):
        labels = {}
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise BadTargetsError(f"{place} needs `targets`, a list of texts (`[host:port]`)")
    if not isinstance(labels, dict) or not all(map(_is_label, labels.items())):
        raise BadTargetsError(f"{place} has `labels` that are no mapping of texts (`name: value`)")
    return TargetGroup(tuple(targets), labels)


def _is_nothing(value: object) -> bool:
    return value is None or value == ""


def _is_label(item: tuple[Hashable, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], str)
