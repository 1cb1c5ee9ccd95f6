"""`kvheadroom check`: every source reached once, and what to add for what is missing."""

import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.conftest import capture
from tests.daemon import check
from tests.doubles.http_server import http_server, text_answer
from tests.test_daemon import SHIPPED_MODEL, vllm_answers


def config_file(folder: Path, text: str) -> Path:
    file = folder / "kvheadroom.yaml"
    file.write_text(text)
    return file


def test_a_fleet_with_everything_said_is_complete_and_ends_with_0(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (url, _):
        run = check("--config", config_file(tmp_path, f"replicas: [{{url: '{url}', name: r, gpu: CPU}}]"))
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == f"replica r  {url}  serving"
    assert lines[1].startswith("  metrics     ok, 1 engine, ")
    assert lines[2] == "  version     ok, vLLM 0.32.0"
    assert lines[3] == "  models      ok, max_model_len 2,048"
    assert lines[4] == f"  model_files ok, LlamaForCausalLM in {SHIPPED_MODEL}"
    assert lines[5] == "  engine 0    tiny"
    assert lines[6] == "    pool      predicted 4,096 tokens, observed 4,096, difference 0"
    assert "    assumed   tensor_parallel_size: 1 (vLLM's default)" in lines
    assert lines[-1] == "1 of 1 replicas complete"


def test_what_is_missing_comes_with_the_line_to_add_and_ends_with_1(tmp_path: Path) -> None:
    with http_server(vllm_answers(root="org/model")) as (url, _):
        run = check("--target", url)
    assert run.returncode == 1
    assert (
        "    missing   model_files: the server names its model 'org/model', which is no folder" in run.stdout
    )
    assert "way out: set `model: /path/to/the/model`" in run.stdout
    assert "0 of 1 replicas complete" in run.stdout


def test_one_replica_that_fails_hides_nothing_of_the_others(tmp_path: Path) -> None:
    odd = {**vllm_answers(), "/metrics": text_answer("<html>")}
    with http_server(vllm_answers()) as (good, _), http_server(odd) as (bad, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{good}', name: good, gpu: CPU}}]")
        run = check("--config", config, "--target", "http://127.0.0.1:1", "--target", bad)
    assert run.returncode == 1
    assert "FAILED, refused: GET http://127.0.0.1:1/metrics: nothing listens there" in run.stdout
    assert "FAILED, stats_disabled" in run.stdout or "FAILED, not_vllm" in run.stdout
    assert "difference 0" in run.stdout
    assert "1 of 3 replicas complete" in run.stdout


def test_a_page_that_contradicts_itself_is_a_problem_and_ends_with_1(tmp_path: Path) -> None:
    page = capture("gqa_light_steady").replace(b'effective_attention_block_size="32",', b"")
    page = page.replace(b'block_size="32"', b'block_size="4"')
    with http_server({**vllm_answers(), "/metrics": text_answer(page)}) as (url, _):
        run = check("--config", config_file(tmp_path, f"replicas: [{{url: '{url}', name: r, gpu: CPU}}]"))
    assert run.returncode == 1
    assert (
        "  problem     contradiction: engine 0: 128 blocks of block_size 4 are 512 tokens, and "
        "kv_cache_size_tokens says 4,096: " in run.stdout
    )


def test_a_slow_server_is_waited_for(tmp_path: Path) -> None:
    answers = vllm_answers()
    at_once = answers["/v1/models"]

    def late(request: BaseHTTPRequestHandler) -> None:
        time.sleep(0.8)
        at_once(request)

    with http_server({**answers, "/v1/models": late}) as (url, _):
        run = check("--config", config_file(tmp_path, f"replicas: [{{url: '{url}', gpu: CPU}}]"))
    assert run.returncode == 0, run.stdout
    assert "1 of 1 replicas complete" in run.stdout


def test_a_wrong_config_ends_with_2(tmp_path: Path) -> None:
    run = check("--config", config_file(tmp_path, "replicas: [{url: 5}]"))
    assert (run.returncode, run.stdout) == (2, "")
    assert "replicas[0].url: a text is needed, got 5" in run.stderr


def test_a_request_that_does_not_fit_is_told_and_that_no_tier_helps(tmp_path: Path) -> None:
    # The predicted pool: 2,048 tokens of 1,024 B, of which the null block holds none.
    echoed = b'kv_cache_memory_bytes="4194304"'
    page = capture("gqa_light_steady")
    assert echoed in page
    flags = "kv_offloading_size: 100"
    with http_server(
        {**vllm_answers(), "/metrics": text_answer(page.replace(echoed, b'kv_cache_memory_bytes="2097152"'))}
    ) as (url, _):
        text = f"replicas: [{{url: '{url}', name: r, gpu: CPU, flags: {{{flags}}}}}]"
        run = check("--config", config_file(tmp_path, text))
    assert (
        "    start     with the predicted pool vLLM does NOT start at max_model_len 2,048; the longest that starts is 2,016; the tier in host memory "
        "does not help it to start: one request of max_model_len must fit in the GPU's pool" in run.stdout
    ), run.stdout
