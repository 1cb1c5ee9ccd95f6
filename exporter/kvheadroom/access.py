"""The files that a config names for reaching a server -> its Endpoint; each fault is one sentence."""

import asyncio
import base64
import hashlib
import re
import ssl
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvheadroom.access_settings import BasicAuth, CommonAccess, TlsSettings
from kvheadroom.config import Config, ConfigError, ReplicaConfig
from kvheadroom.sources.endpoint import ClientTls, Endpoint, Proxy
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.strict_yaml import read_small_file

_CERTIFICATES = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
T = TypeVar("T")


async def open_endpoints(config: Config, files: SlowFiles, *, timeout_seconds: float) -> dict[str, Endpoint]:
    """The endpoint of every replica; all files are read at once, and one that hangs ends at the deadline.

    Raises:
        ConfigError: naming the file, never its content.
    """
    endpoints = await asyncio.gather(
        *(open_endpoint(replica, files, timeout_seconds=timeout_seconds) for replica in config.replicas)
    )
    return {replica.replica: endpoint for replica, endpoint in zip(config.replicas, endpoints, strict=True)}


def names_files(replica: ReplicaConfig) -> bool:
    """Whether reading again can give another endpoint."""
    return any(
        (
            replica.api_key_file,
            replica.basic_auth,
            replica.bearer_token_file,
            replica.proxy_basic_auth,
            replica.tls,
            any(not isinstance(value, str) for value in replica.headers.values()),
        )
    )


async def open_endpoint(
    replica: ReplicaConfig, files: SlowFiles, *, timeout_seconds: float, known: Endpoint | None = None
) -> Endpoint:
    """The endpoint of one replica.

    Args:
        known: what was opened before; its TLS context is kept while the files stay as they were.

    Raises:
        ConfigError: naming the file, never its content.
    """
    name, key = replica.replica, replica.api_key_file
    endpoint = await open_access(
        replica, name, replica.url, files, timeout_seconds=timeout_seconds, known=known
    )
    reader = _AccessFiles(name, files, timeout_seconds)
    return replace(
        endpoint,
        api_key=None if key is None else await reader.secret("api_key_file", key),
        unix_socket=None if replica.unix_socket is None else str(replica.unix_socket),
    )


async def open_access(
    access: CommonAccess,
    name: str,
    base_url: str,
    files: SlowFiles,
    *,
    timeout_seconds: float,
    known: Endpoint | None = None,
) -> Endpoint:
    """The endpoint of any server.

    Args:
        name: of who is reached, for people.
        known: as of `open_endpoint`.

    Raises:
        ConfigError: naming the file, never its content.
    """
    reader = _AccessFiles(name, files, timeout_seconds)
    authorization = setting = None
    if access.basic_auth is not None:
        authorization, setting = await reader.basic("basic_auth", access.basic_auth), "basic_auth"
    elif access.bearer_token_file is not None:
        setting = "bearer_token_file"
        authorization = f"Bearer {await reader.secret(setting, access.bearer_token_file)}"
    headers = [
        (name, value if isinstance(value, str) else await reader.secret(f"headers.{name}.file", value.file))
        for name, value in access.headers.items()
    ]
    proxy = None
    if access.proxy_url is not None:
        passing = access.proxy_basic_auth
        proxy = Proxy(
            url=access.proxy_url,
            authorization=None if passing is None else await reader.basic("proxy_basic_auth", passing),
        )
    tls = None
    if access.tls is not None:
        tls = await reader.tls(access.tls, None if known is None else known.tls)
    return Endpoint(
        base_url,
        authorization=authorization,
        authorization_setting=setting,
        headers=tuple(headers),
        tls=tls,
        proxy=proxy,
    )


