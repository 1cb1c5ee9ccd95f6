"""How near the pool comes after one start was seen: on public logs of the same deployment started more than once.

Two public lines are the same deployment where all that the overhead depends on is (`CalibrationKey`) and the weights that they print are: the
lines name no quantization. Each is predicted from the other alone.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvheadroom.capacity.calibration import Calibration, with_overhead
from kvheadroom.capacity.calibration_samples import (
    CalibrationSample,
    Excluded,
    sample_of_log,
)
from kvheadroom.capacity.facts import EngineFacts, Fact, Origin
from kvheadroom.capacity.logged_start import GIB, LoggedRank, LoggedStart, Printed, StartOutcome
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
