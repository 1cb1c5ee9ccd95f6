"""The stretches that are kept of an engine, and when they are learned from."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.history import moment_of
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.reuse import MOST_STRETCHES, Reuse, ReuseQuestion, Stretch
from kvheadroom.monitor.reuse_learner import LEARN_EVERY, ReuseLearner
from tests.capacity.facts_builder import facts

FIRST = EngineSnapshot(
    engine="0",
    num_blocks=1001,
    block_size=16,
    attention_block_size=16,
    kv_usage_ratio=0.5,
    requests_waiting=2,
    prefix_cache_queries_total=1.0,
    prefix_cache_hits_total=0.0,
    prompt_tokens_total=0.0,
    generation_tokens_total=0.0,
)


class Lessons:
    """What was asked, each answered when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Stretch], ReuseQuestion]] = []
        self.future: Future[Reuse | str] = Future()

    def later(
        self,
        learn: Callable[[list[Stretch], ReuseQuestion], Reuse | str],
        stretches: list[Stretch],
        question: ReuseQuestion,
    ) -> "Future[Reuse | str]":
        self.asked.append((stretches, question))
        self.future = Future()
        return self.future


class Engine:
    """One that is scraped each minute, and finds half of a thousand tokens each time."""

    def __init__(self, lessons: Lessons) -> None:
        self.learner = ReuseLearner((10**6,), lessons.later)
        self.at = 0.0
        self.now = FIRST
        self.flags: dict[str, Any] = {}

    def scrape(self, times: int = 1, *, goes_on: bool = True, **changed: Any) -> None:
        for _ in range(times):
            self.at += 60.0
            self.now = replace(
                self.now,
                prompt_tokens_total=(self.now.prompt_tokens_total or 0) + 1000.0,
                prefix_cache_hits_total=(self.now.prefix_cache_hits_total or 0) + 500.0,
                **changed,
            )
            self.learner.see(moment_of(self.now, self.at), goes_on=goes_on)
            self.learner.assessed(self.assessment())

    def assessment(self) -> Assessment:
        return assess(Reading(facts=facts(flags=self.flags), snapshot=self.now, taken_at=self.at), (1024,))


@pytest.fixture
def lessons() -> Lessons:
    return Lessons()


@pytest.fixture
def engine(lessons: Lessons) -> Engine:
    return Engine(lessons)


def test_a_stretch_is_ten_minutes_and_begins_where_the_one_before_ended(engine: Engine) -> None:
    engine.scrape(21)
    one = Stretch(600.0, 10_000.0, 5000.0, 0.0, 0.0, 0.5, 2.0, follows=False)
    assert engine.learner.stretches() == [one, one._replace(follows=True)]


def test_usage_and_queue_are_means_of_the_stretch(engine: Engine) -> None:
    engine.scrape(6)
    engine.scrape(5, kv_usage_ratio=1.0, requests_waiting=0)
    [one] = engine.learner.stretches()
    assert (one.usage, one.waiting) == (0.75, 1.0)


def test_a_restart_begins_a_stretch_anew_that_follows_none(engine: Engine) -> None:
    engine.scrape(15)
    engine.scrape(goes_on=False)
    engine.scrape(10)
    assert [one.follows for one in engine.learner.stretches()] == [False, False]


def test_a_day_is_kept(engine: Engine) -> None:
    for _ in range(MOST_STRETCHES + 5):
        engine.scrape(10)
    assert len(engine.learner.stretches()) == MOST_STRETCHES


def test_it_asks_at_once_while_little_is_known_and_once_an_hour_later_on(
    engine: Engine, lessons: Lessons
) -> None:
    engine.scrape()
    assert len(lessons.asked) == 1
    for _ in range(12):
        lessons.future.set_result("too little")
        engine.scrape(10)
    assert [len(stretches) for stretches, _ in lessons.asked] == list(range(13))
    for _ in range(LEARN_EVERY - 1):
        if not lessons.future.done():
            lessons.future.set_result("known")
        engine.scrape(10)
        assert len(lessons.asked) == 13
    engine.scrape(10)
    assert len(lessons.asked) == 14


