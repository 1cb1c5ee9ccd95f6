"""Which GPUs of other machines serve which replica, and who is believed where several know a GPU."""

import time
from dataclasses import replace

import pytest

from kvheadroom.capacity.fleet import FleetAssessment, withhold_stale
from kvheadroom.capacity.gpu_assignment import GpuClaim, assign_gpus
from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading, GpuSnapshot, ServerPlace
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.remote_gpus import (
    ExporterStatus,
    Pod,
    RemoteGpu,
    RemoteGpus,
    join_remote,
    known_elsewhere,
)
from kvheadroom.monitor.board import Board

NOW = 1000.0
A, B = "GPU-aaaaaaaa-1111", "GPU-bbbbbbbb-2222"
PART, OTHER_PART = "MIG-GPU-cccccccc-3333/3", "MIG-GPU-cccccccc-3333/13"
REFUSED = SourceFailure("dcgm_exporters[0]", FailureReason.REFUSED, "nothing listens there")
NO_DRIVER = GpuReading(taken_at=NOW, duration_seconds=0.0, driver_absent=True)


def remote(gpu: str, *pods: str, source: str = "dcgm_exporters[0]", used: int = 1) -> RemoteGpu:
    parent, _, instance = gpu.removeprefix("MIG-").partition("/")
    return RemoteGpu(
        gpu=gpu,
        source=source,
        name="NVIDIA H200",
        used_bytes=used,
        free_bytes=2,
        parent=parent if instance else None,
        gpu_instance=int(instance) if instance else None,
        pods=tuple(Pod(*pod.split("/")) for pod in pods),
    )


def exporter(*gpus: RemoteGpu, index: int = 0, taken_at: float | None = NOW) -> ExporterStatus:
    name = f"dcgm_exporters[{index}]"
    return ExporterStatus(
        source=name,
        url="http://node/metrics",
        interval_seconds=15.0,
        taken_at=taken_at,
        gpus=tuple(replace(gpu, source=name) for gpu in gpus),
    )


def claim(*gpus: str | int, replica: str = "r", pod: str | None = None) -> GpuClaim:
    return GpuClaim(replica=replica, place=ServerPlace(f"http://{replica}:8000"), gpus=gpus, pod=pod)


def local(*gpus: str, failing: str | None = None, divided: str | None = None) -> GpuReading:
    return GpuReading(
        taken_at=NOW,
        duration_seconds=0.0,
        gpus=tuple(
            GpuSnapshot(
                gpu=gpu,
                name="NVIDIA H200",
                index=index,
                total_bytes=10,
                reserved_bytes=1,
                used_bytes=8,
                free_bytes=1,
                accounting="v2",
            )
            for index, gpu in enumerate(gpus)
        ),
        failures=() if failing is None else (GpuFailure(failing, GpuFailureReason.LOST, "lost"),),
        divided=() if divided is None else (divided,),
        first_listed=tuple(enumerate(gpus)),
    )


def assigned(joined: RemoteGpus) -> list[tuple[str, str, str]]:
    return [(one.replica, one.gpu, one.by) for one in joined.runs.assigned]


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        (A, [A]),
        (A.upper(), [A]),
        ("GPU-aaaaaaaa", [A]),
        (PART, [PART]),
        # A compute instance has the memory of its GPU instance.
        (f"{PART}/0", [PART]),
        (f"{OTHER_PART}/1", [OTHER_PART]),
        ("MIG-GPU-cccccccc-3333/1", []),
        ("GPU-cccccccc-3333", []),
        ("MIG-12345678-9999", []),
        ("GPU-dddddddd", []),
    ],
)
def test_a_gpu_is_given_to_the_replica_that_names_it(named: str, gpus: list[str]) -> None:
    known = exporter(remote(A), remote(B), remote(PART), remote(OTHER_PART))
    joined = join_remote((claim(named),), (known,), NO_DRIVER)
    assert assigned(joined) == [("r", gpu, "config") for gpu in gpus]
    assert len(joined.runs.not_here) == 1 - len(gpus)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("GPU-cccccccc-3333", f"is divided into MIG devices; give one of them ({PART}, {OTHER_PART})"),
        ("MIG-12345678-9999", "there a MIG device is called MIG-<UUID of its GPU>/<its GPU instance>"),
        ("GPU-dddddddd", "is told of by no exporter of `dcgm_exporters`"),
        (0, "is an index, which says nothing of other machines' GPUs; give the UUID"),
    ],
)
def test_a_name_that_no_exporter_knows_is_told_once_all_have_answered(named: str | int, why: str) -> None:
    known = exporter(remote(A), remote(PART), remote(OTHER_PART))
    (missing,) = join_remote((claim(named),), (known,), NO_DRIVER).runs.not_here
    assert (missing.gpu, missing.replica) == (str(named), "r")
    assert missing.why.endswith(why)
    waiting = (known, exporter(index=1, taken_at=None))
    assert join_remote((claim(named),), waiting, NO_DRIVER).runs.not_here == ()
    assert join_remote((claim(named),), (), NO_DRIVER).runs.not_here == ()


