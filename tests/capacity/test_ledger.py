"""The memory of one GPU: both columns add up, and the live pool tells the overhead."""

import os
import random
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.calibration import LearnedOverhead, Reliability, predict_calibrated
from kvheadroom.capacity.facts import EngineFacts, Fact, Origin
from kvheadroom.capacity.ledger import Basis, Bounds, Ledger, Term, make_ledger, with_calibrated
from kvheadroom.capacity.observation import Observation, observe
from kvheadroom.capacity.overhead_parts import OverheadPart
from kvheadroom.capacity.prediction import Prediction, predict
from kvheadroom.capacity.readings import EchoedFlags, EngineSnapshot
from tests.capacity.facts_builder import TINY_LLAMA, facts

SEED = int(os.environ.get("KVHEADROOM_SEED", random.randrange(2**32)))
GIB = 2**30
SMALL = {**TINY_LLAMA, "vocab_size": 4096, "intermediate_size": 512}


def on_gpu(**said: Any) -> EngineFacts:
    given: dict[str, Any] = {
        "config": SMALL,
        "flags": {"block_size": 16, **said.pop("flags", {})},
        "gpu": "H100",
        "hbm_bytes": 3 * GIB,
        "overhead_bytes": GIB,
    }
    return facts(**{**given, **said})


def live(known: EngineFacts, num_blocks: int) -> tuple[Prediction, Observation]:
    prediction = predict(known)
    snapshot = EngineSnapshot(engine="0", num_blocks=num_blocks, block_size=16, attention_block_size=16)
    return prediction, observe(snapshot, known, prediction.layout)


def ledger_of(known: EngineFacts, num_blocks: int) -> Ledger:
    ledger = make_ledger(known, *live(known, num_blocks))
    assert ledger is not None
    return ledger


def test_what_was_predicted_adds_up_to_the_gpu_and_so_does_what_the_pool_tells() -> None:
    rng = random.Random(SEED)
    print(f"KVHEADROOM_SEED={SEED}")
    for _ in range(200):
        said = rng.choice([None, rng.randrange(GIB)])
        known = on_gpu(
            flags={
                "gpu_memory_utilization": rng.uniform(0.5, 1.0),
                "tensor_parallel_size": rng.choice([1, 2]),
                "max_num_seqs": rng.randrange(1, 512),
                "max_num_batched_tokens": rng.randrange(512, 8192),
            },
            hbm_bytes=rng.randrange(8 * GIB, 200 * GIB),
            overhead_bytes=said,
        )
        prediction = predict(known)
        assert prediction.pool is not None
        ledger = ledger_of(known, rng.randrange(1, prediction.pool.num_blocks))
        assert [one.term for one in ledger.terms] == list(Term)
        assert sum(one.predicted_bytes for one in ledger.terms) == ledger.total_bytes
        assert sum(one.observed_bytes or 0 for one in ledger.terms) == ledger.total_bytes
        # What one term has more, the others have less.
        rounding = ledger.of(Term.BLOCK_ROUNDING).predicted_bytes
        assert sum(one.difference_bytes or 0 for one in ledger.terms) == rounding
        # The parts are the predicted overhead, and with what is not explained the live one.
        overhead, parts = ledger.of(Term.OVERHEAD), sum(size for _, size in ledger.overhead_parts)
        assert (parts if said is None else said) == overhead.predicted_bytes
        assert [part for part, _ in ledger.overhead_parts] == (list(OverheadPart) if said is None else [])
        assert ledger.unexplained_bytes is not None
        assert overhead.predicted_bytes + ledger.unexplained_bytes == overhead.observed_bytes
        for one in ledger.terms:
            assert one.bounds is not None
            assert one.bounds.low_bytes <= one.predicted_bytes <= one.bounds.high_bytes


