"""Whole start-up logs in the lines of vLLM 0.33.0, with figures that a test chooses and that add up as vLLM adds them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.capacity.truth import BY_ID

LLAMA: dict[str, Any] = BY_ID["llama31-8b-tp1-h100"]["config"]
NAME = "meta-llama/Llama-3.1-8B-Instruct"
RECORDINGS = Path(__file__).parent / "recordings" / "start_logs"
UP = "(EngineCore pid=326) INFO 10-06 17:00:41 [core.py:420] init engine (profile, create kv cache, warmup model) took 22.13 s\n"


def model_folder(folder: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def beginning(
    release: str = "0.33.0", model: str = NAME, at: str = "10-06 16:59:50", **changes: object
) -> str:
    """The lines that tell release, model and config."""
    config = {
        "dtype": "torch.bfloat16",
        "max_seq_len": 131072,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "quantization": None,
        "enforce_eager": False,
        "kv_cache_dtype": "auto",
        **changes,
        "compilation_config": "{'mode': 3}",
    }
    said = ", ".join(f"{name}={value}" for name, value in config.items())
    return (
        f"(APIServer pid=1) INFO {at} [utils.py:299] vLLM server version {release}, serving model {model}\n"
        f"(EngineCore pid=326) INFO {at} [core.py:140] Initializing a V1 LLM engine (v{release}) with config: "
        f"model='{model}', {said}\n"
    )


def rank_lines(
    *,
    label: str = "",
    total: float = 79.25,
    free: float = 78.84,
    utilization: float = 0.92,
    weights: float = 15.0,
    outside: float = 0.26,
    activation: float = 1.44,
    graphs: tuple[float, float] | None = None,
    unit: str = "GiB",
) -> str:
    """What one GPU prints: left for the KV cache is what budget, weights, the rest and the peak leave."""
    who = (
        f"(Worker_{label} pid={''.join(filter(str.isdecimal, label))}7)" if label else "(EngineCore pid=326)"
    )
    requested = round(total * utilization, 2)
    available = requested - weights - outside - activation
    estimate, took = graphs or (None, 0.23)
    lines = [f"[model_runner.py:407] Model loading took {weights:.4g} GiB memory and 5.4 seconds"]
    if estimate is not None:
        lines.append(
            f"[gpu_worker.py:1010] CUDA graph pool memory: {took:.2f} GiB (actual), {estimate:.2f} GiB (estimated), difference: "
            f"{abs(estimate - took):.2f} GiB (1.0%)."
        )
    lines.append(f"[gpu_worker.py:692] Available KV cache memory: {available:.2f} {unit}")
    lines.append(
        f"[gpu_worker.py:955] Free memory on device ({free:.2f}/{total:.2f} GiB) on startup. Desired GPU memory utilization is "
        f"({utilization}, {requested:.2f} GiB). Actual usage is {weights + outside:.2f} GiB for consumed memory (weights + "
        f"non-torch), {activation:.2f} GiB for peak activation, and {took:.2f} GiB for CUDAGraph memory."
    )
    return "".join(f"{who} INFO 10-06 17:00:33 {line}\n" for line in lines)


def whole_log(*ranks: str, end: str = UP, **said: Any) -> str:
    """A start from its first line to its last."""
    return beginning(**said) + "".join(ranks or [rank_lines()]) + end


def recorded(name: str) -> str:
    return (RECORDINGS / f"{name}.log").read_text("utf-8")


def write(folder: Path, texts: Mapping[str, str]) -> Sequence[str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in texts]
