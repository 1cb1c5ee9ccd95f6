"""MIG devices, each by its own handle, from a fake driver that denies the whole GPU's memory."""

from dataclasses import replace

import pytest

from kvheadroom.capacity.gpus import GpuFailureReason, GpuSnapshot
from kvheadroom.sources.nvml_codes import NvmlCode
from tests.doubles.fake_nvml import MEMORY_V1, MEMORY_V2, FakeDriver, FakeMig
from tests.sources.gpu_readings import FIRST, SECOND, by_v2, failures, only_failure, read_until_mended

SMALL = FakeMig("MIG-aaaaaaaa-1", 0, 9, 0, total=18_790_481_923, reserved=11_534_337, used=1_000_000_007)
LARGE = FakeMig("MIG-bbbbbbbb-2", 4, 2, 1, total=75_161_927_681, reserved=46_137_345, used=70_000_000_001)
DIVIDED = replace(FIRST, mig=1, migs=(SMALL, LARGE))
MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"


def part(mig: FakeMig) -> GpuSnapshot:
    return GpuSnapshot(
        gpu=mig.uuid,
        name=mig.name,
        index=0,
        total_bytes=mig.total,
        reserved_bytes=mig.reserved,
        used_bytes=mig.used,
        free_bytes=mig.total - mig.reserved - mig.used,
        accounting="v2",
        parent=FIRST.uuid,
        gpu_instance=mig.gpu_instance,
        compute_instance=mig.compute_instance,
    )


def test_each_mig_device_gives_its_own_bytes_and_the_whole_gpus_are_never_asked_for(
    driver: FakeDriver,
) -> None:
    driver.gpus = [DIVIDED, SECOND]
    with driver.source() as source:
        reading = source.read()
        assert reading.gpus == (part(SMALL), part(LARGE), by_v2(SECOND, 1))
        assert reading.failures == ()
        assert reading.divided == (FIRST.uuid,)
        calls = driver.new_calls()
        driver.gpus = [replace(DIVIDED, migs=(replace(SMALL, used=5), LARGE)), SECOND]
        assert source.read().gpus[0] == part(replace(SMALL, used=5))
    assert not {(MEMORY_V1, FIRST.uuid), (MEMORY_V2, FIRST.uuid)} & set(calls)


def test_mig_mode_that_is_switched_while_we_run_is_seen_at_the_next_reading(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, mig=0)]
    with driver.source() as source:
        reading = source.read()
        assert (reading.gpus, reading.divided) == ((by_v2(FIRST, 0),), ())
        driver.gpus = [DIVIDED]
        reading = source.read()
        assert (reading.gpus, reading.divided) == ((part(SMALL), part(LARGE)), (FIRST.uuid,))
        driver.gpus = [replace(FIRST, mig=0)]
        reading = source.read()
        assert (reading.gpus, reading.divided) == ((by_v2(FIRST, 0),), ())


def test_a_mig_device_that_is_destroyed_goes_and_one_that_is_made_comes(driver: FakeDriver) -> None:
    driver.gpus = [replace(DIVIDED, migs=(SMALL,))]
    with driver.source() as source:
        assert source.read().gpus == (part(SMALL),)
        driver.gpus = [replace(DIVIDED, migs=(LARGE,))]
        reading = source.read()
    assert (reading.gpus, reading.failures) == ((part(LARGE),), ())


def test_a_gpu_in_mig_mode_without_mig_devices_is_told_as_divided_and_has_no_bytes(
    driver: FakeDriver,
) -> None:
    driver.gpus = [replace(DIVIDED, migs=()), SECOND]
    with driver.source() as source:
        reading = source.read()
    assert (reading.gpus, reading.failures) == ((by_v2(SECOND, 1),), ())
    assert reading.divided == (FIRST.uuid,)


@pytest.mark.parametrize("code", [NvmlCode.NOT_FOUND, NvmlCode.NO_PERMISSION, NvmlCode.INVALID_ARGUMENT])
def test_slots_that_are_empty_or_somebody_elses_are_no_failure(driver: FakeDriver, code: NvmlCode) -> None:
    driver.gpus = [replace(DIVIDED, migs=(LARGE,)), SECOND]
    driver.faults = {(MIG_HANDLE, FIRST.uuid): code}
    with driver.source() as source:
        assert source.read().failures == ()
        driver.faults = {}
        assert source.read().gpus == (part(LARGE), by_v2(SECOND, 1))


def test_one_mig_device_that_fails_is_its_own_failure(driver: FakeDriver) -> None:
    driver.gpus = [DIVIDED, SECOND]
    driver.faults = {(MEMORY_V2, SMALL.uuid): NvmlCode.NO_PERMISSION}
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == (part(LARGE), by_v2(SECOND, 1))
    assert failures(reading) == [(SMALL.uuid, "no_permission")]
    assert f"MIG device {SMALL.uuid} of GPU 0 ({FIRST.uuid})" in only_failure(reading).detail


def test_numbers_of_a_mig_device_that_cannot_be_are_its_failure(driver: FakeDriver) -> None:
    driver.gpus = [replace(DIVIDED, migs=(replace(SMALL, used=2**64 - 1), LARGE))]
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == (part(LARGE),)
    assert failures(reading) == [(SMALL.uuid, "bad_answer")]


def test_mig_devices_of_a_lost_gpu_fail_under_their_own_names_until_it_is_back(driver: FakeDriver) -> None:
    driver.gpus = [DIVIDED, SECOND]
    lost = [(SMALL.uuid, "lost"), (LARGE.uuid, "lost")]
    with driver.source() as source:
        source.read()
        driver.faults = {("*", FIRST.uuid): NvmlCode.GPU_IS_LOST}
        reading = source.read()
        assert reading.gpus == (by_v2(SECOND, 1),)
        assert failures(reading) == lost
        assert failures(read_until_mended(source, reads_before=2)) == lost
        driver.faults = {}
        assert read_until_mended(source, reads_before=1).gpus == (part(SMALL), part(LARGE), by_v2(SECOND, 1))


def test_a_mig_device_that_hangs_costs_its_own_gpu_and_no_other(driver: FakeDriver) -> None:
    driver.gpus = [DIVIDED, SECOND]
    with driver.source() as source:
        source.read()
        driver.delays = {(MEMORY_V2, LARGE.uuid): 60_000}
        reading = source.read()
    assert reading.gpus == (by_v2(SECOND, 1),)
    assert failures(reading) == [(SMALL.uuid, "timeout"), (LARGE.uuid, "timeout")]


def test_a_driver_that_has_no_name_for_mig_devices_gives_them_the_whole_gpus(driver: FakeDriver) -> None:
    driver.gpus = [DIVIDED]
    driver.faults = {("nvmlDeviceGetName", SMALL.uuid): NvmlCode.NOT_SUPPORTED}
    with driver.source() as source:
        assert [gpu.name for gpu in source.read().gpus] == [FIRST.name, LARGE.name]


@pytest.mark.parametrize("code", [NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.UNKNOWN])
def test_a_divided_gpu_whose_mig_devices_cannot_be_counted_is_a_failure_and_never_a_whole_gpu(
    driver: FakeDriver, code: NvmlCode
) -> None:
    driver.gpus = [DIVIDED]
    driver.faults = {("nvmlDeviceGetMaxMigDeviceCount", FIRST.uuid): code}
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == ()
    assert [failure.gpu for failure in reading.failures] == [FIRST.uuid]
    assert only_failure(reading).reason is GpuFailureReason.UNKNOWN
