"""GET over HTTP with a total deadline and a body limit: bytes, or a failure that names the way out.

Never follows a redirect (the answer must come from the configured address), never uses a proxy from the
environment, never asks for compression (a small body could unpack into a huge one).
"""

import asyncio
import socket
import ssl
import time
from types import TracebackType
from typing import Self

from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure
from kvheadroom.sources.endpoint import Endpoint, address_of
from kvheadroom.sources.http_answer import AnswerReader, BadAnswerError, TooLargeError
from kvheadroom.sources.http_connection import ConnectionLostError, HttpConnection, ProxyError, connect

MAX_BODY_BYTES = 16 * 1024**2
"""Some 40 times the page of eight engines."""

VLLM = "vLLM"

MAX_IDLE_SECONDS = 60.0
"""A connection that was idle for longer is not trusted any more: what lies between may have forgotten it."""

_HEADERS = (
    "Accept: text/plain;version=0.0.4, application/json;q=0.5\r\n"
    "Accept-Encoding: identity\r\n"
    "User-Agent: kvheadroom\r\n"
)


class Session:
    """The connections of the whole daemon, kept for the next request.

    There is no limit that a waiting target could use up: each server has connections of its own.
    """

    def __init__(self) -> None:
        self._idle: dict[Endpoint, list[HttpConnection]] = {}
        self._looked_through_at = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def get(
        self, endpoint: Endpoint, path: str, *, with_key: bool, reader: AnswerReader, deadline: float
    ) -> None:
        """Ask on a connection that is there, else on a new one.

        Raises:
            ConnectionLostError, BadAnswerError, TooLargeError, ProxyError, OSError, UnicodeError: no whole answer came.
        """
        request = _request(endpoint, path, with_key=with_key)
        connection = self._take(endpoint)
        if connection is not None:
            try:
                await connection.ask(request, reader)
            except ConnectionLostError as lost:
                # The server may close an idle connection just as it is asked; it has seen nothing of the request.
                if not lost.silent:
                    raise
            else:
                self._keep(endpoint, connection)
                return
        connection = await connect(endpoint, deadline - time.monotonic())
        await connection.ask(request, reader)
        self._keep(endpoint, connection)

    def _take(self, endpoint: Endpoint) -> HttpConnection | None:
        idle = self._idle.get(endpoint)
        while idle:
            connection = idle.pop()
            if not connection.closed and time.monotonic() - connection.idle_since < MAX_IDLE_SECONDS:
                return connection
            connection.close()
        self._forget_old()
        return None

    def _keep(self, endpoint: Endpoint, connection: HttpConnection) -> None:
        if not connection.closed:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(endpoint, []).append(connection)

    def _forget_old(self) -> None:
        """Close what nobody has used for long, such as connections to servers that are watched no more."""
        now = time.monotonic()
        oldest = now - MAX_IDLE_SECONDS
        if self._looked_through_at > oldest:
            return
        self._looked_through_at = now
        for endpoint, connections in list(self._idle.items()):
            if all(connection.closed or connection.idle_since < oldest for connection in connections):
                for connection in connections:
                    connection.close()
                del self._idle[endpoint]


def open_session() -> Session:
    """One session for the whole daemon."""
    return Session()


def _request(endpoint: Endpoint, path: str, *, with_key: bool) -> bytes:
    address = address_of(endpoint.base_url)
    target = address.path + path
    lines = ""
    if endpoint.proxy is not None and not address.https:
        target = f"http://{address.authority}{target}"
        if endpoint.proxy.authorization is not None:
            lines = f"Proxy-Authorization: {endpoint.proxy.authorization}\r\n"
    if with_key and endpoint.api_key is not None:
        lines += f"Authorization: Bearer {endpoint.api_key}\r\n"
    elif endpoint.authorization is not None:
        lines += f"Authorization: {endpoint.authorization}\r\n"
    for name, value in endpoint.headers:
        lines += f"{name}: {value}\r\n"
    return f"GET {target} HTTP/1.1\r\nHost: {address.authority}\r\n{_HEADERS}{lines}\r\n".encode("ascii")


async def fetch(
    session: Session,
    endpoint: Endpoint,
    path: str,
    *,
    source: str,
    timeout_seconds: float,
    max_bytes: int = MAX_BODY_BYTES,
    with_key: bool = False,
    program: str = VLLM,
) -> Scrape | SourceFailure:
    """GET one path of one server.

    Args:
        program: what is meant to answer there, for the words of a failure.
        timeout_seconds: from first byte out to last byte in.
        with_key: send the API key; only vLLM's /v1 routes ask for it, so no other route gets it.
    """
    taken_at, started = time.time(), time.monotonic()
    reader = AnswerReader(max_bytes)

    def failed(reason: FailureReason, detail: str, status: int | None = None) -> SourceFailure:
        return SourceFailure(
            source, reason, f"GET {endpoint.base_url}{path.partition('?')[0]}: {detail}", status
        )

    try:
        async with asyncio.timeout(timeout_seconds):
            await session.get(
                endpoint, path, with_key=with_key, reader=reader, deadline=started + timeout_seconds
            )
    except TimeoutError:
        return failed(FailureReason.TIMEOUT, f"no full answer within {timeout_seconds:.3g} s")
    except TooLargeError as error:
        return failed(FailureReason.TOO_LARGE, str(error))
    except (BadAnswerError, ConnectionLostError, ProxyError, OSError, UnicodeError) as error:
        return failed(*_what_went_wrong(endpoint, error, program))
    if reader.status != 200:
        return failed(*_what_status_means(reader, endpoint, program, with_key=with_key), reader.status)
    if reader.headers.get("content-encoding", "identity") != "identity":
        return failed(FailureReason.BAD_ANSWER, "the answer is compressed though none was asked for")
    return Scrape(reader.body, taken_at, time.monotonic() - started)


