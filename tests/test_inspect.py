"""`kvheadroom inspect`: one page in, one record per engine out, JSON on standard output alone."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import capture
from tests.daemon import COMMAND
from tests.doubles.http_server import http_server, text_answer


def inspect(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [*COMMAND, "inspect", *arguments], input=stdin, capture_output=True, check=False, timeout=30
    )


def test_a_saved_page_is_read_for_people(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_bytes(capture("gqa_waiting_and_preempting"))
    run = inspect(str(page))
    assert (run.returncode, run.stderr) == (0, b"")
    text = run.stdout.decode()
    assert "engine 0  model tiny" in text
    assert "128 blocks of 32 tokens, 4,096 tokens, 2 requests of max_model_len" in text
    assert "98.4 %" in text


def test_json_has_the_keys_of_the_reference_in_its_order() -> None:
    run = inspect("-", "--json", stdin=capture("dp2.idle"))
    assert (run.returncode, run.stderr) == (0, b"")
    report = json.loads(run.stdout)
    assert list(report) == ["source", "format", "engines", "problems"]
    assert [engine["engine"] for engine in report["engines"]] == ["0", "1"]
    assert list(report["engines"][0]) == [
        "engine", "model_name", "num_blocks", "block_size", "pool_tokens", "max_concurrency", "kv_cache_dtype",
        "kv_usage_ratio", "requests_running", "requests_waiting", "requests_waiting_by_reason",
        "preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "prompt_tokens_total",
        "generation_tokens_total",
    ]  # fmt: skip
    assert report["engines"][0]["kv_usage_ratio"] is None


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_server_is_read_by_its_address(path: str) -> None:
    with http_server({"/metrics": text_answer(capture("gqa_heavy"))}) as (url, _):
        run = inspect(url + path, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["engines"][0]["num_blocks"] == 128


def test_problems_are_told_and_end_with_1() -> None:
    page = (
        capture("gqa_heavy") + b'vllm:num_requests_swapped{engine="0"} 1\nvllm:num_requests_waiting{engine="0'
    )
    run = inspect("-", "--json", stdin=page)
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert [problem["reason"] for problem in report["problems"]] == ["bad_line"]
    assert b"bad_line" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "word"),
    [
        (["/nowhere/page.txt"], b"", "No such file"),
        (["-"], b"<html></html>", "HTML"),
        (["-"], b"", "empty"),
        (["http://127.0.0.1:1"], b"", "Connection refused"),
    ],
)
def test_what_cannot_be_read_ends_with_2_and_one_sentence(
    arguments: list[str], stdin: bytes, word: str
) -> None:
    run = inspect(*arguments, "--json", stdin=stdin)
    assert (run.returncode, run.stdout) == (2, b"")
    assert word in run.stderr.decode()
    assert len(run.stderr.splitlines()) == 1
