"""Range queries against a Prometheus that lies."""

import socket
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources import prometheus_api as module
from kvheadroom.sources.prometheus_api import AskedToWait, PrometheusApi, RangeAnswer, RangeSeries
from tests.doubles.http_server import Answer, http_server, make_certificate, text_answer
from tests.doubles.prometheus_api import Asked, matrix, prometheus_api, refusal

TOKEN = "abc123"


def ask(
    answer: Answer, *, token: str | None = None, timeout_seconds: float = 5.0
) -> RangeAnswer | SourceFailure:
    with prometheus_api(lambda _: answer) as (url, _):
        return PrometheusApi(url=url, token=token, timeout_seconds=timeout_seconds).query_range(
            "x", start=100.0, steps=3, step_seconds=0.5
        )


def fails(answer: Answer, *, timeout_seconds: float = 5.0) -> tuple[FailureReason, str]:
    failure = ask(answer, timeout_seconds=timeout_seconds)
    assert isinstance(failure, SourceFailure)
    return failure.reason, failure.detail


def test_values_are_those_of_their_steps_as_prometheus_wrote_them() -> None:
    answer = ask(matrix(({"a": "b"}, [(100, "1e-05"), (101.0005, "NaN")]), ({}, [(100.5, "+Inf")])))
    assert answer == RangeAnswer(
        (RangeSeries({"a": "b"}, {0: "1e-05", 2: "NaN"}), RangeSeries({}, {1: "+Inf"})), ()
    )


def test_what_is_asked_has_whole_milliseconds() -> None:
    asked: list[Asked] = []

    def answer(parameters: Asked) -> Answer:
        asked.append(parameters)
        return matrix()

    with prometheus_api(answer) as (url, _):
        assert PrometheusApi(url=url).query_range('x{a="b c&d"}', start=1.1, steps=11, step_seconds=0.1) == (
            RangeAnswer((), ())
        )
    assert asked == [{"query": 'x{a="b c&d"}', "start": "1.100", "end": "2.100", "step": "0.100"}]


def test_the_token_is_sent_and_never_to_where_a_redirect_leads() -> None:
    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", other)
        request.send_header("Content-Length", "0")
        request.end_headers()

    with http_server({}) as (other, elsewhere), prometheus_api(lambda _: redirect) as (url, seen):
        answer = PrometheusApi(url=url, token=TOKEN).query_range("x", start=0.0, steps=1, step_seconds=1.0)
    assert isinstance(answer, SourceFailure)
    assert answer.detail == "it answers with a redirect (302); give its real address"
    assert [headers["Authorization"] for _, headers in seen] == [f"Bearer {TOKEN}"]
    assert elsewhere == []
    assert TOKEN not in repr(PrometheusApi(url=url, token=TOKEN))


def test_warnings_are_handed_on() -> None:
    answer = ask(matrix(warnings=["store gateway 3 did not answer"], infos=["not a counter"]))
    assert answer == RangeAnswer((), ("store gateway 3 did not answer",))


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        (refusal(400, "parse error"), "http_status", "it answered with status 400: parse error"),
        (text_answer("<html>", status=500), "unavailable", "it is not available (500)"),
        (refusal(503, "query timed out"), "unavailable", "it is not available (503): query timed out"),
        (text_answer("", status=401), "unauthorized", "it refuses access (401); give --bearer-token-file"),
        (
            text_answer("", status=404),
            "not_found",
            "there is no /api/v1/query_range; is this Prometheus's address?",
        ),
        (
            text_answer("<html>hello"),
            "bad_answer",
            "the answer is no JSON object; is this Prometheus's address?",
        ),
        (
            text_answer("[" * 100_000),
            "bad_answer",
            "the answer is no JSON object; is this Prometheus's address?",
        ),
        (text_answer("{}"), "bad_answer", "the answer is no result of a range query"),
        (
            text_answer('{"status":"success","data":{"resultType":"vector","result":[]}}'),
            "bad_answer",
            "the answer is no result of a range query",
        ),
        (
            text_answer('{"status":"error","data":{"resultType":"matrix","result":[]}}'),
            "bad_answer",
            "the answer is no result of a range query",
        ),
        (matrix(({}, [(99.5, "1")])), "bad_answer", "the answer holds what was not asked for"),
        (matrix(({}, [(101.5, "1")])), "bad_answer", "the answer holds what was not asked for"),
        (matrix(({}, [(100.25, "1")])), "bad_answer", "the answer holds what was not asked for"),
        (matrix(({}, [(100, "many")])), "bad_answer", "the answer holds what was not asked for"),
        (matrix(({}, [(float("nan"), "1")])), "bad_answer", "the answer holds what was not asked for"),
        (
            text_answer('{"status":"success","data":{"resultType":"matrix","result":[{"metric":[]}]}}'),
            "bad_answer",
            "the answer holds what was not asked for",
        ),
    ],
)
def test_an_answer_that_is_none_is_a_failure_with_its_reason(
    answer: Answer, reason: str, detail: str
) -> None:
    assert fails(answer) == (reason, detail)


