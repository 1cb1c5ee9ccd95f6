"""The memory of one GPU: both columns add up, and the live pool tells the overhead."""

import os
import random
from typing import Any

import pytest

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.ledger import Ledger, Term, make_ledger
from kvheadroom.capacity.observation import Observation, observe
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
        known = on_gpu(
            flags={
                "gpu_memory_utilization": rng.uniform(0.5, 1.0),
                "tensor_parallel_size": rng.choice([1, 2]),
            },
            hbm_bytes=rng.randrange(3 * GIB, 200 * GIB),
            overhead_bytes=rng.randrange(GIB),
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
