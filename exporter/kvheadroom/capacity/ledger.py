"""The memory of one GPU term by term: as predicted, and as the live pool says that it is.

vLLM sizes the pool by what is left over: `requested = ceil(total * gpu_memory_utilization)`, less the weights, less what the start-up
took besides (activations, CUDA graphs, context, communication), in whole blocks (`v1/worker/gpu_worker.py`
determine_available_memory, 0.33.0). So where total and weights are known, the pool tells how much that was.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.prediction import Prediction


class Term(StrEnum):
    """What a GPU's memory, as CUDA reports it, is made of. A closed list: together they are all of it."""

    OUTSIDE_UTILIZATION = "outside_utilization"
    WEIGHTS = "weights"
    OVERHEAD = "overhead"
    BLOCK_ROUNDING = "block_rounding"
    KV_POOL = "kv_pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTerm:
    """One term, in bytes of one GPU.

    Attributes:
        observed_bytes: None where the live engine says nothing of it.
        uncertainty_bytes: by so much the observed figure may be too large; 0 where it is exact.
        predicted_from, observed_from: where the figures come from, for people; "" where there is none.
    """

    term: Term
    predicted_bytes: int
    observed_bytes: int | None
    uncertainty_bytes: int = 0
    predicted_from: str
    observed_from: str = ""

    @property
    def difference_bytes(self) -> int | None:
        """Observed minus predicted."""
        return None if self.observed_bytes is None else self.observed_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All terms of one GPU; with tensor parallelism of the rank that left the least, since vLLM gives all ranks its pool.

    Attributes:
        total_bytes: what the predicted figures add up to, and the observed ones where all that is left is known.
        problem: why the observed figures cannot be, one sentence; then there are none.
    """

    total_bytes: int
    total_from: str
    terms: tuple[LedgerTerm, ...]
    problem: str = ""

    def of(self, term: Term) -> LedgerTerm:
        """One term."""
        return next(one for one in self.terms if one.term is term)


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
    return Ledger(
        total_bytes=hbm.value,
        total_from=str(hbm.origin),
        problem=problem,
        terms=(
            *(
                LedgerTerm(
                    term=term,
                    predicted_bytes=size,
                    observed_bytes=size if known else None,
                    predicted_from=origin,
                    observed_from="as predicted" if known else "",
                )
                for term, size, origin in (
                    (Term.OUTSIDE_UTILIZATION, outside, utilization_from),
                    (Term.WEIGHTS, weights, weights_from),
                )
            ),
            LedgerTerm(
                term=Term.OVERHEAD,
                predicted_bytes=overhead,
                observed_bytes=left,
                uncertainty_bytes=_block_bytes(observation) if known else 0,
                predicted_from=overhead_from,
                observed_from="what the pool leaves, with the rounding" if known else "",
            ),
            LedgerTerm(
                term=Term.BLOCK_ROUNDING,
                predicted_bytes=pool.unused_bytes,
                observed_bytes=None,
                predicted_from="less than one block",
            ),
            LedgerTerm(
                term=Term.KV_POOL,
                predicted_bytes=pool.pool_bytes,
                observed_bytes=observed,
                predicted_from=f"{pool.num_blocks:,} blocks",
                observed_from=f"{observation.num_blocks:,} blocks" if known else "",
            ),
        ),
    )


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
