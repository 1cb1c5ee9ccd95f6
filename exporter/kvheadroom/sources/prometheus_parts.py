"""A range of a Prometheus's history, asked for part by part, so that it can be broken off and gone on with.

Every part that was answered as a whole is kept in a folder. A part of which anything is not answered is unknown as a whole: half
of it would look as if nothing had happened there.
"""

import gzip
import json
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources.prometheus_api import AskedToWait, PrometheusApi, RangeAnswer, RangeSeries

PAUSES_SECONDS: Sequence[float] = (1.0, 5.0)
"""Before what did not answer is asked again."""
MOST_WAIT_SECONDS = 60.0
"""That a server may ask to wait (`Retry-After`)."""
MOST_FAILURES = 3
"""Parts in a row without an answer, after which no more is asked."""
_FEWEST_TICKS, _MOST_TICKS, _SERIES_TICKS = 100, 5000, 50_000
_LOOKS = 1000
"""How often within the range it is looked for what there is at all."""
_AGAIN = frozenset({FailureReason.UNREACHABLE, FailureReason.UNAVAILABLE})
# What reading something else than what was written here may raise.
_NOT_OURS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RecursionError)

Report = Callable[[str], None]
Answers = Mapping[str, Sequence[RangeSeries]]
"""Name of a query -> series."""


def ticks_in(seconds: float, every_seconds: float) -> int:
    """How many ticks a time has, both its ends included."""
    return int(seconds / every_seconds + 1e-6) + 1


