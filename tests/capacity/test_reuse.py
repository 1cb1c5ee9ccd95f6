"""What is learned of stretches of time: the curve, the ages, and what is said of sizes."""

import math
import os
import random
from typing import Any

import pytest

from kvheadroom.capacity.expected_hits import learn
from kvheadroom.capacity.history import Growth, moment_of
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.reuse import (
    LEAST_STRETCHES,
    ExpectedHits,
    Reuse,
    ReuseQuestion,
    Stretch,
    TierContent,
    TierSize,
    stretch_of,
)
from kvheadroom.capacity.reuse_ages import Ages, interval_of
from kvheadroom.capacity.reuse_curve import ReuseCurve, Sample, rising
from tests.capacity.lru_day import lru_day

SEED = int(os.environ.get("KVHEADROOM_SEED", random.randrange(2**32)))
NONE = TierContent(tokens=0.0, stores_answers=False)


def stretch(**changed: Any) -> Stretch:
    said: dict[str, Any] = {
        "seconds": 600.0,
        "prompts": 600_000.0,
        "found_in_pool": 300_000.0,
        "found_outside": 0.0,
        "generated": 0.0,
        "usage": 0.0,
        "waiting": 0.0,
        "follows": True,
    }
    return Stretch(**{**said, **changed})


def question(*tokens: float, pool_tokens: float = 60_000.0, tier: TierContent = NONE) -> ReuseQuestion:
    sizes = tuple(TierSize(bytes=int(one) * 1000, tokens=one) for one in tokens)
    return ReuseQuestion(pool_tokens=pool_tokens, tier=tier, sizes=sizes)


def grown(seconds: float | None = 600.0, **by: float | None) -> Growth:
    zero = {name: None if value is None else 0.0 for name, value in by.items()}
    before, after = (moment_of(EngineSnapshot(engine="0", **one), 0.0).figures for one in (zero, by))  # type: ignore[arg-type]
    return Growth(seconds, before, after)


def test_a_stretch_is_what_the_counters_grew_by() -> None:
    one = stretch_of(
        grown(
            prompt_tokens_total=100.0,
            generation_tokens_total=7.0,
            prompt_tokens_local_cache_hit_total=40.0,
            prompt_tokens_external_kv_transfer_total=20.0,
        ),
        usage=0.5,
        waiting=2.0,
        follows=True,
    )
    assert one == Stretch(600.0, 100.0, 40.0, 20.0, 7.0, 0.5, 2.0, follows=True)


def test_of_a_page_without_hits_there_is_no_stretch_and_without_a_connector_nothing_was_found_outside() -> (
    None
):
    told: dict[str, float | None] = {"prompt_tokens_total": 100.0, "generation_tokens_total": 7.0}
    assert stretch_of(grown(**told), usage=0.0, waiting=0.0, follows=False) is None
    one = stretch_of(grown(**told, prefix_cache_hits_total=10.0), usage=0.0, waiting=0.0, follows=False)
    assert one is not None
    assert (one.found_in_pool, one.found_outside) == (10.0, 0.0)


def test_no_more_is_found_than_was_asked_for() -> None:
    one = stretch_of(
        grown(
            prompt_tokens_total=100.0,
            generation_tokens_total=7.0,
            prefix_cache_hits_total=90.0,
            external_prefix_cache_hits_total=30.0,
        ),
        usage=0.0,
        waiting=0.0,
        follows=False,
    )
    assert one is not None
    assert (one.found_in_pool, one.found_outside) == (90.0, 10.0)


def test_the_curve_is_linear_in_the_logarithm_of_the_age_and_rises_to_its_last_point() -> None:
    curve = ReuseCurve([(10.0, 0.2), (1000.0, 0.6)])
    assert [curve.share(age) for age in (0.0, 5.0, 10.0, 100.0, 1000.0, 1e6)] == pytest.approx(
        [0.0, 0.1, 0.2, 0.4, 0.6, 0.6]
    )


def test_its_integral_is_the_area_below_it() -> None:
    curve = ReuseCurve([(10.0, 0.2), (1000.0, 0.6)])
    # Before the first point a triangle; between them a + b ln(x), whose integral is known.
    slope = 0.4 / math.log(100.0)
    between = [x * (0.2 + slope * (math.log(x / 10.0) - 1.0)) for x in (10.0, 1000.0)]
    whole = 10.0 * 0.2 / 2 + between[1] - between[0]
    assert curve.integral(1000.0) == pytest.approx(whole, rel=0.01)
    assert curve.integral(1500.0) == pytest.approx(whole + 500.0 * 0.6, rel=0.01)
    assert curve.integral(0.1) == pytest.approx(0.02 * 0.1 / 2 * 0.1, rel=0.02)


