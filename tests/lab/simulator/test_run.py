"""Time in the simulator: steps taken many at once, clients that go, what is refused."""

import os
import random

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.scheduler import Step
from kvheadroom.lab.simulator.speeds import ConstantRates
from kvheadroom.sources.vllm_metrics import parse_page

SEED = int(os.environ.get("KVHEADROOM_SEED", random.randrange(2**32)))
RATES = ConstantRates(prefill_tokens_per_second=2048.0, decode_tokens_per_second=16.0)
"""Powers of two, so that many steps at once take to the bit the time of as many single ones."""


class OneByOne:
    decode_seconds = None

    def step_end(self, begins_at: float, step: Step) -> float:
        return RATES.step_end(begins_at, step)


def settings(**changed: object) -> EngineSettings:
    usual: dict[str, object] = {
        "num_blocks": 100,
        "block_size": 16,
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
        "rules": rules_of("0.33.0"),
    }
    return EngineSettings(**{**usual, **changed})  # type: ignore[arg-type]


def request(session: str, sent_at: float, prompt: int, output: int, **more: object) -> LoggedRequest:
    said: dict[str, object] = {
        "session": session,
        "turn": 0,
        "sent_at": sent_at,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "max_tokens": output,
    }
    return LoggedRequest(**{**said, **more})  # type: ignore[arg-type]


def some_load(rng: random.Random) -> list[LoggedRequest]:
    log = []
    for session in range(30):
        at, known = rng.uniform(0, 20), 0
        for turn in range(rng.randint(1, 4)):
            prompt = known + rng.randint(1, 100)
            output = rng.randint(1, 150)
            gone = at + rng.uniform(0.1, 20) if rng.random() < 0.1 else None
            log.append(
                request(str(session), at, prompt, output, turn=turn, prefix_tokens=known, given_up_at=gone)
            )
            known = prompt + output
            at += rng.uniform(2, 40)
    return sorted(log, key=lambda one: one.sent_at)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_decode_steps_at_once_give_what_single_steps_give(*, asynchronous: bool) -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    preempted = 0
    for number in range(4):
        log = some_load(random.Random(f"{SEED}/{number}"))
        engine = settings(async_scheduling=asynchronous)
        many = Run(engine, LoggedArrivals(log, 16), RATES, starts_at=0.0)
        single = Run(engine, LoggedArrivals(log, 16), OneByOne(), starts_at=0.0)
        pages = Pages(engine, model_name="m", starts_at=0.0)
        for at in range(0, 600, 2):
            many.advance(at)
            single.advance(at)
            assert pages.text(many) == pages.text(single), f"load {number}, {at} s"
        assert many.num_steps == single.num_steps > 1000
        assert many.told.num_running == many.told.num_waiting == 0
        preempted += many.meters.preemptions
    assert preempted >= 4


def test_what_waits_is_admitted_when_it_finds_what_another_computes() -> None:
    log = [
        request("b", 0.0, 2, 14),
        request("a", 0.0, 36, 56),
        request("a", 0.25, 160, 1, turn=1, prefix_tokens=92),
    ]
    # 11 blocks, of which b holds 1. The last request's 10 fit as soon as the first of its session has no block half full.
    for speed in (RATES, OneByOne()):
        arrivals = LoggedArrivals(log, 16)
        run = Run(settings(num_blocks=12), arrivals, speed, starts_at=0.0)
        run.advance(100.0)
        assert arrivals.requests[2].num_cached_tokens == 48
        # In the very step that fills the third block: the twelfth after the one with both prompts.
        assert arrivals.requests[2].first_token_at == 38 / 2048 + 12 / 16


def test_a_run_is_the_same_however_often_it_is_looked_at() -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    log = some_load(random.Random(f"{SEED}/looked at"))
    often, once = (Run(settings(), LoggedArrivals(log, 16), RATES, starts_at=0.0) for _ in range(2))
    pages = Pages(settings(), model_name="m", starts_at=0.0)
    for hundredth in range(9000):
        often.advance(hundredth / 100)
    once.advance(89.99)
    assert pages.text(often) == pages.text(once)


def test_a_step_takes_the_time_of_its_prompt_or_of_a_token() -> None:
    log = [request("a", 1.0, 300, 3)]
    arrivals = LoggedArrivals(log, 16)
    run = Run(settings(), arrivals, RATES, starts_at=0.0)
    run.advance(1.0 + 128 / 2048)
    assert (run.told.num_running, run.told.num_used) == (1, 8), "the first chunk of 128 tokens holds 8 blocks"
    assert run.meters.prompt_tokens == 0, "a prompt is counted with its first token"
    run.advance(2.0)
    only = arrivals.requests[0]
    assert only.first_token_at == 1.0 + 300 / 2048
    assert run.meters.generation_tokens == 3
    assert run.meters.histograms["e2e_request_latency_seconds"].sum == 300 / 2048 + 2 / 16
    assert run.told.num_used == 0