def _what_went_wrong(endpoint: Endpoint, error: Exception, program: str) -> tuple[FailureReason, str]:
    """Why no whole answer came, for a person."""
    cause = error.cause if isinstance(error, ConnectionLostError) else error
    if isinstance(error, ProxyError):
        if error.status == 407:
            return FailureReason.UNAUTHORIZED, _PROXY_ASKS
        status = "" if error.status is None else f" (status {error.status})"
        return FailureReason.UNREACHABLE, f"{error}{status}"
    if isinstance(cause, ssl.SSLError):
        return FailureReason.TLS, _tls_text(endpoint, cause)
    if isinstance(error, ConnectionLostError) and error.silent and address_of(endpoint.base_url).https:
        # With TLS 1.3 the word about the certificate often gets lost with the connection.
        return (
            FailureReason.BAD_ANSWER,
            f"the server closed the connection unasked; {_certificate_text(endpoint)}",
        )
    if isinstance(error, BadAnswerError | ConnectionLostError):
        return FailureReason.BAD_ANSWER, f"not HTTP, or cut off; is the server https? ({error})"
    if isinstance(error, socket.gaierror | UnicodeError):
        return FailureReason.UNREACHABLE, "the host name cannot be resolved"
    if endpoint.unix_socket is not None and isinstance(error, FileNotFoundError):
        return FailureReason.REFUSED, f"there is no socket {endpoint.unix_socket}; is {program} running?"
    if isinstance(error, ConnectionRefusedError):
        return FailureReason.REFUSED, f"nothing listens there; is {program} running?"
    return FailureReason.UNREACHABLE, getattr(error, "strerror", None) or str(error)


_PROXY_ASKS = "the proxy asks for credentials, or refuses those given; set `proxy_basic_auth`"


def _tls_text(endpoint: Endpoint, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (62, 64):  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
            way_out = "if that is meant, give the name that it has: `tls: {server_name: NAME}`"
        else:
            way_out = "if it is of a CA of your own, set `tls: {ca_file: /path/to/ca.pem}`"
        return f"the certificate is not trusted ({error.verify_message}); {way_out}"
    if "ALERT" in (error.reason or ""):
        return f"the server refuses us ({error.reason}); {_certificate_text(endpoint)}"
    return f"no TLS connection; is the server plain http? ({error.reason or error})"


def _certificate_text(endpoint: Endpoint) -> str:
    if endpoint.tls is not None and endpoint.tls.has_certificate:
        return "it may not take the client certificate of `tls: cert_file`"
    return "it may ask for a client certificate: `tls: {cert_file: FILE, key_file: FILE}`"


def _what_status_means(
    reader: AnswerReader, endpoint: Endpoint, program: str, *, with_key: bool
) -> tuple[FailureReason, str]:
    status = reader.status
    if status == 407:
        return FailureReason.UNAUTHORIZED, f"status {status}: {_PROXY_ASKS}"
    if status in (401, 403):
        meaning = _who_asks(endpoint, program, with_key=with_key)
        return FailureReason.UNAUTHORIZED, f"status {status}: {meaning}"
    if status == 503:
        meaning = "the server is not serving at the moment"
        if program == VLLM:
            meaning += " (vLLM answers so while it scales)"
        return FailureReason.UNAVAILABLE, f"status {status}: {meaning}"
    told = f"status {status}"
    if 300 <= status < 400:
        told += ": redirects are not followed; give the address they lead to"
    elif status == 404:
        told += f": there is no such page; is this {program}'s address?"
    return FailureReason.HTTP_STATUS, told


def _who_asks(endpoint: Endpoint, program: str, *, with_key: bool) -> str:
    """What to do when the server turns us away."""
    if with_key:
        if endpoint.api_key is not None:
            return "the server does not take the key of `api_key_file`"
        if endpoint.authorization_setting is None:
            return "the server asks for an API key; set `api_key_file`"
        return (
            f"neither the server nor what is in front of it takes `{endpoint.authorization_setting}` alone; "
            "if vLLM has a key of its own, set `api_key_file`"
        )
    if endpoint.authorization_setting is not None:
        return f"what is in front of the server does not take the credentials of `{endpoint.authorization_setting}`"
    if program != VLLM:
        return "it asks for credentials; set `basic_auth` or `bearer_token_file`"
    return (
        "something in front of the server asks for credentials (vLLM asks for none here); "
        "set `basic_auth` or `bearer_token_file`"
    )
