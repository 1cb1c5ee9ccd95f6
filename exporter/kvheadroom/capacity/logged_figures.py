"""What a start-up log measured, each figure beside what was predicted or estimated before; bytes of one GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvheadroom.capacity.calibration_samples import CalibrationSample, Excluded
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.logged_sample import logged_pool, stage_of
from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, Printed
from kvheadroom.capacity.prediction import logged_tokens, predict
from kvheadroom.capacity.rank_weights import RankWeights, weights_of


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure as the log has it, and as it was known before; None where it is not told or cannot be known."""

    measured: Printed | None
    predicted_bytes: int | None

    @property
    def difference_ratio(self) -> float | None:
        """How much more was measured, as a share of what was predicted."""
        if self.measured is None or not self.predicted_bytes:
            return None
        return (self.measured.bytes - self.predicted_bytes) / self.predicted_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an overhead, as the log has it."""

    name: str
    size: Printed


@dataclass(frozen=True, slots=True)
class Spare:
    """What a rank left beyond the pool that all ranks get."""

    label: str
    size: Printed


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """What the CUDA graphs were estimated to take, and what they took.

    Attributes:
        off_ratio: how much too high the estimate was, as a share of what they took; None where they took nothing.
    """

    estimated: Printed
    took: Printed

    @property
    def off_ratio(self) -> float | None:
        """As vLLM's own line has it (0.33.0 `v1/worker/gpu_worker.py` compile_or_warm_up_model)."""
        return None if self.took.bytes <= 0 else (self.estimated.bytes - self.took.bytes) / self.took.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFigures:
    """One start.

    Attributes:
        binding: the rank that leaves the fewest blocks: all ranks get its pool; empty for one GPU.
        utilization: as the log has it.
        pool_tokens, predicted_pool_tokens: as the release's log counts them.
        parts: what the log tells of the overhead.
        spares: of every other rank that tells what it left, the most first.
        unseen: another rank than those that print it left so much less; None where none did.
    """

    binding: str
    total: Beside
    budget: Beside
    utilization: float | None
    weights: Beside
    overhead: Beside
    pool: Beside
    pool_tokens: int | None
    predicted_pool_tokens: int | None
    parts: tuple[Part, ...]
    graphs: GraphEstimate | None
    spares: tuple[Spare, ...] = ()
    unseen: Printed | None = None


def figures_of_log(
    facts: EngineFacts | None, logged: LoggedStart, outcome: CalibrationSample | Excluded
) -> LoggedFigures | None:
    """The figures of a start; None where no rank says what it left.

    Args:
        facts: as the raw prediction takes them; None where they are not known, and then nothing is predicted.
        outcome: what was made of it.
    """
    left = [(rank, size) for rank in logged.ranks if (size := rank.left) is not None]
    if not left:
        return None
    known = None if facts is None else _Predicted(facts)
    sizes = (1,) if known is None else known.block_bytes

    def stage(rank: LoggedRank) -> int:
        return 0 if facts is None else stage_of(facts, rank.label)

    def block(rank: LoggedRank) -> int:
        return sizes[stage(rank)] if len(sizes) > 1 else sizes[0]

    binding, pool = min(left, key=lambda one: one[1].bytes / block(one[0]))
    order = (binding, *(rank for rank in logged.ranks if rank is not binding))
    return LoggedFigures(
        binding=binding.label,
        total=Beside(_first(order, "total"), None if known is None else known.total_bytes),
        budget=Beside(_first(order, "requested"), None if known is None else known.requested_bytes),
        utilization=next((rank.utilization for rank in order if rank.utilization is not None), None),
        weights=Beside(
            _first(order, "weights"), None if known is None else known.weights_bytes(stage(binding))
        ),
        overhead=_overhead(outcome),
        pool=Beside(pool, None if known is None else known.pool_bytes(stage(binding))),
        pool_tokens=logged.pool_tokens,
        predicted_pool_tokens=None if known is None else known.pool_tokens,
        parts=tuple(_parts(order, logged.release)),
        graphs=next(
            (
                GraphEstimate(rank.cudagraph_estimate, rank.cudagraph)
                for rank in order
                if rank.cudagraph_estimate is not None and rank.cudagraph is not None
            ),
            None,
        ),
        spares=tuple(
            sorted(
                (
                    Spare(rank.label, _minus(size, round(pool.bytes * block(rank) / block(binding)), pool))
                    for rank, size in left
                    if rank is not binding
                ),
                key=lambda one: (-one.size.bytes, one.label),
            )
        ),
        unseen=None if facts is None else _unseen(facts, logged, pool),
    )


