"""Servers listed by another program: Prometheus's form, and what becomes of a page that fails, hangs or floods."""

import asyncio
import contextlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.config import ConfigError, HttpSdConfig, validate_config
from kvheadroom.discovery import http as module
from kvheadroom.discovery.http import HttpDiscovery
from kvheadroom.discovery.source import Found
from kvheadroom.sources.http import open_session
from kvheadroom.sources.slow_files import SlowFiles
from tests.doubles.http_server import (
    Answer,
    guarded,
    hangs,
    http_server,
    make_certificate,
    redirects,
    text_answer,
)

PATH = "/targets?site=a&token=s3cret"
GOOD = json.dumps([{"targets": ["gpu-1:8000", "gpu-2:8000"], "labels": {"team": "x"}}])


class Page:
    """One page whose answer the test changes, asked again and again by one source."""

    def __init__(self) -> None:
        self.answer: Answer = text_answer(GOOD, content_type="application/json")

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        self.answer(request)


def found_after(*answers: Answer, **settings: Any) -> list[Found]:
    """What one source finds by each answer in turn."""
    page = Page()

    async def run(url: str) -> list[Found]:
        async with open_session() as session:
            config = HttpSdConfig.model_validate({"url": url + PATH, **settings})
            discovery = HttpDiscovery("http_sd_configs[0]", config, session, SlowFiles())
            found = []
            for answer in answers:
                page.answer = answer
                found.append(await discovery.find(anew=False))
            return found

    with http_server({PATH: page}) as (url, _):
        return asyncio.run(run(url))


def names(found: Found) -> list[str] | None:
    return None if found.replicas is None else [replica.replica for replica in found.replicas]


def test_the_list_is_asked_for_with_its_query_and_read_as_a_file_is() -> None:
    (found,) = found_after(text_answer(GOOD), replica={"gpu": "CPU", "labels": {"site": "a"}})
    assert (found.failure, found.left_out) == (None, ())
    assert names(found) == ["gpu-1:8000", "gpu-2:8000"]
    assert found.replicas is not None
    assert found.replicas[0].labels == {"site": "a", "team": "x"}
    assert found.replicas[0].gpu == "cpu"


def floods(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(50 * 10**6))
    request.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(50):
            request.wfile.write(b" " * 10**6)


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (text_answer(GOOD, status=500), "http_status", "status 500"),
        (
            text_answer(GOOD, status=404),
            "http_status",
            "is this the HTTP SD endpoint's address?",
        ),
        (text_answer(GOOD, status=503), "unavailable", "status 503: the server is not serving at the moment"),
        (text_answer(GOOD, status=401), "unauthorized", "it asks for credentials; set `basic_auth` or"),
        (redirects, "http_status", "redirects are not followed; give the address they lead to"),
        (hangs, "timeout", "no full answer within 1 s"),
        (floods, "too_large", "MiB"),
        (text_answer("<html>sign in</html>"), "bad_answer", "the answer is no valid JSON, line 1, column 1"),
        (text_answer(b"\xff\xfe"), "bad_answer", "the answer is not UTF-8 text"),
        (text_answer('{"targets": []}'), "bad_answer", "the answer is no list of target groups"),
        (text_answer(""), "bad_answer", "the answer is no valid JSON"),
        (text_answer("9" * 5000), "bad_answer", "it holds a number of too many digits"),
    ],
)
def test_a_page_that_fails_gives_no_list_and_a_sentence_without_its_query(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, reason: str, words: str
) -> None:
    monkeypatch.setattr(module, "FETCH_SECONDS", 1.0)
    good, bad, again = found_after(text_answer(GOOD), answer, text_answer(GOOD))
    assert names(good) == names(again) == ["gpu-1:8000", "gpu-2:8000"]
    assert names(bad) is None
    assert bad.failure is not None
    assert (bad.failure.source, str(bad.failure.reason)) == ("http_sd_configs[0]", reason)
    assert words in bad.failure.detail
    assert "/targets: " in bad.failure.detail
    assert "s3cret" not in repr(bad)
    assert "vLLM" not in bad.failure.detail


def test_an_empty_list_is_nobody() -> None:
    good, empty = found_after(text_answer(GOOD), text_answer("[]"))
    assert (names(good), names(empty), empty.failure) == (["gpu-1:8000", "gpu-2:8000"], [], None)


