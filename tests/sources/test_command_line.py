"""The command line of a vLLM server, read as vLLM's own parser reads it, and without a secret of it."""

import gzip
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.sources.vllm_arguments.command_line import ServerSettings, read_command_line
from kvheadroom.sources.vllm_arguments.config_yaml import ConfigWords, read_config_yaml
from kvheadroom.sources.vllm_arguments.flag_names import OPTIONS
from kvheadroom.sources.vllm_arguments.flag_words import named_config
from tests.sources.command_line_cases import SECRET, make
from tests.sources.command_line_truth import differences, read_case

TRUTH = Path(__file__).parents[1] / "recordings" / "command_lines.jsonl.gz"


def read(
    words: str | list[str], config: str | None = None, environment: Mapping[str, str] | None = None
) -> ServerSettings:
    given = words.split() if isinstance(words, str) else words
    file = None if config is None else read_config_yaml(config)
    return read_command_line(given, is_serve=True, config=file, environment=environment or {})


def flags(words: str | list[str], config: str | None = None) -> Mapping[str, Any]:
    settings = read(words, config)
    assert not settings.command_line.unclear
    assert not settings.command_line.doubts
    return settings.command_line.flags


def test_every_line_is_read_as_the_parser_of_vllm_0_33_0_reads_it() -> None:
    cases = [json.loads(line) for line in gzip.decompress(TRUTH.read_bytes()).splitlines()]
    taken = [case for case in cases if "values" in case["answer"]]
    assert len(taken) > 700
    wrong = {json.dumps(case["words"]): found for case in taken if (found := differences(case))}
    assert wrong == {}
    unclear = sum(bool(read_case(case).command_line.unclear) for case in taken)
    assert unclear < len(taken) / 20


def test_words_in_any_order_raise_nothing_and_lines_that_vllm_refuses_show_no_secret(
    seeded: random.Random,
) -> None:
    for _ in range(500):
        case = make(seeded)
        assert SECRET not in repr(read_case(case))
        words = case["words"]
        assert isinstance(words, list)
        seeded.shuffle(words)
        read_case(case)


@pytest.mark.parametrize(
    "words",
    [
        "m --tensor-parallel-size 4",
        "m --tensor_parallel_size=4",
        "m --tensor-parallel 4",
        "m --tensor_par=4",
        "m -tp 4",
        "m -tp=4",
        "-tp 4 --model m",
        "--model=m -tp 4",
        "m -tp 2 -tp 4",
    ],
)
def test_every_spelling_of_a_flag_is_that_flag(words: str) -> None:
    assert flags(words) == {"tensor_parallel_size": 4}
    assert read(words).model == "m"


