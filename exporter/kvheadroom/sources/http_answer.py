"""The bytes of one HTTP/1.1 answer, as they come in -> status, headers, body. No I/O here.

httptools (llhttp) parses; here is what a scraper needs beyond that: limits, and what is refused though it can be parsed.
"""

import weakref
from types import MethodType, SimpleNamespace
from typing import NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

MAX_HEAD_BYTES = 64 * 1024


class BadAnswerError(ValueError):
    """What came is no HTTP answer; the message says in what way."""


class TooLargeError(ValueError):
    """The body is larger than is read."""


class AnswerReader:
    """Reads one answer to a GET, or to a CONNECT.

    Attributes:
        status: 0 until the head is whole.
        headers: by their names in lower case; of one that comes twice, both values with a comma between.
        reusable: whether the connection can take another request, once the answer is whole.
    """

    def __init__(self, max_bytes: int, *, tunnel: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reusable = False
        self._max_bytes = max_bytes
        self._tunnel = tunnel
        self._whole = False
        self._refusal: BadAnswerError | TooLargeError | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._fed = 0
        self._fed_since_body = 0
        self._headers_size = 0
        # Were the parser's hold on the reader a firm one, bodies would stay in memory until the collector's next run.
        reader = weakref.proxy(self)
        callbacks = SimpleNamespace(
            on_message_begin=MethodType(AnswerReader._on_message_begin, reader),
            on_header=MethodType(AnswerReader._on_header, reader),
            on_headers_complete=MethodType(AnswerReader._on_headers_complete, reader),
            on_body=MethodType(AnswerReader._on_body, reader),
            on_message_complete=MethodType(AnswerReader._on_message_complete, reader),
        )
        self._parser = HttpResponseParser(callbacks)

    def feed(self, data: bytes) -> bool:
        """Take more bytes; whether the answer is whole now.

        Raises:
            BadAnswerError, TooLargeError: nothing more is to be read.
        """
        if self.untouched and data[:1] not in {b"", b"H"}:
            # llhttp would take RTSP and the like as well.
            raise BadAnswerError("it does not begin as HTTP/1.1 does")
        size = self._size
        self._fed += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            # Only a status 101 leads here, and that one is whole with its head.
            return True
        except HttpParserError as error:
            if not self._whole:
                where = "its body is no HTTP/1.1" if self.status else "it does not begin as HTTP/1.1 does"
                raise self._refusal or BadAnswerError(f"{where}: {error}") from None
            # More than was asked for: what it belongs to is not known.
            self.reusable = False
        if self._whole:
            return True
        self._fed_since_body = 0 if self._size > size else self._fed_since_body + len(data)
        if self._fed_since_body > MAX_HEAD_BYTES:
            raise BadAnswerError("it does not end" if self.status else "its head does not end")
        # A body in tiny pieces costs much more to read than its size says.
        if self._fed - self._headers_size - 2 * self._size > MAX_HEAD_BYTES:
            raise BadAnswerError("its body comes in tiny pieces")
        return False

    @property
    def body(self) -> bytes:
        """As far as it has come."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    @property
    def untouched(self) -> bool:
        """Whether nothing of the answer has come."""
        return self._fed == 0

    def ends_here(self) -> bool:
        """Whether the answer is whole when the connection ends now."""
        return self.status != 0 and self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    def _refuse(self, refusal: BadAnswerError | TooLargeError) -> NoReturn:
        """End the parsing; httptools makes an error of its own of whatever a callback raises."""
        self._refusal = refusal
        raise refusal

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            self._refuse(TooLargeError(f"the answer is larger than {self._max_bytes // 1024**2} MiB"))

    def _on_message_begin(self) -> None:
        if self._whole:
            self._refuse(BadAnswerError("more came than was asked for"))

    def _on_header(self, name: bytes, value: bytes) -> None:
        self._headers_size += len(name) + len(value) + len(": \r\n")
        if self._headers_size > MAX_HEAD_BYTES:
            self._refuse(BadAnswerError("its head does not end"))
        if self.status == 0:  # Later ones come after the body, and are not looked at.
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def _on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._parser.get_http_version() not in {"1.0", "1.1"} or not 100 <= status < 600:
            self._refuse(BadAnswerError("it does not begin as HTTP/1.1 does"))
        if status < 200 and status != 101:
            # An interim answer: the one that was asked for follows.
            self.headers.clear()
            return
        self.status = status
        if self._tunnel and 200 <= status < 300:
            # Whatever the proxy says of its connection, from here on it is the server's.
            self._whole = self.reusable = True
        elif status in {101, 204, 304}:
            self._whole = True
            self.reusable = status != 101 and self._parser.should_keep_alive()
        elif self.headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._refuse(BadAnswerError("the end of its body cannot be told"))
        else:
            self._check_size(int(self.headers.get("content-length", "0")))

    def _on_body(self, part: bytes) -> None:
        if self._whole:
            self._refuse(BadAnswerError("more came than was asked for"))
        self._check_size(self._size + len(part))
        self._parts.append(part)
        self._size += len(part)

    def _on_message_complete(self) -> None:
        if self.status and not self._whole:
            self._whole = True
            self.reusable = self._parser.should_keep_alive()
