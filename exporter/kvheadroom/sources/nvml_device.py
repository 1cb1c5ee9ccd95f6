"""One GPU, asked through its NVML handle: whole, or MIG device by MIG device. Every function here may block."""

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvheadroom.capacity.gpus import (
    GpuFailure,
    GpuFailureReason,
    GpuProcess,
    GpuProcesses,
    GpuSnapshot,
)
from kvheadroom.sources.background import BackgroundCall
from kvheadroom.sources.host_memory import read_host_memory
from kvheadroom.sources.nvml_codes import HANDLE_IS_DEAD, NO_MIG, NO_V2, PART_IS_GONE, NvmlCode, failed

SUM_TOLERANCE = 0.01
"""Of the total. The parts are not all read at the same instant; nonsense is further off than this."""

SHARES_HOST_MEMORY = re.compile(r"\b(GB10|Thor|Orin|nvgpu)\b", re.IGNORECASE)
"""In NVML's name of a GPU whose only memory is the host's: `NVIDIA GB10` (DGX Spark), `NVIDIA Thor`, `Orin (nvgpu)`.

vLLM asks CUDA (`is_integrated_gpu`, platforms/cuda.py, 0.33.0), which would cost a context here; NVML cannot tell.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one GPU gave, and whether its handle is of any use afterwards.

    Attributes:
        processes: empty when they were not asked for.
    """

    snapshots: tuple[GpuSnapshot, ...] = ()
    failures: tuple[GpuFailure, ...] = ()
    processes: tuple[GpuProcesses, ...] = ()
    is_divided: bool = False
    handle_is_dead: bool = False


