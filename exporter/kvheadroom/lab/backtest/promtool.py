"""Alerts evaluated by the real Prometheus: its promtool runs rules over given series as its unit tests (`promtool test rules`).

So `for`, `keep_firing_for`, recording rules, stale series and the meaning of every expression are Prometheus's own. The unit test
expects that nothing fires; what promtool says against that is what fires.
"""

import ast
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.alert_rules import MARK, AlertRule, Rules
from kvheadroom.lab.backtest.histories import PROBABILITY, History, Series, Values
from kvheadroom.lab.backtest.results import AlertRun, Firing

CHECK_SECONDS = 60.0
RUN_SECONDS = 1800.0
ABSENT = "promtool is not on the PATH; install Prometheus, or say where it is with --promtool"
_HAS_FAULTS = 1
"""Its exit code where a test fails."""
_BEGINNING = 10_000
_FIRING = 'ALERTS{alertstate="firing"}'
_AT = re.compile(r"\s*expr: .*, time: ((?:\d+[a-z]+)+),\s*")
_GOT = re.compile(r"\s*got:(.*)")
_RULE_ERROR = re.compile(r"\s*rule: (\S+), time: \S+, err: (.*)")
_ELEMENT = re.compile(r'\{((?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}')
_LABEL = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')
_PART = re.compile(r"(\d+)(ms|[smhdwy])")
_PART_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}

Fired = dict[int, list[tuple[int, Mapping[str, str]]]]
"""Number of an alert -> (tick, labels) of everything that fired."""


class PromtoolError(Exception):
    """promtool did not evaluate the rules; one sentence for a person."""


