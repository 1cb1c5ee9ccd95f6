"""The bytes of one HTTP/1.1 answer, as they come in -> status, headers, body. No I/O here (RFC 9112)."""

import re

MAX_HEAD_BYTES = 64 * 1024
_MAX_CHUNK_LINE_BYTES = 4096
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")


class BadAnswerError(ValueError):
    """What came is no HTTP answer; the message says in what way."""


class TooLargeError(ValueError):
    """The body is larger than is read."""


class AnswerReader:
    """Reads one answer to a GET, or to a CONNECT.

    Attributes:
        status: 0 until the head is whole.
        headers: by their names in lower case.
        body: as far as it has come.
        reusable: whether the connection can take another request, once the answer is whole.
    """

    def __init__(self, max_bytes: int, *, tunnel: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.reusable = False
        self._max_bytes = max_bytes
        self._tunnel = tunnel
        self._pending = bytearray()
        self._chunked = False
        self._length: int | None = None
        self._needed = 0
        self._raw = 0

    def feed(self, data: bytes) -> bool:
        """Take more bytes; whether the answer is whole now.

        Raises:
            BadAnswerError, TooLargeError: nothing more is to be read.
        """
        if self.status == 0:
            self._pending += data
            if not self._read_head():
                return False
            data, self._pending = bytes(self._pending), bytearray()
        if self._chunked:
            return self._read_chunks(data)
        self.body += data
        have = len(self.body)
        if self._length is None:
            self._check_size(have)
            return False
        if have > self._length:
            # More than was asked for: what it belongs to is not known.
            del self.body[self._length :]
            self.reusable = False
        return have >= self._length

    @property
    def untouched(self) -> bool:
        """Whether nothing of the answer has come."""
        return self.status == 0 and not self._pending

    def ends_here(self) -> bool:
        """Whether the answer is whole when the connection ends now."""
        return self.status != 0 and self._length is None and not self._chunked

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise TooLargeError(f"the answer is larger than {self._max_bytes // 1024**2} MiB")

    def _read_head(self) -> bool:
        """Whether the head of the answer is whole; heads of interim answers (1xx) are passed over."""
        while True:
            end = self._pending.find(b"\r\n\r\n")
            if end < 0:
                if len(self._pending) > MAX_HEAD_BYTES:
                    raise BadAnswerError("its head does not end")
                if not b"HTTP/1.".startswith(self._pending[:7]):
                    raise BadAnswerError("it does not begin as HTTP/1.1 does")
                return False
            lines = self._pending[:end].decode("latin-1").split("\r\n")
            del self._pending[: end + 4]
            found = _STATUS_LINE.fullmatch(lines[0])
            if found is None:
                raise BadAnswerError("it does not begin as HTTP/1.1 does")
            status = int(found[2])
            if status >= 200 or status == 101:
                break
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not _HEADER_NAME.fullmatch(name):
                raise BadAnswerError("a line of its head is no header")
            name, value = name.lower(), value.strip(" \t")
            if name == "content-length" and self.headers.get(name, value) != value:
                raise BadAnswerError("it has two lengths")
            self.headers[name] = value
        self.status = status
        self.reusable = found[1] == "1" and "close" not in self.headers.get("connection", "").lower()
        self._read_framing()
        return True

    def _read_framing(self) -> None:
        """How the end of the body is known (RFC 9112, 6.3)."""
        encoding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if self._tunnel and 200 <= self.status < 300:
            # Whatever the proxy says of its connection, from here on it is the server's.
            self._length, self.reusable = 0, True
        elif self.status in (204, 304):
            self._length = 0
        elif encoding is not None:
            if encoding.lower() != "chunked" or length is not None:
                raise BadAnswerError("the end of its body cannot be told")
            self._chunked = True
        elif length is not None:
            if not (length.isascii() and length.isdecimal() and len(length) < 16):
                raise BadAnswerError("its length is no number")
            self._length = int(length)
            self._check_size(self._length)
        else:
            self.reusable = False

    def _read_chunks(self, data: bytes) -> bool:
        pending = self._pending
        pending += data
        self._raw += len(data)
        # A body in tiny pieces costs much more to read than its size says.
        if self._raw - len(pending) - 2 * len(self.body) > MAX_HEAD_BYTES:
            raise BadAnswerError("its body comes in tiny pieces")
        if len(pending) < self._needed:
            return False
        at, whole = 0, False
        while True:
            line_end = pending.find(b"\r\n", at, at + _MAX_CHUNK_LINE_BYTES)
            if line_end < 0:
                if len(pending) - at >= _MAX_CHUNK_LINE_BYTES:
                    raise BadAnswerError("a piece of its body has no size")
                self._needed = 0
                break
            found = _CHUNK_SIZE.fullmatch(pending, at, line_end)
            if found is None:
                raise BadAnswerError("a piece of its body has no size")
            size = int(found[1], 16)
            if size == 0:
                whole = self._trailer_is_whole(line_end)
                break
            self._check_size(len(self.body) + size)
            begin, end = line_end + 2, line_end + 2 + size
            if len(pending) < end + 2:
                self._needed = end + 2 - at
                break
            if pending[end : end + 2] != b"\r\n":
                raise BadAnswerError("a piece of its body is longer than its size")
            self.body += pending[begin:end]
            at = end + 2
        del pending[:at]
        return whole

    def _trailer_is_whole(self, line_end: int) -> bool:
        """Whether the lines after the last piece have ended; they are not read."""
        end = self._pending.find(b"\r\n\r\n", line_end)
        if end < 0:
            if len(self._pending) - line_end > MAX_HEAD_BYTES:
                raise BadAnswerError("it does not end")
            self._needed = 0
            return False
        if end + 4 < len(self._pending):
            self.reusable = False
        return True
