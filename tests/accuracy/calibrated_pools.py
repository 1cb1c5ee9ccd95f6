"""How near the pool comes after one start was seen: on public logs of the same deployment started more than once.

Two public lines are the same deployment where all that the overhead depends on is (`CalibrationKey`) and the weights that they print are: the
lines name no quantization. Each is predicted from the other alone.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from kvheadroom.capacity.calibration import Calibration, with_overhead
from kvheadroom.capacity.calibration_key import key_of
from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded, SampleSource
from kvheadroom.capacity.facts import EngineFacts, Fact, Origin
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.logged_sample import sample_of_log
from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, Printed, StartOutcome
from kvheadroom.capacity.memory import PoolBudget, plan_budget
from tests.accuracy.overheads import Line, starts

_HALF_A_DIGIT = round(0.005 * GIB)


def facts_with_weights(line: Line, facts: EngineFacts) -> EngineFacts:
    """With the weights that the line prints for one GPU, and its utilization."""
    whole = round(line["weights_gib"] * GIB) * facts.tensor_parallel_size.value
    utilization = line.get("util") or line["budget_gib"] / line["total_gib"]
    return replace(
        facts,
        weights_bytes=Fact(whole, Origin.CONFIG),
        gpu_memory_utilization=Fact(utilization, Origin.CONFIG),
    )


def logged(line: Line) -> LoggedStart:
    """The line as the log that it was taken from."""

    def printed(name: str) -> Printed | None:
        return None if line.get(name) is None else Printed(round(line[name] * GIB), _HALF_A_DIGIT)

    rank = LoggedRank(
        total=printed("total_gib"),
        utilization=line.get("util"),
        utilization_uncertainty=0.0005,
        requested=printed("budget_gib"),
        weights=printed("weights_gib"),
        available=printed("kv_gib"),
    )
    return LoggedStart(
        release=line.get("release"), model=line["model"], ranks=(rank,), outcome=StartOutcome.STARTED
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """One start, predicted from another."""

    seen: Line
    predicted: Line
    pool_bytes: int
    raw_bytes: int
    measured_bytes: float

    @property
    def error_ratio(self) -> float:
        """Of the pool."""
        return self.pool_bytes / self.measured_bytes - 1

    @property
    def raw_error_ratio(self) -> float:
        """The same before anything was learned."""
        return self.raw_bytes / self.measured_bytes - 1


def samples() -> Iterator[tuple[Line, EngineFacts, CalibrationSample | Excluded]]:
    """Every public line that can be judged, as a sample."""
    for number, start in enumerate(starts()):
        facts = facts_with_weights(start.line, start.facts)
        yield (
            start.line,
            facts,
            sample_of_log(
                facts, logged(start.line), start=f"line {number}", evidence=str(start.line["source"])
            ),
        )


def public_pairs() -> tuple[Pair, ...]:
    """Both ways round; copies of one log are no pair."""
    alike: dict[object, list[tuple[Line, EngineFacts, CalibrationSample]]] = defaultdict(list)
    for line, facts, sample in samples():
        if isinstance(sample, CalibrationSample):
            alike[sample.key, round(line["weights_gib"], 1)].append((line, facts, sample))
    pairs = []
    for these in alike.values():
        for line, _, sample in these:
            for other, facts, _ in these:
                if _is_one_start(line, other):
                    continue
                learned = Calibration.of([sample]).learned(facts)
                assert learned is not None
                pairs.append(
                    Pair(
                        seen=line,
                        predicted=other,
                        pool_bytes=_pool(with_overhead(facts, learned)),
                        raw_bytes=_pool(facts),
                        measured_bytes=other["kv_gib"] * GIB,
                    )
                )
    return tuple(pairs)


def _is_one_start(line: Line, other: Line) -> bool:
    """Whether both may be of one log: its ranks, or copies of it."""
    files = [set(re.findall(r"\d{6,}|\S+\.log", str(one["source"]))) for one in (line, other)]
    return line is other or (bool(files[0] & files[1]) and line.get("util") == other.get("util"))


def _pool(facts: EngineFacts) -> int:
    budget = plan_budget(facts)
    return budget.available_bytes if isinstance(budget, PoolBudget) else 0


def worst(pairs: tuple[Pair, ...]) -> float:
    """The largest error, without its sign."""
    return max(abs(pair.error_ratio) for pair in pairs)


@dataclass(frozen=True, slots=True)
class Carried:
    """One start whose overhead was carried over from one with other settings; errors as shares of the pool, of the bare estimate as well.

    Attributes:
        is_within: the measured overhead lies in the carried interval.
    """

    carried_error_ratio: float
    raw_error_ratio: float
    is_within: bool


def carried_pairs(*, near: bool) -> tuple[Carried, ...]:
    """Starts of one model, each from each other of another key.

    Args:
        near: those that differ in parallel sizes and settings; else those of another GPU or release, as if they were near.
    """
    pairs = []
    every = [(start, key) for start in starts() if not isinstance(key := key_of(start.facts), str)]
    for (seen, key), (then, other) in permutations(every, 2):
        if (key.geometry, key.weight_format) != (other.geometry, other.weight_format) or key == other:
            continue
        if key.is_near(other) is not near:
            continue
        taken = replace(other, parallelism=key.parallelism, settings=key.settings)
        estimate = then.estimate()
        sample = CalibrationSample(
            key=taken,
            start="seen",
            source=SampleSource.LOG,
            overhead_bytes=max(0, round(seen.measured_bytes)),
            uncertainty_bytes=0,
            estimated_bytes=seen.estimate().total_bytes,
            model=seen.line["model"],
            evidence=seen.line["source"],
        )
        found = Calibration.of([sample]).carried(then.facts)
        assert found is not None
        pool = then.line["kv_gib"] * GIB
        pairs.append(
            Carried(
                (found.overhead_bytes - then.measured_bytes) / pool,
                (estimate.total_bytes - then.measured_bytes) / pool,
                found.low_bytes <= then.measured_bytes <= found.high_bytes,
            )
        )
    return tuple(pairs)
