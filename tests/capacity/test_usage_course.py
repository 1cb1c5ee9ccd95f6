"""The usage of the last hour as points to draw."""

import math
from dataclasses import replace

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.history import LastHour
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.usage_course import usage_course
from tests.capacity.facts_builder import facts
from tests.capacity.test_known_facts import assessed


def engine(*told: tuple[float, float | None, float | None], now: EngineSnapshot | None = None) -> Assessment:
    """Scrapes as (seconds, usage, preemptions), and the newest one, of second 1000."""
    nan = math.nan
    past = LastHour(
        [at for at, _, _ in told],
        [nan if usage is None else usage for _, usage, _ in told],
        [nan if counted is None else counted for _, _, counted in told],
    )
    newest = now or EngineSnapshot(engine="0", kv_usage_ratio=0.5, preemptions_total=9.0)
    return replace(assessed(facts()), snapshot=newest, last_hour=past)


def test_points_are_seconds_before_now_and_end_with_the_newest_scrape() -> None:
    course = usage_course(engine((880.0, 0.25, 4.0), (940.0, 0.75, 4.0)), 1003.0)
    assert course is not None
    assert course.points == ((-123.0, 0.25), (-63.0, 0.75), (-3.0, 0.5))
    assert (course.seconds, course.least_ratio, course.most_ratio) == (123.0, 0.25, 0.75)


def test_preemptions_are_counted_and_stand_at_the_scrapes_that_show_them() -> None:
    course = usage_course(engine((820.0, 0.5, 4.0), (880.0, 0.5, 6.0), (940.0, 0.5, 6.0)), 1000.0)
    assert course is not None
    assert (course.preemptions, course.preempted) == (5.0, (-120.0, 0.0))


def test_a_page_that_tells_no_preemptions_has_none_counted_and_no_zero() -> None:
    course = usage_course(engine((880.0, 0.25, None), (940.0, 0.75, 4.0)), 1000.0)
    assert course is not None
    assert (course.preemptions, course.preempted) == (None, (0.0,))


def test_scrapes_without_a_usage_are_left_out_and_one_alone_is_no_course() -> None:
    course = usage_course(engine((880.0, None, 0.0), (940.0, 0.75, 0.0)), 1000.0)
    assert course is not None
    assert course.points == ((-60.0, 0.75), (0.0, 0.5))
    assert usage_course(engine(), 1000.0) is None
    silent = EngineSnapshot(engine="0")
    assert usage_course(engine((940.0, 0.75, 0.0), now=silent), 1000.0) is None


def test_a_scrape_that_is_kept_already_is_not_drawn_twice() -> None:
    course = usage_course(engine((940.0, 0.75, 0.0), (1000.0, 0.5, 0.0)), 1000.0)
    assert course is not None
    assert course.points == ((-60.0, 0.75), (0.0, 0.5))
