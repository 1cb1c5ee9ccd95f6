"""GET with a deadline and a limit: each way a target can fail has its reason and its way out."""

import asyncio
import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch, open_session
from kvheadroom.sources.vllm_server import fetch_server_answers, is_healthy
from tests.doubles.http_server import http_server, text_answer


def with_session(work: Callable[[Session], Awaitable[object]]) -> object:
    async def run() -> object:
        async with open_session() as session:
            return await work(session)

    return asyncio.run(run())


def get(url: str, *, timeout_seconds: float = 5.0, max_bytes: int = 1 << 20) -> Scrape | SourceFailure:
    answer = with_session(
        lambda session: fetch(
            session,
            Endpoint(url),
            "/metrics",
            source="metrics",
            timeout_seconds=timeout_seconds,
            max_bytes=max_bytes,
        )
    )
    assert isinstance(answer, Scrape | SourceFailure)
    return answer


def failure(url: str, **limits: float) -> SourceFailure:
    answer = get(url, **limits)  # type: ignore[arg-type]
    assert isinstance(answer, SourceFailure), answer
    assert answer.source == "metrics"
    return answer


def test_a_page_comes_with_its_time_and_duration() -> None:
    before = time.time()
    with http_server({"/metrics": text_answer("x 1\n")}) as (url, seen):
        answer = get(url)
    assert isinstance(answer, Scrape)
    assert answer.body == b"x 1\n"
    assert before <= answer.taken_at <= time.time()
    assert 0 < answer.duration_seconds < 5
    headers = seen[0][1]
    assert headers["Accept-Encoding"] == "identity"
    assert "Authorization" not in headers


def test_nothing_listening_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = failure(f"http://127.0.0.1:{port}")
    assert answer.reason is FailureReason.REFUSED
    assert f"127.0.0.1:{port}/metrics" in answer.detail


def test_a_name_that_does_not_resolve_is_unreachable() -> None:
    assert failure("http://no-such-host.invalid:1").reason is FailureReason.UNREACHABLE


def test_a_name_that_cannot_be_one_is_unreachable_too() -> None:
    assert failure(f"http://{'x' * 64}.example:1").reason is FailureReason.UNREACHABLE


def test_a_target_that_accepts_and_never_answers_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        answer = failure(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.3)
    assert answer.reason is FailureReason.TIMEOUT
    assert "0.3 s" in answer.detail


def test_a_body_that_trickles_for_ever_meets_the_total_deadline() -> None:
    def trickle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(40):
            request.wfile.write(b"# another line\n")
            request.wfile.flush()
            time.sleep(0.05)

    with http_server({"/metrics": trickle}) as (url, _):
        assert failure(url, timeout_seconds=0.4).reason is FailureReason.TIMEOUT