def test_a_beginning_that_several_uuids_have_is_no_name() -> None:
    joined = join_remote((claim("GPU-aaaaaaaa"),), (exporter(remote(A), remote(A + "9")),), NO_DRIVER)
    assert assigned(joined) == []
    assert joined.runs.not_here[0].why == "is how the UUIDs of several GPUs begin; give the whole UUID"
    # A whole one that another one goes on from is that GPU.
    joined = join_remote((claim(A),), (exporter(remote(A), remote(A + "9")),), NO_DRIVER)
    assert assigned(joined) == [("r", A, "config")]


@pytest.mark.parametrize(
    ("pod", "gpus", "why"),
    [
        ("vllm/chat-0", [A, B], None),
        ("vllm/chat-*", None, "several pods are called vllm/chat-*: vllm/chat-0, vllm/chat-1"),
        ("vllm/chat-1", [B, PART], None),
        ("vllm/sea*", [OTHER_PART], None),
        ("vllm/chat", None, "no exporter tells of a GPU of the pod vllm/chat"),
        ("other/chat-0", None, "no exporter tells of a GPU of the pod other/chat-0"),
    ],
)
def test_a_replica_has_the_gpus_of_the_one_pod_that_is_named(
    pod: str, gpus: list[str] | None, why: str | None
) -> None:
    known = exporter(
        remote(A, "vllm/chat-0"),
        remote(B, "vllm/chat-0", "vllm/chat-1"),
        remote(PART, "vllm/chat-1"),
        remote(OTHER_PART, "vllm/search-7c9d-x2"),
    )
    joined = join_remote((claim(pod=pod),), (known,), NO_DRIVER)
    assert assigned(joined) == [("r", gpu, "pod") for gpu in gpus or ()]
    assert [one.why for one in joined.runs.unassigned] == ([] if why is None else [why])
    on_cpu = join_remote((replace(claim(pod=pod), on_cpu=True),), (known,), NO_DRIVER)
    assert (on_cpu.runs.assigned, on_cpu.runs.unassigned) == ((), ())
    # What the config says of a replica's GPUs is all that is said of it.
    assert assigned(join_remote((claim(A, pod=pod),), (known,), NO_DRIVER)) == [("r", A, "config")]


@pytest.mark.parametrize(
    "here",
    [local(A), local(failing=A), local(divided=A), replace(local(), first_listed=((1, A),))],
    ids=["read", "failing", "divided", "listed once, without a name now"],
)
def test_what_this_machines_driver_knows_itself_no_exporter_is_asked_for(here: GpuReading) -> None:
    joined = join_remote((claim(A),), (exporter(remote(A), remote(B)),), here)
    assert [gpu.gpu for gpu in joined.gpus] == [B]
    assert assigned(joined) == []


def test_the_parts_of_a_gpu_that_this_machine_divides_are_its_own_too() -> None:
    joined = join_remote((), (exporter(remote(PART), remote(B)),), local(divided="GPU-cccccccc-3333"))
    assert [gpu.gpu for gpu in joined.gpus] == [B]


