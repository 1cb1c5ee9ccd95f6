"""What of a Prometheus's history is scored, kept in a folder while it is fetched, so that it can be gone on with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvheadroom.sources import prometheus_parts
from kvheadroom.sources.prometheus_parts import PartsFolder
from kvheadroom.sources.prometheus_queries import ORIGINS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(prometheus_parts.Wanted):
    """What is asked for, the same when it is gone on with.

    Attributes:
        rule_metrics: what rules are made of, in order.
    """

    rule_metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(prometheus_parts.Plan):
    """What is fetched, part by part.

    Attributes:
        origin: number of the origin whose metrics there are.
        servers: values of the origin's labels.
    """

    wanted: Wanted
    origin: int
    servers: tuple[tuple[str, ...], ...]


class HistoryFolder(PartsFolder):
    """One folder.

    Args:
        path: it is there, and empty or of an earlier run.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "history.json")

    def plan(self, wanted: Wanted) -> Plan | None:
        """The plan that was begun with in this folder, None in an empty one.

        Raises:
            OperatorError: it is of something else than what is wanted.
        """
        return self.read_plan(_plan, wanted, "--range, --every, --select or --rules")


def _plan(content: dict[str, Any]) -> Plan:
    known = dict(content["wanted"])
    wanted = Wanted(**known | {"rule_metrics": tuple(known["rule_metrics"])})
    servers = tuple(tuple(map(str, server)) for server in content["servers"])
    plan = Plan(**content | {"wanted": wanted, "servers": servers})
    labels = ORIGINS[plan.origin].server_labels
    if plan.origin < 0 or not all(len(server) == len(labels) for server in servers):
        raise ValueError(content)
    return plan
