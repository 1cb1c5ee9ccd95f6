"""The simple rules, tick by tick."""

import random
from collections.abc import Sequence

import pytest

from kvheadroom.lab.backtest.baselines import Baseline, baselines, held
from kvheadroom.lab.backtest.events import PRODUCTION, SMALL, EngineSample
from tests.lab.backtest.series import firing


def rule(name: str) -> Baseline:
    [found] = [one for one in baselines(SMALL) if one.name == name]
    return found


def told(name: str, *, usage: Sequence[float | None] = (), waiting: Sequence[float | None] = ()) -> str:
    """A letter per tick of one second; None in a list: the engine was not known."""
    values = usage or waiting
    field = "kv_usage_ratio" if usage else "requests_waiting"
    ticks = [None if v is None else EngineSample(at=float(at), **{field: v}) for at, v in enumerate(values)]
    return "".join({True: "#", False: ".", None: "?"}[fires] for fires in rule(name).firing(ticks, 1.0))


def test_all_the_simple_rules_are_there_with_and_without_for() -> None:
    assert [one.name for one in baselines(SMALL)] == [
        "usage > 0.8",
        "usage > 0.9",
        "usage > 0.95",
        "predict_linear on usage",
        "waiting > 0",
        "waiting > 0 for 5s",
        "usage > 0.8 for 15s",
        "usage > 0.9 for 15s",
        "usage > 0.95 for 15s",
        "predict_linear on usage for 15s",
        "waiting > 0 for 15s",
    ]
    assert {one.hold_seconds for one in baselines(PRODUCTION)} == {0.0, 5.0, 60.0}


def test_a_limit_itself_is_not_above_it() -> None:
    assert told("usage > 0.9", usage=[0.89, 0.9, 0.91, None, 1.0]) == "..#?#"
    assert told("waiting > 0", waiting=[0, 1, 0]) == ".#."


def test_a_figure_that_the_engine_does_not_tell_is_not_known() -> None:
    assert rule("usage > 0.9").firing([EngineSample(at=0.0, requests_waiting=1)], 1.0) == [None]


def test_for_counts_from_the_tick_at_which_it_held_first_and_anew_after_a_pause() -> None:
    assert held(firing("####"), 0.0, 1.0) == firing("####")
    assert held(firing(".######.####"), 2.0, 1.0) == firing("...####...##")
    assert held(firing("##?###"), 2.0, 1.0) == firing("..?..#")
    assert held(firing("########"), 0.5, 0.1) == firing(".....###"), "whatever tenths add up to"


def test_growth_fires_as_soon_as_the_line_passes_full_within_the_horizon() -> None:
    # A hundredth a second from a half: full in 50 s, seen with the second point.
    assert told("predict_linear on usage", usage=[0.5, 0.51, 0.52]) == ".##"
    assert told("predict_linear on usage", usage=[0.5, 0.508, 0.516]) == "...", "full in 61 s"
    assert told("predict_linear on usage", usage=[0.5, None, 0.52]) == ".?#"


def test_a_full_pool_that_stays_full_is_not_predicted_to_be_more_than_full() -> None:
    assert told("predict_linear on usage", usage=[1.0] * 5) == "....."


def test_growth_looks_back_as_far_as_the_horizon_and_no_further() -> None:
    # A jump is in sight for less than 60 s: Prometheus 3 leaves the oldest instant of a range out.
    assert told("predict_linear on usage", usage=[0.0, *[0.9] * 61])[1:] == "#" * 59 + ".."


@pytest.mark.parametrize("every_seconds", [0.5, 1.0, 7.0])
def test_growth_is_the_least_squares_line(seeded: random.Random, every_seconds: float) -> None:
    usages = [seeded.random() for _ in range(200)]
    ticks = [EngineSample(at=tick * every_seconds, kv_usage_ratio=value) for tick, value in enumerate(usages)]
    fires = rule("predict_linear on usage").firing(ticks, every_seconds)
    for tick in range(len(ticks)):
        seen = [one for one in ticks[: tick + 1] if ticks[tick].at - one.at < 60.0]
        points = [(one.at - ticks[tick].at, one.kv_usage_ratio or 0.0) for one in seen]
        n, sx, sy = len(points), sum(x for x, _ in points), sum(y for _, y in points)
        sxx, sxy = sum(x * x for x, _ in points), sum(x * y for x, y in points)
        if n < 2:
            assert fires[tick] is False
            continue
        slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
        ahead = (sy - slope * sx) / n + slope * 60.0
        assert fires[tick] == (ahead > 1.0)
