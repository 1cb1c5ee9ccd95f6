"""The hub over real HTTP on loopback: what comes, what is refused, and where the token goes."""

import json
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles, TensorInventory
from kvheadroom.sources.hub_environment import HubEnvironment, HubName
from kvheadroom.sources.model_hub import fetch_model_files
from tests.doubles.http_server import Answer, http_server, make_certificate, ranged, text_answer
from tests.sources.safetensors_files import file_bytes, header_of

TOKEN = "hf_a-token-that-nobody-may-see"
MODEL = HubName("zai-org/GLM-5.3")
CONFIG = "/zai-org/GLM-5.3/resolve/main/config.json"
QUANTIZATION = "/zai-org/GLM-5.3/resolve/main/hf_quant_config.json"
INDEX = "/zai-org/GLM-5.3/resolve/main/model.safetensors.index.json"

SINGLE = "/zai-org/GLM-5.3/resolve/main/model.safetensors"


def hub(endpoint: str, token: str | None = TOKEN) -> HubEnvironment:
    return HubEnvironment(endpoint=endpoint, cache=Path("/nowhere"), offline=False, token=token)


def with_headers(headers: Mapping[str, str], *, status: int, body: bytes = b"") -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def json_answer(value: Any) -> Answer:
    return text_answer(json.dumps(value), content_type="application/json")


def failure(answers: dict[str, Answer], token: str | None = TOKEN) -> SourceFailure:
    with http_server(answers) as (endpoint, _):
        got = fetch_model_files(hub(endpoint, token), MODEL)
    assert isinstance(got, SourceFailure)
    assert TOKEN not in got.detail
    return got


def test_a_model_comes_with_its_config_and_the_total_of_its_index() -> None:
    answers = {
        CONFIG: json_answer({"architectures": ["X"]}),
        INDEX: json_answer(
            {"metadata": {"total_size": 464_115_778_000}, "weight_map": {"a": "1.safetensors"}}
        ),
    }
    with http_server(answers) as (endpoint, seen):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert files == ModelFiles(
        folder="zai-org/GLM-5.3@main", config={"architectures": ["X"]}, weights_bytes=464_115_778_000,
        tensors=TensorInventory(sizes={"a": None}), shards={"a": "1.safetensors"},
    )  # fmt: skip
    assert [path for path, _ in seen] == [CONFIG, QUANTIZATION, INDEX]
    assert {headers["Authorization"] for _, headers in seen} == {f"Bearer {TOKEN}"}


def test_how_modelopt_quantized_is_read_from_a_file_of_its_own() -> None:
    told = {"quantization": {"quant_algo": "FP8"}}
    answers = {CONFIG: json_answer({"a": 1}), QUANTIZATION: json_answer(told)}
    with http_server(answers) as (endpoint, _):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert files.config == {"a": 1, "quantization_config": told}


def test_a_config_that_tells_it_is_asked_for_no_other_file() -> None:
    answers = {CONFIG: json_answer({"quantization_config": {"quant_method": "fp8"}})}
    with http_server(answers) as (endpoint, seen):
        fetch_model_files(hub(endpoint), MODEL)
    assert QUANTIZATION not in [path for path, _ in seen]


def test_a_hub_that_does_not_give_that_file_is_told() -> None:
    broken = with_headers({}, status=500)
    assert "hf_quant_config.json" in failure({CONFIG: json_answer({}), QUANTIZATION: broken}).detail


def test_without_a_token_none_is_sent() -> None:
    with http_server({CONFIG: json_answer({})}) as (endpoint, seen):
        fetch_model_files(hub(endpoint, None), MODEL)
    assert seen
    assert all("Authorization" not in headers for _, headers in seen)


