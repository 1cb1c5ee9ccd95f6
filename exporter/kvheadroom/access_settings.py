"""How a server is reached, as the config says it: address, credentials, TLS, proxy, socket. Secrets stand in files."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_HOST = re.compile(r"[0-9a-zA-Z_-]+(\.[0-9a-zA-Z_-]+)*\.?|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(%[0-9a-zA-Z]+)?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_PLAIN_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,8190}[\x21-\x7e])?")
# What a request says by these, it says itself: who asks, whom, for what, and in which form.
_OWN_HEADERS = re.compile(
    r"authorization|proxy-.*|host|content-.*|accept.*|connection|keep-alive|te|trailer|transfer-encoding|upgrade|"
    r"expect|range|if-.*|user-agent",
    re.IGNORECASE,
)
MAX_SOCKET_BYTES = 107
"""The longest path of a unix socket (unix(7))."""


class Strict(BaseModel):
    """A part of the config: nothing that is not known, and not to be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def without_parameters(address: str) -> str:
    """An address as it may be shown: what stands behind ? or # may be a key."""
    return re.split("[?#]", address, maxsplit=1)[0]


def base_url(value: str) -> str:
    """A server's address without a trailing slash.

    Raises:
        ValueError: with what is wrong and what is allowed.
    """
    if "@" in value:
        raise ValueError("an address may not hold a user or password: it is shown on pages and in metrics")
    if not _is_address(value):
        shown = without_parameters(value)[:100]
        raise ValueError(f"{shown!r} is no server's address; write e.g. http://host:8000")
    parts = urlsplit(value)
    if parts.query or parts.fragment:
        raise ValueError("an address may not have a query (?...) or fragment (#...)")
    path = parts.path.rstrip("/")
    if path.endswith("/metrics"):
        raise ValueError("give the server's address without /metrics")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _page_url(value: str) -> str:
    # Never repeated: its query may hold a secret.
    if "@" in value:
        raise ValueError("an address may not hold a user or password; use `basic_auth`")
    if not _is_address(value) or "#" in value:
        raise ValueError("this is no page's address; write e.g. http://host:8080/targets")
    return value


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        return False
    plain = re.fullmatch(r"[\x21-\x7e]+", value) is not None and len(value) <= 2000
    is_host = _HOST.fullmatch(parts.hostname or "") is not None
    return parts.scheme in ("http", "https") and port_is_valid and plain and is_host


def _proxy_url(value: str) -> str:
    if "@" in value:
        raise ValueError("give the proxy's user and password with `proxy_basic_auth`, not in its address")
    if not _is_address(value) or urlsplit(value)._replace(scheme="", netloc="").geturl() not in ("", "/"):
        raise ValueError("this is no proxy's address; write e.g. http://proxy:3128")
    return value.rstrip("/")


def _headers(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("a mapping (`Name: value`) is needed")  # noqa: TRY004  pydantic catches ValueError
    seen: dict[str, str] = {}
    for name, content in value.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ValueError("a header's name has letters, digits and hyphens only")
        if _OWN_HEADERS.fullmatch(name):
            way_out = "; use `basic_auth` or `bearer_token_file`" if name.lower() == "authorization" else ""
            raise ValueError(f"{name} may not be set here{way_out}")
        first = seen.setdefault(name.lower(), name)
        if first != name:
            raise ValueError(f"{first} and {name} are the same header")
        if isinstance(content, dict | FileValue):
            continue
        # Never repeated here: it may be a secret.
        if not isinstance(content, str) or not _PLAIN_VALUE.fullmatch(content):
            raise ValueError(f"the value of {name} must be one line of printable ASCII, or {{file: PATH}}")
    return value


def _user_name(value: str) -> str:
    if not value or ":" in value or not value.isprintable():
        raise ValueError("a user's name is one line without a colon")
    return value


def _server_name(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("a server's name is a host name or an IP address, without a port")
    return value


def _socket(value: Path) -> Path:
    if not value.is_absolute() or len(os.fsencode(value)) > MAX_SOCKET_BYTES or "\0" in str(value):
        raise ValueError(f"the absolute path of a socket is needed, of at most {MAX_SOCKET_BYTES} bytes")
    return value


AccessFile = Annotated[Path, AfterValidator(Path.expanduser)]


class FileValue(Strict):
    """A value that stands in a file."""

    file: AccessFile


class BasicAuth(Strict):
    """User and password."""

    username: Annotated[str, AfterValidator(_user_name)]
    password_file: AccessFile


class TlsSettings(Strict):
    """Whom an https:// server is compared with, and the certificate that is shown to it."""

    ca_file: AccessFile | None = None
    cert_file: AccessFile | None = None
    key_file: AccessFile | None = None
    server_name: Annotated[str, AfterValidator(_server_name)] | None = None

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("`cert_file` and `key_file` go together; give both")
        return self


def _check_tls(tls: TlsSettings | None, url: str) -> None:
    if tls is not None and not url.startswith("https:"):
        raise ValueError("`tls` is for servers at https://; write `url: https://...`, or leave it out")


class CommonAccess(Strict):
    """What is needed to reach servers, whatever their addresses are."""

    basic_auth: BasicAuth | None = None
    bearer_token_file: AccessFile | None = None
    headers: Annotated[dict[str, str | FileValue], BeforeValidator(_headers), Field(repr=False)] = {}
    tls: TlsSettings | None = None
    proxy_url: Annotated[str, AfterValidator(_proxy_url)] | None = None
    proxy_basic_auth: BasicAuth | None = None

    @model_validator(mode="after")
    def _no_clash(self) -> Self:
        if self.basic_auth is not None and self.bearer_token_file is not None:
            raise ValueError(
                "`basic_auth` and `bearer_token_file` both fill the header Authorization; leave one out"
            )
        if self.proxy_basic_auth is not None and self.proxy_url is None:
            raise ValueError("`proxy_basic_auth` is for a proxy; give its address as `proxy_url`")
        return self


class AccessSettings(CommonAccess):
    """How one vLLM server is reached."""

    url: Annotated[str, AfterValidator(base_url)]
    api_key_file: AccessFile | None = None
    unix_socket: Annotated[AccessFile, AfterValidator(_socket)] | None = None

    @model_validator(mode="after")
    def _fits_the_address(self) -> Self:
        _check_tls(self.tls, self.url)
        if self.unix_socket is not None and (self.proxy_url is not None or self.url.startswith("https:")):
            raise ValueError(
                "a `unix_socket` is reached directly and without TLS; write `url: http://localhost`"
            )
        return self


class PageSettings(CommonAccess):
    """One page of another program than vLLM, and how it is reached."""

    url: Annotated[str, AfterValidator(_page_url), Field(repr=False)]

    @model_validator(mode="after")
    def _tls_with_https(self) -> Self:
        _check_tls(self.tls, self.url)
        return self

    @property
    def base_url(self) -> str:
        """Scheme, host and port."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def path(self) -> str:
        """What is asked for there, its query included."""
        parts = urlsplit(self.url)
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


MAY_HOLD_SECRETS = frozenset(AccessSettings.model_fields) - {"url"}
"""What is written under these is never repeated."""

PARTS: dict[str, type[BaseModel]] = {
    "basic_auth": BasicAuth,
    "proxy_basic_auth": BasicAuth,
    "tls": TlsSettings,
    "headers": FileValue,
}


def is_under(location: tuple[Any, ...], names: frozenset[str]) -> bool:
    """Whether a place of the config lies at or under one of these settings."""
    return any(step in names for step in location)
