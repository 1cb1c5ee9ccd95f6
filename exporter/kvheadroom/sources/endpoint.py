"""One server, and all that a request to it needs."""

import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """How the server is known to be itself, and who asks.

    Attributes:
        context: built once; two of them are never equal, so the digest stands for it.
        digest: of the files that the context was made of.
        server_name: the name that the certificate must have; None for the host of the address.
        has_certificate: whether a client certificate is shown to the server.
    """

    context: ssl.SSLContext = field(compare=False, repr=False)
    digest: str = field(default="", repr=False)
    server_name: str | None = None
    has_certificate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy between us and the server.

    Attributes:
        authorization: value of `Proxy-Authorization`.
    """

    url: str
    authorization: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. Equal endpoints ask in the same way, so their connections can be shared.

    Attributes:
        base_url: without a trailing slash; its path stands before every route.
        api_key: of vLLM itself, sent to its /v1 routes only, in place of `authorization`.
        authorization: for a proxy in front, sent to every route.
        authorization_setting: the setting that it comes from, for people.
        headers: more of them, sent to every route.
        unix_socket: path of the socket to connect to; the URL then only gives host and path.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False, kw_only=True)
    authorization: str | None = field(default=None, repr=False, kw_only=True)
    authorization_setting: str | None = field(default=None, kw_only=True)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False, kw_only=True)
    tls: ClientTls | None = field(default=None, kw_only=True)
    proxy: Proxy | None = field(default=None, kw_only=True)
    unix_socket: str | None = field(default=None, kw_only=True)


class Address(NamedTuple):
    """Where a URL leads.

    Attributes:
        authority: host and port as they stand in the URL.
    """

    https: bool
    host: str
    port: int
    authority: str
    path: str


@lru_cache(maxsize=4096)
def address_of(url: str) -> Address:
    """The parts of a valid http or https URL."""
    parts = urlsplit(url)
    https = parts.scheme == "https"
    # The zone of an IPv6 address is of this machine only.
    authority = parts.netloc if "%" not in parts.netloc else _without_zone(parts.netloc)
    return Address(https, parts.hostname or "", parts.port or (443 if https else 80), authority, parts.path)


def _without_zone(netloc: str) -> str:
    address, _, rest = netloc.partition("%")
    return address + rest[rest.index("]") :]
