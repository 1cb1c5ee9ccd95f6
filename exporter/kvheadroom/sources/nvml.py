"""The NVIDIA driver's management library (NVML) -> memory of every GPU. The only file that knows pynvml.

One memory call per GPU and reading; handles stay open in between. A call can block for ever and cannot be broken off, so
each GPU's is made in a daemon thread: the one that is slow fails alone, and nobody waits for it. CUDA is never touched: asking it would
open a context of several hundred MiB on the GPU that is being watched.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading, GpuSnapshot
from kvheadroom.sources.nvml_codes import (
    HANDLE_IS_DEAD,
    MEND_AFTER_READS,
    NO_MIG,
    NO_V2,
    NvmlCode,
    failed,
)

LOOK_AGAIN_AFTER_SECONDS = 60.0
"""A machine without a driver rarely gets one while we run, yet an operator may install it."""

OPEN_AGAIN_AFTER_SECONDS = 15.0
"""A driver that is there and does not start is often in the middle of an upgrade."""

BESIDE_AFTER_SECONDS = 0.05
"""GPUs are asked one after the other, as the driver serves them; one that takes longer is not waited for yet."""

ANSWER_SECONDS = 2.0
"""For all GPUs together. A call takes microseconds; tens of milliseconds when the machine is busy."""

SUM_TOLERANCE = 0.01
"""Of the total. The parts are not all read at the same instant; nonsense is further off than this."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one GPU gave, and whether its handle is of any use afterwards."""

    given: GpuSnapshot | GpuFailure
    handle_is_dead: bool = False


