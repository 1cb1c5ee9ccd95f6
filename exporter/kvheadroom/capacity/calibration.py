"""The overhead that starts of the same kind had, and the prediction with it, beside the raw one.

Fitted on the raw prediction only. Starts of one key (`CalibrationKey`) are taken together; the figure is their median, so that one odd start
moves nothing. A start is left out of what is said of itself.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median

from kvheadroom.capacity.calibration_key import CalibrationKey, key_of
from kvheadroom.capacity.calibration_samples import CalibrationSample
from kvheadroom.capacity.facts import EngineFacts, Fact, Origin
from kvheadroom.capacity.overhead import MOST_TOO_HIGH, MOST_TOO_LOW, estimate_overhead
from kvheadroom.capacity.prediction import PredictedPool, Prediction, predict
from kvheadroom.capacity.rank_weights import RankWeights, weights_of

FEW = 10
"""From so many starts on the interval leaves out the lowest and the highest tenth; with fewer it holds them all."""


class Reliability(StrEnum):
    """How much a learned figure can be trusted. A closed list.

    `one_sample`: the figure of one start, with the interval of the estimate; `spread`: its starts differ by more than the estimate may
    be off; `carried`: of starts with other settings.
    """

    GOOD = "good"
    ONE_SAMPLE = "one_sample"
    SPREAD = "spread"
    CARRIED = "carried"


class Clamp(StrEnum):
    """A bound that a learned figure ran into. A closed list."""

    NOTHING_LEFT = "nothing_left"
    BELOW_ZERO = "below_zero"


_CLAMPED = {
    Clamp.NOTHING_LEFT: "; it would be more than the weights leave, and was cut to that",
    Clamp.BELOW_ZERO: "; it would be below zero, and was cut to that",
    None: "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedOverhead:
    """Bytes of one GPU.

    Attributes:
        overhead_bytes: the median; `low_bytes` to `high_bytes`: where eight of ten starts are expected.
        samples: starts that it is of.
        measured_weights_bytes: the median of what their logs say; None where none does.
        differences: what those starts had differently; empty for starts of the same kind.
    """

    overhead_bytes: int
    low_bytes: int
    high_bytes: int
    samples: int
    reliability: Reliability
    clamp: Clamp | None = None
    measured_weights_bytes: int | None = None
    differences: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Where it is known from, how well, and whether it was cut: one clause."""
        return self._learned_from() + _CLAMPED[self.clamp]

    def _learned_from(self) -> str:
        interval = f"{self.low_bytes / 1e9:.2f} to {self.high_bytes / 1e9:.2f} GB"
        of = "1 start" if self.samples == 1 else f"{self.samples} starts"
        match self.reliability:
            case Reliability.ONE_SAMPLE:
                if self.clamp is not None:
                    return f"learned from 1 start like it (n = 1: {interval})"
                if self.low_bytes == self.high_bytes:
                    return "learned from 1 start like it (n = 1: how far off it is depends on the GPU's memory, which is not known)"
                return f"learned from 1 start like it (n = 1: {interval}, as wide as the estimate's)"
            case Reliability.SPREAD:
                return f"learned from {of} like it, which differ widely ({interval}): not reliable"
            case Reliability.CARRIED:
                return f"carried over from {of} with {'; '.join(self.differences)} ({interval})"
        return f"learned from {of} like it ({interval})"


