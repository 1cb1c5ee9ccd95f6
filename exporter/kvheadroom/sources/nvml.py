"""The NVIDIA driver's management library (NVML) -> memory of every GPU. The only file that knows pynvml.

One memory call per GPU and reading; handles stay open in between. A call can block for ever and cannot be broken off, so
each GPU's is made in a daemon thread: the one that is slow fails alone, and nobody waits for it. CUDA is never touched: asking it would
open a context of several hundred MiB on the GPU that is being watched.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuProcesses, GpuReading
from kvheadroom.sources.background import BackgroundCall
from kvheadroom.sources.nvml_codes import MEND_AFTER_READS, NvmlCode, failed
from kvheadroom.sources.nvml_device import Answer, Device, ask
from kvheadroom.sources.nvml_events import XidEvents

LOOK_AGAIN_AFTER_SECONDS = 60.0
"""A machine without a driver rarely gets one while we run, yet an operator may install it."""

OPEN_AGAIN_AFTER_SECONDS = 15.0
"""A driver that is there and does not start is often in the middle of an upgrade."""

BESIDE_AFTER_SECONDS = 0.05
"""GPUs are asked one after the other, as the driver serves them; one that takes longer is not waited for yet."""

ANSWER_SECONDS = 2.0
"""For all GPUs together. A call takes microseconds; tens of milliseconds when the machine is busy."""

PROCESSES_AFTER_READS = 10
"""A list of processes may hold the driver's lock, and with it everybody's work, for milliseconds."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """One GPU without a handle.

    Attributes:
        failure: why; told again at every reading.
        needs_new_nvml: the handle cannot be had before NVML has been opened anew.
    """

    index: int
    failure: GpuFailure
    needs_new_nvml: bool


class NvmlSource:
    """Reads all GPUs of this machine. One instance owns the handles and is used from one thread only.

    Args:
        clock: seconds that only go forward; it paces the search for a driver and measures durations.
        answer_seconds: how long a reading waits for GPUs that are slow to answer.
        proc: `/proc`.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        answer_seconds: float = ANSWER_SECONDS,
        proc: Path = Path("/proc"),
    ) -> None:
        self._clock = clock
        self._answer_seconds = answer_seconds
        self._proc = proc
        self._nvml: Any = None
        self._open = False
        self._failure: GpuFailure | None = None
        self._open_again_at = -math.inf
        self._devices: list[Device | _Broken] = []
        self._listed = frozenset[str]()
        self._last_index: dict[str, int] = {}
        self._first_index: dict[str, int] = {}
        self._last_count: int | None = None
        self._parts: dict[str, tuple[str, ...]] = {}
        self._xids = XidEvents()
        self._processes: tuple[GpuProcesses, ...] = ()
        self._processes_taken_at: float | None = None
        self._reads_since_processes = PROCESSES_AFTER_READS
        self._reads_since_mended = 0

    def read(self) -> GpuReading:
        """Numbers or a failure for every GPU. Only opening NVML blocks for as long as the driver does."""
        taken_at, started = time.time(), self._clock()
        if not self._open and started >= self._open_again_at:
            self._start(started)
        answers: list[Answer] = []
        if self._open:
            answers = self._read_devices(taken_at)
        elif self._failure is not None:
            # GPUs that were seen before have failed with it; were they missing here, an alert on one would look resolved.
            failure = self._failure
            gone = [replace(failure, gpu=gpu) for gpu in self._last_index] or [failure]
            answers = [Answer(failures=(one,)) for one in gone]
        snapshots = tuple(one for answer in answers for one in answer.snapshots)
        if self._open:
            self._xids.fetch(self._nvml, snapshots, BESIDE_AFTER_SECONDS)
        return GpuReading(
            taken_at=taken_at,
            duration_seconds=self._clock() - started,
            gpus=snapshots,
            failures=tuple(
                one for answer in answers for failure in answer.failures for one in self._of_parts(failure)
            ),
            driver_absent=not self._open and self._failure is None,
            divided=tuple(self._parts),
            first_listed=tuple(sorted((index, gpu) for gpu, index in self._first_index.items())),
            processes=self._processes,
            processes_taken_at=self._processes_taken_at,
            xids=self._xids.counts,
            xid_watched=self._xids.watched,
        )

    def _of_parts(self, failure: GpuFailure) -> list[GpuFailure]:
        """What a divided GPU fails with is what each of its MIG devices fails with: the GPU itself has no numbers."""
        parts = self._parts.get(failure.gpu or "")
        return [replace(failure, gpu=part) for part in parts] if parts else [failure]

    def close(self) -> None:
        """Give all handles back. A later `read` opens NVML again."""
        if self._open:
            self._xids.close(self._nvml)
            # A driver that is gone cannot be told that we leave.
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._open = False
        self._open_again_at = -math.inf
        self._devices = []

    def _start(self, now: float) -> None:
        """Open NVML and all GPUs, or note why not and when to try again."""
        self._failure = None
        self._reads_since_mended = 0
        if self._nvml is None:
            try:
                import pynvml  # type: ignore[import-untyped]  # NVIDIA ships no types
            except ImportError as error:
                detail = f"the Python package nvidia-ml-py cannot be imported ({error}): install it"
                self._failure = GpuFailure(None, GpuFailureReason.INTERNAL, detail)
                self._open_again_at = now + LOOK_AGAIN_AFTER_SECONDS
                return
            self._nvml = pynvml
        try:
            self._listed = listed_gpus(self._proc)
            self._nvml.nvmlInit()
            self._open = True
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            self.close()
            if error.value == NvmlCode.LIBRARY_NOT_FOUND and not self._last_index:
                self._open_again_at = now + LOOK_AGAIN_AFTER_SECONDS
            else:
                self._failure = failed(error, None, "the NVIDIA driver")
                self._open_again_at = now + OPEN_AGAIN_AFTER_SECONDS
            return
        self._devices = [self._open_device(index) for index in range(count)]
        # Indices move up when a GPU is listed no more; then none tells which GPU it is.
        self._name_the_missing(by_index=count == self._last_count)
        self._last_count = count

    def _open_device(self, index: int) -> Device | _Broken:
        """Handle, UUID and name of one GPU; they do not change while NVML stays open."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            device = Device(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), handle)
        except nvml.NVMLError as error:
            # A GPU of somebody else's stays forbidden; the handles of ours are not given up for it.
            needs_new_nvml = error.value != NvmlCode.NO_PERMISSION
            return _Broken(index, failed(error, None, f"GPU {index}"), needs_new_nvml)
        except UnicodeDecodeError:
            detail = f"GPU {index}: its UUID or name is no text"
            return _Broken(index, GpuFailure(None, GpuFailureReason.BAD_ANSWER, detail), needs_new_nvml=False)
        self._first_index.setdefault(device.gpu, index)
        self._xids.listen(nvml, device)
        return device

    def _name_the_missing(self, *, by_index: bool) -> None:
        """Give GPUs without a handle the UUID they had, and keep failing for those that are listed no more.

        A GPU that fell off the bus may be missing from the list after a new initialisation. Were it missing
        from the readings too, an alert on it would look resolved.
        """
        opened = {device.gpu: device.index for device in self._devices if isinstance(device, Device)}
        missing = {gpu: index for gpu, index in self._last_index.items() if gpu not in opened}
        for position, device in enumerate(self._devices):
            gpu = next((gpu for gpu, index in missing.items() if index == device.index), None)
            if by_index and isinstance(device, _Broken) and gpu is not None:
                del missing[gpu]
                self._devices[position] = replace(device, failure=replace(device.failure, gpu=gpu))
        for gpu, index in missing.items():
            detail = (
                f"GPU {index} ({gpu}): the driver lists it no more: look for Xid in the kernel log; if it was "
                "taken out on purpose, restart kvheadroom"
            )
            failure = GpuFailure(gpu, GpuFailureReason.LOST, detail)
            self._devices.append(_Broken(index, failure, needs_new_nvml=True))
        self._last_index |= opened

    def _read_devices(self, taken_at: float) -> list[Answer]:
        """Ask every GPU at once that is slow, one after the other those that are not; wait for none too long."""
        ends_at = time.monotonic() + self._answer_seconds
        self._reads_since_processes += 1
        with_processes = self._reads_since_processes >= PROCESSES_AFTER_READS
        asked: dict[str, BackgroundCall[Answer]] = {}
        for device in self._devices:
            # Nothing is asked of a GPU while an earlier call is stuck; what that answers will be old, so it is dropped.
            if isinstance(device, Device) and not device.is_stuck:
                # Of no use is a handle whose death was told too late to be heard in its time.
                if device.call is None or device.call.answer is None or not device.call.answer.handle_is_dead:
                    work = partial(ask, self._nvml, device, self._proc, with_processes=with_processes)
                    device.call = BackgroundCall(work, "gpu")
                    device.call.wait(BESIDE_AFTER_SECONDS)
                asked[device.gpu] = device.call
        for call in asked.values():
            call.wait(ends_at - time.monotonic())
        answers = [self._collect(position, device, asked) for position, device in enumerate(self._devices)]
        if with_processes:
            self._reads_since_processes = 0
            self._keep_processes(answers)
            self._processes_taken_at = taken_at
        return answers

    def _keep_processes(self, answers: list[Answer]) -> None:
        """The new lists; of a GPU that fails the last one, so that it still fails the replica that it serves."""
        failing = {
            one.gpu for answer in answers for failure in answer.failures for one in self._of_parts(failure)
        }
        listed = {one.gpu: one for answer in answers for one in answer.processes}
        kept = (
            replace(one, used_bytes=None)
            for one in self._processes
            if one.gpu in failing and one.gpu not in listed
        )
        self._processes = (*listed.values(), *kept)

    def _collect(
        self, position: int, device: Device | _Broken, asked: dict[str, BackgroundCall[Answer]]
    ) -> Answer:
        if isinstance(device, _Broken):
            return Answer(failures=(device.failure,))
        answer = asked[device.gpu].answer if device.gpu in asked else None
        if answer is None:
            detail = (
                f"{device.label}: no answer from the driver within {self._answer_seconds:g} s; "
                "the call goes on, and this GPU is not asked again meanwhile. Does `nvidia-smi` answer? "
                "Persistence mode speeds it up"
            )
            return Answer(failures=(GpuFailure(device.gpu, GpuFailureReason.TIMEOUT, detail),))
        if answer.handle_is_dead:
            self._devices[position] = _Broken(device.index, answer.failures[0], needs_new_nvml=True)
        elif answer.is_divided:
            failed_parts = (failure.gpu for failure in answer.failures)
            self._parts[device.gpu] = (
                *(part.gpu for part in answer.snapshots),
                *(gpu for gpu in failed_parts if gpu is not None),
            )
        elif answer.snapshots:
            self._parts.pop(device.gpu, None)
        return answer

    def mend(self) -> None:
        """Look again for GPUs without a handle and for new ones, at a slow pace; to be called after each reading.

        It may block for seconds, so a reading is handed over first: no healthy GPU waits for a broken one.
        """
        if not self._open:
            return
        self._reads_since_mended += 1
        if self._reads_since_mended < MEND_AFTER_READS:
            return
        self._reads_since_mended = 0
        broken = [device for device in self._devices if isinstance(device, _Broken)]
        # NVML counts the GPUs as it is opened, so a new one is seen by nobody before.
        is_new = not listed_gpus(self._proc) <= self._listed
        is_stuck = self._xids.is_stuck or any(
            isinstance(device, Device) and device.is_stuck for device in self._devices
        )
        # NVML is not closed under a call that is still in it.
        if (is_new or any(device.needs_new_nvml for device in broken)) and not is_stuck:
            self.close()
            self._start(self._clock())
            return
        self._devices = [
            self._open_device(device.index)
            if isinstance(device, _Broken) and not device.needs_new_nvml
            else device
            for device in self._devices
        ]
        self._last_index |= {
            device.gpu: device.index for device in self._devices if isinstance(device, Device)
        }


def listed_gpus(proc: Path) -> frozenset[str]:
    """The PCI addresses of the GPUs that the driver knows now; none where that is not told, as in some containers."""
    try:
        return frozenset(entry.name for entry in (proc / "driver" / "nvidia" / "gpus").iterdir())
    except OSError:
        return frozenset()
