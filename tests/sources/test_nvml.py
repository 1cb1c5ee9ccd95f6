"""GPU memory through NVIDIA's unmodified bindings, from a fake driver library that fails on demand."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships no types
import pytest

from kvheadroom.capacity.gpus import GpuFailureReason
from kvheadroom.sources.nvml import NvmlSource
from kvheadroom.sources.nvml_codes import MEND_AFTER_READS, NvmlCode
from tests.doubles.fake_nvml import (
    ANY,
    MEMORY_V1,
    MEMORY_V2,
    FakeDriver,
    FakeGpu,
    build_library,
)
from tests.sources.gpu_readings import (
    FIRST,
    SECOND,
    by_v1,
    by_v2,
    failures,
    only_failure,
    read_until_mended,
)

EIGHT = [replace(FIRST, uuid=f"GPU-{index}", used=1_000_000_007 * (index + 1)) for index in range(8)]
MIG_CAPABLE = replace(FIRST, mig=0)
INIT, SHUTDOWN = "nvmlInitWithFlags", "nvmlShutdown"
HANDLE, UUID, NAME = "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetName"
MIG_MODE = "nvmlDeviceGetMigMode"


@pytest.fixture(scope="session")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("old_driver"), "WITHOUT_MEMORY_V2")


def test_every_gpu_gives_its_bytes_and_used_excludes_what_is_reserved(driver: FakeDriver) -> None:
    before = time.time()
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
    assert reading.failures == ()
    assert not reading.driver_absent
    assert before <= reading.taken_at <= time.time()
    for gpu in reading.gpus:
        assert gpu.reserved_bytes is not None
        assert gpu.reserved_bytes + gpu.used_bytes + gpu.free_bytes == gpu.total_bytes


def test_the_bytes_are_those_of_now(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.gpus = [replace(FIRST, used=77_000_000_001), SECOND]
        assert source.read().gpus == (by_v2(driver.gpus[0], 0), by_v2(SECOND, 1))


def test_a_driver_without_the_v2_call_is_read_by_v1_where_used_contains_what_is_reserved(
    driver: FakeDriver, old_library: Path
) -> None:
    driver.install(old_library)
    with driver.source() as source:
        assert source.read().gpus == (by_v1(FIRST, 0), by_v1(SECOND, 1))
        driver.new_calls()
        source.read()
    assert driver.new_calls() == [(MEMORY_V1, FIRST.uuid), (MEMORY_V1, SECOND.uuid)]


@pytest.mark.parametrize("code", [NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.ARGUMENT_VERSION_MISMATCH])
def test_a_driver_that_refuses_v2_is_asked_by_v1_from_then_on(driver: FakeDriver, code: NvmlCode) -> None:
    driver.faults = {(MEMORY_V2, ANY): code}
    with driver.source() as source:
        assert source.read().gpus == (by_v1(FIRST, 0), by_v1(SECOND, 1))
        driver.new_calls()
        driver.faults = {}
        assert source.read().gpus == (by_v1(FIRST, 0), by_v1(SECOND, 1))
    assert driver.new_calls() == [(MEMORY_V1, FIRST.uuid), (MEMORY_V1, SECOND.uuid)]


def test_an_unknown_error_of_the_first_v2_call_leads_to_v1_as_under_wsl(driver: FakeDriver) -> None:
    driver.faults = {(MEMORY_V2, SECOND.uuid): NvmlCode.UNKNOWN}
    with driver.source() as source:
        assert source.read().gpus == (by_v2(FIRST, 0), by_v1(SECOND, 1))


def test_an_unknown_error_of_a_gpu_that_has_answered_by_v2_is_a_failure_and_not_v1(
    driver: FakeDriver,
) -> None:
    with driver.source() as source:
        source.read()
        driver.new_calls()
        driver.faults = {(MEMORY_V2, SECOND.uuid): NvmlCode.UNKNOWN}
        reading = source.read()
    assert reading.gpus == (by_v2(FIRST, 0),)
    assert failures(reading) == [(SECOND.uuid, "unknown")]
    assert "restart the container" in only_failure(reading).detail
    assert MEMORY_V1 not in {function for function, _ in driver.new_calls()}


def test_a_reading_is_one_memory_call_per_gpu_and_handles_stay_open(driver: FakeDriver) -> None:
    driver.gpus = EIGHT
    with driver.source() as source:
        source.read()
        assert driver.new_calls() == [
            (INIT, "*"),
            ("nvmlDeviceGetCount_v2", "*"),
            *((function, gpu.uuid) for gpu in EIGHT for function in (HANDLE, UUID, NAME)),
            *((function, gpu.uuid) for gpu in EIGHT for function in (MIG_MODE, MEMORY_V2)),
        ]
        for _ in range(2 * MEND_AFTER_READS):
            source.read()
            assert driver.new_calls() == [(MEMORY_V2, gpu.uuid) for gpu in EIGHT]


def test_a_gpu_that_knows_mig_is_asked_for_its_mode_at_each_reading(driver: FakeDriver) -> None:
    driver.gpus = [MIG_CAPABLE]
    with driver.source() as source:
        source.read()
        driver.new_calls()
        source.read()
    assert driver.new_calls() == [(MIG_MODE, FIRST.uuid), (MEMORY_V2, FIRST.uuid)]


def test_one_of_eight_gpus_is_lost_and_comes_back(driver: FakeDriver) -> None:
    driver.gpus = EIGHT
    lost = EIGHT[5]
    rest = tuple(by_v2(gpu, index) for index, gpu in enumerate(EIGHT) if gpu is not lost)
    with driver.source() as source:
        source.read()
        driver.faults = {(MEMORY_V2, lost.uuid): NvmlCode.GPU_IS_LOST}
        reading = source.read()
        assert reading.gpus == rest
        assert failures(reading) == [(lost.uuid, "lost")]
        assert "GPU 5 (GPU-5)" in only_failure(reading).detail
        assert "Xid" in only_failure(reading).detail
        # It is well again, yet an open NVML cannot see that; and its dead handle is not touched.
        driver.faults = {}
        driver.new_calls()
        assert failures(source.read()) == [(lost.uuid, "lost")]
        assert driver.new_calls() == [(MEMORY_V2, gpu.uuid) for gpu in EIGHT if gpu is not lost]
        reading = read_until_mended(source, reads_before=3)
        assert reading.gpus == tuple(by_v2(gpu, index) for index, gpu in enumerate(EIGHT))
        assert reading.failures == ()


def test_nvml_is_opened_anew_for_a_lost_gpu_at_a_slow_pace_and_after_the_others_are_read(
    driver: FakeDriver,
) -> None:
    driver.faults = {(ANY, SECOND.uuid): NvmlCode.GPU_IS_LOST}
    with driver.source() as source:
        for read in range(1, 3 * MEND_AFTER_READS + 1):
            assert source.read().gpus == (by_v2(FIRST, 0),)
            functions = [function for function, _ in driver.new_calls()]
            assert (INIT in functions) == (read == 1 or read % MEND_AFTER_READS == 0), f"reading {read}"
            if read > 1 and INIT in functions:
                assert functions.index(MEMORY_V2) < functions.index(SHUTDOWN) < functions.index(INIT)


def test_a_gpu_that_stays_lost_keeps_its_name_when_not_even_its_handle_can_be_had(
    driver: FakeDriver,
) -> None:
    with driver.source() as source:
        source.read()
        driver.faults = {(ANY, FIRST.uuid): NvmlCode.GPU_IS_LOST}
        reading = read_until_mended(source, reads_before=1)
        assert reading.gpus == (by_v2(SECOND, 1),)
        assert failures(reading) == [(FIRST.uuid, "lost")]


def test_a_gpu_that_the_driver_lists_no_more_keeps_failing_under_its_uuid(driver: FakeDriver) -> None:
    third = replace(FIRST, uuid="GPU-33333333", used=5)
    driver.gpus = [FIRST, SECOND, third]
    with driver.source() as source:
        source.read()
        driver.gpus = [FIRST, third]
        assert failures(source.read()) == [(SECOND.uuid, "lost")]
        reading = read_until_mended(source, reads_before=2)
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(third, 1))
        assert failures(reading) == [(SECOND.uuid, "lost")]
        assert "lists it no more" in only_failure(reading).detail
        assert failures(read_until_mended(source, reads_before=1)) == [(SECOND.uuid, "lost")]
        driver.gpus = [FIRST, SECOND, third]
        reading = read_until_mended(source, reads_before=1)
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1), by_v2(third, 2))
        assert reading.failures == ()


def test_a_gpu_that_is_plugged_in_is_seen_when_nvml_is_opened_anew(driver: FakeDriver) -> None:
    third = replace(FIRST, uuid="GPU-33333333", used=5)
    with driver.source() as source:
        source.read()
        driver.gpus = [FIRST, SECOND, third]
        assert source.read().gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
        driver.faults = {(MEMORY_V2, FIRST.uuid): NvmlCode.GPU_IS_LOST}
        source.read()
        driver.faults = {}
        reading = read_until_mended(source, reads_before=3)
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1), by_v2(third, 2))


@pytest.mark.parametrize(
    ("code", "reason", "way_out"),
    [
        (NvmlCode.NO_PERMISSION, "no_permission", "allowed to use this GPU"),
        (NvmlCode.RESET_REQUIRED, "reset_required", "nvidia-smi --gpu-reset"),
        (NvmlCode.NOT_SUPPORTED, "not_supported", "nothing is said in its place"),
        (NvmlCode.TIMEOUT, "timeout", "gave up waiting"),
        (21, "unknown", "fake error 21 (NVML 21)"),
    ],
)
def test_what_one_gpu_fails_with_is_its_own_failure_and_passes(
    driver: FakeDriver, code: int, reason: str, way_out: str
) -> None:
    with driver.source() as source:
        source.read()
        driver.faults = {(MEMORY_V2, FIRST.uuid): code}
        driver.new_calls()
        for _ in range(MEND_AFTER_READS + 1):
            reading = source.read()
            assert reading.gpus == (by_v2(SECOND, 1),)
            assert failures(reading) == [(FIRST.uuid, reason)]
            assert way_out in only_failure(reading).detail
            assert driver.new_calls() == [(MEMORY_V2, FIRST.uuid), (MEMORY_V2, SECOND.uuid)]
        driver.faults = {}
        assert source.read().gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_a_gpu_whose_handle_is_forbidden_is_named_by_its_index_and_costs_the_others_nothing(
    driver: FakeDriver,
) -> None:
    driver.faults = {(HANDLE, FIRST.uuid): NvmlCode.NO_PERMISSION}
    with driver.source() as source:
        reading = source.read()
        assert reading.gpus == (by_v2(SECOND, 1),)
        assert failures(reading) == [(None, "no_permission")]
        assert only_failure(reading).detail.startswith("GPU 0: ")
        driver.new_calls()
        driver.faults = {}
        assert read_until_mended(source, reads_before=1).gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))
        assert not {INIT, SHUTDOWN} & {function for function, _ in driver.new_calls()}


def test_a_name_that_is_no_text_is_a_failure_of_that_gpu(driver: FakeDriver) -> None:
    driver.gpus = [replace(FIRST, name="NVIDIA \udcff"), SECOND]
    with driver.source() as source:
        reading = source.read()
        assert reading.gpus == (by_v2(SECOND, 1),)
        assert failures(reading) == [(None, "bad_answer")]


@pytest.mark.parametrize(
    "lie",
    [
        replace(FIRST, used=2**64 - 1),
        replace(FIRST, total=0, reserved=0, used=0, free=0),
        replace(FIRST, total=2**64 - 1, reserved=0, used=0, free=2**64 - 1),
        replace(FIRST, reserved=2**64 - 5),
        replace(FIRST, free=FIRST.total),
        replace(FIRST, used=0, free=0),
    ],
)
def test_numbers_that_cannot_be_are_a_failure(driver: FakeDriver, lie: FakeGpu) -> None:
    driver.gpus = [lie, SECOND]
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == (by_v2(SECOND, 1),)
    assert failures(reading) == [(FIRST.uuid, "bad_answer")]
    assert f"total {lie.total}" in only_failure(reading).detail


def test_parts_that_were_not_read_at_the_same_instant_pass(driver: FakeDriver) -> None:
    free = FIRST.total - FIRST.reserved - FIRST.used + FIRST.total // 200
    driver.gpus = [replace(FIRST, free=free)]
    with driver.source() as source:
        assert [gpu.free_bytes for gpu in source.read().gpus] == [free]


def test_a_gpu_whose_mig_mode_cannot_be_told_is_not_taken_for_a_whole_one(driver: FakeDriver) -> None:
    driver.faults = {(MIG_MODE, FIRST.uuid): NvmlCode.UNKNOWN}
    with driver.source() as source:
        reading = source.read()
    assert reading.gpus == (by_v2(SECOND, 1),)
    assert failures(reading) == [(FIRST.uuid, "unknown")]


def test_a_slow_gpu_slows_the_reading_and_changes_nobodys_bytes(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.delays = {(MEMORY_V2, FIRST.uuid): 150}
        started = time.monotonic()
        reading = source.read()
        assert time.monotonic() - started >= 0.15
    assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_a_gpu_that_hangs_is_its_own_timeout_and_the_others_go_on(driver: FakeDriver) -> None:
    driver.gpus = EIGHT
    stuck, well = EIGHT[3].uuid, [gpu for gpu in EIGHT if gpu is not EIGHT[3]]
    with driver.source() as source:
        assert len(source.read().gpus) == len(EIGHT)
        driver.delays = {(MEMORY_V2, stuck): 60_000}
        for _ in range(3):
            reading = source.read()
            assert [gpu.gpu for gpu in reading.gpus] == [gpu.uuid for gpu in well]
            assert failures(reading) == [(stuck, "timeout")]
            assert "this GPU is not asked again meanwhile" in only_failure(reading).detail
        # One call waits in the driver, not one per reading.
        assert driver.new_calls().count((MEMORY_V2, stuck)) == 2
        # Nor is NVML closed under it, though another GPU is lost meanwhile.
        driver.faults = {(MEMORY_V2, EIGHT[0].uuid): NvmlCode.GPU_IS_LOST}
        source.read()
        driver.faults = {}
        for _ in range(2 * MEND_AFTER_READS):
            source.read()
        assert SHUTDOWN not in [function for function, _ in driver.new_calls()]


def test_a_gpu_that_hangs_keeps_no_other_from_being_opened(driver: FakeDriver) -> None:
    driver.faults = {(HANDLE, SECOND.uuid): NvmlCode.NO_PERMISSION}
    with driver.source() as source:
        source.read()
        driver.faults, driver.delays = {}, {(MEMORY_V2, FIRST.uuid): 60_000}
        source.read()
        reading = read_until_mended(source, reads_before=2)
        assert reading.gpus == (by_v2(SECOND, 1),)
        assert failures(reading) == [(FIRST.uuid, "timeout")]


def test_a_lost_gpu_that_is_slow_to_say_so_is_looked_for_again(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.delays = {(MEMORY_V2, FIRST.uuid): 2500}
        driver.faults = {(MEMORY_V2, FIRST.uuid): NvmlCode.GPU_IS_LOST}
        assert failures(source.read()) == [(FIRST.uuid, "timeout")]
        driver.delays, driver.faults = {}, {}
        time.sleep(1.0)
        assert failures(source.read()) == [(FIRST.uuid, "lost")]
        reading = read_until_mended(source, reads_before=3)
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_a_forbidden_gpu_that_moves_up_is_not_taken_for_the_one_that_went(driver: FakeDriver) -> None:
    third = replace(FIRST, uuid="GPU-33333333")
    driver.gpus = [FIRST, SECOND, third]
    driver.faults = {(HANDLE, SECOND.uuid): NvmlCode.NO_PERMISSION}
    with driver.source() as source:
        assert failures(source.read()) == [(None, "no_permission")]
        driver.gpus = [SECOND, third]
        reading = read_until_mended(source, reads_before=1)
        assert failures(reading) == [(None, "no_permission"), (FIRST.uuid, "lost")]
        driver.gpus = [FIRST, SECOND, third]
        reading = read_until_mended(source, reads_before=1)
        assert [gpu.gpu for gpu in reading.gpus] == [FIRST.uuid, third.uuid]


def test_a_gpu_that_answers_late_is_read_again_and_its_old_answer_dropped(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.delays = {(MEMORY_V2, FIRST.uuid): 2500}
        assert failures(source.read()) == [(FIRST.uuid, "timeout")]
        driver.delays = {}
        driver.gpus = [replace(FIRST, used=5), SECOND]
        time.sleep(1.0)
        assert source.read().gpus == (by_v2(driver.gpus[0], 0), by_v2(SECOND, 1))


def test_a_machine_without_a_driver_is_no_failure(driver: FakeDriver) -> None:
    driver.uninstall()
    with driver.source() as source:
        for now in (0.0, 5.0, 60.0, 65.0):
            reading = source.read(now)
            assert reading.driver_absent
            assert reading.gpus == ()
            assert reading.failures == ()


def test_a_driver_that_is_installed_later_is_found_within_a_minute(driver: FakeDriver, library: Path) -> None:
    driver.uninstall()
    with driver.source() as source:
        source.read(1000.0)
        driver.install(library)
        assert source.read(1059.9).driver_absent
        reading = source.read(1060.0)
        assert not reading.driver_absent
        assert reading.gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_a_machine_with_a_driver_and_no_gpu_has_nothing_to_tell(driver: FakeDriver) -> None:
    driver.gpus = []
    with driver.source() as source:
        reading = source.read()
    assert (reading.gpus, reading.failures, reading.driver_absent) == ((), (), False)


@pytest.mark.parametrize(
    ("code", "reason", "way_out"),
    [
        (NvmlCode.DRIVER_NOT_LOADED, "driver_not_loaded", "modprobe nvidia"),
        (NvmlCode.LIB_RM_VERSION_MISMATCH, "driver_mismatch", "then restart kvheadroom"),
        (NvmlCode.NO_PERMISSION, "no_permission", "that is allowed"),
        (NvmlCode.UNKNOWN, "unknown", "restart the container"),
    ],
)
def test_a_driver_that_does_not_start_is_one_failure_and_tried_again_every_15_seconds(
    driver: FakeDriver, code: int, reason: str, way_out: str
) -> None:
    driver.init = code
    with driver.source() as source:
        for now in (1000.0, 1014.9, 1015.0, 1029.9):
            reading = source.read(now)
            assert not reading.driver_absent
            assert reading.gpus == ()
            assert failures(reading) == [(None, reason)]
            assert way_out in only_failure(reading).detail
        assert driver.new_calls() == [(INIT, "*"), (INIT, "*")]
        driver.init = 0
        assert source.read(1030.0).gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_a_driver_that_cannot_count_its_gpus_is_left_and_tried_again(driver: FakeDriver) -> None:
    driver.faults = {("nvmlDeviceGetCount_v2", ANY): NvmlCode.UNKNOWN}
    with driver.source() as source:
        assert failures(source.read(1000.0)) == [(None, "unknown")]
        assert driver.new_calls()[-1] == (SHUTDOWN, "*")
        driver.faults = {}
        assert source.read(1015.0).gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_a_driver_upgraded_under_us_is_every_gpus_failure_until_it_starts_again(
    driver: FakeDriver,
) -> None:
    with driver.source() as source:
        source.read()
        driver.faults = {(MEMORY_V2, ANY): NvmlCode.LIB_RM_VERSION_MISMATCH}
        driver.init = NvmlCode.LIB_RM_VERSION_MISMATCH
        assert failures(source.read()) == [
            (FIRST.uuid, "driver_mismatch"),
            (SECOND.uuid, "driver_mismatch"),
        ]
        assert failures(read_until_mended(source, reads_before=2)) == [
            (FIRST.uuid, "driver_mismatch"),
            (SECOND.uuid, "driver_mismatch"),
        ]
        driver.faults, driver.init = {}, 0
        assert source.read(15.0).gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_closing_gives_nvml_back_and_a_later_reading_opens_it_again(driver: FakeDriver) -> None:
    with driver.source() as source:
        source.read()
        driver.new_calls()
        source.close()
        source.close()
        assert driver.new_calls() == [(SHUTDOWN, "*")]
        assert source.read().gpus == (by_v2(FIRST, 0), by_v2(SECOND, 1))


def test_missing_bindings_are_a_failure_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    failure = only_failure(NvmlSource(clock=lambda: 0.0).read())
    assert failure.reason is GpuFailureReason.INTERNAL
    assert "nvidia-ml-py" in failure.detail


def test_our_codes_are_nvidias() -> None:
    assert {code.name: code.value for code in NvmlCode} == {
        code.name: getattr(pynvml, f"NVML_ERROR_{code.name}") for code in NvmlCode
    }
