"""Fed with what a real vLLM was asked, at the rate at which it answered, the simulator tells what that vLLM told."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.lab.recordings import read_recording
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, read_request_log
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.speeds import recorded_rates
from kvheadroom.sources.vllm_metrics import parse_page

RECORDINGS = Path(__file__).parents[2] / "recordings" / "backtest"
POOLS = {"steady": (128, 2048), "chat": (384, 4096), "burst": (128, 2048)}
BLOCK_SIZE = 32
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


@cache
def instants(name: str) -> tuple[tuple[Instant, ...], LoggedArrivals]:
    """Every scrape of a recording beside the simulated one, and the requests as they went."""
    num_blocks, max_model_len = POOLS[name]
    settings = EngineSettings(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        rules=rules_of("0.32.0"),
    )
    recording = read_recording(RECORDINGS / f"{name}.jsonl.gz")
    arrivals = LoggedArrivals(read_request_log(RECORDINGS / f"{name}.requests.jsonl.gz"), BLOCK_SIZE)
    run = Run(settings, arrivals, recorded_rates(recording), starts_at=recording.first_at)
    pages = Pages(settings, model_name="tiny", starts_at=recording.first_at)
    found = []
    for offset, page in recording.pages():
        run.advance(recording.first_at + offset)
        found.append(Instant(offset, engine_of(page), engine_of(pages.text(run))))
    return tuple(found), arrivals


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


@pytest.mark.parametrize(
    ("name", "measured", "while_busy"),
    [("steady", 0.0120, 0.0138), ("chat", 0.0285, 0.0319), ("burst", 0.0099, 0.0132)],
)
def test_usage_is_as_recorded_within_five_percent_of_the_pool(
    name: str, measured: float, while_busy: float
) -> None:
    found, _ = instants(name)
    errors, busy = [], []
    for instant in found:
        recorded, simulated = instant.recorded.kv_usage_ratio, instant.simulated.kv_usage_ratio
        assert recorded is not None
        assert simulated is not None
        errors.append(abs(recorded - simulated))
        if recorded or simulated:
            busy.append(errors[-1])
    error = sum(errors) / len(errors)
    assert error <= 0.05
    # docs/simulator.md tells these figures.
    assert error == pytest.approx(measured, abs=0.00006)
    assert sum(busy) / len(busy) == pytest.approx(while_busy, abs=0.00006)


@pytest.mark.parametrize(("name", "blocks"), [("steady", 0), ("chat", 26), ("burst", 0)])
def test_hits_are_as_recorded_within_a_block_per_request(name: str, blocks: int) -> None:
    found, arrivals = instants(name)
    recorded = grown([instant.recorded.prefix_cache_hits_total for instant in found])
    simulated = grown([instant.simulated.prefix_cache_hits_total for instant in found])
    asked = grown([instant.recorded.prefix_cache_queries_total for instant in found])
    also_asked = grown([instant.simulated.prefix_cache_queries_total for instant in found])
    # One token more or less in time moves an admission across a scrape; where both admitted the same, hits compare.
    same = [
        abs(one - other)
        for one, other, asked_one, asked_other in zip(recorded, simulated, asked, also_asked, strict=True)
        if asked_one == asked_other
    ]
    assert len(same) > 0.85 * len(found)
    assert asked[-1] == also_asked[-1] == sum(request.num_prompt_tokens for request in arrivals.requests)
    assert max(same) == abs(recorded[-1] - simulated[-1]) == blocks * BLOCK_SIZE
    assert blocks <= len(arrivals.requests)


@pytest.mark.parametrize(
    ("name", "starts", "preemptions"),
    [
        ("steady", [], (0, 0)),
        ("chat", [(121.5, 121.5), (164.0, 164.0)], (5, 4)),
        ("burst", [(20.6, 21.0), (67.5, 67.5), (116.5, 116.5)], (54, 57)),
    ],
)
def test_the_recorded_episodes_of_preemption_come_within_a_scrape(
    name: str, starts: list[tuple[float, float]], preemptions: tuple[int, int]
) -> None:
    found, _ = instants(name)
    recorded = grown([instant.recorded.preemptions_total for instant in found])
    simulated = grown([instant.simulated.preemptions_total for instant in found])
    both = list(zip(episodes(found, recorded), episodes(found, simulated), strict=True))
    assert [(round(one[0], 1), round(other[0], 1)) for one, other in both] == starts
    assert all(abs(one[0] - other[0]) < 0.6 for one, other in both)
    assert (recorded[-1], simulated[-1]) == preemptions


@pytest.mark.parametrize("name", POOLS)
def test_every_request_ends_with_its_tokens_and_is_counted(name: str) -> None:
    found, arrivals = instants(name)
    assert found[-1].simulated.requests_running == found[-1].simulated.requests_waiting == 0
    assert found[-1].simulated.kv_usage_ratio == 0
    assert found[-1].simulated.prompt_tokens_total == sum(one.num_prompt_tokens for one in arrivals.requests)
    assert found[-1].simulated.generation_tokens_total == sum(one.output_end for one in arrivals.requests)
    assert all(request.num_output_tokens == request.output_end for request in arrivals.requests)


@pytest.mark.parametrize("name", POOLS)
def test_the_pool_is_told_as_vllm_told_it(name: str) -> None:
    found, _ = instants(name)
    for field in (
        "num_blocks",
        "block_size",
        "attention_block_size",
        "pool_tokens",
        "max_concurrency",
        "engine",
    ):
        assert getattr(found[0].simulated, field) == getattr(found[0].recorded, field), field
