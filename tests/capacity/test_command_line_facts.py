"""What the command line of a server on this machine makes known, and what it makes impossible to tell."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EchoedFlags
from tests.capacity.facts_builder import TINY_LLAMA, facts

POOL = {"kv_cache_memory_bytes": 4 * 1024**2}
CPU_SPACE = 4 * 1024**3


def of_line(line: CommandLine, **given: Any) -> EngineFacts:
    return facts(command_line=line, **given)


def said(flags: Mapping[str, Any], **other: Any) -> CommandLine:
    return CommandLine(flags=flags, **other)


def test_the_command_line_comes_after_the_config_and_the_engine_and_before_the_default() -> None:
    line = said({"tensor_parallel_size": 4, "kv_cache_dtype": "fp8", "block_size": 32, "dtype": "float16"})
    found = of_line(line, flags={"kv_cache_dtype": "bfloat16"}, echoed=EchoedFlags(block_size=64))
    assert (found.tensor_parallel_size.value, found.tensor_parallel_size.origin) == (4, Origin.COMMAND_LINE)
    assert (found.kv_cache_dtype.value, found.kv_cache_dtype.origin) == ("bfloat16", Origin.CONFIG)
    assert (found.block_size.value, found.block_size.origin) == (64, Origin.ECHOED)
    assert (found.dtype.value, found.dtype.origin) == ("float16", Origin.COMMAND_LINE)
    # That somebody says null is said.
    unset = of_line(line, flags={"tensor_parallel_size": None})
    assert unset.tensor_parallel_size.value == 1


def test_of_a_line_that_was_read_whole_nothing_is_assumed() -> None:
    gpu: dict[str, Any] = {"gpu": "H200"}
    assert "tensor_parallel_size" in dict(facts(**gpu).assumed())
    assert of_line(said(POOL), **gpu).assumed() == ()


def test_of_a_line_with_doubts_the_defaults_stay_assumed_and_the_doubt_is_told() -> None:
    doubtful = dict(of_line(said(POOL, doubts=("its environment may not be read",))).assumed())
    assert "tensor_parallel_size" in doubtful
    assert doubtful["command_line"] == "nothing more than was read, but its environment may not be read"


def test_the_pool_follows_the_flags_of_the_command_line() -> None:
    pool = predict(of_line(said({**POOL, "block_size": 32}))).pool
    assert pool is not None
    # 1,024 bytes per token.
    assert (pool.num_blocks, pool.pool_tokens) == (128, 4096)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            said(POOL, unclear={"tensor_parallel_size": "it is odd"}),
            "tensor_parallel_size of its command line",
        ),
        (said(POOL, unmodelled=("hf_overrides",)), "hf_overrides of its command line changes the cache"),
        (
            said(POOL, unmodelled=("VLLM_MLA_DISABLE",)),
            "VLLM_MLA_DISABLE of its environment changes the cache",
        ),
        (said(POOL, config_fault="may not be read"), "its --config, which may not be read"),
    ],
)
def test_no_number_is_made_without_what_could_not_be_read(line: CommandLine, words: str) -> None:
    prediction = predict(of_line(line))
    assert prediction.pool is None
    assert any(words in reason for reason in prediction.cannot_predict)


def test_what_the_engine_the_server_or_the_config_tells_need_not_be_read() -> None:
    line = said(
        POOL,
        unclear={"block_size": "x", "max_model_len": "x", "tensor_parallel_size": "x"},
    )
    echoed = EchoedFlags(block_size=16)
    assert predict(of_line(line, echoed=echoed, flags={"tensor_parallel_size": 1})).pool is not None
    assert predict(of_line(line, echoed=echoed)).pool is None


def test_the_size_of_a_batch_matters_to_windows_alone() -> None:
    line = said(POOL, unclear={"max_num_batched_tokens": "x"})
    assert predict(of_line(line)).pool is not None
    windows = {
        **TINY_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
    }
    assert predict(of_line(line, config=windows)).pool is None


def test_what_changes_the_weights_matters_only_where_the_pool_is_what_they_leave() -> None:
    lora = {"unweighed": ("enable_lora",)}
    sizes = {"gpu": "H200", "weights_bytes": 10**9}
    assert predict(of_line(said(POOL, **lora), **sizes)).pool is not None
    assert predict(of_line(said({}, **lora), **sizes)).pool is None
    quantized = {**TINY_LLAMA, "quantization_config": {"quant_method": "fp8"}}
    assert predict(of_line(said({}, unweighed=("quantization",)), **sizes)).pool is None
    assert not of_line(said({}, unweighed=("quantization",)), config=quantized, **sizes).obstacles


def test_the_platform_is_what_the_config_the_command_line_or_this_machine_tells() -> None:
    on_cpu = said({}, on_cpu=True)
    assert (of_line(on_cpu).platform.value, of_line(on_cpu).platform.origin) == ("cpu", Origin.COMMAND_LINE)
    assert of_line(on_cpu, gpu="H200").platform.value == "cuda"
    local = facts(local_gpu="H200")
    assert (local.platform.value, local.platform.origin) == ("cuda", Origin.MACHINE)
    assert local.capability == (9, 0)
    assert local.hbm_bytes is not None
    assert facts(local_gpu="H200", gpu="B200").capability == (10, 0)
    built = facts(local_gpu=CPU)
    assert (built.platform.value, built.platform.origin) == ("cpu", Origin.MACHINE)
    # As a release that calls itself a build for CPUs.
    called = facts(version="0.33.0+cpu", local_gpu="H200")
    assert (called.platform.value, called.platform.origin) == ("cpu", Origin.SERVER)
    assert facts(version="0.33.0+cpu", gpu="H200").platform.value == "cuda"


def test_on_a_cpu_the_variable_wins_over_the_flag_of_the_command_line_alone() -> None:
    line = said(POOL, on_cpu=True, cpu_pool_bytes=CPU_SPACE)

    def pool_bytes(**given: Any) -> int:
        found = of_line(line, **given).kv_cache_memory_bytes
        assert found is not None
        return found.value

    assert pool_bytes() == CPU_SPACE
    assert pool_bytes(flags={"kv_cache_memory_bytes": 8}) == 8
    assert pool_bytes(echoed=EchoedFlags(kv_cache_memory_bytes=9)) == 9
    # On a GPU nobody reads it.
    assert pool_bytes(gpu="H200") == POOL["kv_cache_memory_bytes"]
