"""Hit rates by the counters that a release counts right, and what makes hit counters mislead."""

from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.history import COUNTERS, WINDOWS
from kvheadroom.capacity.prefix_cache import BY_SOURCE, LOOKUPS, HitWindow, page_findings
from kvheadroom.capacity.readings import EngineSnapshot, PageProblem, ProblemReason, VllmPage
from tests.capacity.facts_builder import facts
from tests.capacity.moments import moment

NOW = 10_000.0
ENGINE = EngineSnapshot(engine="0", num_blocks=128, block_size=32, kv_usage_ratio=0.5)
SHORT: dict[str, float] = {
    "prefix_cache_queries_total": 24_000.0,
    "prefix_cache_hits_total": 0.0,
    "finished_requests_total": 100.0,
    "finished_prompt_tokens_total": 24_000.0,
}
"""100 prompts of 240 tokens, nothing found."""


def engine(**fields: Any) -> EngineSnapshot:
    return replace(ENGINE, **fields)


def assessed(
    now: EngineSnapshot,
    before: dict[str, float] | None = None,
    *,
    version: str | None = "0.33.0",
    windows: tuple[str, ...] = ("1m", "5m"),
) -> Assessment:
    """One engine, with the counters it had when each window began: 0 where nothing else is said."""
    figures = {name: 0.0 for name in COUNTERS if getattr(now, name) is not None} | (before or {})
    past = {name: moment(NOW - WINDOWS[name], figures) for name in windows}
    reading = Reading(facts=facts(version=version), snapshot=now, taken_at=NOW, past=past)
    return assess(reading, ())


def last_minute(result: Assessment) -> HitWindow:
    return result.hit_windows[0]


def reasons(problems: tuple[PageProblem, ...]) -> list[ProblemReason]:
    return [problem.reason for problem in problems]


def test_the_hit_rate_of_a_window_is_what_was_found_of_what_was_looked_up_in_it() -> None:
    now = engine(
        prefix_cache_queries_total=9_000.0,
        prefix_cache_hits_total=2_400.0,
        external_prefix_cache_queries_total=600.0,
        external_prefix_cache_hits_total=150.0,
    )
    window = last_minute(
        assessed(now, {"prefix_cache_queries_total": 8_000.0, "prefix_cache_hits_total": 2_000.0})
    )
    assert (window.window, window.seconds) == ("1m", 60.0)
    assert window.local is not None
    assert (window.local.ratio, window.local.hit_tokens, window.local.lookup_tokens) == (0.4, 400, 1_000)
    assert (window.local.basis, window.local.doubt) == (LOOKUPS, "")
    assert window.external is not None
    assert window.external.ratio == 0.25


@pytest.mark.parametrize(
    ("now", "before"),
    [
        # Nothing looked up in the window; not told now; not told then; a counter that fell; more found than asked for.
        ((5_000.0, 400.0), (5_000.0, 400.0)),
        ((None, 400.0), (0.0, 0.0)),
        ((5_000.0, None), (0.0, 0.0)),
        ((40.0, 0.0), (10_000.0, 0.0)),
        ((10.0, 50.0), (0.0, 0.0)),
    ],
)
def test_a_hit_rate_of_nothing_looked_up_or_not_told_is_unknown(
    now: tuple[float | None, float | None], before: tuple[float, float]
) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    result = assessed(engine(**dict(zip(names, now, strict=True))), dict(zip(names, before, strict=True)))
    assert result.hit_windows == ()


def test_without_a_past_no_window_is_known() -> None:
    now = engine(prefix_cache_queries_total=9_000.0, prefix_cache_hits_total=2_400.0)
    assert assess(Reading(facts=facts(), snapshot=now, taken_at=NOW), ()).hit_windows == ()


def test_prompts_shorter_than_a_block_are_told_as_below_one_block_and_not_as_caching_off() -> None:
    now = engine(block_size=784, **SHORT)
    (problem,) = assessed(now).problems
    assert problem == PageProblem(
        ProblemReason.BELOW_ONE_BLOCK,
        "engine 0: no prefix hits in the last 5 minutes: prompts are below one block, 240 tokens on average, and only "
        "whole blocks of 784 are found again; prefix caching is on",
    )
    window = last_minute(assessed(now))
    assert window.local is not None
    assert window.local.ratio == 0.0


