"""A model's files from a hub over HTTP: config.json and the weights' index.

The token goes to the endpoint alone: a redirect to another origin is followed without it. Every file has a size
limit and a deadline, and nothing is written to disk.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import requests

from kvheadroom import __version__
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.stored_model import ModelFiles, StoredTensor, TensorInventory
from kvheadroom.sources.blocking_requests import innermost, unchanged, within
from kvheadroom.sources.hub_environment import DEFAULT_ENDPOINT, SOURCE, HubEnvironment, HubName
from kvheadroom.sources.model_files import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    QUANTIZATION_NAME,
    asks_quantization,
    with_quantization,
)
from kvheadroom.sources.safetensors import inventory, named_tensors, shards_of
from kvheadroom.sources.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    BadHeaderError,
    header_length,
    parse_header,
)
from kvheadroom.sources.weight_files import INDEX_NAME, total_size, without_total

FILE_SECONDS = 60.0
SILENCE_SECONDS = 10.0
MAX_REDIRECTS = 5
CHUNK_BYTES = 1 << 16
SINGLE_NAME = "model.safetensors"
HEADER_GUESS_BYTES = 1 << 20
"""Enough for the header of most single files."""

_PARTIAL = 206
_BEGINNING = re.compile(r"bytes 0-\d{1,15}/(\d{1,18}|\*)", re.ASCII)
_ANOTHER_PART = -1


def fetch_model_files(
    environment: HubEnvironment, model: HubName, *, timeout_seconds: float = FILE_SECONDS
) -> ModelFiles | SourceFailure:
    """config.json, and the size of the weights by the safetensors index or the header of a single file; blocking.

    Args:
        timeout_seconds: for each file, from the first byte out to the last byte in.
    """
    hub = Hub(environment, model, timeout_seconds)
    config = hub.fetch_json(CONFIG_NAME, MAX_CONFIG_BYTES)
    if isinstance(config, SourceFailure):
        return config
    if asks_quantization(config):
        quantization = hub.fetch_json(QUANTIZATION_NAME, MAX_CONFIG_BYTES)
        if not isinstance(quantization, SourceFailure):
            config = with_quantization(config, quantization)
        elif quantization.reason is not FailureReason.NOT_FOUND:
            return quantization
    index = hub.fetch_json(INDEX_NAME, MAX_INDEX_BYTES)
    where: Mapping[str, str] = {}
    if not isinstance(index, SourceFailure):
        weights, tensors, where = total_size(index), named_tensors(index), shards_of(index)
        unknown, faulty = without_total(index), weights is None
    elif index.reason is FailureReason.NOT_FOUND:
        single = hub.fetch_tensors(SINGLE_NAME)
        if isinstance(single, SourceFailure) and single.reason is not FailureReason.NOT_FOUND:
            return single
        tensors = None if isinstance(single, SourceFailure) else single
        weights = None if tensors is None else tensors.total_bytes
        faulty = tensors is not None and bool(tensors.problem)
        unknown = (
            tensors.problem
            if tensors is not None and faulty
            else f"it has neither {INDEX_NAME} nor {SINGLE_NAME}"
        )
    else:
        return index
    return ModelFiles(
        folder=f"{model.name}@{model.revision}",
        config=config,
        weights_bytes=weights,
        weights_unknown="" if weights is not None else unknown,
        weights_faulty=faulty,
        tensors=tensors,
        shards=where,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of a file, and how large it is as a whole; None where the hub did not say."""

    content: bytes
    file_bytes: int | None


