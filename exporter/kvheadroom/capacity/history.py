"""What an engine's counters grew by, over a window or since the server's start."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeAlias

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
    "offload_load_bytes_total",
    "offload_load_seconds_total",
    "offload_store_bytes_total",
    "offload_allocation_failures_total",
    "prefill_seconds_total",
    "prefill_computed_tokens_total",
    "evicted_blocks_total",
    "evicted_block_idle_seconds_total",
)
LMCACHE_COUNTERS = ("lmcache_lookup_tokens_total", "lmcache_lookup_hits_total")
"""They fall without a restart of the server where somebody has LMCache clear them."""
GAUGES = ("kv_usage_ratio", "requests_running", "requests_waiting", "requests_waiting_capacity")
KEPT = (*COUNTERS, *LMCACHE_COUNTERS, *GAUGES)
"""Fields of EngineSnapshot that are remembered of earlier pages."""

Figures: TypeAlias = Sequence[float]
"""In the order of KEPT; NaN where the page did not tell one, so that plain arithmetic on it tells nothing either."""

_PLACES: Mapping[str, int] = {name: place for place, name in enumerate(KEPT)}
_figures_of = attrgetter(*KEPT)
_ZEROS: Figures = (0.0,) * len(KEPT)


# Each tick makes a score of these, and a named tuple is made faster than a frozen dataclass.
class Moment(NamedTuple):
    """What one engine said at one instant.

    Attributes:
        taken_at: unix seconds.
    """

    taken_at: float
    figures: Figures

    def of(self, name: str) -> float | None:
        """One of the figures in KEPT; None where the page did not tell it."""
        figure = self.figures[_PLACES[name]]
        return None if math.isnan(figure) else figure


class PastFigures(NamedTuple):
    """What one engine said at several instants of one run of its server, oldest first.

    Attributes:
        times: unix seconds.
        figures: of all instants, one after the other.
    """

    times: Sequence[float] = ()
    figures: Figures = ()

    def of(self, name: str) -> Sequence[float]:
        """One of the figures in KEPT at each of the times; NaN where the page did not tell it."""
        return self.figures[_PLACES[name] :: len(KEPT)]


class LastHour(NamedTuple):
    """What is drawn of the last hour of one run: a scrape a minute, oldest first.

    Attributes:
        times: unix seconds.
        kv_usage_ratios, preemptions_totals: at each of the times; NaN where the page did not tell it.
    """

    times: Sequence[float] = ()
    kv_usage_ratios: Sequence[float] = ()
    preemptions_totals: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """Earlier instants of the same run that a scrape is compared with; None where no scrape is near.

    Attributes:
        previous: the scrape before.
        seconds_10, seconds_30, seconds_60: so long ago.
        oldest: the oldest of the last five minutes.
        usage_of_30_seconds: mean of kv_usage_ratio since seconds_30.
    """

    previous: Moment | None = None
    seconds_10: Moment | None = None
    seconds_30: Moment | None = None
    seconds_60: Moment | None = None
    oldest: Moment | None = None
    usage_of_30_seconds: float | None = None


class Growth(NamedTuple):
    """What counters grew by, from one instant to another.

    Attributes:
        seconds: over how long; None since the server's start.
    """

    seconds: float | None
    before: Figures
    after: Figures

    def of(self, name: str) -> float | None:
        """What a counter of KEPT grew by; None where either end is not told, or it fell, which a restart would explain."""
        place = _PLACES[name]
        grown = self.after[place] - self.before[place]
        # What is not a number is not above 0 either.
        return grown if grown >= 0 else None


def moment_of(snapshot: EngineSnapshot, taken_at: float) -> Moment:
    """What is remembered of a page."""
    return Moment(taken_at, tuple([math.nan if told is None else told for told in _figures_of(snapshot)]))


def growth(before: Moment, now: Moment) -> Growth:
    """From an earlier moment to now."""
    return Growth(now.taken_at - before.taken_at, before.figures, now.figures)


def between(whole: Growth, last: Growth) -> Growth:
    """What the counters grew by before the last part of a longer time; only of those that are told now."""
    seconds = None if whole.seconds is None or last.seconds is None else whole.seconds - last.seconds
    # Nought times what is not a number is none either.
    middle = [then + 0.0 * now for then, now in zip(last.before, last.after, strict=True)]
    return Growth(seconds, whole.before, middle)


def growth_since_start(now: Moment) -> Growth:
    """Since the server's start: the counters as they stand, which one page is enough for."""
    return Growth(None, _ZEROS, now.figures)