@pytest.mark.parametrize(
    "other",
    [
        {"block_size": 32},
        {"prefix_cache_hits_total": 784.0},
        {"prefix_cache_queries_total": 0.0},
        {"finished_requests_total": 9.0, "finished_prompt_tokens_total": 2_160.0},
        {"prefix_match_unit": 16},
        {"block_size": None},
        {"finished_prompt_tokens_total": None},
    ],
)
def test_below_one_block_is_told_only_where_that_is_the_reason(other: dict[str, Any]) -> None:
    assert assessed(engine(**{"block_size": 784, **SHORT, **other})).problems == ()


def test_with_context_parallelism_a_block_is_as_many_times_larger() -> None:
    spread = {"tensor_parallel_size": 8, "decode_context_parallel_size": 8}
    now = engine(block_size=32, **SHORT)
    for flags, found in ((spread, "only whole blocks of 256 are found again"), ({}, "")):
        reading = Reading(facts=facts(flags=flags), snapshot=now, taken_at=NOW)
        assert [found in problem.detail for problem in assess(reading, ()).problems] == [True] * bool(found)


def test_below_one_block_goes_by_the_last_5_minutes_and_not_by_what_was_long_ago() -> None:
    long_before = dict.fromkeys(SHORT, 1e6)
    now = engine(block_size=784, **{name: 1e6 + grown for name, grown in SHORT.items()})
    assert reasons(assessed(now, long_before).problems) == [ProblemReason.BELOW_ONE_BLOCK]
    # Before five minutes are over, what the counters say since the server's start is all there is.
    assert assessed(now, long_before, windows=("1m",)).problems == ()


def test_hits_of_preempted_requests_are_told_as_inflated_where_the_release_counts_them() -> None:
    now = engine(prefix_cache_queries_total=10_000.0, prefix_cache_hits_total=3_200.0, preemptions_total=12.0)
    result = assessed(now, version="0.10.2")
    (problem,) = result.problems
    assert problem.reason is ProblemReason.INFLATED_BY_RECOMPUTE
    assert problem.detail.startswith("engine 0: 12 preemptions in the last 5 minutes: this vLLM counts")
    assert "inflated by recompute" in problem.detail
    local = last_minute(result).local
    assert local is not None
    assert local.ratio == 0.32
    assert "inflated by recompute" in local.doubt


@pytest.mark.parametrize(
    ("version", "preempted_before"), [("0.11.1", 0.0), ("0.33.0", 0.0), (None, 0.0), ("0.10.2", 12.0)]
)
def test_hits_are_not_inflated_in_releases_that_keep_them_apart_or_without_preemptions(
    version: str | None, preempted_before: float
) -> None:
    now = engine(prefix_cache_queries_total=10_000.0, prefix_cache_hits_total=3_200.0, preemptions_total=12.0)
    result = assessed(now, {"preemptions_total": preempted_before}, version=version)
    assert result.problems == ()
    local = last_minute(result).local
    assert local is not None
    assert local.doubt == ""


UNWIRED: dict[str, float] = {
    "prefix_cache_queries_total": 9_000.0,
    "prefix_cache_hits_total": 0.0,
    "prompt_tokens_total": 8_000.0,
    "prompt_tokens_local_compute_total": 6_000.0,
    "prompt_tokens_local_cache_hit_total": 2_000.0,
}


def test_a_hit_counter_that_stays_0_while_prompts_are_found_is_not_wired_and_the_other_one_counts() -> None:
    result = assessed(engine(**UNWIRED))
    (problem,) = result.problems
    assert problem == PageProblem(
        ProblemReason.COUNTER_NOT_WIRED,
        "engine 0: prefix_cache_hits_total stays 0 while prompt_tokens_by_source_total tells 2,000 tokens of "
        "local_cache_hit: the counter is not wired, so the hit rate is made of the other one",
    )
    local = last_minute(result).local
    assert local is not None
    assert (local.ratio, local.basis, local.doubt) == (0.25, BY_SOURCE, "")