def test_each_term_tells_how_it_is_known_and_how_far_off_it_may_be() -> None:
    told = ledger_of(on_gpu(flags={"gpu_memory_utilization": 0.5}), 100)
    assert [str(one.predicted_basis) for one in told.terms] == [
        "read",
        "derived",
        "read",
        "derived",
        "derived",
    ]
    # Half of 3 GiB is outside; the overhead was said, so the pool is exact as well.
    assert told.of(Term.OUTSIDE_UTILIZATION).bounds == Bounds(3 * GIB // 2, 3 * GIB // 2)
    assert told.of(Term.OVERHEAD).bounds == Bounds(GIB, GIB)
    assert told.of(Term.BLOCK_ROUNDING).bounds == Bounds(0, 16 * 1024 - 1)
    pool = told.of(Term.KV_POOL)
    assert pool.bounds == Bounds(pool.predicted_bytes, pool.predicted_bytes)

    estimated = ledger_of(on_gpu(overhead_bytes=None, hbm_bytes=100 * GIB), 100)
    known = on_gpu(overhead_bytes=None, hbm_bytes=100 * GIB).overhead_estimate
    assert known is not None
    overhead, pool = estimated.of(Term.OVERHEAD), estimated.of(Term.KV_POOL)
    assert (overhead.predicted_basis, overhead.predicted_from) == (Basis.ASSUMED, "estimated")
    assert overhead.bounds == Bounds(known.low_bytes, known.high_bytes)
    # 1.2% of 100 GiB more overhead at the high bound: that much less pool, in whole blocks.
    assert known.high_bytes - known.total_bytes == round(0.012 * 100 * GIB)
    assert pool.bounds is not None
    assert 0 <= pool.predicted_bytes - pool.bounds.low_bytes - round(0.012 * 100 * GIB) + 16_384 <= 2 * 16_384

    # The memory of the catalogue and vLLM's own utilization.
    assumed = ledger_of(on_gpu(hbm_bytes=None), 100).of(Term.OUTSIDE_UTILIZATION)
    assert (assumed.predicted_basis, assumed.bounds) == (Basis.ASSUMED, None)


def test_an_even_share_of_the_weights_and_the_guess_of_the_overhead_have_no_bounds() -> None:
    without = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    known = on_gpu(config=without, weights_bytes=GIB, overhead_bytes=None, hbm_bytes=100 * GIB)
    ledger = ledger_of(known, 100)
    weights = ledger.of(Term.WEIGHTS)
    assert weights.predicted_from == "your config, an even share for each GPU"
    assert (weights.predicted_basis, weights.bounds) == (Basis.ASSUMED, None)
    assert ledger.of(Term.OVERHEAD).bounds is not None
    assert ledger.of(Term.KV_POOL).bounds is None

    flat = replace(on_gpu(), overhead_bytes=Fact(GIB, Origin.ASSUMED))
    ledger = ledger_of(flat, 100)
    overhead = ledger.of(Term.OVERHEAD)
    assert (overhead.predicted_basis, overhead.bounds) == (Basis.ASSUMED, None)
    assert (overhead.predicted_bytes, ledger.overhead_parts) == (GIB, ())
    assert ledger.of(Term.KV_POOL).bounds is None


def test_less_overhead_than_predicted_is_explained_with_a_minus() -> None:
    known = on_gpu(hbm_bytes=3 * GIB)
    pool = predict(known).pool
    assert pool is not None
    # 1,000 blocks of 16 KiB more than predicted.
    ledger = ledger_of(known, pool.num_blocks + 1000)
    assert pool.unused_bytes is not None
    assert ledger.unexplained_bytes == pool.unused_bytes - 1000 * 16_384
    assert ledger_of(on_gpu(), 4 * GIB // 16_384).unexplained_bytes is None


def test_what_was_learned_adds_up_to_the_gpu_to_the_byte() -> None:
    rng = random.Random(SEED)
    print(f"KVHEADROOM_SEED={SEED}")
    for _ in range(200):
        known = on_gpu(
            flags={"gpu_memory_utilization": rng.uniform(0.5, 1.0)},
            hbm_bytes=rng.randrange(3 * GIB, 200 * GIB),
            overhead_bytes=rng.randrange(GIB),
        )
        learned = rng.randrange(GIB)
        calibrated = predict(replace(known, overhead_bytes=Fact(learned, Origin.LEARNED)), predict(known))
        plain = ledger_of(known, 100)
        ledger = with_calibrated(plain, calibrated)
        assert sum(one.calibrated_bytes or 0 for one in ledger.terms) == ledger.total_bytes
        assert ledger.of(Term.OVERHEAD).calibrated_bytes == learned
        assert calibrated.pool is not None
        assert ledger.of(Term.KV_POOL).calibrated_bytes == calibrated.pool.pool_bytes
        for term in (Term.OUTSIDE_UTILIZATION, Term.WEIGHTS):
            assert ledger.of(term).calibrated_bytes == ledger.of(term).predicted_bytes
        assert [replace(one, calibrated_bytes=None) for one in ledger.terms] == list(plain.terms)
        # What the pool tells is compared with both, and what is not explained stays that of the estimate.
        overhead = ledger.of(Term.OVERHEAD)
        assert overhead.observed_bytes is not None
        assert overhead.calibrated_difference_bytes == overhead.observed_bytes - learned
        assert ledger.unexplained_bytes == plain.unexplained_bytes
        assert plain.of(Term.OVERHEAD).calibrated_difference_bytes is None
        assert ledger.of(Term.BLOCK_ROUNDING).calibrated_difference_bytes is None


def test_what_was_learned_is_one_figure_beside_the_parts_of_the_estimate() -> None:
    known = on_gpu(overhead_bytes=None, hbm_bytes=100 * GIB)
    raw = predict(known)
    learned = LearnedOverhead(
        overhead_bytes=2 * GIB, low_bytes=GIB, high_bytes=3 * GIB, samples=3, reliability=Reliability.GOOD
    )
    calibrated = predict_calibrated(known, learned, raw)
    assert calibrated.facts.overhead_bytes.origin is Origin.LEARNED
    assert calibrated.prediction.budget is not None
    assert calibrated.prediction.budget.overhead is None
    plain = ledger_of(known, 100)
    ledger = with_calibrated(plain, calibrated.prediction)
    overhead = ledger.of(Term.OVERHEAD)
    assert (overhead.calibrated_bytes, overhead.predicted_basis) == (2 * GIB, Basis.ASSUMED)
    assert ledger.overhead_parts == plain.overhead_parts
    assert sum(size for _, size in ledger.overhead_parts) == overhead.predicted_bytes
    assert sum(one.calibrated_bytes or 0 for one in ledger.terms) == 100 * GIB


def test_a_learned_overhead_that_leaves_no_pool_leaves_its_column_empty() -> None:
    known = on_gpu()
    none = predict(replace(known, overhead_bytes=Fact(3 * GIB, Origin.LEARNED)))
    assert with_calibrated(ledger_of(known, 100), none) == ledger_of(known, 100)


def test_the_pool_of_a_known_overhead_tells_that_overhead_to_less_than_a_block() -> None:
    truth = on_gpu(overhead_bytes=700_000_000)
    pool = predict(truth).pool
    assert pool is not None
    overhead = ledger_of(on_gpu(), pool.num_blocks).of(Term.OVERHEAD)
    assert overhead.observed_bytes is not None
    assert 0 <= overhead.observed_bytes - 700_000_000 <= overhead.uncertainty_bytes
    # 4 layers x 2 (K, V) x 2 heads x 32 x 2 B x 16 tokens.
    assert overhead.uncertainty_bytes == 16 * 1024 - 1
    assert overhead.predicted_bytes == GIB
    assert overhead.difference_bytes == overhead.observed_bytes - GIB


def test_a_pool_that_the_gpu_has_no_room_for_tells_that_an_assumption_is_wrong_and_no_overhead() -> None:
    ledger = ledger_of(on_gpu(), 4 * GIB // 16_384)
    assert "GiB larger than HBM, gpu_memory_utilization and weights leave" in ledger.problem
    assert all(one.observed_bytes is None for one in ledger.terms)
    assert ledger_of(on_gpu(), 100).problem == ""


def test_a_pool_that_is_not_told_leaves_the_live_column_empty() -> None:
    known = on_gpu()
    prediction = predict(known)
    told = observe(EngineSnapshot(engine="0"), known, prediction.layout)
    ledger = make_ledger(known, prediction, told)
    assert ledger is not None
    assert all(one.observed_bytes is None and one.observed_from == "" for one in ledger.terms)


@pytest.mark.parametrize(
    "known",
    [
        on_gpu(echoed=EchoedFlags(kv_cache_memory_bytes=GIB)),
        on_gpu(flags={"num_gpu_blocks_override": 100}),
        on_gpu(flags={"pipeline_parallel_size": 2}),
        on_gpu(gpu=None, hbm_bytes=None),
        on_gpu(config={"architectures": ["Unheard"]}),
    ],
)
def test_there_is_no_ledger_where_a_flag_gives_the_pool_or_a_figure_is_missing(known: EngineFacts) -> None:
    assert make_ledger(known, *live(known, 100)) is None
