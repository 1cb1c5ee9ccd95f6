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


@dataclasses.dataclass
class Tally:
    """Of figures that were asked for: how many were told, how far off they were, and how far the truth lay outside of each interval."""

    asked: int = 0
    off: list[float] = dataclasses.field(default_factory=list)
    outside: list[float] = dataclasses.field(default_factory=list)

    def add(self, workdays: Workdays) -> None:
        """What each of three tiers says of all sizes, on one day."""
        days = {chunks: simulate_day(workdays, chunks) for chunks in (0, *SIZES)}
        for seen in (0, SIZES[1], SIZES[3]):
            reuse = days[seen].expected((0, *SIZES))
            assert reuse.found_ratio == pytest.approx(days[seen].found_ratio, abs=0.01)
            line = []
            for chunks, one in zip((0, *SIZES), reuse.expected, strict=True):
                truth = days[chunks].found_ratio
                self.asked += 1
                self.outside.append(max(one.low_ratio - truth, truth - one.high_ratio, 0.0))
                if one.ratio is not None:
                    self.off.append(abs(one.ratio - truth))
                middle = "-" if one.ratio is None else f"{one.ratio:.1%}"
                line.append(
                    f"{chunks}: {middle} [{one.low_ratio:.1%}, {one.high_ratio:.1%}] truth {truth:.1%}"
                )
            print(f"seen with {seen} chunks: {'; '.join(line)}")


@pytest.mark.parametrize(
    "day", [LONG_PAUSES, some_workday(random.Random(8), most=2.0)], ids=["long pauses", "another"]
)
def test_each_size_that_is_told_is_within_five_points(day: Workdays) -> None:
    tally = Tally()
    tally.add(day)
    assert max(tally.off) <= 0.05
    assert max(tally.outside) <= OUTSIDE
    assert len(tally.off) >= 0.4 * tally.asked


def test_of_a_day_on_which_the_engine_is_overloaded_the_intervals_hold() -> None:
    tally = Tally()
    tally.add(WORKDAYS)
    assert max(tally.outside) <= OUTSIDE
    assert max(tally.off) <= 0.05
    assert 0 < len(tally.off) < tally.asked


@pytest.mark.lab
def test_of_twenty_random_days_nearly_all_sizes_that_are_told_are_within_five_points() -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    tally = Tally()
    for number in range(20):
        tally.add(some_workday(random.Random(f"{SEED}/{number}"), most=4.0))
    within = sum(off <= 0.05 for off in tally.off)
    print(
        f"{len(tally.off)} of {tally.asked} told, {within} within five points, at most {max(tally.off):.1%} off"
    )
    held = sum(outside == 0.0 for outside in tally.outside)
    print(f"{held} of {tally.asked} intervals hold, at most {max(tally.outside):.1%} outside")
    assert within >= 0.95 * len(tally.off)
    assert held >= 0.9 * tally.asked
    assert max(tally.outside) <= 2 * OUTSIDE
    assert len(tally.off) >= 0.25 * tally.asked