class Hub:
    """One model on one endpoint.

    Args:
        timeout_seconds: for each file, from the first byte out to the last byte in.
    """

    def __init__(self, environment: HubEnvironment, model: HubName, timeout_seconds: float) -> None:
        self._environment = environment
        self._model = model
        self._timeout_seconds = timeout_seconds

    def fetch_json(self, file: str, max_bytes: int) -> dict[str, Any] | SourceFailure:
        """One file of the model that holds a JSON object."""
        answer = self._fetch(file, max_bytes)
        if isinstance(answer, SourceFailure):
            return answer
        try:
            parsed = json.loads(answer.content)
        except (ValueError, RecursionError):
            return self._failed(file, FailureReason.BAD_ANSWER, "it is no JSON")
        if not isinstance(parsed, dict):
            return self._failed(file, FailureReason.BAD_ANSWER, "it holds no JSON object")
        return parsed

    def fetch_tensors(self, file: str) -> TensorInventory | SourceFailure:
        """The tensors of one safetensors file, of which only the header is asked for; or what is wrong with it."""
        try:
            tensors = self.fetch_header(file, HEADER_GUESS_BYTES)
        except BadHeaderError as reason:
            return TensorInventory(problem=f"{self._model.name} ({file}): {reason}")
        return tensors if isinstance(tensors, SourceFailure) else inventory(tensors)

    def fetch_header(
        self, file: str, guess_bytes: int, *, most_bytes: int = MAX_HEADER_BYTES
    ) -> tuple[StoredTensor, ...] | SourceFailure:
        """The tensors of one safetensors file, of which nothing behind the header is read.

        Args:
            guess_bytes: what is asked for first; a longer header is asked for once more.
            most_bytes: a longer one is not asked for.

        Raises:
            BadHeaderError: it is no safetensors file, or contradicts itself or its size.
        """
        start = self._fetch(file, max(guess_bytes, LENGTH_BYTES), beginning=True)
        if isinstance(start, SourceFailure):
            return start
        length = header_length(start.content)
        if length > most_bytes:
            return self._failed(
                file, FailureReason.TOO_LARGE, f"its header is larger than {most_bytes // 1024**2} MiB"
            )
        end = LENGTH_BYTES + length
        if end > len(start.content):
            longer = self._fetch(file, end, beginning=True)
            if isinstance(longer, SourceFailure):
                return longer
            start = longer
        if end > len(start.content):
            raise BadHeaderError("it ends within its header")
        return parse_header(start.content[LENGTH_BYTES:end], start.file_bytes)

    def _fetch(self, file: str, max_bytes: int, *, beginning: bool = False) -> _Answer | SourceFailure:
        """One file.

        Args:
            beginning: no more than its first max_bytes; else a longer file is a failure.
        """
        answer = within(self._timeout_seconds, lambda: self._get(file, max_bytes, beginning=beginning))
        if answer is None:
            seconds = f"no full answer within {self._timeout_seconds:g} s"
            return self._failed(file, FailureReason.TIMEOUT, f"{seconds}; {_OFFLINE_WAY}")
        return answer

    def _get(self, file: str, max_bytes: int, *, beginning: bool) -> _Answer | SourceFailure:
        name, revision = self._model.name, self._model.revision
        url = f"{self._environment.endpoint}/{name}/resolve/{revision}/{quote(file)}"
        try:
            with requests.Session() as session:
                return self._follow(session, url, file, max_bytes, beginning=beginning)
        except requests.exceptions.SSLError as error:
            detail = f"the certificate of {urlsplit(url).hostname} is not trusted ({innermost(error)}); if it is of a CA "
            return self._failed(
                file, FailureReason.TLS, detail + "of your own, set REQUESTS_CA_BUNDLE=/path/ca.pem"
            )
        except requests.exceptions.ProxyError as error:
            detail = (
                f"the proxy of HTTPS_PROXY or HTTP_PROXY cannot be used ({innermost(error)}); {_OFFLINE_WAY}"
            )
            return self._failed(file, FailureReason.UNREACHABLE, detail)
        except (
            requests.exceptions.InvalidSchema,
            requests.exceptions.InvalidURL,
            requests.exceptions.MissingSchema,
        ):
            shown = self._environment.shown_endpoint[:200]
            detail = f"{shown!r} is no address; HF_ENDPOINT must be one such as {DEFAULT_ENDPOINT}"
            return self._failed(file, FailureReason.BAD_ANSWER, detail)
        except requests.exceptions.Timeout:
            detail = f"{urlsplit(url).hostname} was silent for {SILENCE_SECONDS:g} s; {_OFFLINE_WAY}"
            return self._failed(file, FailureReason.TIMEOUT, detail)
        except requests.exceptions.ConnectionError as error:
            detail = f"{urlsplit(url).hostname} cannot be reached ({innermost(error)}); {_OFFLINE_WAY}"
            return self._failed(file, FailureReason.UNREACHABLE, detail)
        except (requests.exceptions.RequestException, ValueError, OSError) as error:
            return self._failed(file, FailureReason.BAD_ANSWER, f"{innermost(error)}; {_OFFLINE_WAY}")

    def _follow(
        self, session: requests.Session, url: str, file: str, max_bytes: int, *, beginning: bool
    ) -> _Answer | SourceFailure:
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"User-Agent": f"kvheadroom/{__version__}", "Accept-Encoding": "identity"}
            if self._environment.token and _origin(url) == _origin(self._environment.endpoint):
                headers["Authorization"] = f"Bearer {self._environment.token}"
            if beginning:
                headers["Range"] = f"bytes=0-{max_bytes - 1}"
            with session.get(
                url,
                headers=headers,
                auth=unchanged,
                stream=True,
                allow_redirects=False,
                timeout=SILENCE_SECONDS,
            ) as response:
                if response.is_redirect:
                    url = urljoin(url, response.headers["Location"])
                    continue
                if response.status_code not in (200, _PARTIAL if beginning else 200):
                    return self._refused(file, response)
                file_bytes = _file_bytes(response)
                if file_bytes is _ANOTHER_PART:
                    return self._failed(
                        file, FailureReason.BAD_ANSWER, "another part of it came than was asked for"
                    )
                content = bytearray()
                for chunk in response.iter_content(CHUNK_BYTES):
                    content += chunk
                    if len(content) >= max_bytes and beginning:
                        return _Answer(bytes(content[:max_bytes]), file_bytes)
                    if len(content) > max_bytes:
                        limit = f"it is larger than {max_bytes // 1024**2} MiB"
                        return self._failed(file, FailureReason.TOO_LARGE, limit)
                return _Answer(bytes(content), file_bytes)
        return self._failed(file, FailureReason.BAD_ANSWER, f"more than {MAX_REDIRECTS} redirects")

    def _refused(self, file: str, response: requests.Response) -> SourceFailure:
        """A status other than 200, told apart by the code that the hub sends with it."""
        code, status = response.headers.get("X-Error-Code", ""), response.status_code
        page = f"{self._environment.shown_endpoint}/{self._model.name}"
        has_token = self._environment.token is not None
        if code == "GatedRepo" or status == 403:
            way = (
                "the account of your token has no access to it"
                if has_token
                else "then give a token (HF_TOKEN, or `hf auth login`)"
            )
            return self._failed(
                file, FailureReason.HTTP_STATUS, f"it is gated; accept its terms at {page}; {way}"
            )
        if code == "EntryNotFound":
            return self._failed(
                file, FailureReason.NOT_FOUND, "the model is there, but has no such file; is it GGUF only?"
            )
        if code == "RevisionNotFound":
            return self._failed(
                file, FailureReason.HTTP_STATUS, f"it has no revision {self._model.revision!r}"
            )
        if status in (401, 404):
            # The hub does not tell a model that is not there from one that the asker may not see.
            way = (
                "your token may not see it"
                if has_token
                else "if it is private, give a token (HF_TOKEN, or `hf auth login`)"
            )
            reason = FailureReason.NOT_FOUND if status == 404 else FailureReason.HTTP_STATUS
            return self._failed(file, reason, f"there is no such model or file; check the name; or {way}")
        if status == 429:
            way = "wait" if has_token else "wait, or give a token (HF_TOKEN)"
            return self._failed(
                file, FailureReason.UNAVAILABLE, f"the hub has had too many requests from here; {way}"
            )
        return self._failed(
            file, FailureReason.HTTP_STATUS, f"the hub answered with status {status}; {_OFFLINE_WAY}"
        )

    def _failed(self, file: str, reason: FailureReason, detail: str) -> SourceFailure:
        return SourceFailure(SOURCE, reason, f"{self._model.name} ({file}): {detail}")


_OFFLINE_WAY = "without it, give a folder that holds config.json and model.safetensors.index.json"


def _file_bytes(response: requests.Response) -> int | None:
    """Bytes of the whole file; None where they are not told, `_ANOTHER_PART` where it is not its beginning that came."""
    if response.status_code == _PARTIAL:
        told = response.headers.get("Content-Range")
        if told is None:
            return None
        found = _BEGINNING.fullmatch(told.strip())
        if found is None:
            return _ANOTHER_PART
        return None if found[1] == "*" else int(found[1])
    told = response.headers.get("Content-Length", "")
    return int(told) if told.isascii() and told.isdigit() else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
