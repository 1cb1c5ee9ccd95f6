"""The headers of many files of a hub, over real HTTP on loopback, from servers that lie, stop and never end."""

import struct
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.sources import hub_headers
from kvheadroom.sources.hub_environment import HubEnvironment, HubName
from kvheadroom.sources.hub_headers import fetch_headers
from tests.doubles.http_server import Answer, http_server, ranged, text_answer
from tests.sources.safetensors_files import file_bytes, header_of

TOKEN = "hf_a-token-that-nobody-may-see"
MODEL = HubName("org/large")
HUNDRED_MB = 10**8


def path(file: str) -> str:
    return f"/org/large/resolve/main/{file}"


def shard(*tensors: str) -> bytes:
    return file_bytes(header_of(dict.fromkeys(tensors, (4, 2))), 16 * len(tensors))


THREE = {"a.safetensors": ("a1", "a2"), "b.safetensors": ("b",), "c.safetensors": ("c",)}
NAMED = {tensor: file for file, tensors in THREE.items() for tensor in tensors}
SERVED: dict[str, Answer] = {path(file): ranged(shard(*tensors)) for file, tensors in THREE.items()}


def fetched(
    answers: Mapping[str, Answer],
    shards: Mapping[str, str] = NAMED,
    *,
    timeout_seconds: float = 10,
) -> tuple[TensorInventory | SourceFailure, list[tuple[str, dict[str, str]]], list[tuple[int, int]]]:
    """What came, what was asked for, and what was reported."""
    reports: list[tuple[int, int]] = []
    with http_server(dict(answers)) as (endpoint, seen):
        environment = HubEnvironment(endpoint=endpoint, cache=Path("/nowhere"), offline=False, token=TOKEN)
        got = fetch_headers(
            environment,
            MODEL,
            shards,
            lambda done, total: reports.append((done, total)),
            timeout_seconds=timeout_seconds,
        )
    assert TOKEN not in str(got)
    return got, seen, reports


def problem(answers: Mapping[str, Answer], shards: Mapping[str, str] = NAMED) -> str:
    got, _, _ = fetched({**SERVED, **answers}, shards)
    assert isinstance(got, TensorInventory)
    assert not got.sizes
    return got.problem


def failure(answers: Mapping[str, Answer], *, timeout_seconds: float = 10) -> SourceFailure:
    got, _, _ = fetched({**SERVED, **answers}, timeout_seconds=timeout_seconds)
    assert isinstance(got, SourceFailure)
    return got


def test_every_file_is_asked_once_for_its_beginning_and_all_tensors_come() -> None:
    got, seen, reports = fetched(SERVED)
    assert isinstance(got, TensorInventory)
    assert got.sizes == dict.fromkeys(NAMED, 16)
    assert {(tensor.dtype, tensor.shape) for tensor in got.stored} == {("BF16", (4, 2))}
    assert sorted(asked for asked, _ in seen) == sorted(SERVED)
    assert all(headers["Range"].startswith("bytes=0-") for _, headers in seen)
    assert {headers["Authorization"] for _, headers in seen} == {f"Bearer {TOKEN}"}
    assert reports == [(0, 3), (1, 3), (2, 3)]


def test_a_header_longer_than_guessed_is_asked_for_once_more() -> None:
    tensors = [f"tensor-{number}" for number in range(500)]
    content = shard("a1", "a2", *tensors)
    got, seen, _ = fetched({**SERVED, path("a.safetensors"): ranged(content)})
    assert isinstance(got, TensorInventory)
    assert len(got.sizes) == 504
    first, second = (headers["Range"] for asked, headers in seen if asked == path("a.safetensors"))
    assert first != second
    (length,) = struct.unpack("<Q", content[:8])
    assert second == f"bytes=0-{8 + length - 1}"


