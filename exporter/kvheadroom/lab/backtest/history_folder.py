"""The folder in which a Prometheus's history is kept part by part while it is fetched, so that it can be gone on with."""

import gzip
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.histories import ticks_in
from kvheadroom.lab.backtest.prometheus_queries import ORIGINS
from kvheadroom.sources.prometheus_api import RangeSeries

_PLAN = "history.json"
# What reading something else than what was written here may raise.
_NOT_OURS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RecursionError)
Answers = Mapping[str, Sequence[RangeSeries]]
"""Name on the page -> series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for, the same when it is gone on with.

    Attributes:
        url: of the Prometheus.
        select: matchers of PromQL that narrow it, empty for everything.
        range_seconds: how far back.
        rule_metrics: what rules are made of, in order.
    """

    url: str
    select: str
    every_seconds: float
    range_seconds: float
    rule_metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is fetched, part by part.

    Attributes:
        start: unix seconds of tick 0.
        origin: number of the origin whose metrics there are.
        servers: values of the origin's labels.
        part_ticks: ticks that are asked for at once.
    """

    wanted: Wanted
    start: float
    origin: int
    servers: tuple[tuple[str, ...], ...]
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


class HistoryFolder:
    """One folder.

    Args:
        path: it is there, and empty or of an earlier run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def plan(self, wanted: Wanted) -> Plan | None:
        """The plan that was begun with in this folder, None in an empty one.

        Raises:
            OperatorError: it is of something else than what is wanted.
        """
        path = self.path / _PLAN
        if not path.exists():
            if any(self.path.iterdir()):
                raise OperatorError(
                    f"--state: {self.path} holds something else; give an empty folder or a new one"
                )
            return None
        try:
            plan = _plan(json.loads(path.read_bytes()))
        except _NOT_OURS as error:
            raise OperatorError(f"--state: {path} is damaged; give another folder") from error
        if plan.wanted != wanted:
            raise OperatorError(
                f"--state: {self.path} holds a history of another address, --range, --every, --select or --rules; "
                "give another folder"
            )
        return plan

    def keep_plan(self, plan: Plan) -> None:
        """Begin with a plan."""
        _write(self.path / _PLAN, json.dumps(asdict(plan), indent=1).encode())

    def _part_path(self, part: int) -> Path:
        return self.path / f"part-{part:05}.json.gz"

    def keep_part(self, part: int, answers: Answers) -> None:
        """What was answered as a whole."""
        found = {name: [[one.labels, one.values] for one in series] for name, series in answers.items()}
        _write(self._part_path(part), gzip.compress(json.dumps(found).encode(), compresslevel=6, mtime=0))

    def part(self, part: int, queries: Collection[str]) -> Answers | None:
        """What was answered before; None where it was not, or where it cannot be read any more.

        Args:
            queries: names on the page, of all that was asked.
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


def _plan(content: dict[str, Any]) -> Plan:
    known = dict(content["wanted"])
    wanted = Wanted(**known | {"rule_metrics": tuple(known["rule_metrics"])})
    servers = tuple(tuple(map(str, server)) for server in content["servers"])
    plan = Plan(**content | {"wanted": wanted, "servers": servers})
    labels = ORIGINS[plan.origin].server_labels
    datetime.fromtimestamp(plan.start, UTC)
    counts = plan.origin, plan.part_ticks - 1
    if not all(isinstance(count, int) and count >= 0 for count in counts) or not all(
        len(server) == len(labels) for server in servers
    ):
        raise ValueError(content)
    return plan


def _write(path: Path, content: bytes) -> None:
    """At once or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)
