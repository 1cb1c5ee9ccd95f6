"""A ledger as steps down from a GPU's whole memory to its KV pool: where each term begins and ends."""

from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.ledger import Ledger, LedgerTerm, Term


class LedgerColumn(StrEnum):
    """Whose figures. A closed list."""

    PREDICTED = "predicted"
    CALIBRATED = "calibrated"
    OBSERVED = "observed"


@dataclass(frozen=True, slots=True)
class Step:
    """One term of the sum.

    Attributes:
        left_bytes: of the GPU's memory, when this and all before it are taken off; for the pool, which is what is left, 0.
        left_ratio, share_ratio: `left_bytes` and `bytes` over the total, 0-1.
    """

    term: Term
    bytes: int
    left_bytes: int
    left_ratio: float
    share_ratio: float


def waterfall(ledger: Ledger, column: LedgerColumn) -> tuple[Step, ...]:
    """The steps of one column, each beginning where the one before it ended; they end at 0 to the byte.

    None where the column has no pool, and where its figures are not all that the memory is made of.
    """
    steps, left, total = [], ledger.total_bytes, ledger.total_bytes
    for one in ledger.terms:
        size = _bytes(one, column)
        if size is None:
            # The live overhead has the rounding in it, and nothing tells it apart.
            if one.term is Term.BLOCK_ROUNDING and column is LedgerColumn.OBSERVED:
                continue
            return ()
        left -= size
        steps.append(Step(one.term, size, left, left / total, size / total))
    return tuple(steps) if left == 0 else ()


def _bytes(one: LedgerTerm, column: LedgerColumn) -> int | None:
    if column is LedgerColumn.PREDICTED:
        return one.predicted_bytes
    return one.calibrated_bytes if column is LedgerColumn.CALIBRATED else one.observed_bytes
