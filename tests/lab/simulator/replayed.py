"""A recording beside what the simulator makes of its requests."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.lab.recordings import Recording
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, read_request_log
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.speeds import recorded_rates
from kvheadroom.sources.vllm_metrics import parse_page

EPISODE_SECONDS = 20.0
"""Preemptions further apart belong to different episodes."""


@dataclass(frozen=True)
class Instant:
    at: float
    recorded: EngineSnapshot
    simulated: EngineSnapshot


def engine_of(page: str) -> EngineSnapshot:
    parsed = parse_page(page.encode())
    assert isinstance(parsed, VllmPage)
    assert not parsed.problems
    return parsed.engines[0]


def replay(
    recording: Recording, requests: Path, settings: EngineSettings
) -> tuple[tuple[Instant, ...], LoggedArrivals]:
    """Every scrape of a recording beside the simulated one, and the requests as they went."""
    arrivals = LoggedArrivals(read_request_log(requests), settings.block_size)
    run = Run(settings, arrivals, recorded_rates(recording), starts_at=recording.first_at)
    pages = Pages(settings, model_name="tiny", starts_at=recording.first_at)
    found = []
    for offset, page in recording.pages():
        run.advance(recording.first_at + offset)
        found.append(Instant(offset, engine_of(page), engine_of(pages.text(run))))
    return tuple(found), arrivals


def usage_error(found: tuple[Instant, ...]) -> float:
    """Mean absolute error, a share of the pool."""
    errors = []
    for instant in found:
        recorded, simulated = instant.recorded.kv_usage_ratio, instant.simulated.kv_usage_ratio
        assert recorded is not None
        assert simulated is not None
        errors.append(abs(recorded - simulated))
    return sum(errors) / len(errors)


def grown(of: list[float | None]) -> list[float]:
    """A counter since the first scrape."""
    values = [value for value in of if value is not None]
    assert len(values) == len(of)
    return [value - values[0] for value in values]


def episodes(found: tuple[Instant, ...], preemptions: list[float]) -> list[tuple[float, float]]:
    """(first, last) rise of the counter of each episode."""
    rises = [
        instant.at
        for instant, (before, after) in zip(found[1:], pairwise(preemptions), strict=True)
        if after > before
    ]
    told: list[tuple[float, float]] = []
    for at in rises:
        if told and at - told[-1][1] < EPISODE_SECONDS:
            told[-1] = told[-1][0], at
        else:
            told.append((at, at))
    return told
