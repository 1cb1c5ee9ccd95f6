"""The oracle: what it says comes true to the step where nothing new arrives, and asking it changes nothing."""

import os
import random
from itertools import pairwise

import pytest

from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.oracle import Oracle, fires_within, seconds_to_preemption
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest
from kvheadroom.lab.simulator.run import Run, Speed
from kvheadroom.lab.simulator.speeds import RecordedRates
from tests.lab.simulator.test_run import RATES, OneByOne, request, settings, some_load

SEED = int(os.environ.get("KVHEADROOM_SEED", random.randrange(2**32)))
PROMPTS = 120 / 2048
"""Seconds until both prompts of `two_requests` are computed and each has a first token."""


def two_requests(num_output_tokens: int) -> list[LoggedRequest]:
    return [request("a", 0.0, 60, 60), request("b", 0.0, 60, num_output_tokens)]


def run_of(log: list[LoggedRequest], engine: EngineSettings, speed: Speed = RATES) -> Run:
    return Run(engine, LoggedArrivals(log, engine.block_size), speed, starts_at=0.0)


def recorded_rates() -> RecordedRates:
    """Fast and slow by turns, 100 tokens a second and 25."""
    seconds = range(0, 400, 10)
    tokens = [0]
    for before, _ in pairwise(seconds):
        tokens.append(tokens[-1] + (1000 if before % 20 else 250))
    return RecordedRates(seconds, tokens)


@pytest.mark.parametrize("asked_at", [0.0, PROMPTS, 0.2, PROMPTS + 4 / 16 - 0.001])
def test_two_requests_overflow_the_pool_at_the_fifth_token_after_their_prompts(asked_at: float) -> None:
    run = run_of(two_requests(60), settings(num_blocks=9))
    run.advance(asked_at)
    # 8 blocks of 16 tokens, 4 for each. The first token of the output comes with the prompt, four more fill the blocks.
    assert seconds_to_preemption(run, asked_at, 60.0) == PROMPTS + 4 / 16 - asked_at
    run.advance(60.0)
    assert run.preempted_at == [PROMPTS + 4 / 16]


def test_what_the_step_under_way_preempted_is_past_and_the_one_request_left_has_room() -> None:
    run = run_of(two_requests(60), settings(num_blocks=9))
    run.advance(PROMPTS + 4 / 16 + 0.001)
    assert run.preempted_at == [PROMPTS + 4 / 16]
    assert not run.fits_at_full_length(), "each needs 8 blocks in the end"
    assert seconds_to_preemption(run, PROMPTS + 4 / 16 + 0.001, 60.0) is None


def test_of_two_engines_that_look_the_same_only_the_one_with_long_answers_will_preempt() -> None:
    engine = settings(num_blocks=9)
    pages = Pages(engine, model_name="m", starts_at=0.0)
    long, short = run_of(two_requests(60), engine), run_of(two_requests(4), engine)
    for run in (long, short):
        run.advance(0.2)
    assert pages.text(long) == pages.text(short)
    assert seconds_to_preemption(long, 0.2, 60.0) == PROMPTS + 4 / 16 - 0.2
    assert seconds_to_preemption(short, 0.2, 60.0) is None
    short.advance(60.0)
    assert short.preempted_at == []


def test_a_preemption_after_the_horizon_is_none() -> None:
    run = run_of(two_requests(60), settings(num_blocks=9))
    run.advance(0.0)
    assert seconds_to_preemption(run, 0.0, PROMPTS + 4 / 16) == PROMPTS + 4 / 16
    assert seconds_to_preemption(run, 0.0, PROMPTS + 4 / 16 - 0.001) is None


def test_it_knows_nothing_of_a_request_that_is_still_to_come() -> None:
    run = run_of([request("a", 0.0, 60, 60), request("b", 0.1, 60, 60)], settings(num_blocks=9))
    run.advance(0.05)
    assert seconds_to_preemption(run, 0.05, 60.0) is None
    run.advance(0.2)
    told = seconds_to_preemption(run, 0.2, 60.0)
    assert told is not None
    run.advance(60.0)
    assert run.preempted_at[0] == pytest.approx(0.2 + told, abs=1e-9)


def test_it_knows_when_a_client_that_is_here_will_go() -> None:
    staying = two_requests(60)
    going = [staying[0], request("b", 0.0, 60, 60, given_up_at=0.25)]
    answers = []
    for log in (staying, going):
        run = run_of(log, settings(num_blocks=9))
        run.advance(0.2)
        answers.append(seconds_to_preemption(run, 0.2, 60.0))
    assert answers == [PROMPTS + 4 / 16 - 0.2, None]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_nothing_new_arrives_the_preemption_comes_at_the_instant_that_was_said(
    *, asynchronous: bool
) -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    engine, horizon = settings(async_scheduling=asynchronous, num_blocks=60), 30.0
    said = silent = without_a_copy = 0
    for number in range(3):
        log = some_load(random.Random(f"{SEED}/{number}"))
        arrivals = LoggedArrivals(log, engine.block_size)
        run = Run(engine, arrivals, RATES, starts_at=0.0)
        for at in range(0, 80, 2):
            run.advance(at)
            told = seconds_to_preemption(run, at, horizon)
            # The same requests once more up to now, one step at a time, and none after them.
            alone = run_of(log[: len(arrivals.requests)], engine, OneByOne())
            alone.advance(at + horizon)
            comes = [since for since in alone.preempted_at if since > at]
            assert told == (comes[0] - at if comes else None), f"load {number}, {at} s"
            said += told is not None
            silent += told is None and not run.fits_at_full_length()
            without_a_copy += run.fits_at_full_length()
    assert min(said, silent, without_a_copy) > 3, (said, silent, without_a_copy)


@pytest.mark.parametrize("speed", [RATES, recorded_rates()], ids=["constant", "recorded"])
def test_a_run_that_is_asked_goes_on_as_one_that_is_not(speed: Speed) -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    log = some_load(random.Random(f"{SEED}/asked"))
    engine = settings(num_blocks=60)
    asked = run_of(log, engine, speed)
    left_alone = run_of(log, engine, RATES if speed is RATES else recorded_rates())
    pages = Pages(engine, model_name="m", starts_at=0.0)
    oracle = Oracle(30.0)
    for half in range(300):
        asked.advance(half / 2)
        oracle.watch(asked, half / 2)
        left_alone.advance(half / 2)
        assert pages.text(asked) == pages.text(left_alone), half / 2
    assert asked.preempted_at == left_alone.preempted_at != []
    assert len(oracle.answers) == 300
    assert any(answer is not None for answer in oracle.answers)


def test_as_a_signal_it_fires_while_a_preemption_is_near_enough() -> None:
    assert fires_within([None, 901.0, 900.0, 0.5], 900.0) == [False, False, True, True]
