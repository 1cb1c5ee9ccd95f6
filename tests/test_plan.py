"""`kvheadroom plan --cases`: one line in, one line out, whatever the lines hold."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.capacity.facts_builder import TINY_LLAMA
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
        ({"available_bytes": 100}, "less than one block"),
        ({"config": {**TINY_LLAMA, "vocab_size": 100}, "flags": {"tensor_parallel_size": 4}}, None),
        ({"config": {**TINY_LLAMA, "vocab_size": 150, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6},
          "flags": {"tensor_parallel_size": 6}}, "vocabulary of 192"),
    ],
)  # fmt: skip
def test_what_vllm_would_refuse_is_refused_with_its_reason(
    tmp_path: Path, change: dict[str, Any], word: str | None
) -> None:
    run = plan(cases(tmp_path, {**CASE, **change}))
    answer = json.loads(run.stdout)
    assert run.returncode == 0
    if word is None or "192" in word:
        # 192 entries divide by 6; 128 by 4: no refusal
        assert "refused" not in answer
        return
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


@pytest.mark.parametrize("name", ["absent.jsonl", ""])
def test_a_file_that_cannot_be_read_ends_with_2(tmp_path: Path, name: str) -> None:
    run = plan(tmp_path / name)
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1


DAEMONS_LIBRARIES = {"aiohttp", "jinja2", "prometheus_client", "pydantic", "pynvml", "uvloop", "yaml"}


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