class _AccessFiles:
    """Reads the files of one replica, each with a deadline."""

    def __init__(self, replica: str, files: SlowFiles, timeout_seconds: float) -> None:
        self._replica = replica
        self._files = files
        self._timeout_seconds = timeout_seconds

    async def secret(self, setting: str, path: Path, *, ascii_only: bool = True) -> str:
        """The one line in a file."""
        text = (await self._text(setting, path)).strip()
        if not text:
            raise self._fault(setting, path, "is empty")
        if "\n" in text or "\r" in text:
            raise self._fault(setting, path, "holds more than one line")
        if not text.isprintable() or (ascii_only and not text.isascii()):
            raise self._fault(setting, path, "holds other characters than printable ASCII")
        return text

    async def basic(self, setting: str, auth: BasicAuth) -> str:
        """The value of a header for user and password (RFC 7617)."""
        password = await self.secret(f"{setting}.password_file", auth.password_file, ascii_only=False)
        return "Basic " + base64.b64encode(f"{auth.username}:{password}".encode()).decode()

    async def tls(self, settings: TlsSettings, known: ClientTls | None) -> ClientTls:
        """The context that the files give."""
        named = {"ca_file": settings.ca_file, "cert_file": settings.cert_file, "key_file": settings.key_file}
        texts = {
            setting: await self._text(f"tls.{setting}", path)
            for setting, path in named.items()
            if path is not None
        }
        digest = hashlib.sha256(repr(texts).encode()).hexdigest()
        if known is not None and known.digest == digest:
            return known
        for setting, word, what in (
            ("ca_file", "-----BEGIN CERTIFICATE-----", "certificate"),
            ("cert_file", "-----BEGIN CERTIFICATE-----", "certificate"),
            ("key_file", "PRIVATE KEY-----", "private key"),
        ):
            path = named[setting]
            if path is not None and word not in texts[setting]:
                raise self._fault(f"tls.{setting}", path, f"holds no {what} (PEM)")
        if settings.key_file is not None and "ENCRYPTED" in texts["key_file"]:
            raise self._fault(
                "tls.key_file", settings.key_file, "is encrypted; give the key without a passphrase"
            )
        # A name of its own: readings under one name share their answer.
        context = await self._slow(
            f"tls of {self._replica}",
            "tls.cert_file",
            settings.cert_file or Path("/"),
            partial(self._context, settings, texts.get("ca_file")),
        )
        return ClientTls(
            context=context,
            digest=digest,
            server_name=settings.server_name,
            has_certificate=settings.cert_file is not None,
        )

    def _context(self, settings: TlsSettings, ca_text: str | None) -> ssl.SSLContext:
        """Blocking: with no authorities of the operator's, the system's are read."""
        certificates = None if ca_text is None else "\n".join(_CERTIFICATES.findall(ca_text))
        try:
            context = ssl.create_default_context(cadata=certificates)
        except (ssl.SSLError, ValueError) as error:
            assert settings.ca_file is not None  # noqa: S101  the system's authorities raise nothing
            raise self._fault(
                "tls.ca_file", settings.ca_file, "holds a certificate that cannot be read"
            ) from error
        context.set_alpn_protocols(["http/1.1"])
        if settings.cert_file is not None and settings.key_file is not None:
            try:
                # An empty passphrase, or OpenSSL would ask the terminal for one.
                context.load_cert_chain(settings.cert_file, settings.key_file, password="")
            except ssl.SSLError as error:
                together = f"and key_file {_shown(settings.key_file)}"
                what = "do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "cannot be used"
                raise self._fault("tls.cert_file", settings.cert_file, f"{together} {what}") from error
        return context

    async def _text(self, setting: str, path: Path) -> str:
        try:
            return await self._slow(str(path), setting, path, partial(read_small_file, path))
        except UnicodeDecodeError as error:
            raise self._fault(setting, path, "is no text") from error
        except OSError as error:
            raise self._fault(setting, path, f"cannot be read ({error.strerror})") from error

    async def _slow(self, name: str, setting: str, path: Path, work: Callable[[], T]) -> T:
        try:
            return await self._files.read(name, work, timeout_seconds=self._timeout_seconds)
        except TimeoutError as error:
            raise ConfigError(
                f"{self._replica}: {setting} {_shown(path)}: {error} Give it in a file on a disk that answers"
            ) from error

    def _fault(self, setting: str, path: Path, what: str) -> ConfigError:
        return ConfigError(f"{self._replica}: {setting} {_shown(path)} {what}")


def _shown(path: Path) -> str:
    # A word without a slash may be the secret itself, written in the wrong place.
    return str(path) if len(path.parts) > 1 else "(not shown)"
