"""Probabilities against what came."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvheadroom.lab.backtest.probabilities import Bin, Judged, base_rate, brier, judge, reliability
from tests.lab.backtest.series import seen

ALL = (seen(0.0, 100.0),)


def test_an_event_counts_from_just_after_the_tick_to_the_horizon() -> None:
    ticks = [(at, 0.5) for at in (9.0, 10.0, 15.0, 20.0, 21.0)]
    came = [one.came for one in judge(ticks, (20.0,), 10.0, ALL)]
    assert came == [False, True, True, False, False]


def test_ticks_without_a_probability_and_without_a_whole_horizon_are_left_out() -> None:
    ticks = [(80.0, 0.5), (85.0, None), (90.0, 0.25), (91.0, 1.0)]
    assert judge(ticks, (95.0,), 10.0, ALL) == (Judged(0.5, came=False), Judged(0.25, came=True))


def test_a_gap_ends_what_can_be_judged() -> None:
    stretches = (seen(0.0, 20.0), seen(40.0, 100.0))
    assert judge([(15.0, 0.5), (10.0, 0.5)], (22.0,), 10.0, stretches) == (Judged(0.5, came=False),)


def test_the_brier_score_is_the_mean_squared_error() -> None:
    judged = [
        Judged(1.0, came=True),
        Judged(0.0, came=False),
        Judged(0.5, came=True),
        Judged(0.5, came=False),
    ]
    assert brier(judged) == 0.125
    assert base_rate(judged) == 0.5


def test_from_nothing_there_is_no_score() -> None:
    assert brier(()) is None
    assert base_rate(()) is None
    assert reliability(()) == ()


def test_reliability_counts_what_came_of_each_range_with_1_in_the_last() -> None:
    judged = [
        Judged(0.0, came=False),
        Judged(0.0625, came=True),
        Judged(0.1, came=False),
        Judged(0.875, came=True),
        Judged(1.0, came=True),
    ]
    assert reliability(judged) == (
        Bin(at_least=0.0, below=0.1, ticks=2, mean_probability=0.03125, came_ratio=0.5),
        Bin(at_least=0.1, below=0.2, ticks=1, mean_probability=0.1, came_ratio=0.0),
        Bin(at_least=0.8, below=0.9, ticks=1, mean_probability=0.875, came_ratio=1.0),
        Bin(at_least=0.9, below=1.0, ticks=1, mean_probability=1.0, came_ratio=1.0),
    )


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1))
def test_no_constant_is_better_than_the_base_rate(told: list[tuple[float, bool]]) -> None:
    judged = [Judged(probability, came=came) for probability, came in told]
    rate, score = base_rate(judged), brier(judged)
    assert rate is not None
    assert score is not None
    assert 0 <= score <= 1
    least = brier([Judged(rate, came=one.came) for one in judged])
    for constant in (0.0, 0.3, 1.0):
        other = brier([Judged(constant, came=one.came) for one in judged])
        assert least is not None
        assert other is not None
        assert least <= other or math.isclose(least, other)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans())))
def test_reliability_has_every_tick_in_one_range(told: list[tuple[float, bool]]) -> None:
    bins = reliability([Judged(probability, came=came) for probability, came in told])
    assert sum(one.ticks for one in bins) == len(told)
    assert all(one.at_least - 1e-12 <= one.mean_probability <= one.below + 1e-12 for one in bins)
