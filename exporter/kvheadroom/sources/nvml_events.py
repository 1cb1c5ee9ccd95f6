"""The driver's Xid events: what it has to say of errors of a GPU, once, to those who listen. They are fetched, never waited for."""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvheadroom.capacity.gpus import GpuSnapshot, XidCount
from kvheadroom.sources.background import BackgroundCall
from kvheadroom.sources.nvml_codes import NvmlCode
from kvheadroom.sources.nvml_device import Device

MOST_AT_ONCE = 100
"""A GPU may tell of an error at each of its faults; the rest is fetched at the next tick."""

WAIT_MILLISECONDS = 1
"""What is there is given at once; this is for when nothing is there."""


@dataclass(frozen=True, slots=True)
class _Event:
    handle: int
    xid: int
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What one fetch gave, and whether it ended well."""

    events: tuple[_Event, ...]
    well: bool


class XidEvents:
    """Counts Xid events over the openings of NVML, by GPU, or by MIG device where the driver tells which."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._set: Any = None
        self._gpus: dict[int, str] = {}
        self._call: BackgroundCall[_Fetched] | None = None
        self._well = True

    @property
    def counts(self) -> tuple[XidCount, ...]:
        """How many so far, of GPUs that had one."""
        return tuple(sorted(XidCount(gpu, xid, count) for (gpu, xid), count in self._counts.items()))

    @property
    def watched(self) -> tuple[str, ...]:
        """The UUIDs of the whole GPUs that would be heard."""
        return tuple(sorted(self._gpus.values())) if self._well and not self.is_stuck else ()

    @property
    def is_stuck(self) -> bool:
        """Whether a fetch has not come back."""
        return self._call is not None and self._call.is_stuck

    def listen(self, nvml: Any, device: Device) -> None:
        """Hear of one GPU from now on, if the driver can; under WSL, for one, it cannot."""
        with contextlib.suppress(nvml.NVMLError):
            if self._set is None:
                self._set = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, self._set)
            self._gpus[_number(device.handle)] = device.gpu

    def fetch(self, nvml: Any, snapshots: tuple[GpuSnapshot, ...], wait_seconds: float) -> None:
        """Count what has happened; a driver that takes long is asked again when it has answered.

        Args:
            snapshots: tell which MIG device an instance is.
        """
        if self._set is None:
            return
        if self._call is None:
            self._call = BackgroundCall(partial(_fetch, nvml, self._set), "xid")
            self._call.wait(wait_seconds)
        fetched = self._call.answer
        if fetched is None:
            return
        self._call = None
        self._well = fetched.well
        parts = {(part.parent, part.gpu_instance, part.compute_instance): part.gpu for part in snapshots}
        for event in fetched.events:
            whole = self._gpus.get(event.handle)
            if whole is not None:
                place = (whole, event.gpu_instance, event.compute_instance)
                self._counts[parts.get(place, whole), event.xid] += 1

    def close(self, nvml: Any) -> None:
        """Before NVML is closed; what was counted stays."""
        if self._set is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._set)
        self._set = None
        self._gpus = {}
        self._call = None
        self._well = True


def _fetch(nvml: Any, event_set: Any) -> _Fetched:
    events: list[_Event] = []
    wait: Callable[[Any, int], Any] = nvml.nvmlEventSetWait_v2
    try:
        for _ in range(MOST_AT_ONCE):
            given = wait(event_set, WAIT_MILLISECONDS)
            if given.eventType == nvml.nvmlEventTypeXidCriticalError:
                number = _number(given.device)
                events.append(_Event(number, given.eventData, given.gpuInstanceId, given.computeInstanceId))
    except nvml.NVMLError as error:
        return _Fetched(tuple(events), well=error.value == NvmlCode.TIMEOUT)
    return _Fetched(tuple(events), well=True)


def _number(handle: Any) -> int:
    """A handle to compare: the bindings wrap it anew each time."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
