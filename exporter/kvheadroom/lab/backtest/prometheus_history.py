"""History of a Prometheus -> a recording for each vLLM server, part by part, so that it can be broken off and gone on with.

Every part that was answered as a whole is kept in a folder. A part of which anything is not answered is unknown as a whole: half
of it would look as if nothing had happened there.
"""

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.lab.backtest.daemon_run import VLLM_JOB
from kvheadroom.lab.backtest.histories import ticks_in
from kvheadroom.lab.backtest.history_folder import Answers, HistoryFolder, Plan, Wanted
from kvheadroom.lab.backtest.prometheus_queries import ORIGINS, pages
from kvheadroom.sources.prometheus_api import PrometheusApi, RangeSeries

PAUSES_SECONDS: Sequence[float] = (1.0, 5.0)
"""Before what did not answer is asked again."""
MOST_FAILURES = 3
"""Parts in a row without an answer, after which no more is asked."""
_LOOKS = 1000
"""How often within the range it is looked for servers."""
_FEWEST_TICKS, _MOST_TICKS, _SERIES_TICKS = 100, 5000, 50_000
_AGAIN = frozenset({FailureReason.UNREACHABLE, FailureReason.UNAVAILABLE})

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Server:
    """One server and its recording.

    Attributes:
        job, instance: as Prometheus labels what it scraped there.
    """

    name: str
    job: str
    instance: str
    recording: Path


@dataclass(frozen=True, slots=True)
class Fetched:
    """What could be had.

    Attributes:
        problems: what could not, a sentence each.
    """

    servers: tuple[Server, ...]
    problems: tuple[str, ...]


def fetch_history(
    api: PrometheusApi, wanted: Wanted, *, now: float, state: Path, recordings: Path, report: Report
) -> Fetched:
    """Fetch what is not in `state` yet, and write a recording for each server.

    Args:
        now: unix seconds, where a history that is not yet begun ends.
        state: folder for what was answered; what is in it is not asked for again.
        recordings: folder for the recordings.

    Raises:
        OperatorError: the folder is of another history, or cannot be written.
    """
    folder = HistoryFolder(state)
    try:
        plan = folder.plan(wanted)
        if plan is None:
            found = _look_for_servers(api, wanted, now, report)
            if isinstance(found, str):
                return Fetched((), (found,))
            plan = found
            folder.keep_plan(plan)
        else:
            report(f"going on with what {state} has of {_instant(plan.start)} and after")
        return _fetch_parts(api, plan, folder, recordings, report)
    except OSError as error:
        raise OperatorError(f"--state: {state} cannot be written: {error.strerror}") from error