def test_dotted_keys_win_over_the_whole_section_wherever_they_stand() -> None:
    words = ["m", "--speculative-config.num_speculative_tokens", "5"]
    whole = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']
    assert flags([*words, *whole])["speculative_config"] == {"num_speculative_tokens": 5}
    assert flags(["m", *whole])["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 1}


def test_short_flags_of_a_draft_are_keys_of_its_section() -> None:
    found = flags("m --spec-method mtp --spec-tokens 3 --spec-model x/y")
    assert found["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}


def test_the_command_line_wins_over_its_config_file() -> None:
    config = "tensor-parallel-size: 8\nkv_cache_dtype: fp8\nmodel: other\nspeculative-config: {method: mtp}\n"
    found = flags("m --config f.yaml -tp 2", config)
    assert found == {
        "tensor_parallel_size": 2,
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "mtp"},
    }
    assert read("m --config f.yaml", config).model == "m"
    assert read("--config f.yaml", config).model == "other"


def test_a_model_that_stands_after_the_config_file_follows_what_the_file_says() -> None:
    # As vLLM's parser, which takes the last flag of the file to go on with the model.
    config = "model: of-the-file\nkv-cache-dtype-skip-layers: [0]\n"
    settings = read("--config f.yaml m", config)
    assert settings.model == "of-the-file"
    assert settings.command_line.flags == {"kv_cache_dtype_skip_layers": ("0", "m")}
    assert read("m --config f.yaml", config).model == "m"


@pytest.mark.parametrize(
    "more",
    [
        ["-x"] * 50_000,
        ["--tensor-p"] * 50_000,
        ["--served-model-name", "a" * 2**20],
        ["-sc" + ".a" * 3000, "1"],
    ],
    ids=["no flags", "abbreviations", "a long word", "deep keys"],
)
def test_a_line_that_no_vllm_was_started_with_is_soon_done_with_and_tells_nothing(more: list[str]) -> None:
    began = time.process_time()
    settings = read(["m", "-tp", "2", *more])
    assert time.process_time() - began < 1
    assert (settings.command_line.flags, settings.ports, settings.model) == ({}, (), None)
    assert not settings.command_line.is_whole


def test_a_long_list_is_read_to_its_end() -> None:
    adapters = [f"name-{number}=/adapters/{number}" for number in range(10_000)]
    assert flags(["m", "--lora-modules", *adapters, "-tp", "2"]) == {"tensor_parallel_size": 2}


def test_only_the_two_words_name_a_config_file() -> None:
    assert named_config(["m", "--config", "f.yaml"]) == "f.yaml"
    assert named_config(["m", "--config=f.yaml"]) is None
    assert named_config(["m", "--config"]) is None


def test_a_false_that_not_every_release_reads_is_told_and_a_flag_of_the_command_line_settles_it() -> None:
    config = "enable-chunked-prefill: false\n"
    assert list(read("m --config f", config).command_line.unclear) == ["enable_chunked_prefill"]
    assert flags("m --config f --no-enable-chunked-prefill", config) == {"enable_chunked_prefill": False}
    # No release has a flag `--no-enable_chunked_prefill`.
    assert flags("m --config f", "enable_chunked_prefill: false\n") == {}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("a: [", "is no valid YAML"),
        ("- a\n", "is no mapping of flags to values"),
        ("1: 2\n", "is no mapping of flags to values"),
        ("a: &x [1]\nb: *x\n", "holds aliases (*name)"),
        ("a: 2024-13-45\n", "is no valid YAML"),
        ("[" * 5000, "is nested too deeply"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_told_without_its_content(config: str, why: str) -> None:
    assert read_config_yaml(config) == why
    settings = read("m --config f.yaml", config)
    assert settings.command_line.config_fault == why
    assert not settings.command_line.is_whole


def test_an_abbreviation_of_several_flags_is_none_of_them_for_sure() -> None:
    unclear = read("m --max-num 5").command_line.unclear
    assert {"max_num_seqs", "max_num_batched_tokens"} <= unclear.keys()
    assert "max_num_seqs" not in read("m --max-num 5").command_line.flags
    assert flags("m --max-num-se 5") == {"max_num_seqs": 5}


def test_a_flag_that_is_not_known_leaves_the_others_as_they_are_and_is_told_without_its_name() -> None:
    settings = read(f"m --of-a-plugin-{SECRET} {SECRET} -tp 2")
    assert settings.command_line.flags == {"tensor_parallel_size": 2}
    assert settings.command_line.doubts == (
        "a flag is not known to kvheadroom, from another release or a plugin",
    )
    assert settings.model == "m"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("m -tp many", "tensor_parallel_size"),
        ("m -tp 0", "tensor_parallel_size"),
        ("m -tp", "tensor_parallel_size"),
        ("m --max-model-len 1.5K", "max_model_len"),
        ("m --max-model-len auto", "max_model_len"),
        ("m --gpu-memory-utilization 92", "gpu_memory_utilization"),
        ("m --kv-cache-dtype=a;b", "kv_cache_dtype"),
        ("m --speculative-config {", "speculative_config"),
        ("m --kv-transfer-config [1]", "kv_transfer_config"),
        ("m --performance-mode throughput", "max_num_batched_tokens"),
    ],
)
def test_a_value_that_cannot_be_read_is_told_and_never_guessed(words: str, name: str) -> None:
    line = read(words).command_line
    assert list(line.unclear) == [name]
    assert name not in line.flags


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1_000", 1000),
        ("1M", 1_048_576),
        ("2g", 2 * 10**9),
    ],
)
def test_numbers_are_read_with_their_suffixes(text: str, value: int) -> None:
    assert flags(f"m --kv-cache-memory-bytes {text}") == {"kv_cache_memory_bytes": value}


def test_flags_that_change_the_cache_by_rules_that_are_not_modelled_are_named_without_their_values() -> None:
    line = read(["m", "--hf-overrides", f'{{"a": "{SECRET}"}}', "--disable-sliding-window"]).command_line
    assert line.unmodelled == ("disable_sliding_window", "hf_overrides")
    line = read("m --hf-overrides {} --model-impl auto --cpu-offload-gb 0 --mm-encoder-only").command_line
    assert (line.unmodelled, line.unweighed) == ((), ("mm_encoder_only",))
    assert read("m -ac.backend FLASHMLA").command_line.flags == {"attention_backend": "FLASHMLA"}
    assert read("m -ac.use_other 1").command_line.unmodelled == ("attention_config",)
    assert read("m", environment={"VLLM_MLA_DISABLE": "1"}).command_line.unmodelled == ("VLLM_MLA_DISABLE",)


def test_where_it_answers() -> None:
    settings = read("m --host 10.0.0.7 --port 9000 --ssl-certfile c.pem --uds /run/x.sock")
    assert (settings.ports, settings.has_tls) == ((9000,), True)
    assert settings.unix_socket == "/run/x.sock"
    assert read("m").ports == (8000,)
    assert read("m --port x").ports == ()
    ranks = "m --port 8000 -dp 8 -dpm --data-parallel-size-local 3"
    assert read(ranks).ports == (8000, 8001, 8002)


