"""`kvheadroom plan --from URL`: a server on loopback asked once, and planned otherwise."""

import json
import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.sources.process_tree import INITIAL_PID_NAMESPACE
from tests.capacity.article_models import CONFIGS, WEIGHTS_BYTES
from tests.daemon import COMMAND, daemon
from tests.doubles.fake_nvml import FakeDriver, FakeGpu
from tests.doubles.http_server import Answer, guarded, http_server, text_answer
from tests.doubles.vllm_pages import gpu_server
from tests.doubles.vllm_stand_in import MODEL, stand_in
from tests.end_to_end.server_process import free_loopback_port
from tests.test_daemon import vllm_answers
from tests.test_plan_calibration import learned, sample
from tests.test_plan_model import tiny

H100, H200 = 85_028_896_768, 150_109_945_856
WEIGHTS, BLOCK, BLOCKS = 1 << 20, 16 * 1024, 4_600_000
OVERHEAD = 78_226_585_027 - WEIGHTS - BLOCKS * BLOCK
ON_H100 = "--gpu H100 --tensor_parallel_size 1 --kv-cache-dtype=auto"


def plan_from(
    *arguments: str | Path, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "plan", "--from", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", **(environment or {})},
    )


def document(*arguments: str | Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    run = plan_from(*arguments, "--json", environment=environment)
    assert run.stderr == ""
    answer = json.loads(run.stdout)
    assert isinstance(answer, dict)
    return answer


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_running_engine_measures_its_overhead_and_is_planned_with_another_utilization(
    tmp_path: Path,
) -> None:
    with http_server(gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=16_384)) as (url, _):
        arguments = [url, "--runs-with", ON_H100, "--gpu-memory-utilization", "0.8"]
        answer = document(*arguments, "--session-tokens", "1600")
        text = plan_from(*arguments, "--session-tokens", "1600")
    now, (row,) = answer["from"], answer["rows"]
    assert now["version"] == "0.33.0"
    assert now["overhead"]["measured_bytes"] == OVERHEAD
    assert now["overhead"]["uncertainty_bytes"] == BLOCK - 1
    assert now["observed"]["num_blocks"] == BLOCKS
    assert now["observed"]["sessions"][0]["of_engine"] == 46_000
    # What is predicted of the one that runs knows nothing of its pool.
    assert now["predicted"]["num_blocks"] != BLOCKS
    blocks = (math.ceil(H100 * 0.8) - WEIGHTS - OVERHEAD) // BLOCK
    assert row["plan"]["num_blocks"] == blocks
    assert row["calibrated"]["overhead_bytes"] == OVERHEAD
    assert row["sessions"][0]["of_engine"] == blocks / 100
    assert row["changes"] == "--gpu-memory-utilization 0.8"
    assert (row["starts"], row["is_sure"]) == (True, True)
    assert row["free_memory"]["verdict"] == "as_now"
    assert row["free_memory"]["requested_bytes"] == math.ceil(H100 * 0.8)
    # 1,024 blocks of 16 KiB for a request of 16,384 tokens.
    assert row["kv_cache_check"]["needed_bytes"] == 1024 * BLOCK
    assert text.returncode == 0
    answers = flat(text.stdout.split("\n\n")[0])
    assert answers.startswith("Now, TP 1 on 1 x H100: 46000.00 sessions of 1,600 tokens (45999 whole), ")
    assert f"{blocks / 100:.2f} sessions of 1,600 tokens (" in answers
    assert "whole) in place of 46000.00; vLLM starts at max_model_len 16,384." in answers
    assert "learned from 1 start like it (n = 1: " in flat(text.stdout)
    assert max(map(len, text.stdout.splitlines())) <= 100


def test_weights_and_overhead_that_are_said_are_those_of_what_runs_too(tmp_path: Path) -> None:
    said = ["--weights-bytes", str(2 * WEIGHTS), "--overhead-gb", "5"]
    with http_server(gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=16_384)) as (url, _):
        now = document(url, "--runs-with", ON_H100, *said)["from"]
    assert now["predicted"]["weights_bytes_per_gpu"] == 2 * WEIGHTS
    # ceil(85,028,896,768 x 0.92) - weights - overhead
    assert now["predicted"]["kv_bytes_per_gpu"] == 78_226_585_027 - 2 * WEIGHTS - 5_000_000_000
    assert now["overhead"]["measured_bytes"] == OVERHEAD - WEIGHTS


