"""Why prompts are not found again: each reason where it holds, and not where it does not."""

from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.history import moment_of
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.reuse import ExpectedHits, Lately, Reuse, TierSize
from kvheadroom.capacity.warm_findings import WarmFinding
from tests.capacity.facts_builder import facts

START = EngineSnapshot(
    engine="0",
    num_blocks=1001,
    block_size=16,
    attention_block_size=16,
    kv_usage_ratio=0.2,
    prompt_tokens_total=1e6,
    prompt_tokens_local_cache_hit_total=0.0,
    generation_tokens_total=1e5,
    prefix_cache_queries_total=1e6,
    prefix_cache_hits_total=0.0,
    finished_requests_total=1000.0,
    finished_prompt_tokens_total=1e6,
    finished_generation_tokens_total=1e5,
)


def reasons(
    *, reuse: Reuse | str | None = None, flags: dict[str, Any] | None = None, **grown: Any
) -> dict[WarmFinding, str]:
    """After an hour in which the counters grew by so much."""
    now = replace(START, **{name: getattr(START, name) + value for name, value in grown.items()})
    reading = Reading(
        facts=facts(flags=flags), snapshot=now, taken_at=3600.0, past={"1h": moment_of(START, 0.0)}
    )
    return dict(assess(reading, (1024,), reuse=reuse).warmth.findings)


def learned(*expected: tuple[int, float, float], lately: Lately | None = None) -> Reuse:
    return Reuse(
        seconds=36_000.0,
        prompts=1e9,
        pool_ratio=0.5,
        outside_ratio=0.1,
        oldest_seconds=1e4,
        points=((1.0, 0.6),),
        expected=tuple(
            ExpectedHits(size=TierSize(bytes=size * 10**9, tokens=1.0), low_ratio=low, high_ratio=high)
            for size, low, high in expected
        ),
        lately=lately,
    )


def test_the_smallest_size_that_would_find_a_tenth_more_is_named() -> None:
    found = reasons(reuse=learned((0, 0.4, 0.5), (64, 0.65, 0.7), (128, 0.71, 0.75), (256, 0.9, 0.95)))
    assert found == {
        WarmFinding.EVICTED_BY_CHURN: (
            "60% of the prompt tokens of the last 10 h were found in a cache, and with a tier of 128 GB in host memory 71% or more would have "
            "been: content is evicted before it is asked for again"
        )
    }


def test_a_size_that_is_there_already_is_not_advised() -> None:
    # 119.2 GiB are 128 GB.
    of = learned((128, 0.8, 0.85))
    assert WarmFinding.EVICTED_BY_CHURN in reasons(reuse=of)
    assert reasons(reuse=of, flags={"kv_offloading_size": 119.3}) == {}


@pytest.mark.parametrize(
    ("found", "expected", "is_told"), [(0.5, 0.65, True), (0.5, 0.55, False), (0.7, 0.5, False)]
)
def test_an_hour_that_finds_a_tenth_less_than_the_time_before_is_told(
    found: float, expected: float, *, is_told: bool
) -> None:
    of = reasons(reuse=learned(lately=Lately(found_ratio=found, expected_ratio=expected)))
    assert (WarmFinding.FINDS_LESS_THAN_BEFORE in of) is is_told


@pytest.mark.parametrize(("prompt", "is_told"), [(16.0, False), (40.0, True), (80.0, True), (81.0, False)])
def test_blocks_of_which_half_is_a_tenth_of_a_prompt_are_too_big(prompt: float, *, is_told: bool) -> None:
    of = reasons(finished_requests_total=50.0, finished_prompt_tokens_total=50 * prompt)
    assert (WarmFinding.BLOCKS_TOO_BIG in of) is is_told
    if prompt == 40.0:
        assert (
            "whole blocks of 16 tokens, and have 40 tokens on average: half a block of each, 20%,"
            in of[WarmFinding.BLOCKS_TOO_BIG]
        )


DIFFERENT: dict[str, Any] = {
    "prompt_tokens_total": 120_000.0,
    "generation_tokens_total": 0.0,
    "prefix_cache_queries_total": 120_000.0,
    "finished_requests_total": 120.0,
    "finished_prompt_tokens_total": 120_000.0,
}
"""Content stays for 6.4 minutes: 800 blocks free, 7,500 new ones in an hour."""


def test_prompts_that_begin_differently_are_told() -> None:
    found = reasons(**DIFFERENT)
    assert list(found) == [WarmFinding.PREFIXES_DIFFER]
    assert found[WarmFinding.PREFIXES_DIFFER].startswith(
        "120 prompts of 1,000 tokens on average came in the last hour"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_tokens_local_cache_hit_total": 5000.0},
        {"finished_requests_total": 90.0, "finished_prompt_tokens_total": 90_000.0},
        # Below four blocks.
        {"finished_prompt_tokens_total": 120 * 60.0},
        # Nothing stays for five minutes.
        {"prompt_tokens_total": 600_000.0},
    ],
)  # fmt: skip
def test_prompts_are_not_called_different_where_another_reason_may_hold(changed: dict[str, Any]) -> None:
    assert WarmFinding.PREFIXES_DIFFER not in reasons(**DIFFERENT | changed)


def test_with_prefix_caching_off_nothing_is_found_and_nothing_is_said_of_it() -> None:
    assert reasons(flags={"enable_prefix_caching": False}, **DIFFERENT) == {}