class _Call:
    """One GPU's blocking call, under way from now on."""

    def __init__(self, ask: Callable[[], _Answer]) -> None:
        self._ask = ask
        self._ended = threading.Event()
        self.answer: _Answer | None = None
        threading.Thread(target=self._work, name="gpu", daemon=True).start()

    def _work(self) -> None:
        self.answer = self._ask()
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Until it has ended, or for so long."""
        self._ended.wait(max(0.0, seconds))


@dataclass(slots=True)
class _Device:
    """One GPU with a handle, and what was learned of it since NVML was opened.

    Attributes:
        counts_by_v2: None until the GPU has answered.
        call: the last one, which may still be under way.
    """

    index: int
    gpu: str
    name: str
    handle: Any
    knows_mig: bool = True
    counts_by_v2: bool | None = None
    call: _Call | None = None

    @property
    def is_stuck(self) -> bool:
        return self.call is not None and self.call.answer is None


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
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self._clock = clock
        self._answer_seconds = answer_seconds
        self._nvml: Any = None
        self._open = False
        self._failure: GpuFailure | None = None
        self._open_again_at = -math.inf
        self._devices: list[_Device | _Broken] = []
        self._last_index: dict[str, int] = {}
        self._last_count: int | None = None
        self._reads_since_mended = 0

    def read(self) -> GpuReading:
        """Numbers or a failure for every GPU. Only opening NVML blocks for as long as the driver does."""
        taken_at, started = time.time(), self._clock()
        if not self._open and started >= self._open_again_at:
            self._start(started)
        answers: list[GpuSnapshot | GpuFailure] = []
        driver_absent = False
        if self._open:
            answers += self._read_devices()
        elif self._failure is not None:
            # GPUs that were seen before have failed with it; were they missing here, an alert on one would look resolved.
            failure = self._failure
            answers += [replace(failure, gpu=gpu) for gpu in self._last_index] or [failure]
        else:
            driver_absent = True
        return GpuReading(
            taken_at=taken_at,
            duration_seconds=self._clock() - started,
            gpus=tuple(answer for answer in answers if isinstance(answer, GpuSnapshot)),
            failures=tuple(answer for answer in answers if isinstance(answer, GpuFailure)),
            driver_absent=driver_absent,
        )

    def close(self) -> None:
        """Give all handles back. A later `read` opens NVML again."""
        if self._open:
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

    def _open_device(self, index: int) -> _Device | _Broken:
        """Handle, UUID and name of one GPU; they do not change while NVML stays open."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            return _Device(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), handle)
        except nvml.NVMLError as error:
            # A GPU of somebody else's stays forbidden; the handles of ours are not given up for it.
            needs_new_nvml = error.value != NvmlCode.NO_PERMISSION
            return _Broken(index, failed(error, None, f"GPU {index}"), needs_new_nvml)
        except UnicodeDecodeError:
            detail = f"GPU {index}: its UUID or name is no text"
            return _Broken(index, GpuFailure(None, GpuFailureReason.BAD_ANSWER, detail), needs_new_nvml=False)

    def _name_the_missing(self, *, by_index: bool) -> None:
        """Give GPUs without a handle the UUID they had, and keep failing for those that are listed no more.

        A GPU that fell off the bus may be missing from the list after a new initialisation. Were it missing
        from the readings too, an alert on it would look resolved.
        """
        opened = {device.gpu: device.index for device in self._devices if isinstance(device, _Device)}
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

    def _read_devices(self) -> list[GpuSnapshot | GpuFailure]:
        """Ask every GPU at once that is slow, one after the other those that are not; wait for none too long."""
        ends_at = time.monotonic() + self._answer_seconds
        asked: list[_Device] = []
        for device in self._devices:
            # Nothing is asked of a GPU while an earlier call is stuck; what that answers will be old, so it is dropped.
            if isinstance(device, _Device) and not device.is_stuck:
                if (
                    device.call is not None
                    and device.call.answer is not None
                    and device.call.answer.handle_is_dead
                ):
                    # It came too late to be told in its time, and the handle is of no use.
                    asked.append(device)
                    continue
                device.call = _Call(partial(self._ask, device))
                device.call.wait(BESIDE_AFTER_SECONDS)
                asked.append(device)
        for device in asked:
            if device.call is not None:
                device.call.wait(ends_at - time.monotonic())
        return [self._collect(position, device, asked) for position, device in enumerate(self._devices)]

    def _collect(
        self, position: int, device: _Device | _Broken, asked: list[_Device]
    ) -> GpuSnapshot | GpuFailure:
        if isinstance(device, _Broken):
            return device.failure
        answer = device.call.answer if device in asked and device.call is not None else None
        if answer is None:
            detail = (
                f"GPU {device.index} ({device.gpu}): no answer from the driver within {self._answer_seconds:g} s; "
                "the call goes on, and this GPU is not asked again meanwhile. Does `nvidia-smi` answer? "
                "Persistence mode speeds it up"
            )
            return GpuFailure(device.gpu, GpuFailureReason.TIMEOUT, detail)
        if answer.handle_is_dead and isinstance(answer.given, GpuFailure):
            self._devices[position] = _Broken(device.index, answer.given, needs_new_nvml=True)
        return answer.given

    def _ask(self, device: _Device) -> _Answer:
        """One GPU's memory; in the GPU's own thread."""
        label = f"GPU {device.index} ({device.gpu})"
        try:
            # Asked each time: the mode can be switched while we run, and the total of a divided GPU is
            # nobody's capacity.
            if self._is_divided(device):
                detail = f"{label}: it is in MIG mode; MIG devices are not read yet"
                return _Answer(GpuFailure(device.gpu, GpuFailureReason.NOT_SUPPORTED, detail))
            return _Answer(_check(self._read_memory(device), device, label))
        except self._nvml.NVMLError as error:
            return _Answer(failed(error, device.gpu, label), error.value in HANDLE_IS_DEAD)
        except Exception as error:  # noqa: BLE001  whatever it is, it is counted and somebody waits for an answer
            detail = f"{label}: a fault of kvheadroom: {error!r}"
            return _Answer(GpuFailure(device.gpu, GpuFailureReason.INTERNAL, detail))

    def _is_divided(self, device: _Device) -> bool:
        if not device.knows_mig:
            return False
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(device.handle)[0])
        except self._nvml.NVMLError as error:
            if error.value not in NO_MIG:
                raise
            device.knows_mig = False
            return False

    def _read_memory(self, device: _Device) -> Any:
        """The driver's v2 answer, or its v1 answer (which has no `reserved`) where there is no v2."""
        nvml = self._nvml
        if device.counts_by_v2 is not False:
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(device.handle, version=nvml.nvmlMemory_v2)
            except nvml.NVMLError as error:
                # Under WSL the v2 call ends in an unknown error; from a GPU that has answered it before,
                # the same error is a fault.
                under_wsl = error.value == NvmlCode.UNKNOWN and device.counts_by_v2 is None
                if error.value not in NO_V2 and not under_wsl:
                    raise
            else:
                device.counts_by_v2 = True
                return memory
        memory = nvml.nvmlDeviceGetMemoryInfo(device.handle)
        device.counts_by_v2 = False
        return memory

    def mend(self) -> None:
        """Look again for GPUs without a handle, at a slow pace; to be called after each reading.

        It may block for seconds, so a reading is handed over first: no healthy GPU waits for a broken one.
        """
        if not self._open:
            return
        self._reads_since_mended += 1
        broken = [device for device in self._devices if isinstance(device, _Broken)]
        if not broken or self._reads_since_mended < MEND_AFTER_READS:
            return
        is_stuck = any(isinstance(device, _Device) and device.is_stuck for device in self._devices)
        # NVML is not closed under a call that is still in it.
        if any(device.needs_new_nvml for device in broken) and not is_stuck:
            self.close()
            self._start(self._clock())
            return
        self._reads_since_mended = 0
        self._devices = [
            self._open_device(device.index)
            if isinstance(device, _Broken) and not device.needs_new_nvml
            else device
            for device in self._devices
        ]
        self._last_index |= {
            device.gpu: device.index for device in self._devices if isinstance(device, _Device)
        }


def _check(memory: Any, device: _Device, label: str) -> GpuSnapshot | GpuFailure:
    """The numbers, unless they cannot be: a driver may hand out 2^64 - 1 for "not available"."""
    total, used, free = int(memory.total), int(memory.used), int(memory.free)
    reserved = int(memory.reserved) if device.counts_by_v2 else None
    parts = (reserved or 0) + used + free
    if not 0 < total < 2**63 or abs(parts - total) > total * SUM_TOLERANCE:
        detail = (
            f"{label}: numbers that cannot be: total {total}, reserved {reserved}, used {used}, free {free} "
            "bytes; compare with `nvidia-smi -q -d MEMORY`"
        )
        return GpuFailure(device.gpu, GpuFailureReason.BAD_ANSWER, detail)
    return GpuSnapshot(
        gpu=device.gpu,
        name=device.name,
        index=device.index,
        total_bytes=total,
        reserved_bytes=reserved,
        used_bytes=used,
        free_bytes=free,
        accounting="v1" if reserved is None else "v2",
    )
