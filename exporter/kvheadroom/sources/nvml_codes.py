"""What NVML's error codes mean, and what a person can do about each.

Codes and their meaning are those of `nvml.h` (13.5). What a call fails with concerns one GPU, except for
the codes of `HANDLE_IS_DEAD`: after those only a new initialisation gives a working handle.
"""

from enum import IntEnum
from typing import Any

from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason

MEND_AFTER_READS = 12
"""A minute at five-second ticks. A new initialisation may take seconds and drops every handle."""


class NvmlCode(IntEnum):
    """The values of `nvmlReturn_t` that have a meaning here."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


_MEANING: dict[int, tuple[GpuFailureReason, str]] = {
    NvmlCode.NOT_SUPPORTED: (
        GpuFailureReason.NOT_SUPPORTED,
        (
            "the driver tells no memory of it, and it is none of those that are known to have the host's memory only "
            "(GB10, Jetson), so nothing is said in its place"
        ),
    ),
    NvmlCode.NO_PERMISSION: (
        GpuFailureReason.NO_PERMISSION,
        "run kvheadroom as a user, or in a container, that is allowed to use this GPU",
    ),
    NvmlCode.DRIVER_NOT_LOADED: (
        GpuFailureReason.DRIVER_NOT_LOADED,
        (
            "the driver is installed and not loaded: load it with `modprobe nvidia` as root; in a container, "
            "start kvheadroom with the NVIDIA runtime"
        ),
    ),
    NvmlCode.TIMEOUT: (GpuFailureReason.TIMEOUT, "the driver itself gave up waiting for the GPU"),
    NvmlCode.GPU_IS_LOST: (
        GpuFailureReason.LOST,
        (
            "it fell off the bus: look for Xid in the kernel log; it is looked for again every "
            f"{MEND_AFTER_READS} readings"
        ),
    ),
    NvmlCode.RESET_REQUIRED: (
        GpuFailureReason.RESET_REQUIRED,
        (
            "end whatever has the GPU open, kvheadroom included, and reset it with `nvidia-smi --gpu-reset`, "
            "or restart the machine"
        ),
    ),
    NvmlCode.LIB_RM_VERSION_MISMATCH: (
        GpuFailureReason.DRIVER_MISMATCH,
        (
            "the driver's library and its kernel module are of different releases, as after an upgrade: "
            "reload the module or restart the machine, then restart kvheadroom"
        ),
    ),
    NvmlCode.GPU_NOT_FOUND: (GpuFailureReason.LOST, "the driver does not know it any more"),
    NvmlCode.UNKNOWN: (
        GpuFailureReason.UNKNOWN,
        (
            "in a container this is what losing the devices looks like, as after `systemctl daemon-reload` "
            "on the host: restart the container"
        ),
    ),
}

HANDLE_IS_DEAD = {
    NvmlCode.UNINITIALIZED,
    NvmlCode.INVALID_ARGUMENT,
    NvmlCode.DRIVER_NOT_LOADED,
    NvmlCode.GPU_IS_LOST,
    NvmlCode.LIB_RM_VERSION_MISMATCH,
    NvmlCode.GPU_NOT_FOUND,
}

NO_V2 = {NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.ARGUMENT_VERSION_MISMATCH}

PART_IS_GONE = {NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND}
"""Of a MIG device: it was destroyed between two calls, and its parent is well."""

NO_MIG = {NvmlCode.NOT_SUPPORTED, NvmlCode.FUNCTION_NOT_FOUND}


def failed(error: Any, gpu: str | None, label: str) -> GpuFailure:
    """The failure of an `NVMLError`: of one GPU, or with `gpu` None of the driver or of a GPU without a known UUID."""
    reason, meaning = _MEANING.get(error.value, (GpuFailureReason.UNKNOWN, "compare with `nvidia-smi`"))
    return GpuFailure(gpu, reason, f"{label}: {str(error).rstrip('.')} (NVML {error.value}): {meaning}")
