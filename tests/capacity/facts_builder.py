"""Builders that name only what a test is about."""

from collections.abc import Mapping
from typing import Any

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.facts import EngineFacts, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.stored_model import ModelFiles

# 4 layers x 2 (K, V) x 2 KV heads x 32 x 2 B = 1,024 B per token
TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
}


def facts(
    *,
    config: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    echoed: EchoedFlags | None = None,
    version: str | None = "0.33.0",
    max_model_len: int | None = 2048,
    gpu: str | None = None,
    hbm_bytes: int | None = None,
    weights_bytes: int | None = None,
    overhead_bytes: int | None = None,
    command_line: CommandLine | None = None,
    local_gpu: str | None = None,
) -> EngineFacts:
    return resolve_facts(
        operator=OperatorFacts(
            flags=flags or {},
            gpu=gpu,
            hbm_bytes=hbm_bytes,
            weights_bytes=weights_bytes,
            overhead_bytes=overhead_bytes,
        ),
        answers=ServerAnswers(version=version, model_root="/models/x", max_model_len=max_model_len),
        echoed=echoed or EchoedFlags(),
        model_files=ModelFiles(folder="/models/x", config=TINY_LLAMA if config is None else config),
        command_line=command_line,
        local_gpu=local_gpu,
    )
