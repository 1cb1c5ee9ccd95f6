"""The status of a daemon, read by another program: it may be of another release, or no kvheadroom at all."""

import copy
import json
import random
from typing import Any

import pytest

from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.board_view import StaysWarm
from kvheadroom.capacity.fleet import withhold_stale
from kvheadroom.capacity.fleet_verdict import Urgency, Verdict
from kvheadroom.outputs.json_report import status_report, to_json
from kvheadroom.outputs.terminal import Space, board_lines
from kvheadroom.sources.status_api import StatusUnreadableError, parse_status, read_status
from tests.outputs.fleet import NOW, fleet


def document() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(to_json(status_report(withhold_stale(fleet(), NOW), NOW, "a notice")))
    return told


def test_a_status_is_read_whole() -> None:
    view = parse_status(document())
    assert (view.at, view.urgency, view.notice, view.is_complete) == (NOW, Urgency.NOW, "a notice", False)
    assert view.sentence.startswith("1 of 8 servers is down; ")
    assert [fault.partition(":")[0] for fault in view.faults] == [
        "the config file has a fault, and the config before it is in use",
        "file_sd_configs[0]",
    ]
    assert view.hints == (
        "file_sd_configs[0]: 1 left out, the first: /etc/vllm/a.json: 'gpu-1/x': a target is <host>:port",
    )
    down, gqa, *_ = view.rows
    assert (down.replica, down.engine, down.verdict, down.taken_at) == ("down", None, Verdict.DOWN, NOW - 60)
    assert (gqa.replica, gqa.engine, gqa.verdict, gqa.model_name) == ("gqa", "0", Verdict.PREEMPTING, "tiny")
    assert (gqa.session_tokens, gqa.sessions_in_use, gqa.sessions_observed) == (1024, 125 / 32, 4)
    assert (gqa.sessions_predicted, gqa.sessions_headroom) == (4, 0)
    assert gqa.probabilities == {"30s": 0.625, "2m": 0.875, "10m": 0.96875}
    assert (gqa.exhaustion_seconds, gqa.no_forecast, gqa.limit) == (12.5, None, None)
    assert (gqa.running, gqa.waiting, gqa.preemptions_total) == (17, 9, 20)
    assert gqa.state == "serving"
    offload = next(row for row in view.rows if row.replica == "offload")
    assert [one.tier for one in offload.stays_warm] == ["hbm", "host"]
    assert offload.stays_warm[1] == StaysWarm("host", None, None)
    assert offload.limit is Limit.NONE
    hub = next(row for row in view.rows if row.replica == "hub")
    assert hub.session_tokens == 2048, "without its model only max_model_len can be counted"
    assert hub.unpredicted[0].startswith(
        "model_files is missing: the server names its model 'org/<b>tiny</b>'"
    )
    assert hub.unpredicted[0].endswith("; way out: set `model: /path`")


def test_a_fleet_without_a_fault_is_complete() -> None:
    told = document() | {"config_fault": None, "discoveries": []}
    assert not parse_status(told).is_complete
    told["verdict"]["server_verdicts"] = {}
    assert parse_status(told).is_complete
    assert not parse_status(told | {"replicas": [], "worst_first": []}).is_complete


def test_words_of_a_later_release_are_not_known_and_no_fault() -> None:
    told = document()
    told["verdict"]["urgency"] = "later"
    told["worst_first"][1] |= {"verdict": "levitating", "urgency": "later"}
    told["replicas"][0]["engines"][0]["binding_limit"]["limit"] = "antigravity"
    told["more"] = 1
    view = parse_status(told)
    assert view.urgency is Urgency.UNKNOWN
    assert (view.rows[1].verdict, view.rows[1].limit) == (Verdict.UNKNOWN, None)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'{"now": NaN}', b"\xff", b"[" * 100_000, b'"' + b"x" * 100],
)
def test_what_is_no_json_object_is_told(body: bytes) -> None:
    with pytest.raises(StatusUnreadableError, match="is it kvheadroom that answers there"):
        read_status(body)


def test_a_status_without_verdict_is_of_an_older_release() -> None:
    told = document()
    del told["verdict"]
    with pytest.raises(
        StatusUnreadableError, match=r"^it has no verdict; is it a kvheadroom of this release"
    ):
        parse_status(told)


def test_a_status_that_was_damaged_anywhere_is_read_or_refused_and_nothing_else(
    seeded: random.Random,
) -> None:
    whole = document()
    refused = 0
    for _ in range(400):
        damaged = copy.deepcopy(whole)
        place: Any = damaged
        while isinstance(place, dict | list) and place:
            key = seeded.choice(list(place)) if isinstance(place, dict) else seeded.randrange(len(place))
            if not isinstance(place[key], dict | list) or not place[key] or seeded.random() < 0.2:
                if seeded.random() < 0.3:
                    del place[key]
                else:
                    place[key] = seeded.choice([None, True, "x", -1, 1e308, 10**400, [], {}, [[]], [None]])
                break
            place = place[key]
        try:
            view = parse_status(damaged)
        except StatusUnreadableError:
            refused += 1
        else:
            for width in (80, 200):
                assert board_lines(view, "", Space(width=width))
    assert 10 < refused < 390
