"""Composition root of `kvheadroom calibrate --prometheus`: the history that a Prometheus has -> every start of every engine in it."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvheadroom.capacity.calibration_run import Looked, LookedAt
from kvheadroom.capacity.calibration_samples import Excluded, Exclusion
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.exported_starts import ExportedSample, Past, Window, exported_starts
from kvheadroom.capacity.readings import SourceFailure
from kvheadroom.capacity.scraped_starts import SeenEngine, scraped_starts
from kvheadroom.config import Config
from kvheadroom.past_replicas import PastReplicas
from kvheadroom.sources import prometheus_parts
from kvheadroom.sources.calibration_history import (
    SAMPLE,
    UnreadableSample,
    exported_queries,
    read_exported,
)
from kvheadroom.sources.prometheus_api import PrometheusApi
from kvheadroom.sources.prometheus_parts import (
    Part,
    PartsFolder,
    Plan,
    Report,
    between,
    fetch_parts,
    instant,
    look_for,
    part_ticks,
)
from kvheadroom.sources.prometheus_queries import VLLM
from kvheadroom.sources.vllm_history import read_engines, vllm_queries

MOST_TICKS = 2_000_000
"""Of one history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryOrder:
    """Which history, and what it does not tell.

    Attributes:
        range_seconds: how far back from now.
        every_seconds: from one look to the next, whole milliseconds.
        select: matchers of PromQL that narrow it, empty for everything.
        state: folder to go on with what was fetched, None to keep nothing.
        config: whose replicas are looked for in vLLM's own metrics; None for what kvheadroom exported alone.
        version: release of vLLM that those ran; None where nobody says it.
    """

    api: PrometheusApi
    range_seconds: float
    every_seconds: float
    select: str = ""
    state: Path | None = None
    config: Config | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted(prometheus_parts.Wanted):
    """What is asked for, the same when it is gone on with.

    Attributes:
        of_vllm: vLLM's own metrics as well.
    """

    of_vllm: bool


def look_at_history(order: HistoryOrder, now: float, report: Report) -> Looked:
    """Every start of an engine in the range.

    Args:
        now: unix seconds, where a history that is not yet begun ends.

    Raises:
        OperatorError: the folder is of another history, or cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="kvheadroom-calibrate-") as name:
        state = order.state or Path(name)
        # Not the name that a file of samples often has, which --out may put beside it.
        folder = PartsFolder(state, "calibration-history.json")
        try:
            state.mkdir(parents=True, exist_ok=True)
            plan = _plan(order, folder, now, report)
            return Looked((), (plan,)) if isinstance(plan, str) else _look(order, plan, folder, report)
        except OSError as error:
            raise OperatorError(f"--state: {state} cannot be written: {error.strerror}") from error


def _plan(order: HistoryOrder, folder: PartsFolder, now: float, report: Report) -> Plan | str:
    """What is to be fetched; or why nothing can be."""
    wanted = _Wanted(
        url=order.api.url,
        select=order.select,
        every_seconds=order.every_seconds,
        range_seconds=order.range_seconds,
        of_vllm=order.config is not None,
    )
    plan = folder.read_plan(_read_plan, wanted, "--range, --every, --select or --config")
    if plan is not None:
        report(f"going on with what {folder.path} has of {instant(plan.start)} and after")
        return plan
    start = wanted.first_tick(now)
    looks: list[tuple[str, tuple[str, ...]]] = [(SAMPLE, ("replica", "engine"))]
    if wanted.of_vllm:
        looks.append((VLLM.present, (*VLLM.server_labels, "engine")))
    engines, warnings = 0, list[str]()
    for metric, labels in looks:
        report(f"looking for {metric}")
        found = look_for(order.api, wanted, metric, labels, start)
        if isinstance(found, SourceFailure):
            return f"Prometheus at {order.api.url}: {found.detail}"
        engines += len(found.series)
        warnings += found.warnings
    if not engines:
        return _nothing(order, start, warnings)
    plan = Plan(wanted=wanted, start=start, part_ticks=part_ticks(engines))
    folder.keep_plan(plan)
    return plan


def _nothing(order: HistoryOrder, start: float, warnings: list[str]) -> str:
    matching = f" matching {order.select}" if order.select else ""
    said = "".join(f"; it warns: {warning}" for warning in dict.fromkeys(warnings))
    since = f"{matching} since {instant(start)}{said}"
    if order.config is not None:
        return f"Prometheus at {order.api.url} has neither {SAMPLE} nor {VLLM.present}{since}: does it scrape kvheadroom, or vLLM itself?"
    return (
        f"Prometheus at {order.api.url} has no {SAMPLE}{since}: is kvheadroom scraped by it, and has one of its engines a start that was "
        "measured (`kvheadroom check`)? With --config FILE vLLM's own metrics are looked at too"
    )


def _read_plan(content: dict[str, Any]) -> Plan:
    return Plan(**content | {"wanted": _Wanted(**content["wanted"])})


@dataclass(slots=True)
class _Found:
    """What the parts told, together.

    Attributes:
        unanswered: times of which nothing is known.
        problems: of these, a sentence each.
    """

    exported: list[ExportedSample] = field(default_factory=list)
    unreadable: dict[UnreadableSample, Window] = field(default_factory=dict)
    engines: list[SeenEngine] = field(default_factory=list)
    unanswered: list[Window] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, part: Part, plan: Plan, *, of_vllm: bool) -> None:
        """One part more; one with a warning may not be whole, and a start that looks constant in it may not have been."""
        bounds = plan.bounds(part.number)
        if part.answers is None or part.warnings:
            self.unanswered.append(bounds)
            told = f"Prometheus warns of {between(bounds)}, which is left out: {'; '.join(part.warnings)}"
            self.problems.append(told if part.warnings else part.failure)
            return
        at = partial(plan.at, part.number)
        for one in read_exported(part.answers, at):
            if isinstance(one, ExportedSample):
                self.exported.append(one)
            else:
                self.unreadable[one] = self.unreadable.get(one, bounds)[0], bounds[1]
        if of_vllm:
            self.engines += read_engines(part.answers, at, plan.ticks_of(part.number))


def _look(order: HistoryOrder, plan: Plan, folder: PartsFolder, report: Report) -> Looked:
    queries = exported_queries(order.select)
    if order.config is not None:
        queries |= vllm_queries(order.select)
    found = _Found()
    for part in fetch_parts(order.api, plan, queries, folder, report):
        found.add(part, plan, of_vllm=order.config is not None)
    past = Past(
        where=f"Prometheus at {order.api.url}",
        every_seconds=order.every_seconds,
        unanswered=found.unanswered,
        instant=instant,
    )
    starts = exported_starts(found.exported, past)
    return Looked((*starts, *_unreadable(found, past), *_scraped(order, found, past)), tuple(found.problems))


def _unreadable(found: _Found, past: Past) -> Iterator[LookedAt]:
    for one, seen in found.unreadable.items():
        yield LookedAt(
            evidence=past.evidence(one.name, seen),
            model="",
            release="",
            outcome=Excluded(Exclusion.UNKNOWN, one.why),
        )


def _scraped(order: HistoryOrder, found: _Found, past: Past) -> Iterator[LookedAt]:
    """Starts that vLLM's own metrics alone tell of: what kvheadroom measured of the others, it measured with more knowledge."""
    if order.config is None:
        return
    replicas = PastReplicas(order.config, order.version)
    known = {one.start for one in found.exported}
    for start in scraped_starts(found.engines):
        if replicas.name_of(start) not in known:
            yield replicas.look(start, past)