def test_a_prompt_beside_others_takes_the_longer_time_for_all() -> None:
    arrivals = LoggedArrivals([request("a", 0.0, 16, 9), request("b", 16 / 2048, 1000, 1)], 16)
    run = Run(settings(), arrivals, RATES, starts_at=0.0)
    run.advance(16 / 2048 + 2 / 16)
    # Two steps of 127 tokens of the prompt beside one of the answer: 127 / 2048 s would be enough for the prompt.
    assert run.meters.generation_tokens == 3
    slow = ConstantRates(prefill_tokens_per_second=254.0, decode_tokens_per_second=16.0)
    log = [request("a", 0.0, 127, 9), request("b", 0.0, 1000, 1)]
    run = Run(settings(max_num_batched_tokens=127), LoggedArrivals(log, 16), slow, starts_at=0.0)
    run.advance(0.5 + 126 / 254 - 1e-6)
    assert run.meters.generation_tokens == 1
    run.advance(0.5 + 126 / 254 + 1e-6)
    assert run.meters.generation_tokens == 2


def test_a_client_that_goes_away_frees_its_blocks_and_is_not_counted() -> None:
    arrivals = LoggedArrivals([request("a", 0.0, 64, 100, given_up_at=1.0), request("b", 0.0, 64, 10)], 16)
    run = Run(settings(), arrivals, RATES, starts_at=0.0)
    run.advance(0.9)
    assert run.told.num_running == 1
    assert run.meters.success["length"] == 1
    run.advance(20.0)
    assert run.told == type(run.told)(queries=128)
    assert run.meters.success == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    assert arrivals.requests[0].num_output_tokens == 16, "one after 0.0625 s, and one each 0.0625 s up to 1 s"


@pytest.mark.parametrize(
    ("asynchronous", "told_at_once"),
    [(False, 0), (True, 1)],
)
def test_a_preemption_is_told_with_the_next_token_of_its_victim(
    *, asynchronous: bool, told_at_once: int
) -> None:
    engine = settings(num_blocks=9, async_scheduling=asynchronous)
    log = [request("a", 0.0, 60, 60), request("b", 0.0, 60, 60)]
    arrivals = LoggedArrivals(log, 16)
    run = Run(engine, arrivals, RATES, starts_at=0.0)
    # Each holds 4 blocks up to its 64th token, then two blocks more are needed, and none is left.
    run.advance(120 / 2048 + 5 / 16)
    assert (run.told.num_running, run.told.num_waiting, run.told.num_used) == (1, 1, 5)
    assert [one.num_preemptions for one in arrivals.requests] == [0, 1]
    assert run.meters.preemptions == told_at_once
    run.advance(60.0)
    assert run.meters.preemptions == 1


def test_a_request_that_never_fits_is_refused_by_name() -> None:
    run = Run(settings(), LoggedArrivals([request("long", 0.0, 1000, 100)], 16), RATES, starts_at=0.0)
    with pytest.raises(OperatorError, match="session long, turn 0: 1000 tokens and 100 of output are more"):
        run.advance(1.0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_blocks": 1}, "two blocks"),
        ({"watermark": 1.0}, "watermark: 1 is no share"),
        ({"watermark": 0.1, "rules": rules_of("0.23.0")}, "before 0.24"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(changed: dict[str, object], why: str) -> None:
    with pytest.raises(OperatorError, match=why):
        settings(**changed)


@pytest.mark.parametrize(
    ("version", "whole", "reasons", "tokens", "attention_block"),
    [
        ("0.10.2", False, False, None, None),
        ("0.18.1", False, False, None, None),
        ("0.19.0", True, False, None, None),
        ("0.20.0", True, True, None, None),
        ("0.24.0", True, True, 1600, None),
        ("0.32.0", True, True, 1600, 16),
        ("0.33.0+cu130", True, True, 1600, 16),
    ],
)
def test_releases_differ_as_their_source_does(
    version: str, *, whole: bool, reasons: bool, tokens: int | None, attention_block: int | None
) -> None:
    engine = settings(rules=rules_of(version))
    assert engine.rules.whole_prompt_must_fit == whole
    run = Run(engine, LoggedArrivals([], 16), RATES, starts_at=0.0)
    page = parse_page(Pages(engine, model_name="m", starts_at=0.0).text(run).encode())
    assert isinstance(page, VllmPage)
    assert page.problems == ()
    only = page.engines[0]
    assert (only.requests_waiting_capacity is not None) == reasons
    assert (only.pool_tokens, only.attention_block_size) == (tokens, attention_block)


@pytest.mark.parametrize("version", ["0.9.2", "main", "1", ""])
def test_a_release_that_was_not_read_is_refused(version: str) -> None:
    with pytest.raises(OperatorError, match=r"release of vLLM|is not simulated"):
        rules_of(version)
