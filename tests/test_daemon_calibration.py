"""The daemon beside two servers of one kind: each is measured, calibrates the other, and what was learned is there after restarts."""

import json
import os
import re
import signal
import stat
from pathlib import Path

from tests.conftest import capture
from tests.daemon import Daemon, check, daemon, wait_for
from tests.doubles.http_server import Answer, http_server, text_answer
from tests.test_daemon import config_file, vllm_answers

STARTED_AT = 1_795_989_324
"""Of the recorded server."""
LEFT = 2_900_000_000
"""ceil(3 GiB x 0.92) less the weights."""
SAID = "hbm_bytes: 3221225472, gpu: H100, weights_bytes: 63527435"
BLOCK_BYTES = 32 * 1024


def page(num_blocks: int, started_at: int = STARTED_AT) -> Answer:
    """The recorded page as of a server whose pool is what HBM leaves over."""
    text = capture("gqa_light_steady").decode()
    for old, new in (
        ('kv_cache_memory_bytes="4194304"', 'kv_cache_memory_bytes="None"'),
        ('kv_cache_size_tokens="4096"', f'kv_cache_size_tokens="{num_blocks * 32}"'),
        ('kv_cache_max_concurrency="2.0"', f'kv_cache_max_concurrency="{num_blocks / 64}"'),
        ('num_gpu_blocks="128"', f'num_gpu_blocks="{num_blocks}"'),
        ("process_start_time_seconds 1.79598932443e+09", f"process_start_time_seconds {started_at}.43"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text_answer(text)


def config(folder: Path, a: str, b: str, *, kept: str = "calibration.json") -> Path:
    file = folder / "kvheadroom.yaml"
    file.write_text(
        f"scrape_interval: 2s\ncalibration_file: {folder}/{kept}\n"
        f"replicas:\n  - {{url: '{a}', name: a, {SAID}}}\n  - {{url: '{b}', name: b, {SAID}}}\n"
    )
    return file


def calibrated(serve: Daemon, replica: str) -> float | None:
    return serve.value("kvheadroom_calibrated_blocks", replica=replica)


def test_two_servers_of_one_kind_calibrate_each_other_and_their_next_starts(tmp_path: Path) -> None:
    answers_a, answers_b = ({**vllm_answers(), "/metrics": page(number)} for number in (50_000, 49_000))
    file = tmp_path / "calibration.json"
    with http_server(answers_a) as (a, _), http_server(answers_b) as (b, _):
        with daemon("serve", "--config", config(tmp_path, a, b)) as serve:
            wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="b"), "the prediction")
            assert calibrated(serve, "a") is None
            assert "its own is not measured yet: it is measured once nothing" in serve.pages()
            assert serve.value("kvheadroom_source_up", replica="", source="calibration") == 1
            # 30 s after the first scrape.
            wait_for(lambda: calibrated(serve, "a") and calibrated(serve, "b"), "both figures", seconds=50)
            # Each is what the other's overhead leaves, in whole blocks: the other's own blocks.
            assert (calibrated(serve, "a"), calibrated(serve, "b")) == (49_000, 50_000)
            assert serve.value(
                "kvheadroom_overhead_sample_bytes", replica="a", start=f"a/0/{STARTED_AT}"
            ) == (LEFT - 50_000 * BLOCK_BYTES)
            assert serve.value("kvheadroom_calibrated_pool_tokens", replica="a") == 49_000 * 32
            terms = serve.metrics()["kvheadroom_calibrated_memory_bytes"]
            assert sum(size for labels, size in terms if labels["replica"] == "a") == 3 * 2**30
            sessions = "kvheadroom_calibrated_sessions"
            assert serve.value(sessions, replica="a", session_tokens="2048") == 49_000 / 64
            assert (
                serve.value("kvheadroom_calibration_reliability", replica="a", reliability="one_sample") == 1
            )
            text = re.sub(r"\s+", " ", serve.pages())
            assert "<td>1,568,000</td><td>1,600,000</td>" in text
            assert "Calibrated: the overhead is learned from 1 start like it (n = 1: " in text
            status = serve.get("/api/v1/status").json()
            assert status["replicas"][0]["engines"][0]["calibrated"]["overhead_bytes"] == (
                LEFT - 49_000 * BLOCK_BYTES
            )
            wait_for(lambda: file.exists() and len(json.loads(file.read_text())["samples"]) == 2, "the file")
            # The first server starts anew and has fewer blocks: what it had before has its say now.
            answers_a["/metrics"] = page(48_000, STARTED_AT + 500)
            wait_for(lambda: serve.value("kvheadroom_observed_blocks", replica="a") == 48_000, "the restart")
            # The median of two.
            wait_for(lambda: calibrated(serve, "a") == 49_500, "the figure of the next start")
            assert calibrated(serve, "b") == 50_000
            assert serve.value("kvheadroom_predicted_blocks", replica="a") == serve.value(
                "kvheadroom_predicted_blocks", replica="b"
            )
            assert serve.value("kvheadroom_calibration_excluded_starts_total", replica="a") is None
        # Another life of the daemon knows it at once, and so does a check.
        with daemon("serve", "--config", config(tmp_path, a, b)) as serve:
            wait_for(lambda: calibrated(serve, "a") == 49_500, "what was learned before")
            wait_for(lambda: calibrated(serve, "b") == 50_000, "the same of b")
            # Another file is another memory; the first one stays as it is.
            before = file.read_bytes()
            config(tmp_path, a, b, kept="other.json")
            os.kill(serve.pid, signal.SIGHUP)
            wait_for(lambda: calibrated(serve, "a") is None, "the other file")
            assert file.read_bytes() == before
        run = check("--config", config(tmp_path, a, b))
        assert run.returncode == 0, run.stdout + run.stderr
        assert "calibrated 1,584,000, observed 1,536,000" in run.stdout
        assert f"calibration {file}: 2 starts" in run.stdout