def test_a_server_without_metrics_is_told() -> None:
    assert "--headless" in read("m --headless").silent_because
    assert "--grpc" in read("m --grpc").silent_because
    assert read("m").silent_because == ""


def test_what_the_environment_says_counts_and_a_hidden_one_is_told() -> None:
    said = {"VLLM_API_KEY": SECRET, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_TARGET_DEVICE": "cpu"}
    settings = read("m", environment=said)
    assert settings.has_api_key
    assert settings.command_line.cpu_pool_bytes == 4 * 1024**3
    assert settings.command_line.on_cpu
    assert SECRET not in repr(settings)
    hidden = read_command_line(["m"], is_serve=True, config=None, environment=None)
    assert hidden.command_line.doubts == ("its environment may not be read",)
    chosen = read("m", environment={"VLLM_ATTENTION_BACKEND": "X"}).command_line
    assert list(chosen.unclear) == ["attention_backend"]


PLACES = (
    ["--api-key", SECRET],
    [f"--api-key={SECRET}"],
    ["--api_key", SECRET],
    ["--api-k", SECRET, SECRET],
    [f"--api={SECRET}"],
    ["--hf-token", SECRET],
    ["--args-json", f'{{"api_key": "{SECRET}"}}'],
    ["--speculative-config", f'{{"method": "mtp", "{SECRET}": "{SECRET}", "num_speculative_tokens": 1}}'],
    ["--speculative-config", f'{{"method": "{SECRET} x", "num_speculative_tokens": "{SECRET}"}}'],
    [f"--speculative-config.headers.{SECRET}", SECRET],
    [
        "--kv-transfer-config",
        f'{{"kv_connector": "{SECRET} x", "kv_connector_extra_config": {{"k": "{SECRET}"}}}}',
    ],
    ["--hf-overrides", f'{{"token": "{SECRET}"}}'],
    ["--kv-cache-dtype", f"Bearer {SECRET}"],
    ["--max-model-len", SECRET],
    ["--model-loader-extra-config", f'{{"key": "{SECRET}"}}'],
    ["--ssl-keyfile", SECRET],
    [f"--unknown={SECRET}"],
    [SECRET, SECRET],
    ["--default-chat-template-kwargs", f'{{"Authorization": "{SECRET}"}}'],
)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0][:40])
def test_no_secret_comes_out_wherever_it_stands(place: list[str]) -> None:
    for words in (["m", *place], [*place, "-tp", "2"], ["m", "--config", "f.yaml", *place]):
        for config in (None, f"api-key: {SECRET}\nhf-token: [{SECRET}]\n{SECRET}: {SECRET}\n"):
            settings = read(words, config)
            assert SECRET not in repr(settings)
            line = settings.command_line
            shown = (line.flags, dict(line.unclear), line.doubts, line.unmodelled, line.unweighed)
            assert SECRET not in repr(shown)


def test_the_names_are_those_of_flags_and_each_has_its_short_form() -> None:
    assert len(OPTIONS) > 500
    assert OPTIONS["-tp"].name == "tensor_parallel_size"
    assert OPTIONS["--disable-prefix-caching"].switched is False
    assert OPTIONS["--no-enable-prefix-caching"].switched is False
    assert OPTIONS["--swap-space"].name == "swap_space"
    assert isinstance(read_config_yaml("a: 1"), ConfigWords)


CONNECTOR = (
    '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "hunter2", "kv_connector_extra_config": '
    '{"cpu_bytes_to_use": 8388608, "block_size": 64, "spec_name": "CPUOffloadingSpec", "password": "hunter2", "blocks_per_chunk": "hunter2", "offload_prompt_only": false}}'
)


def test_of_a_connector_what_decides_the_size_of_its_tier_is_kept_and_nothing_else() -> None:
    settings = read(["m", "--kv-offloading-backend", "native", "--kv-transfer-config", CONNECTOR])
    flags = settings.command_line.flags
    assert flags["kv_offloading_backend"] == "native"
    assert flags["kv_transfer_config"] == {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 8_388_608,
            "block_size": 64,
            "spec_name": "CPUOffloadingSpec",
            "offload_prompt_only": False,
        },
    }
    assert "hunter2" not in repr(settings)


def test_of_several_connectors_each_is_read_and_none_within_them() -> None:
    several = '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [%s, 5]}}'
    deep = several % (several % CONNECTOR)
    flags = read(["m", "--kv-transfer-config", several % CONNECTOR]).command_line.flags
    [child] = flags["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert child["kv_connector_extra_config"]["cpu_bytes_to_use"] == 8_388_608
    flags = read(["m", "--kv-transfer-config", deep]).command_line.flags
    [child] = flags["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert child == {"kv_connector": "MultiConnector"}
