"""A backtest from its order to its results."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvheadroom.lab.backtest.alert_rules import Rules, own_rules, read_rules
from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import Scale
from kvheadroom.lab.backtest.histories import ALWAYS_WANTED
from kvheadroom.lab.backtest.promtool import check_rules, find_promtool, run_alerts
from kvheadroom.lab.backtest.results import EngineResult, score_history
from kvheadroom.lab.recordings import read_recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be scored, and how.

    Attributes:
        recordings: files of `kvheadroom record`.
        every_seconds: from one look to the next, whole milliseconds.
        rules: file of Prometheus rules, None for kvheadroom's own.
        promtool: where it is, None for the PATH.
    """

    recordings: tuple[Path, ...]
    every_seconds: float
    scale: Scale
    rules: Path | None = None
    promtool: Path | None = None


def backtest(order: Order, report: Callable[[str], None]) -> tuple[EngineResult, ...]:
    """Score every recording.

    Args:
        report: takes a sentence of progress now and then.

    Raises:
        OperatorError: rules or a recording cannot be read; all are looked through before the first is scored.
    """
    rules, promtool = _rules(order)
    wanted = ALWAYS_WANTED | rules.metrics
    recordings = [read_recording(path) for path in order.recordings]
    results: list[EngineResult] = []
    for name, recording in zip(names_of(order.recordings), recordings, strict=True):
        report(f"{name}: {recording.num_pages:,} pages")
        history = run_recording(
            recording, name, every_seconds=order.every_seconds, wanted=wanted, report=report
        )
        alerts = run_alerts(promtool, rules, history, report)
        results += score_history(history, alerts, order.scale)
    return tuple(results)


def _rules(order: Order) -> tuple[Rules, Path | None]:
    """The rules, found to be in order, and the promtool that said so."""
    rules = read_rules(own_rules() if order.rules is None else order.rules)
    promtool = find_promtool(order.promtool)
    if promtool is not None:
        check_rules(promtool, rules)
    return rules, promtool


def names_of(paths: tuple[Path, ...]) -> list[str]:
    """A name for each recording: the file's without its endings, or the whole path where two would have the same."""
    short = [path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".metrics") for path in paths]
    counts = Counter(short)
    return [name if counts[name] == 1 else str(path) for name, path in zip(short, paths, strict=True)]