def test_of_a_server_that_sends_whole_files_no_more_than_the_header_is_read() -> None:
    header = header_of({"a1": (4, 2), "a2": (HUNDRED_MB,)})
    sent = 0

    def whole(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        start = file_bytes(header, 0)
        request.send_response(200)
        request.send_header("Content-Length", str(len(start) + 16 + 2 * HUNDRED_MB))
        request.end_headers()
        request.wfile.write(start)
        for _ in range(200):
            request.wfile.write(bytes(1_000_000))
            sent += 1_000_000

    got, _, _ = fetched({**SERVED, path("a.safetensors"): whole})
    assert isinstance(got, TensorInventory)
    assert got.sizes["a2"] == 2 * HUNDRED_MB
    # What a socket holds on both sides, not the file.
    assert sent < HUNDRED_MB


def partial(content: bytes, content_range: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(206)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("Content-Range", content_range)
        request.end_headers()
        request.wfile.write(content)

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (text_answer(struct.pack("<Q", 10**15) + b"{}"), "its header would have 1,000,000,000,000,000 bytes"),
        (text_answer(struct.pack("<Q", 5_000) + b"{}"), "it ends within its header"),
        (text_answer("<html>please log in</html>"), "so it is no safetensors file"),
        (text_answer(b""), "the file is shorter than the length of a header"),
        (text_answer(shard("a1", "a2")[:-1]), "so it was cut off or written over"),
        (partial(shard("a1", "a2"), "bytes 0-99/100000"), "it has 100,000 bytes, and its header speaks of"),
        (ranged(shard("a1", "b")), "b.safetensors): b is in another file as well"),
        (ranged(shard("a1")), "the index names a2, and no file holds it"),
    ],
)
def test_a_file_that_lies_is_told_and_nothing_is_taken(answer: Answer, words: str) -> None:
    assert words in problem({path("a.safetensors"): answer})


def test_files_with_many_more_tensors_than_the_index_names_are_not_read_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_headers, "MORE_TENSORS", 100)
    content = shard("a1", "a2", *(f"x{number}" for number in range(200)))
    assert problem({path("a.safetensors"): ranged(content)}) == (
        "org/large: its files hold many more tensors than its index names"
    )


def test_another_part_of_a_file_than_was_asked_for_is_no_header() -> None:
    got = failure({path("b.safetensors"): partial(shard("b"), "bytes 5-9/1000")})
    assert got.reason is FailureReason.BAD_ANSWER
    assert got.detail == "org/large (b.safetensors): another part of it came than was asked for"


def test_a_header_too_large_to_be_one_of_many_is_not_asked_for() -> None:
    got = failure({path("b.safetensors"): text_answer(struct.pack("<Q", 50_000_000) + b"{")})
    assert got.detail == "org/large (b.safetensors): its header is larger than 16 MiB"


def refused(status: int, code: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refused(404, "EntryNotFound"), "org/large (b.safetensors): the model is there, but has no such file"),
        (refused(403, "GatedRepo"), "org/large (b.safetensors): it is gated"),
        (refused(500, ""), "org/large (b.safetensors): the hub answered with status 500"),
    ],
)  # fmt: skip
def test_one_file_that_is_refused_ends_it_with_its_name(answer: Answer, words: str) -> None:
    assert failure({path("b.safetensors"): answer}).detail.startswith(words)


def test_files_that_never_end_end_at_the_deadline_of_all() -> None:
    def trickle(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(100):
            request.wfile.write(b" ")
            request.wfile.flush()
            time.sleep(0.05)

    started = time.monotonic()
    got = failure({path(file): trickle for file in ("a.safetensors", "b.safetensors")}, timeout_seconds=0.5)
    assert time.monotonic() - started < 3
    assert got.reason is FailureReason.TIMEOUT


def test_more_files_than_any_model_has_are_not_asked_for() -> None:
    got, seen, _ = fetched({}, {f"t{number}": f"{number}.safetensors" for number in range(1001)})
    assert isinstance(got, SourceFailure)
    assert got.reason is FailureReason.TOO_LARGE
    assert seen == []


def test_a_name_of_a_file_cannot_lead_to_another_address() -> None:
    got, seen, _ = fetched({}, {"t": "a?b#c.safetensors"})
    assert isinstance(got, SourceFailure)
    assert [asked for asked, _ in seen] == [path("a%3Fb%23c.safetensors")]