def test_the_connectors_hit_counter_is_judged_by_what_was_transferred() -> None:
    now = engine(
        external_prefix_cache_queries_total=4_000.0,
        external_prefix_cache_hits_total=0.0,
        prompt_tokens_external_kv_transfer_total=3_000.0,
        prompt_tokens_local_compute_total=2_000.0,
        prompt_tokens_local_cache_hit_total=0.0,
        prefix_cache_hits_total=0.0,
        prefix_cache_queries_total=5_000.0,
        prompt_tokens_total=5_000.0,
    )
    result = assessed(now)
    (problem,) = result.problems
    assert problem.reason is ProblemReason.COUNTER_NOT_WIRED
    assert "external_prefix_cache_hits_total stays 0" in problem.detail
    assert "external_kv_transfer" in problem.detail
    window = last_minute(result)
    assert window.external is not None
    assert (window.external.ratio, window.external.basis) == (0.75, BY_SOURCE)
    # Its own cache found nothing, and says so.
    assert window.local is not None
    assert (window.local.ratio, window.local.basis) == (0.0, LOOKUPS)


@pytest.mark.parametrize(
    "other",
    [
        {"prefix_cache_hits_total": 32.0},
        {"prompt_tokens_local_cache_hit_total": 0.0},
        # Up to 0.19 prompts of one token count as found and as computed.
        {"prompt_tokens_local_compute_total": 8_000.0},
        {
            "prompt_tokens_local_compute_total": 5_000.0,
            "prompt_tokens_external_kv_transfer_total": 3_000.0,
            "external_prefix_cache_hits_total": 3_000.0,
        },
        {"prompt_tokens_local_compute_total": None},
        {"prefix_cache_hits_total": None},
    ],
)
def test_a_counter_is_wired_where_it_moves_or_nothing_else_tells_of_hits(other: dict[str, Any]) -> None:
    assert assessed(engine(**{**UNWIRED, **other})).problems == ()


@pytest.mark.parametrize(
    ("version", "basis", "ratio"),
    [("0.22.1", BY_SOURCE, 0.5), ("0.26.0", BY_SOURCE, 0.5), ("0.27.0", LOOKUPS, 0.1)],
)
def test_look_ups_counted_at_every_attempt_give_way_to_counters_that_count_once(
    version: str, basis: str, ratio: float
) -> None:
    now = engine(
        prefix_cache_queries_total=20_000.0,
        prefix_cache_hits_total=2_000.0,
        prompt_tokens_total=4_000.0,
        prompt_tokens_local_cache_hit_total=2_000.0,
    )
    local = last_minute(assessed(now, version=version)).local
    assert local is not None
    assert (local.basis, local.ratio, local.doubt) == (basis, ratio, "")


def test_look_ups_counted_again_without_another_counter_leave_a_doubt() -> None:
    now = engine(
        prefix_cache_queries_total=20_000.0, prefix_cache_hits_total=2_000.0, prompt_tokens_total=4_000.0
    )
    local = last_minute(assessed(now, version="0.14.1")).local
    assert local is not None
    assert "at every step that a request waits" in local.doubt
    steady = replace(now, prompt_tokens_total=17_000.0)
    local = last_minute(assessed(steady, version="0.14.1")).local
    assert local is not None
    assert local.doubt == ""


def test_one_page_is_enough_to_tell_of_a_counter_that_is_not_wired_and_of_short_prompts() -> None:
    page = VllmPage(
        format="text",
        engines=(
            engine(**UNWIRED),
            engine(engine="1", block_size=784, **SHORT),
            engine(engine="2", **SHORT),
            # Layers with blocks of 32 and of 784: a hit may lie on either.
            engine(engine="3", attention_block_size=784, **SHORT),
        ),
    )
    found = page_findings(page)
    assert reasons(found) == [ProblemReason.COUNTER_NOT_WIRED, ProblemReason.BELOW_ONE_BLOCK]
    assert found[1].detail.startswith("engine 1: no prefix hits since the server's start: prompts are below")