def test_what_was_learned_is_told_once_it_is_there(engine: Engine, lessons: Lessons) -> None:
    engine.scrape()
    assert engine.learner.reuse == "nothing was learned so far"
    lessons.future.set_result("two hours are needed")
    engine.scrape()
    assert engine.learner.reuse == "two hours are needed"


def test_a_fault_of_ours_is_told_and_logged_and_nothing_else_ends(
    engine: Engine, lessons: Lessons, caplog: pytest.LogCaptureFixture
) -> None:
    engine.scrape()
    lessons.future.set_exception(ValueError("odd"))
    engine.scrape()
    assert engine.learner.reuse == "a fault of kvheadroom: ValueError('odd')"
    assert "please report it" in caplog.text
    engine.scrape(10)
    assert len(lessons.asked) == 2


def test_with_another_pool_the_past_is_forgotten(engine: Engine) -> None:
    engine.scrape(11)
    assert len(engine.learner.stretches()) == 1
    engine.scrape(num_blocks=501)
    assert engine.learner.stretches() == []


def test_what_was_being_learned_of_the_pool_before_is_not_told_of_this_one(
    engine: Engine, lessons: Lessons
) -> None:
    engine.scrape(11)
    before = lessons.future
    engine.scrape(num_blocks=501)
    before.set_result("of the pool before")
    engine.scrape()
    assert engine.learner.reuse == "nothing was learned so far"
    lessons.future.set_result("of this pool")
    engine.scrape()
    assert engine.learner.reuse == "of this pool"


def test_a_page_that_leaves_its_blocks_out_for_once_costs_nothing_of_the_past(engine: Engine) -> None:
    engine.scrape(11)
    engine.scrape(num_blocks=None)
    engine.scrape(num_blocks=1001)
    assert len(engine.learner.stretches()) == 1


def test_with_a_tier_of_another_size_the_past_is_forgotten_within_a_stretch_of_the_restart(
    engine: Engine, lessons: Lessons
) -> None:
    engine.flags = {"kv_offloading_size": 1.0}
    for _ in range(16):
        engine.scrape(10)
        if not lessons.future.done():
            lessons.future.set_result("known")
    engine.flags = {"kv_offloading_size": 2.0}
    engine.scrape(goes_on=False)
    assert len(engine.learner.stretches()) == 15
    engine.scrape(10)
    assert engine.learner.stretches() == []
    stretches, asked = lessons.asked[-1]
    assert (stretches, asked.tier.tokens) == ([], 2.0**21)


def test_nothing_follows_a_stretch_whose_end_told_no_answers(engine: Engine) -> None:
    engine.scrape(20)
    engine.scrape(generation_tokens_total=None)
    engine.scrape(10, generation_tokens_total=0.0)
    engine.scrape(10)
    assert [one.follows for one in engine.learner.stretches()] == [False, False]


def test_while_something_is_learned_nothing_more_is_asked(engine: Engine, lessons: Lessons) -> None:
    engine.scrape(50)
    assert len(lessons.asked) == 1
    lessons.future.set_result("little")
    engine.scrape()
    assert len(lessons.asked) == 2


def test_an_engine_that_cannot_be_asked_says_why(lessons: Lessons) -> None:
    engine = Engine(lessons)
    engine.scrape(num_blocks=None)
    assert engine.learner.reuse == "the engine does not tell its blocks"
    assert lessons.asked == []


def test_a_page_without_usage_makes_no_stretch(engine: Engine) -> None:
    engine.scrape(15)
    engine.scrape(kv_usage_ratio=None)
    engine.scrape(12, kv_usage_ratio=0.5)
    assert [one.follows for one in engine.learner.stretches()] == [False, False]