def test_several_values_are_a_row_each_on_the_same_gpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIGS["nvfp4"].read_text())
    size = str(WEIGHTS_BYTES["nvfp4"])
    server = gpu_server(16_000, root=tmp_path, max_model_len=262_144, block_size=64)
    with http_server(server) as (url, _):
        with_now = [url, "--runs-with", "-tp 4 --gpu B200", "--weights-bytes", size]
        answer = document(*with_now, "--tp", "4,8", "--session-tokens", "256K")
        text = flat(plan_from(*with_now, "--tp", "4,8", "--session-tokens", "256K").stdout)
    four, eight = answer["rows"]
    assert answer["gpus"] == 8
    # 262,144 tokens take 4,096 blocks of 64 tokens.
    assert answer["from"]["observed"]["sessions"][0]["in_all"] == 2 * 16_000 / 4096
    # The same start again has the same pool, twice on 8 GPUs.
    assert four["sessions"][0]["of_engine"] == 16_000 / 4096
    assert (four["sessions"][0]["in_all"], four["replicas"]) == (2 * 16_000 / 4096, 2)
    assert eight["sessions"][0]["in_all"] == eight["plan"]["num_blocks"] / 4096
    assert eight["sessions"][0]["per_gpu"] == eight["plan"]["num_blocks"] / 4096 / 8
    assert eight["calibrated"]["differences"] == ["tp4 in place of tp8"]
    assert "On the same 8 GPUs: sessions of 262,144 tokens of all engines" in text
    assert f"-tp 8 1 x 8 {eight['sessions'][0]['per_gpu']:.3f} {eight['sessions'][0]['in_all']:.2f}" in text
    assert "it needs 4 GPUs more, and of those nothing is known here" in text


def test_a_longer_context_with_the_sparse_indexer_says_what_its_workspace_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIGS["nvfp4"].read_text())
    size = str(WEIGHTS_BYTES["nvfp4"])
    server = gpu_server(16_000, root=tmp_path, max_model_len=524_288, block_size=64)
    with http_server(server) as (url, _):
        with_now = [url, "--runs-with", "-tp 4 --gpu B200", "--weights-bytes", size]
        answer = document(*with_now, "--max-model-len", "1M")
        text = plan_from(*with_now, "--max-model-len", "1M")
    (row,) = answer["rows"]
    measured = answer["from"]["overhead"]["measured_bytes"]
    # Keys of 40 requests of max_model_len, 132 B each.
    assert row["calibrated"]["overhead_bytes"] == measured + 40 * (1_048_576 - 524_288) * 132
    assert row["notes"] == ["estimated overhead: workspaces from 2.77 to 5.54 GB"]
    assert row["starts"] is False
    assert text.returncode == 1
    assert "vLLM does NOT start at max_model_len 1,048,576; the longest that starts is " in flat(text.stdout)
    error = row["kv_cache_check"]["error"]
    assert error.startswith(
        "To serve at least one request with the model's max seq len (1048576), (46.58 GiB KV cache is needed, "
    )
    assert error in flat(text.stdout)


def test_a_config_tells_what_the_server_does_not_and_nobody_else_is_asked(tmp_path: Path) -> None:
    root = tiny(tmp_path)
    with (
        http_server(gpu_server(BLOCKS, root="/elsewhere", max_model_len=16_384)) as (url, _),
        http_server(vllm_answers()) as (other, seen),
    ):
        config = tmp_path / "kvheadroom.yaml"
        replica = f"{{url: '{url}', name: a, gpu: H100, model: {root}, flags: {{max_num_seqs: 64}}}}"
        config.write_text(f"replicas: [{replica}, {{url: '{other}'}}]")
        by_name = document("a", "--config", config, "--max-num-seqs", "128")
        by_url = document(f"{url}/", "--config", config, "--max-num-seqs", "128")
        unknown = plan_from("b", "--config", config)
    assert by_name["rows"] == by_url["rows"]
    assert by_name["from"]["overhead"]["measured_bytes"] == OVERHEAD
    told = {flag["name"]: (flag["value"], flag["origin"]) for flag in by_name["from"]["told"]}
    assert told["max_num_seqs"] == ("64", "your config")
    assert told["gpu_memory_utilization"] == ("0.92", "echoed by the engine")
    assert by_name["rows"][0]["calibrated"]["differences"] == ["max_num_seqs=64 in place of 128"]
    assert seen == []
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert f"no replica of the config has this name or URL: b; there are a, {other.removeprefix('http://')}" in unknown.stderr  # fmt: skip