def test_samples_that_fall_are_taken_together() -> None:
    samples = [Sample(10.0, 0.5, 1.0, 0), Sample(1000.0, 0.3, 1.0, 1), Sample(10_000.0, 0.9, 1.0, 2)]
    [first, last] = rising(samples, 0.5).points
    assert first == pytest.approx((100.0, 0.4))
    assert last == pytest.approx((10_000.0, 0.9))


def test_samples_of_one_age_are_one_point_of_their_mean() -> None:
    shares = (0.2, 0.4, 0.6, 0.8)
    [point] = rising([Sample(100.0, share, 1.0, 0) for share in shares], 0.5).points
    assert point == pytest.approx((100.0, 0.5))
    near = [Sample(100.0 + share / 1000, share, 1.0, 0) for share in shares]
    [point] = rising(near, 0.5).points
    assert point[1] == pytest.approx(0.5)


def test_no_point_has_less_than_enough_behind_it() -> None:
    samples = [Sample(10.0, 0.5, 10.0, 0), Sample(100.0, 0.6, 10.0, 1), Sample(1000.0, 1.0, 1.0, 2)]
    [first, last] = rising(samples, 5.0).points
    assert first == pytest.approx((10.0, 0.5))
    assert last[1] == pytest.approx((10.0 * 0.6 + 1.0) / 11.0)


def ages(
    *stretches: Stretch,
    share: float,
    is_tier: bool = False,
    pool_tokens: float = 60_000.0,
    stores_answers: bool = True,
) -> Ages:
    """Where the same share comes back at once, whatever the age."""
    intervals = [interval_of(one, pool_tokens) for one in stretches]
    return Ages(intervals, ReuseCurve([(0.001, share)]), is_tier=is_tier, stores_answers=stores_answers)


def test_a_pool_holds_what_came_in_and_was_not_asked_for_again() -> None:
    # 1,000 tokens a second, half of which are asked for again: 60,000 are different after two minutes.
    assert ages(stretch(), share=0.5).of(0, 60_000.0) == pytest.approx(120.0, rel=0.002)


def test_the_age_reaches_back_over_stretches_with_other_loads() -> None:
    quiet, busy = stretch(prompts=60_000.0), stretch(prompts=120_000.0)
    # 100 a second for the last ten minutes, and 200 a second before.
    assert ages(busy, quiet, share=0.0).of(1, 80_000.0) == pytest.approx(600.0 + 100.0, rel=0.001)


def test_a_cache_that_was_not_full_since_the_servers_start_has_no_age_unless_the_load_went_on_before() -> (
    None
):
    of = ages(stretch(follows=False, prompts=60_000.0), share=0.0)
    assert of.of(0, 80_000.0) is None
    assert of.of(0, 80_000.0, goes_on=True) == pytest.approx(800.0, rel=0.001)


def test_what_a_server_had_before_it_was_started_again_is_no_content() -> None:
    again = stretch(follows=False, prompts=60_000.0)
    assert ages(stretch(), again, share=0.0).of(1, 80_000.0) is None


def test_answers_are_content_too_and_where_a_tier_stores_them_later_they_come_with_the_prompt_that_has_them() -> (
    None
):
    # 1,000 tokens of prompts and 200 of answers a second; half of what was asked for comes again.
    answering = stretch(generated=120_000.0)
    assert ages(answering, share=0.5).of(0, 70_000.0) == pytest.approx(100.0, rel=0.002)
    of = ages(answering, share=0.5, is_tier=True, stores_answers=False)
    assert of.of(0, 60_000.0) == pytest.approx(100.0, rel=0.002)


def test_a_tier_holds_what_running_requests_hold_as_well() -> None:
    # 1,000 tokens a second, of which 30,000 are held: requests run for 30 s. 30,000 of 90,000 are theirs.
    of = ages(stretch(usage=0.5), share=0.0, is_tier=True)
    age = of.of(0, 90_000.0)
    assert age is not None
    assert (1 - math.exp(-age / 30.0)) * (30_000.0 + 1000.0 * age) == pytest.approx(90_000.0, rel=0.001)


