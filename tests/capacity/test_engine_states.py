"""Named states: each is told of the engine that is in it, and of none that lacks one part of the definition."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.engine_states import EngineState
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.monitor.history import EngineHistory
from tests.capacity.facts_builder import facts

START = 1_700_000_000.0
# 101 blocks of 16 tokens; a request of max_model_len (1,024 tokens) takes 64.
STILL = EngineSnapshot(
    engine="0",
    num_blocks=101,
    block_size=16,
    attention_block_size=16,
    max_concurrency=101 / 64,
    kv_usage_ratio=0.0,
    requests_running=0.0,
    requests_waiting=0.0,
    requests_waiting_capacity=0.0,
    requests_waiting_deferred=0.0,
    preemptions_total=0.0,
    prompt_tokens_total=10_000.0,
    generation_tokens_total=5_000.0,
    prefix_cache_queries_total=10_000.0,
    prefix_cache_hits_total=9_000.0,
    finished_requests_total=50.0,
    finished_prompt_tokens_total=10_000.0,
    finished_generation_tokens_total=5_000.0,
)
Timeline = Callable[[float], dict[str, Any]]


def watch(
    timeline: Timeline,
    *,
    seconds: float = 400.0,
    interval: float = 5.0,
    missed: tuple[float, float] = (-1.0, -1.0),
    session_tokens: tuple[int, ...] = (),
    version: str = "0.33.0",
) -> Assessment:
    """The engine after so many seconds of scrapes; `timeline` says what differs from an engine at rest.

    Args:
        missed: from which second to which no scrape succeeded.
    """
    history = EngineHistory(interval)
    snapshot, at = STILL, 0.0
    for number in range(int(seconds / interval) + 1):
        at = number * interval
        if missed[0] <= at < missed[1]:
            continue
        said = timeline(at)
        if "requests_waiting" in said:
            said = {"requests_waiting_capacity": said["requests_waiting"], **said}
        started_at = said.pop("started_at", 100.0)
        snapshot = replace(STILL, **said)
        history.add(snapshot, START + at, started_at)
    reading = Reading(
        facts=facts(flags={"block_size": 16}, max_model_len=1024, version=version),
        snapshot=snapshot,
        taken_at=START + at,
        past=history.window_starts(),
        recent=history.recent(),
        five_minutes=history.five_minutes(),
    )
    return assess(reading, session_tokens)


def found(timeline: Timeline, **how: Any) -> dict[EngineState, str]:
    return {one.state: one.why for one in watch(timeline, **how).states}


def test_an_engine_at_rest_is_in_no_state() -> None:
    assert found(lambda at: {}) == {}


# -- preempting


@pytest.mark.parametrize(("interval", "longest"), [(1.0, 15.0), (5.0, 15.0), (15.0, 45.0)])
def test_preemptions_of_the_last_15_seconds_or_three_scrapes_are_going_on(
    interval: float, longest: float
) -> None:
    def preempted(ago: float) -> dict[EngineState, str]:
        return found(
            lambda at: {"preemptions_total": 3.0 * (at >= 300.0 - ago)}, interval=interval, seconds=300.0
        )

    assert preempted(longest).keys() == preempted(0.0).keys() == {EngineState.PREEMPTING}
    assert preempted(0.0)[EngineState.PREEMPTING] == f"3 preempted in the last {longest + interval:.0f} s"
    assert preempted(longest + interval) == {}


def test_a_counter_that_began_anew_or_is_not_told_is_no_preemption() -> None:
    assert found(lambda at: {"preemptions_total": 5.0 if at < 300.0 else 2.0}, seconds=300.0) == {}
    assert found(lambda at: {"preemptions_total": None if at < 300.0 else 2.0}, seconds=300.0) == {}
    assert found(lambda at: {"preemptions_total": 2.0 if at < 300.0 else None}, seconds=300.0) == {}
    assert found(lambda at: {"preemptions_total": 7.0}, seconds=0.0) == {}


# -- scheduler stalled


def queue(_: float) -> dict[str, Any]:
    return {"requests_waiting": 3.0}


def test_a_queue_before_a_free_pool_with_nothing_computed_for_a_minute_is_a_stalled_scheduler() -> None:
    assert found(queue) == {
        EngineState.SCHEDULER_STALLED: "3 wait although all 100 blocks are free, none runs, and nothing was computed for a minute"
    }
    assert EngineState.SCHEDULER_STALLED in found(queue, seconds=60.0)
    some_held = found(lambda at: {**queue(at), "kv_usage_ratio": 0.36})
    assert "64 blocks are free and a request takes 64 at most" in some_held[EngineState.SCHEDULER_STALLED]


@pytest.mark.parametrize(
    "timeline",
    [
        lambda at: {"generation_tokens_total": 5_000.0 + (at >= 350.0)},
        lambda at: {"prompt_tokens_total": 10_000.0 + (at >= 350.0)},
        lambda at: {"generation_tokens_total": None},
        lambda at: {"requests_waiting": 0.0 if at == 400.0 else 3.0},
        lambda at: {"requests_waiting": 0.0 if at == 370.0 else 3.0},
        lambda at: {"requests_waiting_capacity": 0.0, "requests_waiting_deferred": 3.0},
        lambda at: {
            "requests_running": 1.0 if at == 370.0 else 0.0,
            "kv_usage_ratio": 0.1 if at == 370.0 else 0.0,
        },
        lambda at: {"kv_usage_ratio": 0.37},
        lambda at: {"sleeping": True},
        lambda at: {"started_at": 100.0 if at < 350.0 else 200.0},
        # Before 0.20 nothing tells that a connector still loads what waits.
        lambda at: {
            "requests_waiting_capacity": None,
            "requests_waiting_deferred": None,
            "external_prefix_cache_queries_total": 5.0,
        },
    ],
)
def test_a_scheduler_that_lacks_one_part_of_it_is_not_stalled(timeline: Timeline) -> None:
    assert found(lambda at: {**queue(at), **timeline(at)}) == {}


def test_a_scheduler_is_stalled_only_after_a_minute_without_a_gap() -> None:
    assert found(queue, seconds=50.0) == {}
    assert found(queue, missed=(340.0, 360.0)) == {}


def test_running_requests_that_stand_still_for_five_minutes_are_a_stalled_scheduler() -> None:
    def stuck(at: float) -> dict[str, Any]:
        return {"requests_waiting": 3.0, "requests_running": 1.0, "kv_usage_ratio": 0.2}

    assert "1 run, and neither a token nor a block was added" in found(stuck)[EngineState.SCHEDULER_STALLED]
    assert found(stuck, seconds=250.0) == {}
    # A long prompt under way takes blocks.
    assert found(lambda at: {**stuck(at), "kv_usage_ratio": 0.2 if at < 400.0 else 0.21}) == {}


# -- re-prefill loop


def prefills(at: float) -> dict[str, Any]:
    return {"requests_running": 1.0, "kv_usage_ratio": 0.3, "prompt_tokens_total": 10_000.0 + 100.0 * at}


def test_prompts_without_a_token_and_without_an_end_are_a_prefill_loop() -> None:
    assert found(prefills) == {
        EngineState.REPREFILL_LOOP: "1 run and 6,000 prompt tokens were computed in a minute, but in five minutes no token was "
        "generated and no request finished"
    }


@pytest.mark.parametrize(
    "timeline",
    [
        lambda at: {"generation_tokens_total": 5_000.0 + (at >= 200.0)},
        # A model that generates nothing finishes its requests.
        lambda at: {"finished_requests_total": 50.0 + (at >= 200.0)},
        lambda at: {"finished_requests_total": None},
        lambda at: {"preemptions_total": float(at >= 200.0)},
        lambda at: {"prompt_tokens_total": 10_000.0 + min(at, 365.0)},
        lambda at: {"prompt_tokens_total": 10_000.0 + max(at, 375.0)},
        lambda at: {"requests_running": 0.0 if at == 370.0 else 1.0},
        lambda at: {"sleeping": True},
        lambda at: {"started_at": 100.0 if at < 200.0 else 200.0},
    ],
)
def test_a_prefill_that_lacks_one_part_of_it_is_no_loop(timeline: Timeline) -> None:
    assert found(lambda at: {**prefills(at), **timeline(at)}) == {}


# -- thrash


def preempts(at: float) -> dict[str, Any]:
    return {
        "requests_running": 8.0,
        "requests_waiting": 10.0,
        "kv_usage_ratio": 0.95,
        "preemptions_total": 0.4 * at,
        "prompt_tokens_total": 10_000.0 + 10.0 * at,
        "generation_tokens_total": 5_000.0 + 20.0 * at,
    }


def test_more_preemptions_than_requests_in_a_minute_for_no_more_tokens_are_thrash() -> None:
    assert found(preempts) == {
        EngineState.PREEMPTING: "8 preempted in the last 20 s",
        EngineState.THRASH: "24 preemptions in a minute, and 18 requests are there; 600 tokens were generated in the last "
        "half minute, 600 in the one before",
    }


@pytest.mark.parametrize(
    "timeline",
    [
        lambda at: {"requests_waiting": 16.0},
        lambda at: {"preemptions_total": 0.15 * at, "requests_waiting": 1.0, "requests_running": 1.0},
        # None for twenty seconds in the middle, none in the last ten.
        lambda at: {"preemptions_total": 0.8 * min(at, 365.0) + 0.8 * max(0.0, at - 392.0)},
        lambda at: {"preemptions_total": 0.8 * min(at, 389.0)},
        lambda at: {"generation_tokens_total": 5_000.0 + (2 * (at - 370.0) if at > 370.0 else 0.0) + at},
        *(
            lambda at, empty=empty: {"requests_waiting": 0.0 if at == empty else 10.0}
            for empty in (340.0, 370.0, 390.0, 400.0)
        ),
        lambda at: {"preemptions_total": None},
        lambda at: {"started_at": 100.0 if at < 350.0 else 200.0},
    ],
)
def test_preemptions_that_lack_one_part_of_it_are_no_thrash(timeline: Timeline) -> None:
    assert EngineState.THRASH not in found(lambda at: {**preempts(at), **timeline(at)})


# -- working set exceeds pool


def falls(at: float, *, to: float = 0.5, a_second: float = 100.0) -> dict[str, Any]:
    """90% of prompt tokens are found until 30 s before the end, then fewer."""
    lookups, late = a_second * at, max(0.0, at - 370.0) * a_second
    return {
        "requests_running": 8.0,
        "kv_usage_ratio": 0.75,
        "prefix_cache_queries_total": lookups,
        "prefix_cache_hits_total": 0.9 * (lookups - late) + to * late,
        "generation_tokens_total": 20.0 * at,
        "prompt_tokens_total": lookups,
    }


def test_a_hit_rate_that_falls_while_the_pool_is_full_tells_that_the_working_set_exceeds_it() -> None:
    assert found(falls) == {
        EngineState.WORKING_SET_EXCEEDS_POOL: "50% of prompt tokens were found in the prefix cache in the last 30 s, 90% before; "
        "the pool is 75% in use on average, and 10,350 tokens were written where 400 are free"
    }


@pytest.mark.parametrize(
    "timeline",
    [
        lambda at: falls(at, to=0.71),
        lambda at: {"kv_usage_ratio": 0.59},
        lambda at: {"preemptions_total": float(at >= 350.0)},
        # A pool so large that nothing was written over.
        lambda at: {"num_blocks": 10_001, "max_concurrency": 10_001 / 64},
        # A few requests alone, after many.
        lambda at: {
            "prefix_cache_queries_total": 100.0 * min(at, 370.0) + 40.0 * max(0.0, at - 370.0),
            "prefix_cache_hits_total": 90.0 * min(at, 370.0),
        },
        lambda at: {"prefix_cache_queries_total": 0.0, "prefix_cache_hits_total": 0.0},
        lambda at: {"sleeping": True},
        lambda at: {"started_at": 100.0 if at < 320.0 else 200.0},
    ],
)
def test_a_hit_rate_that_lacks_one_part_of_it_tells_nothing(timeline: Timeline) -> None:
    assert found(lambda at: {**falls(at), **timeline(at)}) == {}


# -- pool below one session


def pool(blocks: int) -> Timeline:
    return lambda _: {"num_blocks": blocks, "max_concurrency": blocks / 64}


def test_a_pool_without_the_blocks_of_one_session_is_told_at_the_first_scrape() -> None:
    # The null block is in none.
    assert found(pool(64), seconds=0.0) == {
        EngineState.POOL_BELOW_ONE_SESSION: "one session of 1,024 tokens takes 64 blocks, and the pool has 63 to give"
    }
    assert found(pool(65), seconds=0.0) == {}


def test_of_sessions_that_do_not_fit_the_shortest_is_named() -> None:
    why = found(pool(30), session_tokens=(256, 512))[EngineState.POOL_BELOW_ONE_SESSION]
    assert why == "one session of 512 tokens takes 32 blocks, and the pool has 29 to give"
    # A session that the server refuses is none.
    assert found(pool(65), session_tokens=(4096,)) == {}


def test_without_blocks_the_engines_own_concurrency_tells() -> None:
    def told(concurrency: float) -> Timeline:
        return lambda _: {"num_blocks": None, "max_concurrency": concurrency}

    why = found(told(0.93))[EngineState.POOL_BELOW_ONE_SESSION]
    assert why == "the pool holds 0.93 sessions of 1,024 tokens"
    assert found(told(1.0)) == {}


def test_an_engine_asleep_has_no_pool_to_be_too_small() -> None:
    assert found(lambda at: {**pool(30)(at), "sleeping": True}) == {}


def test_the_docs_define_every_state() -> None:
    text = (Path(__file__).parents[2] / "docs" / "forecast.md").read_text()
    states = text[
        text.index("## Named states") : text.index("### How they were judged", text.index("## Named states"))
    ]
    assert re.findall(r"^\| `(\w+)` \|", states, re.MULTILINE) == list(EngineState)
