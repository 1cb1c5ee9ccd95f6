"""The daemon as a process: demo and serve, over HTTP, with targets that misbehave."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.conftest import capture
from tests.daemon import COMMAND, daemon, hear_signals, wait_for
from tests.doubles.http_server import Answer, http_server, make_certificate, text_answer

SHIPPED_MODEL = Path(__file__).parents[1] / "exporter" / "kvheadroom" / "recordings" / "tiny-llama"


def models(root: str, max_model_len: int = 2048) -> Answer:
    entry = {"id": "tiny", "root": root, "parent": None, "max_model_len": max_model_len}
    return text_answer(json.dumps({"data": [entry]}))


def vllm_answers(page: str = "gqa_light_steady", root: str = str(SHIPPED_MODEL)) -> dict[str, Answer]:
    return {
        "/metrics": text_answer(capture(page)),
        "/version": text_answer('{"version": "0.32.0"}'),
        "/v1/models": models(root),
    }


def test_a_thread_that_learns_does_not_keep_the_loop_waiting_for_long_at_each_wake() -> None:
    program = (
        "import sys; from kvheadroom.cli import _run_loop\n"
        "async def told(): print(sys.getswitchinterval())\n"
        "_run_loop(told)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(run.stdout) == pytest.approx(0.001)


def config_file(folder: Path, text: str) -> Path:
    file = folder / "kvheadroom.yaml"
    # Numbers are withheld after three intervals: long enough for a busy machine, short enough for a test.
    file.write_text("scrape_interval: 500ms\n" + text)
    return file


def test_the_demo_replays_and_says_so_on_page_and_terminal_and_ends_within_a_second() -> None:
    with daemon("demo") as demo:
        assert "This is a replay of a recording, not a live server: vLLM 0.32.0 on a CPU" in demo.output
        wait_for(lambda: demo.value("kvheadroom_observed_pool_tokens") == 12288, "the replayed pool")
        assert demo.value("kvheadroom_predicted_pool_tokens", replica="replay") == 12288
        page = demo.pages()
        assert "This is a replay of a recording, not a live server" in page
        assert demo.get("/api/v1/status").json()["notice"].startswith("This is a replay")
        code, took = demo.stop(signal.SIGINT)
    assert code == 0
    assert took < 1.0
    assert "Traceback" not in demo.output


def test_the_demo_stays_on_this_machine() -> None:
    run = subprocess.run(
        [*COMMAND, "demo", "--web.listen-address", ":9878"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert "the demo stays on this machine; use 127.0.0.1:PORT" in run.stderr


def test_one_target_is_enough() -> None:
    with http_server(vllm_answers()) as (url, _), daemon("serve", "--target", url) as serve:
        replica = url.removeprefix("http://")
        wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
        assert serve.value("kvheadroom_predicted_blocks", replica=replica, engine="0") == 128
        assert serve.value("kvheadroom_observed_blocks", replica=replica, engine="0") == 128
        assert serve.value("kvheadroom_missing_fact") is None
        for path, word in (
            ("/", '<h2 id="engines">1 engine</h2>'),
            ("/metrics", "kvheadroom_build_info"),
            ("/-/healthy", "healthy"),
            ("/-/ready", "ready"),
            ("/api/v1/status", '"replicas"'),
            ("/runbooks/KvHeadroomTargetDown", "Mitigation"),
        ):
            answer = serve.get(path)
            assert (answer.status_code, word in answer.text) == (200, True), path
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert serve.get("/nowhere").status_code == 404
        assert serve.get("/runbooks/NoSuchAlert").status_code == 404
        assert serve.stop(signal.SIGTERM)[0] == 0


def test_before_the_first_scrape_it_is_healthy_but_not_ready() -> None:
    def slow(request: BaseHTTPRequestHandler) -> None:
        time.sleep(2)
        text_answer("")(request)

    with http_server({"/metrics": slow}) as (url, _), daemon("serve", "--target", url) as serve:
        assert serve.get("/-/healthy").status_code == 200
        answer = serve.get("/-/ready")
        assert answer.status_code == 503
        assert "not scraped yet" in answer.text


def test_without_the_model_folder_the_observed_part_works_and_the_way_out_is_told(tmp_path: Path) -> None:
    with (
        http_server(vllm_answers(root="org/some-model")) as (url, _),
        daemon(
            "serve", "--config", config_file(tmp_path, f"replicas: [{{url: '{url}', gpu: CPU}}]")
        ) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_observed_pool_tokens") == 4096, "the observed pool")
        assert serve.value("kvheadroom_predicted_pool_tokens") is None
        assert serve.value("kvheadroom_missing_fact", fact="model_files") == 1
        assert serve.value("kvheadroom_sessions_headroom", session_tokens="2048") == 0
        page = serve.pages()
        assert "org/some-model" in page
        assert "set `model: /path/to/the/model`" in page


def test_the_operators_model_folder_and_flags_are_used(tmp_path: Path) -> None:
    text = (
        f"replicas: [{{url: '%s', name: mine, model: '{SHIPPED_MODEL}', gpu: CPU,"
        " flags: {tensor_parallel_size: 2}}]"
    )
    with (
        http_server(vllm_answers(root="org/some-model")) as (url, _),
        daemon("serve", "--config", config_file(tmp_path, text % url)) as serve,
    ):
        # One KV head per GPU of two: half the bytes per token, twice the blocks of the 4 MiB.
        wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="mine") == 256, "the prediction")
        assert serve.value("kvheadroom_predicted_bytes_per_token") == 512
        assert serve.value("kvheadroom_observed_blocks") == 128


def test_a_target_that_goes_away_is_down_within_a_tick_and_its_numbers_go_after_three(tmp_path: Path) -> None:
    answers = vllm_answers()
    with http_server(answers) as (url, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{url}', name: r}}]")
        with daemon("serve", "--config", config) as serve:
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio") is not None, "usage")
            answers["/metrics"] = text_answer("going down", status=503)
            wait_for(lambda: serve.value("kvheadroom_source_up", source="metrics") == 0, "source down")
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio") is None, "withholding", seconds=5)
            assert serve.value("kvheadroom_sample_age_seconds") is None
            reason = {"source": "metrics", "reason": "unavailable"}
            # The third failed scrape and the end of the third interval come at the same moment.
            wait_for(
                lambda: (serve.value("kvheadroom_source_failures_total", **reason) or 0) >= 3,
                "three failures",
            )
            assert "older than three scrapes" in serve.pages()
            answers["/metrics"] = text_answer(capture("gqa_heavy"))
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio") is not None, "recovery")
            assert serve.alive


def test_a_hanging_target_delays_nobody_else(tmp_path: Path) -> None:
    with socket.socket() as silent, http_server(vllm_answers()) as (url, _):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hung = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = config_file(
            tmp_path, f"replicas: [{{url: '{hung}', name: hung}}, {{url: '{url}', name: good}}]"
        )
        with daemon("serve", "--config", config) as serve:
            wait_for(
                lambda: serve.value("kvheadroom_source_failures_total", replica="hung", reason="timeout"),
                "the timeout",
            )
            wait_for(
                lambda: serve.value("kvheadroom_kv_usage_ratio", replica="good") is not None, "the good one"
            )
            for _ in range(20):
                # Withheld numbers would mean that three ticks in a row were late.
                assert serve.value("kvheadroom_kv_usage_ratio", replica="good") is not None
                time.sleep(0.1)
            assert serve.value("kvheadroom_kv_usage_ratio", replica="hung") is None
            assert serve.stop()[1] < 1.0


def test_the_api_key_is_sent_to_v1_and_is_nowhere_to_be_seen(tmp_path: Path) -> None:
    secret = "sk-never-shown-5c1f"
    (tmp_path / "key").write_text(secret + "\n")

    def guarded(request: BaseHTTPRequestHandler) -> None:
        ok = request.headers.get("Authorization") == f"Bearer {secret}"
        (models(str(SHIPPED_MODEL)) if ok else text_answer("who?", status=401))(request)

    with http_server({**vllm_answers(), "/v1/models": guarded}) as (url, seen):
        text = f"replicas: [{{url: '{url}', api_key_file: '{tmp_path / 'key'}'}}, {{url: '{url}', name: keyless}}]"
        with daemon("serve", "--config", config_file(tmp_path, text)) as serve:
            wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica=url[7:]) == 128, "prediction")
            wait_for(
                lambda: serve.value("kvheadroom_source_up", replica="keyless", source="models") == 0, "401"
            )
            shown = serve.pages() + serve.get("/metrics").text + serve.get("/api/v1/status").text
            assert "set `api_key_file`" in shown
            assert secret not in shown + serve.output
    with_key = {path for path, headers in seen if "Authorization" in headers}
    assert with_key == {"/v1/models"}


def test_a_certificate_of_an_unknown_ca_is_told_with_the_way_out_and_no_key_goes_there(
    tmp_path: Path,
) -> None:
    secret = "sk-never-sent-7d20"
    (tmp_path / "key").write_text(secret)
    certificate = make_certificate(tmp_path)
    with http_server(vllm_answers(), certificate=certificate) as (url, seen):
        text = f"replicas: [{{url: '{url}', name: r, gpu: CPU, api_key_file: '{tmp_path / 'key'}'}}]"
        config = config_file(tmp_path, text)
        with daemon("serve", "--config", config) as serve:
            wait_for(lambda: serve.value("kvheadroom_source_failures_total", reason="tls"), "the TLS failure")
            page = serve.pages()
            assert "the certificate is not trusted" in page
            assert "tls: {ca_file: /path/to/ca.pem}" in page
            shown = page + serve.get("/metrics").text + serve.get("/api/v1/status").text
            assert secret not in shown + serve.output
        assert seen == []
        trusting = {**os.environ, "SSL_CERT_FILE": str(certificate)}
        with daemon("serve", "--config", config, environment=trusting) as serve:
            wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="r") == 128, "the prediction")
            shown = serve.pages() + serve.get("/metrics").text + serve.get("/api/v1/status").text
            assert secret not in shown + serve.output
    assert {path for path, headers in seen if "Authorization" in headers} == {"/v1/models"}


def test_two_prometheus_servers_at_once_are_both_answered_from_one_scrape(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (url, seen):
        config = tmp_path / "kvheadroom.yaml"
        config.write_text(f"{{scrape_interval: 1h, replicas: [{{url: '{url}', name: r}}]}}")
        with daemon("serve", "--config", config) as serve, ThreadPoolExecutor(2) as readers:
            wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
            pages = list(readers.map(lambda _: serve.get("/metrics"), range(10)))
    assert {page.status_code for page in pages} == {200}
    ageless = {re.sub(r"(?m)^kvheadroom_sample_age_seconds{.*", "", page.text) for page in pages}
    assert len(ageless) == 1
    assert "kvheadroom_observed_blocks{" in ageless.pop()
    assert [path for path, _ in seen].count("/metrics") == 1


def test_a_key_that_was_renewed_on_disk_is_used_after_sighup(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the-old-one\n")

    def guarded(request: BaseHTTPRequestHandler) -> None:
        ok = request.headers.get("Authorization") == "Bearer the-new-one"
        (models(str(SHIPPED_MODEL)) if ok else text_answer("who?", status=401))(request)

    with http_server({**vllm_answers(), "/v1/models": guarded}) as (url, _):
        text = f"replicas: [{{url: '{url}', name: r, api_key_file: '{tmp_path / 'key'}', gpu: CPU}}]"
        with daemon("serve", "--config", config_file(tmp_path, text)) as serve:
            wait_for(lambda: serve.value("kvheadroom_source_up", source="models") == 0, "401")
            (tmp_path / "key").write_text("the-new-one\n")
            os.kill(serve.pid, signal.SIGHUP)
            wait_for(lambda: serve.value("kvheadroom_source_up", source="models") == 1, "the new key")
            assert "the-" not in serve.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--target", "host:8000"], "write e.g. http://host:8000"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["serve", "--target", "http://h:1", "--web.listen-address", "9878"], "is no listen address"),
        (
            ["serve", "--target", "http://h:1", "--web.listen-address", "1.2.3.4:1"],
            "cannot listen on 1.2.3.4:1",
        ),
        (["frobnicate"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_sentence(arguments: list[str], message: str) -> None:
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=20)
    assert run.returncode == 2
    assert run.stdout == ""
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_taken_port_is_said_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = subprocess.run(
            [*COMMAND, "demo", "--web.listen-address", address], capture_output=True, text=True, check=False
        )
    assert run.returncode == 2
    assert re.search(r"cannot listen on 127\.0\.0\.1:\d+ .*--web\.listen-address", run.stderr)
    assert "Traceback" not in run.stderr


def test_an_unreadable_key_file_is_named_at_start(tmp_path: Path) -> None:
    config = config_file(tmp_path, "replicas: [{url: 'http://127.0.0.1:1', api_key_file: /nowhere/key}]")
    run = subprocess.run(
        [*COMMAND, "serve", "--config", str(config), "--web.listen-address", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert run.returncode == 2
    assert "api_key_file /nowhere/key cannot be read" in run.stderr


def test_two_readers_get_their_pages_compressed_or_not() -> None:
    with http_server(vllm_answers()) as (url, _), daemon("serve", "--target", url) as serve:
        wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
        plain = serve.get("/metrics", **{"Accept-Encoding": "identity"})
        small = serve.get("/metrics", **{"Accept-Encoding": "gzip"})
        assert "Content-Encoding" not in plain.headers
        assert small.headers["Content-Encoding"] == "gzip"
        assert plain.text.splitlines()[:20] == small.text.splitlines()[:20]


def test_a_vllm_without_its_metrics_is_told_from_another_program() -> None:
    bare = text_answer("# HELP python_info x\n# TYPE python_info gauge\npython_info 1\n")
    with (
        http_server({**vllm_answers(), "/metrics": bare}) as (vllm, _),
        http_server({"/metrics": bare}) as (other, _),
        daemon("serve", "--target", vllm, "--target", other) as serve,
    ):
        wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
        assert serve.value("kvheadroom_replica_state", replica=vllm[7:], state="stats_disabled") == 1
        assert serve.value("kvheadroom_replica_state", replica=other[7:], state="down") == 1
        page = serve.pages()
        assert "vLLM 0.32.0 answers, but its page has no vllm: metric" in page
        assert "another program, or vLLM with --disable-log-stats" in page


def test_503_with_a_healthy_server_is_scaling_and_not_down(tmp_path: Path) -> None:
    answers = vllm_answers()
    with (
        http_server(answers) as (url, _),
        daemon("serve", "--config", config_file(tmp_path, f"replicas: [{{url: '{url}'}}]")) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_replica_state", state="serving") == 1, "serving")
        answers["/metrics"] = text_answer("scaling", status=503)
        answers["/health"] = text_answer("")
        wait_for(lambda: serve.value("kvheadroom_replica_state", state="scaling") == 1, "scaling")
        answers["/health"] = text_answer("dead", status=503)
        wait_for(lambda: serve.value("kvheadroom_replica_state", state="down") == 1, "down")
        assert "serving -&gt; scaling" in serve.pages()


def test_a_restart_with_another_pool_behind_the_same_url_is_an_event(tmp_path: Path) -> None:
    answers = vllm_answers("gqa_after_all")
    with http_server(answers) as (url, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{url}', gpu: CPU}}]")
        with daemon("serve", "--config", config) as serve:
            wait_for(lambda: serve.value("kvheadroom_observed_blocks") == 128, "the first pool")
            answers.update(
                {**vllm_answers("gqa_chat_waiting10"), "/v1/models": models(str(SHIPPED_MODEL), 4096)}
            )
            wait_for(lambda: serve.value("kvheadroom_observed_blocks") == 384, "the second pool")
            assert serve.value("kvheadroom_predicted_blocks") == 384
            assert serve.value("kvheadroom_predicted_pool_tokens") == 12288
            assert serve.value("kvheadroom_replica_restarts_total") == 1
            events = serve.get("/api/v1/status").json()["replicas"][0]["events"]
            assert {"kind": "capacity_changed"}.items() <= events[-1].items()
            assert events[-1]["detail"] == (
                "engine 0: pool 128 blocks of 32 -> 384 blocks of 32, max_model_len 2,048 -> 4,096"
            )


def test_sighup_takes_a_new_config_over_as_a_whole_and_leaves_the_rest_running(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (a, seen_a), http_server(vllm_answers("gqa_heavy")) as (b, _):
        config = config_file(tmp_path, f"replicas: [{{url: '{a}', name: a}}, {{url: '{a}', name: gone}}]")
        with daemon("serve", "--config", config) as serve:
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio", replica="a") is not None, "a")
            asked = [path for path, _ in seen_a].count("/version")
            assert serve.value("kvheadroom_config_last_reload_successful") == 1
            config_file(tmp_path, f"replicas: [{{url: '{a}', name: a}}, {{url: '{b}', name: b}}]")
            os.kill(serve.pid, signal.SIGHUP)
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio", replica="b") is not None, "b")
            assert serve.value("kvheadroom_source_up", replica="gone", source="metrics") is None
            # `a` was left as it was: nobody asked it for its facts again.
            assert [path for path, _ in seen_a].count("/version") == asked
            assert serve.value("kvheadroom_kv_usage_ratio", replica="a") is not None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("replicas: [{url: nonsense}]", "no server's address"),
        ("replicas: [{url: 'http://h:1', api_key_file: /nowhere/key}]", "/nowhere/key cannot be read"),
        ("a: [", "no valid YAML"),
        ("a: 2024-13-45", "no valid YAML"),
        ("replicas: [{url: 'http://h:1', api_key_file: {folder}/pipe}]", "/pipe cannot be read"),
    ],
)
def test_a_config_with_a_fault_changes_nothing_and_a_gauge_says_so(
    tmp_path: Path, text: str, word: str
) -> None:
    with http_server(vllm_answers()) as (url, _):
        good = f"replicas: [{{url: '{url}', name: r}}]"
        with daemon("serve", "--config", config_file(tmp_path, good)) as serve:
            wait_for(lambda: serve.value("kvheadroom_kv_usage_ratio", replica="r") is not None, "r")
            since = serve.value("kvheadroom_config_last_reload_success_timestamp_seconds")
            os.mkfifo(tmp_path / "pipe")
            config_file(tmp_path, text.replace("{folder}", str(tmp_path)))
            os.kill(serve.pid, signal.SIGHUP)
            wait_for(lambda: serve.value("kvheadroom_config_last_reload_successful") == 0, "the gauge")
            assert serve.value("kvheadroom_config_last_reload_success_timestamp_seconds") == since
            assert serve.value("kvheadroom_kv_usage_ratio", replica="r") is not None
            assert "the config before it is in use" in serve.pages()
            assert word in serve.get("/api/v1/status").json()["config_fault"]
            config_file(tmp_path, good)
            os.kill(serve.pid, signal.SIGHUP)
            wait_for(lambda: serve.value("kvheadroom_config_last_reload_successful") == 1, "recovery")
            assert serve.alive


def test_sighup_without_a_config_file_is_said_and_harmless() -> None:
    with http_server(vllm_answers()) as (url, _), daemon("serve", "--target", url) as serve:
        os.kill(serve.pid, signal.SIGHUP)
        wait_for(lambda: "there is no config file to read again" in serve.output, "the line")
        assert serve.alive
        assert serve.value("kvheadroom_config_last_reload_successful") is None


def test_ctrl_c_at_any_moment_of_the_start_ends_without_a_traceback() -> None:
    for delay in (0.05, 0.15, 0.25, 0.4, 0.6):
        process = subprocess.Popen(
            [*COMMAND, "demo", "--web.listen-address", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_signals,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
        # In the first instants it is the interpreter that is interrupted, before a line of ours has run.
        assert "kvheadroom/" not in errors, errors
        assert process.returncode in (0, 130, -signal.SIGINT)


def test_a_model_folder_on_a_disk_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    # Opening a pipe without a writer hangs as a dead mount does; as a regular file it is let through.
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(
        "import pathlib, time\n"
        "read = pathlib.Path.read_bytes\n"
        "def slow(path):\n"
        "    time.sleep(60 if path.name == 'config.json' else 0)\n"
        "    return read(path)\n"
        "pathlib.Path.read_bytes = slow\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{shim}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with (
        http_server(vllm_answers()) as (url, _),
        daemon("serve", "--target", url, environment=environment) as serve,
    ):
        wait_for(lambda: serve.value("kvheadroom_observed_blocks") == 128, "the observed part", seconds=6)
        assert serve.value("kvheadroom_predicted_blocks") is None
        assert serve.value("kvheadroom_missing_fact", fact="model_files") == 1
        code, took = serve.stop()
        assert (code, took < 1.0) == (0, True)


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [("gzip", True), ("deflate, gzip;q=0.5", True), ("gzip;q=0", False), ("identity", False), ("", False)],
)
def test_a_page_is_compressed_for_those_who_take_it(accepted: str, *, compressed: bool) -> None:
    from kvheadroom.outputs.server import _takes_gzip

    assert _takes_gzip(accepted) is compressed


def test_targets_of_the_command_line_are_added_to_the_file_and_its_settings_stay(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (a, _), http_server(vllm_answers()) as (b, _):
        file = tmp_path / "c.yaml"
        file.write_text(
            f"scrape_interval: 700ms\nsession_tokens: [320]\nreplicas: [{{url: '{a}', name: a}}]\n"
        )
        with daemon("serve", "--config", file, "--target", b) as serve:
            wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
            assert "every 0.7 s" in serve.output
            for replica in ("a", b[7:]):
                wait_for(
                    lambda replica=replica: (
                        serve.value(  # type: ignore[misc]
                            "kvheadroom_observed_sessions", replica=replica, session_tokens="320"
                        )
                        == 12.8
                    ),
                    "sessions of 320 tokens",
                )


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (" \n", "is empty"),
        ("two\nlines", "holds more than one line"),
        ("gr\u00fcn", "holds other characters than printable ASCII"),
    ],
)
def test_a_key_file_without_a_usable_key_is_named_and_not_shown(tmp_path: Path, key: str, fault: str) -> None:
    (tmp_path / "key").write_text(key)
    text = f"replicas: [{{url: 'http://127.0.0.1:1', api_key_file: '{tmp_path / 'key'}'}}]"
    run = subprocess.run(
        [*COMMAND, "check", "--config", str(config_file(tmp_path, text))],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert run.returncode == 2
    assert run.stderr == f"kvheadroom: 127.0.0.1:1: api_key_file {tmp_path / 'key'} {fault}\n"