def test_too_few_stretches_and_a_pool_that_was_never_full_tell_nothing() -> None:
    assert learn([stretch()] * (LEAST_STRETCHES - 1), question()) == (
        "it takes 12 stretches of 10 minutes with prompts in them, and there are 11 so far"
    )
    quiet = [stretch(prompts=0.0)] * 100
    assert isinstance(learn([*quiet, stretch()], question()), str)
    roomy = learn([stretch(follows=False)] * LEAST_STRETCHES, question(pool_tokens=1e12))
    assert roomy == "nothing was evicted so far, so how long content has to stay is not known"


def test_of_a_tier_that_nobody_knows_the_size_of_no_other_size_is_told() -> None:
    found = learn([stretch(found_outside=1000.0)] * LEAST_STRETCHES, question(0.0, 1e6))
    assert isinstance(found, str)
    assert found.startswith(
        "12,000 prompt tokens came from a KV connector, and how much its tier holds is not"
    )


def test_of_plain_lru_caches_each_size_is_found_within_three_points() -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    sizes = (90_000, 120_000, 180_000, 360_000)
    seen, found = lru_day(random.Random(SEED), 120_000)
    reuse = learn(
        seen,
        question(*sizes, tier=TierContent(tokens=120_000.0, stores_answers=False)),
    )
    assert isinstance(reuse, Reuse)
    assert reuse.found_ratio == pytest.approx(found, abs=0.01)
    for one in reuse.expected:
        _, truth = lru_day(random.Random(SEED), int(one.size.tokens))
        print(f"{one.size.tokens:,.0f}: {one.low_ratio:.1%} to {one.high_ratio:.1%}, truth {truth:.1%}")
        assert one.low_ratio - 0.02 <= truth <= one.high_ratio + 0.02
        assert one.ratio is None or one.ratio == pytest.approx(truth, abs=0.03)
    # The size that was seen, at least, is known.
    assert reuse.expected[1].ratio is not None


def test_a_middle_is_told_where_it_is_at_most_five_points_off() -> None:
    size = TierSize(bytes=1, tokens=1.0)
    assert ExpectedHits(size=size, low_ratio=0.4, high_ratio=0.5).ratio == pytest.approx(0.45)
    assert ExpectedHits(size=size, low_ratio=0.4, high_ratio=0.51).ratio is None


def test_what_the_engine_was_never_seen_to_compute_is_not_promised() -> None:
    # With its tier it computes a tenth; without, nine times as much as ever.
    seen = [stretch(found_in_pool=60_000.0, found_outside=480_000.0, usage=0.1) for _ in range(24)]
    reuse = learn(seen, question(0.0, tier=TierContent(tokens=1e6, stores_answers=False)))
    assert isinstance(reuse, Reuse)
    assert reuse.expected[0].low_ratio == 0.0
    assert reuse.expected[0].ratio is None


def test_beyond_the_oldest_age_that_was_reached_everything_may_be_found() -> None:
    reuse = learn([stretch()] * 24, question(1e9))
    assert isinstance(reuse, Reuse)
    [one] = reuse.expected
    assert one.low_ratio == pytest.approx(0.5, abs=0.02)
    assert one.high_ratio == pytest.approx(1.0, abs=0.01)
    assert one.ratio is None


def test_where_requests_begin_and_end_within_the_age_of_a_tier_it_says_most_and_else_nothing_of_ages() -> (
    None
):
    # Requests that hold 54,000 tokens at 1,000 a second run for 54 s; a tier of 60,000 has an age of about as much.
    seen = [stretch(usage=0.9, found_outside=30_000.0)] * 24
    short = learn(seen, question(tier=TierContent(tokens=60_000.0, stores_answers=True)))
    assert isinstance(short, Reuse)
    assert max(share for _, share in short.points) == pytest.approx(0.5)
    long = learn(seen, question(tier=TierContent(tokens=600_000.0, stores_answers=True)))
    assert isinstance(long, Reuse)
    assert max(share for _, share in long.points) == pytest.approx(0.55, abs=0.002)


def test_the_last_hour_is_held_against_the_time_before() -> None:
    before, last = [stretch()] * 24, [stretch(found_in_pool=60_000.0)] * 6
    reuse = learn([*before, *last], question())
    assert isinstance(reuse, Reuse)
    assert reuse.lately is not None
    assert reuse.lately.found_ratio == pytest.approx(0.1)
    assert reuse.lately.expected_ratio == pytest.approx(0.5, abs=0.05)


def test_the_last_hour_is_held_against_nothing_where_the_time_before_is_too_short() -> None:
    for before, is_told in ((LEAST_STRETCHES - 1, False), (LEAST_STRETCHES, True)):
        reuse = learn([stretch()] * (before + 6), question())
        assert isinstance(reuse, Reuse)
        assert (reuse.lately is not None) is is_told