def test_a_body_over_the_limit_is_dropped_while_it_arrives() -> None:
    sent = []

    def flood(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(800):
            request.wfile.write(b"x" * (1 << 16))
            sent.append(1)

    with http_server({"/metrics": flood}) as (url, _):
        answer = failure(url, max_bytes=1 << 20)
    assert answer.reason is FailureReason.TOO_LARGE
    assert "larger than 1 MiB" in answer.detail
    assert len(sent) < 800


@pytest.mark.parametrize(
    ("status", "reason", "word"),
    [
        (401, FailureReason.UNAUTHORIZED, "something in front of the server asks"),
        (403, FailureReason.UNAUTHORIZED, "set `basic_auth` or `bearer_token_file`"),
        (404, FailureReason.HTTP_STATUS, "is this vLLM's address"),
        (500, FailureReason.HTTP_STATUS, "status 500"),
        (503, FailureReason.UNAVAILABLE, "scales"),
    ],
)
def test_a_status_other_than_200_is_told_with_its_meaning(
    status: int, reason: FailureReason, word: str
) -> None:
    with http_server({"/metrics": text_answer("no", status=status)}) as (url, _):
        answer = failure(url)
    assert answer.reason is reason
    assert word in answer.detail


def test_a_redirect_is_not_followed() -> None:
    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", "/elsewhere")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with http_server({"/metrics": redirect, "/elsewhere": text_answer("x 1\n")}) as (url, seen):
        answer = failure(url)
    assert answer.reason is FailureReason.HTTP_STATUS
    assert "redirects are not followed" in answer.detail
    assert [path for path, _ in seen] == ["/metrics"]


def test_compression_that_nobody_asked_for_is_refused() -> None:
    def compressed(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Encoding", "gzip")
        request.send_header("Content-Length", "3")
        request.end_headers()
        request.wfile.write(b"abc")

    with http_server({"/metrics": compressed}) as (url, _):
        assert failure(url).reason is FailureReason.BAD_ANSWER


def test_half_a_page_is_a_bad_answer() -> None:
    def half(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        request.wfile.write(b"vllm:num_requests_running 1\n")
        request.close_connection = True

    with http_server({"/metrics": half}) as (url, _):
        assert failure(url).reason is FailureReason.BAD_ANSWER


def test_a_redirect_to_another_host_is_never_followed_and_no_key_goes_there() -> None:
    with http_server({"/v1/models": text_answer("{}")}) as (other, seen_there):

        def away(request: BaseHTTPRequestHandler) -> None:
            request.send_response(307)
            request.send_header("Location", other + request.path)
            request.send_header("Content-Length", "0")
            request.end_headers()

        with http_server({"/version": away, "/v1/models": away}) as (url, _):
            result = with_session(
                lambda session: fetch_server_answers(
                    session, Endpoint(url, api_key="s3cret"), timeout_seconds=5
                )
            )
    assert isinstance(result, tuple)
    assert {f.reason for f in result[1].values()} == {FailureReason.HTTP_STATUS}
    assert seen_there == []


def test_plain_http_to_a_server_that_hangs_up_asks_whether_it_is_https() -> None:
    def hang_up(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_RDWR)

    with http_server({"/metrics": hang_up}) as (url, _):
        answer = failure(url)
    assert answer.reason is FailureReason.BAD_ANSWER
    assert "is the server https?" in answer.detail


def test_https_to_a_plain_http_server_is_a_tls_failure_that_says_so() -> None:
    with http_server({"/metrics": text_answer("x 1\n")}) as (url, _):
        answer = failure(url.replace("http:", "https:"))
    assert answer.reason is FailureReason.TLS
    assert "plain http" in answer.detail


MODELS = (
    '{"data": [{"id": "lora", "root": "/lora", "parent": "m", "max_model_len": null},'
    ' {"id": "m", "root": "/models/m", "parent": null, "max_model_len": 2048}]}'
)


def test_release_model_and_length_come_from_the_servers_own_routes() -> None:
    answers = {"/version": text_answer('{"version": "0.32.0"}'), "/v1/models": text_answer(MODELS)}
    with http_server(answers) as (url, seen):
        result = with_session(
            lambda session: fetch_server_answers(session, Endpoint(url, api_key="s3cret"), timeout_seconds=5)
        )
    assert isinstance(result, tuple)
    told, failures = result
    assert (told.version, told.model_root, told.max_model_len) == ("0.32.0", "/models/m", 2048)
    assert failures == {"version": None, "models": None}
    # vLLM guards /v1 only: no other route is shown the key.
    keys = {path: headers.get("Authorization") for path, headers in seen}
    assert keys == {"/version": None, "/v1/models": "Bearer s3cret"}


@pytest.mark.parametrize(
    ("version", "models"),
    [
        ("[]", "[]"),
        ("not json", "{}"),
        ('{"version": 5}', '{"data": []}'),
        ("[" * 100_000, '{"data": "x"}'),
        ('{"v": 1}', '{"data": [1, {"parent": "m"}]}'),
    ],
)
def test_answers_of_another_shape_are_failures_and_not_facts(version: str, models: str) -> None:
    answers = {"/version": text_answer(version), "/v1/models": text_answer(models)}
    with http_server(answers) as (url, _):
        result = with_session(lambda session: fetch_server_answers(session, Endpoint(url), timeout_seconds=5))
    assert isinstance(result, tuple)
    told, failures = result
    assert (told.version, told.model_root, told.max_model_len) == (None, None, None)
    assert {f.reason for f in failures.values()} == {FailureReason.BAD_ANSWER}


@contextlib.contextmanager
def raw_server(answer: Callable[[int], bytes]) -> Iterator[str]:
    """Answers the n-th connection with these bytes, whatever they are, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    count = itertools.count()

    def talk(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.recv(1 << 16)
            client.sendall(answer(next(count)))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=talk, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_whatever_bytes_a_server_answers_the_next_one_is_read_right(seeded: random.Random) -> None:
    good = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nx 1\n\r\n0\r\n\r\n"

    def mutated() -> bytes:
        answer = bytearray(good)
        for _ in range(seeded.randint(1, 6)):
            at = seeded.randrange(len(answer))
            match seeded.randrange(3):
                case 0:
                    answer[at] = seeded.randrange(256)
                case 1:
                    del answer[at : at + seeded.randint(1, 20)]
                case _:
                    answer[at:at] = seeded.randbytes(seeded.randint(1, 20))
        return bytes(answer)

    answers = [mutated() for _ in range(300)]

    async def run(session: Session, url: str) -> list[Scrape | SourceFailure]:
        return [
            await fetch(session, Endpoint(url), "/metrics", source="metrics", timeout_seconds=5)
            for _ in range(2 * len(answers))
        ]

    # Every other answer is good: what the bad one has left behind must not be taken for it.
    with raw_server(lambda n: answers[n // 2] if n % 2 else good) as url:
        got = with_session(lambda session: run(session, url))
    assert isinstance(got, list)
    told = [answer for answer in got[::2] if isinstance(answer, Scrape)]
    assert len(told) == len(answers)
    assert {scrape.body for scrape in told} == {b"x 1\n"}
    failures = {answer.reason for answer in got[1::2] if isinstance(answer, SourceFailure)}
    assert FailureReason.BAD_ANSWER in failures
    assert failures <= {
        FailureReason.BAD_ANSWER,
        FailureReason.HTTP_STATUS,
        FailureReason.UNAUTHORIZED,
        FailureReason.UNAVAILABLE,
        FailureReason.TOO_LARGE,
    }


def test_a_connection_is_kept_and_one_that_the_server_has_closed_meanwhile_is_replaced() -> None:
    connections = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        connections.append(request.client_address[1])
        # Says that it goes on, and closes all the same, as servers do after some idle seconds.
        request.close_connection = len(connections) == 2
        text_answer("x 1\n")(request)

    async def run(session: Session, url: str) -> list[Scrape | SourceFailure]:
        return [
            await fetch(session, Endpoint(url), "/metrics", source="metrics", timeout_seconds=5)
            for _ in range(4)
        ]

    with http_server({"/metrics": answer}) as (url, _):
        got = with_session(lambda session: run(session, url))
    assert isinstance(got, list)
    assert all(isinstance(one, Scrape) for one in got)
    first, second, third, fourth = connections
    assert first == second != third == fourth


@pytest.mark.parametrize(
    ("status", "healthy"),
    [(200, True), (503, False), (500, False), (404, None), (403, None), (401, None), (302, None)],
)
def test_only_an_answer_of_vllm_tells_its_health(status: int, *, healthy: bool | None) -> None:
    with http_server({"/health": text_answer("", status=status)}) as (url, _):
        told = with_session(lambda session: is_healthy(session, Endpoint(url), timeout_seconds=5))
    assert told is healthy


def test_a_health_page_that_does_not_answer_is_no_health() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        told = with_session(lambda session: is_healthy(session, Endpoint(url), timeout_seconds=0.2))
    assert told is False