def instant(at: float) -> str:
    """Unix seconds, for people."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for, the same when it is gone on with.

    Attributes:
        url: of the Prometheus.
        select: matchers of PromQL that narrow it, empty for everything.
        range_seconds: how far back.
    """

    url: str
    select: str
    every_seconds: float
    range_seconds: float

    def first_tick(self, now: float) -> float:
        """Unix seconds of tick 0, for a range that ends at `now`.

        Whole multiples, as dashboards ask: caches in front of Prometheus know the answers then.
        """
        before_now = (ticks_in(self.range_seconds, self.every_seconds) - 1) * self.every_seconds
        return round(int(now / self.every_seconds) * self.every_seconds - before_now, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is fetched, part by part.

    Attributes:
        start: unix seconds of tick 0.
        part_ticks: ticks that are asked for at once.
    """

    wanted: Wanted
    start: float
    part_ticks: int

    @property
    def num_ticks(self) -> int:
        """Of the whole range, both ends included."""
        return ticks_in(self.wanted.range_seconds, self.wanted.every_seconds)

    @property
    def num_parts(self) -> int:
        """How often is asked for some ticks."""
        return -(-self.num_ticks // self.part_ticks)

    def ticks_of(self, part: int) -> int:
        """How many a part has."""
        return min(self.part_ticks, self.num_ticks - part * self.part_ticks)

    def at(self, part: int, tick: int) -> float:
        """Unix seconds of a tick of a part."""
        return round(self.start + (part * self.part_ticks + tick) * self.wanted.every_seconds, 3)

    def bounds(self, part: int) -> tuple[float, float]:
        """Unix seconds of its first and its last tick."""
        return self.at(part, 0), self.at(part, self.ticks_of(part) - 1)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def part_ticks(found: int) -> int:
    """How many ticks are asked for at once where so many servers or engines were found."""
    return max(_FEWEST_TICKS, min(_MOST_TICKS, _SERIES_TICKS // found))


class PartsFolder:
    """What was answered, in one folder.

    Args:
        path: it is there, and empty or of an earlier run.
        plan_name: of the file that says what was begun with.
    """

    def __init__(self, path: Path, plan_name: str) -> None:
        self.path = path
        self._plan_path = path / plan_name

    def read_plan(self, read: Callable[[Any], AnyPlan], wanted: Wanted, options: str) -> AnyPlan | None:
        """The plan that was begun with in this folder, None in an empty one.

        Args:
            read: makes it of its JSON; may raise anything that unknown content makes it raise.
            options: what tells one history from another, for people.

        Raises:
            OperatorError: it is of something else than what is wanted.
        """
        path = self._plan_path
        if not path.exists():
            if any(self.path.iterdir()):
                raise OperatorError(
                    f"--state: {self.path} holds something else; give an empty folder or a new one"
                )
            return None
        try:
            plan = read(json.loads(path.read_bytes()))
            instant(plan.start)
            if not isinstance(plan.part_ticks, int) or plan.part_ticks < 1:
                raise ValueError(plan.part_ticks)
        except _NOT_OURS as error:
            raise OperatorError(f"--state: {path} is damaged; give another folder") from error
        if plan.wanted != wanted:
            raise OperatorError(
                f"--state: {self.path} holds a history of another address, {options}; give another folder"
            )
        return plan

    def keep_plan(self, plan: Plan) -> None:
        """Begin with a plan."""
        _write(self._plan_path, json.dumps(asdict(plan), indent=1).encode())

    def _part_path(self, part: int) -> Path:
        return self.path / f"part-{part:05}.json.gz"

    def keep_part(self, part: int, answers: Answers) -> None:
        """What was answered as a whole."""
        found = {name: [[one.labels, one.values] for one in series] for name, series in answers.items()}
        _write(self._part_path(part), gzip.compress(json.dumps(found).encode(), compresslevel=6, mtime=0))

    def part(self, part: int, queries: Collection[str]) -> Answers | None:
        """What was answered before; None where it was not, or where it cannot be read any more.

        Args:
            queries: names of all that was asked.
        """
        path = self._part_path(part)
        try:
            content = json.loads(gzip.decompress(path.read_bytes()))
            if content.keys() != set(queries):
                raise ValueError(path)
            return {name: [_series(*one) for one in series] for name, series in content.items()}
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error, *_NOT_OURS):
            path.unlink(missing_ok=True)
            return None


def _series(labels: dict[str, str], values: dict[str, str]) -> RangeSeries:
    texts = (*labels, *labels.values(), *values.values())
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_number, values.values())):
        raise ValueError(labels)
    return RangeSeries(dict(labels), {int(step): value for step, value in values.items()})


def _is_number(text: str) -> bool:
    float(text)
    return True


def _write(path: Path, content: bytes) -> None:
    """At once or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a range.

    Attributes:
        answers: None where anything of it was not answered.
        failure: why, one sentence that names its times; empty where all was answered.
        warnings: Prometheus's own.
    """

    number: int
    answers: Answers | None
    failure: str = ""
    warnings: tuple[str, ...] = ()


def fetch_parts(
    api: PrometheusApi, plan: Plan, queries: Mapping[str, str], folder: PartsFolder, report: Report
) -> Iterator[Part]:
    """Every part in its turn: as it was kept, else as Prometheus answers, which is kept then.

    Args:
        queries: name -> PromQL.

    Raises:
        OSError: the folder cannot be written.
    """
    failures_in_a_row = 0
    for part in range(plan.num_parts):
        known = folder.part(part, queries)
        if known is not None:
            failures_in_a_row = 0
            yield Part(part, known)
            continue
        answer: _Answered | SourceFailure | None = None
        if failures_in_a_row < MOST_FAILURES:
            answer = _fetch_part(api, plan, queries, part, report)
        if isinstance(answer, SourceFailure) or answer is None:
            failures_in_a_row += 1
            why = "not asked any more" if answer is None else answer.detail
            yield Part(part, None, f"Prometheus did not answer for {between(plan.bounds(part))}: {why}")
            continue
        failures_in_a_row = 0
        # With a warning it may not be whole, and the next time it may be.
        if not answer.warnings:
            folder.keep_part(part, answer.answers)
        yield Part(part, answer.answers, warnings=answer.warnings)


def between(bounds: tuple[float, float]) -> str:
    """Two instants, for people."""
    return f"{instant(bounds[0])} to {instant(bounds[1])}"


@dataclass(frozen=True, slots=True)
class _Answered:
    answers: Answers
    warnings: tuple[str, ...]


def _fetch_part(
    api: PrometheusApi, plan: Plan, queries: Mapping[str, str], part: int, report: Report
) -> _Answered | SourceFailure:
    answers: dict[str, Sequence[RangeSeries]] = {}
    warnings: list[str] = []
    report(f"history: part {part + 1} of {plan.num_parts}, from {instant(plan.at(part, 0))}")
    for name, expression in queries.items():
        answer = ask(api, expression, plan.at(part, 0), plan.ticks_of(part), plan.wanted.every_seconds)
        if isinstance(answer, SourceFailure):
            return answer
        answers[name] = answer.series
        warnings += answer.warnings
    return _Answered(answers, tuple(dict.fromkeys(warnings)))


def look_for(
    api: PrometheusApi, wanted: Wanted, metric: str, labels: Sequence[str], start: float
) -> RangeAnswer | SourceFailure:
    """Which values of labels a metric has anywhere in the range; its values mean nothing.

    Args:
        start: unix seconds of tick 0.
    """
    look = max(wanted.every_seconds, round(wanted.range_seconds / _LOOKS, 3))
    expression = f"group by ({', '.join(labels)}) (last_over_time({metric}{{{wanted.select}}}[{round(look * 1000)}ms]))"
    return ask(api, expression, start, int(wanted.range_seconds / look) + 2, look)


def ask(
    api: PrometheusApi, expression: str, start: float, steps: int, step_seconds: float
) -> RangeAnswer | SourceFailure:
    """A range query, asked again after a pause where it may be answered then; the server may say how long that is."""
    for pause in (*PAUSES_SECONDS, None):
        answer = api.query_range(expression, start=start, steps=steps, step_seconds=step_seconds)
        if isinstance(answer, RangeAnswer) or pause is None or answer.reason not in _AGAIN:
            return answer
        if isinstance(answer, AskedToWait):
            if answer.seconds > MOST_WAIT_SECONDS:
                return answer
            pause = max(pause, answer.seconds)  # noqa: PLW2901
        time.sleep(pause)
    raise AssertionError("the last pause is None")
