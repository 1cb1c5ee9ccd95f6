"""GPUs by name: what vLLM's choices depend on, and total memory as CUDA reports it.

vLLM budgets with the CUDA total: `requested = ceil(total * gpu_memory_utilization)` (vllm/v1/worker/utils.py,
0.33.0). NVML reports 0.5 to 0.9 GiB more for the same card (it counts what the driver reserves), and the GB on the
box are a third number.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CPU = "cpu"
"""The name under which vLLM's CPU backend is given where a GPU would be."""

MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """What `vllm serve` takes where no flag says it (`get_batch_defaults`, engine/arg_utils.py, 0.33.0)."""

    max_num_batched_tokens: int
    max_num_seqs: int


SMALL = BatchDefaults(2048, 256)
LARGE = BatchDefaults(8192, 1024)
"""From 70 GiB on, but for the A100."""
LARGEST = BatchDefaults(16384, 1024)
"""From 160 GiB on."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.

    Attributes:
        capability: CUDA compute capability (major, minor); it decides vLLM's attention backends.
        cuda_total_bytes: `torch.cuda.mem_get_info()[1]`; None where no such figure was seen.
        source: where that figure was seen, with its precision.
        batch: how much vLLM schedules at once by default.
    """

    capability: tuple[int, int]
    cuda_total_bytes: int | None = None
    source: str = ""
    batch: BatchDefaults = SMALL
    marketed_gb: float | None = None


def _printed(capability: tuple[int, int], gib: float, batch: BatchDefaults) -> Gpu:
    return Gpu(
        capability,
        round(gib * GIB),
        f"CUDA total {gib} GiB as PyTorch's out-of-memory texts print it, to 0.01 GiB",
        batch,
    )


GPUS: Mapping[str, Gpu] = {
    "A100-80GB": _printed((8, 0), 79.25, SMALL),
    "L40S": Gpu((8, 9)),
    "H100": _printed((9, 0), 79.19, LARGE),
    "H200": _printed((9, 0), 139.81, LARGE),
    "B200": Gpu(
        (10, 0), 182_642 * MIB, "CUDA total 182,642 MiB, seen on a public B200 run of vLLM", LARGEST, 180
    ),
    "B300": Gpu((10, 3), batch=LARGEST),
    "RTXPRO6000": Gpu((12, 0), batch=LARGE),
}

ALIASES: Mapping[str, str] = {"A100": "A100-80GB"}
"""Names that leave something open which does not matter for the layout of the KV cache."""

_BY_LOWER_CASE = {name.lower(): name for name in (*GPUS, CPU)} | {
    alias.lower(): name for alias, name in ALIASES.items()
}


def catalogue_name(name: str) -> str | None:
    """The catalogue's own name for what somebody wrote, in whatever case; None for a GPU that it lacks."""
    return _BY_LOWER_CASE.get(name.lower())
