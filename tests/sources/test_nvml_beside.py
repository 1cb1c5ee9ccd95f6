"""What is read beside the memory: Xid events, processes, GPUs that come later."""

import time
from dataclasses import replace

import pytest

from kvheadroom.capacity.gpus import GpuProcess, GpuProcesses, GpuReading, XidCount
from kvheadroom.sources.nvml import PROCESSES_AFTER_READS
from kvheadroom.sources.nvml_codes import MEND_AFTER_READS, NvmlCode
from kvheadroom.sources.nvml_events import MOST_AT_ONCE
from tests.doubles.fake_nvml import MEMORY_V2, PROCESSES, FakeDriver, FakeMig, SourceProcess, build_library
from tests.sources.gpu_readings import FIRST, SECOND, by_v1, by_v2, failures, read_until_mended

REGISTER, WAIT, CREATE = "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2", "nvmlEventSetCreate"
SHUTDOWN, FREE = "nvmlShutdown", "nvmlEventSetFree"
PART = FakeMig("MIG-aaaaaaaa-1", 0, 9, 0, total=18_790_481_923, reserved=7, used=11, processes=((81, 5),))
BOTH = (FIRST.uuid, SECOND.uuid)


def test_xid_events_are_counted_by_gpu_and_kind_and_each_once(driver: FakeDriver) -> None:
    with driver.source() as source:
        reading = source.read()
        assert (reading.xids, reading.xid_watched) == ((), BOTH)
        driver.xids += [(FIRST.uuid, 79, -1, -1), (SECOND.uuid, 13, -1, -1), (FIRST.uuid, 13, -1, -1)]
        driver.xids += [(FIRST.uuid, 13, -1, -1)]
        counted = (XidCount(FIRST.uuid, 13, 2), XidCount(FIRST.uuid, 79, 1), XidCount(SECOND.uuid, 13, 1))
        assert source.read().xids == counted
        assert source.read().xids == counted


def test_events_of_before_the_start_are_not_counted(driver: FakeDriver) -> None:
    driver.xids = [(FIRST.uuid, 79, -1, -1)]
    with driver.source() as source:
        assert source.read().xids == ()
        assert source.read().xids == ()


def test_an_event_of_a_mig_device_is_counted_under_it_and_one_of_all_under_the_whole_gpu(
    driver: FakeDriver,
) -> None:
    driver.gpus = [replace(FIRST, mig=1, migs=(PART,))]
    with driver.source() as source:
        source.read()
        driver.xids = [(FIRST.uuid, 43, 9, 0), (FIRST.uuid, 43, 8, 0), (FIRST.uuid, 79, -1, -1)]
        assert source.read().xids == (
            XidCount(FIRST.uuid, 43, 1),
            XidCount(FIRST.uuid, 79, 1),
            XidCount(PART.uuid, 43, 1),
        )


def test_a_flood_of_events_is_counted_over_several_readings(driver: FakeDriver) -> None:
    driver.gpus = [FIRST]
    with driver.source() as source:
        source.read()
        driver.xids = [(FIRST.uuid, 13, -1, -1)] * 60
        assert source.read().xids == (XidCount(FIRST.uuid, 13, 60),)
    assert MOST_AT_ONCE > 60
    waits = [function for function, _ in driver.new_calls(beside=True)].count(WAIT)
    # One for each event, and one for each reading that finds no more.
    assert waits == 62


@pytest.mark.parametrize(("function", "watched"), [(REGISTER, (SECOND.uuid,)), (CREATE, ()), (WAIT, ())])
@pytest.mark.parametrize("code", [NvmlCode.NOT_SUPPORTED, NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.UNKNOWN])
def test_a_driver_that_tells_no_events_is_read_all_the_same_and_nothing_is_said_of_them(
    driver: FakeDriver, function: str, watched: tuple[str, ...], code: NvmlCode
) -> None:
    driver.faults = {(function, FIRST.uuid if function == REGISTER else "*"): code}
    with driver.source() as source:
        reading = source.read()
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
        assert reading.failures == ()
        assert (reading.xids, reading.xid_watched) == ((), watched)


def test_a_wait_for_events_that_hangs_holds_no_reading_up_and_nvml_is_not_closed_under_it(
    driver: FakeDriver,
) -> None:
    with driver.source() as source:
        assert source.read().xid_watched == BOTH
        driver.delays = {(WAIT, "*"): 60_000}
        started = time.monotonic()
        for _ in range(3):
            reading = source.read()
            assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
            assert reading.xid_watched == ()
        assert time.monotonic() - started < 1.0
        driver.faults = {(MEMORY_V2, FIRST.uuid): NvmlCode.GPU_IS_LOST}
        for _ in range(2 * MEND_AFTER_READS):
            source.read()
    functions = [function for function, _ in driver.new_calls(beside=True)]
    assert functions.count(WAIT) == 2
    assert SHUTDOWN not in functions


