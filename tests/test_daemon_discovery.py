"""Replicas that come and go in the daemon as a process: listed in files, shown, checked, reloaded."""

import json
import re
import signal
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.daemon import COMMAND, check, daemon, wait_for
from tests.doubles.http_server import http_server, text_answer
from tests.test_daemon import config_file, vllm_answers


def listed(*urls: str, **labels: str) -> str:
    return json.dumps([{"targets": [url.removeprefix("http://") for url in urls], "labels": labels}])


def files_config(folder: Path, more: str = "") -> Path:
    return config_file(
        folder,
        f"file_sd_configs: [{{files: ['{folder}/*.json'], refresh_interval: 200ms, replica: {{gpu: CPU}}}}]\n{more}",
    )


def test_servers_listed_in_a_file_come_and_go_while_the_others_go_on(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (a, seen), http_server(vllm_answers()) as (b, _):
        one, two = (url.removeprefix("http://") for url in (a, b))
        with daemon("serve", "--config", files_config(tmp_path)) as serve:
            assert "watching what the config's sources of servers find every 0.5 s" in serve.output
            wait_for(
                lambda: serve.value("kvheadroom_source_up", source="file_sd_configs[0]") == 0, "the state"
            )
            assert "no file matches" in serve.pages()
            file = tmp_path / "vllm.json"
            file.write_text(listed(a, team="search"))
            pool = "kvheadroom_observed_pool_tokens"
            wait_for(lambda: serve.value(pool, replica=one) == 4096, "the first server")
            assert (
                serve.value(
                    "kvheadroom_replica_info", replica=one, source="file_sd_configs[0]", team="search"
                )
                == 1
            )
            assert serve.value("kvheadroom_discovery_targets", source="file_sd_configs[0]") == 1
            # What the template says of all: on a CPU nothing is missing for a prediction.
            predicted = "kvheadroom_predicted_pool_tokens"
            wait_for(lambda: serve.value(predicted, replica=one) == 4096, "its prediction")
            assert serve.get("/-/ready").status_code == 200

            asked = len(seen)
            file.write_text(listed(a, b, team="chat"))
            wait_for(lambda: serve.value(pool, replica=two) == 4096, "the second server")
            assert serve.value("kvheadroom_replica_info", replica=one, team="chat") == 1
            assert [path for path, _ in seen[asked:] if path == "/version"] == [], "it is not asked afresh"

            file.write_text(listed(a, b)[:-3])
            wait_for(
                lambda: serve.value("kvheadroom_source_up", source="file_sd_configs[0]") == 0, "the fault"
            )
            assert serve.value("kvheadroom_replica_info", replica=two) == 1
            assert "is no valid JSON" in serve.pages()
            failures = serve.value(
                "kvheadroom_source_failures_total", source="file_sd_configs[0]", reason="bad_answer"
            )
            assert failures is not None
            assert failures >= 1

            file.write_text(listed(b))
            wait_for(
                lambda: serve.value("kvheadroom_replica_info", replica=one) is None, "the end of the first"
            )
            assert serve.value("kvheadroom_replica_state", replica=one) is None
            assert serve.value("kvheadroom_replica_info", replica=two) == 1
            assert serve.value("kvheadroom_source_up", source="file_sd_configs[0]") == 1
            status = serve.get("/api/v1/status").json()
            assert status["discoveries"][0]["targets"] == 1
            assert status["targets"] == [{"replica": two, "source": "file_sd_configs[0]", "labels": {}}]

            # A reload may take the source away, and name the server itself.
            config_file(tmp_path, f"replicas: [{{url: '{b}', gpu: CPU, labels: {{team: x}}}}]")
            serve._process.send_signal(signal.SIGHUP)
            wait_for(
                lambda: serve.value("kvheadroom_replica_info", source="config", team="x") == 1, "the reload"
            )
            assert serve.value("kvheadroom_discovery_targets") is None
            wait_for(lambda: serve.value(pool, replica=two) == 4096, "its numbers")
            assert "Traceback" not in serve.output


def test_check_asks_the_sources_once_and_tells_what_is_left_out(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (url, _):
        config = files_config(tmp_path)
        run = check("--config", config)
        assert run.returncode == 1
        assert (
            f"source file_sd_configs[0]: 0 replicas\n              FAILED, not_found: no file matches {tmp_path}/*.json"
            in run.stdout
        )
        assert "0 of 0 replicas complete" in run.stdout

        file = tmp_path / "vllm.json"
        file.write_text(listed(url))
        run = check("--config", config)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "source file_sd_configs[0]: 1 replica\n" in run.stdout
        assert "1 of 1 replicas complete" in run.stdout

        file.write_text(listed(url, "http://h:1/x"))
        run = check("--config", config)
        assert run.returncode == 1
        assert f"  left out    {file}: 'h:1/x': a target is host:port" in run.stdout


def test_one_server_is_recorded_only_where_the_config_names_it(tmp_path: Path) -> None:
    run = subprocess.run(
        [*COMMAND, "record", "--config", str(files_config(tmp_path)), "--out", str(tmp_path / "r.jsonl.gz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "the config names no server itself; give --target URL" in run.stderr


def test_servers_listed_by_another_program_come_and_go(tmp_path: Path) -> None:
    answer = text_answer("[]")

    def page(request: BaseHTTPRequestHandler) -> None:
        answer(request)

    with (
        http_server(vllm_answers()) as (vllm, _),
        http_server({"/sd": page}) as (lists, _),
    ):
        settings = f"url: '{lists}/sd', refresh_interval: 200ms, replica: {{gpu: CPU, labels: {{site: a}}}}"
        config = config_file(tmp_path, f"http_sd_configs: [{{{settings}}}]")
        with daemon("serve", "--config", config) as serve:
            up = {"replica": "", "source": "http_sd_configs[0]"}
            wait_for(lambda: serve.value("kvheadroom_source_up", **up) == 1, "the source")
            answer = text_answer(listed(vllm, team="x"))
            pool = "kvheadroom_predicted_pool_tokens"
            wait_for(lambda: serve.value(pool) == 4096, "the server")
            assert (
                serve.value("kvheadroom_replica_info", site="a", team="x", source="http_sd_configs[0]") == 1
            )
            answer = text_answer("oh", status=500)
            wait_for(lambda: serve.value("kvheadroom_source_up", **up) == 0, "the fault")
            assert serve.value("kvheadroom_replica_info", site="a") == 1
            assert "status 500" in serve.pages()
            answer = text_answer("[]")
            wait_for(lambda: serve.value("kvheadroom_replica_info") is None, "the end of the server")


def test_two_daemons_share_the_servers_of_one_config(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (vllm, _):
        addresses = [f"{vllm.removeprefix('http://')}", *(f"127.0.0.1:{port}" for port in range(1, 9))]
        (tmp_path / "vllm.json").write_text(json.dumps([{"targets": addresses}]))
        config = config_file(tmp_path, f"file_sd_configs: [{{files: [{tmp_path}/vllm.json]}}]")
        shares = []
        for shard in ("0/2", "1/2"):
            run = check("--config", config, "--shard", shard)
            assert run.returncode == 1, run.stderr
            watched = re.findall(r"^replica (\S+)", run.stdout, re.MULTILINE)
            assert f"of {len(watched)} replicas complete (share {shard} of all)" in run.stdout
            assert f"source file_sd_configs[0]: {len(watched)} replica" in run.stdout
            shares.append(watched)
    assert sorted(shares[0] + shares[1]) == sorted(addresses)