def saying(status: int, retry_after: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Retry-After", retry_after)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def test_a_server_that_has_had_too_many_requests_says_when_to_come_again() -> None:
    assert ask(saying(429, " 7 ")) == AskedToWait(
        "prometheus",
        FailureReason.UNAVAILABLE,
        "it has had too many requests from here (429) and asks to wait 7 s",
        seconds=7.0,
    )
    long = ask(saying(503, "4000"))
    assert isinstance(long, AskedToWait)
    assert (long.seconds, long.detail) == (4000.0, "it is not available (503) and asks to wait 4,000 s")
    until = ask(saying(429, formatdate(time.time() + 30, usegmt=True)))
    assert isinstance(until, AskedToWait)
    assert 25 < until.seconds <= 30
    passed = ask(saying(429, formatdate(time.time() - 30, usegmt=True)))
    assert isinstance(passed, AskedToWait)
    assert passed.seconds == 0.0


@pytest.mark.parametrize("retry_after", ["", "soon", "-3", "\u00b2", "Wed, 99 Foo 2026 25:00:00 GMT"])
def test_a_time_to_wait_that_is_none_is_not_waited_for(retry_after: str) -> None:
    assert ask(saying(429, retry_after)) == SourceFailure(
        "prometheus", FailureReason.UNAVAILABLE, "it has had too many requests from here (429)"
    )


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1024**2)
    sent = 0

    def endless(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(b" " * 65536)
            sent += 65536

    reason, detail = fails(endless)
    assert reason == FailureReason.TOO_LARGE
    assert detail.startswith("the answer is larger than 1 MiB; narrow it with --select")
    assert sent < 64 * 1024**2


def test_an_answer_that_is_cut_off_is_none() -> None:
    def cut_off(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        request.wfile.write(b'{"status":"success","data":{"resultType":"matrix","result":[]}}')
        request.wfile.flush()
        request.connection.shutdown(socket.SHUT_RDWR)

    reason, _ = fails(cut_off)
    assert reason in (FailureReason.UNREACHABLE, FailureReason.BAD_ANSWER)


def test_one_that_hangs_or_trickles_ends_at_the_deadline() -> None:
    def hang(_: BaseHTTPRequestHandler) -> None:
        time.sleep(10)

    def trickle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        for _ in range(100):
            request.wfile.write(b" ")
            request.wfile.flush()
            time.sleep(0.1)

    for answer in (hang, trickle):
        began_at = time.monotonic()
        reason, _ = fails(answer, timeout_seconds=0.5)
        assert reason == FailureReason.TIMEOUT
        assert time.monotonic() - began_at < 5


def test_nobody_at_the_address_is_told() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        answer = PrometheusApi(url=url).query_range("x", start=0.0, steps=1, step_seconds=1.0)
    assert answer == SourceFailure(
        "prometheus", FailureReason.UNREACHABLE, "it cannot be reached (Connection refused)"
    )


def test_a_certificate_of_an_authority_of_ones_own_needs_its_file(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    path = "/api/v1/query_range?query=x&start=0.000&end=0.000&step=1.000"
    with http_server({path: matrix()}, certificate=certificate) as (url, _):
        without = PrometheusApi(url=url).query_range("x", start=0.0, steps=1, step_seconds=1.0)
        with_file = PrometheusApi(url=url, ca_file=certificate).query_range(
            "x", start=0.0, steps=1, step_seconds=1.0
        )
    assert isinstance(without, SourceFailure)
    assert without.reason == FailureReason.TLS
    assert without.detail.endswith("for a CA of your own give --ca-file")
    assert with_file == RangeAnswer((), ())
