"""`/api/v1/status` of a kvheadroom daemon -> what a board shows.

The document may come from another release or from something that is no kvheadroom, so nothing in it is taken for granted.
"""

import json
import math
from enum import StrEnum
from typing import Any, TypeVar

from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.board_view import BoardRow, BoardView, StaysWarm
from kvheadroom.capacity.fleet_verdict import Urgency, Verdict
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch

PATH = "/api/v1/status"
MAX_BODY_BYTES = 256 * 1024**2
"""500 engines take 3 MB."""
TIMEOUT_SECONDS = 10.0
_SOURCE = "daemon"
_LARGEST = 2**63
_OTHER = "is it a kvheadroom of this release?"
_T = TypeVar("_T")
_E = TypeVar("_E", bound=StrEnum)


class StatusUnreadableError(ValueError):
    """It is no status of a kvheadroom that can be shown; the text says what is wrong."""


async def fetch_status(session: Session, url: str) -> dict[str, Any] | SourceFailure:
    """The document of the daemon at `url`."""
    answer = await fetch(
        session,
        Endpoint(url),
        PATH,
        source=_SOURCE,
        timeout_seconds=TIMEOUT_SECONDS,
        max_bytes=MAX_BODY_BYTES,
        program="kvheadroom",
    )
    if isinstance(answer, SourceFailure):
        return answer
    try:
        document = read_status(answer.body)
        parse_status(document)
    except StatusUnreadableError as error:
        return SourceFailure(_SOURCE, FailureReason.BAD_ANSWER, f"GET {url}{PATH}: {error}")
    return document


def read_status(body: bytes) -> dict[str, Any]:
    """The document of such bytes.

    Raises:
        StatusUnreadableError: they are no JSON object.
    """
    try:
        document = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise StatusUnreadableError("no JSON; is it kvheadroom that answers there?") from error
    if not isinstance(document, dict):
        raise StatusUnreadableError("no status; is it kvheadroom that answers there?")
    return document


def parse_status(document: dict[str, Any]) -> BoardView:
    """What a board shows of it.

    Raises:
        StatusUnreadableError: naming what is missing or of another kind.
    """
    verdict = _item(document, "verdict", dict)
    ranked = _item(document, "worst_first", list)
    room = _optional(verdict, "room", dict)
    length = None if room is None else _optional(room, "session_tokens", int)
    servers = {_text(replica, "replica"): replica for replica in _dicts(document, "replicas")}
    faults = tuple(_faults(document))
    return BoardView(
        at=_number(document, "now"),
        sentence=_text(verdict, "sentence"),
        urgency=_member(Urgency, _text(verdict, "urgency"), Urgency.UNKNOWN),
        rows=tuple(_row(_dict(one), servers, length) for one in ranked),
        notice=_optional(document, "notice", str),
        faults=faults,
        hints=tuple(_hints(document)),
        is_complete=bool(servers) and not _item(verdict, "server_verdicts", dict) and not faults,
    )


def _faults(document: dict[str, Any]) -> list[str]:
    fault = _optional(document, "config_fault", str)
    found = (
        [] if fault is None else [f"the config file has a fault, and the config before it is in use: {fault}"]
    )
    for source in _dicts(document, "discoveries"):
        detail = _optional(source, "detail", str)
        if detail is not None:
            found.append(f"{_text(source, 'source')}: {detail}")
    return found


def _hints(document: dict[str, Any]) -> list[str]:
    found = []
    for source in _dicts(document, "discoveries"):
        name, note, left_out = (
            _text(source, "source"),
            _optional(source, "note", str),
            _item(source, "left_out", list),
        )
        if note is not None:
            found.append(f"{name}: {note}")
        if left_out:
            found.append(f"{name}: {len(left_out)} left out, the first: {left_out[0]}")
    return found


