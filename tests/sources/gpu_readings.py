"""Two GPUs, and what a reading of them should be."""

from dataclasses import replace

from kvheadroom.capacity.gpus import GpuFailure, GpuReading, GpuSnapshot
from kvheadroom.sources.nvml_codes import MEND_AFTER_READS
from tests.doubles.fake_nvml import FakeGpu, SourceProcess

FIRST = FakeGpu("GPU-11111111", total=150_754_820_111, reserved=652_214_273, used=120_000_000_007)
SECOND = FakeGpu("GPU-22222222", total=25_757_220_869, reserved=596_639_747, used=3, name="NVIDIA RTX 4090")


def by_v2(gpu: FakeGpu, index: int) -> GpuSnapshot:
    return GpuSnapshot(
        gpu=gpu.uuid,
        name=gpu.name,
        index=index,
        total_bytes=gpu.total,
        reserved_bytes=gpu.reserved,
        used_bytes=gpu.used,
        free_bytes=gpu.total - gpu.reserved - gpu.used,
        accounting="v2",
    )


def by_v1(gpu: FakeGpu, index: int) -> GpuSnapshot:
    return replace(
        by_v2(gpu, index), reserved_bytes=None, used_bytes=gpu.reserved + gpu.used, accounting="v1"
    )


def failures(reading: GpuReading) -> list[tuple[str | None, str]]:
    return [(failure.gpu, failure.reason.value) for failure in reading.failures]


def only_failure(reading: GpuReading) -> GpuFailure:
    assert len(reading.failures) == 1, reading.failures
    return reading.failures[0]


def read_until_mended(source: SourceProcess, *, reads_before: int) -> GpuReading:
    """The first reading after the source has looked again for what it had lost."""
    for _ in range(MEND_AFTER_READS - reads_before):
        source.read()
    return source.read()
