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
    """The driver has no number of this kind for this GPU."""
    RESET_REQUIRED = "reset_required"
    DRIVER_NOT_LOADED = "driver_not_loaded"
    """The driver's library is there, its kernel module is not."""
    DRIVER_MISMATCH = "driver_mismatch"
    """The library and the kernel module are of different releases."""
    BAD_ANSWER = "bad_answer"
    """The driver answered, with numbers that cannot be."""
    TIMEOUT = "timeout"
    EXPORTER_DOWN = "exporter_down"
    """The DCGM-exporter that told of it gives no numbers any more."""
    UNKNOWN = "unknown"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """The memory of one GPU or MIG device as NVML counts it, in bytes. NVML's total is not CUDA's, which is smaller.

    Attributes:
        gpu: the UUID, `GPU-...`, of a MIG device `MIG-...`.
        index: NVML's, in PCI order; it may change when a GPU goes or comes. A MIG device has its parent's.
        total_bytes: with v2 `reserved + used + free`, with v1 `used + free`, within 1%.
        reserved_bytes: kept by driver and firmware; None with v1, where `used` contains it.
        accounting: `v2` where used excludes reserved, `v1` from drivers that know nothing else. The same
            GPU uses about half a GiB more by v1, so the two are never compared or added. `host` where the GPU has no
            memory but the host's: total is all of it, free what the kernel calls available, and `used` contains
            what every process of the machine uses.
        parent: of a MIG device, the UUID of the GPU that it is a part of.
        gpu_instance: of a MIG device, the driver's number of it on its parent.
        compute_instance: of a MIG device, the driver's number of it in its GPU instance.
    """

    gpu: str
    name: str
    index: int
    total_bytes: int
    reserved_bytes: int | None
    used_bytes: int
    free_bytes: int
    accounting: Literal["v2", "v1", "host"]
    parent: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


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


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One compute process on a GPU.

    Attributes:
        pid: as the machine itself numbers it, not a container.
        used_bytes: on this GPU; None where the driver does not tell, as under WSL.
    """

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcesses:
    """The compute processes of one GPU or MIG device.

    Attributes:
        used_bytes: of the whole GPU at the same instant, by v2; None by any other accounting, which holds more than
            processes, and when the list is an old one of a GPU that fails.
        unknown: why the driver lists none; None when it listed them, be it none.
    """

    gpu: str
    processes: tuple[GpuProcess, ...] = ()
    used_bytes: int | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class XidCount:
    """How often the driver told of one kind of error of one GPU, since the start of this program."""

    gpu: str
    xid: int
    count: int


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """What tells a server of this machine from every other.

    Attributes:
        url: as the config has it.
        unix_socket: the path of its socket, where it answers at one; the URL then only names it.
        process: its number and the ticks at which it started, where it was found in the table of processes.
    """

    url: str
    unix_socket: str | None = None
    process: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcesses:
    """The processes on GPUs that belong to one vLLM server.

    Attributes:
        pids: who listens there, or was started by who does, and is on a GPU.
        unknown: why there are none, as a sentence without its full stop.
    """

    place: ServerPlace
    pids: frozenset[int] = frozenset()
    unknown: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """All GPUs of this machine at one instant.

    Attributes:
        taken_at: unix seconds when the reading began.
        duration_seconds: from there to its end.
        gpus: those that gave numbers, in the order of their index.
        failures: one for each GPU that gave none, or a single one when nothing could be asked.
        driver_absent: no NVIDIA driver is installed here, which is a normal state and no failure.
        divided: the UUIDs of GPUs in MIG mode, of which only the MIG devices are read.
        first_listed: (index, UUID) of every GPU as the driver listed it when it was first seen; two have the same
            index when one came or went in between.
        processes: of each GPU, as last listed: at every tenth reading.
        processes_taken_at: unix seconds of that; None before the first.
        xids: of every GPU that had one.
        xid_watched: the UUIDs of whole GPUs whose errors the driver would tell; of others nothing is known.
        servers: whose processes were looked for at the time of the last list.
    """

    taken_at: float
    duration_seconds: float
    gpus: tuple[GpuSnapshot, ...] = ()
    failures: tuple[GpuFailure, ...] = ()
    driver_absent: bool = False
    divided: tuple[str, ...] = ()
    first_listed: tuple[tuple[int, str], ...] = ()
    processes: tuple[GpuProcesses, ...] = ()
    processes_taken_at: float | None = None
    xids: tuple[XidCount, ...] = ()
    xid_watched: tuple[str, ...] = ()
    servers: tuple[ServerProcesses, ...] = ()
