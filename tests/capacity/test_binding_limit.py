"""What binds: each verdict from numbers that prove it, and a reason where they do not."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.history import Recent
from kvheadroom.capacity.readings import EngineSnapshot
from tests.capacity.facts_builder import facts
from tests.capacity.moments import moment

NOW = 1_700_000_000.0
FLAGS = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 16}
# 101 blocks of 16 tokens, 100 of them usable; a request of max_model_len (1,024 tokens) takes 64.
ENGINE = EngineSnapshot(
    engine="0",
    num_blocks=101,
    block_size=16,
    attention_block_size=16,
    max_concurrency=101 / 64,
    kv_usage_ratio=0.5,
    requests_running=4.0,
    requests_waiting=3.0,
    requests_waiting_capacity=3.0,
    requests_waiting_deferred=0.0,
    preemptions_total=7.0,
    prompt_tokens_total=10_000.0,
    generation_tokens_total=5_000.0,
    prefix_cache_queries_total=0.0,
)
BEFORE: dict[str, float] = {
    "requests_running": 4.0,
    "requests_waiting": 3.0,
    "requests_waiting_capacity": 3.0,
    "kv_usage_ratio": 0.5,
    "preemptions_total": 7.0,
    "prompt_tokens_total": 9_900.0,
    "generation_tokens_total": 4_900.0,
}


def seen(
    *,
    before: dict[str, float] | None = BEFORE,
    ten: dict[str, float] | None = None,
    flags: dict[str, Any] = FLAGS,
    version: str = "0.33.0",
    **said: Any,
) -> Assessment:
    previous = None if before is None else moment(NOW - 5, before)
    reading = Reading(
        facts=facts(flags=flags, version=version, max_model_len=1024),
        snapshot=replace(ENGINE, **said),
        taken_at=NOW,
        recent=Recent(
            previous=previous, seconds_10=None if before is None else moment(NOW - 10, ten or before)
        ),
    )
    return assess(reading, ())


def limit(**said: Any) -> Limit | None:
    return seen(**said).binding_limit.limit


def why(**said: Any) -> str:
    return seen(**said).binding_limit.why


def test_nothing_binds_while_no_request_waits() -> None:
    assert limit(requests_waiting=0.0, requests_waiting_capacity=0.0) is Limit.NONE


def test_requests_that_wait_for_no_room_are_deferred() -> None:
    said = {"requests_waiting_capacity": 0.0, "requests_waiting_deferred": 3.0}
    assert limit(**said) is Limit.DEFERRED
    assert limit(requests_waiting_deferred=2.0, requests_waiting=5.0) is not Limit.DEFERRED


def test_as_many_running_as_max_num_seqs_is_that_limit_however_empty_the_pool() -> None:
    assert limit(requests_running=8.0, kv_usage_ratio=0.1) is Limit.MAX_NUM_SEQS
    assert limit(requests_running=8.0, kv_usage_ratio=1.0) is Limit.MAX_NUM_SEQS
    assert "8 run, which is max_num_seqs, and 3 requests wait" in why(requests_running=8.0)


def test_a_request_that_ended_in_the_step_of_the_scrape_does_not_hide_max_num_seqs() -> None:
    assert limit(requests_running=7.0, before={**BEFORE, "requests_running": 8.0}) is Limit.MAX_NUM_SEQS


def test_a_preemption_since_the_scrape_before_is_the_pool() -> None:
    assert limit(preemptions_total=9.0, kv_usage_ratio=0.2) is Limit.KV_POOL
    assert why(preemptions_total=9.0) == "2 preempted since the scrape before, and 3 requests wait"


def test_a_preemption_that_was_counted_late_does_not_hide_max_num_seqs() -> None:
    assert limit(preemptions_total=9.0, requests_running=8.0) is Limit.MAX_NUM_SEQS


def test_no_free_block_is_the_pool_at_the_first_scrape() -> None:
    assert limit(kv_usage_ratio=1.0, before=None) is Limit.KV_POOL
    assert limit(kv_usage_ratio=0.99, before=None) is None


def test_fewer_free_blocks_than_the_usual_prompt_needs_are_the_pool() -> None:
    finished = {"finished_requests_total": 10.0, "finished_prompt_tokens_total": 10 * 16 * 20.0}
    # 20 blocks a prompt
    assert limit(kv_usage_ratio=0.81, **finished) is Limit.KV_POOL
    assert "19 blocks are free, the usual prompt needs 20" in why(kv_usage_ratio=0.81, **finished)
    # Where steps were full as well, nobody knows.
    assert limit(kv_usage_ratio=0.81, prompt_tokens_total=22_103.0, **finished) is Limit.KV_POOL
    assert limit(kv_usage_ratio=0.81, prompt_tokens_total=22_104.0, **finished) is None
    # Fewer are needed where half of each prompt is found in the prefix cache, and before 0.19 for the first chunk only.
    found = {"prefix_cache_queries_total": 1000.0, "prefix_cache_hits_total": 500.0}
    assert "usual" not in why(kv_usage_ratio=0.81, **finished, **found)
    small = {**FLAGS, "max_num_batched_tokens": 64}
    assert "usual" not in why(kv_usage_ratio=0.95, version="0.18.1", flags=small, **finished)
    assert "usual prompt needs 4" in why(kv_usage_ratio=0.97, version="0.18.1", flags=small, **finished)


def test_blocks_for_the_longest_request_leave_the_tokens_of_the_steps() -> None:
    assert limit(kv_usage_ratio=0.36, before={**BEFORE, "kv_usage_ratio": 0.2}) is Limit.TOKEN_BUDGET
    # One block less, now or one scrape before, and it may be the pool.
    assert limit(kv_usage_ratio=0.37, before={**BEFORE, "kv_usage_ratio": 0.2}) is not Limit.TOKEN_BUDGET
    assert limit(kv_usage_ratio=0.36, before={**BEFORE, "kv_usage_ratio": 0.37}) is not Limit.TOKEN_BUDGET


def test_room_for_the_longest_request_is_no_token_budget_where_max_num_seqs_ran_ten_seconds_ago() -> None:
    room = {"kv_usage_ratio": 0.2, "before": {**BEFORE, "kv_usage_ratio": 0.2}}
    assert limit(**room) is Limit.TOKEN_BUDGET
    assert limit(**room, ten={**BEFORE, "requests_running": 8.0}) is None
    assert "10 s ago max_num_seqs (8) ran" in why(**room, ten={**BEFORE, "requests_running": 8.0})


def test_a_queue_before_room_with_nothing_computed_is_no_token_budget() -> None:
    still = {
        **BEFORE,
        "kv_usage_ratio": 0.2,
        "prompt_tokens_total": 10_000.0,
        "generation_tokens_total": 5_000.0,
    }
    assert limit(kv_usage_ratio=0.2, before=still) is None
    assert "although 80 blocks are free" in why(kv_usage_ratio=0.2, before=still)


def test_steps_that_left_most_of_their_tokens_leave_the_pool() -> None:
    # 100 tokens generated by 4 at a time are 25 steps of 512. Counted are 100 + 100, and at most 1,024 of a prompt under way.
    assert limit() is Limit.KV_POOL
    assert "4 of 8 run, and steps used at most 10% of their tokens" in why()
    # With them, 5,176 more prompt tokens are half of the 12,800.
    assert limit(prompt_tokens_total=15_175.0) is Limit.KV_POOL
    assert limit(prompt_tokens_total=15_176.0) is None
    # So many since one scrape before are enough, however few there were in ten seconds.
    assert limit(prompt_tokens_total=15_176.0, ten={**BEFORE, "generation_tokens_total": 1_000.0}) is None


def test_a_prompt_under_way_is_seen_by_its_blocks() -> None:
    # 350 blocks more are 5,600 tokens of the steps' 12,800, 450 are 7,200.
    large = {"num_blocks": 1001, "max_concurrency": 1001 / 64, "kv_usage_ratio": 0.95}
    assert limit(**large, before={**BEFORE, "kv_usage_ratio": 0.6}) is Limit.KV_POOL
    assert limit(**large, before={**BEFORE, "kv_usage_ratio": 0.5}) is None


def test_steps_too_few_for_a_long_prompt_under_way_prove_nothing() -> None:
    # 16 tokens generated are 4 steps of 512, and one prompt of 1,024 tokens is half of them.
    few = {**BEFORE, "generation_tokens_total": 4_984.0, "prompt_tokens_total": 10_000.0}
    assert limit(before=few) is None
    # Ten seconds are long enough; a request preempted in them is computed again, without being counted.
    enough = {**few, "generation_tokens_total": 4_900.0}
    assert limit(before=few, ten=enough) is Limit.KV_POOL
    assert limit(before=few, ten={**enough, "preemptions_total": 4.0}) is None


def test_without_reasons_for_waiting_elimination_proves_nothing() -> None:
    before = {key: value for key, value in BEFORE.items() if key != "requests_waiting_capacity"}
    old: dict[str, Any] = {
        "requests_waiting_capacity": None,
        "requests_waiting_deferred": None,
        "before": before,
    }
    assert limit(version="0.18.1", **old) is None
    assert limit(version="0.18.1", kv_usage_ratio=0.1, **old) is None
    assert limit(version="0.18.1", kv_usage_ratio=1.0, **old) is Limit.KV_POOL


def test_without_max_num_seqs_only_what_the_pool_itself_shows_is_told() -> None:
    for flags in ({"block_size": 16}, {"block_size": 16, "max_num_batched_tokens": 512}):
        assert limit(flags=flags) is None
        assert "flags: {max_num_seqs: N}" in why(flags=flags)
        assert limit(flags=flags, kv_usage_ratio=1.0) is Limit.KV_POOL


def test_more_running_than_max_num_seqs_contradicts_it() -> None:
    assert limit(requests_running=9.0) is None
    assert "9 run, more than max_num_seqs (8)" in why(requests_running=9.0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"sleeping": True}, "sleeps"),
        (
            {"requests_waiting": None, "requests_waiting_capacity": None},
            "does not tell its running and waiting",
        ),
        ({"requests_running": None}, "does not tell its running and waiting"),
        ({"before": None}, "1 request waits at the first scrape|3 requests wait at the first scrape"),
        ({"before": {**BEFORE, "requests_waiting_capacity": 0.0}}, "may just have come"),
        ({"num_blocks": None}, "how many blocks are free"),
    ],
)
def test_what_is_not_known_has_a_reason(said: dict[str, Any], reason: str) -> None:
    assert limit(**said) is None
    assert re.search(reason, why(**said))
