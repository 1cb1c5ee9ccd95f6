"""Servers that lie: whatever one says, its own oddities are told and nobody else suffers."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.conftest import capture
from tests.daemon import Daemon, daemon, wait_for
from tests.doubles.http_server import Answer, http_server, make_certificate, text_answer
from tests.end_to_end.test_main_job import status_of
from tests.test_daemon import SHIPPED_MODEL, config_file, models, vllm_answers

DIGITS = "1" + "0" * 400
INFO_LIES = {
    "num_gpu_blocks": ["0", "1", "-5", "1e9", DIGITS, "9" * 5000, "x"],
    "kv_cache_size_tokens": ["0", DIGITS, "-1"],
    "kv_cache_max_concurrency": ["0.0", "nan", "inf", "1e-320", "1e308", "-1"],
    "block_size": ["0", DIGITS, "-16"],
    "effective_attention_block_size": ["0", DIGITS],
    "gpu_memory_utilization": ["5", "1e308", "0", "nan"],
    "kv_cache_memory_bytes": ["0", DIGITS],
    "engine": ["9" * 5000, "-1", "x" * 9000],
    "cache_dtype": ["<script>", "x" * 3000],
}


def with_info(label: str, value: str) -> bytes:
    page = capture("gqa_light_steady").decode()
    lied, count = re.subn(rf'([{{,]){label}="[^"]*"', rf'\g<1>{label}="{value}"', page)
    assert count
    return lied.encode()


PAGES = {
    **{
        f"{label}={value[:12]}": with_info(label, value)
        for label, values in INFO_LIES.items()
        for value in values
    },
    "not utf-8": capture("gqa_light_steady").replace(b"tiny", b"t\xff\xfey"),
    "many engines": b"".join(
        b'vllm:num_requests_running{engine="%d"} 1\n' % engine for engine in range(3000)
    ),
    "nothing but lines": b"vllm:x 1\n" + b"\n" * 3_000_000,
    "negative usage": re.sub(
        rb"(vllm:kv_cache_usage_perc\{.*\}) .*", rb"\1 -0.3875", capture("gqa_light_steady")
    ),
    "one gauge per process": b"".join(
        b'vllm:kv_cache_usage_perc{engine="0",pid="%d"} %s\n' % (pid, b"0.653" if pid == 4 else b"0.0")
        for pid in range(8)
    ),
    "no blocks told": with_info("num_gpu_blocks", "None"),
    "a native histogram": capture("gqa_light_steady")
    + b'vllm:request_prompt_tokens{engine="0"} {count:4,sum:2.5,schema:3,positive_spans:[0:2]}\n',
    "hits not wired": re.sub(
        rb"(vllm:prefix_cache_hits_total\{.*\}) .*", rb"\1 0.0", capture("gqa_prefix_reuse")
    ),
    "declared, no samples": b"# HELP vllm:kv_cache_usage_perc x\n# TYPE vllm:kv_cache_usage_perc gauge\n",
    "huge counters": capture("gqa_light_steady").replace(b"} 0.0\n", b"} 1e300\n"),
}
CONFIGS: dict[str, dict[str, object]] = {
    "no hidden size": {"hidden_size": 1, "head_dim": None},
    "absurd layers": {"num_hidden_layers": 10**400},
    "negative heads": {"num_attention_heads": -4},
    "float heads": {"num_key_value_heads": 2.5},
    "text": {"head_dim": "32"},
}
ROUTES: dict[str, dict[str, Answer]] = {
    "max_model_len of 400 digits": {"/v1/models": models(str(SHIPPED_MODEL), int(DIGITS))},
    "max_model_len 0": {"/v1/models": models(str(SHIPPED_MODEL), 0)},
    "max_model_len negative": {"/v1/models": models(str(SHIPPED_MODEL), -1)},
    "surrogate in the release": {"/version": text_answer('{"version": "\\ud800"}')},
    "surrogate in the root": {"/v1/models": models("/models/\ud800x")},
    "line end in the root": {"/v1/models": models("/models/x\nERROR forged")},
    "root is a relative path": {"/v1/models": models("../../etc")},
    "root is a file": {"/v1/models": models("/etc/hostname")},
    "null byte in the root": {"/v1/models": models("/models/\0x")},
}


def answers_of(kind: str, folder: Path) -> dict[str, Answer]:
    if kind in PAGES:
        return {**vllm_answers(), "/metrics": text_answer(PAGES[kind])}
    if kind in CONFIGS:
        config = json.loads((SHIPPED_MODEL / "config.json").read_text())
        model = folder / kind.replace(" ", "-")
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**config, **CONFIGS[kind]}))
        return vllm_answers(root=str(model))
    return {**vllm_answers(), **ROUTES[kind]}


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    return vllm_answers()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, answers: dict[str, Answer]) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("hostile")
    with http_server(vllm_answers()) as (good, _), http_server(answers) as (bad, _):
        text = f"replicas: [{{url: '{good}', name: good}}, {{url: '{bad}', name: bad, gpu: H100, weights_bytes: 5}}]"
        with daemon("serve", "--config", config_file(folder, text)) as serve:
            wait_for(lambda: serve.get("/-/ready").status_code == 200, "readiness")
            yield serve


@pytest.mark.parametrize("kind", [*PAGES, *CONFIGS, *ROUTES])
def test_a_lie_of_one_server_is_its_own_problem(
    kind: str, serve: Daemon, answers: dict[str, Answer], tmp_path: Path
) -> None:
    def scrapes() -> float:
        replicas = serve.get("/api/v1/status").json()["replicas"]
        return float(replicas[1]["last_success_at"] or 0)

    # A restart in between, so that the facts are asked for afresh.
    answers.clear()
    wait_for(lambda: serve.value("kvheadroom_source_up", replica="bad", source="metrics") == 0, "the gap")
    before = scrapes()
    answers.update(answers_of(kind, tmp_path))
    wait_for(lambda: scrapes() > before, "a scrape")
    for path in ("/", "/metrics", "/api/v1/status"):
        answer = serve.get(path)
        assert answer.status_code == 200, path
    json.loads(serve.get("/api/v1/status").text, parse_constant=pytest.fail)
    # Beside a thousand engines, a busy machine may be late by more than three of these short intervals, once.
    wait_for(lambda: serve.value("kvheadroom_predicted_blocks", replica="good") == 128, "the good one")
    assert serve.value("kvheadroom_source_failures_total", replica="bad", reason="internal") is None
    for samples in serve.metrics().values():
        assert all(0 <= value < float("inf") for _, value in samples)
    assert "Traceback" not in serve.output
    assert "ERROR forged" not in [line.strip() for line in serve.output.splitlines()]


def test_a_request_that_is_no_http_writes_no_traceback(serve: Daemon) -> None:
    host, port = serve.url.removeprefix("http://").split(":")
    for junk in (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(junk)
            client.settimeout(5)
            client.recv(4096)
    assert serve.get("/-/healthy").status_code == 200
    assert "Traceback" not in serve.output


def endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"vllm:num_requests_running 1\n" * 10_000)


def garbage(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"\x00\xffSSH-2.0\r\n\r\n")
    request.close_connection = True


def elsewhere(request: BaseHTTPRequestHandler) -> None:
    request.send_response(308)
    request.send_header("Location", "http://127.0.0.1:1/metrics")
    request.send_header("Content-Length", "0")
    request.end_headers()


def silence(request: BaseHTTPRequestHandler) -> None:
    time.sleep(3)


# What a server does at every route, the reason that its failure has, and what its sentence says.
REFUSALS: dict[str, tuple[Answer, str, str]] = {
    "401": (text_answer("who?", status=401), "unauthorized", "set `basic_auth` or `bearer_token_file`"),
    "403": (text_answer("no", status=403), "unauthorized", "set `basic_auth` or `bearer_token_file`"),
    "407": (text_answer("no", status=407), "unauthorized", "set `proxy_basic_auth`"),
    "404": (text_answer("no", status=404), "http_status", "is this vLLM's address?"),
    "500": (text_answer("no", status=500), "http_status", "status 500"),
    "503": (text_answer("no", status=503), "unavailable", "the server is not serving at the moment"),
    "redirect": (elsewhere, "http_status", "redirects are not followed"),
    "endless": (endless, "too_large", "the answer is larger than 16 MiB"),
    "garbage": (garbage, "bad_answer", "it does not begin as HTTP/1.1 does"),
    "silence": (silence, "timeout", "no full answer within 0.5 s"),
    "html": (text_answer("<html>"), "not_vllm", "the answer is an HTML page"),
    "empty": (text_answer(""), "not_vllm", "the answer is empty"),
}


def test_each_refusal_has_its_reason_and_its_sentence_and_costs_nobody_else_a_scrape(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with contextlib.ExitStack() as servers:
        url, _ = servers.enter_context(http_server(vllm_answers()))
        untrusted, _ = servers.enter_context(http_server(vllm_answers(), certificate=certificate))
        replicas = [
            {"name": "good", "url": url},
            {"name": "untrusted", "url": untrusted},
            {"name": "plain", "url": url.replace("http:", "https:")},
        ]
        for name, (answer, _, _) in REFUSALS.items():
            routes = dict.fromkeys(("/metrics", "/version", "/v1/models", "/health"), answer)
            replicas.append({"name": name, "url": servers.enter_context(http_server(routes))[0]})
        config = config_file(tmp_path, f"replicas: {json.dumps(replicas)}")
        serve = servers.enter_context(daemon("serve", "--config", config))
        expected = {name: (reason, words) for name, (_, reason, words) in REFUSALS.items()}
        expected["untrusted"] = ("tls", "set `tls: {ca_file: /path/to/ca.pem}`")
        expected["plain"] = ("tls", "is the server plain http?")
        for name, (reason, _) in expected.items():
            labels = {"replica": name, "source": "metrics", "reason": reason}
            wait_for(partial(serve.value, "kvheadroom_source_failures_total", **labels), name)
        for name, (_, words) in expected.items():
            assert serve.value("kvheadroom_replica_state", replica=name, state="down") == 1
            assert serve.value("kvheadroom_kv_usage_ratio", replica=name) is None
            (source,) = status_of(serve, name)["sources"]
            assert words in source["detail"], name
        for _ in range(20):
            # Withheld numbers would mean that three ticks in a row were late.
            assert serve.value("kvheadroom_kv_usage_ratio", replica="good") is not None
            time.sleep(0.1)
        assert serve.value("kvheadroom_source_failures_total", replica="good") is None
        assert "Traceback" not in serve.output
