"""Who is in trouble, in which order, and how many more sessions fit: on engines watched for some minutes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.binding_limit import BindingLimit, Limit
from kvheadroom.capacity.engine_states import EngineState, StateFound
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment, ReplicaState, SourceStatus
from kvheadroom.capacity.fleet_verdict import (
    IMMINENT_RATIOS,
    LIKELY_RATIOS,
    FleetRoom,
    Ranked,
    Urgency,
    Verdict,
    fleet_verdict,
    worst_first,
)
from kvheadroom.capacity.forecast import Forecast, NoForecast
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from tests.capacity.test_engine_states import START, watch

NOW = START + 401.0
UP = (SourceStatus(source="metrics", failure=None),)
NO_BLOCKS_FREE = 1.0


def engine(
    *states: EngineState,
    in_30s: float = 0.0,
    likely: float = 0.0,
    in_10m: float = 0.0,
    limit: Limit | None = Limit.NONE,
    session_tokens: tuple[int, ...] = (),
    **said: Any,
) -> Assessment:
    """101 blocks of 16 tokens, 100 of them usable; a session of max_model_len, 1,024 tokens, takes 64."""
    at_rest = watch(lambda at: said, session_tokens=session_tokens)
    return replace(
        at_rest,
        states=tuple(StateFound(state, f"{state} it is") for state in states),
        forecast=Forecast(
            probabilities={"30s": in_30s, "2m": likely, "10m": in_10m}, load=at_rest.forecast.load
        ),
        binding_limit=BindingLimit(limit, "why it binds"),
    )


def server(
    name: str,
    *engines: Assessment,
    state: ReplicaState = ReplicaState.SERVING,
    sources: tuple[SourceStatus, ...] = UP,
    last_success_at: float | None = NOW - 1,
) -> ReplicaAssessment:
    return ReplicaAssessment(
        replica=name,
        url=f"http://{name}:8000",
        interval_seconds=5.0,
        state=state,
        sources=sources,
        engines=engines,
        last_success_at=last_success_at,
    )


def only(replica: ReplicaAssessment) -> Ranked:
    (found,) = worst_first(FleetAssessment((replica,)), NOW)
    return found


@pytest.mark.parametrize(
    ("found", "verdict", "urgency", "why"),
    [
        (engine(), Verdict.FINE, Urgency.FINE, "nothing runs, and 100 of 100 blocks are free"),
        (
            engine(EngineState.SCHEDULER_STALLED, EngineState.PREEMPTING),
            Verdict.STALLED,
            Urgency.NOW,
            "scheduler_stalled it is",
        ),
        (engine(EngineState.REPREFILL_LOOP), Verdict.STALLED, Urgency.NOW, "reprefill_loop it is"),
        (
            engine(EngineState.PREEMPTING, EngineState.THRASH),
            Verdict.PREEMPTING,
            Urgency.NOW,
            "thrash it is",
        ),
        (
            engine(EngineState.PREEMPTING, likely=0.99),
            Verdict.PREEMPTING,
            Urgency.NOW,
            "preempting it is",
        ),
        (
            engine(likely=0.7, in_10m=0.9, limit=Limit.KV_POOL),
            Verdict.PREEMPTION_IMMINENT,
            Urgency.SOON,
            "70% for a preemption within 2m; nothing runs, and 100 of 100 blocks are free",
        ),
        (
            engine(in_30s=0.4, likely=0.45, in_10m=0.9),
            Verdict.PREEMPTION_IMMINENT,
            Urgency.SOON,
            "40% for a preemption within 30s; nothing runs, and 100 of 100 blocks are free",
        ),
        (
            engine(in_30s=0.39, likely=0.69, in_10m=0.7),
            Verdict.PREEMPTION_LIKELY,
            Urgency.SOON,
            "70% for a preemption within 10m; nothing runs, and 100 of 100 blocks are free",
        ),
        (
            engine(in_30s=0.39, likely=0.69, in_10m=0.69, limit=Limit.KV_POOL),
            Verdict.WAITING_FOR_KV,
            Urgency.SOON,
            "why it binds",
        ),
        # What waits for something else than room is not KV's matter.
        (
            engine(limit=Limit.MAX_NUM_SEQS),
            Verdict.FINE,
            Urgency.FINE,
            "nothing runs, and 100 of 100 blocks are free",
        ),
        (
            engine(kv_usage_ratio=0.37),
            Verdict.NO_ROOM,
            Urgency.SOON,
            "a session of 1,024 tokens takes 64 blocks, and 63 are free",
        ),
        (
            engine(EngineState.POOL_BELOW_ONE_SESSION),
            Verdict.NO_ROOM,
            Urgency.SOON,
            "pool_below_one_session it is",
        ),
        (
            engine(EngineState.WORKING_SET_EXCEEDS_POOL),
            Verdict.PREFIXES_EVICTED,
            Urgency.SOON,
            "working_set_exceeds_pool it is",
        ),
        (
            engine(sleeping=True, kv_usage_ratio=NO_BLOCKS_FREE),
            Verdict.SLEEPING,
            Urgency.FINE,
            "it sleeps, and its memory is given up",
        ),
    ],
)
def test_an_engine_is_known_by_what_is_worst_of_it(
    found: Assessment, verdict: Verdict, urgency: Urgency, why: str
) -> None:
    ranked = only(server("a", found))
    assert (ranked.verdict, ranked.verdict.urgency, ranked.why) == (verdict, urgency, why)
    assert ranked.engine is found


def test_who_is_in_trouble_here_is_so_for_the_alerts() -> None:
    rules = (Path(__file__).parents[2] / "dashboards" / "rules" / "alerts.yaml").read_text()
    for horizon, ratio in {"30s": IMMINENT_RATIOS["30s"], **LIKELY_RATIOS}.items():
        assert (
            f'kvheadroom_forecast_preemption_probability_ratio{{horizon="{horizon}"}} >= {ratio}\n' in rules
        )


def test_room_for_the_shortest_length_is_room() -> None:
    # 63 free blocks hold one session of 512 tokens, which takes 32, and none of 1,024.
    assert only(server("a", engine(kv_usage_ratio=0.37, session_tokens=(512,)))).verdict is Verdict.FINE


def test_what_is_not_known_is_not_fine() -> None:
    no_forecast = replace(
        engine(), forecast=Forecast(unavailable=NoForecast.NOT_TOLD, why_unavailable="the page tells nothing")
    )
    assert (only(server("a", no_forecast)).verdict, only(server("a", no_forecast)).why) == (
        Verdict.UNKNOWN,
        "no forecast: the page tells nothing",
    )
    # It has a queue all the same, and that is known.
    waits = replace(no_forecast, binding_limit=BindingLimit(Limit.KV_POOL, "no block is free"))
    assert only(server("a", waits)).verdict is Verdict.WAITING_FOR_KV
    uncounted = replace(engine(), sessions=())
    assert only(server("a", uncounted)).verdict is Verdict.UNKNOWN
    assert only(server("a", uncounted)).why.startswith("how many sessions fit is not known: ")
    assert Verdict.UNKNOWN.urgency is Urgency.UNKNOWN


@pytest.mark.parametrize(
    ("state", "verdict", "why"),
    [
        (ReplicaState.DOWN, Verdict.DOWN, "GET http://a:8000/metrics: nothing listens there"),
        (ReplicaState.WEDGED, Verdict.WEDGED, "/health fails and its counters stand still"),
        (ReplicaState.STARTING, Verdict.STARTING, "its engine has no metrics yet"),
        (ReplicaState.SCALING, Verdict.SCALING, "it answers 503 to all but /health"),
        (
            ReplicaState.STATS_DISABLED,
            Verdict.STATS_DISABLED,
            "it runs without metrics (--disable-log-stats)",
        ),
    ],
)
def test_of_a_server_that_serves_nobody_no_numbers_are_told(
    state: ReplicaState, verdict: Verdict, why: str
) -> None:
    refused = SourceFailure(
        "metrics", FailureReason.REFUSED, "GET http://a:8000/metrics: nothing listens there"
    )
    sources = (SourceStatus(source="metrics", failure=refused),)
    # Down for a moment only, so that its last numbers are not old yet.
    found = only(server("a", engine(), state=state, sources=sources))
    assert (found.verdict, found.engine, found.why) == (verdict, None, why)


def test_numbers_that_are_too_old_are_no_numbers() -> None:
    old = server("a", engine(), last_success_at=NOW - 16)
    assert (only(old).verdict, only(old).engine) == (Verdict.STALE, None)
    assert only(old).why == "it gives no current numbers; the last ones are 16 s old"
    never = replace(old, engines=(), last_success_at=None)
    assert only(never).why == "it gives no current numbers; none came yet"
    assert only(replace(never, sources=())).verdict is Verdict.NOT_SCRAPED


def test_the_worst_come_first_and_of_equals_the_likelier_and_the_fuller() -> None:
    fleet = FleetAssessment(
        (
            server("empty", engine()),
            server("fuller", engine(kv_usage_ratio=0.3)),
            server("likelier", engine(likely=0.2)),
            server("unknown", replace(engine(), sessions=())),
            server("queue", engine(limit=Limit.KV_POOL)),
            server("soon", engine(likely=0.7)),
            server("sooner", engine(likely=0.9)),
            server("now", engine(), engine(EngineState.PREEMPTING)),
            server("down", state=ReplicaState.DOWN, last_success_at=None),
        )
    )
    ranked = worst_first(fleet, NOW)
    assert [one.replica.replica for one in ranked] == [
        "down", "now", "sooner", "soon", "queue", "unknown", "likelier", "fuller", "empty", "now",
    ]  # fmt: skip
    verdict = fleet_verdict(fleet, NOW)
    assert (verdict.urgency, verdict.servers, verdict.engines) == (Urgency.NOW, 9, 9)
    assert verdict.server_verdicts == ((Verdict.DOWN, 1),)
    assert verdict.engine_verdicts == (
        (Verdict.PREEMPTING, 1),
        (Verdict.PREEMPTION_IMMINENT, 2),
        (Verdict.WAITING_FOR_KV, 1),
        (Verdict.UNKNOWN, 1),
        (Verdict.FINE, 4),
    )


def test_sessions_that_fit_are_counted_at_the_length_that_most_engines_take_and_of_these_the_longest() -> (
    None
):
    # 100 free blocks: 3 sessions of 512 tokens (32 blocks) and one of 1,024 (64).
    both = engine(session_tokens=(512,))
    (short, long) = both.sessions
    assert (short.headroom, long.headroom) == (3, 1)
    shorter = replace(both, sessions=(short,))
    room = fleet_verdict(FleetAssessment((server("a", both, both),)), NOW).room
    assert room == FleetRoom(session_tokens=1024, sessions=2, engines=2, shorter_engines=0, unknown_engines=0)
    # One that counts the shorter length alone brings the others to it.
    room = fleet_verdict(FleetAssessment((server("a", both, both, shorter),)), NOW).room
    assert room == FleetRoom(session_tokens=512, sessions=9, engines=3, shorter_engines=0, unknown_engines=0)


def test_engines_that_are_left_out_of_the_sum_are_told_by_why() -> None:
    whole = engine()
    limit = whole.facts.max_model_len
    assert limit is not None
    small = replace(
        whole,
        facts=replace(whole.facts, max_model_len=replace(limit, value=512)),
        sessions=(replace(whole.sessions[0], session_tokens=512),),
    )
    uncounted = replace(whole, sessions=(replace(whole.sessions[0], headroom=None),))
    stalled = engine(EngineState.SCHEDULER_STALLED)
    fleet = FleetAssessment((server("a", whole, whole, small, uncounted, stalled),))
    assert fleet_verdict(fleet, NOW).room == FleetRoom(
        session_tokens=1024, sessions=2, engines=2, shorter_engines=1, unknown_engines=2
    )


def test_of_a_fleet_that_tells_nothing_nothing_is_said() -> None:
    empty = fleet_verdict(FleetAssessment(()), NOW)
    assert (empty.urgency, empty.servers, empty.engines, empty.room) == (Urgency.UNKNOWN, 0, 0, None)
    silent = fleet_verdict(FleetAssessment((server("a", state=ReplicaState.DOWN),)), NOW)
    assert (silent.urgency, silent.engines, silent.room) == (Urgency.NOW, 0, None)
