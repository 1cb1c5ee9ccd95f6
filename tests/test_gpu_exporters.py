"""DCGM-exporters as a source of the daemon: asked over HTTP, failing in every way, gone, and back."""

import asyncio
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from kvheadroom import gpu_exporters as module
from kvheadroom.capacity.remote_gpus import ExporterStatus
from kvheadroom.config import ConfigError, DcgmExporter, validate_config
from kvheadroom.gpu_exporters import GpuExporters
from kvheadroom.sources.http import open_session
from kvheadroom.sources.slow_files import SlowFiles
from tests.dcgm_pages import H200, gpu, h200, page, series
from tests.doubles.http_server import Answer, guarded, hangs, http_server, redirects, text_answer

ONE, TWO = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa"
PART = series(ONE, instance="3")


def statuses_after(*answers: Answer | str) -> list[ExporterStatus]:
    """How the exporter stands after each answer, or page, in turn; at "reload" the config is loaded anew."""
    current: list[Answer] = []

    async def run(url: str) -> list[ExporterStatus]:
        told: list[tuple[ExporterStatus, ...]] = []
        async with open_session() as session:
            exporters = GpuExporters(session, SlowFiles(), told.append)
            settings = [DcgmExporter(url=url)]
            exporters.set_exporters(settings, start=False)
            found = []
            for answer in answers:
                if answer == "reload":
                    exporters.set_exporters(settings, start=False)
                    continue
                current[:] = [text_answer(answer)] if isinstance(answer, str) else [answer]
                await exporters.ask_all()
                found.append(told[-1][0])
            return found

    def now(request: BaseHTTPRequestHandler) -> None:
        current[0](request)

    with http_server({"/metrics": now}) as (url, _):
        return asyncio.run(run(url))


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (text_answer("x", status=500), "http_status", "status 500"),
        (text_answer("x", status=404), "http_status", "is this DCGM-exporter's address?"),
        (text_answer("x", status=401), "unauthorized", "it asks for credentials; set `basic_auth` or"),
        (redirects, "http_status", "redirects are not followed"),
        (hangs, "timeout", "no full answer within 1 s"),
        (text_answer(" " * (module.MAX_PAGE_BYTES + 1)), "too_large", "MiB"),
        (text_answer("<html>sign in</html>"), "bad_answer", "is it that of a DCGM-exporter?"),
        (text_answer(b"\xff\xfe"), "bad_answer", "tells of no GPU"),
        (text_answer(""), "bad_answer", "tells of no GPU"),
    ],
)
def test_an_exporter_that_fails_keeps_its_last_page_and_says_why(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, reason: str, words: str
) -> None:
    monkeypatch.setattr(module, "FETCH_SECONDS", 1.0)
    good, bad, again = statuses_after(h200(), answer, h200())
    assert (good.failure, [one.gpu for one in good.gpus]) == (None, [ONE])
    assert bad.failure is not None
    assert (bad.failure.source, str(bad.failure.reason)) == ("dcgm_exporters[0]", reason)
    assert words in bad.failure.detail
    assert bad.failure.detail.startswith("GET http://127.0.0.1:")
    # Its age is what withholds them, as with any other source.
    assert (bad.gpus, bad.taken_at) == (good.gpus, good.taken_at)
    assert again.failure is None
    assert [(str(why), count) for why, count in again.failures_total] == [(reason, 1)]


def test_since_when_the_numbers_stand_is_carried_from_page_to_page() -> None:
    changed = page(gpu(series(ONE), **{**H200, "used": 130_004}))
    first, same, other, back = (one.gpus[0] for one in statuses_after(h200(), h200(), changed, h200()))
    assert first.changed_at is not None
    assert same.changed_at == first.changed_at
    assert other.changed_at is not None
    assert first.changed_at < other.changed_at
    assert back.changed_at is not None
    assert other.changed_at < back.changed_at


