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
        reusable: whether the connection can take another request, once the answer is whole.
    """

    def __init__(self, max_bytes: int, *, tunnel: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reusable = False
        self._max_bytes = max_bytes
        self._tunnel = tunnel
        self._pending = b""
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._size = 0
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
            rest = self._read_head(self._pending + data if self._pending else data)
            if rest is None:
                return False
            data = rest
        if self._chunked:
            return self._read_chunks(data)
        self._parts.append(data)
        self._size += len(data)
        if self._length is None:
            self._check_size(self._size)
            return False
        if self._size > self._length:
            # More than was asked for: what it belongs to is not known.
            self._parts = [self.body[: self._length]]
            self._size = self._length
            self.reusable = False
        return self._size == self._length

    @property
    def body(self) -> bytes:
        """As far as it has come."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

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

    def _read_head(self, data: bytes) -> bytes | None:
        """What follows the head of the answer, None while that is not whole; interim answers (1xx) are passed over."""
        at = 0
        while True:
            end = data.find(b"\r\n\r\n", at)
            if end < 0:
                self._pending = data[at:]
                if len(self._pending) > MAX_HEAD_BYTES:
                    raise BadAnswerError("its head does not end")
                if not b"HTTP/1.".startswith(self._pending[:7]):
                    raise BadAnswerError("it does not begin as HTTP/1.1 does")
                return None
            lines = data[at:end].decode("latin-1").split("\r\n")
            at = end + 4
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
        self._pending = b""
        self._read_framing()
        return data[at:]

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
        pending: bytes | bytearray = data
        if self._buffer:
            # A piece that comes in many parts is not copied anew for each of them.
            self._buffer += data
            pending = self._buffer
        self._raw += len(data)
        # A body in tiny pieces costs much more to read than its size says.
        if self._raw - len(pending) - 2 * self._size > MAX_HEAD_BYTES:
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
                whole = self._trailer_is_whole(pending, line_end)
                break
            self._check_size(self._size + size)
            begin, end = line_end + 2, line_end + 2 + size
            if len(pending) < end + 2:
                self._needed = end + 2 - at
                break
            if pending[end : end + 2] != b"\r\n":
                raise BadAnswerError("a piece of its body is longer than its size")
            self._parts.append(bytes(pending[begin:end]))
            self._size += size
            at = end + 2
        self._buffer = bytearray(pending[at:])
        return whole

    def _trailer_is_whole(self, pending: bytes | bytearray, line_end: int) -> bool:
        """Whether the lines after the last piece have ended; they are not read."""
        end = pending.find(b"\r\n\r\n", line_end)
        if end < 0:
            if len(pending) - line_end > MAX_HEAD_BYTES:
                raise BadAnswerError("it does not end")
            self._needed = 0
            return False
        if end + 4 < len(pending):
            self.reusable = False
        return True
