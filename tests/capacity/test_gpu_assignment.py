"""Which GPUs serve which replica: the config first, then the processes, else why nobody knows."""

from dataclasses import replace

import pytest

from kvheadroom.capacity.gpu_assignment import (
    Assignment,
    GpuAssignments,
    GpuClaim,
    NotHere,
    OthersMemory,
    Unassigned,
    assign_gpus,
)
from kvheadroom.capacity.gpus import (
    GpuFailure,
    GpuFailureReason,
    GpuProcess,
    GpuProcesses,
    GpuReading,
    GpuSnapshot,
    ServerPlace,
    ServerProcesses,
)

HERE = ServerPlace("http://127.0.0.1:8000")
OTHER_PLACE = ServerPlace("http://127.0.0.1:8001")
ONE, TWO, LOST, PARENT = "GPU-11111111-aaaa", "GPU-11112222-bbbb", "GPU-33333333", "GPU-44444444-ffff"
PART = "MIG-55555555"
ELSEWHERE = "is not on this machine; `nvidia-smi -L` lists those that are"


def snapshot(gpu: str, index: int, parent: str | None = None) -> GpuSnapshot:
    return GpuSnapshot(
        gpu=gpu,
        name="NVIDIA H200",
        index=index,
        total_bytes=1000,
        reserved_bytes=100,
        used_bytes=700,
        free_bytes=200,
        accounting="v2",
        parent=parent,
        gpu_instance=3 if parent else None,
        compute_instance=0 if parent else None,
    )


def processes(gpu: str, *found: tuple[int, int | None], used_bytes: int | None = 700) -> GpuProcesses:
    return GpuProcesses(gpu=gpu, processes=tuple(GpuProcess(*one) for one in found), used_bytes=used_bytes)


READING = GpuReading(
    taken_at=1.0,
    duration_seconds=0.0,
    gpus=(snapshot(ONE, 0), snapshot(TWO, 1), snapshot(PART, 3, PARENT)),
    failures=(GpuFailure(LOST, GpuFailureReason.LOST, "gone"),),
    divided=(PARENT,),
    first_listed=((0, ONE), (1, TWO), (2, LOST), (3, PARENT)),
    processes=(
        processes(ONE, (21, 600), (99, 40)),
        processes(TWO, (22, 500), (23, 100)),
        processes(PART, (77, 5)),
    ),
    servers=(
        ServerProcesses(place=HERE, pids=frozenset({20, 21, 22, 23})),
        ServerProcesses(place=OTHER_PLACE, unknown="nothing listens there"),
    ),
)


def claims(*gpus: str | int, replica: str = "r", place: ServerPlace = HERE) -> tuple[GpuClaim, ...]:
    return (GpuClaim(replica=replica, place=place, gpus=gpus),)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        (ONE, ONE),
        (ONE.lower().replace("gpu", "GPU"), ONE),
        ("GPU-1111111", ONE),
        ("GPU-11112222", TWO),
        (PART, PART),
        (f"MIG-{PARENT}/3/0", PART),
        (0, ONE),
        (1, TWO),
        (LOST, LOST),
        (2, LOST),
    ],
)
def test_a_gpu_is_found_by_its_uuid_its_beginning_its_old_mig_name_or_its_index(
    name: str | int, gpu: str
) -> None:
    found = assign_gpus(claims(name), READING)
    assert found.assigned == (Assignment(gpu, "r", "config"),)
    assert (found.not_here, found.unassigned) == ((), ())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GPU-99999999", ELSEWHERE),
        (9, ELSEWHERE),
        (f"MIG-{PARENT}/3/1", ELSEWHERE),
        ("GPU-1111", "is how the UUIDs of several GPUs begin; give the whole UUID"),
        (PARENT, f"is divided into MIG devices; give the UUID of one of them ({PART})"),
        (3, f"is divided into MIG devices; give the UUID of one of them ({PART})"),
    ],
)
def test_a_gpu_that_cannot_be_meant_is_told_and_nothing_is_guessed(name: str | int, why: str) -> None:
    found = assign_gpus(claims(name), READING)
    assert found.assigned == ()
    assert found.not_here == (NotHere(str(name), "r", why),)


