"""One GPU of the catalogue, and what vLLM schedules at once on it by default."""

from dataclasses import dataclass

MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class BatchDefaults:
    """What `vllm serve` takes where no flag says it (`get_batch_defaults`, engine/arg_utils.py, 0.33.0)."""

    max_num_batched_tokens: int
    max_num_seqs: int


SMALL = BatchDefaults(2048, 256)
LARGE = BatchDefaults(8192, 1024)
LARGEST = BatchDefaults(16384, 1024)


def batch_defaults(nvml_name: str, nvml_total_bytes: int) -> BatchDefaults:
    """The rule of `get_batch_defaults`, which asks NVML for both (`get_device_total_memory`, platforms/cuda.py)."""
    if nvml_total_bytes >= 160 * GIB:
        return LARGEST
    if nvml_total_bytes >= 70 * GIB and "a100" not in nvml_name.lower():
        return LARGE
    return SMALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card.

    Attributes:
        capability: CUDA compute capability (major, minor); it decides vLLM's attention backends.
        nvml_names: what NVML calls it, the most usual first.
        cuda_total_bytes: `torch.cuda.mem_get_info()[1]`; None where no such figure was seen.
        source: where that figure was seen and how exact it is; or why there is none.
        nvml_total_bytes: `nvmlDeviceGetMemoryInfo().total`; None where the name leaves it open.
        nvml_source: where that figure was seen; nvidia-smi shows whole MiB.
        marketed_gb: GB (1e9 bytes) that it is sold by; None where sellers differ.
        batch: how much vLLM schedules at once by default.
    """

    capability: tuple[int, int]
    nvml_names: tuple[str, ...]
    cuda_total_bytes: int | None
    source: str
    nvml_total_bytes: int | None
    nvml_source: str
    marketed_gb: float | None
    batch: BatchDefaults