@pytest.mark.parametrize("takes_ranges", [True, False])
@pytest.mark.parametrize("tensors", [2, 20_000])
def test_a_single_file_without_an_index_is_summed_up_by_its_header(
    *, takes_ranges: bool, tensors: int
) -> None:
    shapes = {f"a-tensor-with-a-long-name-{i}": (8,) for i in range(tensors)}
    content = file_bytes(header_of({**shapes, "large": (1 << 21,)}), 16 * tensors + (1 << 22))
    missing = with_headers({"X-Error-Code": "EntryNotFound"}, status=404)
    answers = {CONFIG: json_answer({}), INDEX: missing, SINGLE: ranged(content, takes_ranges=takes_ranges)}
    with http_server(answers) as (endpoint, seen):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert files.weights_bytes == 16 * tensors + (1 << 22)
    assert files.tensors is not None
    assert files.tensors.sizes == {**dict.fromkeys(shapes, 16), "large": 1 << 22}
    # A header of more than the first MiB is asked for once more, and nothing beyond it.
    ranges = [headers["Range"] for path, headers in seen if path == SINGLE]
    assert len(ranges) == (1 if tensors == 2 else 2)
    assert ranges[0] == "bytes=0-1048575"


def test_a_single_file_that_is_none_is_a_fault_and_not_a_size() -> None:
    missing = with_headers({"X-Error-Code": "EntryNotFound"}, status=404)
    answers = {CONFIG: json_answer({}), INDEX: missing, SINGLE: text_answer("<html>")}
    with http_server(answers) as (endpoint, _):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert (files.weights_bytes, files.weights_faulty) == (None, True)
    assert (
        files.weights_unknown
        == "zai-org/GLM-5.3 (model.safetensors): the file is shorter than the length of a header"
    )


def test_an_index_without_a_total_is_a_fault() -> None:
    with http_server({CONFIG: json_answer({}), INDEX: json_answer({})}) as (endpoint, _):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert (files.weights_bytes, files.weights_faulty) == (None, True)
    assert "model.safetensors.index.json has no metadata.total_size" in files.weights_unknown


def test_a_model_without_weights_has_no_total_and_says_why() -> None:
    missing = with_headers({"X-Error-Code": "EntryNotFound"}, status=404)
    with http_server({CONFIG: json_answer({}), INDEX: missing, SINGLE: missing}) as (endpoint, _):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert (files.weights_bytes, files.weights_faulty) == (None, False)
    assert "neither model.safetensors.index.json nor model.safetensors" in files.weights_unknown


def test_a_redirect_to_another_origin_is_followed_without_the_token() -> None:
    with http_server({"/store/config.json": json_answer({"from": "elsewhere"})}) as (store, seen_there):
        away = with_headers({"Location": f"{store}/store/config.json"}, status=302)
        with http_server({CONFIG: away}) as (endpoint, seen_here):
            files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert files.config == {"from": "elsewhere"}
    assert "Authorization" in seen_here[0][1]
    assert [(path, "Authorization" in headers) for path, headers in seen_there] == [
        ("/store/config.json", False)
    ]


def test_a_redirect_within_the_hub_keeps_the_token() -> None:
    renamed = with_headers({"Location": "/new/name/config.json"}, status=307)
    with http_server({CONFIG: renamed, "/new/name/config.json": json_answer({"n": 1})}) as (endpoint, seen):
        files = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(files, ModelFiles)
    assert files.config == {"n": 1}
    assert "Authorization" in dict(seen)["/new/name/config.json"]


def test_a_netrc_does_not_put_its_password_in_the_tokens_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with http_server({CONFIG: json_answer({})}) as (endpoint, seen):
        fetch_model_files(hub(endpoint), MODEL)
    assert seen[0][1]["Authorization"] == f"Bearer {TOKEN}"


def test_redirects_without_end_are_given_up() -> None:
    got = failure({CONFIG: with_headers({"Location": CONFIG}, status=302)})
    assert "more than 5 redirects" in got.detail


