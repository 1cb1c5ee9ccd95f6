"""What is on a GPU adds up to what its driver counts, or it is told why it is not known."""

from dataclasses import replace

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment, ReplicaAssessment
from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments, OthersMemory
from kvheadroom.capacity.gpu_ledger import GpuLedger, gpu_ledgers
from kvheadroom.capacity.gpus import GpuReading, GpuSnapshot
from kvheadroom.capacity.readings import EngineSnapshot
from tests.capacity.test_ledger import GIB, on_gpu

# 4 layers x 2 (K, V) x 2 heads x 32 x 2 B x 16 tokens.
BLOCK = 16_384
GPU = GpuSnapshot(
    gpu="GPU-a",
    name="NVIDIA H100 80GB HBM3",
    index=0,
    total_bytes=80 * GIB,
    reserved_bytes=GIB,
    used_bytes=70 * GIB,
    free_bytes=9 * GIB,
    accounting="v2",
)


def engine(num_blocks: int = 65_536, **said: object) -> Assessment:
    snapshot = EngineSnapshot(
        engine="0",
        num_blocks=num_blocks,
        block_size=16,
        attention_block_size=16,
        sleeping=said.pop("sleeping", None),  # type: ignore[arg-type]
    )
    return assess(Reading(facts=on_gpu(hbm_bytes=79 * GIB, **said), snapshot=snapshot, taken_at=0.0), ())


def told(
    *engines: Assessment,
    gpu: GpuSnapshot = GPU,
    others: int | None = 2 * GIB,
    replicas: tuple[str, ...] = ("r",),
) -> tuple[GpuLedger, ...]:
    runs = GpuAssignments(
        assigned=tuple(Assignment(gpu.gpu, replica, "config") for replica in replicas),
        others=()
        if others is None
        else tuple(OthersMemory(gpu.gpu, replica, others) for replica in replicas),
    )
    reading = GpuReading(taken_at=0.0, duration_seconds=0.0, gpus=(gpu,))
    watched = tuple(
        ReplicaAssessment(replica=replica, url="", interval_seconds=5.0, engines=engines)
        for replica in replicas
    )
    return gpu_ledgers(
        FleetAssessment(watched, gpus=GpuAssessment(reading=reading, interval_seconds=5.0, runs=runs))
    )


def test_weights_pool_others_and_the_rest_are_what_the_driver_calls_used() -> None:
    [ledger] = told(engine())
    terms = {str(term): size for term, size in ledger.terms}
    assert terms["kv_pool"] == 65_536 * BLOCK == GIB
    assert (terms["reserved"], terms["others"], terms["free"]) == (GIB, 2 * GIB, 9 * GIB)
    assert terms["weights"] > 0
    assert sum(terms[term] for term in ("others", "weights", "kv_pool", "rest")) == GPU.used_bytes
    assert sum(terms.values()) == ledger.total_bytes == 80 * GIB
    assert (ledger.replica, ledger.unknown, ledger.note) == ("r", "", "")


def test_what_cannot_be_told_apart_stands_in_the_rest_and_it_says_so() -> None:
    old = replace(GPU, accounting="v1", reserved_bytes=None, used_bytes=71 * GIB)
    [ledger] = told(engine(), gpu=old, others=None)
    assert [str(term) for term, _ in ledger.terms] == ["weights", "kv_pool", "rest", "free"]
    assert sum(size for _, size in ledger.terms) == ledger.total_bytes == 80 * GIB
    assert ledger.note == (
        "what the driver reserves and other processes cannot be told apart here and would be in the rest"
    )


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        ((), "no numbers of its replica are there"),
        ((engine(sleeping=True),), "an engine on it sleeps"),
        ((engine(flags={"pipeline_parallel_size": 2}),), "which pipeline stage runs on it is not known"),
        ((engine(), engine(1000)), "pools of different sizes"),
        (
            (engine(flags={"num_gpu_blocks_override": 100}),),
            "the bytes of the pool or the weights are not known",
        ),
        ((engine(70 * GIB // BLOCK),), "GiB more than what is in use there"),
    ],
)
def test_where_it_is_not_known_there_are_no_terms_but_the_reason(
    engines: tuple[Assessment, ...], why: str
) -> None:
    [ledger] = told(*engines)
    assert ledger.terms == ()
    assert why in ledger.unknown


def test_two_replicas_on_one_gpu_are_told_that_nobody_knows_whose_memory_is_whose() -> None:
    ledgers = told(engine(), replicas=("a", "b"))
    assert [one.replica for one in ledgers] == ["a", "b"]
    assert {one.unknown for one in ledgers} == {
        "2 replicas run on it, and which memory is whose is not known"
    }


def test_engines_of_one_size_share_a_ledger_and_memory_of_the_host_has_none() -> None:
    assert told(engine(), engine())[0].unknown == ""
    assert told(engine(), gpu=replace(GPU, accounting="host")) == ()
    assert told(engine(), replicas=()) == ()