def test_a_server_of_this_machine_is_known_by_its_command_line(tmp_path: Path) -> None:
    port = str(free_loopback_port())
    words = ["serve", str(MODEL), "--port", port, "--max-num-seqs", "64", "--enforce-eager"]
    config = tmp_path / "kvheadroom.yaml"
    config.write_text(f"replicas: [{{url: 'http://127.0.0.1:{port}', name: a}}]")
    with stand_in(tmp_path, *words, place=port):
        answer = document(f"http://127.0.0.1:{port}", "--block-size", "64", "--session-tokens", "1000")
        by_config = document("a", "--config", config)
    for one in (answer, by_config):
        told = {flag["name"]: flag["origin"] for flag in one["from"]["told"]}
        assert told["max_num_seqs"] == told["enforce_eager"] == "its command line"
    (row,) = answer["rows"]
    # 4 MiB of 64 x 1,024 B; 1,000 tokens take 16 blocks.
    assert row["plan"]["num_blocks"] == 64
    assert row["sessions"][0]["of_engine"] == 4.0
    assert row["plan"]["flags"]["max_num_seqs"] == 64
    assert row["calibrated"]["reason"] == "a flag gives the pool, and nothing is left over"
    assert row["free_memory"]["requested_bytes"] is None


@pytest.mark.skipif(
    str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE,
    reason="in a container with process numbers of its own nothing is joined",
)
@pytest.mark.parametrize(
    ("others", "verdict", "words"),
    [
        (1_000_000_000, "enough", ": enough"),
        (25_000_000_000, "too_little", 'vLLM ends with "Free memory on device ...'),
    ],
)
def test_what_others_use_on_a_gpu_of_this_machine_decides_whether_it_starts(
    tmp_path: Path, library: Path, others: int, verdict: str, words: str
) -> None:
    folder = tmp_path / "driver"
    folder.mkdir()
    own = 100_000_000_000
    gpu = FakeGpu("GPU-1", total=150_754_820_111, reserved=652_214_273, used=own + others)
    driver = FakeDriver(folder, gpus=[replace(gpu, processes=((os.getpid(), own),))])
    driver.install(library)
    driver.apply()
    root = tmp_path / "model"
    root.mkdir()
    # The double of vLLM listens in this very process.
    with http_server(
        gpu_server(4096, root=tiny(root), max_model_len=2048, kv_cache_memory_bytes=1 << 26)
    ) as (
        url,
        _,
    ):
        arguments = [url, "--runs-with", "-tp 1 --gpu H200", "--max-model-len", "1024"]
        (row,) = document(*arguments, environment=dict(driver.environment()))["rows"]
        run = plan_from(*arguments, environment=dict(driver.environment()))
    assert row["free_memory"] == {
        "verdict": verdict,
        "requested_bytes": math.ceil(H200 * 0.92),
        "total_bytes": H200,
        "free_bytes": H200 - others,
        "more_gpus": 0,
    }
    assert words in flat(run.stdout)
    assert run.returncode == (0 if verdict == "enough" else 1)


def test_with_bytes_given_utilization_sizes_nothing_and_is_still_wanted_free(tmp_path: Path) -> None:
    server = gpu_server(4096, root=tiny(tmp_path), max_model_len=2048, kv_cache_memory_bytes=4096 * BLOCK)
    with http_server(server) as (url, _):
        run = plan_from(url, "--runs-with", ON_H100, "--gpu-memory-utilization", "0.5")
    text = flat(run.stdout)
    assert run.returncode == 0
    assert "its overhead is not measured: a flag gives the pool, and nothing is left over" in text
    assert (
        "kv_cache_memory_bytes=67108864 sizes the pool, and gpu_memory_utilization does not; the start still wants that share of the GPU free"
        in text
    )
    # ceil(85,028,896,768 / 2)
    assert f"it wants {H100 / 2 / 2**30:.2f} GiB of each GPU free as it starts (0.5 of 79.19)" in text


