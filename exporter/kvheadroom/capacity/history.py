"""What an engine's counters grew by, over a window or since the server's start."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvheadroom.capacity.readings import EngineSnapshot

WINDOWS: Mapping[str, float] = {"1m": 60.0, "5m": 300.0, "1h": 3600.0}
"""Windows by name, in seconds: what goes on now, what to act on, and what holds for longer."""

COUNTERS = (
    "preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_local_cache_hit_total",
    "prompt_tokens_external_kv_transfer_total",
    "generation_tokens_total",
    "finished_requests_total",
    "finished_prompt_tokens_total",
    "finished_generation_tokens_total",
)
GAUGES = ("kv_usage_ratio", "requests_running", "requests_waiting", "requests_waiting_capacity")
KEPT = (*COUNTERS, *GAUGES)
"""Fields of EngineSnapshot that are remembered of earlier pages."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What one engine said at an earlier instant of the same run of its server.

    Attributes:
        taken_at: unix seconds.
        figures: by the names in KEPT; what the page did not tell is left out.
    """

    taken_at: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """Earlier instants of the same run that a scrape is compared with; None where no scrape is near.

    Attributes:
        previous: the scrape before.
        seconds_10, seconds_30: so long ago.
        oldest: the oldest of the last five minutes.
        usage_of_30_seconds: mean of kv_usage_ratio since seconds_30.
    """

    previous: Moment | None = None
    seconds_10: Moment | None = None
    seconds_30: Moment | None = None
    oldest: Moment | None = None
    usage_of_30_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """What counters grew by.

    Attributes:
        seconds: over how long; None since the server's start.
        counters: by the names in COUNTERS; left out where either end is not told.
    """

    seconds: float | None
    counters: Mapping[str, float]

    def of(self, name: str) -> float | None:
        """What one counter grew by; None where that is not known."""
        return self.counters.get(name)


def growth(before: Moment, now: EngineSnapshot, now_at: float) -> Growth:
    """From an earlier moment to now. A counter that fell, which a restart would explain, is left out."""
    grown: dict[str, float] = {}
    for name in COUNTERS:
        value, earlier = getattr(now, name), before.figures.get(name)
        if value is not None and earlier is not None and value >= earlier:
            grown[name] = value - earlier
    return Growth(now_at - before.taken_at, grown)


def between(whole: Growth, last: Growth) -> Growth:
    """What the counters grew by before the last part of a longer time."""
    seconds = None if whole.seconds is None or last.seconds is None else whole.seconds - last.seconds
    return Growth(
        seconds,
        {
            name: value - last.counters[name]
            for name, value in whole.counters.items()
            if name in last.counters
        },
    )


def growth_since_start(now: EngineSnapshot) -> Growth:
    """Since the server's start: the counters as they stand, which one page is enough for."""
    told = ((name, getattr(now, name)) for name in COUNTERS)
    return Growth(None, {name: value for name, value in told if value is not None})