def test_nobody_listening_is_told_with_the_settings_name() -> None:
    async def run() -> Found:
        async with open_session() as session:
            config = HttpSdConfig(url="http://127.0.0.1:1/targets")
            return await HttpDiscovery("http_sd_configs[0]", config, session, SlowFiles()).find(anew=True)

    failure = asyncio.run(run()).failure
    assert failure is not None
    assert failure.detail == (
        "GET http://127.0.0.1:1/targets: nothing listens there; is the HTTP SD endpoint running?"
    )


def test_a_renewed_token_is_taken_at_the_next_question_and_never_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    answers = guarded({PATH: text_answer(GOOD)}, header="Authorization", value="Bearer new-s3cret")

    async def run(url: str) -> list[Found]:
        async with open_session() as session:
            config = HttpSdConfig.model_validate({"url": url + PATH, "bearer_token_file": str(token)})
            discovery = HttpDiscovery("http_sd_configs[0]", config, session, SlowFiles())
            found = [await discovery.find(anew=True)]
            for content in ("old-s3cret", "new-s3cret"):
                token.write_text(content)
                found.append(await discovery.find(anew=False))
            return found

    with http_server(answers) as (url, _):
        missing, old, new = asyncio.run(run(url))
    assert missing.failure is not None
    assert str(missing.failure.reason) == "unauthorized"
    assert missing.failure.detail.startswith(f"http_sd_configs[0]: bearer_token_file {token} cannot be read")
    assert old.failure is not None
    assert "does not take the credentials of `bearer_token_file`" in old.failure.detail
    assert names(new) == ["gpu-1:8000", "gpu-2:8000"]
    assert "s3cret" not in repr((missing, old, new))


def test_a_list_behind_tls_of_a_private_authority_is_read(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)

    async def run(url: str, **settings: Any) -> Found:
        async with open_session() as session:
            config = HttpSdConfig.model_validate({"url": url + PATH, **settings})
            return await HttpDiscovery("http_sd_configs[0]", config, session, SlowFiles()).find(anew=True)

    with http_server({PATH: text_answer(GOOD)}, certificate=certificate) as (url, _):
        trusted = asyncio.run(run(url, tls={"ca_file": str(certificate)}))
        stranger = asyncio.run(run(url))
    assert names(trusted) == ["gpu-1:8000", "gpu-2:8000"]
    assert stranger.failure is not None
    assert str(stranger.failure.reason) == "tls"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"url": "http://u:s3cret@h/x"},
            "http_sd_configs[0].url: an address may not hold a user or password",
        ),
        ({"url": "h:80?token=s3cret"}, "http_sd_configs[0].url: this is no page's address"),
        ({"url": "http://h/x#s3cret"}, "http_sd_configs[0].url: this is no page's address"),
        ({"url": "http://h/x", "tls": {}}, "`tls` is for servers at https://"),
        ({"url": "http://h/x", "api_key_file": "/s3cret"}, "api_key_file: there is no such setting"),
        ({"url": "http://h/x", "refresh_intervall": "5s"}, "did you mean `refresh_interval`?"),
        ({"url": "http://h/x", "replica": {"url": "http://h"}}, "replica.url: there is no such setting"),
        ({"url": "http://h/x", "replica": {"modell": "x"}}, "did you mean `model`?"),
        (
            {"url": "http://h/x", "replica": {"labels": {"gpu": "x"}}},
            "'gpu' is a label of kvheadroom's own series",
        ),
        ({"url": "http://h/x", "refresh_interval": 5}, "5 is no duration; write a number with its unit"),
        ({}, "http_sd_configs[0].url: it is needed"),
    ],
)
def test_a_fault_of_the_settings_is_named_with_its_place(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_config({"http_sd_configs": [settings]}, "c.yaml")
    assert why in str(error.value)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"files": []}, "file_sd_configs[0].files"),
        ({"files": ["targets"]}, "files end in .json, .yml or .yaml"),
        ({"files": ["/a/**/x.json"]}, "`*` stands for a part of one name"),
        ({"files": ["/a.json"], "url": "http://h"}, "file_sd_configs[0].url: there is no such setting"),
    ],
)
def test_a_fault_of_the_files_settings_is_named_with_its_place(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_config({"file_sd_configs": [settings]}, "c.yaml")
    assert why in str(error.value)


def test_sources_alone_are_enough_of_a_config() -> None:
    config = validate_config({"http_sd_configs": [{"url": "http://h/x"}]}, "c.yaml")
    assert (config.replicas, config.discovers) == ((), True)
    assert config.http_sd_configs[0].refresh_interval == 60.0
