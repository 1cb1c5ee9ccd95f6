"""`kvheadroom plan --cases`: one line in, one line out, whatever the lines hold."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.cases import _FLAG_TYPES, _KNOWN
from tests.capacity.facts_builder import TINY_LLAMA
from tests.capacity.truth import BY_ID
from tests.conftest import TESTS
from tests.daemon import COMMAND

CASE: dict[str, Any] = {
    "id": "tiny",
    "config": TINY_LLAMA,
    "flags": {"block_size": 32, "max_model_len": 2048},
    "gpu": "H100",
    "vllm_version": "0.33.0",
    "available_bytes": 4 << 20,
    "lengths": [500],
}

EAGLE = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "draft_config": BY_ID["llama31-8b-eagle3"]["flags"]["speculative_config"]["draft_config"],
}


def plan(path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "plan", "--cases", str(path)], capture_output=True, text=True, check=False, timeout=60
    )


def cases(folder: Path, *lines: object) -> Path:
    path = folder / "cases.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_case_is_answered_with_the_keys_of_the_reference_in_their_order(tmp_path: Path) -> None:
    run = plan(cases(tmp_path, CASE))
    assert (run.returncode, run.stderr) == (0, "")
    # 4 MiB // (1,024 B x 32) = 128 blocks; a request of 2,048 takes 64, one of 500 takes 16
    assert json.loads(run.stdout) == {
        "id": "tiny",
        "kv_cache_dtype": "auto",
        "block_size": 32,
        "bytes_per_block": 32768,
        "num_blocks": 128,
        "kv_cache_size_tokens": 4096,
        "max_concurrency": 2.0,
        "needed_bytes_for_max_model_len": 64 * 32768,
        "boots": True,
        "estimated_max_model_len": 2048,
        "at_len": {"500": {"tokens": 4000, "concurrency": 8.0, "blocks_per_request": 16}},
        "weight_bytes_rank0": None,
    }
    assert list(json.loads(run.stdout))[:4] == ["id", "kv_cache_dtype", "block_size", "bytes_per_block"]


def test_every_line_is_answered_in_its_place_and_unknown_ends_with_1(tmp_path: Path) -> None:
    bad = [
        "not json",
        "[1, 2]",
        "5",
        "[" * 100_000,
        {"id": 7},
        {**CASE, "id": "no config", "config": None},
        {**CASE, "id": "no gpu", "gpu": None},
        {**CASE, "id": "other gpu", "gpu": "TPU"},
        {**CASE, "id": "no bytes", "available_bytes": None},
        {**CASE, "id": "negative bytes", "available_bytes": -5},
        {**CASE, "id": "stages", "available_bytes": [1, 2, 3]},
        {**CASE, "id": "typed flag", "flags": {"tensor_parallel_size": "8"}},
        {**CASE, "id": "true flag", "flags": {"block_size": True}},
        {**CASE, "id": "odd flag", "flags": {"frobnicate": 1}},
        {**CASE, "id": "flags", "flags": [1]},
        {**CASE, "id": "lengths", "lengths": [0]},
        {**CASE, "id": "architecture", "config": {**TINY_LLAMA, "architectures": ["Nobody"]}},
        {**CASE, "id": "absurd", "config": {**TINY_LLAMA, "num_hidden_layers": 10**30}},
        {**CASE, "id": "float", "config": {**TINY_LLAMA, "head_dim": 32.5}},
        {**CASE, "id": "version", "vllm_version": 33},
        "",
        "   ",
    ]
    run = plan(cases(tmp_path, CASE, *bad, CASE))
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 1
    assert run.stderr == ""
    assert len(answers) == len(bad) + 2
    assert answers[0] == answers[-1]
    for line, answer in zip(bad, answers[1:-1], strict=True):
        assert set(answer) == {"id", "unknown"}, answer
        name = line.get("id") if isinstance(line, dict) else None
        assert answer["id"] == (name if isinstance(name, str) else None)
        assert answer["unknown"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"flags": {"tensor_parallel_size": 3}}, "not divisible by tensor_parallel_size=3"),
        ({"flags": {"block_size": 24}}, "blocks of 24 tokens"),
        ({"flags": {"max_model_len": 32769}}, "greater than the model's longest context (32768)"),
        ({"flags": {"pipeline_parallel_size": 5}}, "more than the 4 layers"),
        ({"flags": {"tensor_parallel_size": 4, "decode_context_parallel_size": 3}}, "decode_context_parallel_size=3"),
        ({"flags": {"max_num_batched_tokens": 64, "max_num_seqs": 65}}, "must not be below max_num_seqs (65)"),
        ({"flags": {"max_num_seqs": 16384}}, "max_num_batched_tokens (8192) must not be below"),
        ({"flags": {"max_num_batched_tokens": 3, "speculative_config": EAGLE}}, "above the 3 tokens that are drafted"),
    ],
)  # fmt: skip
def test_what_vllm_would_refuse_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    run = plan(cases(tmp_path, {**CASE, **change}))
    answer = json.loads(run.stdout)
    assert run.returncode == 0
    assert answer["refused"] is True
    assert set(answer) == {"id", "refused", "error"}
    assert word in answer["error"]


def test_the_whole_table_goes_through_the_command(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(gzip.decompress((TESTS / "capacity" / "truth.jsonl.gz").read_bytes()))
    run = plan(path)
    assert run.returncode == 1
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) == len(path.read_bytes().splitlines())


def test_lines_nested_as_deeply_as_can_be_read_are_answered(tmp_path: Path) -> None:
    lines = []
    for depth in range(900, 1020):
        bomb = '{"rope_scaling":' * depth + "1" + "}" * depth
        lines += [
            json.dumps({**CASE, "config": {**TINY_LLAMA, "head_dim": "BOMB"}}).replace('"BOMB"', bomb),
            json.dumps({**CASE, "flags": {"kv_cache_dtype": "BOMB"}}).replace('"BOMB"', bomb),
            json.dumps({**CASE, "flags": {"speculative_config": ["BOMB"]}}).replace('"BOMB"', bomb),
        ]
    run = plan(cases(tmp_path, *lines))
    assert (run.returncode, run.stderr) == (1, "")
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(lines)
    assert all(answer["unknown"] for answer in answers)


def test_a_start_that_ends_in_the_memory_check_has_its_figures(tmp_path: Path) -> None:
    case = {**CASE, "lengths": None}
    block = {**case, "available_bytes": 32768, "flags": {**CASE["flags"], "max_model_len": -1}}
    answers = [
        json.loads(line)
        for line in plan(cases(tmp_path, {**case, "available_bytes": 100}, block)).stdout.splitlines()
    ]
    figures = ("num_blocks", "kv_cache_size_tokens", "max_concurrency", "boots", "estimated_max_model_len")
    # less than a block; the null block alone, beside 1,024 blocks of the 32,768 tokens that could be
    assert [[answer[name] for name in figures] for answer in answers] == [
        [0, None, None, False, 0],
        [1, 32, 1 / 1024, False, 0],
    ]
    assert [answer["needed_bytes_for_max_model_len"] for answer in answers] == [64 * 32768, 1024 * 32768]


SIX_HEADS = {**TINY_LLAMA, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6}


@pytest.mark.parametrize(("vocab_size", "padded", "refused"), [(150, 192, False), (100, 128, True)])
def test_a_vocabulary_is_shared_out_padded(
    tmp_path: Path, vocab_size: int, padded: int, *, refused: bool
) -> None:
    config = {**SIX_HEADS, "vocab_size": vocab_size}
    case = {**CASE, "config": config, "flags": {"tensor_parallel_size": 6}}
    answer = json.loads(plan(cases(tmp_path, case)).stdout)
    assert ("refused" in answer) is refused
    assert (f"the vocabulary of {padded} padded entries" in answer.get("error", "")) is refused


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        # not said, it is never more than the tokens of a step
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 4, "speculative_config": EAGLE},
        # an n-gram draft keeps nothing ahead
        {"max_num_batched_tokens": 3, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_a_batch_that_is_just_large_enough_is_planned(tmp_path: Path, flags: dict[str, Any]) -> None:
    answer = json.loads(plan(cases(tmp_path, {**CASE, "flags": flags})).stdout)
    assert answer.get("num_blocks"), answer


JUNK = [
    True,
    0,
    -1.0,
    -7,
    1.5,
    10**30,
    "",
    " ",
    "no such word",
    [],
    ["x"],
    [1],
    {"a": 1},
    {"kv_connector": "X"},
]
"""What some flags take stands here for the others."""
FITTING: dict[str, list[Any]] = {
    **{name: [True] for names, _, wanted in _FLAG_TYPES for name in names if wanted == "true or false"},
    "attention_backend": ["no such word"],
    "kv_cache_dtype_skip_layers": [[], ["x"]],
    "kv_offloading_size": [1.5],
    "kv_transfer_config": [{"a": 1}],
}


def test_junk_in_any_flag_is_never_planned(tmp_path: Path) -> None:
    junk = [
        {**CASE, "id": f"{name}={value!r}", "flags": {name: value}}
        for name in sorted(_KNOWN)
        for value in JUNK
        if not any(
            value is fits or (value == fits and type(value) is type(fits)) for fits in FITTING.get(name, [])
        )
    ]
    assert len(junk) > 400
    run = plan(cases(tmp_path, *junk))
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    planned = [answer["id"] for answer in answers if "unknown" not in answer and "refused" not in answer]
    assert len(answers) == len(junk)
    assert planned == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"flags": {"block-size": 32}}, "write it block_size"),
        ({"flags": {"--block-size": 32}}, "write it block_size"),
        ({"flags": {"mamba_cache_mode": "all"}}, "'all'; align or none is needed"),
        ({"flags": {"kv_transfer_config": 5}}, "a section"),
        ({"gpu": ["H100"]}, "`gpu` is ['H100']; a name of the catalogue"),
        ({"gpu": None}, "`gpu` is missing"),
        ({"vllm_version": 0.33}, "`vllm_version` is 0.33"),
        ({"flags": {"pipeline_parallel_size": 65537}}, "a whole number above 0, up to 65536 is needed"),
        ({"flags": {"dtype": "float8"}}, "the flag dtype is 'float8'"),
        ({"config": {**TINY_LLAMA, "dtype": ""}}, "the dtype of config.json is ''"),
        ({"config": {**TINY_LLAMA, "max_position_embeddings": None}}, "does not say the longest context"),
        ({"config": {**TINY_LLAMA, "rope_scaling": [1]}}, "rope_scaling is [1], a section is needed"),
        ({"config": {**TINY_LLAMA, "rope_scaling": {"rope_type": 5}}}, "rope_type of rope_scaling is 5"),
        ({"config": {**TINY_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": True}}}, "the factor of rope_scaling is True"),
        ({"flags": {"kv_cache_memory_bytes": 4 << 20}, "available_bytes": "much"}, "`available_bytes` is no number"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_wrong(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    answer = json.loads(plan(cases(tmp_path, {**CASE, **change})).stdout)
    assert word in answer["unknown"]


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "h100"},
        {"flags": {**CASE["flags"], "gpu_memory_utilization": 0.95, "enforce_eager": True}},
        {"flags": {**CASE["flags"], "mamba_cache_mode": "align", "data_parallel_size": 2}},
    ],
)
def test_what_changes_nothing_changes_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    answers = [
        json.loads(line) for line in plan(cases(tmp_path, CASE, {**CASE, **change})).stdout.splitlines()
    ]
    assert answers[0] == answers[1]


def test_an_assumed_release_is_said_once(tmp_path: Path) -> None:
    old, none = {**CASE, "vllm_version": "0.19.0"}, {**CASE, "vllm_version": None}
    run = plan(cases(tmp_path, old, CASE, old, none, none))
    assert run.returncode == 0
    assert run.stderr.splitlines() == [
        "kvheadroom: the rules of vLLM 0.19.0 are not verified; those of 0.32 taken, but for the known differences",
        "kvheadroom: a case without vllm_version: the rules of the newest known release are taken",
    ]


def test_a_line_of_a_gigabyte_is_answered_in_little_memory(tmp_path: Path) -> None:
    path = cases(tmp_path, CASE)
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(file.tell() + 2**30)
        file.seek(0, 2)
        file.write(b"\n" + json.dumps(CASE).encode())
    run = subprocess.run(
        ["bash", "-c", 'ulimit -v 500000; exec "$@"', "-", *COMMAND, "plan", "--cases", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert (run.returncode, run.stderr) == (1, "")
    assert answers[0] == answers[2]
    assert answers[1] == {"id": None, "unknown": "the line is longer than 16 MiB"}


@pytest.mark.parametrize("line", [b'{"id": "\xff"}', json.dumps(CASE).encode("utf-16")])
def test_a_line_that_is_no_utf_8_is_told_so(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(line + b"\n")
    assert json.loads(plan(path).stdout.splitlines()[0])["unknown"] == "the line is no UTF-8"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent.jsonl", "No such file or directory"),
        ("", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("/proc/self/mem", "Input/output error"),
    ],
)
def test_a_file_that_cannot_be_read_ends_with_2(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    run = plan(tmp_path / name)
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1
    assert "--cases: " in run.stderr
    assert f"cannot be read: {reason}" in run.stderr


def test_an_empty_name_of_a_file_is_told_so() -> None:
    run = subprocess.run(
        [*COMMAND, "plan", "--cases", ""], capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "kvheadroom: --cases: the name of a file is needed\n"


# And requests, which only a name on the hub needs.
DAEMONS_LIBRARIES = {
    "aiohttp", "httptools", "jinja2", "prometheus_client", "pydantic", "pynvml", "requests", "uvloop", "yaml",
}  # fmt: skip


def imported_by(tmp_path: Path, code: str, *arguments: str) -> set[str]:
    """Those of the daemon's libraries that a program has imported when it ends."""
    told = tmp_path / "modules.json"
    code += f"; import json; json.dump(sorted(sys.modules), open({str(told)!r}, 'w'))"
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True, timeout=60)
    return DAEMONS_LIBRARIES & {name.split(".")[0] for name in json.loads(told.read_text())}


def test_planning_needs_none_of_the_daemons_libraries(tmp_path: Path) -> None:
    path = cases(tmp_path, CASE)
    code = "import sys; from kvheadroom.cli import main; main(sys.argv[1:])"
    assert imported_by(tmp_path, code, "plan", "--cases", str(path)) == set()


def test_the_core_as_a_library_needs_none_of_them_either(tmp_path: Path) -> None:
    code = (
        "import sys, json; from kvheadroom.capacity.cases import plan_case;"
        "assert plan_case(json.loads(sys.argv[1]))['num_blocks'] == 128"
    )
    assert imported_by(tmp_path, code, json.dumps(CASE)) == set()
