"""A file of Prometheus rules: which alerts it has, and of which metrics each is made in the end. Pure but for reading files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.shipped_files import shipped_folder
from kvheadroom.strict_yaml import read_small_file

OWN_RULES = "alerts.yaml"
OWN_EARLY_WARNINGS = "kvheadroom-early-warnings"
"""The group of the package's alerts that are meant to come before a preemption; the others are about other things."""
MARK = "kvheadroom_backtest"
"""A label that says which alert of the file fires: names may be given twice."""
_MADE_BY_PROMETHEUS = frozenset({"ALERTS", "ALERTS_FOR_STATE"})
_TEXT_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`|#[^\n]*')
_CLOCK = re.compile(
    r"\b(?:time|timestamp|minute|hour|month|year|day_of_week|day_of_month|day_of_year|days_in_month)\s*\(|@"
)
_BY_TARGET = re.compile(r"\b(?:job|instance|replica)\s*(?:=|!=|=~|!~)\s*[\"'`]")
_BY_PATTERN = re.compile(r"__name__\s*(?:=~|!~|!=)")
# `{__name__="x"}`, and `{"x"}` of Prometheus 3.
_QUOTED_NAME = re.compile(r"""__name__\s*=\s*["'`]([^"'`]*)|\{\s*["'`]([^"'`]*)["'`]\s*[,}]""")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)|\{[^}]*\}|\[[^]]*\]")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()")
_WORD = re.compile(
    r"and|or|unless|bool|offset|by|without|on|ignoring|group_left|group_right|inf|nan|start|end|atan2",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """One alert.

    Attributes:
        number: its place among the file's alerts, the value of `MARK`.
        alert: its name in the file.
        name: the same, made unlike every other of the file.
        metrics: that it is made of in the end, through recording rules.
        recorded: the recording rules that it is made of.
        is_of_absence: it may fire because a metric is not there.
        is_of_target: it selects by labels that say what was scraped.
        why_not: why promtool cannot tell when it fires, None where it can.
    """

    number: int
    alert: str
    name: str
    metrics: frozenset[str]
    recorded: frozenset[str]
    is_of_absence: bool
    is_of_target: bool
    why_not: str | None


@dataclass(frozen=True, slots=True)
class Rules:
    """A file of rules.

    Attributes:
        groups: as they stand in the file.
    """

    path: Path
    groups: Sequence[Mapping[str, Any]]
    alerts: tuple[AlertRule, ...]

    @property
    def metrics(self) -> frozenset[str]:
        """All that the alerts are made of."""
        return frozenset().union(*(alert.metrics for alert in self.alerts))

    def marked_groups(self, alerts: frozenset[int], without: frozenset[str]) -> list[dict[str, Any]]:
        """The groups with these alerts, each marked with its number and without texts for people; recording rules but some."""
        numbers = iter(self.alerts)
        groups = []
        for group in self.groups:
            rules = []
            for rule in group["rules"]:
                if "record" in rule:
                    rules += [] if rule["record"] in without else [rule]
                    continue
                number = next(numbers).number
                if number in alerts:
                    kept = {key: value for key, value in rule.items() if key != "annotations"}
                    rules.append(kept | {"labels": {**(rule.get("labels") or {}), MARK: str(number)}})
            limit = {"limit": int(group["limit"])} if str(group.get("limit", "")).isdecimal() else {}
            groups.append({**group, **limit, "rules": rules})
        return groups


def own_rules() -> Rules:
    """The package's own early warnings."""
    return read_rules(shipped_folder("rules") / OWN_RULES, only_group=OWN_EARLY_WARNINGS)


def read_rules(path: Path, *, only_group: str | None = None) -> Rules:
    """Read a file of rules; whether Prometheus understands its expressions is for promtool to say.

    Args:
        only_group: the one group that is wanted, None for all.

    Raises:
        OperatorError: naming the file.
    """
    try:
        # Texts as they stand: `for: 1m`, `severity: yes`. It makes nothing but texts, lists and mappings.
        content = yaml.load(read_small_file(path), Loader=yaml.BaseLoader)  # noqa: S506
    except OSError as error:
        raise OperatorError(f"--rules: {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" (line {line + 1})"
        raise OperatorError(f"--rules: {path}: is no YAML{where}") from error
    groups = content.get("groups") if isinstance(content, dict) else None
    if isinstance(content, dict) and content.get("kind") == "PrometheusRule":
        raise OperatorError(
            f"--rules: {path}: is a PrometheusRule of Kubernetes; give what stands under its `spec:` as a file"
        )
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise OperatorError(
            f"--rules: {path}: is no file of Prometheus rules; it needs `groups:` with `rules:` in each"
        )
    groups = [group for group in groups if only_group is None or group.get("name") == only_group]
    rules = [rule for group in groups for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    if not alerts:
        raise OperatorError(f"--rules: {path}: has no alert")
    recorded: dict[str, list[str]] = {}
    for rule in rules:
        if "record" in rule:
            recorded.setdefault(str(rule["record"]), []).append(str(rule["expr"]))
    names = _told_apart(alerts)
    return Rules(
        path,
        groups,
        tuple(
            _alert(number, names[number], rule, Path(path).name, recorded)
            for number, rule in enumerate(alerts)
        ),
    )


def _is_group(group: object) -> bool:
    rules = group.get("rules") if isinstance(group, dict) else None
    return isinstance(rules, list) and all(
        isinstance(rule, dict)
        and "expr" in rule
        and ("alert" in rule) != ("record" in rule)
        and isinstance(rule.get("labels") or {}, dict)
        for rule in rules
    )


def _told_apart(alerts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each: its own, with its labels where two have one name, with a number where that is not enough."""
    plain = [str(rule["alert"]) for rule in alerts]
    labelled = [
        name + "{" + ",".join(f"{key}={value}" for key, value in (rule.get("labels") or {}).items()) + "}"
        if plain.count(name) > 1
        else name
        for name, rule in zip(plain, alerts, strict=True)
    ]
    return [
        f"{name} #{labelled[:number].count(name) + 1}" if labelled.count(name) > 1 else name
        for number, name in enumerate(labelled)
    ]


def _alert(
    number: int, name: str, rule: Mapping[str, Any], file: str, recorded: Mapping[str, Sequence[str]]
) -> AlertRule:
    made_of: dict[str, None] = {}
    expressions = list(_expressions(str(rule["expr"]), recorded, made_of))
    plain = [_TEXT_OR_COMMENT.sub('""', expression) for expression in expressions]
    why_not = None
    if any(map(_CLOCK.search, plain)):
        why_not = "it asks for the time of day, and promtool's clock begins in 1970"
    elif any(map(_BY_PATTERN.search, expressions)):
        why_not = f"{file} selects its metrics by a pattern"
    metrics = {metric for expression in expressions for metric in metric_names(expression)}
    return AlertRule(
        number=number,
        alert=str(rule["alert"]),
        name=name,
        metrics=frozenset(metrics - made_of.keys() - _MADE_BY_PROMETHEUS),
        recorded=frozenset(made_of),
        is_of_absence=any("absent" in expression for expression in plain),
        is_of_target=any(map(_BY_TARGET.search, expressions)),
        why_not=why_not,
    )


def _expressions(
    expression: str, recorded: Mapping[str, Sequence[str]], made_of: dict[str, None]
) -> Iterator[str]:
    """An expression and those of the recording rules that it is made of, whose names go to `made_of`."""
    yield expression
    for name in metric_names(expression):
        if name in recorded and name not in made_of:
            made_of[name] = None
            for deeper in recorded[name]:
                yield from _expressions(deeper, recorded, made_of)


def metric_names(expression: str) -> list[str]:
    """The metrics that a PromQL expression names, in order."""
    quoted = [one or other for one, other in _QUOTED_NAME.findall(expression)]
    plain = _LABELS.sub(" ", _TEXT_OR_COMMENT.sub('""', expression))
    names = (found[0] for found in _NAME.finditer(plain))
    return list(dict.fromkeys((*quoted, *(name for name in names if not _WORD.fullmatch(name)))))
