"""A backtest from its order to its results."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.alert_rules import Rules, own_rules, read_rules
from kvheadroom.lab.backtest.daemon_run import num_ticks, run_recording
from kvheadroom.lab.backtest.events import Scale
from kvheadroom.lab.backtest.histories import ALWAYS_WANTED, History
from kvheadroom.lab.backtest.history_folder import Wanted
from kvheadroom.lab.backtest.prometheus_history import fetch_history
from kvheadroom.lab.backtest.promtool import check_rules, find_promtool, run_alerts, target_problems
from kvheadroom.lab.backtest.results import EngineResult, score_history
from kvheadroom.lab.recording_lines import RecordingError
from kvheadroom.lab.recordings import Recording, read_recording
from kvheadroom.sources.prometheus_api import PrometheusApi

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOrder:
    """A history that a Prometheus has.

    Attributes:
        range_seconds: how far back from now.
        select: matchers of PromQL that narrow it, empty for everything.
        state: folder to go on with what was fetched, None to keep nothing.
    """

    api: PrometheusApi
    range_seconds: float
    select: str = ""
    state: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be scored, and how.

    Attributes:
        recordings: files of `kvheadroom record`.
        prometheus: in place of recordings.
        every_seconds: from one look to the next, whole milliseconds.
        rules: file of Prometheus rules, None for kvheadroom's own.
        promtool: where it is, None for the PATH.
    """

    recordings: tuple[Path, ...] = ()
    prometheus: PrometheusOrder | None = None
    every_seconds: float
    scale: Scale
    rules: Path | None = None
    promtool: Path | None = None


def backtest(order: Order, report: Report) -> tuple[EngineResult, ...]:
    """Score every recording, or every server of a Prometheus.

    Args:
        report: takes a sentence of progress now and then.

    Raises:
        OperatorError: rules or a recording cannot be read; all are looked through before the first is scored.
    """
    rules, promtool = _rules(order)
    scoring = _Scoring(order, rules, promtool, report)
    if order.prometheus is not None:
        return _of_prometheus(order.prometheus, scoring)
    named = list(zip(names_of(order.recordings), map(read_recording, order.recordings), strict=True))
    for name, recording in named:
        num_ticks(recording, name, order.every_seconds)
    results: list[EngineResult] = []
    for name, recording in named:
        results += scoring.score(recording, name)
    return tuple(results)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What is the same for every recording."""

    order: Order
    rules: Rules
    promtool: Path | None
    report: Report

    def score(
        self,
        recording: Recording,
        name: str,
        *,
        target: tuple[str, str] | None = None,
        problems: tuple[str, ...] = (),
    ) -> tuple[EngineResult, ...]:
        """Every engine of one recording."""
        self.report(f"{name}: {recording.num_pages:,} pages")
        history = run_recording(
            recording,
            name,
            every_seconds=self.order.every_seconds,
            wanted=ALWAYS_WANTED | self.rules.metrics,
            report=self.report,
            # Who closes pauses of alarms need not know more exactly when an engine preempted.
            longest_pause_seconds=self.order.scale.alarm_gap_seconds,
            target=target,
        )
        history = replace(history, problems=(*problems, *history.problems))
        alerts = run_alerts(self.promtool, self.rules, history, self.report)
        doubts = target_problems(self.rules, alerts, history)
        history = replace(history, problems=(*history.problems, *doubts))
        return score_history(history, alerts, self.order.scale)

    def nothing(
        self, name: str, duration_seconds: float, problems: tuple[str, ...]
    ) -> tuple[EngineResult, ...]:
        """Of what could not be had."""
        every_seconds = self.order.every_seconds
        history = History(
            name=name,
            duration_seconds=duration_seconds,
            every_seconds=every_seconds,
            engines=(),
            series={},
            problems=problems,
        )
        return score_history(history, (), self.order.scale)


def _of_prometheus(order: PrometheusOrder, scoring: _Scoring) -> tuple[EngineResult, ...]:
    with tempfile.TemporaryDirectory(prefix="kvheadroom-backtest-") as name:
        recordings, state = Path(name) / "recordings", order.state or Path(name) / "state"
        for folder in (recordings, state):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OperatorError(f"--state: {folder}: {error.strerror}") from error
        fetched = fetch_history(
            order.api,
            Wanted(
                url=order.api.url,
                select=order.select,
                every_seconds=scoring.order.every_seconds,
                range_seconds=order.range_seconds,
                rule_metrics=tuple(sorted(scoring.rules.metrics)),
            ),
            now=time.time(),
            state=state,
            recordings=recordings,
            report=scoring.report,
        )
        results: list[EngineResult] = []
        for server in fetched.servers:
            try:
                recording = read_recording(server.recording)
            except RecordingError:
                why = f"{server.name}: none of its pages could be had"
                results += scoring.nothing(server.name, order.range_seconds, (*fetched.problems, why))
                continue
            target = server.job, server.instance
            results += scoring.score(recording, server.name, target=target, problems=fetched.problems)
        return tuple(results) or scoring.nothing("Prometheus", order.range_seconds, fetched.problems)


def _rules(order: Order) -> tuple[Rules, Path | None]:
    """The rules, found to be in order, and the promtool that said so."""
    rules = own_rules() if order.rules is None else read_rules(order.rules)
    promtool = find_promtool(order.promtool)
    if promtool is not None:
        check_rules(promtool, rules)
    return rules, promtool


def names_of(paths: tuple[Path, ...]) -> list[str]:
    """A name for each recording: the file's without its endings, or the whole path where two would have the same."""
    short = [path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".metrics") for path in paths]
    counts = Counter(short)
    return [name if counts[name] == 1 else str(path) for name, path in zip(short, paths, strict=True)]