def test_0_takes_bytes_and_drafts_away(tmp_path: Path) -> None:
    server = gpu_server(4096, root=tiny(tmp_path), max_model_len=2048, kv_cache_memory_bytes=4096 * BLOCK)
    with http_server(server) as (url, _):
        (row,) = document(url, "--runs-with", ON_H100, "--kv-cache-memory-bytes", "0", "--mtp", "0")["rows"]
    assert row["changes"] == "--mtp 0 --kv-cache-memory-bytes 0"
    assert row["plan"]["kv_bytes_per_gpu"] > 70_000_000_000


def test_of_several_engines_the_fewest_blocks_count(tmp_path: Path) -> None:
    # The page tells the sum on each line: 100 blocks for each of two engines.
    server = gpu_server(90, 110, root=tiny(tmp_path), max_model_len=1600, kv_cache_memory_bytes=100 * BLOCK)
    with http_server(server) as (url, _):
        arguments = [url, "--runs-with", "-tp 1 --gpu H100", "--session-tokens", "1600"]
        answer = document(*arguments)
        text = flat(plan_from(*arguments).stdout)
    assert answer["from"]["engines"] == 2
    assert answer["from"]["observed"]["sessions"][0]["in_all"] == 2.0
    assert "as the engine says, of the engine with the fewest of 2." in text
    (row,) = answer["rows"]
    assert row["plan"]["data_parallel_size"] == 2


def test_what_other_starts_taught_comes_to_what_the_engine_measures(tmp_path: Path) -> None:
    # As the daemon names the start that runs, which is replaced, and one more.
    with http_server(gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=32_768)) as (url, _):
        replica = url.removeprefix("http://")
        own = sample(9 * 10**9, start=f"{replica}/0/1700000000")
        file = learned(tmp_path, own, sample(OVERHEAD + 2 * 10**9, start="another"))
        (row,) = document(url, "--runs-with", ON_H100, "--calibration", file)["rows"]
    assert row["calibrated"]["starts_measured"] == 2
    assert row["calibrated"]["overhead_bytes"] == OVERHEAD + 10**9


def test_nothing_told_of_the_gpus_is_said_first_and_ends_with_1(tmp_path: Path) -> None:
    with http_server(gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=16_384)) as (url, _):
        run = plan_from(url, "--tp", "1,2")
    text = flat(run.stdout)
    assert run.returncode == 1
    # 4,600,000 blocks of 16 tokens.
    assert text.startswith(
        "Now: 4492.19 sessions of 16,384 tokens (4492 whole), 73,600,000 tokens in 4,600,000 blocks, as the "
    )
    assert "careful: nothing told the parallel sizes and the GPU of what runs" in text
    assert "--runs-with='-tp 4 --gpu B200'" in text
    assert "its overhead is not measured: the GPU is not known" in text


