"""The bytes of an answer, however they are cut: read whole, or refused with the reason."""

import gc
import random
import weakref

import pytest

from kvheadroom.sources.http_answer import MAX_HEAD_BYTES, AnswerReader, BadAnswerError, TooLargeError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;name=value\r\nlo\r\n0\r\nTrailer: x\r\n\r\n"
)
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + LENGTH


def read(answer: bytes, *, max_bytes: int = 1 << 20, tunnel: bool = False) -> tuple[AnswerReader, bool]:
    reader = AnswerReader(max_bytes, tunnel=tunnel)
    return reader, reader.feed(answer)


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED, INTERIM])
def test_an_answer_reads_the_same_however_it_is_cut(answer: bytes, seeded: random.Random) -> None:
    for _ in range(200):
        cuts = sorted(seeded.sample(range(1, len(answer)), seeded.randint(0, 8)))
        reader = AnswerReader(100)
        told = [reader.feed(answer[a:b]) for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert told == [False] * len(cuts) + [True]
        assert (reader.status, bytes(reader.body), reader.reusable) == (200, b"hello", True)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader, whole = read(b"HTTP/1.0 200 OK\r\n\r\nhel")
    assert not whole
    assert not reader.feed(b"lo")
    assert reader.ends_here()
    assert (bytes(reader.body), reader.reusable) == (b"hello", False)


@pytest.mark.parametrize("answer", [LENGTH[:-1], CHUNKED[:-1], b"", b"HTTP/1.1 200 OK\r\n"])
def test_an_answer_that_was_cut_off_is_not_whole_where_its_end_is_known(answer: bytes) -> None:
    reader, whole = read(answer)
    assert not whole
    assert not reader.ends_here()


def test_a_status_without_a_body_is_whole_after_its_head() -> None:
    assert read(b"HTTP/1.1 204 No Content\r\n\r\n")[1]
    assert read(b"HTTP/1.1 404 \r\ncontent-length: 0\r\n\r\n")[1]
    # The length is that of the page that was not sent.
    reader, whole = read(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n", max_bytes=100)
    assert (whole, reader.body, reader.reusable) == (True, b"", True)


@pytest.mark.parametrize("headers", [b"", b"Upgrade: x\r\nConnection: upgrade\r\n"])
def test_after_an_answer_that_changes_the_protocol_nothing_more_is_read(headers: bytes) -> None:
    reader, whole = read(b"HTTP/1.1 101 Switching Protocols\r\n" + headers + b"\r\nxyz")
    assert (whole, reader.status, reader.body, reader.reusable) == (True, 101, b"", False)


def test_a_header_that_comes_twice_has_both_values_and_one_of_an_interim_answer_is_forgotten() -> None:
    reader, _ = read(
        b"HTTP/1.1 103 E\r\nA: 1\r\n\r\nHTTP/1.1 200 OK\r\nB: 2\r\nb: 3\r\nEmpty:\r\nC: 4 \r\n\r\n"
    )
    assert reader.headers == {"b": "2, 3", "empty": "", "c": "4"}


def test_what_comes_after_the_body_is_no_header() -> None:
    reader, whole = read(CHUNKED)
    assert whole
    assert reader.headers == {"transfer-encoding": "chunked"}


def test_a_proxys_yes_has_no_body_whatever_its_head_says() -> None:
    reader, whole = read(b"HTTP/1.0 200 Connection established\r\nConnection: close\r\n\r\n", tunnel=True)
    assert whole
    assert reader.reusable


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello", False),
        (b"HTTP/1.1 200 OK\r\nConnection: x, close\r\nContent-Length: 0\r\n\r\n", False),
        (CHUNKED + b"x", False),
    ],
)
def test_a_connection_takes_another_request_only_where_nothing_speaks_against_it(
    head: bytes, *, reusable: bool
) -> None:
    reader, whole = read(head)
    assert whole
    assert reader.reusable is reusable


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02P",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"RTSP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.1 000 OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n" * 3_000,
    ],
)
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(BadAnswerError):
        read(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + b"x" * 101,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"33\r\n" + b"x" * 51 + b"\r\n33\r\n" + b"x" * 50,
    ],
)
def test_a_body_over_the_limit_is_refused_as_soon_as_that_is_known(answer: bytes) -> None:
    reader = AnswerReader(100)
    with pytest.raises(TooLargeError):
        reader.feed(answer)
    assert len(reader.body) <= 100


def test_a_body_in_tiny_pieces_is_refused_long_before_it_is_whole() -> None:
    reader = AnswerReader(1 << 20)
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    with pytest.raises(BadAnswerError, match="tiny pieces"):
        any(reader.feed(b"1\r\nx\r\n") for _ in range(40_000))
    assert len(reader.body) < 20_000


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\na: ",
        b"HTTP/1.1 200 ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n" + b"x" * 0xFFFFF + b"\r\n0\r\na: ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n" + b"x" * 0xFFFFF + b"\r\n1;",
    ],
)
def test_a_line_that_does_not_end_is_refused_whatever_came_before(start: bytes) -> None:
    reader = AnswerReader(1 << 20)
    assert not reader.feed(start)
    assert not reader.feed(b"x" * (MAX_HEAD_BYTES - len(start) % (1 << 20) - 100))
    with pytest.raises(BadAnswerError, match="does not end"):
        any(reader.feed(b"x" * 1000) for _ in range(2))


def test_an_answer_given_up_halfway_leaves_memory_at_once() -> None:
    gc.disable()
    try:
        reader, whole = read(LENGTH[:-1])
        assert not whole
        gone = weakref.ref(reader)
        del reader
        assert gone() is None
    finally:
        gc.enable()