class _Predicted:
    """What the raw prediction says, in bytes of one GPU; None where it says nothing."""

    def __init__(self, facts: EngineFacts) -> None:
        predicted = predict(facts)
        layout, pool = predicted.layout, predicted.pool
        known = None if predicted.budget is None else predicted.budget.weights
        weights = known or weights_of(facts)
        self._budget = predicted.budget
        self._weights = weights if isinstance(weights, RankWeights) else None
        self.block_bytes = (1,) if layout is None else layout.stage_bytes_per_block
        self.total_bytes = None if facts.hbm_bytes is None else facts.hbm_bytes.value
        self.requested_bytes = None
        if self.total_bytes is not None:
            self.requested_bytes = math.ceil(self.total_bytes * facts.gpu_memory_utilization.value)
        self.pool_tokens = None
        if layout is not None and pool is not None:
            self.pool_tokens = logged_tokens(pool, layout, facts)

    def weights_bytes(self, stage: int) -> int | None:
        return None if self._weights is None else self._weights.stage_bytes[stage]

    def pool_bytes(self, stage: int) -> int | None:
        return None if self._budget is None else self._budget.stage_available_bytes[stage]


def _minus(one: Printed, taken_off: int, rounded_as: Printed) -> Printed:
    return Printed(one.bytes - taken_off, one.uncertainty_bytes + rounded_as.uncertainty_bytes)


def _first(ranks: tuple[LoggedRank, ...], name: str) -> Printed | None:
    """Of the first rank that tells it."""
    return next((size for rank in ranks if (size := getattr(rank, name)) is not None), None)


def _overhead(outcome: CalibrationSample | Excluded) -> Beside:
    if isinstance(outcome, Excluded):
        return Beside(None, None)
    measured = Printed(outcome.overhead_bytes, outcome.uncertainty_bytes)
    return Beside(measured, outcome.estimated_bytes)


def _parts(ranks: tuple[LoggedRank, ...], release: str | None) -> Iterator[Part]:
    non_torch, activation = _first(ranks, "non_torch"), _first(ranks, "activation")
    consumed, weights = _first(ranks, "consumed"), _first(ranks, "weights")
    estimate = _first(ranks, "cudagraph_estimate")
    counted = [rank.graphs_counted for rank in ranks if rank.graphs_counted is not None]
    # 0.18, and from 0.27 on, when `consumed` is told.
    together = consumed is not None or (release or "").startswith("0.18.")
    if non_torch is not None:
        yield Part("outside PyTorch", non_torch)
    elif consumed is not None and weights is not None:
        yield Part("outside PyTorch", _minus(consumed, weights.bytes, weights))
    if activation is not None:
        with_graphs = together and estimate is not None and all(counted)
        yield Part(
            "activations" + (", CUDA graphs by vLLM's estimate in it" if with_graphs else ""), activation
        )
    if estimate is not None:
        taken_off = all(counted) if counted or together else not _adds_up_without(ranks)
        yield Part(
            "CUDA graphs by vLLM's estimate" + ("" if taken_off else ", which it did not take off"),
            estimate,
        )


def _adds_up_without(ranks: tuple[LoggedRank, ...]) -> bool:
    """Whether the budget is full without the estimate, where the log does not say whether it was taken off."""
    held = [_first(ranks, name) for name in ("weights", "non_torch", "activation", "available")]
    known = [figure for figure in (_first(ranks, "requested"), *held) if figure is not None]
    if len(known) < 1 + len(held):
        return False
    requested, *parts = known
    rounding = sum(figure.uncertainty_bytes for figure in known)
    return abs(requested.bytes - sum(part.bytes for part in parts)) <= rounding


def _unseen(facts: EngineFacts, logged: LoggedStart, left: Printed) -> Printed | None:
    """Most releases let one rank alone tell what it left; the pool tells whether another left less."""
    pool = logged_pool(facts, logged)
    if pool is None:
        return None
    less = left.bytes - pool.bytes
    rounding = left.uncertainty_bytes + pool.uncertainty_bytes
    return Printed(less, rounding) if less > rounding else None
