"""What vLLM's own parser made of a command line, beside what kvheadroom reads there."""

from typing import Any

from kvheadroom.sources.vllm_arguments.command_line import ServerSettings, read_command_line
from kvheadroom.sources.vllm_arguments.config_yaml import read_config_yaml
from kvheadroom.sources.vllm_arguments.flag_values import OTHER_KEY
from tests.sources.command_line_cases import SECRET

# Of the parser, where nothing is said (0.32.0 and 0.33.0).
SIZES = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
NOT_SET = """
block_size max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes num_gpu_blocks_override
mamba_block_size kv_offloading_size attention_backend speculative_config kv_transfer_config enable_prefix_caching
enable_chunked_prefill async_scheduling disable_hybrid_kv_cache_manager
"""
DEFAULTS: dict[str, Any] = {
    **{f"{size}_parallel_size": 1 for size in SIZES},
    **dict.fromkeys(("kv_cache_dtype", "dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"), "auto"),
    **dict.fromkeys(NOT_SET.split()),
    "kv_cache_dtype_skip_layers": [],
    "gpu_memory_utilization": 0.92,
    "enable_expert_parallel": False,
}


def read_case(case: dict[str, Any]) -> ServerSettings:
    config = None if case["config"] is None else read_config_yaml(case["config"])
    return read_command_line(case["words"], is_serve=True, config=config, environment={})


def differences(case: dict[str, Any]) -> list[object]:
    """Whatever is read in another way than vLLM's parser does; what is told to be unclear is not read."""
    settings, answer = read_case(case), case["answer"]
    line = settings.command_line
    found: list[object] = [line.doubts] if line.doubts else []
    if SECRET in repr(settings):
        found.append("a secret is shown")
    for name, default in DEFAULTS.items():
        if name in line.unclear:
            continue
        ours, theirs = line.flags.get(name, default), answer["values"][name]
        if name == "kv_transfer_config" and theirs is not None:
            theirs = {"kv_connector": theirs["kv_connector"] or OTHER_KEY}
            ours = ours and {"kv_connector": ours["kv_connector"]}
        if name == "attention_backend":
            ours, theirs = ours and ours.upper(), theirs and theirs.upper()
        if (list(ours) if isinstance(ours, tuple) else ours) != theirs:
            found.append((name, ours, theirs))
    values = answer["values"]
    pairs = {
        "model": (settings.model or "Qwen/Qwen3-0.6B", answer["model"]),
        "port": (settings.ports, (values["port"],)),
        "uds": (settings.unix_socket, values["uds"]),
        "api_key": (settings.has_api_key, values["api_key"]),
        "headless": (bool(settings.silent_because), values["headless"]),
    }
    return found + [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
