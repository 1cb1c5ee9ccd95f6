"""Servers that come and go: where each was found, what the operator calls it, and how its source answered.

Every type here crosses a room: the sources of servers make them, the outputs show them.
"""

import re
from dataclasses import dataclass

from kvheadroom.capacity.readings import FailureReason, SourceFailure

CONFIG_SOURCE = "config"
"""Where the servers of `replicas` come from."""

MAX_LABELS = 30
MAX_LABEL_NAME = 100
MAX_LABEL_VALUE = 200
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

OUR_LABELS = frozenset(
    {
        *(
            "replica",
            "engine",
            "model_name",
            "source",
            "reason",
            "session_tokens",
            "basis",
            "limit",
            "metric",
            "fact",
        ),
        *("state", "gpu", "by", "window", "horizon", "term", "part", "finding", "reliability", "bound"),
        *("cache_tier", "content", "idle_seconds", "warm", "tier_bytes"),
        *("le", "quantile"),
    }
)
"""Labels of kvheadroom's series of a replica, which `group_left` would write over, and those of histograms. Not those that only
overhead_sample_bytes has: it is read by `kvheadroom calibrate` alone, and `release` is a label that many servers have."""


@dataclass(frozen=True, slots=True)
class WatchedTarget:
    """A replica that is watched.

    Attributes:
        source: what found it; `config` for one of `replicas`.
        labels: the operator's, sorted by name.
    """

    replica: str
    source: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryStatus:
    """How a source of servers answered when last asked.

    Attributes:
        source: its place in the config.
        targets: servers of its last good answer that are watched; None before the first.
        left_out: a sentence for each that is not watched.
        note: a sentence for people about what it sees.
        last_success_at: unix seconds; None before the first success.
        failure: why it gave no whole answer; the servers of the last good one stay.
        failures_total: count by reason since the start of this program.
    """

    source: str
    targets: int | None = None
    left_out: tuple[str, ...] = ()
    note: str | None = None
    last_success_at: float | None = None
    failure: SourceFailure | None = None
    failures_total: tuple[tuple[FailureReason, int], ...] = ()

    @property
    def attempted(self) -> bool:
        """Whether it was asked at all, well or badly."""
        return self.failure is not None or self.last_success_at is not None

    @property
    def up(self) -> bool:
        """Whether all that it was asked for came."""
        return self.failure is None


def checked_labels(value: object) -> dict[str, str]:
    """Labels that can stand beside ours in PromQL.

    Raises:
        ValueError: with what is wrong and what is allowed.
    """
    if not isinstance(value, dict):
        raise ValueError("a mapping (`name: value`) is needed")  # noqa: TRY004  its readers catch ValueError
    if len(value) > MAX_LABELS:
        raise ValueError(f"there are {len(value)} labels; at most {MAX_LABELS} are taken")
    for name, text in value.items():
        shown = repr(str(name)[:MAX_LABEL_NAME])
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or len(name) > MAX_LABEL_NAME:
            raise ValueError(f"{shown} is no name of a label; letters, digits and _ are, as in `team`")
        if name.startswith("__"):
            raise ValueError(f"{shown}: names that begin with __ are Prometheus's own")
        if name in OUR_LABELS:
            raise ValueError(f"{shown} is a label of kvheadroom's own series; choose another name")
        if not isinstance(text, str):
            raise ValueError(f"the label {name} needs a text; write its value in quotes")  # noqa: TRY004  as above
        if len(text) > MAX_LABEL_VALUE or not text.isprintable():
            raise ValueError(f"the label {name} needs one line of at most {MAX_LABEL_VALUE} characters")
    return dict(value)
