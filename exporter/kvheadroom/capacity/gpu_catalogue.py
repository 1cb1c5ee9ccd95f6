"""GPUs by name: total memory as CUDA reports it, which is what vLLM budgets with.

NVML reports 0.5 to 0.9 GiB more for the same card (it counts what the driver reserves), and the GB on
the box are a third number. vLLM: `requested = ceil(total * gpu_memory_utilization)` with the CUDA total
(vllm/v1/worker/utils.py, 0.33.0).
"""

from collections.abc import Mapping
from dataclasses import dataclass

CPU = "cpu"
"""The name under which vLLM's CPU backend is given where a GPU would be."""

MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.

    Attributes:
        cuda_total_bytes: `torch.cuda.mem_get_info()[1]`.
        source: where the figure was seen, with its precision.
    """

    cuda_total_bytes: int
    source: str


def _printed(gib: float) -> Gpu:
    return Gpu(
        round(gib * GIB), f"CUDA total {gib} GiB as PyTorch's out-of-memory texts print it, to 0.01 GiB"
    )


GPUS: Mapping[str, Gpu] = {
    "A100-80GB": _printed(79.25),
    "H100": _printed(79.19),
    "H200": _printed(139.81),
    "B200": Gpu(182_642 * MIB, "CUDA total 182,642 MiB, seen on a public B200 run of vLLM"),
}