def _row(ranked: dict[str, Any], servers: dict[str, dict[str, Any]], length: int | None) -> BoardRow:
    name, number = _text(ranked, "replica"), _optional(ranked, "engine", str)
    server = servers.get(name)
    if server is None:
        raise StatusUnreadableError("worst_first names a replica that is not there")
    verdict = _member(Verdict, _text(ranked, "verdict"), Verdict.UNKNOWN)
    why, state = _text(ranked, "why"), _optional(server, "state", str)
    if number is None:
        last = _optional_number(server, "last_success_at")
        return BoardRow(replica=name, engine=None, verdict=verdict, why=why, state=state, taken_at=last)
    engine = next((one for one in _dicts(server, "engines") if one.get("engine") == number), None)
    if engine is None:
        raise StatusUnreadableError("worst_first names an engine that is not there")
    snapshot, forecast = _item(engine, "snapshot", dict), _item(engine, "forecast", dict)
    sessions = {_item(row, "session_tokens", int): row for row in _dicts(engine, "sessions")}
    shown = length if length in sessions else max(sessions, default=None)
    counted: dict[str, Any] = sessions[shown] if shown is not None else {}
    probabilities = _item(forecast, "preemption_probability", dict)
    limit = _optional(_item(engine, "binding_limit", dict), "limit", str)
    return BoardRow(
        replica=name,
        engine=number,
        verdict=verdict,
        why=why,
        state=state,
        taken_at=_number(engine, "taken_at"),
        model_name=_optional(engine, "model_name", str),
        usage_ratio=_optional_number(snapshot, "kv_usage_ratio"),
        session_tokens=shown,
        sessions_in_use=_optional_number(counted, "in_use"),
        sessions_observed=_optional_number(counted, "observed"),
        sessions_predicted=_optional_number(counted, "predicted"),
        sessions_headroom=_optional(counted, "headroom", int),
        probabilities={horizon: _number(probabilities, horizon) for horizon in probabilities},
        exhaustion_seconds=_optional_number(forecast, "exhaustion_seconds"),
        no_forecast=None if forecast.get("unavailable") is None else _text(forecast, "why"),
        running=_optional_number(snapshot, "requests_running"),
        waiting=_optional_number(snapshot, "requests_waiting"),
        limit=None if limit is None else next((one for one in Limit if one == limit), None),
        preemptions_total=_optional_number(snapshot, "preemptions_total"),
        stays_warm=_stays_warm(_item(engine, "warmth", dict)),
        assumed=tuple(_text(fact, "fact") for fact in _dicts(engine, "assumed_facts")),
        unpredicted=tuple(_unpredicted(engine)),
    )


def _stays_warm(warmth: dict[str, Any]) -> tuple[StaysWarm, ...]:
    """Of each tier by the longest window, which comes last."""
    by_tier = {
        tier: StaysWarm(tier, _optional_number(one, "low_seconds"), _optional_number(one, "high_seconds"))
        for one in _dicts(warmth, "retentions")
        if (tier := _text(one, "tier"))
    }
    return tuple(by_tier.values())


def _unpredicted(engine: dict[str, Any]) -> list[str]:
    reasons = _item(_item(engine, "predicted", dict), "cannot_predict", list)
    if not all(isinstance(reason, str) for reason in reasons):
        raise StatusUnreadableError("cannot_predict is of another kind")
    return [
        *reasons,
        *(
            f"{_text(fact, 'fact')} is missing: {_text(fact, 'why')}; way out: {_text(fact, 'way_out')}"
            for fact in _dicts(engine, "missing_facts")
        ),
    ]


def _no_number(constant: str) -> None:
    raise ValueError(constant)


def _member(kind: type[_E], text: str, otherwise: _E) -> _E:
    """A later release may have more of them."""
    return next((one for one in kind if one == text), otherwise)


def _item(of: dict[str, Any], key: str, kind: type[_T]) -> _T:
    found = _optional(of, key, kind)
    if found is None:
        raise StatusUnreadableError(f"it has no {key}; {_OTHER}")
    return found


def _optional(of: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
    found = of.get(key)
    if found is not None and (
        not isinstance(found, kind)
        or isinstance(found, bool)
        or (isinstance(found, int) and abs(found) > _LARGEST)
    ):
        raise StatusUnreadableError(f"{key} is of another kind; {_OTHER}")
    return found


def _text(of: dict[str, Any], key: str) -> str:
    return _item(of, key, str)


def _number(of: dict[str, Any], key: str) -> float:
    found = _optional_number(of, key)
    if found is None:
        raise StatusUnreadableError(f"it has no {key}; {_OTHER}")
    return found


def _optional_number(of: dict[str, Any], key: str) -> float | None:
    found = of.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise StatusUnreadableError(f"{key} is no number; {_OTHER}")
    try:
        number = float(found)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise StatusUnreadableError(f"{key} is no number; {_OTHER}")
    return number


def _dict(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise StatusUnreadableError(f"an entry is of another kind; {_OTHER}")
    return found


def _dicts(of: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [_dict(one) for one in _item(of, key, list)]