def test_a_damaged_calibration_file_is_told_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{")
    with http_server({**vllm_answers(), "/metrics": page(50_000)}) as (url, _):
        with daemon("serve", "--config", config(tmp_path, url, url)) as serve:
            wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="a"), "the prediction")
            wait_for(
                lambda: serve.value("kvheadroom_source_up", replica="", source="calibration") == 0,
                "the failure",
            )
            assert (
                serve.value("kvheadroom_source_failures_total", source="calibration", reason="bad_answer")
                == 1
            )
            assert "calibration: bad answer." in serve.pages()
            assert serve.output.count("this is no calibration") == 1
        run = check("--config", config(tmp_path, url, url))
    assert run.returncode == 1
    assert "FAILED, bad_answer:" in run.stdout
    # Nothing was to be kept, so nothing was touched.
    assert (tmp_path / "calibration.json").read_text() == "{"
    assert stat.S_ISREG((tmp_path / "calibration.json").stat().st_mode)


def test_what_is_said_of_one_servers_overhead_wins_over_what_is_said_of_all(tmp_path: Path) -> None:
    with http_server({**vllm_answers(), "/metrics": page(50_000)}) as (url, _):
        file = config_file(
            tmp_path,
            f"overhead_gb: 1\nreplicas:\n  - {{url: '{url}', name: all, {SAID}}}\n"
            f"  - {{url: '{url}', name: one, {SAID}, overhead_gb: 0.5}}\n",
        )
        with daemon("serve", "--config", file) as serve:
            wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="one"), "one")
            wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="all"), "all")
            overhead = {
                labels["replica"]: size
                for labels, size in serve.metrics()["kvheadroom_predicted_memory_bytes"]
                if labels["term"] == "overhead"
            }
            assert overhead == {"all": 1_000_000_000, "one": 500_000_000}
            assert serve.value("kvheadroom_source_up", source="calibration") is None