def test_a_model_that_is_not_here_is_asked_for_and_taken_from_model(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    with http_server(gpu_server(BLOCKS, root="org/model", max_model_len=16_384)) as (url, _):
        without = plan_from(url, "--runs-with", ON_H100)
        given = document(url, str(folder), "--runs-with", ON_H100)
    assert without.returncode == 1
    assert "give MODEL, a folder with its config.json or its name on the hub" in flat(without.stdout)
    assert given["from"]["overhead"]["measured_bytes"] == OVERHEAD
    assert given["rows"][0]["plan"]["num_blocks"] == BLOCKS


def key_guarded(answers: dict[str, Answer]) -> dict[str, Answer]:
    return guarded(answers, header="Authorization", value="Bearer S3CRET", paths="/v1")


def test_a_server_with_a_key_is_asked_with_it(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("S3CRET\n")
    answers = key_guarded(gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=16_384))
    with http_server(answers) as (url, _):
        without = plan_from(url, "--runs-with", ON_H100)
        answer = document(url, "--runs-with", ON_H100, "--api-key-file", key)
    assert without.returncode == 1
    assert "--api-key-file" in without.stdout
    assert "S3CRET" not in without.stdout + without.stderr + json.dumps(answer)
    assert answer["from"]["overhead"]["measured_bytes"] == OVERHEAD


BARE = "# TYPE python_info gauge\npython_info 1.0\n"
STARTING = "# TYPE vllm:num_requests_running gauge\npython_info 1.0\n"
HTML = text_answer("<html>hello</html>", content_type="text/html")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/metrics": HTML}, "/metrics: "),
        ({"/metrics": text_answer("who?", status=401)}, "status 401: "),
        ({"/metrics": text_answer(BARE), "/version": text_answer('{"version": "0.33.0"}')}, "start it without --disable-log-stats"),
        ({}, "status 404: there is no such page; is this vLLM's address?"),
        ({"/metrics": text_answer(STARTING)}, "its page has no engine yet"),
    ],
)  # fmt: skip
def test_a_server_that_tells_nothing_ends_with_1_and_the_reason(
    answers: dict[str, Answer], words: str
) -> None:
    with http_server(answers) as (url, _):
        run = plan_from(url, "--tp", "8")
    assert (run.returncode, run.stdout) == (1, "")
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_nobody_listening_ends_with_1() -> None:
    run = plan_from("http://127.0.0.1:1")
    assert (run.returncode, run.stdout) == (1, "")
    assert "GET http://127.0.0.1:1/metrics: nothing listens there; is vLLM running?" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["host:8000"], "--from: 'host:8000' is no server's address"),
        (["http://127.0.0.1:1", "--compare", "x"], "--compare does not go with --from"),
        (["http://127.0.0.1:1", "--cases", "x"], "--cases does not go with --from"),
        (["http://127.0.0.1:1", "--assumptions", "article"], "--assumptions article does not go with --from"),
        (["http://127.0.0.1:1", "--index", "x"], "--index is of MODEL, which is missing"),
        (["http://127.0.0.1:1", "--runs-with", "-tp x"], "--runs-with: argument --tensor-parallel-size"),
        (["http://127.0.0.1:1", "--runs-with=--foo"], "--runs-with: unrecognized arguments: --foo"),
        (["http://127.0.0.1:1", "--runs-with", "'"], "--runs-with: "),
        (["http://127.0.0.1:1", "--calibration", "/no/such"], "--calibration: /no/such: no such file"),
        (["a", "--config", "/no/such"], "/no/such: cannot be read"),
        (["a", "--config", "/no/such", "--api-key-file", "k"], "with --config say `api_key_file` of the replica there"),
        (["http://127.0.0.1:1", "--tp", ",".join(map(str, range(1, 70)))], "at most 64"),
    ],
)  # fmt: skip
def test_a_wrong_option_ends_with_2(arguments: list[str], words: str) -> None:
    run = plan_from(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert words in flat(run.stderr)


def test_options_of_a_running_server_need_one() -> None:
    run = subprocess.run(
        [*COMMAND, "plan", "x", "--runs-with", "-tp 4"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "--config, --api-key-file and --runs-with are of --from URL, which is missing" in run.stderr


def test_the_demos_replay_can_be_asked() -> None:
    with daemon("demo") as demo:
        told = re.search(r"^the replay answers at (http://\S+); try: (.*)$", demo.output, re.MULTILINE)
        assert told is not None
        assert told[2] == f"kvheadroom plan --from {told[1]} --block-size 64"
        answer = document(told[1], "--block-size", "64", "--session-tokens", "1000")
    # 12 MiB at 1,024 B per token.
    assert answer["from"]["observed"]["kv_cache_size_tokens"] == 12_288
    assert answer["rows"][0]["plan"]["kv_cache_size_tokens"] == 12_288
    assert answer["rows"][0]["sessions"][0]["of_engine"] == 192 / 16


def test_what_a_server_calls_its_model_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    server = gpu_server(BLOCKS, root=tiny(tmp_path), max_model_len=16_384, name="e\x1b[2J\x07vil")
    with http_server(server) as (url, _):
        text = plan_from(url, "--runs-with", ON_H100, "--gpu-memory-utilization", "0.8").stdout
    assert "e\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}vil on vLLM 0.33.0" in text
    assert all(c.isprintable() or c == "\n" for c in text)