@dataclass(frozen=True, slots=True)
class Calibration:
    """All samples, by key."""

    samples: Mapping[CalibrationKey, tuple[CalibrationSample, ...]] = field(default_factory=dict)

    @staticmethod
    def of(samples: Iterable[CalibrationSample]) -> "Calibration":
        """From samples in any order; of one start the last is taken."""
        by_start = {(sample.key, sample.start): sample for sample in samples}
        found: dict[CalibrationKey, list[CalibrationSample]] = {}
        for sample in by_start.values():
            found.setdefault(sample.key, []).append(sample)
        return Calibration({key: tuple(these) for key, these in sorted(found.items())})

    def plus(self, sample: CalibrationSample, most: int) -> "Calibration":
        """With one more sample, as the latest of its key; of a start that is there already it takes the place.

        Args:
            most: samples of the key that are kept.
        """
        others = tuple(one for one in self.samples.get(sample.key, ()) if one.start != sample.start)
        return Calibration({**self.samples, sample.key: (*others, sample)[-most:]})

    def learned(
        self, facts: EngineFacts, *, own_start: str = "", weights: RankWeights | None = None
    ) -> LearnedOverhead | None:
        """What starts of the same kind tell; None where there is none.

        Args:
            facts: as the raw prediction takes them.
            own_start: the start that is asked about, which has no say in it.
            weights: of the raw prediction, where it is there already.
        """
        key = key_of(facts)
        return None if isinstance(key, str) else self.of_key(key, facts, own_start=own_start, weights=weights)

    def of_key(
        self,
        key: CalibrationKey,
        facts: EngineFacts | None = None,
        *,
        own_start: str = "",
        weights: RankWeights | None = None,
    ) -> LearnedOverhead | None:
        """What the starts of one key tell; None where there is none.

        Args:
            facts: of an engine of that key, where they are known: then the bounds hold that they set.
            own_start: the start that is asked about, which has no say in it.
            weights: of such an engine, where they are there already.
        """
        these = _that_count(sample for sample in self.samples.get(key, ()) if sample.start != own_start)
        if not these:
            return None
        total = key.gpu_bytes if facts is None or facts.hbm_bytes is None else facts.hbm_bytes.value
        widths = _half_widths(total or 0)
        return _bounded(_fit(these, *widths), facts, weights)

    def carried(self, facts: EngineFacts) -> LearnedOverhead | None:
        """What the nearest starts of the same model tell of settings that nobody has started yet; None where there is none.

        The estimate for these settings, moved by what the measured starts had more or less than theirs. The interval holds the estimate's
        own as well: nothing tells whether the difference stays the same. From one GPU or release to another nothing is carried: on public
        starts the bare estimate was nearer there (`tests/accuracy/calibrated_pools.py`).
        """
        key = key_of(facts)
        estimate = estimate_overhead(facts)
        if isinstance(key, str) or isinstance(estimate, str):
            return None
        found: list[tuple[int, CalibrationKey, list[int]]] = []
        for other, samples in self.samples.items():
            residuals = [sample.residual_bytes for sample in _that_count(samples)]
            told = [one for one in residuals if one is not None]
            if other.is_near(key) and told:
                found.append((len(other.differences(key)), other, told))
        if not found:
            return None
        _, nearest, told = min(found, key=lambda one: (one[0], one[1]))
        value = estimate.total_bytes + round(median(told))
        below, above = _half_widths(0 if facts.hbm_bytes is None else facts.hbm_bytes.value)
        learned = LearnedOverhead(
            overhead_bytes=value,
            low_bytes=min(estimate.low_bytes, value - below),
            high_bytes=max(estimate.high_bytes, value + above),
            samples=len(told),
            reliability=Reliability.CARRIED,
            differences=key.differences(nearest),
        )
        return _bounded(learned, facts, None)


def _that_count(samples: Iterable[CalibrationSample]) -> list[CalibrationSample]:
    """A start that compiles its model measures with caches cold; it counts while there is no other."""
    found = list(samples)
    return [sample for sample in found if not sample.is_cold] or found


def _fit(samples: list[CalibrationSample], below: int, above: int) -> LearnedOverhead:
    """Of some starts of one kind.

    Args:
        below, above: by how much an estimate may be too high, and too low.
    """
    values = sorted(sample.overhead_bytes for sample in samples)
    value = round(median(values))
    weights = [one.measured_weights_bytes for one in samples if one.measured_weights_bytes is not None]
    rounding = max(sample.uncertainty_bytes for sample in samples)
    cut = len(values) // FEW
    low, high = values[cut] - rounding, values[-1 - cut] + rounding
    reliability = Reliability.GOOD
    if len(values) == 1:
        low, high, reliability = value - below, value + above, Reliability.ONE_SAMPLE
    elif high - low > below + above:
        reliability = Reliability.SPREAD
    return LearnedOverhead(
        overhead_bytes=value,
        low_bytes=low,
        high_bytes=high,
        samples=len(values),
        reliability=reliability,
        measured_weights_bytes=round(median(weights)) if weights else None,
    )


