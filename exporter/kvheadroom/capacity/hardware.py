"""What an engine runs on, and what is missing where its pool is what memory leaves over."""

from dataclasses import dataclass

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.facts import Fact, MissingFact, OperatorFacts, Origin
from kvheadroom.capacity.gpu_catalogue import CPU, GPUS
from kvheadroom.capacity.stored_model import ModelFiles


@dataclass(frozen=True, slots=True)
class Hardware:
    """What an engine runs on; `gpu` is a name of the catalogue, `CPU`, or None where nobody knows.

    Attributes:
        marketed_bytes: what one card is sold by; None where that is not known, or sellers differ.
    """

    gpu: str | None
    platform: Fact[str]
    hbm_bytes: Fact[int] | None
    marketed_bytes: int | None = None


def resolve_hardware(
    operator: OperatorFacts, line: CommandLine | None, version: str | None, local_gpu: str | None
) -> Hardware:
    """From the operator's config, else what the server was started as, else the card that this machine has.

    A release that calls itself a build for CPUs is one. Most such builds say it in their package's version alone, which is
    vLLM's own rule (`cpu_platform_plugin`, 0.33.0 `platforms/__init__.py`) and only seen on this machine.
    """
    hbm = None if operator.hbm_bytes is None else Fact(operator.hbm_bytes, Origin.CONFIG)
    name, origin = operator.gpu, Origin.CONFIG
    if name is None and line is not None and line.on_cpu:
        name, origin = CPU, Origin.COMMAND_LINE
    elif name is None and version is not None and "cpu" in version:
        name, origin = CPU, Origin.SERVER
    elif name is None and local_gpu is not None:
        name, origin = local_gpu, Origin.MACHINE
    if name is None:
        return Hardware(
            None, Fact("cuda", Origin.ASSUMED, "an NVIDIA GPU (set `gpu: CPU` for vLLM's CPU backend)"), hbm
        )
    if name == CPU:
        return Hardware(CPU, Fact(CPU, origin), hbm)
    gpu = GPUS[name]
    if hbm is None and gpu.cuda_total_bytes is not None:
        hbm = Fact(gpu.cuda_total_bytes, Origin.ASSUMED, f"{gpu.cuda_total_bytes} ({gpu.source})")
    marketed = None if gpu.marketed_gb is None else round(gpu.marketed_gb * 10**9)
    return Hardware(name, Fact("cuda", origin), hbm, marketed)


def missing_for_pool(
    gpu: str | None,
    hbm_bytes: Fact[int] | None,
    weights_bytes: Fact[int] | None,
    model_files: ModelFiles | None,
) -> list[MissingFact]:
    """What is missing where the pool is what memory leaves over."""
    if gpu == CPU:
        return [
            MissingFact(
                "kv_cache_memory_bytes",
                "on a CPU vLLM sizes the pool from the memory that its process happens to leave",
                "start vLLM with --kv-cache-memory-bytes N, or set "
                "`flags: {kv_cache_memory_bytes: N}` (VLLM_CPU_KVCACHE_SPACE x 1073741824)",
            )
        ]
    missing = []
    if hbm_bytes is None:
        missing.append(
            MissingFact(
                "hbm_bytes",
                "neither the size of the pool nor that of the GPU's memory is known"
                + ("" if gpu is None else f" (`gpu: {gpu}`: {GPUS[gpu].source})"),
                "set `gpu: B200` (or another name of the catalogue), or `hbm_bytes: N` "
                "(torch.cuda.mem_get_info()[1])",
            )
        )
    if weights_bytes is None:
        missing.append(
            MissingFact(
                "weights_bytes",
                (model_files is not None and model_files.weights_unknown)
                or "there is no model.safetensors.index.json with a total_size in the model's folder",
                "set `weights_bytes: N` (the sum of the sizes of the *.safetensors files)",
            )
        )
    return missing
