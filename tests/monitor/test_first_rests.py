"""What a server held on a GPU when that was first known stays known until the server restarts, whatever the driver does meanwhile."""

from dataclasses import replace

from kvheadroom.capacity.fleet import GpuRest, ReplicaAssessment, ReplicaState
from kvheadroom.capacity.gpu_assignment import GpuClaim
from kvheadroom.capacity.gpus import (
    GpuFailure,
    GpuFailureReason,
    GpuProcess,
    GpuProcesses,
    GpuReading,
    ServerPlace,
    ServerProcesses,
)
from kvheadroom.capacity.memory_findings import Finding, memory_findings
from kvheadroom.monitor.board import Board
from tests.capacity.test_gpu_ledger import GPU as ROOMY
from tests.capacity.test_ledger import GIB
from tests.capacity.test_memory_findings import engine, held

GPU = replace(ROOMY, used_bytes=78 * GIB, free_bytes=GIB)
HERE = ServerPlace(url="http://r:8000")
SERVING = ReplicaAssessment(
    replica="r",
    url=HERE.url,
    interval_seconds=5.0,
    state=ReplicaState.SERVING,
    engines=(engine(),),
)


def reading(at: float, rest_bytes: int) -> GpuReading:
    """The driver's list of processes of that instant: the server, and another with 1 MiB."""
    own = held(SERVING.engines[0]) + rest_bytes
    return GpuReading(
        taken_at=at,
        duration_seconds=0.0,
        gpus=(GPU,),
        processes=(
            GpuProcesses(
                gpu=GPU.gpu, processes=(GpuProcess(7, own), GpuProcess(8, 2**20)), used_bytes=own + 2**20
            ),
        ),
        processes_taken_at=at,
        servers=(ServerProcesses(place=HERE, pids=frozenset({7})),),
    )


def board() -> Board:
    made = Board((SERVING,))
    made.claim_gpus((GpuClaim(replica="r", place=HERE),))
    return made


def first(on: Board) -> tuple[GpuRest, ...]:
    assert on.fleet.gpus is not None
    return on.fleet.gpus.first_rests


def test_the_first_is_kept_and_growth_is_told() -> None:
    seen = board()
    seen.publish_gpus(reading(1.0, GIB), 5.0)
    assert first(seen) == (GpuRest(GPU.gpu, "r", GIB),)
    assert memory_findings(seen.fleet) == ()
    seen.publish_gpus(reading(51.0, 4 * GIB), 5.0)
    assert first(seen) == (GpuRest(GPU.gpu, "r", GIB),)
    [found] = memory_findings(seen.fleet)
    assert (found.finding, found.bytes) == (Finding.GREW_SINCE_START, 3 * GIB)


def test_a_driver_that_does_not_answer_for_a_while_forgets_nothing() -> None:
    seen = board()
    seen.publish_gpus(reading(1.0, GIB), 5.0)
    failed = GpuFailure(None, GpuFailureReason.TIMEOUT, "no answer")
    seen.publish_gpus(GpuReading(taken_at=6.0, duration_seconds=0.0, failures=(failed,)), 5.0)
    seen.publish_gpus(reading(11.0, 4 * GIB), 5.0)
    assert first(seen) == (GpuRest(GPU.gpu, "r", GIB),)


def test_a_restart_begins_anew_and_so_does_another_server_under_the_same_name() -> None:
    for changed in (replace(SERVING, restarts_total=1), replace(SERVING, url="http://elsewhere:8000")):
        seen = board()
        seen.publish_gpus(reading(1.0, 4 * GIB), 5.0)
        seen.publish(changed)
        seen.publish_gpus(reading(51.0, GIB), 5.0)
        assert first(seen) == (GpuRest(GPU.gpu, "r", GIB),)


def test_nothing_is_remembered_of_a_server_that_starts_or_went_away() -> None:
    starting = Board((replace(SERVING, state=ReplicaState.STARTING, engines=()),))
    starting.claim_gpus((GpuClaim(replica="r", place=HERE),))
    starting.publish_gpus(reading(1.0, GIB), 5.0)
    assert first(starting) == ()
    seen = board()
    seen.publish_gpus(reading(1.0, GIB), 5.0)
    seen.set_replicas((), ())
    seen.publish_gpus(reading(51.0, GIB), 5.0)
    assert first(seen) == ()


def test_between_two_lists_of_processes_nothing_is_looked_at_anew() -> None:
    seen = board()
    down = replace(SERVING, state=ReplicaState.DOWN)
    seen.publish(down)
    seen.publish_gpus(reading(1.0, GIB), 5.0)
    seen.publish(SERVING)
    # The same list, of when the server was down.
    seen.publish_gpus(replace(reading(1.0, GIB), taken_at=6.0), 5.0)
    assert first(seen) == ()
    seen.publish_gpus(reading(51.0, GIB), 5.0)
    assert first(seen) == (GpuRest(GPU.gpu, "r", GIB),)
