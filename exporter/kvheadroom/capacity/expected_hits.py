"""Which share of prompt tokens a tier of another size would find, learned from what an engine counts.

Load that comes and goes moves the age that the pool reaches, and the tier's. Each stretch of time gives a point of the reuse curve: that age, and the
share that was found. The curve tells what would be found at the age that a tier of another size would have reached.

What is not known is told as an interval: the curve beyond the oldest age that was reached (up to 1), and what the load would have been, had more or less
been found. Of the latter there are two figures: with the load as it was, and of an engine that computes no more than it did while requests waited.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvheadroom.capacity.reuse import (
    LAST_STRETCHES,
    LEAST_STRETCHES,
    STRETCH_SECONDS,
    ExpectedHits,
    Lately,
    Reuse,
    ReuseQuestion,
    Stretch,
    TierContent,
    TierSize,
)
from kvheadroom.capacity.reuse_ages import Ages, Interval, interval_of, old_share, survivors
from kvheadroom.capacity.reuse_curve import AGES, ReuseCurve, Sample, rising

_ROUNDS = 5
"""The ages need the curve, and the curve the ages; after so many rounds neither moves by much."""
_FOLDS = 6
_LEAST_SHARE = 0.01
"""Of all prompts, behind each point of the curve."""
_SURVIVORS = 0.9
"""Where fewer requests find at their end what a tier had stored of them, what is found there says little of ages."""


def learn(stretches: Sequence[Stretch], question: ReuseQuestion) -> Reuse | str:
    """What stretches of time tell of reuse, oldest first; a string says why they tell nothing."""
    intervals = [interval_of(one, question.pool_tokens) for one in stretches if one.seconds > 0]
    asked = [one for one in intervals if one.prompts > 0]
    if len(asked) < LEAST_STRETCHES:
        return (
            f"it takes {LEAST_STRETCHES} stretches of {STRETCH_SECONDS / 60:.0f} minutes with prompts in them, and there are "
            f"{len(asked)} so far"
        )
    prompts = math.fsum(one.prompts for one in asked)
    outside = math.fsum(one.found_outside for one in asked)
    if outside > 0 and question.tier.tokens <= 0:
        # The reuse that it saw is of an age that nobody knows, and what another tier would find beside it as well.
        return (
            f"{outside:,.0f} prompt tokens came from a KV connector, and how much its tier holds is not known; say `kv_offloading_size` or "
            "`kv_transfer_config` in the flags"
        )
    least = _LEAST_SHARE * prompts
    curve = ReuseCurve([(AGES[-1], 0.5)])
    samples: list[Sample] = []
    for _ in range(_ROUNDS):
        samples = list(_samples(intervals, question.tier, curve))
        if not samples:
            return "nothing was evicted so far, so how long content has to stay is not known"
        curve = rising(samples, least)
    folds = [
        rising(left, least)
        for fold in range(_FOLDS)
        if (left := [one for one in samples if one.at * _FOLDS // len(intervals) != fold])
    ]
    # How far off the sum is for the tier that there is, it may be for another one.
    off = 0.0
    if question.tier.tokens > 0:
        load = _load(intervals, question.tier, curve)
        found = math.fsum(one.prompts - one.computed for one in asked) / prompts
        off = abs(load.ratio(load.shares(curve)) - found)
    return Reuse(
        seconds=math.fsum(one.seconds for one in asked),
        prompts=prompts,
        pool_ratio=math.fsum(one.found_in_pool for one in asked) / prompts,
        outside_ratio=outside / prompts,
        oldest_seconds=curve.oldest,
        points=curve.points,
        expected=tuple(
            _expected(
                intervals,
                size,
                TierContent(tokens=size.tokens, stores_answers=question.tier.stores_answers),
                curve,
                folds,
                off=off,
            )
            for size in question.sizes
        ),
        lately=_lately(intervals, samples, question.tier, least),
    )


def _lately(
    intervals: Sequence[Interval], samples: Sequence[Sample], tier: TierContent, least_weight: float
) -> Lately | None:
    begin = len(intervals) - LAST_STRETCHES
    before = [one for one in samples if one.at < begin]
    last = [one for one in intervals[begin:] if one.prompts > 0]
    if len(before) < LEAST_STRETCHES or len(last) < LAST_STRETCHES:
        return None
    curve = rising(before, least_weight)
    load = _load(intervals, tier, curve)
    prompts = math.fsum(one.prompts for one in last)
    expected = 0.0
    for one, (pool_age, age) in zip(intervals[begin:], load.ages[begin:], strict=True):
        share = curve.share(pool_age)
        if age > pool_age:
            gained = curve.share(age) - share
            share += gained * old_share(one, stores_answers=tier.stores_answers) * survivors(one, age)
        expected += one.prompts * share
    found = math.fsum(one.prompts - one.computed for one in last)
    return Lately(found_ratio=found / prompts, expected_ratio=min(1.0, expected / prompts))


def _samples(intervals: Sequence[Interval], tier: TierContent, curve: ReuseCurve) -> Iterator[Sample]:
    pool = Ages(intervals, curve, is_tier=False, stores_answers=True)
    host = Ages(intervals, curve, is_tier=True, stores_answers=tier.stores_answers)
    for at, one in enumerate(intervals):
        if one.prompts <= 0:
            continue
        pool_age = pool.of(at, one.free)
        if not pool_age:
            continue
        yield Sample(pool_age, one.pool_share, one.prompts, at)
        age = host.of(at, tier.tokens) if tier.tokens > 0 else None
        if age is None or age <= pool_age:
            continue
        survive = survivors(one, age)
        if survive > _SURVIVORS:
            old = old_share(one, stores_answers=tier.stores_answers)
            share = one.pool_share + one.found_outside / one.prompts / survive / old
            yield Sample(age, min(1.0, share), one.prompts, at)


class _Load(NamedTuple):
    """Of a tier of one size under one load, the ages that the pool and the tier reach in each interval."""

    intervals: Sequence[Interval]
    ages: Sequence[tuple[float, float]]
    stores_answers: bool

    def shares(self, curve: ReuseCurve, *, unseen: float | None = None) -> list[float]:
        """What is found of each interval's prompts.

        Args:
            unseen: the share beyond the oldest age that was seen, where it is not the last that was.
        """
        found = []
        for one, (pool_age, age) in zip(self.intervals, self.ages, strict=True):
            share = one.pool_share
            if age > pool_age:
                until = unseen if unseen is not None and age > curve.oldest else curve.share(age)
                gained = max(0.0, until - curve.share(pool_age))
                share += gained * old_share(one, stores_answers=self.stores_answers) * survivors(one, age)
            found.append(min(1.0, share))
        return found

    def ratio(self, shares: Sequence[float]) -> float:
        """Of all prompts."""
        total = math.fsum(one.prompts for one in self.intervals)
        found = (one.prompts * share for one, share in zip(self.intervals, shares, strict=True))
        return math.fsum(found) / total


def _load(intervals: Sequence[Interval], tier: TierContent, curve: ReuseCurve) -> _Load:
    pool = Ages(intervals, curve, is_tier=False, stores_answers=True)
    host = Ages(intervals, curve, is_tier=True, stores_answers=tier.stores_answers)
    ages = []
    for at, one in enumerate(intervals):
        pool_age = pool.of(at, one.free, goes_on=True) if one.prompts > 0 else None
        age = host.of(at, tier.tokens, goes_on=True) if one.prompts > 0 and tier.tokens > 0 else None
        ages.append((pool_age or 0.0, age or 0.0))
    return _Load(intervals, ages, tier.stores_answers)


def _expected(
    intervals: Sequence[Interval],
    size: TierSize,
    tier: TierContent,
    curve: ReuseCurve,
    folds: Sequence[ReuseCurve],
    *,
    off: float,
) -> ExpectedHits:
    as_it_was = _load(intervals, tier, curve)
    shares = as_it_was.shares(curve)
    most = max(one.computed / one.seconds for one in intervals)
    bound, bound_shares = as_it_was, shares
    for _ in range(_LOADS):
        loads = [_as_bound(one, share, most) for one, share in zip(intervals, bound_shares, strict=True)]
        bound = _load(loads, tier, curve)
        bound_shares = bound.shares(curve)
    sure = [_sure(one, share, tier, most) for one, share in zip(intervals, shares, strict=True)]
    figures = (as_it_was.ratio(shares), bound.ratio(bound_shares))
    unseen = (one.ratio(one.shares(curve, unseen=1.0)) for one in (as_it_was, bound))
    spread = max(_LEAST_SPREAD, _spread(as_it_was, folds)) + _load_doubt(intervals, figures[0]) + off
    return ExpectedHits(
        size=size,
        low_ratio=max(0.0, min(*figures, as_it_was.ratio(sure)) - spread),
        high_ratio=min(1.0, max(*figures, *unseen) + spread),
    )


_LOADS = 3
"""What is found changes the load, and the load what is found."""
_FASTEST = 10.0
_WAITING = 1.0
"""Where as many requests wait on average, the engine computes all it can."""
_MORE = 1.05
_LEAST_SPREAD = 0.01


def _load_doubt(intervals: Sequence[Interval], ratio: float) -> float:
    """How far off a figure may be beside, because the load would have been another one: where requests waited, and where less is found.

    The further what is found is from what was found then, the more; parts of that difference that nearly all simulated days stay within.
    """
    prompts = math.fsum(one.prompts for one in intervals)
    waited = math.fsum(one.prompts for one in intervals if one.waiting >= _WAITING) / prompts
    found = math.fsum(one.prompts - one.computed for one in intervals) / prompts
    return _LOAD_DOUBT * waited * abs(ratio - found) + _LESS_DOUBT * max(0.0, found - ratio)


_LOAD_DOUBT = 0.25
_LESS_DOUBT = 0.5


def _as_bound(one: Interval, share: float, most: float) -> Interval:
    """The same time with as much load as the engine can compute, where it had so much; tokens that are found cost nothing.

    Args:
        share: of prompts that is found.
        most: prompt tokens per second that it was ever seen to compute.
    """
    wanted = one.prompts * (1 - share) / one.seconds
    is_bound = one.waiting >= _WAITING
    limit = one.computed / one.seconds if is_bound else most
    if wanted <= 0 or limit <= 0 or (not is_bound and wanted <= limit):
        return one
    factor = min(_FASTEST, limit / wanted)
    return one._replace(
        prompts=one.prompts * factor,
        found_in_pool=one.found_in_pool * factor,
        found_outside=one.found_outside * factor,
        generated=one.generated * factor,
    )


def _sure(one: Interval, share: float, tier: TierContent, most: float) -> float:
    """What is found at least."""
    if one.prompts * (1 - share) > most * one.seconds * _MORE:
        # It would compute more than it was ever seen to: what is left of the load then, and of the pool, nobody knows.
        return 0.0
    # In a tier that what is running would fill alone, requests push each other out.
    return min(share, one.pool_share) if tier.tokens < one.held else share


def _spread(load: _Load, folds: Sequence[ReuseCurve]) -> float:
    """Twice the standard error, by leaving out each part of the time in turn (jackknife)."""
    if len(folds) < _FOLDS:
        return 1.0
    ratios = [load.ratio(load.shares(curve)) for curve in folds]
    mean = math.fsum(ratios) / len(ratios)
    squares = math.fsum((ratio - mean) ** 2 for ratio in ratios)
    return 2 * math.sqrt((len(ratios) - 1) / len(ratios) * squares)
