"""A ledger as steps: each begins where the one before it ended, and they end at 0."""

from dataclasses import replace

from kvheadroom.capacity.ledger import Ledger, Term
from kvheadroom.capacity.waterfall import LedgerColumn, waterfall
from tests.outputs.fleet import calibrated, on_a_gpu


def ledger() -> Ledger:
    (engine,) = calibrated(on_a_gpu(), "hbm", 1_050_000_007, 1_150_000_000, 1_100_000_000).engines
    assert engine.ledger is not None
    return engine.ledger


def test_the_steps_of_each_column_lead_from_the_whole_memory_to_nothing() -> None:
    of = ledger()
    for column in LedgerColumn:
        steps = waterfall(of, column)
        left = of.total_bytes
        for step in steps:
            left -= step.bytes
            assert step.left_bytes == left
            assert (step.left_ratio, step.share_ratio) == (left / of.total_bytes, step.bytes / of.total_bytes)
        assert (left, steps[-1].term) == (0, Term.KV_POOL)
    # The live overhead has the rounding in it.
    assert [step.term for step in waterfall(of, LedgerColumn.OBSERVED)] == [
        Term.OUTSIDE_UTILIZATION, Term.WEIGHTS, Term.OVERHEAD, Term.KV_POOL,
    ]  # fmt: skip


def test_a_column_without_a_pool_or_that_does_not_add_up_has_no_steps() -> None:
    of = ledger()
    unlearned = replace(of, terms=tuple(replace(one, calibrated_bytes=None) for one in of.terms))
    assert waterfall(unlearned, LedgerColumn.CALIBRATED) == ()
    off = replace(of, total_bytes=of.total_bytes + 1)
    assert waterfall(off, LedgerColumn.PREDICTED) == ()
