"""Which scrapes show a preemption, and which preemptions belong together."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvheadroom.lab.backtest.events import (
    EngineSample,
    Episode,
    count_preemptions,
    find_episodes,
    find_stretches,
    known_until,
)
from tests.lab.backtest.series import find_events, samples, seen


def test_a_rise_of_the_counter_is_an_event_however_large() -> None:
    assert find_events(samples([18, 18, 19, 19, 24, 24])) == (2.0, 4.0)


def test_what_the_counter_says_at_first_is_no_event() -> None:
    assert find_events(samples([54])) == ()
    assert find_events(samples([None, None, 54, 54])) == ()


def test_a_rise_is_dated_to_the_first_sample_at_which_less_ran_and_more_waited_with_nothing_finished() -> (
    None
):
    history = samples([0, 0, 0, 0, 1], running=[9, 9, 8, 7, 9], waiting=[2, 2, 3, 4, 2])
    assert find_events(history) == (2.0,)


def test_a_request_that_finished_is_no_sign_of_a_preemption() -> None:
    history = samples([0, 0, 0, 1], running=[9, 8, 8, 8], waiting=[2, 3, 3, 3], finished=[5, 6, 6, 6])
    assert find_events(history) == (3.0,)


def test_without_a_count_of_finished_requests_a_rise_is_dated_to_itself() -> None:
    history = samples([0, 0, 0, 1], running=[9, 8, 8, 8], waiting=[2, 3, 3, 3], finished=[None] * 4)
    assert find_events(history) == (3.0,)


def test_less_that_ran_is_no_sign_while_not_more_wait() -> None:
    assert find_events(samples([0, 0, 0, 1], running=[9, 8, 8, 8], waiting=[2, 2, 2, 2])) == (3.0,)


def test_more_that_wait_are_no_sign_while_not_less_run() -> None:
    assert find_events(samples([0, 0, 0, 1], running=[9, 9, 9, 9], waiting=[2, 3, 3, 3])) == (3.0,)


def test_a_sign_before_the_previous_rise_dates_nothing_after_it() -> None:
    history = samples([0, 0, 1, 1, 2], running=[9, 8, 8, 8, 8], waiting=[2, 3, 3, 3, 3])
    assert find_events(history) == (1.0, 4.0)


def test_a_sign_at_the_sample_of_the_rise_belongs_to_that_rise_alone() -> None:
    history = samples([0, 1, 1, 2], running=[9, 8, 8, 8], waiting=[2, 3, 3, 3])
    assert find_events(history) == (1.0, 3.0)


def test_a_sign_without_a_rise_is_no_event() -> None:
    assert find_events(samples([0, 0, 0], running=[9, 8, 8], waiting=[2, 3, 3])) == ()


def test_a_counter_that_fell_is_no_event_and_is_counted_from_there() -> None:
    assert find_events(samples([10_000, 40, 40, 41])) == (3.0,)


def test_a_sign_before_a_restart_dates_nothing_after_it() -> None:
    history = samples([7, 7, 0, 0, 1], running=[9, 8, 0, 9, 9], waiting=[2, 3, 0, 0, 0])
    assert find_events(history) == (4.0,)


def test_a_counter_that_is_not_told_for_a_while_still_rose() -> None:
    assert find_events(samples([3, None, None, 5])) == (3.0,)


def test_several_preemptions_may_be_one_event() -> None:
    assert count_preemptions(samples([18, 18, 20, None, 25])) == 7
    assert count_preemptions(samples([10_000, 40, 41])) == 1, "what was before the restart is over"
    assert count_preemptions(samples([None])) == 0


def test_events_less_than_the_gap_apart_are_one_episode() -> None:
    assert find_episodes((1.0, 20.9, 40.9, 60.8), 20.0) == (Episode((1.0, 20.9)), Episode((40.9, 60.8)))


def test_without_events_there_is_no_episode() -> None:
    assert find_episodes((), 20.0) == ()


def test_samples_too_far_apart_are_of_different_stretches() -> None:
    history = [EngineSample(at=at) for at in (0.0, 1.0, 4.0, 7.1, 8.0)]
    stretches = find_stretches(history, 3.0)
    assert [(one.starts_at, one.ends_at) for one in stretches] == [(0.0, 4.0), (7.1, 8.0)]
    assert find_stretches((), 3.0) == ()


def test_what_comes_is_known_until_the_end_of_the_stretch() -> None:
    stretches = (seen(1.0, 4.0), seen(7.0, 8.0))
    for at, until in ((0.5, 0.5), (1.0, 4.0), (4.0, 4.0), (5.5, 4.0), (7.0, 8.0), (9.0, 8.0)):
        assert known_until(stretches, at) == until


counts = st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=30)


@given(counts, st.randoms(use_true_random=False))
def test_there_are_as_many_events_as_rises_in_order_and_none_after_its_rise(
    told: list[int | None], chance: random.Random
) -> None:
    def numbers() -> list[float | None]:
        return [chance.choice((None, 0, 1, 2)) for _ in told]

    history = samples(told, running=numbers(), waiting=numbers(), finished=numbers())
    known = [(one.at, one.preemptions_total) for one in history if one.preemptions_total is not None]
    rises = [now for (_, a), (now, b) in itertools.pairwise(known) if b > a]
    events = find_events(history)
    assert len(events) == len(rises)
    assert all(event <= rise for event, rise in zip(events, rises, strict=True))
    assert list(events) == sorted(set(events)), "no two rises share a date"
    assert all(event > rise for rise, event in zip(rises, events[1:], strict=False)), (
        "of the time since the previous rise"
    )


@given(st.lists(st.integers(0, 300), unique=True), st.integers(1, 50))
def test_episodes_hold_every_event_once_and_are_a_gap_apart(seconds: list[int], gap: int) -> None:
    events = tuple(float(at) for at in sorted(seconds))
    episodes = find_episodes(events, gap)
    assert tuple(itertools.chain.from_iterable(one.events for one in episodes)) == events
    assert all(b.preempted_at - a.last_at >= gap for a, b in itertools.pairwise(episodes))
    assert all(b - a < gap for one in episodes for a, b in itertools.pairwise(one.events))
