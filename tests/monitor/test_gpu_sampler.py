"""The GPUs are read in a thread: a stuck driver call costs its own reading and nothing else."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvheadroom.capacity.gpus import GpuReading, XidCount
from kvheadroom.monitor.gpu_sampler import GpuSampler
from tests.doubles.fake_nvml import MEMORY_V2, FakeDriver, FakeGpu, build_library

DEADLINE_SECONDS = 0.1
PATIENCE_SECONDS = 20.0


XIDS = (XidCount("GPU-1a", 79, 2),)


class Outside:
    """A driver that can be made to hang or fail, and what the sampler published."""

    def __init__(self) -> None:
        self.reads = 0
        self.mended = 0
        self.mending_fault: Exception | None = None
        self.at_once = 0
        self.most_at_once = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fault: Exception | None = None
        self.published: asyncio.Queue[GpuReading] = asyncio.Queue()
        self.sampler = GpuSampler(
            self.read, self.mend, lambda: 0.01, DEADLINE_SECONDS, self.published.put_nowait
        )

    def mend(self) -> None:
        self.mended += 1
        if self.mending_fault is not None:
            raise self.mending_fault

    def read(self) -> GpuReading:
        self.reads += 1
        number = self.reads
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.goes_on.wait(PATIENCE_SECONDS)
        self.at_once -= 1
        if self.fault is not None:
            raise self.fault
        return GpuReading(taken_at=float(number), duration_seconds=0.0, xids=XIDS)

    async def next_reason(self) -> str | None:
        """The reason of the next reading's only failure, None for a reading that is well."""
        reading = await self.published.get()
        assert len(reading.failures) <= 1
        return reading.failures[0].reason.value if reading.failures else None

    async def until(self, reason: str | None) -> None:
        while await self.next_reason() != reason:
            pass


def sample(test: Callable[[Outside], Awaitable[None]]) -> Outside:
    """Run the sampler while `test` watches it."""

    async def run() -> Outside:
        outside = Outside()
        task = asyncio.create_task(outside.sampler.run())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await test(outside)
        finally:
            outside.goes_on.set()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return outside

    return asyncio.run(run())


def test_every_tick_publishes_one_reading_in_order() -> None:
    async def test(outside: Outside) -> None:
        readings = [await outside.published.get() for _ in range(5)]
        assert [reading.taken_at for reading in readings] == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert outside.mended >= 4

    sample(test)


def test_a_stuck_call_is_a_timeout_at_the_deadline() -> None:
    async def test(outside: Outside) -> None:
        outside.goes_on.clear()
        await outside.until("timeout")
        before, started = time.time(), time.monotonic()
        reading = await outside.published.get()
        assert time.monotonic() - started >= DEADLINE_SECONDS * 0.9
        assert reading.gpus == ()
        assert not reading.driver_absent
        assert reading.failures[0].gpu is None
        assert "within 0.1 s" in reading.failures[0].detail
        assert before - DEADLINE_SECONDS <= reading.taken_at <= time.time()
        assert reading.duration_seconds >= DEADLINE_SECONDS * 0.9

    sample(test)


def test_errors_that_were_counted_stay_counted_while_the_driver_is_stuck_or_we_fail() -> None:
    async def test(outside: Outside) -> None:
        await outside.until(None)
        outside.goes_on.clear()
        await outside.until("timeout")
        assert (await outside.published.get()).xids == XIDS
        outside.goes_on.set()
        outside.fault = ZeroDivisionError("a bug")
        await outside.until("internal")
        assert (await outside.published.get()).xids == XIDS

    sample(test)


def test_nothing_is_asked_while_a_call_is_stuck_and_its_late_answer_is_dropped() -> None:
    async def test(outside: Outside) -> None:
        await outside.until(None)
        outside.goes_on.clear()
        await outside.until("timeout")
        stuck = outside.reads
        for _ in range(3):
            assert await outside.next_reason() == "timeout"
        assert outside.reads == stuck
        outside.goes_on.set()
        while (reading := await outside.published.get()).failures:
            pass
        assert reading.taken_at == stuck + 1.0

    assert sample(test).most_at_once == 1


def test_a_fault_of_ours_is_a_failure_and_the_next_tick_reads_again() -> None:
    async def test(outside: Outside) -> None:
        outside.fault = ZeroDivisionError("a bug")
        await outside.until("internal")
        reading = await outside.published.get()
        assert "a fault of kvheadroom: ZeroDivisionError('a bug')" in reading.failures[0].detail
        outside.fault = None
        await outside.until(None)

    sample(test)


def test_a_fault_of_ours_in_looking_for_lost_gpus_costs_no_reading() -> None:
    async def test(outside: Outside) -> None:
        outside.mending_fault = ZeroDivisionError("a bug")
        for _ in range(3):
            assert await outside.next_reason() is None
        assert outside.mended >= 2

    sample(test)


def test_the_thread_ends_with_the_sampler() -> None:
    async def test(outside: Outside) -> None:
        await outside.until(None)
        assert "gpus" in {thread.name for thread in threading.enumerate()}

    sample(test)
    for thread in threading.enumerate():
        if thread.name == "gpus":
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


STUCK_DRIVER = """
import asyncio, json
from kvheadroom.monitor.gpu_sampler import GpuSampler
from kvheadroom.sources.nvml import NvmlSource

reasons = []
ticks = 0

async def tick():
    global ticks
    while True:
        await asyncio.sleep(0.01)
        ticks += 1

async def main():
    ticking = asyncio.create_task(tick())
    published = lambda reading: reasons.append([failure.reason.value for failure in reading.failures])
    nvml = NvmlSource()
    sampling = asyncio.create_task(GpuSampler(nvml.read, nvml.mend, lambda: 0.01, 0.5, published).run())
    while len(reasons) < 3:
        await asyncio.sleep(0.01)

asyncio.run(main())
print(json.dumps([reasons, ticks]))
"""


def test_a_driver_call_stuck_for_a_minute_blocks_neither_the_event_loop_nor_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    driver = FakeDriver(tmp_path, gpus=[FakeGpu("GPU-1", total=1003, reserved=7, used=11)])
    (tmp_path / "built").mkdir()
    driver.install(build_library(tmp_path / "built"))
    driver.delays = {(MEMORY_V2, "GPU-1"): 60_000}
    driver.apply()
    child = subprocess.run(
        [sys.executable, "-c", STUCK_DRIVER],
        env=driver.environment(),
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    reasons, ticks = json.loads(child.stdout)
    assert reasons == [["timeout"], ["timeout"], ["timeout"]]
    # 1.5 s of ticks of 10 ms, on a machine that may be busy.
    assert ticks > 15
    assert child.stderr == b""
