"""What is learned of one simulated day says what a tier of another size finds on it."""

import dataclasses
import os
import random

import pytest

from kvheadroom.lab.simulator.production import SESSIONS, WORKDAYS
from kvheadroom.lab.simulator.workload import LogNormal, Workdays
from tests.lab.simulator.tiered import simulate_day, some_workday

SEED = int(os.environ.get("KVHEADROOM_SEED", random.randrange(2**32)))
LONG_PAUSES = dataclasses.replace(
    WORKDAYS,
    sessions=dataclasses.replace(SESSIONS, human_share=0.3, human_seconds=LogNormal(median=600.0, sigma=1.0)),
    lowest_peak=1.9,
    highest_peak=2.0,
)
"""Of what is open at the peak, the pool holds half."""
SIZES = (15_655, 31_310, 62_620, 125_240)
"""Chunks: half the pool, the pool, twice and four times."""
OUTSIDE = 0.025
"""So far may the truth lie outside of an interval, which is twice a standard error wide beside what it knows not to know."""


def check(workdays: Workdays) -> tuple[int, int]:
    """(figures that were told, figures that were asked for)."""
    days = {chunks: simulate_day(workdays, chunks) for chunks in (0, *SIZES)}
    told = asked = 0
    for seen in (0, SIZES[1], SIZES[3]):
        reuse = days[seen].expected((0, *SIZES))
        assert reuse.found_ratio == pytest.approx(days[seen].found_ratio, abs=0.01)
        line = []
        for chunks, one in zip((0, *SIZES), reuse.expected, strict=True):
            truth = days[chunks].found_ratio
            asked += 1
            middle = "-"
            if one.ratio is not None:
                told += 1
                middle = f"{one.ratio:.1%}"
            line.append(f"{chunks}: {middle} [{one.low_ratio:.1%}, {one.high_ratio:.1%}] truth {truth:.1%}")
        print(f"seen with {seen} chunks: {'; '.join(line)}")
        for chunks, one in zip((0, *SIZES), reuse.expected, strict=True):
            truth = days[chunks].found_ratio
            assert one.low_ratio - OUTSIDE <= truth <= one.high_ratio + OUTSIDE
            assert one.ratio is None or abs(one.ratio - truth) <= 0.05
    return told, asked


def test_of_a_day_with_long_pauses_each_size_is_within_five_points() -> None:
    told, asked = check(LONG_PAUSES)
    assert told >= 0.5 * asked


def test_of_a_day_on_which_the_engine_is_overloaded_the_intervals_hold() -> None:
    told, asked = check(WORKDAYS)
    assert 0 < told < asked


def test_of_some_day_each_size_that_is_told_is_within_five_points() -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    check(some_workday(random.Random(SEED), most=2.0))


@pytest.mark.lab
def test_of_twenty_days_each_size_that_is_told_is_within_five_points() -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    told = asked = 0
    for number in range(20):
        one = check(some_workday(random.Random(f"{SEED}/{number}"), most=4.0))
        told, asked = told + one[0], asked + one[1]
    print(f"{told} of {asked} told")
    assert told >= 0.4 * asked
