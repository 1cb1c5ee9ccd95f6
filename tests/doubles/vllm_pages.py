"""The answers of a vLLM server on GPUs that nobody here has: its pool, flags, release and length as a test wants them."""

import json
from pathlib import Path

from tests.doubles.http_server import Answer, text_answer


def info_line(engine: int, num_blocks: int, **labels: object) -> str:
    """`vllm:cache_config_info`, with vLLM's labels as it writes them."""
    told = {
        "block_size": 16,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
        "engine": engine,
        "gpu_memory_utilization": 0.92,
        "kv_cache_memory_bytes": None,
        "kv_cache_max_concurrency": None,
        "kv_cache_size_tokens": None,
        "num_gpu_blocks": num_blocks,
        "num_gpu_blocks_override": None,
        "user_specified_block_size": False,
        **labels,
    }
    text = ",".join(f'{name}="{value}"' for name, value in told.items())
    return f"vllm:cache_config_info{{{text}}} 1.0"


def gpu_server(
    *num_blocks: int,
    root: Path | str,
    max_model_len: int,
    version: str = "0.33.0",
    asleep: bool = False,
    name: str = "served",
    **labels: object,
) -> dict[str, Answer]:
    """One engine for each of `num_blocks`.

    Args:
        root: of /v1/models.
        name: of the model.
        labels: of cache_config_info, in place of the usual ones.
    """
    lines = ["process_start_time_seconds 1.7e+09"]
    for engine, blocks in enumerate(num_blocks):
        of = f'{{engine="{engine}",model_name="{name}"}}'
        # Of several engines each line tells the sum of all.
        lines += [
            f"vllm:num_requests_running{of} 1.0",
            f"vllm:num_requests_waiting{of} 0.0",
            f"vllm:kv_cache_usage_perc{of} 0.25",
            f"vllm:num_preemptions_total{of} 0.0",
            info_line(engine, sum(num_blocks) if len(num_blocks) > 1 else blocks, **labels),
        ]
        if asleep:
            lines.append(f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="awake"}} 0.0')
    model = {"id": name, "root": str(root), "parent": None, "max_model_len": max_model_len}
    return {
        "/metrics": text_answer("\n".join(lines) + "\n"),
        "/version": text_answer(json.dumps({"version": version})),
        "/v1/models": text_answer(json.dumps({"data": [model]})),
    }