def test_an_event_that_is_told_late_is_counted_then(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.xids = [(SECOND.uuid, 48, -1, -1)]
        driver.delays = {(WAIT, "*"): 300}
        assert source.read().xids == ()
        driver.delays = {}
        time.sleep(0.8)
        assert source.read().xids == (XidCount(SECOND.uuid, 48, 1),)


def test_counts_stay_when_nvml_is_opened_anew_and_events_are_heard_again(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.xids = [(FIRST.uuid, 79, -1, -1)]
        driver.faults = {(MEMORY_V2, FIRST.uuid): NvmlCode.GPU_IS_LOST}
        source.read()
        driver.faults = {}
        reading = read_until_mended(source, reads_before=2)
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
        assert reading.xids == (XidCount(FIRST.uuid, 79, 1),)
        assert reading.xid_watched == BOTH
        driver.xids += [(FIRST.uuid, 79, -1, -1)]
        assert source.read().xids == (XidCount(FIRST.uuid, 79, 2),)
    assert FREE in [function for function, _ in driver.new_calls(beside=True)]


def listed(reading: GpuReading) -> dict[str, tuple[GpuProcess, ...]]:
    assert all(one.unknown is None for one in reading.processes)
    return {one.gpu: one.processes for one in reading.processes}


def test_processes_are_listed_at_the_first_reading_and_every_tenth(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, processes=((4242, 110_000_000_003), (7, 1))), SECOND]
    before = (GpuProcess(4242, 110_000_000_003), GpuProcess(7, 1))
    with driver.source() as source:
        reading = source.read()
        assert listed(reading) == {FIRST.uuid: before, SECOND.uuid: ()}
        assert [one.used_bytes for one in reading.processes] == [FIRST.used, SECOND.used]
        assert reading.processes_taken_at == reading.taken_at
        driver.gpus = [replace(FIRST, used=9, processes=((4242, 5),)), SECOND]
        driver.new_calls()
        for _ in range(PROCESSES_AFTER_READS - 1):
            assert listed(source.read())[FIRST.uuid] == before
        assert PROCESSES not in [function for function, _ in driver.new_calls(beside=True)]
        reading = source.read()
        assert listed(reading)[FIRST.uuid] == (GpuProcess(4242, 5),)
        assert reading.processes[0].used_bytes == 9
        assert reading.processes_taken_at == reading.taken_at


def test_the_processes_of_a_mig_device_are_its_own(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, mig=1, migs=(PART,), processes=((99, 3),))]
    with driver.source() as source:
        assert listed(source.read()) == {PART.uuid: (GpuProcess(81, 5),)}


def test_bytes_of_a_process_that_are_not_told_stay_absent(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, processes=((4242, None), (7, 2**63 - 1), (8, -2)))]
    with driver.source() as source:
        assert listed(source.read()) == {
            FIRST.uuid: (GpuProcess(4242, None), GpuProcess(7, 2**63 - 1), GpuProcess(8, None)),
        }


def test_by_v1_the_used_bytes_of_the_time_hold_more_than_processes_and_are_absent(driver: FakeDriver) -> None:
    driver.faults = {(MEMORY_V2, "*"): NvmlCode.FUNCTION_NOT_FOUND}
    with driver.source() as source:
        assert [one.used_bytes for one in source.read().processes] == [None, None]


@pytest.mark.parametrize(
    "code", [NvmlCode.NOT_SUPPORTED, NvmlCode.NO_PERMISSION, NvmlCode.FUNCTION_NOT_FOUND]
)
def test_a_driver_that_lists_no_processes_is_told_and_costs_no_memory(
    driver: FakeDriver, code: NvmlCode
) -> None:
    driver.faults = {(PROCESSES, FIRST.uuid): code}
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
    assert [one.unknown is None for one in reading.processes] == [False, True]
    assert reading.processes[0].unknown is not None
    assert f"(NVML {code.value})" in reading.processes[0].unknown


def test_a_list_of_processes_that_hangs_is_that_gpus_timeout(driver: FakeDriver) -> None:
    driver.delays = {(PROCESSES, FIRST.uuid): 60_000}
    with driver.source() as source:
        reading = source.read()
        assert failures(reading) == [(FIRST.uuid, "timeout")]
        assert reading.processes == (GpuProcesses(gpu=SECOND.uuid, used_bytes=SECOND.used),)