def test_a_gpu_that_is_told_of_no_more_is_lost_until_it_is_back_or_the_config_is_loaded_anew() -> None:
    both = h200(ONE) + h200(TWO, 1)
    before, gone, back, again, _ = statuses_after(
        both, h200(TWO, 1), both, h200(TWO, 1), "reload", h200(TWO, 1)
    )
    assert before.failures == back.failures == ()
    for status in (gone, again):
        assert [(one.gpu, str(one.reason)) for one in status.failures] == [(ONE, "lost")]
        assert "tells of it no more" in status.failures[0].detail
    assert statuses_after(both, h200(TWO, 1), "reload", h200(TWO, 1))[-1].failures == ()


def test_a_gpu_that_is_divided_and_a_part_that_is_dissolved_are_not_lost() -> None:
    divided = page(gpu(PART, **H200), gpu(series(ONE, instance="4"), **H200))
    whole, parts, fewer = statuses_after(h200(), divided, page(gpu(PART, **H200)))
    assert [one.gpu for one in whole.gpus] == [ONE]
    assert [one.gpu for one in parts.gpus] == [f"MIG-{ONE}/3", f"MIG-{ONE}/4"]
    assert [one.gpu for one in fewer.gpus] == [f"MIG-{ONE}/3"]
    assert parts.failures == fewer.failures == ()


def test_a_token_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    answers = guarded({"/x": text_answer(h200())}, header="Authorization", value="Bearer s3cret")

    async def run(url: str) -> list[ExporterStatus]:
        told: list[tuple[ExporterStatus, ...]] = []
        async with open_session() as session:
            exporters = GpuExporters(session, SlowFiles(), told.append)
            settings = DcgmExporter.model_validate({"url": f"{url}/x", "bearer_token_file": str(token)})
            exporters.set_exporters([settings], start=False)
            found = []
            for content in (None, "old", "s3cret"):
                if content is not None:
                    token.write_text(content)
                await exporters.ask_all()
                found.append(told[-1][0])
        return found

    with http_server(answers) as (url, _):
        missing, old, good = asyncio.run(run(url))
    assert missing.failure is not None
    assert "bearer_token_file" in missing.failure.detail
    assert old.failure is not None
    assert "does not take the credentials of `bearer_token_file`" in old.failure.detail
    assert [one.gpu for one in good.gpus] == [ONE]
    assert "s3cret" not in repr((missing, old, good))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "node:9400"}, "dcgm_exporters[0].url: this is no page's address"),
        ({"url": "http://u:s3cret@h"}, "an address may not hold a user or password"),
        ({"url": "http://h", "refresh": "5s"}, "did you mean `refresh_interval`?"),
        ({"url": "http://h", "api_key_file": "/x"}, "there is no such setting"),
        ({"url": "http://h", "tls": {}}, "`tls` is for servers at https://"),
    ],
)
def test_a_fault_of_the_settings_is_named_with_its_place(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate_config({"replicas": [{"url": "http://a:1"}], "dcgm_exporters": [settings]}, "c.yaml")
    assert why in str(error.value)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("pod", "valid"),
    [
        ("vllm/chat-0", True),
        ("vllm/chat-7c9d*", True),
        ("chat-0", False),
        ("vllm/", False),
        ("vllm/*", False),
        ("vllm/a/b", False),
        ("VLLM/chat", False),
        ("vllm/ch*t", False),
    ],
)
def test_a_pod_is_namespace_and_name(pod: str, valid: bool) -> None:  # noqa: FBT001  a table
    content = {"replicas": [{"url": "http://a:1", "pod": pod}]}
    if valid:
        assert validate_config(content, "c.yaml").replicas[0].pod == pod
    else:
        with pytest.raises(ConfigError, match=r"is no pod; write namespace/name"):
            validate_config(content, "c.yaml")


def test_the_page_is_metrics_where_only_the_server_is_named() -> None:
    assert DcgmExporter(url="http://h:9400").path == "/metrics"
    assert DcgmExporter(url="http://h:9400/").path == "/metrics"
    assert DcgmExporter(url="http://p:9090/federate?match[]=x").path == "/federate?match[]=x"
