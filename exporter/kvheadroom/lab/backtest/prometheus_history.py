"""History of a Prometheus -> a recording for each vLLM server, part by part, so that it can be broken off and gone on with."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.lab.backtest.daemon_run import VLLM_JOB
from kvheadroom.lab.backtest.history_folder import HistoryFolder, Plan, Wanted
from kvheadroom.sources.prometheus_api import PrometheusApi
from kvheadroom.sources.prometheus_parts import Report, fetch_parts, instant, look_for, part_ticks
from kvheadroom.sources.prometheus_queries import ORIGINS, pages


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
            report(f"going on with what {state} has of {instant(plan.start)} and after")
        return _fetch_parts(api, plan, folder, recordings, report)
    except OSError as error:
        raise OperatorError(f"--state: {state} cannot be written: {error.strerror}") from error


def _look_for_servers(api: PrometheusApi, wanted: Wanted, now: float, report: Report) -> Plan | str:
    """What is to be fetched; or why nothing can be."""
    start = wanted.first_tick(now)
    warnings: list[str] = []
    for number, origin in enumerate(ORIGINS):
        report(f"looking for {origin.words}")
        answer = look_for(api, wanted, origin.present, origin.server_labels, start)
        if isinstance(answer, SourceFailure):
            return f"Prometheus at {api.url}: {answer.detail}"
        warnings += answer.warnings
        servers = tuple(sorted({origin.server(one.labels) for one in answer.series}))
        if servers:
            return Plan(
                wanted=wanted,
                start=start,
                origin=number,
                servers=servers,
                part_ticks=part_ticks(len(servers)),
            )
    names = " nor ".join(origin.present for origin in ORIGINS)
    matching = f" matching {wanted.select}" if wanted.select else ""
    said = "".join(f"; it warns: {warning}" for warning in dict.fromkeys(warnings))
    return f"Prometheus at {api.url} has neither {names}{matching} since {instant(start)}{said}"


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
    queries = origin.queries(plan.wanted.select, plan.wanted.rule_metrics)
    for part in fetch_parts(api, plan, queries, folder, report):
        if part.answers is None:
            failed.append(part.failure)
            for writer in writers.values():
                writer.append(part.number, [None])
            continue
        problems |= dict.fromkeys(f"Prometheus warns: {warning}" for warning in part.warnings)
        shown = pages(origin, part.answers, plan.ticks_of(part.number))
        for key, writer in writers.items():
            writer.append(part.number, shown.of(key))
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
