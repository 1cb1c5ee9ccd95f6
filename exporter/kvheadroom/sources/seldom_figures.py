"""Figures that a server is asked for once a minute, taken over to the pages in between."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.sources.metric_names import NEWEST, SELDOM_FIELDS, SELDOM_NAMES

_METRICS = frozenset(f"vllm:{NEWEST[name]}" for name in SELDOM_NAMES)


@dataclass(frozen=True, slots=True)
class SeldomFigures:
    """What a page told of them. All are of the same instant, so their ratios and growth agree with one another.

    Attributes:
        process_start: start time of the process; of another one nothing is taken over.
        fields: of EngineSnapshot, by engine.
        metrics: as in VllmPage.
    """

    process_start: float
    fields: Mapping[str, Mapping[str, float]]
    metrics: frozenset[str]


def seldom_figures(page: VllmPage) -> SeldomFigures | None:
    """Those of a page that was asked for everything; None where its process cannot be told from another."""
    if page.process_start_time_seconds is None:
        return None
    fields = {
        engine.engine: {name: value for name in SELDOM_FIELDS if (value := getattr(engine, name)) is not None}
        for engine in page.engines
    }
    return SeldomFigures(page.process_start_time_seconds, fields, page.metrics & _METRICS)
