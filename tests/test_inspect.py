"""`kvheadroom inspect`: one page in, one record per engine out, JSON on standard output alone."""

import json
import re
import subprocess
from http.server import BaseHTTPRequestHandler
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


def test_hit_counters_that_mislead_are_told_where_one_page_is_enough() -> None:
    page = re.sub(rb"(vllm:prefix_cache_hits_total\{[^}]*\}) .*", rb"\1 0.0", capture("gqa_prefix_reuse"))
    run = inspect("-", "--json", stdin=page)
    assert run.returncode == 1
    (problem,) = json.loads(run.stdout)["problems"]
    assert problem["reason"] == "counter_not_wired"
    assert problem["detail"].startswith("engine 0: prefix_cache_hits_total stays 0 while")
    assert b"counter_not_wired" in run.stderr
    # The same prompts in a pool whose blocks are longer than they are.
    longer = page.replace(b'"32"', b'"784"').replace(b"local_cache_hit", b"another")
    run = inspect("-", "--json", stdin=longer)
    (problem,) = json.loads(run.stdout)["problems"]
    assert problem["reason"] == "below_one_block"
    assert "only whole blocks of 784 are found again; prefix caching is on" in problem["detail"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "word"),
    [
        (["/nowhere/page.txt"], b"", "No such file"),
        (["-"], b"<html></html>", "HTML"),
        (["-"], b"", "empty"),
        (["http://127.0.0.1:1"], b"", "nothing listens there"),
        (["http://[::1"], b"", "is no server's address"),
        (["http://a..b:1"], b"", "is no server's address"),
        (["http://me:S3CRET@127.0.0.1:1"], b"", "may not hold a user or password"),
    ],
)
def test_what_cannot_be_read_ends_with_2_and_one_sentence(
    arguments: list[str], stdin: bytes, word: str
) -> None:
    run = inspect(*arguments, "--json", stdin=stdin)
    assert (run.returncode, run.stdout) == (2, b"")
    assert word in run.stderr.decode()
    assert len(run.stderr.splitlines()) == 1
    assert b"S3CRET" not in run.stderr


def test_a_redirect_is_not_followed_and_a_flood_is_not_taken_in() -> None:
    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", "/other")
        request.send_header("Content-Length", "0")
        request.end_headers()

    answers = {"/metrics": redirect, "/other": text_answer(capture("gqa_heavy"))}
    with http_server(answers) as (url, seen):
        run = inspect(url)
    assert run.returncode == 2
    assert b"redirects are not followed" in run.stderr
    assert [path for path, _ in seen] == ["/metrics"]
    with http_server({"/metrics": text_answer(b"#" * (17 << 20))}) as (url, _):
        run = inspect(url)
    assert run.returncode == 2
    assert b"larger than 16 MiB" in run.stderr


def test_a_page_cut_off_on_the_way_is_not_taken_for_a_whole_one() -> None:
    def cut(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "100000")
        request.end_headers()
        request.wfile.write(capture("gqa_heavy")[:20_000])
        request.close_connection = True

    with http_server({"/metrics": cut}) as (url, _):
        run = inspect(url, "--json")
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"cut off" in run.stderr


@pytest.mark.parametrize("redirection", ["| head -c 0", "> /dev/full", ">&-", "2>&-", "<&-"])
def test_closed_and_full_streams_end_without_a_traceback(redirection: str, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_bytes(capture("gqa_heavy") * 3)
    run = subprocess.run(  # noqa: S602  the shell's redirections are what is tested
        f"{' '.join(COMMAND)} inspect {page} --json {redirection}",
        shell=True,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert b"Traceback" not in run.stdout + run.stderr
    assert run.returncode in (0, 1)
