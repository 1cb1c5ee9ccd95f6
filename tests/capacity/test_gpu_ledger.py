"""What is on a GPU adds up to what its driver counts, or it is told why it is not known."""

from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.fleet import FleetAssessment, GpuAssessment, ReplicaAssessment
from kvheadroom.capacity.gpu_assignment import Assignment, GpuAssignments, OthersMemory
from kvheadroom.capacity.gpu_ledger import GpuLedger, HbmTotals, gpu_ledgers, hbm_totals
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


def fleet_of(
    *engines: Assessment,
    gpu: GpuSnapshot = GPU,
    others: int | None = 2 * GIB,
    replicas: tuple[str, ...] = ("r",),
) -> FleetAssessment:
    runs = GpuAssignments(
        assigned=tuple(Assignment(gpu.gpu, replica, "config") for replica in replicas),
        others=()
        if others is None
        else tuple(OthersMemory(gpu.gpu, replica, others, gpu.used_bytes - others) for replica in replicas),
    )
    reading = GpuReading(taken_at=0.0, duration_seconds=0.0, gpus=(gpu,))
    watched = tuple(
        ReplicaAssessment(replica=replica, url="", interval_seconds=5.0, engines=engines)
        for replica in replicas
    )
    return FleetAssessment(watched, gpus=GpuAssessment(reading=reading, interval_seconds=5.0, runs=runs))


def told(*engines: Assessment, **given: Any) -> tuple[GpuLedger, ...]:
    return gpu_ledgers(fleet_of(*engines, **given))


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


def test_the_memory_of_a_gpu_is_told_as_sold_by_cuda_and_by_its_driver() -> None:
    known = on_gpu(gpu="B200", hbm_bytes=None)
    # 180 GB on the box are 191.5 GB for CUDA.
    assert hbm_totals(fleet_of(), "r", known) == HbmTotals(
        as_sold_bytes=180 * 10**9, cuda_bytes=191_514_017_792, nvml_bytes=80 * GIB
    )
    assert hbm_totals(fleet_of(), "r", on_gpu(gpu=None, hbm_bytes=None)) is None


@pytest.mark.parametrize(
    ("gpu", "card", "as_sold", "nvml"),
    [
        (replace(GPU, accounting="host"), "H100", 80 * 10**9, None),
        (replace(GPU, parent="GPU-p"), "H100", None, 80 * GIB),
        # Sellers differ, and a card that nobody named.
        (GPU, "GB200", None, 80 * GIB),
        (GPU, None, None, 80 * GIB),
    ],
)
def test_a_total_that_is_not_known_is_left_out(
    gpu: GpuSnapshot, card: str | None, as_sold: int | None, nvml: int | None
) -> None:
    known = on_gpu(gpu=card, hbm_bytes=79 * GIB)
    assert hbm_totals(fleet_of(gpu=gpu), "r", known) == HbmTotals(
        as_sold_bytes=as_sold, cuda_bytes=79 * GIB, nvml_bytes=nvml
    )


def test_gpus_of_different_size_and_a_replica_elsewhere_have_no_total_of_a_driver() -> None:
    two = fleet_of()
    assert two.gpus is not None
    other = replace(GPU, gpu="GPU-b", total_bytes=94 * GIB)
    gpus = replace(
        two.gpus,
        reading=replace(two.gpus.reading, gpus=(GPU, other)),
        runs=GpuAssignments(assigned=tuple(Assignment(gpu, "r", "config") for gpu in ("GPU-a", "GPU-b"))),
    )
    for fleet, replica in (
        (replace(two, gpus=gpus), "r"),
        (two, "elsewhere"),
        (replace(two, gpus=None), "r"),
    ):
        totals = hbm_totals(fleet, replica, on_gpu())
        assert totals is not None
        assert totals.nvml_bytes is None


def test_of_a_replicas_gpus_the_one_with_the_most_of_others_is_told_and_none_where_nobody_knows() -> None:
    others = (
        OthersMemory("a", "r", 5, 60),
        OthersMemory("b", "r", 7, 50),
        OthersMemory("a", "other", 900, 5),
    )
    gpus = GpuAssessment(
        reading=GpuReading(taken_at=0.0, duration_seconds=0.0),
        interval_seconds=5.0,
        runs=GpuAssignments(others=others),
    )
    assert gpus.foreign_bytes("r") == 7
    assert gpus.foreign_bytes("unheard") is None
