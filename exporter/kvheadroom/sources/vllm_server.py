"""What a vLLM server says of itself beside its metrics: `/version` and `/v1/models`."""

import asyncio
import json
from typing import Any

from kvheadroom.capacity.facts import ServerAnswers
from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch

MAX_JSON_BYTES = 4 * 1024**2
MAX_TEXT_CHARACTERS = 4096
LONGEST_MODEL_LEN = 2**40


async def fetch_server_answers(
    session: Session, endpoint: Endpoint, *, timeout_seconds: float
) -> tuple[ServerAnswers, dict[str, SourceFailure | None]]:
    """Release, model and max_model_len as the server tells them, and per source whether it answered."""
    version, models = await asyncio.gather(
        _get_json(session, endpoint, "/version", "version", timeout_seconds),
        _get_json(session, endpoint, "/v1/models", "models", timeout_seconds),
    )
    release = root = length = None
    if isinstance(version, dict):
        release = version.get("version")
        if not _is_plain(release):
            version = _bad(endpoint, "/version", "version", "the answer has no `version`")
            release = None
    elif not isinstance(version, SourceFailure):
        version = _bad(endpoint, "/version", "version", "the answer is no object")
    if not isinstance(models, SourceFailure):
        base = _base_model(models)
        if base is None:
            models = _bad(endpoint, "/v1/models", "models", "the answer lists no model")
        else:
            root, length = base
    answers = ServerAnswers(version=release, model_root=root, max_model_len=length)
    return answers, {
        "version": version if isinstance(version, SourceFailure) else None,
        "models": models if isinstance(models, SourceFailure) else None,
    }


def _is_plain(text: Any) -> bool:
    """Whether this is one line of text that can be shown anywhere: a server may answer anything."""
    return isinstance(text, str) and 0 < len(text) <= MAX_TEXT_CHARACTERS and text.isprintable()


async def is_healthy(session: Session, endpoint: Endpoint, *, timeout_seconds: float) -> bool | None:
    """Whether `/health` answers 200; vLLM answers 503 there once its engine is dead.

    None where nobody asked vLLM: a proxy or an agent that has `/metrics` only turns the question away (3xx, 4xx).
    """
    answer = await fetch(session, endpoint, "/health", source="health", timeout_seconds=timeout_seconds)
    if isinstance(answer, Scrape):
        return True
    return None if answer.status is not None and 300 <= answer.status < 500 else False


def _base_model(models: Any) -> tuple[str | None, int | None] | None:
    """(root, max_model_len) of the base model; LoRA adapters name it as their parent."""
    data = models.get("data") if isinstance(models, dict) else None
    for entry in data if isinstance(data, list) else ():
        if isinstance(entry, dict) and entry.get("parent") is None:
            root, length = entry.get("root"), entry.get("max_model_len")
            if not isinstance(length, int) or isinstance(length, bool) or not 0 < length <= LONGEST_MODEL_LEN:
                length = None
            return root if _is_plain(root) else None, length
    return None


async def _get_json(
    session: Session, endpoint: Endpoint, path: str, source: str, timeout_seconds: float
) -> Any:
    answer = await fetch(
        session,
        endpoint,
        path,
        source=source,
        timeout_seconds=timeout_seconds,
        max_bytes=MAX_JSON_BYTES,
        with_key=path.startswith("/v1"),
    )
    if not isinstance(answer, Scrape):
        return answer
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        return _bad(endpoint, path, source, "the answer is no JSON")


def _bad(endpoint: Endpoint, path: str, source: str, what: str) -> SourceFailure:
    return SourceFailure(source, FailureReason.BAD_ANSWER, f"GET {endpoint.base_url}{path}: {what}")