def test_what_only_a_part_of_the_time_tells_of_is_not_told() -> None:
    # Of the first two hours the cache was not full yet.
    empty = [stretch(follows=False, prompts=100.0, found_in_pool=50.0)] * 24
    reuse = learn([*empty, stretch(follows=False), stretch()], question(60_000.0))
    assert isinstance(reuse, Reuse)
    assert (reuse.expected[0].low_ratio, reuse.expected[0].high_ratio) == (0.0, 1.0)


def test_the_interval_begins_two_standard_errors_below_what_is_expected() -> None:
    # Of six parts of the time the tier supplies these shares. Left out in turn, each moves the mean by a fifth of how far it is from 0.25.
    shares = [0.05, 0.15, 0.25, 0.25, 0.35, 0.45]
    error = math.sqrt(5 / 6 * 2 * ((0.2 / 5) ** 2 + (0.1 / 5) ** 2))
    seen = [stretch(found_outside=600_000.0 * share) for share in shares for _ in range(4)]
    tier = TierContent(tokens=120_000.0, stores_answers=True)
    reuse = learn(seen, question(119_000.0, tier=tier))
    assert isinstance(reuse, Reuse)
    [one] = reuse.expected
    assert one.low_ratio == pytest.approx(0.75 - 2 * error, abs=0.015)


@pytest.mark.parametrize(
    "odd",
    [
        {"seconds": 1e-9},
        {"prompts": 1e18},
        {"usage": 5.0},
        {"usage": -1.0},
        {"generated": 1e15},
        {"waiting": 1e9},
    ],
)
def test_odd_figures_raise_nothing_and_give_shares(odd: dict[str, Any]) -> None:
    rng = random.Random(7)
    seen = [stretch(prompts=rng.uniform(1, 1e6)) for _ in range(30)]
    seen = [one._replace(found_in_pool=one.prompts / 2) for one in seen]
    seen[10:13] = [one._replace(**odd) for one in seen[10:13]]
    reuse = learn(seen, question(0.0, 1e5, 1e9, tier=TierContent(tokens=5e4, stores_answers=True)))
    assert isinstance(reuse, Reuse)
    for one in reuse.expected:
        assert 0.0 <= one.low_ratio <= one.high_ratio <= 1.0


def any_stretch(rng: random.Random, most: float) -> Stretch:
    prompts = rng.choice([0.0, most, most * rng.random(), 10 ** rng.uniform(-3, 15)])
    in_pool = prompts * rng.choice([0.0, 1.0, rng.random()])
    return Stretch(
        seconds=rng.choice([0.0, 10 ** rng.uniform(-9, 6), 600.0, 600.0, 600.0]),
        prompts=prompts,
        found_in_pool=in_pool,
        found_outside=(prompts - in_pool) * rng.choice([0.0, 1.0, rng.random()]),
        generated=rng.choice([0.0, prompts, 10 ** rng.uniform(-3, 12)]),
        usage=rng.choice([0.0, 1.0, 1.2, rng.random(), rng.random()]),
        waiting=rng.choice([0.0, 0.0, 1.0, 1e6]),
        follows=rng.random() < 0.9,
    )


def test_whatever_is_seen_shares_are_shares_and_the_present_tiers_interval_holds_what_was_found() -> None:
    print(f"KVHEADROOM_SEED={SEED}")
    rng = random.Random(SEED)
    learned = 0
    while learned < 30:
        most, pool = 10 ** rng.uniform(0, 9), 10 ** rng.uniform(1, 9)
        seen = [any_stretch(rng, most) for _ in range(rng.choice([12, 20, 40]))]
        tier = rng.choice([1e-3, pool, pool * 10 ** rng.uniform(-3, 3)])
        content = TierContent(tokens=tier, stores_answers=rng.random() < 0.5)
        reuse = learn(seen, question(0.0, tier, 1e18, pool_tokens=pool, tier=content))
        if isinstance(reuse, str):
            continue
        learned += 1
        assert 0.0 <= reuse.found_ratio <= 1.0 + 1e-9
        assert all(age > 0 and -1e-9 <= share <= 1.0 + 1e-9 for age, share in reuse.points)
        for one in reuse.expected:
            assert 0.0 <= one.low_ratio <= one.high_ratio <= 1.0
        present = reuse.expected[1]
        assert present.low_ratio - 1e-9 <= reuse.found_ratio <= present.high_ratio + 1e-9