def _half_widths(total_bytes: int) -> tuple[int, int]:
    """By how much an estimate may be too high, and too low; not cut at zero, as the estimate's own interval is."""
    return round(MOST_TOO_HIGH * total_bytes), round(MOST_TOO_LOW * total_bytes)


def _bounded(
    learned: LearnedOverhead, facts: EngineFacts | None, weights: RankWeights | None
) -> LearnedOverhead:
    """Within what can be: not below zero, and not more than the budget holds beside the weights."""
    most = None if facts is None else _most(facts, weights or weights_of(facts))
    value, clamp = learned.overhead_bytes, None
    if value < 0:
        value, clamp = 0, Clamp.BELOW_ZERO
    elif most is not None and value > most:
        value, clamp = most, Clamp.NOTHING_LEFT
    low = max(0, min(learned.low_bytes, value))
    high = max(value, learned.high_bytes if most is None else min(learned.high_bytes, most))
    return replace(learned, overhead_bytes=value, low_bytes=low, high_bytes=high, clamp=clamp)


def _most(facts: EngineFacts, weights: RankWeights | str | None) -> int | None:
    if facts.hbm_bytes is None or weights is None or isinstance(weights, str):
        return None
    requested = math.ceil(facts.hbm_bytes.value * facts.gpu_memory_utilization.value)
    return max(0, requested - max(weights.stage_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPrediction:
    """The prediction with a learned overhead in place of the estimate.

    Attributes:
        facts: the raw ones with the learned overhead.
        fewest, most: the pool with the highest and with the lowest overhead of the interval; None where there is none.
    """

    learned: LearnedOverhead
    facts: EngineFacts
    prediction: Prediction
    fewest: PredictedPool | None
    most: PredictedPool | None


def calibrate(
    facts: EngineFacts, raw: Prediction, calibration: Calibration, *, own_start: str = ""
) -> CalibratedPrediction | None:
    """The prediction with what starts of the same kind tell; None where there is none, or the pool is not what HBM leaves over.

    Args:
        raw: of the facts.
        own_start: the start that is predicted, which has no say in it.
    """
    if not facts.pool_from_hbm or raw.layout is None:
        return None
    weights = None if raw.budget is None else raw.budget.weights
    learned = calibration.learned(facts, own_start=own_start, weights=weights)
    return None if learned is None else predict_calibrated(facts, learned, raw)


def with_overhead(facts: EngineFacts, learned: LearnedOverhead) -> EngineFacts:
    """The same engine with a learned overhead."""
    return _with(facts, learned.overhead_bytes, learned)


def _with(facts: EngineFacts, overhead_bytes: int, learned: LearnedOverhead) -> EngineFacts:
    note = f"{overhead_bytes / 1e9:.2f} GB ({learned.note})"
    # The estimate has parts, which together are another figure.
    return replace(facts, overhead_bytes=Fact(overhead_bytes, Origin.LEARNED, note), overhead_estimate=None)


def predict_calibrated(
    facts: EngineFacts, learned: LearnedOverhead, raw: Prediction | None = None
) -> CalibratedPrediction:
    """What vLLM would allocate with a learned overhead.

    Args:
        facts: as the raw prediction takes them.
        raw: that prediction, where it is there already.
    """
    changed = with_overhead(facts, learned)
    prediction = predict(changed, raw)
    return CalibratedPrediction(
        learned=learned,
        facts=changed,
        prediction=prediction,
        fewest=predict(_with(facts, learned.high_bytes, learned), prediction).pool,
        most=predict(_with(facts, learned.low_bytes, learned), prediction).pool,
    )