def test_an_index_that_two_gpus_had_is_nobodys() -> None:
    reading = replace(READING, first_listed=(*READING.first_listed, (1, "GPU-66666666")))
    (missing,) = assign_gpus(claims(1), reading).not_here
    assert "the index of several GPUs" in missing.why
    assert assign_gpus(claims(0), reading).assigned == (Assignment(ONE, "r", "config"),)


def test_without_a_word_in_the_config_the_gpus_that_its_processes_are_on_serve_a_replica() -> None:
    found = assign_gpus(claims(), READING)
    assert found.assigned == (Assignment(ONE, "r", "process"), Assignment(TWO, "r", "process"))
    assert found.unassigned == ()


def test_the_config_wins_over_the_processes() -> None:
    assert assign_gpus(claims(PART), READING).assigned == (Assignment(PART, "r", "config"),)


def test_a_gpu_that_the_config_names_in_two_ways_is_assigned_once() -> None:
    assert assign_gpus(claims(ONE, 0), READING).assigned == (Assignment(ONE, "r", "config"),)


@pytest.mark.parametrize(
    ("reading", "place", "why"),
    [
        (READING, OTHER_PLACE, "nothing listens there"),
        (READING, "http://127.0.0.1:8002", "its processes were not looked for yet"),
        (
            replace(READING, processes=(processes(ONE, (99, 40)), processes(TWO))),
            HERE,
            "none of its processes is on a GPU of this machine",
        ),
        (
            replace(READING, processes=(GpuProcesses(gpu=ONE, unknown="the driver lists none: no"),)),
            OTHER_PLACE,
            "the driver lists none: no",
        ),
    ],
)
def test_a_replica_whose_gpus_nobody_knows_has_none_and_the_reason_is_told(
    reading: GpuReading, place: ServerPlace, why: str
) -> None:
    found = assign_gpus(claims(place=place), reading)
    assert found.assigned == ()
    assert found.unassigned == (Unassigned("r", why),)


def test_a_replica_on_the_cpu_and_a_machine_without_a_driver_have_nothing_to_tell() -> None:
    on_cpu = (GpuClaim(replica="r", place=HERE, on_cpu=True),)
    assert assign_gpus(on_cpu, READING) == GpuAssignments()
    absent = GpuReading(taken_at=1.0, duration_seconds=0.0, driver_absent=True)
    assert assign_gpus((*claims(), *claims(ONE)), absent) == GpuAssignments()


def test_a_driver_that_fails_as_a_whole_says_of_no_gpu_that_it_is_not_here() -> None:
    failed = GpuReading(
        taken_at=1.0,
        duration_seconds=0.0,
        failures=(GpuFailure(None, GpuFailureReason.TIMEOUT, "no answer"),),
    )
    assert assign_gpus(claims(ONE), failed).not_here == ()


def test_what_others_use_is_what_the_replicas_own_processes_do_not() -> None:
    assert assign_gpus(claims(), READING).others == (
        OthersMemory(ONE, "r", 100, 600),
        OthersMemory(TWO, "r", 100, 600),
    )
    assert assign_gpus(claims(ONE), READING).others == (OthersMemory(ONE, "r", 100, 600),)


@pytest.mark.parametrize(
    "listed",
    [
        processes(ONE, (21, None), (99, 40)),
        processes(ONE, (21, 600), used_bytes=None),
        processes(ONE, (21, 701)),
        processes(ONE, (99, 40)),
        GpuProcesses(gpu=ONE, used_bytes=700, unknown="no"),
    ],
)
def test_what_others_use_is_absent_where_the_replicas_own_bytes_are_not_known_or_cannot_be(
    listed: GpuProcesses,
) -> None:
    assert assign_gpus(claims(ONE), replace(READING, processes=(listed,))).others == ()


def test_two_replicas_on_one_gpu_each_have_the_other_among_the_others() -> None:
    reading = replace(
        READING,
        processes=(processes(ONE, (21, 400), (31, 250)),),
        servers=(
            ServerProcesses(place=HERE, pids=frozenset({21})),
            ServerProcesses(place=OTHER_PLACE, pids=frozenset({31})),
        ),
    )
    both = (*claims(), *claims(replica="s", place=OTHER_PLACE))
    assert assign_gpus(both, reading).others == (
        OthersMemory(ONE, "r", 300, 400),
        OthersMemory(ONE, "s", 450, 250),
    )
