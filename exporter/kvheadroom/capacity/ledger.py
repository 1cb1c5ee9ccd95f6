"""The memory of one GPU term by term: as predicted, and as the live pool says that it is.

vLLM sizes the pool by what is left over: `requested = ceil(total * gpu_memory_utilization)`, less the weights, less what the start-up
took besides (activations, CUDA graphs, context, communication), in whole blocks (`v1/worker/gpu_worker.py`
determine_available_memory, 0.33.0). So where total and weights are known, the pool tells how much that was.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.memory import PoolBudget
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.overhead_parts import OverheadPart
from kvheadroom.capacity.prediction import Prediction


class Term(StrEnum):
    """What a GPU's memory, as CUDA reports it, is made of. A closed list: together they are all of it."""

    OUTSIDE_UTILIZATION = "outside_utilization"
    WEIGHTS = "weights"
    OVERHEAD = "overhead"
    BLOCK_ROUNDING = "block_rounding"
    KV_POOL = "kv_pool"


class Basis(StrEnum):
    """How a predicted figure is known. A closed list."""

    READ = "read"
    """A flag, the config or the machine tells it."""
    DERIVED = "derived"
    """It follows by vLLM's rules from what is read."""
    ASSUMED = "assumed"
    """A default, a figure of the catalogue, an estimate or an even share goes into it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes between which a predicted figure lies; both the same where it is exact."""

    low_bytes: int
    high_bytes: int

    @property
    def exact(self) -> bool:
        """Whether there is one figure only."""
        return self.low_bytes == self.high_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTerm:
    """One term, in bytes of one GPU.

    Attributes:
        bounds: of what is predicted; None where nobody knows how far off it may be.
        calibrated_bytes: with the learned overhead; None where nothing was learned, or it leaves no pool.
        observed_bytes: None where the live engine says nothing of it.
        uncertainty_bytes: by so much the observed figure may be too large; 0 where it is exact.
        predicted_from, observed_from: where the figures come from, for people; "" where there is none.
    """

    term: Term
    predicted_bytes: int
    predicted_basis: Basis
    bounds: Bounds | None
    calibrated_bytes: int | None = None
    observed_bytes: int | None
    uncertainty_bytes: int = 0
    predicted_from: str
    observed_from: str = ""

    @property
    def difference_bytes(self) -> int | None:
        """Observed minus predicted."""
        return None if self.observed_bytes is None else self.observed_bytes - self.predicted_bytes

    @property
    def calibrated_difference_bytes(self) -> int | None:
        """Observed minus calibrated."""
        if self.observed_bytes is None or self.calibrated_bytes is None:
            return None
        return self.observed_bytes - self.calibrated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All terms of one GPU; with tensor parallelism of the rank that left the least, since vLLM gives all ranks its pool.

    Attributes:
        total_bytes: what the predicted and the calibrated figures add up to, and the observed ones where all that is left is known.
        overhead_parts: what the predicted overhead is made of, those that are 0 as well; empty where it was said or guessed as a whole.
        problem: why the observed figures cannot be, one sentence; then there are none.
    """

    total_bytes: int
    total_from: str
    terms: tuple[LedgerTerm, ...]
    overhead_parts: tuple[tuple[OverheadPart, int], ...] = ()
    problem: str = ""

    def of(self, term: Term) -> LedgerTerm:
        """One term."""
        return next(one for one in self.terms if one.term is term)

    @property
    def unexplained_bytes(self) -> int | None:
        """What the overhead is more than predicted, below 0 what it is less; too large by less than one block, as the overhead is."""
        return self.of(Term.OVERHEAD).difference_bytes


def make_ledger(facts: EngineFacts, prediction: Prediction, observation: Observation) -> Ledger | None:
    """The ledger; None where the pool is not what HBM leaves over, or a figure of the prediction is missing.

    With pipeline stages there is none: which stage left the least is not told.
    """
    budget, pool, hbm = prediction.budget, prediction.pool, facts.hbm_bytes
    if budget is None or pool is None or hbm is None or not facts.pool_from_hbm:
        return None
    if facts.pipeline_parallel_size.value > 1 or pool.unused_bytes is None:
        return None
    taken = {term.term: (-term.bytes, str(term.origin)) for term in budget.terms}
    outside, utilization_from = taken["outside_utilization"]
    weights, weights_from = taken["weights"]
    overhead, overhead_from = taken["overhead"]
    left, problem = _left(hbm.value, outside + weights, observation)
    observed = observation.pool_bytes if left is not None else None
    known = observed is not None
    told = not hbm.assumed and not facts.gpu_memory_utilization.assumed
    planned = budget.weights is not None and budget.weights.plan is not None
    weights_exact = budget.weights is not None and planned and not budget.weights.doubt
    overhead_bounds = _overhead_bounds(facts, budget)
    block = pool.pool_bytes // pool.num_blocks
    return Ledger(
        total_bytes=hbm.value,
        total_from=str(hbm.origin),
        overhead_parts=() if budget.overhead is None else budget.overhead.parts,
        problem=problem,
        terms=(
            *(
                LedgerTerm(
                    term=term,
                    predicted_bytes=size,
                    predicted_basis=basis,
                    bounds=Bounds(size, size) if exact else None,
                    observed_bytes=size if known else None,
                    predicted_from=origin,
                    observed_from="as predicted" if known else "",
                )
                for term, size, basis, exact, origin in (
                    (
                        Term.OUTSIDE_UTILIZATION,
                        outside,
                        Basis.READ if told else Basis.ASSUMED,
                        told,
                        f"utilization {utilization_from}, CUDA's total {hbm.origin}",
                    ),
                    (
                        Term.WEIGHTS,
                        weights,
                        Basis.DERIVED if planned else Basis.ASSUMED,
                        weights_exact,
                        weights_from,
                    ),
                )
            ),
            LedgerTerm(
                term=Term.OVERHEAD,
                predicted_bytes=overhead,
                predicted_basis=Basis.ASSUMED if facts.overhead_bytes.assumed else Basis.READ,
                bounds=overhead_bounds,
                observed_bytes=left,
                uncertainty_bytes=_block_bytes(observation) if known else 0,
                predicted_from=overhead_from,
                observed_from="what the pool leaves, with the rounding" if known else "",
            ),
            LedgerTerm(
                term=Term.BLOCK_ROUNDING,
                predicted_bytes=pool.unused_bytes,
                predicted_basis=Basis.DERIVED,
                bounds=Bounds(0, block - 1),
                observed_bytes=None,
                predicted_from="less than one block",
            ),
            LedgerTerm(
                term=Term.KV_POOL,
                predicted_bytes=pool.pool_bytes,
                predicted_basis=Basis.DERIVED,
                bounds=_pool_bounds(budget.available_bytes + overhead, overhead_bounds, block)
                if weights_exact
                else None,
                observed_bytes=observed,
                predicted_from=f"{pool.num_blocks:,} blocks",
                observed_from=f"{observation.num_blocks:,} blocks" if known else "",
            ),
        ),
    )


def with_calibrated(ledger: Ledger, calibrated: Prediction) -> Ledger:
    """The same ledger with what the calibrated prediction has for each term; as it is where that has no pool."""
    budget, pool = calibrated.budget, calibrated.pool
    if budget is None or pool is None or pool.unused_bytes is None:
        return ledger
    taken = {term.term: -term.bytes for term in budget.terms}
    found = {
        Term.OUTSIDE_UTILIZATION: taken["outside_utilization"],
        Term.WEIGHTS: taken["weights"],
        Term.OVERHEAD: taken["overhead"],
        Term.BLOCK_ROUNDING: pool.unused_bytes,
        Term.KV_POOL: pool.pool_bytes,
    }
    return replace(
        ledger, terms=tuple(replace(one, calibrated_bytes=found[one.term]) for one in ledger.terms)
    )


def _overhead_bounds(facts: EngineFacts, budget: PoolBudget) -> Bounds | None:
    """Exact where it was said; of the guess for a model of unknown sizes nobody knows."""
    if budget.overhead is not None:
        return Bounds(budget.overhead.low_bytes, budget.overhead.high_bytes)
    said = facts.overhead_bytes
    return None if said.assumed else Bounds(said.value, said.value)


def _pool_bounds(left_bytes: int, overhead: Bounds | None, block_bytes: int) -> Bounds | None:
    """Whole blocks in what the overhead leaves at its bounds."""
    if overhead is None:
        return None
    low, high = (
        max(0, left_bytes - taken) // block_bytes * block_bytes
        for taken in (overhead.high_bytes, overhead.low_bytes)
    )
    return Bounds(low, high)


def _left(total: int, taken: int, observation: Observation) -> tuple[int | None, str]:
    """(overhead that the live pool leaves room for, why there is none)."""
    if observation.pool_bytes is None:
        return None, ""
    left = total - taken - observation.pool_bytes
    if left < 0:
        return None, (
            f"the live pool is {-left / 2**30:,.2f} GiB larger than HBM, gpu_memory_utilization and weights leave: one of them is not "
            "what is assumed here"
        )
    return left, ""


def _block_bytes(observation: Observation) -> int:
    """Of one block of the live pool, less one byte: a whole one would have become one more block."""
    if not observation.pool_bytes or not observation.num_blocks:
        return 0
    return observation.pool_bytes // observation.num_blocks - 1
