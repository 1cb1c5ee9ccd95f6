"""Fed with what a real vLLM was asked, at the rate at which it answered, the simulator tells what that vLLM told."""

from functools import cache
from pathlib import Path

import pytest

from kvheadroom.lab.recordings import read_recording
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.request_log import LoggedArrivals
from kvheadroom.lab.simulator.rules import rules_of
from tests.lab.simulator.replayed import Instant, episodes, grown, replay, usage_error

RECORDINGS = Path(__file__).parents[2] / "recordings" / "backtest"
POOLS = {"steady": (128, 2048), "chat": (384, 4096), "burst": (128, 2048)}
BLOCK_SIZE = 32


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
    return replay(recording, RECORDINGS / f"{name}.requests.jsonl.gz", settings)


@pytest.mark.parametrize(
    ("name", "measured", "while_busy"),
    [("steady", 0.0120, 0.0138), ("chat", 0.0285, 0.0319), ("burst", 0.0099, 0.0132)],
)
def test_usage_is_as_recorded_within_five_percent_of_the_pool(
    name: str, measured: float, while_busy: float
) -> None:
    found, _ = instants(name)
    error = usage_error(found)
    assert error <= 0.05
    # docs/simulator.md tells these figures.
    assert error == pytest.approx(measured, abs=0.00006)
    busy = tuple(
        instant for instant in found if instant.recorded.kv_usage_ratio or instant.simulated.kv_usage_ratio
    )
    assert usage_error(busy) == pytest.approx(while_busy, abs=0.00006)


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