def _look_for_servers(api: PrometheusApi, wanted: Wanted, now: float, report: Report) -> Plan | str:
    """What is to be fetched; or why nothing can be."""
    every_seconds, select = wanted.every_seconds, wanted.select
    # Whole multiples, as dashboards ask: caches in front of Prometheus know the answers then.
    before_now = (ticks_in(wanted.range_seconds, every_seconds) - 1) * every_seconds
    start = round(int(now / every_seconds) * every_seconds - before_now, 3)
    look = max(every_seconds, round(wanted.range_seconds / _LOOKS, 3))
    warnings: list[str] = []
    for number, origin in enumerate(ORIGINS):
        report(f"looking for {origin.words}")
        labels = ", ".join(origin.server_labels)
        expression = (
            f"group by ({labels}) (last_over_time({origin.present}{{{select}}}[{round(look * 1000)}ms]))"
        )
        answer = _ask(api, expression, start, int(wanted.range_seconds / look) + 2, look)
        if isinstance(answer, SourceFailure):
            return f"Prometheus at {api.url}: {answer.detail}"
        found, told = answer
        warnings += told
        servers = tuple(sorted({origin.server(one.labels) for one in found}))
        if servers:
            return Plan(
                wanted=wanted,
                start=start,
                origin=number,
                servers=servers,
                part_ticks=max(_FEWEST_TICKS, min(_MOST_TICKS, _SERIES_TICKS // len(servers))),
            )
    names = " nor ".join(origin.present for origin in ORIGINS)
    matching = f" matching {select}" if select else ""
    said = "".join(f"; it warns: {warning}" for warning in dict.fromkeys(warnings))
    return f"Prometheus at {api.url} has neither {names}{matching} since {_instant(start)}{said}"


def _fetch_parts(
    api: PrometheusApi, plan: Plan, folder: HistoryFolder, recordings: Path, report: Report
) -> Fetched:
    origin = ORIGINS[plan.origin]
    servers = {
        key: _server(key, name, recordings / f"{number}.jsonl.gz")
        for number, (key, name) in enumerate(zip(plan.servers, _names(plan.servers), strict=True))
    }
    writers = {key: _Writer(server.recording, plan) for key, server in servers.items()}
    problems: dict[str, None] = dict.fromkeys(() if origin.lacks is None else (origin.lacks,))
    failed: list[str] = []
    in_a_row = 0
    queries = origin.queries(plan.wanted.select, plan.wanted.rule_metrics)
    for part in range(plan.num_parts):
        known = folder.part(part, queries)
        answers: tuple[Answers, list[str]] | SourceFailure | None = None if known is None else (known, [])
        if answers is None and in_a_row < MOST_FAILURES:
            answers = _fetch_part(api, plan, queries, part, report)
        if isinstance(answers, SourceFailure) or answers is None:
            in_a_row += 1
            last = plan.ticks_of(part) - 1
            failed.append(
                f"Prometheus did not answer for {_instant(plan.at(part, 0))} to {_instant(plan.at(part, last))}: "
                + ("not asked any more" if answers is None else answers.detail)
            )
            for writer in writers.values():
                writer.append(part, [None])
            continue
        in_a_row = 0
        found, warnings = answers
        # With a warning it may not be whole, and the next time it may be.
        if known is None and not warnings:
            folder.keep_part(part, found)
        problems |= dict.fromkeys(f"Prometheus warns: {warning}" for warning in warnings)
        shown = pages(origin, found, plan.ticks_of(part))
        for key, writer in writers.items():
            writer.append(part, shown.of(key))
    return Fetched(tuple(servers.values()), (*problems, *failed))


class _Writer:
    """The recording of one server, written part by part."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self._plan = plan
        self._is_there = False
        self._write([{"origin": {"format": 1, "interval_seconds": plan.wanted.every_seconds}}])

    def append(self, part: int, told: Iterable[str | None]) -> None:
        """The pages at the first ticks of a part; where there is none, that is said once and holds until the next."""
        entries: list[dict[str, object]] = []
        for tick, page in enumerate(told):
            at = self._plan.at(part, tick)
            if page is not None:
                entries.append({"t": at, "text": page})
            elif self._is_there:
                entries.append({"t": at, "err": str(FailureReason.UNREACHABLE)})
            self._is_there = page is not None
        self._write(entries)

    def _write(self, entries: Sequence[dict[str, object]]) -> None:
        if entries:
            text = "".join(f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries)
            with self._path.open("ab") as file:
                file.write(gzip.compress(text.encode(), compresslevel=1, mtime=0))


def _server(key: tuple[str, ...], name: str, recording: Path) -> Server:
    job, instance = key if len(key) == 2 else (VLLM_JOB, *key)
    return Server(name, job, instance, recording)


def _names(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """The last label of each, and all of them where that is not enough."""
    counts = Counter(key[-1] for key in keys)
    return [key[-1] if counts[key[-1]] == 1 and key[-1] else "/".join(key) for key in keys]


def _fetch_part(
    api: PrometheusApi, plan: Plan, queries: Mapping[str, str], part: int, report: Report
) -> tuple[Answers, list[str]] | SourceFailure:
    answers: dict[str, list[RangeSeries]] = {}
    warnings: list[str] = []
    report(f"history: part {part + 1} of {plan.num_parts}, from {_instant(plan.at(part, 0))}")
    for name, expression in queries.items():
        answer = _ask(api, expression, plan.at(part, 0), plan.ticks_of(part), plan.wanted.every_seconds)
        if isinstance(answer, SourceFailure):
            return answer
        answers[name], told = answer
        warnings += told
    return answers, list(dict.fromkeys(warnings))


def _ask(
    api: PrometheusApi, expression: str, start: float, steps: int, step_seconds: float
) -> tuple[list[RangeSeries], list[str]] | SourceFailure:
    for pause in (*PAUSES_SECONDS, None):
        answer = api.query_range(expression, start=start, steps=steps, step_seconds=step_seconds)
        if not isinstance(answer, SourceFailure):
            return list(answer.series), list(answer.warnings)
        if pause is None or answer.reason not in _AGAIN:
            return answer
        time.sleep(pause)
    raise AssertionError("the last pause is None")


def _instant(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