def test_a_gpu_that_fails_keeps_its_processes_until_it_is_well_and_they_are_listed_anew(
    driver: FakeDriver,
) -> None:
    well = replace(FIRST, processes=((4242, 5),))
    driver.gpus = [well, SECOND]
    with driver.source() as source:
        source.read()
        driver.faults = {(MEMORY_V2, FIRST.uuid): NvmlCode.NO_PERMISSION}
        for _ in range(PROCESSES_AFTER_READS):
            reading = source.read()
        assert failures(reading) == [(FIRST.uuid, "no_permission")]
        assert reading.processes_taken_at == reading.taken_at
        (kept,) = (one for one in reading.processes if one.gpu == FIRST.uuid)
        assert kept == GpuProcesses(gpu=FIRST.uuid, processes=(GpuProcess(4242, 5),))
        driver.faults = {}
        driver.gpus = [replace(well, processes=()), SECOND]
        for _ in range(PROCESSES_AFTER_READS):
            reading = source.read()
        assert listed(reading)[FIRST.uuid] == ()


def test_a_mig_device_that_is_gone_has_no_processes(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, mig=1, migs=(PART,))]
    with driver.source() as source:
        source.read()
        driver.gpus = [replace(FIRST, mig=1)]
        for _ in range(PROCESSES_AFTER_READS):
            reading = source.read()
        assert reading.processes == ()


def test_a_driver_that_has_none_of_the_newer_functions_gives_its_memory_all_the_same(
    driver: FakeDriver, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("oldest_driver")
    driver.install(build_library(folder, "WITHOUT_MEMORY_V2", "WITHOUT_NEWER"))
    with driver.source() as source:
        for _ in range(2):
            reading = source.read()
            assert reading.gpus == (by_v1(FIRST, 0), by_v1(SECOND, 1))
            assert reading.failures == ()
    assert (reading.divided, reading.xids, reading.xid_watched) == ((), (), ())
    assert all("Function Not Found" in (one.unknown or "") for one in reading.processes)
    assert len(reading.processes) == 2


def test_under_wsl_memory_is_read_by_v1_and_what_is_not_told_stays_absent(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, processes=((4242, None),))]
    driver.faults = {
        (MEMORY_V2, FIRST.uuid): NvmlCode.UNKNOWN,
        (REGISTER, FIRST.uuid): NvmlCode.NOT_SUPPORTED,
        ("nvmlDeviceGetMigMode", FIRST.uuid): NvmlCode.NOT_SUPPORTED,
    }
    with driver.source() as source:
        for _ in range(2):
            reading = source.read()
            assert (reading.gpus, reading.failures) == ((by_v1(FIRST, 0),), ())
    assert reading.processes == (GpuProcesses(gpu=FIRST.uuid, processes=(GpuProcess(4242, None),)),)
    assert reading.xid_watched == ()


THIRD = replace(FIRST, uuid="GPU-33333333", used=5)


def until_looked(source: SourceProcess) -> GpuReading:
    return read_until_mended(source, reads_before=0)


def test_a_gpu_that_is_plugged_in_is_seen_within_a_minute_and_all_others_go_on(driver: FakeDriver) -> None:
    driver.listed = ("0000:17:00.0", "0000:3d:00.0")
    with driver.source() as source:
        for _ in range(2 * MEND_AFTER_READS):
            source.read()
        assert SHUTDOWN not in [function for function, _ in driver.new_calls()]
        driver.gpus = [FIRST, SECOND, THIRD]
        driver.listed = ("0000:17:00.0", "0000:3d:00.0", "0000:5f:00.0")
        reading = until_looked(source)
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1), by_v2(THIRD, 2))
        assert reading.failures == ()


def test_a_gpu_that_is_listed_and_never_given_to_us_is_looked_for_once(driver: FakeDriver) -> None:
    driver.listed = ("0000:17:00.0", "0000:3d:00.0")
    with driver.source() as source:
        source.read()
        driver.listed = (*driver.listed, "0000:5f:00.0")
        for _ in range(4 * MEND_AFTER_READS):
            source.read()
    assert [function for function, _ in driver.new_calls()].count(SHUTDOWN) == 1


def test_the_index_of_a_gpu_is_that_of_when_it_was_first_listed(driver: FakeDriver) -> None:
    driver.gpus = [FIRST, SECOND, THIRD]
    with driver.source() as source:
        assert source.read().first_listed == ((0, FIRST.uuid), (1, SECOND.uuid), (2, THIRD.uuid))
        driver.gpus = [FIRST, THIRD]
        source.read()
        reading = read_until_mended(source, reads_before=2)
        assert by_v2(THIRD, 1) in reading.gpus
        assert reading.first_listed == ((0, FIRST.uuid), (1, SECOND.uuid), (2, THIRD.uuid))
        fourth = replace(FIRST, uuid="GPU-44444444")
        driver.gpus = [FIRST, fourth, THIRD]
        reading = read_until_mended(source, reads_before=1)
        assert (1, fourth.uuid) in reading.first_listed
        assert (1, SECOND.uuid) in reading.first_listed
