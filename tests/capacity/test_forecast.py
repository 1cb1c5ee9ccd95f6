"""Forecasts: what they are made of, on made-up scrapes; how often they are right is in tests/lab."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.forecast import HORIZONS, Forecast, NoForecast
from kvheadroom.monitor.history import EngineHistory
from tests.capacity.facts_builder import facts
from tests.capacity.test_engine_states import START, Timeline
from tests.capacity.test_engine_states import STILL as AT_REST

# Of its 101 blocks of 16 tokens 100 can be used. Prompts of 160 tokens are 10 blocks, and none is found in the prefix cache.
STILL = replace(
    AT_REST,
    pool_tokens=1616,
    generation_tokens_total=0.0,
    prefix_cache_queries_total=0.0,
    prefix_cache_hits_total=0.0,
    finished_requests_total=100.0,
    finished_prompt_tokens_total=16_000.0,
    finished_generation_tokens_total=32_000.0,
)


def told(
    timeline: Timeline, *, seconds: float = 300.0, interval: float = 5.0, known: EngineFacts | None = None
) -> Forecast:
    """The forecast after so many seconds of scrapes; `timeline` says what differs from an engine at rest."""
    history = EngineHistory(interval)
    snapshot, at = STILL, 0.0
    for number in range(int(seconds / interval) + 1):
        at = number * interval
        said = timeline(at)
        if "requests_waiting" in said:
            said = {"requests_waiting_capacity": said["requests_waiting"], **said}
        snapshot = replace(STILL, **said)
        history.add(snapshot, START + at, 100.0)
    reading = Reading(
        facts=known or facts(flags={"block_size": 16}, max_model_len=1024, version="0.33.0"),
        snapshot=snapshot,
        taken_at=START + at,
        past=history.window_starts(),
        recent=history.recent(),
        five_minutes=history.five_minutes(),
    )
    return assess(reading, ()).forecast


def answers(a_second: float, at: float) -> dict[str, Any]:
    """Ten requests run, generate so many blocks of 16 tokens a second, and as one ends each second another one comes."""
    return {
        "requests_running": 10.0,
        "generation_tokens_total": 16.0 * a_second * at,
        "finished_requests_total": 100.0 + at,
        "finished_prompt_tokens_total": 16_000.0 + 160.0 * at,
        "finished_generation_tokens_total": 32_000.0 + 320.0 * at,
    }


# -- none, and why


@pytest.mark.parametrize(
    ("timeline", "seconds", "why"),
    [
        (lambda at: {"sleeping": True}, 300.0, NoForecast.SLEEPING),
        (lambda at: {"kv_usage_ratio": None}, 300.0, NoForecast.NOT_TOLD),
        (lambda at: {"num_blocks": None}, 300.0, NoForecast.NOT_TOLD),
        (lambda at: {"requests_running": None}, 300.0, NoForecast.NOT_TOLD),
        (
            lambda at: {"requests_waiting": None, "requests_waiting_capacity": None},
            300.0,
            NoForecast.NOT_TOLD,
        ),
        (lambda at: {"generation_tokens_total": None}, 300.0, NoForecast.NOT_TOLD),
        (lambda at: answers(5.0, at), 25.0, NoForecast.WATCHED_TOO_SHORT),
        # A restart, and a gap, begin anew.
        (lambda at: answers(5.0, at if at < 280.0 else at - 280.0), 300.0, NoForecast.WATCHED_TOO_SHORT),
    ],
)
def test_where_there_is_no_forecast_nothing_is_told_but_the_reason(
    timeline: Timeline, seconds: float, why: NoForecast
) -> None:
    forecast = told(timeline, seconds=seconds)
    assert forecast == Forecast(unavailable=why, why_unavailable=forecast.why)
    assert forecast.why


def test_tokens_of_a_block_are_needed_and_not_guessed() -> None:
    # Neither the pool's tokens nor the longest request: the layers may be of several kinds.
    nothing = facts(config={"architectures": ["Unheard"]}, flags={"block_size": 16}, max_model_len=None)
    forecast = told(lambda at: {"pool_tokens": None, "max_concurrency": None}, known=nothing)
    assert forecast.unavailable is NoForecast.TOKENS_PER_BLOCK
    assert told(lambda at: {"pool_tokens": None}).unavailable is None


def test_a_queue_is_told_of_at_the_second_scrape_and_growth_is_not_nought_at_the_first() -> None:
    def full(at: float) -> dict[str, Any]:
        return {**answers(5.0, at), "requests_waiting": 3.0, "kv_usage_ratio": 0.98}

    assert told(full, seconds=0.0).unavailable is NoForecast.WATCHED_TOO_SHORT
    forecast = told(full, seconds=5.0)
    assert forecast.unavailable is None
    assert forecast.exhaustion_seconds == 0.0
    assert forecast.probabilities["30s"] > 0.9


# -- how likely


def test_an_engine_at_rest_has_no_preemption_to_come() -> None:
    forecast = told(lambda at: {})
    assert forecast.probabilities == {"30s": 0.0, "2m": 0.0, "10m": 0.0}
    assert (forecast.exhaustion_seconds, forecast.earliest_seconds, forecast.latest_seconds) == (
        None,
        None,
        None,
    )
    assert forecast.why == "nothing runs, and 100 of 100 blocks are free"


def test_before_a_full_pool_the_last_block_goes_growth_through_need_times_a_second() -> None:
    # 0.05 blocks a second, 6 free, one end a second: what is free now is eaten up before the next end with e^-120.
    forecast = told(lambda at: {**answers(0.05, at), "kv_usage_ratio": 0.94, "requests_waiting": 2.0})
    for name, seconds in HORIZONS.items():
        expected = 0.05 / 10 * (seconds - 1.0)
        assert forecast.probabilities[name] == pytest.approx(expected / (1.0 + expected), rel=1e-3)


def test_free_blocks_that_are_eaten_up_before_anything_ends_are_a_preemption() -> None:
    # 2 free, 4 blocks a second, one end a second: e^-0.5.
    forecast = told(lambda at: {**answers(4.0, at), "kv_usage_ratio": 0.98, "requests_waiting": 2.0})
    expected = 4.0 / 10 * (30.0 - 1.0)
    assert forecast.probabilities["30s"] == pytest.approx(
        1.0 - (1.0 - math.exp(-0.5)) / (1.0 + expected), rel=1e-3
    )
    # Where nothing has ended for as long as is known, nothing comes in between.
    stuck = told(
        lambda at: {
            **answers(4.0, at),
            "finished_requests_total": 100.0,
            "finished_prompt_tokens_total": 16_000.0,
            "kv_usage_ratio": 0.98,
            "requests_waiting": 2.0,
        }
    )
    assert stuck.probabilities["30s"] == 1.0


def test_requests_that_wait_for_a_place_and_not_for_blocks_are_no_demand() -> None:
    known = facts(flags={"block_size": 16, "max_num_seqs": 10}, max_model_len=1024, version="0.33.0")

    def full(at: float) -> dict[str, Any]:
        return {**answers(4.0, at), "kv_usage_ratio": 0.6, "requests_waiting": 0.0 if at < 300.0 else 50.0}

    assert told(full, known=known).probabilities["10m"] < 0.001
    assert told(full).probabilities["30s"] > 0.4


def test_what_came_since_the_scrape_before_asks_for_blocks_at_once_and_what_waited_before_one_by_one() -> (
    None
):
    def waits(since: float) -> Timeline:
        return lambda at: {
            **answers(1.0, at),
            "kv_usage_ratio": 0.5,
            "requests_waiting": 6.0 if at >= since else 0.0,
        }

    # 50 in use and 60 asked for do not fit; 50 and 10 do.
    assert told(waits(300.0)).exhaustion_seconds == 0.0
    assert told(waits(0.0)).exhaustion_seconds is None


def test_what_is_not_known_to_have_just_come_asks_for_blocks_one_by_one() -> None:
    def waits(at: float) -> dict[str, Any]:
        silent = {"requests_waiting": None, "requests_waiting_capacity": None}
        return {
            **answers(1.0, at),
            "kv_usage_ratio": 0.5,
            **(silent if at == 295.0 else {"requests_waiting": 6.0}),
        }

    assert told(waits).exhaustion_seconds is None


def stuck_with(finished: float | None) -> Timeline:
    """2 free, 4 blocks a second, ten run."""
    return lambda at: {
        **answers(4.0, at),
        "finished_requests_total": finished,
        "finished_prompt_tokens_total": 16_000.0,
        "kv_usage_ratio": 0.98,
        "requests_waiting": 2.0,
    }


@pytest.mark.parametrize(
    ("finished", "seconds"),
    [
        pytest.param(100.0, 5.0, id="a server is asked once a minute how many have finished"),
        pytest.param(None, 300.0, id="it does not tell"),
    ],
)
def test_that_nothing_ends_is_not_taken_from_a_count_that_is_not_known(
    finished: float | None, seconds: float
) -> None:
    forecast = told(stuck_with(finished), seconds=seconds)
    # Ten run and stay for 15 s each: 2/3 end a second, the first after 1.5 s.
    need = 10.0 if finished else 9.8
    expected = 4.0 / need * (30.0 - 1.5)
    first = math.exp(-10.0 / 15.0 * 2.0 / 4.0)
    assert forecast.probabilities["30s"] == pytest.approx(1.0 - (1.0 - first) / (1.0 + expected), rel=1e-2)


def test_a_request_that_is_alone_is_not_preempted() -> None:
    def fills(at: float) -> dict[str, Any]:
        return {**answers(1.0, at), "requests_running": 1.0, "kv_usage_ratio": 0.98}

    alone = told(fills)
    # The next one would not fit, and would have to wait.
    assert alone.exhaustion_seconds == 0.0
    assert alone.probabilities == {"30s": 0.0, "2m": 0.0, "10m": 0.0}
    # Nor are those that come one after the other, each as large as most of the pool.
    one_by_one = told(lambda at: {**fills(at), "requests_waiting": 3.0})
    assert one_by_one.probabilities == {"30s": 0.0, "2m": 0.0, "10m": 0.0}
    beside = told(lambda at: {**fills(at), "requests_waiting": 3.0, "kv_usage_ratio": 0.9})
    assert beside.probabilities["10m"] > 0.9
    # A burst may still come to one that was watched for a minute.
    assert told(fills, seconds=60.0).probabilities["10m"] > 0.9
    two_before = told(lambda at: {**fills(at), "requests_running": 2.0 if at == 200.0 else 1.0})
    assert two_before.probabilities["10m"] > 0.9


def test_a_quiet_engine_goes_by_all_the_prompts_that_it_has_ever_finished() -> None:
    def quiet(ever: float) -> Timeline:
        # Two run with 30 blocks each; one ends in half a minute, so fewer than ten in five minutes.
        return lambda at: {
            **answers(1.0, at),
            "requests_running": 2.0,
            "kv_usage_ratio": 0.6,
            "finished_requests_total": ever + at // 35.0,
            "finished_prompt_tokens_total": 160.0 * (ever + at // 35.0),
        }

    known, unknown = told(quiet(1000.0)), told(quiet(0.0))
    assert "the next request needs about 10;" in known.why
    assert known.probabilities["10m"] < 0.001
    assert "the next request needs about 30;" in unknown.why


def test_blocks_that_are_held_while_nothing_runs_leave_no_room() -> None:
    held = told(lambda at: {"kv_usage_ratio": 0.95})
    assert held.exhaustion_seconds == 0.0
    assert held.probabilities == {"30s": 0.0, "2m": 0.0, "10m": 0.0}
    assert held.why == (
        "nothing runs; 5 of 100 blocks are free, the next request needs about 10; it has no room now"
    )


@pytest.mark.parametrize("interval", [0.2, 60.0, 300.0, 600.0])
def test_there_is_a_forecast_at_any_interval(interval: float) -> None:
    forecast = told(
        lambda at: {**answers(1.0, at), "kv_usage_ratio": 0.2},
        seconds=max(60.0, 4.0 * interval),
        interval=interval,
    )
    assert forecast.unavailable is None
    assert forecast.probabilities["10m"] < 0.001


def test_what_the_prefix_cache_has_takes_free_blocks_as_well() -> None:
    forecast = told(
        lambda at: {
            **answers(1.0, at),
            "prefix_cache_queries_total": 160.0 * at,
            "prefix_cache_hits_total": 144.0 * at,
            "kv_usage_ratio": 0.95,
            "requests_waiting": 2.0,
        }
    )
    assert "5 of 100 blocks are free, the next request needs about 10; it has no room now" in forecast.why
    # What is left to compute of the two is a tenth.
    assert forecast.prefill_backlog_tokens == pytest.approx(2 * 16)


# -- when


def test_a_trend_goes_on_for_half_of_the_time_that_it_was_seen() -> None:
    def rising(to: float) -> Forecast:
        return told(lambda at: {**answers(1.0, at), "kv_usage_ratio": to * at / 300.0})

    # From 55 to at most 55 + 55 x 1/2 of 100 blocks: there is room for 10 more.
    assert rising(0.55).exhaustion_seconds is None
    # 80 + 40 x (1 - e^(-t/150)) reaches 90 after 43 s.
    assert rising(0.8).exhaustion_seconds == pytest.approx(150.0 * math.log(4.0 / 3.0), abs=2.0)
    earlier = rising(0.85)
    assert earlier.earliest_seconds is not None
    assert earlier.exhaustion_seconds is not None
    assert earlier.latest_seconds is not None
    assert 0.0 < earlier.earliest_seconds < earlier.exhaustion_seconds < earlier.latest_seconds
    assert "the chance that it has no room: 10% by" in earlier.why


def test_a_saw_tooth_is_scatter_and_no_trend() -> None:
    forecast = told(lambda at: {**answers(1.0, at), "kv_usage_ratio": 0.3 + 0.3 * (at % 30.0) / 30.0})
    assert forecast.exhaustion_seconds is None
    assert forecast.probabilities["2m"] < 0.001


@pytest.mark.parametrize("phase", range(0, 60, 10))
def test_a_load_that_comes_and_goes_is_not_expected_to_rise_above_what_it_ever_did(phase: int) -> None:
    def batches(at: float) -> dict[str, Any]:
        # Half a minute on, half a minute off, and nothing else for as long as is known.
        runs = (at + phase) % 60.0 < 30.0
        return {
            **answers(1.0, at),
            "kv_usage_ratio": 0.55 if runs else 0.0,
            "requests_running": 10.0 if runs else 0.0,
        }

    assert told(batches).probabilities["10m"] < 0.2


def test_a_pool_that_fell_idle_has_no_room_problem() -> None:
    forecast = told(
        lambda at: (
            {**answers(4.0, at), "kv_usage_ratio": 0.97, "requests_waiting": 3.0}
            if at < 200.0
            else {**answers(4.0, 200.0), "requests_running": 0.0}
        )
    )
    # It may come back, and nothing is generated: no block goes.
    assert forecast.probabilities == {"30s": 0.0, "2m": 0.0, "10m": 0.0}


# -- what runs and waits


def test_peak_and_backlog_are_of_the_usual_lengths() -> None:
    forecast = told(lambda at: {**answers(1.0, at), "kv_usage_ratio": 0.4, "requests_waiting": 3.0})
    # 40 in use; half of 320 tokens to come for ten, and 3 x (10 + 20) for those that wait.
    assert forecast.peak_blocks == pytest.approx(40 + 10 * 10 + 3 * 30)
    assert forecast.prefill_backlog_tokens == pytest.approx(3 * 160)
    unknown = told(
        lambda at: {
            **answers(1.0, at),
            "finished_requests_total": None,
            "kv_usage_ratio": 0.4,
            "requests_waiting": 3.0,
        }
    )
    assert (unknown.peak_blocks, unknown.prefill_backlog_tokens) == (None, None)
    assert told(lambda at: {}).prefill_backlog_tokens == 0.0


def test_the_backlog_is_of_the_whole_queue_whatever_it_waits_for() -> None:
    known = facts(flags={"block_size": 16, "max_num_seqs": 10}, max_model_len=1024, version="0.33.0")
    forecast = told(
        lambda at: {**answers(1.0, at), "kv_usage_ratio": 0.6, "requests_waiting": 50.0}, known=known
    )
    assert forecast.prefill_backlog_tokens == pytest.approx(50 * 160)
    # Of the blocks only what runs: the others have no place.
    assert forecast.peak_blocks == pytest.approx(60 + 10 * 10)


def test_peak_and_backlog_have_all_of_a_prompt_also_where_its_first_chunk_is_let_in() -> None:
    known = facts(
        flags={"block_size": 16, "max_num_batched_tokens": 64}, max_model_len=1024, version="0.18.0"
    )
    forecast = told(
        lambda at: {**answers(1.0, at), "kv_usage_ratio": 0.4, "requests_waiting": 3.0}, known=known
    )
    assert "the next request needs about 4;" in forecast.why
    assert forecast.peak_blocks == pytest.approx(40 + 10 * 10 + 3 * 30)
    assert forecast.prefill_backlog_tokens == pytest.approx(3 * 160)


def test_a_pool_of_several_groups_grows_by_vllms_own_count_of_its_tokens() -> None:
    # 404 tokens in 101 blocks: four tokens take one. 16 tokens a second are 4 blocks, and a request holds 9.8.
    forecast = told(
        lambda at: {
            **answers(1.0, at),
            "pool_tokens": 404,
            "max_concurrency": 404 / 1024,
            "kv_usage_ratio": 0.98,
            "requests_waiting": 2.0,
        }
    )
    assert "10 run and grow by 4.0 blocks a second; 2 wait for room" in forecast.why
    expected = 4.0 / 9.8 * (600.0 - 1.0)
    assert forecast.probabilities["10m"] == pytest.approx(
        1.0 - (1.0 - math.exp(-0.5)) / (1.0 + expected), rel=1e-3
    )


def test_the_sentence_has_the_numbers() -> None:
    forecast = told(lambda at: {**answers(4.0, at), "kv_usage_ratio": 0.98, "requests_waiting": 2.0})
    assert forecast.why == (
        "10 run and grow by 4.0 blocks a second; 2 wait for room; 2 of 100 blocks are free, the next request needs about 10; "
        "it has no room now"
    )
    assert told(lambda at: {**answers(1.0, at), "requests_running": 1.0}).why == (
        "1 runs and grows by 1.0 blocks a second; 100 of 100 blocks are free, the next request needs about 10; that it finds no "
        "room within 10 minutes is unlikely; a request that is alone is not preempted"
    )
    just_ended = told(
        lambda at: {**answers(6.0, min(at, 280.0)), "requests_running": 10.0 if at <= 280.0 else 0.0}
    )
    assert just_ended.why.startswith("nothing runs now, and blocks were used up at 4.0 a second; 100 of")


# -- laws

_ratios, _small = st.floats(0.0, 1.0), st.integers(0, 40)


@given(
    rows=st.lists(st.tuples(_ratios, _small, _small, _small, _small), min_size=1, max_size=80),
    interval=st.sampled_from([1.0, 5.0, 15.0]),
    blocks=st.integers(2, 10**6),
)
def test_probabilities_are_probabilities_and_grow_with_the_horizon(
    rows: list[tuple[float, int, int, int, int]], interval: float, blocks: int
) -> None:
    def timeline(at: float) -> dict[str, Any]:
        number = round(at / interval)
        usage, running, waiting, _, _ = rows[number]
        return {
            "num_blocks": blocks,
            "pool_tokens": 16 * blocks,
            "max_concurrency": 16 * blocks / 1024,
            "kv_usage_ratio": usage,
            "requests_running": float(running),
            "requests_waiting": float(waiting),
            "generation_tokens_total": float(sum(row[3] for row in rows[: number + 1])),
            "finished_requests_total": float(sum(row[4] for row in rows[: number + 1])),
        }

    forecast = told(timeline, seconds=(len(rows) - 1) * interval, interval=interval)
    ratios = list(forecast.probabilities.values())
    assert all(0.0 <= ratio <= 1.0 for ratio in ratios)
    assert ratios == sorted(ratios)
    marks = (forecast.earliest_seconds, forecast.exhaustion_seconds, forecast.latest_seconds)
    reached = [mark for mark in marks if mark is not None]
    assert reached == sorted(reached)
    assert marks[: len(reached)] == tuple(reached)
    if forecast.unavailable is not None:
        assert not ratios
