"""GET over HTTP with a total deadline and a body limit: bytes, or a failure that names the way out.

Never follows a redirect (the answer must come from the configured address), never uses a proxy from the
environment, never asks for compression (a small body could unpack into a huge one).
"""

import asyncio
import ssl
import time
from dataclasses import dataclass

import aiohttp

from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure

MAX_BODY_BYTES = 16 * 1024**2
"""Some 40 times the page of eight engines."""

HEADERS = {
    "Accept": "text/plain;version=0.0.4, application/json;q=0.5",
    "Accept-Encoding": "identity",
    "User-Agent": "kvheadroom",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: its base URL without a trailing slash, and the key for its guarded routes."""

    base_url: str
    api_key: str | None = None


def open_session() -> aiohttp.ClientSession:
    """One session for the whole daemon: a waiting target holds no slot that another could need."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
        headers=HEADERS,
        auto_decompress=False,
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def fetch(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    path: str,
    *,
    source: str,
    timeout_seconds: float,
    max_bytes: int = MAX_BODY_BYTES,
    with_key: bool = False,
) -> Scrape | SourceFailure:
    """GET one path of one server.

    Args:
        timeout_seconds: from first byte out to last byte in.
        with_key: send the API key; only vLLM's /v1 routes ask for it, so no other route gets it.
    """
    url = endpoint.base_url + path
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if with_key and endpoint.api_key else {}
    taken_at, started = time.time(), time.monotonic()

    def failed(reason: FailureReason, detail: str) -> SourceFailure:
        return SourceFailure(source, reason, f"GET {url.partition('?')[0]}: {detail}")

    try:
        async with asyncio.timeout(timeout_seconds):
            async with session.get(
                url, headers=headers, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=None)
            ) as response:
                if response.status != 200:
                    unavailable = response.status == 503
                    reason = FailureReason.UNAVAILABLE if unavailable else FailureReason.HTTP_STATUS
                    return failed(reason, _status_text(response, source))
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    return failed(
                        FailureReason.BAD_ANSWER, "the answer is compressed though none was asked for"
                    )
                body = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > max_bytes:
                        return failed(
                            FailureReason.TOO_LARGE, f"the answer is larger than {max_bytes // 1024**2} MiB"
                        )
    except TimeoutError:
        return failed(FailureReason.TIMEOUT, f"no full answer within {timeout_seconds:.3g} s")
    except aiohttp.ClientConnectorCertificateError as error:
        return failed(
            FailureReason.TLS,
            f"the certificate is not trusted ({error.certificate_error}); if it is of a CA of your own, start "
            "kvheadroom with SSL_CERT_FILE=/path/to/ca.pem",
        )
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        return failed(FailureReason.TLS, f"no TLS connection; is the server plain http? ({error})")
    except aiohttp.ClientConnectorDNSError:
        return failed(FailureReason.UNREACHABLE, "the host name cannot be resolved")
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, ConnectionRefusedError):
            return failed(FailureReason.REFUSED, "nothing listens there; is vLLM running?")
        return failed(FailureReason.UNREACHABLE, f"{error.os_error.strerror or error}")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return failed(
            FailureReason.BAD_ANSWER,
            f"not HTTP, or cut off; is the server https? ({type(error).__name__}: {error})",
        )
    return Scrape(bytes(body), taken_at, time.monotonic() - started)


def _status_text(response: aiohttp.ClientResponse, source: str) -> str:
    meaning = {
        401: "something in front of the server asks for credentials (vLLM asks for none here); let kvheadroom pass there"
        if source == "metrics"
        else "the server asks for an API key; set `api_key_file`",
        403: "the server refuses",
        404: "there is no such page; is this vLLM's address?",
        503: "the server is not serving at the moment (vLLM answers so while it scales)",
    }.get(response.status)
    if 300 <= response.status < 400:
        meaning = "redirects are not followed; give the address they lead to"
    return f"status {response.status}" + (f": {meaning}" if meaning else "")
