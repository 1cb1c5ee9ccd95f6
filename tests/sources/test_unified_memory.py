"""GPUs whose only memory is the host's: its figures, and never those of the host for a GPU with memory of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvheadroom.capacity.gpus import GpuSnapshot
from kvheadroom.sources.host_memory import HostMemory, read_host_memory
from kvheadroom.sources.nvml_codes import NvmlCode
from kvheadroom.sources.nvml_device import SHARES_HOST_MEMORY
from tests.doubles.fake_nvml import MEMORY_V2, FakeDriver, FakeGpu
from tests.sources.gpu_readings import FIRST, failures, only_failure

# As a DGX Spark's owner published it.
MEMINFO = """\
MemTotal:       127600748 kB
MemFree:         3101212 kB
MemAvailable:   118566368 kB
Buffers:          104712 kB
HugePages_Total:       0
"""
GB10 = FakeGpu("GPU-10101010", total=8_000_000_003, reserved=5, used=7, name="NVIDIA GB10")
NOT_SUPPORTED: dict[tuple[str, str], int] = {(MEMORY_V2, GB10.uuid): NvmlCode.NOT_SUPPORTED}


def of_the_host(gpu: FakeGpu) -> GpuSnapshot:
    return GpuSnapshot(
        gpu=gpu.uuid,
        name=gpu.name,
        index=0,
        total_bytes=127_600_748 * 1024,
        reserved_bytes=None,
        used_bytes=(127_600_748 - 118_566_368) * 1024,
        free_bytes=118_566_368 * 1024,
        accounting="host",
    )


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)"])
def test_a_gpu_without_memory_of_its_own_has_the_hosts(driver: FakeDriver, name: str) -> None:
    gpu = replace(GB10, name=name)
    driver.gpus, driver.meminfo, driver.faults = [gpu], MEMINFO, NOT_SUPPORTED
    with driver.source() as source:
        reading = source.read()
        assert (reading.gpus, reading.failures) == ((of_the_host(gpu),), ())
        driver.meminfo = MEMINFO.replace("118566368", "100000000")
        assert source.read().gpus[0].free_bytes == 100_000_000 * 1024


def test_a_total_that_such_a_gpu_makes_up_is_not_believed(driver: FakeDriver) -> None:
    driver.gpus, driver.meminfo = [GB10], MEMINFO
    with driver.source() as source:
        assert source.read().gpus == (of_the_host(GB10),)


def test_a_gpu_with_memory_of_its_own_never_has_the_hosts(driver: FakeDriver) -> None:
    driver.gpus, driver.meminfo = [FIRST], MEMINFO
    driver.faults = {(MEMORY_V2, FIRST.uuid): NvmlCode.NOT_SUPPORTED}
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == ()
    assert failures(reading) == [(FIRST.uuid, "not_supported")]
    assert "nothing is said in its place" in only_failure(reading).detail


@pytest.mark.parametrize("code", [NvmlCode.GPU_IS_LOST, NvmlCode.UNKNOWN, NvmlCode.NO_PERMISSION])
def test_such_a_gpu_that_fails_otherwise_has_failed(driver: FakeDriver, code: NvmlCode) -> None:
    driver.gpus, driver.meminfo = [GB10], MEMINFO
    with driver.source() as source:
        source.read()
        driver.faults = {(MEMORY_V2, GB10.uuid): code, ("nvmlDeviceGetMemoryInfo", GB10.uuid): code}
        reading = source.read()
    assert reading.gpus == ()
    assert [failure.gpu for failure in reading.failures] == [GB10.uuid]


@pytest.mark.parametrize(
    "meminfo",
    [
        None,
        "",
        "MemTotal:       127600748 kB\n",
        "MemTotal: 5 kB\nMemAvailable: 6 kB\n",
        "MemTotal: 0 kB\nMemAvailable: 0 kB\n",
    ],
)
def test_a_host_that_tells_no_memory_that_can_be_is_a_failure(
    driver: FakeDriver, meminfo: str | None
) -> None:
    driver.gpus, driver.meminfo, driver.faults = [GB10], meminfo, NOT_SUPPORTED
    with driver.source() as source:
        reading = source.read()
    assert failures(reading) == [(GB10.uuid, "not_supported")]
    assert "its memory is the host's, which cannot be read" in only_failure(reading).detail


def test_this_machines_own_memory_can_be_read() -> None:
    host = read_host_memory(Path("/proc"))
    assert isinstance(host, HostMemory)
    assert 2**28 < host.available_bytes < host.total_bytes


@pytest.mark.parametrize(
    "name", ["NVIDIA H100", "NVIDIA GB200", "NVIDIA GH200 480GB", "NVIDIA GB100", "Orinoco"]
)
def test_no_other_name_is_taken_for_one_of_these(name: str) -> None:
    assert SHARES_HOST_MEMORY.search(name) is None
