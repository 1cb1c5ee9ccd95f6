"""Servers listed by another program, in the form of Prometheus's `http_sd_configs`."""

import hashlib
from functools import partial

from kvheadroom.access import open_access
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.config import ConfigError, HttpSdConfig, ReplicaConfig
from kvheadroom.discovery.source import Found
from kvheadroom.discovery.targets import make_replicas
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.target_groups import BadTargetsError, parse_target_groups

ACCESS_SECONDS = 5.0
FETCH_SECONDS = 10.0
PARSE_SECONDS = 10.0
MAX_LIST_BYTES = 4 * 1024**2
PROGRAM = "the HTTP SD endpoint"

_Read = tuple[tuple[ReplicaConfig, ...], tuple[str, ...]]


class HttpDiscovery:
    """Asks for the list at every question; while none comes, the last good one stays in use."""

    def __init__(self, name: str, settings: HttpSdConfig, session: Session, files: SlowFiles) -> None:
        self.name = name
        self.settings = settings
        self.interval_seconds = settings.refresh_interval
        self._session = session
        self._files = files
        self._endpoint: Endpoint | None = None
        self._last: tuple[bytes, _Read] | None = None

    async def find(self, *, anew: bool) -> Found:  # noqa: ARG002  nothing here is only remembered
        """What the page lists now."""
        try:
            # At every question: tokens and certificates are renewed on disk.
            self._endpoint = await open_access(
                self.settings,
                self.name,
                self.settings.base_url,
                self._files,
                timeout_seconds=ACCESS_SECONDS,
                known=self._endpoint,
            )
        except ConfigError as error:
            return self._failed(FailureReason.UNAUTHORIZED, str(error))
        answer = await fetch(
            self._session,
            self._endpoint,
            self.settings.path,
            source=self.name,
            timeout_seconds=FETCH_SECONDS,
            max_bytes=MAX_LIST_BYTES,
            program=PROGRAM,
        )
        if isinstance(answer, SourceFailure):
            return self._failed(answer.reason, answer.detail)
        digest = hashlib.sha256(answer.body).digest()
        if self._last is None or self._last[0] != digest:
            try:
                # Thousands of targets take a second, for which nobody else is to wait.
                read = await self._files.read(
                    f"{self.name} {id(self)} {digest.hex()}",
                    partial(self._read, answer.body),
                    timeout_seconds=PARSE_SECONDS,
                )
            except TimeoutError:
                return self._failed(FailureReason.TIMEOUT, f"not read within {PARSE_SECONDS:g} s")
            except UnicodeDecodeError:
                return self._failed(FailureReason.BAD_ANSWER, "the answer is not UTF-8 text")
            except BadTargetsError as error:
                return self._failed(FailureReason.BAD_ANSWER, f"the answer {error}")
            self._last = digest, read
        replicas, left_out = self._last[1]
        return Found(replicas=replicas, left_out=left_out)

    def _read(self, body: bytes) -> _Read:
        groups = parse_target_groups(body.decode("utf-8"), as_json=True)
        return make_replicas(groups, self.settings.replica)

    def _failed(self, reason: FailureReason, detail: str) -> Found:
        if not detail.startswith(("GET ", f"{self.name}:")):
            detail = f"GET {self.settings.base_url}{self.settings.path.partition('?')[0]}: {detail}"
        return Found(replicas=None, failure=SourceFailure(self.name, reason, detail))
