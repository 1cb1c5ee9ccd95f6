"""Servers' processes are looked for when the GPUs' are listed, and a look that hangs holds no reading up."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvheadroom.capacity.gpus import GpuProcess, GpuProcesses, GpuReading, ServerPlace, ServerProcesses
from kvheadroom.sources.local_gpus import LocalGpus

URL = ServerPlace("http://127.0.0.1:8000")


class Outside:
    """A driver and a kernel under the test's hand."""

    def __init__(self) -> None:
        self.listed_at: float | None = 1.0
        self.places: tuple[ServerPlace, ...] = (URL,)
        self.looks: list[tuple[ServerPlace, ...]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fault: Exception | None = None
        self.gpus = LocalGpus(self.read, self.find, lambda: self.places, look_seconds=0.1)

    def read(self) -> GpuReading:
        on_gpus = (GpuProcess(11, 5), GpuProcess(12, None))
        processes = (GpuProcesses(gpu="GPU-1", processes=on_gpus), GpuProcesses(gpu="GPU-2", unknown="no"))
        return GpuReading(
            taken_at=5.0, duration_seconds=0.0, processes=processes, processes_taken_at=self.listed_at
        )

    def find(self, places: tuple[ServerPlace, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
        assert pids == {11, 12}
        self.looks.append(places)
        self.goes_on.wait(20)
        if self.fault is not None:
            raise self.fault
        return tuple(ServerProcesses(place=place, pids=frozenset({len(self.looks)})) for place in places)


@pytest.fixture
def outside() -> Iterator[Outside]:
    outside = Outside()
    yield outside
    outside.goes_on.set()


def test_processes_are_looked_for_once_for_each_list_and_each_set_of_servers(outside: Outside) -> None:
    for _ in range(3):
        (server,) = outside.gpus.read().servers
        assert server == ServerProcesses(place=URL, pids=frozenset({1}))
    assert outside.looks == [(URL,)]
    outside.listed_at = 2.0
    (server,) = outside.gpus.read().servers
    assert server.pids == {2}
    outside.places = (URL, ServerPlace("http://127.0.0.1:8001"))
    assert [server.place for server in outside.gpus.read().servers] == list(outside.places)
    assert len(outside.looks) == 3


def test_nothing_is_looked_for_where_there_is_no_gpu_or_no_server_on_one(outside: Outside) -> None:
    outside.listed_at = None
    assert outside.gpus.read().servers == ()
    outside.listed_at, outside.places = 1.0, ()
    assert outside.gpus.read().servers == ()
    assert outside.looks == []


def test_a_look_that_hangs_is_told_and_no_second_one_is_started(outside: Outside) -> None:
    outside.goes_on.clear()
    started = time.monotonic()
    for listed_at in (1.0, 2.0, 3.0):
        outside.listed_at = listed_at
        (server,) = outside.gpus.read().servers
        assert server.pids == set()
        assert server.unknown == "the kernel did not tell of its processes within 0.1 s"
    assert time.monotonic() - started < 1.0
    assert len(outside.looks) == 1
    outside.goes_on.set()
    for _ in range(100):
        outside.listed_at = (outside.listed_at or 0.0) + 1.0
        (server,) = outside.gpus.read().servers
        if server.unknown is None:
            break
        time.sleep(0.01)
    assert server.pids


def test_a_fault_of_ours_is_told_and_costs_no_reading(outside: Outside) -> None:
    outside.fault = ZeroDivisionError("a bug")
    (server,) = outside.gpus.read().servers
    assert server.unknown == "a fault of kvheadroom: ZeroDivisionError('a bug')"