class _RuleError(PromtoolError):
    """One rule cannot be evaluated on these series."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"Prometheus cannot evaluate {rule}: {why}")
        self.rule = rule


def find_promtool(chosen: Path | None) -> Path | None:
    """The chosen one, else the one on the PATH; None where it is not there.

    Raises:
        OperatorError: the chosen one is none.
    """
    if chosen is None:
        found = shutil.which("promtool")
        return None if found is None else Path(found).absolute()
    # A path has lost its `./`, so what lies in this folder comes before what the PATH has of that name.
    found = shutil.which(chosen.expanduser().absolute()) or shutil.which(chosen.expanduser())
    if found is None:
        raise OperatorError(f"--promtool: {chosen} is no program that can be run")
    # It runs in a folder of its own.
    return Path(found).absolute()


def check_rules(promtool: Path, rules: Rules) -> None:
    """Let promtool parse the file as it stands.

    Raises:
        OperatorError: with what it says against it.
    """
    try:
        answer = subprocess.run(  # noqa: S603  the operator's own promtool
            [promtool, "check", "rules", rules.path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=CHECK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"--promtool: {promtool} cannot be run: {error}") from error
    if answer.returncode != 0:
        raise OperatorError(
            f"--rules: {rules.path}: promtool refuses it: {_first_fault(answer.stderr + answer.stdout)}"
        )


def run_alerts(
    promtool: Path | None, rules: Rules, history: History, report: Callable[[str], None]
) -> tuple[AlertRun, ...]:
    """What every alert of a file did over a history, or why that cannot be told."""
    present = {series.name for series in history.series}
    why_not = {alert.number: _why_not(promtool, alert, present) for alert in rules.alerts}
    fired: Fired = {}
    without: frozenset[str] = frozenset()
    while promtool is not None and (left := frozenset(number for number in why_not if not why_not[number])):
        report(f"{history.name}: promtool evaluates {len(left)} of {len(why_not)} alerts")
        try:
            fired = _run(promtool, rules.marked_groups(left, without), history)
            break
        except _RuleError as error:
            blamed = {a.number for a in rules.alerts if error.rule in a.recorded or error.rule == a.alert}
            without |= {error.rule}
            why_not |= dict.fromkeys(blamed & left or left, str(error))
        except PromtoolError as error:
            why_not |= dict.fromkeys(left, str(error))
    return tuple(
        AlertRun(
            alert.name,
            {} if why_not[alert.number] else _by_engine(fired.get(alert.number, ()), history),
            why_not[alert.number],
        )
        for alert in rules.alerts
    )


def target_problems(rules: Rules, alerts: Iterable[AlertRun], history: History) -> Iterator[str]:
    """Of alerts that never fired, perhaps because they select labels that the series have not here."""
    targets = {
        tuple((name, value) for name, value in series.labels if name in ("job", "instance", "replica"))
        for series in history.series
        if series.name != "up"
    }
    shown = " or ".join(
        "{" + ", ".join(f'{name}="{value}"' for name, value in target) + "}" for target in sorted(targets)
    )
    for rule, alert in zip(rules.alerts, alerts, strict=True):
        if rule.is_of_target and alert.why_not is None and not any(map(any, alert.firing.values())):
            yield (
                f"{history.name}: alert {rule.name} never fired; it selects by job, instance or replica, and here series "
                f"have {shown}"
            )


def _why_not(promtool: Path | None, alert: AlertRule, present: set[str]) -> str | None:
    if promtool is None:
        return ABSENT
    if alert.why_not is not None:
        return alert.why_not
    if alert.metrics and not alert.metrics & present and not alert.is_of_absence:
        return f"none of its metrics was there: {', '.join(sorted(alert.metrics))}"
    foretold = {metric for metric in alert.metrics if metric.startswith("kvheadroom_forecast_")}
    foretold -= {"kvheadroom_forecast_unavailable"}
    if foretold and PROBABILITY not in present and not alert.is_of_absence:
        return f"there was no forecast at any time, and it goes by {', '.join(sorted(foretold))}"
    return None


def _by_engine(fired: Iterable[tuple[int, Mapping[str, str]]], history: History) -> dict[str, Firing]:
    """Firing ticks of each engine; an alert without the label `engine` is about every engine."""
    ticks: dict[str, set[int]] = {engine.engine: set() for engine in history.engines}
    for tick, labels in fired:
        about = labels.get("engine", "")
        for name in (about,) if about else tuple(ticks):
            if name in ticks:
                ticks[name].add(tick)
    return {
        engine.engine: [
            True if tick in ticks[engine.engine] else None if sample is None else False
            for tick, sample in enumerate(engine.ticks)
        ]
        for engine in history.engines
    }


def _run(promtool: Path, groups: list[dict[str, object]], history: History) -> Fired:
    """Evaluate the groups at every tick.

    Raises:
        PromtoolError: it did not.
    """
    every_ms = round(history.every_seconds * 1000)
    case = {
        "interval": f"{every_ms}ms",
        "input_series": [
            {"series": _selector(series), "values": _notation(values)}
            for series, values in history.series.items()
        ],
        "promql_expr_test": [
            {"expr": _FIRING, "eval_time": f"{tick * every_ms}ms", "exp_samples": []}
            for tick in range(history.num_ticks)
        ],
    }
    with tempfile.TemporaryDirectory(prefix="kvheadroom-backtest-") as name:
        folder = Path(name)
        (folder / "rules.yml").write_text(_yaml({"groups": groups}), encoding="utf-8")
        test = {
            "rule_files": ["rules.yml"],
            "evaluation_interval": f"{every_ms}ms",
            # Else promtool takes the groups in random order.
            "group_eval_order": [group.get("name") for group in groups],
            "tests": [case],
        }
        (folder / "test.yml").write_text(_yaml(test), encoding="utf-8")
        answer = folder / "answer"
        try:
            with answer.open("wb") as file:
                code = subprocess.run(  # noqa: S603  the operator's own promtool
                    [promtool, "test", "rules", "test.yml"],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=RUN_SECONDS,
                ).returncode
        except subprocess.TimeoutExpired as error:
            raise PromtoolError(f"promtool took longer than {RUN_SECONDS / 60:.0f} minutes") from error
        except OSError as error:
            raise PromtoolError(f"promtool cannot be run: {error.strerror}") from error
        with answer.open(encoding="utf-8", errors="replace") as lines:
            fired = _read_answer(lines, history.every_seconds)
        with answer.open(encoding="utf-8", errors="replace") as text:
            _check_end(code, text.read(_BEGINNING), has_fired=bool(fired))
        return fired


def _check_end(code: int, beginning: str, *, has_fired: bool) -> None:
    """Whether it is a promtool that went through with it; how its answer begins tells.

    Raises:
        PromtoolError: it is none, or it did not: what it said of some ticks would make silence of the others.
    """
    if code < 0:
        raise PromtoolError(f"promtool was ended by signal {-code}")
    if code == 0 and "SUCCESS" not in beginning:
        raise PromtoolError("promtool did not say that it evaluated anything; is it Prometheus's?")
    if code != 0 and (code != _HAS_FAULTS or not has_fired):
        raise PromtoolError(f"promtool failed: {_first_fault(beginning)}")


def _read_answer(lines: Iterable[str], every_seconds: float) -> Fired:
    """What promtool says against nothing firing.

    Raises:
        PromtoolError: it says something else.
    """
    fired: Fired = {}
    tick: int | None = None
    for line in lines:
        if found := _RULE_ERROR.match(line):
            raise _RuleError(found[1], found[2].strip())
        if found := _AT.fullmatch(line):
            tick = round(_duration_seconds(found[1]) / every_seconds)
        elif (found := _GOT.match(line)) and tick is not None:
            for labels in _elements(found[1]):
                number = labels.get(MARK, "")
                if not number.isdecimal():
                    raise PromtoolError(f"promtool answered what is not understood: {line.strip()[:200]}")
                fired.setdefault(int(number), []).append((tick, labels))
        elif line.lstrip().startswith("expr:"):
            raise PromtoolError(f"promtool failed: {line.strip()[:300]}")
    return fired


def _elements(text: str) -> Iterator[dict[str, str]]:
    for found in _ELEMENT.finditer(text):
        # Go's escapes are a part of Python's.
        yield {name: ast.literal_eval(value) for name, value in _LABEL.findall(found[1])}


def _duration_seconds(text: str) -> float:
    return sum(int(number) * _PART_SECONDS[unit] for number, unit in _PART.findall(text))


def _yaml(document: object) -> str:
    """A document as JSON that is YAML too: that has no halves of characters, and some characters by their number alone."""
    text = json.dumps(document, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _selector(series: Series) -> str:
    return (
        series.name
        + "{"
        + ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in series.labels)
        + "}"
    )


def _notation(values: Values) -> str:
    """Values as promtool's tests write them; a series that ends is stale, as Prometheus marks it."""
    parts = []
    known = False
    for text, run in groupby(values, lambda value: None if value is None else _number(value)):
        count = sum(1 for _ in run)
        if text is not None:
            parts.append(text if count == 1 else f"{text}x{count - 1}")
        else:
            parts += ["stale"] if known else []
            blank = count - known
            parts += [f"_x{blank}"] if blank else []
        known = text is not None
    return " ".join(parts)


def _number(value: float) -> str:
    text = repr(float(value))
    return {"inf": "Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


def _first_fault(text: str) -> str:
    """The first line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines()]
    faults = [
        line
        for line in lines
        if line and not re.fullmatch(r"FAILED:|SUCCESS.*|Checking .*|Unit Testing:.*", line)
    ]
    return faults[0][:300] if faults else "it does not say why"