def test_of_two_exporters_that_know_a_gpu_the_first_that_answers_is_believed() -> None:
    first, second = exporter(remote(A, used=7)), exporter(remote(A, used=9), index=1)
    for exporters, used in (
        ((first, second), 7),
        ((replace(first, failure=REFUSED), second), 9),
        ((replace(first, failure=REFUSED), replace(second, failure=REFUSED)), 7),
    ):
        joined = join_remote((), exporters, None)
        assert [gpu.used_bytes for gpu in joined.gpus] == [used]
        assert joined.exporters == exporters


def test_a_gpu_without_numbers_stays_its_replicas() -> None:
    failing = replace(exporter(), failures=(GpuFailure(A, GpuFailureReason.NOT_SUPPORTED, f"{A}: none"),))
    joined = join_remote((claim("GPU-aaaaaaaa"),), (failing,), None)
    assert assigned(joined) == [("r", A, "config")]
    assert [failure.gpu for failure in joined.failures] == [A]
    # An exporter that has numbers of it is believed.
    assert join_remote((), (failing, exporter(remote(A), index=1)), None).failures == ()


def test_this_machine_does_not_complain_of_what_an_exporter_knows() -> None:
    claims = (claim(A, replica="a"), claim("GPU-ffffffff", replica="f"), claim(replica="p", pod="v/p"))
    here = local(B)
    joined = join_remote(claims, (exporter(remote(A), remote(PART, "v/p")),), here)
    runs = known_elsewhere(assign_gpus(claims, here), joined)
    assert [one.gpu for one in runs.not_here] == ["GPU-ffffffff"]
    assert runs.unassigned == ()
    assert sorted(assigned(joined)) == [("a", A, "config"), ("p", PART, "pod")]


def test_the_numbers_of_an_exporter_that_is_silent_for_three_intervals_are_withheld_and_its_gpus_are_down() -> (
    None
):
    exporters = (replace(exporter(remote(A)), failure=REFUSED), exporter(remote(B), index=1))
    fleet = FleetAssessment((), remote_gpus=join_remote((claim(A),), exporters, None))
    still = withhold_stale(fleet, NOW + 44).remote_gpus
    assert [gpu.gpu for gpu in still.gpus] == [A, B]
    later = withhold_stale(
        replace(
            fleet,
            remote_gpus=replace(
                fleet.remote_gpus, exporters=(exporters[0], replace(exporters[1], taken_at=NOW + 40))
            ),
        ),
        NOW + 46,
    ).remote_gpus
    assert [gpu.gpu for gpu in later.gpus] == [B]
    assert [(one.gpu, str(one.reason), one.detail) for one in later.failures] == [
        (A, "exporter_down", f"{A}: dcgm_exporters[0] has given no numbers for 46 s")
    ]
    assert assigned(later) == [("r", A, "config")]


def test_a_share_of_the_replicas_shows_the_gpus_that_serve_them_alone() -> None:
    gone = replace(
        exporter(remote(A), remote(B)), failures=(GpuFailure(PART, GpuFailureReason.LOST, f"{PART}: gone"),)
    )
    claims = (claim(A), claim(PART, replica="p"))
    board = Board(())
    board.publish_exporters((gone,))
    for shard, gpus, failures in ((None, [A, B], [PART]), ("0/2", [A], [PART]), ("1/2", [], [])):
        board.set_replicas((), (), shard)
        board.claim_gpus(claims if shard != "1/2" else ())
        known = board.fleet.remote_gpus
        assert [gpu.gpu for gpu in known.gpus] == gpus
        assert [failure.gpu for failure in known.failures] == failures


def test_thousands_of_gpus_and_replicas_are_joined_while_nobody_waits() -> None:
    gpus = [f"GPU-{index:08x}-1234" for index in range(4000)]
    exporters = tuple(
        exporter(*(remote(gpu) for gpu in gpus[first : first + 8]), index=first)
        for first in range(0, len(gpus), 8)
    )
    claims = tuple(
        # A beginning, a whole one that is nowhere, a pod that is nowhere.
        claim(f"GPU-{index:08x}", f"GPU-ffff{index:04x}-9999", replica=str(index), pod="v/x")
        for index in range(5000)
    )
    started = time.monotonic()
    joined = join_remote(claims, exporters, NO_DRIVER)
    took = time.monotonic() - started
    assert len(joined.runs.assigned) == 4000
    assert len(joined.runs.not_here) == 6000
    assert took < 3