@pytest.mark.parametrize(
    ("code", "status", "token", "words"),
    [
        ("GatedRepo", 401, None, ["gated", "accept its terms", "HF_TOKEN"]),
        ("GatedRepo", 403, TOKEN, ["gated", "account of your token has no access"]),
        ("RepoNotFound", 401, None, ["no such model", "if it is private", "HF_TOKEN"]),
        ("RepoNotFound", 404, TOKEN, ["no such model", "your token may not see it"]),
        ("RevisionNotFound", 404, TOKEN, ["no revision 'main'"]),
        ("EntryNotFound", 404, TOKEN, ["has no such file"]),
        ("", 429, None, ["too many requests", "wait", "HF_TOKEN"]),
        ("", 500, TOKEN, ["status 500", "give a folder"]),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_way_out(
    code: str, status: int, token: str | None, words: list[str]
) -> None:
    got = failure({CONFIG: with_headers({"X-Error-Code": code} if code else {}, status=status)}, token)
    assert got.detail.startswith("zai-org/GLM-5.3 (config.json): ")
    assert all(word in got.detail for word in words), got.detail


@pytest.mark.parametrize("body", ["<html>please log in</html>", "[1, 2]", "[" * 200_000, '"text"'])
def test_what_is_no_json_object_is_told(body: str) -> None:
    assert failure({CONFIG: text_answer(body)}).reason is FailureReason.BAD_ANSWER


def test_a_file_without_end_is_cut_off_at_the_limit() -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(1000):
            request.wfile.write(b" " * (1 << 16))

    assert failure({CONFIG: endless}).reason is FailureReason.TOO_LARGE


def test_bytes_that_trickle_end_at_the_deadline() -> None:
    def trickle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(100):
            request.wfile.write(b" ")
            request.wfile.flush()
            time.sleep(0.1)

    with http_server({CONFIG: trickle}) as (endpoint, _):
        started = time.monotonic()
        got = fetch_model_files(hub(endpoint), MODEL, timeout_seconds=0.5)
        took = time.monotonic() - started
    assert isinstance(got, SourceFailure)
    assert got.reason is FailureReason.TIMEOUT
    assert "within 0.5 s" in got.detail
    assert took < 3


def test_a_hub_that_nothing_listens_for_says_what_to_do() -> None:
    got = fetch_model_files(hub("http://127.0.0.1:9"), MODEL)
    assert isinstance(got, SourceFailure)
    assert got.reason is FailureReason.UNREACHABLE
    assert "127.0.0.1 cannot be reached (Connection refused)" in got.detail
    assert "give a folder that holds config.json" in got.detail


def test_a_name_that_does_not_resolve_says_what_to_do() -> None:
    got = fetch_model_files(hub("http://hub.invalid"), MODEL)
    assert isinstance(got, SourceFailure)
    assert got.reason is FailureReason.UNREACHABLE
    assert "hub.invalid cannot be reached" in got.detail


@pytest.mark.parametrize("endpoint", ["hub.example", "ftp://hub.example", "http://"])
def test_an_endpoint_that_is_no_address_is_told(endpoint: str) -> None:
    got = fetch_model_files(hub(endpoint), MODEL)
    assert isinstance(got, SourceFailure)
    assert "is no address; HF_ENDPOINT must be one such as https://" in got.detail


def test_a_proxy_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    got = fetch_model_files(hub("http://hub.invalid"), MODEL)
    assert isinstance(got, SourceFailure)
    assert "the proxy of HTTPS_PROXY or HTTP_PROXY cannot be used" in got.detail


def test_a_certificate_that_is_not_trusted_is_told(tmp_path: Path) -> None:
    with http_server({CONFIG: json_answer({})}, certificate=make_certificate(tmp_path)) as (endpoint, _):
        got = fetch_model_files(hub(endpoint.replace("http:", "https:")), MODEL)
    assert isinstance(got, SourceFailure)
    assert got.reason is FailureReason.TLS
    assert "REQUESTS_CA_BUNDLE" in got.detail


def test_the_token_is_not_in_what_the_environment_prints() -> None:
    assert TOKEN not in repr(hub("http://127.0.0.1:9"))
