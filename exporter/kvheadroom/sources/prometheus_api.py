"""Range queries of a Prometheus server over its HTTP API (`/api/v1/query_range`).

An answer has a size limit and a deadline, and is taken only where it is what was asked for. The token goes to the address alone:
redirects are not followed.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import requests

from kvheadroom import __version__
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources.blocking_requests import innermost, unchanged, within

SOURCE = "prometheus"
MAX_BODY_BYTES = 64 * 1024**2
SILENCE_SECONDS = 30.0
QUERY_SECONDS = 120.0
"""Prometheus's own limit for a query (`--query.timeout`)."""
_CHUNK_BYTES = 1 << 16
_NARROWER = "narrow it with --select, or take a longer --every"


@dataclass(frozen=True, slots=True)
class RangeSeries:
    """One series of an answer.

    Attributes:
        labels: with `__name__` where the query keeps it.
        values: step -> value as Prometheus wrote it; steps without a value are left out.
    """

    labels: dict[str, str]
    values: dict[int, str]


@dataclass(frozen=True, slots=True)
class AskedToWait(SourceFailure):
    """A server that says when it may be asked again (`Retry-After`).

    Attributes:
        seconds: to wait until then.
    """

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """What a range query answered.

    Attributes:
        warnings: Prometheus's own, each of which says that the answer may not be whole.
    """

    series: tuple[RangeSeries, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusApi:
    """One server.

    Attributes:
        url: without `/api`.
        token: for `Authorization: Bearer`.
        ca_file: whom an https:// server is compared with, None for the system's authorities.
        timeout_seconds: for one query, from the first byte out to the last byte in.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    timeout_seconds: float = QUERY_SECONDS

    def query_range(
        self, expression: str, *, start: float, steps: int, step_seconds: float
    ) -> RangeAnswer | SourceFailure:
        """The values of an expression at `start` and so many steps in all; blocking."""
        end = start + (steps - 1) * step_seconds
        parameters = {
            "query": expression,
            "start": f"{start:.3f}",
            "end": f"{end:.3f}",
            "step": f"{step_seconds:.3f}",
        }
        body = within(self.timeout_seconds, lambda: self._get(parameters))
        if body is None:
            return _failed(FailureReason.TIMEOUT, f"no full answer within {self.timeout_seconds:g} s")
        if isinstance(body, SourceFailure):
            return body
        return _read(body, start, steps, step_seconds)

    def _get(self, parameters: dict[str, str]) -> bytes | SourceFailure:
        headers = {"User-Agent": f"kvheadroom/{__version__}"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            with requests.get(
                f"{self.url}/api/v1/query_range",
                params=parameters,
                headers=headers,
                auth=unchanged,
                verify=True if self.ca_file is None else str(self.ca_file),
                stream=True,
                allow_redirects=False,
                timeout=min(SILENCE_SECONDS, self.timeout_seconds),
            ) as response:
                content = bytearray()
                for chunk in response.iter_content(_CHUNK_BYTES):
                    content += chunk
                    if len(content) > MAX_BODY_BYTES:
                        limit = f"the answer is larger than {MAX_BODY_BYTES // 1024**2} MiB; {_NARROWER}"
                        return _failed(FailureReason.TOO_LARGE, limit)
                if response.status_code != 200:
                    return _refused(response.status_code, response.headers, bytes(content))
                return bytes(content)
        except requests.exceptions.SSLError as error:
            detail = (
                f"its certificate is not trusted ({innermost(error)}); for a CA of your own give --ca-file"
            )
            return _failed(FailureReason.TLS, detail)
        except requests.exceptions.Timeout:
            return _failed(FailureReason.TIMEOUT, "it was silent for too long")
        except requests.exceptions.ConnectionError as error:
            return _failed(FailureReason.UNREACHABLE, f"it cannot be reached ({innermost(error)})")
        except (requests.exceptions.RequestException, ValueError, OSError) as error:
            return _failed(FailureReason.BAD_ANSWER, f"the answer cannot be read ({innermost(error)})")


def _failed(reason: FailureReason, detail: str) -> SourceFailure:
    return SourceFailure(SOURCE, reason, detail)


def _refused(status: int, headers: Mapping[str, str], body: bytes) -> SourceFailure:
    """A status other than 200: Prometheus says why in its body."""
    document = _document(body)
    said = document.get("error") if document is not None else None
    why = f": {said[:300]}" if isinstance(said, str) and said else ""
    if status in (401, 403):
        return _failed(FailureReason.UNAUTHORIZED, f"it refuses access ({status}); give --bearer-token-file")
    if 300 <= status < 400:
        return _failed(
            FailureReason.HTTP_STATUS, f"it answers with a redirect ({status}); give its real address"
        )
    if status == 404:
        return _failed(
            FailureReason.NOT_FOUND, "there is no /api/v1/query_range; is this Prometheus's address?"
        )
    if status == 429 or status >= 500:
        what = "it has had too many requests from here" if status == 429 else "it is not available"
        seconds = _seconds_to_wait(headers.get("Retry-After", ""))
        if seconds is None:
            return _failed(FailureReason.UNAVAILABLE, f"{what} ({status}){why}")
        told = f"{what} ({status}) and asks to wait {seconds:,.0f} s{why}"
        return AskedToWait(SOURCE, FailureReason.UNAVAILABLE, told, seconds=seconds)
    return _failed(FailureReason.HTTP_STATUS, f"it answered with status {status}{why}")


def _seconds_to_wait(text: str) -> float | None:
    """Of a `Retry-After`: seconds, or the date until when (RFC 9110, 10.2.3); None where it is neither."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _read(body: bytes, start: float, steps: int, step_seconds: float) -> RangeAnswer | SourceFailure:
    """An answer that is what was asked for: a matrix, with each value at one of the steps."""
    document = _document(body)
    if document is None:
        return _failed(
            FailureReason.BAD_ANSWER, "the answer is no JSON object; is this Prometheus's address?"
        )
    data = document.get("data")
    found = data.get("result") if isinstance(data, dict) and data.get("resultType") == "matrix" else None
    if document.get("status") != "success" or not isinstance(found, list):
        return _failed(FailureReason.BAD_ANSWER, "the answer is no result of a range query")
    warnings = document.get("warnings") or []
    try:
        series = tuple(_series(one, start, steps, step_seconds) for one in found)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return _failed(FailureReason.BAD_ANSWER, "the answer holds what was not asked for")
    told = warnings if isinstance(warnings, list) else [warnings]
    return RangeAnswer(series, tuple(str(warning)[:300] for warning in told))


def _series(one: dict[str, Any], start: float, steps: int, step_seconds: float) -> RangeSeries:
    labels = {str(name): str(value) for name, value in one["metric"].items()}
    values: dict[int, str] = {}
    for at, value in one.get("values", ()):
        step = round((float(at) - start) / step_seconds)
        # Prometheus rounds instants to milliseconds.
        if (
            not 0 <= step < steps
            or abs(start + step * step_seconds - at) > 0.002
            or not isinstance(value, str)
        ):
            raise ValueError(at)
        # NaN and infinities are values, words are none.
        math.isnan(float(value))
        values[step] = value
    return RangeSeries(labels, values)
