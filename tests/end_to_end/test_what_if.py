"""A what-if of a running vLLM, and what vLLM then says when it is started so."""

import json
import subprocess
from pathlib import Path

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.sources.vllm_metrics import parse_page
from tests.daemon import COMMAND
from tests.end_to_end.conftest import TINY_GQA_FLAGS, Progress
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_server import VllmServer


def test_a_restart_with_other_flags_has_the_pool_that_was_planned_from_the_running_one(
    tiny_gqa_server: VllmServer, vllm_python: Path, tmp_path: Path, progress: Progress
) -> None:
    changes = ["--block-size", "64", "--max-model-len", "1000"]
    run = subprocess.run(
        [*COMMAND, "plan", "--from", tiny_gqa_server.base_url, *changes, "--session-tokens", "500", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (run.returncode, run.stderr) == (0, "")
    answer = json.loads(run.stdout)
    said = tiny_gqa_server.startup_log_capacity()
    assert answer["from"]["observed"]["kv_cache_size_tokens"] == said.pool_tokens
    # 500 tokens take 16 blocks of 32, and 8 of 64.
    assert answer["from"]["observed"]["sessions"][0]["of_engine"] == 128 / 16
    (row,) = answer["rows"]
    assert row["sessions"][0]["of_engine"] == 64 / 8

    folder = tmp_path / "gqa"
    flags = {**TINY_GQA_FLAGS, "--block-size": 64, "--max-model-len": 1000}
    with VllmServer(
        vllm_python, write_model(folder, "gqa"), flags, tmp_path / "vllm.log", progress=progress
    ) as restarted:
        came = restarted.startup_log_capacity()
        page = parse_page(restarted.metrics().encode())
    assert isinstance(page, VllmPage)
    (engine,) = page.engines
    planned = row["plan"]
    assert engine.num_blocks == planned["num_blocks"] == 64
    assert engine.pool_tokens == planned["kv_cache_size_tokens"] == came.pool_tokens
    assert engine.max_concurrency == planned["max_concurrency"] == came.max_concurrency
    assert planned["max_model_len"] == came.request_tokens == 1000
