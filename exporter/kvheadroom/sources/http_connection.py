"""One connection to a server: straight, through a proxy, or by a unix socket; with TLS or without."""

import asyncio
import socket
import ssl
import time
from functools import cache
from typing import Any

from kvheadroom.sources.endpoint import Address, Endpoint, Proxy, address_of
from kvheadroom.sources.http_answer import AnswerReader, BadAnswerError, TooLargeError

MAX_PROXY_ANSWER_BYTES = 64 * 1024


class ConnectionLostError(Exception):
    """The connection ended before the answer was whole.

    Attributes:
        cause: what ended it, None where the server just closed.
        silent: whether nothing of the answer had come.
    """

    def __init__(self, cause: BaseException | None, *, silent: bool) -> None:
        super().__init__(str(cause) if cause else "the connection was closed")
        self.cause = cause
        self.silent = silent


class ProxyError(Exception):
    """The proxy cannot be reached, or lets nobody through.

    Attributes:
        status: of its answer, None where it gave none.
    """

    def __init__(self, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.status = status


class HttpConnection(asyncio.Protocol):
    """Takes one request after the other."""

    def __init__(self) -> None:
        self.closed = False
        self.idle_since = 0.0
        self.transport: Any = None
        """uvloop's is none of asyncio's classes."""
        self._reader: AnswerReader | None = None
        self._whole: asyncio.Future[None] | None = None

    async def ask(self, request: bytes, reader: AnswerReader) -> None:
        """Send a request and read its answer; the connection is closed unless it can take another.

        Raises:
            ConnectionLostError, BadAnswerError, TooLargeError: no whole answer came.
        """
        if self.closed or self.transport.is_closing():
            self.closed = True
            raise ConnectionLostError(None, silent=True)
        self._reader = reader
        self._whole = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        reusable = False
        try:
            await self._whole
            reusable = reader.reusable
        finally:
            self._reader = self._whole = None
            if not reusable:
                self.close()

    def close(self) -> None:
        """End it at once; what is under way on it is of no use any more."""
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Part of an answer."""
        if self._reader is None or self._whole is None or self._whole.done():
            # Nobody asked for it, so nobody knows what it answers.
            self.close()
            return
        try:
            if self._reader.feed(data):
                self._whole.set_result(None)
        except (BadAnswerError, TooLargeError) as error:
            self._whole.set_exception(error)

    def eof_received(self) -> None:
        """The server says no more: the transport closes itself now, and takes no other request."""
        self.closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.closed = True
        if self._reader is None or self._whole is None or self._whole.done():
            return
        if exc is None and self._reader.ends_here():
            self._whole.set_result(None)
        else:
            self._whole.set_exception(ConnectionLostError(exc, silent=self._reader.untouched))


async def connect(endpoint: Endpoint, timeout_seconds: float) -> HttpConnection:
    """A new connection on which the endpoint can be asked.

    Raises:
        OSError, ssl.SSLError: as the system says it.
        ProxyError: the proxy is in the way.
    """
    address = address_of(endpoint.base_url)
    if endpoint.unix_socket is not None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(HttpConnection, endpoint.unix_socket)
        return connection
    context = _context(endpoint) if address.https else None
    server_name = None if endpoint.tls is None else endpoint.tls.server_name
    if endpoint.proxy is None:
        return await _connect(address, context, server_name, timeout_seconds)
    proxy = address_of(endpoint.proxy.url)
    try:
        connection = await _connect(proxy, default_context() if proxy.https else None, None, timeout_seconds)
    except TimeoutError:
        raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ProxyError(f"the proxy {endpoint.proxy.url} cannot be reached ({why})") from error
    if context is None:
        return connection
    await _tunnel(connection, endpoint.proxy, address)
    through = HttpConnection()
    try:
        through.transport = await asyncio.get_running_loop().start_tls(
            connection.transport, through, context, server_hostname=server_name or address.host
        )
    except BaseException:
        connection.close()
        raise
    if through.transport is None:
        raise ConnectionResetError("the connection was closed")
    return through


async def _connect(
    address: Address, context: ssl.SSLContext | None, server_name: str | None, timeout_seconds: float
) -> HttpConnection:
    """To the first of a host's addresses that takes it; one that never answers leaves time for the others."""
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        # A name: looking it up can take long, so that is done in a thread.
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_seconds
    for left, (family, _, protocol, _, where) in zip(range(len(found), 0, -1), found, strict=True):
        try:
            async with asyncio.timeout((deadline - time.monotonic()) / left):
                _, connection = await loop.create_connection(
                    HttpConnection,
                    _numeric_host(where),
                    address.port,
                    family=family,
                    proto=protocol,
                    ssl=context,
                    server_hostname=None if context is None else server_name or address.host,
                )
                return connection
        except OSError:
            if left == 1:
                raise
    raise socket.gaierror("the name has no address")


def _numeric_host(where: tuple[Any, ...]) -> str:
    """Of a socket address; an IPv6 one of this link alone has its zone as a number of its own (ipv6(7))."""
    zone = where[3] if len(where) > 3 else 0
    return f"{where[0]}%{zone}" if zone else str(where[0])


async def _tunnel(connection: HttpConnection, proxy: Proxy, address: Address) -> None:
    """Ask the proxy for a way to the server (CONNECT)."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"CONNECT {host}:{address.port} HTTP/1.1", f"Host: {host}:{address.port}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    reader = AnswerReader(MAX_PROXY_ANSWER_BYTES, tunnel=True)
    try:
        await connection.ask(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"), reader)
    except (ConnectionLostError, BadAnswerError, TooLargeError) as error:
        raise ProxyError(f"the proxy {proxy.url} gives no way to the server ({error})") from error
    if not 200 <= reader.status < 300:
        connection.close()
        raise ProxyError(f"the proxy {proxy.url} gives no way to the server", reader.status)


def _context(endpoint: Endpoint) -> ssl.SSLContext:
    return default_context() if endpoint.tls is None else endpoint.tls.context


@cache
def default_context() -> ssl.SSLContext:
    """Trusts whom the system trusts (`SSL_CERT_FILE` names others)."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
