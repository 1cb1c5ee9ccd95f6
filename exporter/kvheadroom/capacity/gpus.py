"""What the driver said of the machine's GPUs, as typed values: bytes per GPU, and what went wrong.

Every type here crosses a room: `sources` makes them, `monitor` hands them on. A GPU is named by its UUID;
indices follow the PCI order of the driver and are not those of CUDA.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class GpuFailureReason(StrEnum):
    """Why there are no numbers of a GPU, or of any. A closed list, so that alerts can name a reason.

    A machine without a driver is no failure: see `GpuReading.driver_absent`.
    """

    LOST = "lost"
    """The GPU fell off the bus, or the driver lists it no more."""
    NO_PERMISSION = "no_permission"
    NOT_SUPPORTED = "not_supported"
    """Unified memory, or MIG mode: the driver has no number of this kind for the whole GPU."""
    RESET_REQUIRED = "reset_required"
    DRIVER_NOT_LOADED = "driver_not_loaded"
    """The driver's library is there, its kernel module is not."""
    DRIVER_MISMATCH = "driver_mismatch"
    """The library and the kernel module are of different releases."""
    BAD_ANSWER = "bad_answer"
    """The driver answered, with numbers that cannot be."""
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """The memory of one GPU as NVML counts it, in bytes. NVML's total is not CUDA's, which is smaller.

    Attributes:
        gpu: the UUID, `GPU-...`.
        index: NVML's, in PCI order; it may change when a GPU goes or comes.
        total_bytes: with v2 `reserved + used + free`, with v1 `used + free`, within 1%.
        reserved_bytes: kept by driver and firmware; None with v1, where `used` contains it.
        accounting: `v2` where used excludes reserved, `v1` from drivers that know nothing else. The same
            GPU uses about half a GiB more by v1, so the two are never compared or added.
    """

    gpu: str
    name: str
    index: int
    total_bytes: int
    reserved_bytes: int | None
    used_bytes: int
    free_bytes: int
    accounting: Literal["v2", "v1"]


@dataclass(frozen=True, slots=True)
class GpuFailure:
    """The driver's error as a value.

    Attributes:
        gpu: the UUID; None when it is about all GPUs, or about one whose UUID could not be read.
        detail: a sentence or two for a person: which GPU, what came, what to do.
    """

    gpu: str | None
    reason: GpuFailureReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """All GPUs of this machine at one instant.

    Attributes:
        taken_at: unix seconds when the reading began.
        duration_seconds: from there to its end.
        gpus: those that gave numbers, in the order of their index.
        failures: one for each GPU that gave none, or a single one when nothing could be asked.
        driver_absent: no NVIDIA driver is installed here, which is a normal state and no failure.
    """

    taken_at: float
    duration_seconds: float
    gpus: tuple[GpuSnapshot, ...] = ()
    failures: tuple[GpuFailure, ...] = ()
    driver_absent: bool = False