@dataclass(slots=True)
class Device:
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
    call: BackgroundCall[Answer] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call to this GPU has not come back."""
        return self.call is not None and self.call.is_stuck

    @property
    def label(self) -> str:
        """What a person knows it by."""
        return f"GPU {self.index} ({self.gpu})"


def ask(nvml: Any, device: Device, proc: Path, *, with_processes: bool) -> Answer:
    """The memory of a GPU, or of its MIG devices; never an exception.

    Args:
        nvml: the module `pynvml`.
        proc: `/proc`, which knows the memory of GPUs that share the host's.
    """
    try:
        # Asked each time: the mode can be switched while we run, and the total of a divided GPU is
        # nobody's capacity.
        is_divided = _is_divided(nvml, device)
        given = _parts(nvml, device) if is_divided else [(device.handle, _whole_memory(nvml, device, proc))]
        snapshots = [(handle, one) for handle, one in given if isinstance(one, GpuSnapshot)]
        return Answer(
            snapshots=tuple(one for _, one in snapshots),
            failures=tuple(one for _, one in given if isinstance(one, GpuFailure)),
            processes=tuple(_processes(nvml, *pair) for pair in snapshots) if with_processes else (),
            is_divided=is_divided,
        )
    except nvml.NVMLError as error:
        failure = failed(error, device.gpu, device.label)
        return Answer(failures=(failure,), handle_is_dead=error.value in HANDLE_IS_DEAD)
    except Exception as error:  # noqa: BLE001  whatever it is, it is counted and somebody waits for an answer
        detail = f"{device.label}: a fault of kvheadroom: {error!r}"
        return Answer(failures=(GpuFailure(device.gpu, GpuFailureReason.INTERNAL, detail),))


def _is_divided(nvml: Any, device: Device) -> bool:
    if not device.knows_mig:
        return False
    try:
        return bool(nvml.nvmlDeviceGetMigMode(device.handle)[0])
    except nvml.NVMLError as error:
        if error.value not in NO_MIG:
            raise
        device.knows_mig = False
        return False


def _parts(nvml: Any, device: Device) -> list[tuple[Any, GpuSnapshot | GpuFailure]]:
    """Every MIG device by its own handle. The parent's memory is asked for nowhere: its total is nobody's."""
    given: list[tuple[Any, GpuSnapshot | GpuFailure]] = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device.handle)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, slot)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            # An empty slot, or somebody else's, as in a container that was given one MIG device.
            if error.value in PART_IS_GONE or error.value == NvmlCode.NO_PERMISSION:
                continue
            raise
        part = _part_memory(nvml, device, handle, uuid)
        if part is not None:
            given.append((handle, part))
    return given


def _part_memory(nvml: Any, device: Device, handle: Any, uuid: str) -> GpuSnapshot | GpuFailure | None:
    """One MIG device; None when it was destroyed while it was asked."""
    label = f"MIG device {uuid} of {device.label}"
    try:
        gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
        compute_instance = nvml.nvmlDeviceGetComputeInstanceId(handle)
        memory = _read_memory(nvml, device, handle)
        name = device.name
        # Older drivers have no name for a part.
        with contextlib.suppress(nvml.NVMLError):
            name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError as error:
        if error.value in PART_IS_GONE:
            return None
        if error.value in HANDLE_IS_DEAD:
            raise
        return failed(error, uuid, label)
    given = _check(memory, device, label)
    if isinstance(given, GpuFailure):
        return replace(given, gpu=uuid)
    return replace(
        given,
        gpu=uuid,
        name=name,
        parent=device.gpu,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
    )


def _whole_memory(nvml: Any, device: Device, proc: Path) -> GpuSnapshot | GpuFailure:
    shares = SHARES_HOST_MEMORY.search(device.name) is not None
    try:
        memory = _read_memory(nvml, device, device.handle)
    except nvml.NVMLError as error:
        if error.value != NvmlCode.NOT_SUPPORTED or not shares:
            raise
    else:
        # Some such GPUs do answer, with a part of the host's memory as their total.
        if not shares:
            return _check(memory, device, device.label)
    host = read_host_memory(proc)
    if isinstance(host, str):
        detail = f"{device.label}: its memory is the host's, which cannot be read: {host}"
        return GpuFailure(device.gpu, GpuFailureReason.NOT_SUPPORTED, detail)
    return GpuSnapshot(
        gpu=device.gpu,
        name=device.name,
        index=device.index,
        total_bytes=host.total_bytes,
        reserved_bytes=None,
        used_bytes=host.total_bytes - host.available_bytes,
        free_bytes=host.available_bytes,
        accounting="host",
    )


def _processes(nvml: Any, handle: Any, snapshot: GpuSnapshot) -> GpuProcesses:
    """What runs on it. The call may hold the driver up for milliseconds, so it is a rare one."""
    used_bytes = snapshot.used_bytes if snapshot.accounting == "v2" else None
    try:
        listed = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError as error:
        why = f"the driver does not list the processes of {snapshot.gpu}: {error} (NVML {error.value})"
        return GpuProcesses(gpu=snapshot.gpu, used_bytes=used_bytes, unknown=why)
    processes = tuple(
        GpuProcess(
            process.pid,
            # A driver says "not available" with the highest number that there is.
            None
            if process.usedGpuMemory is None or process.usedGpuMemory >= 2**63
            else process.usedGpuMemory,
        )
        for process in listed
    )
    return GpuProcesses(gpu=snapshot.gpu, processes=processes, used_bytes=used_bytes)


def _read_memory(nvml: Any, device: Device, handle: Any) -> Any:
    """The driver's v2 answer, or its v1 answer (which has no `reserved`) where there is no v2."""
    if device.counts_by_v2 is not False:
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            # Under WSL the v2 call ends in an unknown error; from a GPU that has answered it before,
            # the same error is a fault.
            under_wsl = error.value == NvmlCode.UNKNOWN and device.counts_by_v2 is None
            if error.value not in NO_V2 and not under_wsl:
                raise
        else:
            device.counts_by_v2 = True
            return memory
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    device.counts_by_v2 = False
    return memory


def _check(memory: Any, device: Device, label: str) -> GpuSnapshot | GpuFailure:
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
