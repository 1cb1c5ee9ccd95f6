"""The sampler stepped by hand: no clock, no sleep, no network."""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.facts import MissingFact
from kvheadroom.capacity.fleet import EventKind, ReplicaAssessment, ReplicaState, SourceStatus, withhold_stale
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.readings import (
    EngineSnapshot,
    FailureReason,
    PageProblem,
    ProblemReason,
    Scrape,
    SourceFailure,
    VllmPage,
)
from kvheadroom.capacity.warm_findings import WarmFinding
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.sampler import (
    ASK_AGAIN_SECONDS,
    IDLE_HEALTH_TICKS,
    ReplicaSampler,
    ReplicaSources,
    Resolution,
)
from tests.capacity.facts_builder import facts

ENGINE = EngineSnapshot(engine="0", model_name="m", num_blocks=128, block_size=32, kv_usage_ratio=0.5)
PAGE = VllmPage(format="text", engines=(ENGINE,), process_start_time_seconds=100.0)
REFUSED = SourceFailure("metrics", FailureReason.REFUSED, "nothing listens there")


class Outside:
    """Two sources whose answers a test sets."""

    def __init__(self) -> None:
        self.answer: VllmPage | SourceFailure = PAGE
        self.sources: tuple[SourceStatus, ...] = (SourceStatus(source="version", failure=None),)
        self.resolved = 0
        self.now = 1000.0
        first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=5.0)
        self.board = Board((first, replace(first, replica="other")))
        self.healthy: bool | None = True
        self.health_asked = 0
        self.version: str | None = "0.33.0"
        sources = ReplicaSources(self.fetch, self.resolve, self.unasked, self.ask_health)
        self.sampler = ReplicaSampler(first, (1024,), sources, self.board)

    async def fetch(self) -> tuple[Scrape, VllmPage] | SourceFailure:
        if isinstance(self.answer, SourceFailure):
            return self.answer
        return Scrape(b"", self.now, 0.01), self.answer

    async def resolve(self, page: VllmPage) -> Resolution:
        self.resolved += 1
        found = {e.engine: facts(gpu="cpu", version=self.version) for e in page.engines}
        return Resolution(found, self.sources)

    def unasked(self, page: VllmPage) -> Resolution:
        return Resolution({e.engine: facts(gpu="cpu", version=None) for e in page.engines}, ())

    async def ask_health(self) -> bool | None:
        self.health_asked += 1
        return self.healthy

    def tick(
        self, answer: VllmPage | SourceFailure | None = None, *, after: float = 5.0
    ) -> ReplicaAssessment:
        self.now += after
        if answer is not None:
            self.answer = answer
        asyncio.run(self.sampler.tick(self.now))
        return self.board.fleet.replicas[0]


@pytest.fixture
def outside() -> Outside:
    return Outside()


def test_a_tick_publishes_the_replicas_engines_and_leaves_the_others_alone(outside: Outside) -> None:
    replica = outside.tick()
    assert [e.snapshot for e in replica.engines] == [ENGINE]
    assert replica.last_success_at == outside.now
    assert [(s.source, s.up) for s in replica.sources] == [("metrics", True), ("version", True)]
    assert not outside.board.fleet.replicas[1].attempted


def test_facts_are_asked_for_once_while_the_same_server_answers(outside: Outside) -> None:
    for _ in range(5):
        outside.tick(replace(PAGE, engines=(replace(ENGINE, kv_usage_ratio=0.9, preemptions_total=4.0),)))
    assert outside.resolved == 1


def test_an_engine_carries_its_last_hour_and_when_its_facts_were_told(outside: Outside) -> None:
    for _ in range(30):
        replica = outside.tick()
    (engine,) = replica.engines
    assert [at - 1005.0 for at in engine.last_hour.times] == [0.0, 60.0, 120.0]
    assert engine.facts_at == 1005.0


def test_facts_that_a_failing_source_told_before_keep_their_age(outside: Outside) -> None:
    outside.tick()
    failure = SourceFailure("version", FailureReason.TIMEOUT, "no answer")
    outside.sources = (SourceStatus(source="version", failure=failure),)
    outside.tick(REFUSED)
    for _ in range(3):
        replica = outside.tick(PAGE)
    assert replica.engines[0].facts_at == 1005.0


def test_a_prediction_is_made_anew_only_for_new_facts(outside: Outside) -> None:
    first, second = (outside.tick().engines[0].prediction for _ in range(2))
    assert second is first
    (third,) = outside.tick(replace(PAGE, process_start_time_seconds=200.0)).engines
    assert third.prediction is not first
    assert third.prediction == first


@pytest.mark.parametrize(
    "other",
    [
        replace(PAGE, process_start_time_seconds=200.0),
        replace(PAGE, engines=(replace(ENGINE, num_blocks=64),)),
        replace(PAGE, engines=(replace(ENGINE, model_name="another"),)),
        replace(PAGE, engines=(ENGINE, replace(ENGINE, engine="1"))),
    ],
)
def test_facts_are_asked_for_again_when_another_server_answers(outside: Outside, other: VllmPage) -> None:
    outside.tick()
    outside.tick(other)
    assert outside.resolved == 2


def test_facts_are_asked_for_again_after_an_outage(outside: Outside) -> None:
    outside.tick()
    outside.tick(REFUSED)
    outside.tick(PAGE)
    assert outside.resolved == 2


NO_KEY = SourceFailure("models", FailureReason.HTTP_STATUS, "401")


def test_a_source_of_facts_that_fails_is_asked_again_ever_more_slowly(outside: Outside) -> None:
    outside.sources = (SourceStatus(source="models", failure=NO_KEY),)
    replica = outside.tick()
    assert [(s.source, s.up) for s in replica.sources] == [("metrics", True), ("models", False)]
    asked = 1
    for pause in (*ASK_AGAIN_SECONDS, ASK_AGAIN_SECONDS[-1]):
        outside.tick(after=pause * 0.4)
        outside.tick(after=pause * 0.5)
        assert outside.resolved == asked, pause
        replica = outside.tick(after=pause * 0.2)
        asked += 1
        assert outside.resolved == asked, pause
    assert dict(replica.failures_total)["models", FailureReason.HTTP_STATUS] == asked
    outside.sources = (SourceStatus(source="models", failure=None),)
    for _ in range(20):
        outside.tick(after=60.0)
    assert outside.resolved == asked + 1


def test_a_clock_set_back_does_not_stop_facts_being_asked_for(outside: Outside) -> None:
    outside.sources = (SourceStatus(source="models", failure=NO_KEY),)
    for _ in range(10):
        outside.tick()
    asked = outside.resolved
    outside.tick(after=-3600.0)
    assert outside.resolved == asked + 1
    for _ in range(60):
        outside.tick()
    assert outside.resolved > asked + 4


def test_a_source_that_answered_before_and_fails_now_keeps_what_it_said(outside: Outside) -> None:
    before = outside.tick()
    outside.tick(REFUSED)
    outside.version = None
    outside.sources = (SourceStatus(source="version", failure=replace(NO_KEY, source="version")),)
    replica = outside.tick(PAGE)
    assert outside.resolved == 2
    for _ in range(5):
        assert replica.engines[0].facts == before.engines[0].facts
        assert [(s.source, s.up) for s in replica.sources] == [("metrics", True), ("version", False)]
        assert kinds(replica) == [EventKind.STATE_CHANGED, EventKind.STATE_CHANGED]
        replica = outside.tick()
    assert outside.resolved > 4


def test_an_answer_of_before_an_outage_is_not_taken_for_the_server_after_it(outside: Outside) -> None:
    release = asyncio.Event()

    async def slow(page: VllmPage) -> Resolution:
        resolution = await outside.resolve(page)
        await release.wait()
        return resolution

    first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=0.1)
    board = Board((first,))
    sources = ReplicaSources(outside.fetch, slow, outside.unasked, outside.ask_health)
    sampler = ReplicaSampler(first, (1024,), sources, board)

    async def run() -> None:
        page = replace(PAGE, process_start_time_seconds=None)
        for now, answer in ((1000.0, page), (1005.0, REFUSED)):
            outside.answer = answer
            await sampler.tick(now)
        outside.answer, outside.version = page, "0.34.0"
        release.set()
        for now in (1010.0, 1015.0):
            await sampler.tick(now)
        version = board.fleet.replicas[0].engines[0].facts.version
        assert version is not None
        assert version.value == "0.34.0"
        assert outside.resolved == 2

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_failed_scrape_shows_at_once_and_its_numbers_go_after_three_ticks(outside: Outside) -> None:
    outside.tick()
    last = outside.now
    for tick in range(1, 5):
        replica = outside.tick(REFUSED)
        assert [(s.source, s.up) for s in replica.sources] == [("metrics", False)]
        shown = withhold_stale(outside.board.fleet, outside.now).replicas[0]
        assert len(shown.engines) == (1 if tick <= 3 else 0), f"tick {tick}"
    assert replica.last_success_at == last
    assert replica.failures_total == ((("metrics", FailureReason.REFUSED), 4),)


def test_failures_are_counted_by_source_and_reason_and_never_reset(outside: Outside) -> None:
    outside.tick(REFUSED)
    outside.tick(SourceFailure("metrics", FailureReason.TIMEOUT, "slow"))
    outside.tick(PAGE)
    outside.tick(REFUSED)
    assert dict(outside.board.fleet.replicas[0].failures_total) == {
        ("metrics", FailureReason.REFUSED): 2,
        ("metrics", FailureReason.TIMEOUT): 1,
    }


def test_a_failure_is_said_once_and_not_at_every_tick(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        outside.tick(REFUSED)
    assert [record.getMessage() for record in caplog.records] == ["replica r: nothing listens there"]


def working(**counters: float) -> VllmPage:
    return replace(PAGE, engines=(replace(ENGINE, requests_running=2.0, **counters),))  # type: ignore[arg-type]


def kinds(replica: ReplicaAssessment) -> list[str]:
    return [event.kind for event in replica.events]


def test_a_restart_with_another_pool_is_two_events_and_counted(outside: Outside) -> None:
    outside.tick(working(generation_tokens_total=500.0))
    outside.tick(REFUSED)
    smaller = replace(ENGINE, num_blocks=64, generation_tokens_total=3.0)
    outside.version = "0.34.0"
    replica = outside.tick(replace(PAGE, engines=(smaller,), process_start_time_seconds=200.0))
    assert [(e.kind, e.detail) for e in replica.events] == [
        (EventKind.STATE_CHANGED, "serving -> down"),
        (EventKind.RESTARTED, "its process started anew"),
        (EventKind.RELEASE_CHANGED, "vLLM 0.33.0 -> 0.34.0"),
        (EventKind.CAPACITY_CHANGED, "engine 0: pool 128 blocks of 32 -> 64 blocks of 32"),
        (EventKind.STATE_CHANGED, "down -> serving"),
    ]
    assert replica.restarts_total == 1
    assert replica.engines[0].observation.num_blocks == 64


def test_a_restart_that_no_start_time_tells_is_known_by_a_counter_that_fell(outside: Outside) -> None:
    no_time = replace(working(prompt_tokens_total=900.0), process_start_time_seconds=None)
    outside.tick(no_time)
    replica = outside.tick(replace(working(prompt_tokens_total=10.0), process_start_time_seconds=None))
    assert kinds(replica) == [EventKind.RESTARTED]
    assert replica.restarts_total == 1
    # Another process may run with other flags: its facts are asked for afresh.
    assert outside.resolved == 2


def test_a_restart_into_a_server_that_tells_its_start_is_known_by_its_counters(outside: Outside) -> None:
    outside.tick(replace(working(prompt_tokens_total=900.0), process_start_time_seconds=None))
    assert kinds(outside.tick(working(prompt_tokens_total=10.0))) == [EventKind.RESTARTED]


@pytest.mark.parametrize("gone", [None, *range(1, 4)])
def test_a_page_that_loses_its_start_time_for_a_while_is_no_restart(
    outside: Outside, gone: int | None
) -> None:
    started = 100.0 if gone is None else None
    for _ in range(gone or 1):
        replica = outside.tick(replace(working(prompt_tokens_total=5.0), process_start_time_seconds=started))
    replica = outside.tick(working(prompt_tokens_total=5.0))
    assert (replica.events, replica.restarts_total) == ((), 0)


def test_two_servers_in_turn_at_one_address_are_a_problem_and_no_restarts(outside: Outside) -> None:
    first = working(prompt_tokens_total=1000.0)
    smaller = replace(ENGINE, num_blocks=64, prompt_tokens_total=10.0)
    other = replace(PAGE, process_start_time_seconds=200.0, engines=(smaller,))
    for page in (first, other, first, other, first, other):
        replica = outside.tick(page)
    assert [problem.reason for problem in replica.problems] == [ProblemReason.SEVERAL_SERVERS]
    assert "give each its own `url`" in replica.problems[0].detail
    # The first change cannot be told from a restart.
    assert kinds(replica) == [EventKind.RESTARTED, EventKind.CAPACITY_CHANGED]
    assert replica.restarts_total == 1
    # Each server's facts are asked for once and never taken for the other's.
    assert outside.resolved == 2
    # Where only one answers from now on, it is not told for ever.
    for _ in range(61):
        replica = outside.tick(other)
    assert replica.problems == ()


def test_a_release_that_becomes_known_late_is_still_an_event(outside: Outside) -> None:
    release = asyncio.Event()
    release.set()

    async def slow(page: VllmPage) -> Resolution:
        await release.wait()
        return await outside.resolve(page)

    first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=0.1)
    board = Board((first,))
    sources = ReplicaSources(outside.fetch, slow, outside.unasked, outside.ask_health)
    sampler = ReplicaSampler(first, (1024,), sources, board)

    async def run() -> None:
        await sampler.tick(1000.0)
        release.clear()
        outside.version = "0.34.0"
        outside.answer = replace(PAGE, process_start_time_seconds=200.0)
        await sampler.tick(1005.0)
        assert kinds(board.fleet.replicas[0]) == [EventKind.RESTARTED]
        release.set()
        await sampler.tick(1010.0)
        assert kinds(board.fleet.replicas[0]) == [EventKind.RESTARTED, EventKind.RELEASE_CHANGED]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_short_503_neither_changes_the_capacity_nor_takes_the_prediction_away(outside: Outside) -> None:
    outside.tick()
    outside.tick(SourceFailure("metrics", FailureReason.UNAVAILABLE, "503"))
    outside.version = None
    outside.sources = (SourceStatus(source="version", failure=replace(NO_KEY, source="version")),)
    replica = outside.tick(PAGE)
    assert replica.engines[0].facts.version is not None
    assert kinds(replica) == [EventKind.STATE_CHANGED, EventKind.STATE_CHANGED]


def test_problems_of_a_page_go_with_the_page(outside: Outside) -> None:
    odd = replace(PAGE, problems=(PageProblem(ProblemReason.SEVERAL_SERVERS, "x"),))
    assert outside.tick(odd).problems
    assert outside.tick(REFUSED).problems == ()


def test_a_contradiction_within_a_page_is_a_problem_of_the_replica(outside: Outside) -> None:
    told = replace(ENGINE, block_size=4, pool_tokens=4096)
    replica = outside.tick(replace(PAGE, engines=(told,)))
    assert [problem.reason for problem in replica.problems] == [ProblemReason.CONTRADICTION]
    # A page that says otherwise of its blocks than another has not changed its pool.
    assert outside.tick(replace(PAGE, engines=(told,))).events == ()


def looked_up(queries: float, hits: float, **more: float) -> VllmPage:
    return working(prefix_cache_queries_total=queries, prefix_cache_hits_total=hits, **more)


def windows(replica: ReplicaAssessment) -> dict[str, float]:
    """The hit rate of each window that is known."""
    (engine,) = replica.engines
    return {one.window: one.local.ratio for one in engine.hit_windows if one.local is not None}


def test_hit_rates_are_of_their_window_alone_and_begin_anew_after_a_restart(outside: Outside) -> None:
    # Half of what is asked for is found; from the sixtieth tick (295 s) on nothing.
    for tick in range(1, 61):
        replica = outside.tick(looked_up(100.0 * tick, 50.0 * tick))
    assert windows(replica) == {"1m": 0.5, "5m": pytest.approx(0.5)}
    for tick in range(61, 73):
        replica = outside.tick(looked_up(100.0 * tick, 3_000.0))
    assert windows(replica) == {"1m": 0.0, "5m": pytest.approx(0.4)}
    restarted = replace(looked_up(10.0, 0.0), process_start_time_seconds=200.0)
    assert windows(outside.tick(restarted)) == {}


def test_hit_rates_are_unknown_across_a_gap_and_while_nothing_is_looked_up(outside: Outside) -> None:
    for tick in range(1, 21):
        replica = outside.tick(looked_up(100.0 * tick, 50.0 * tick))
    assert windows(replica) == {"1m": 0.5}
    # Nothing is asked for in the last minute: neither 0 nor what was.
    for _ in range(12):
        replica = outside.tick()
    assert windows(replica) == {}
    for tick in range(21, 41):
        replica = outside.tick(looked_up(100.0 * tick, 50.0 * tick))
    for _ in range(3):
        outside.tick(REFUSED)
    replica = outside.tick(looked_up(10_000.0, 9_000.0))
    assert windows(replica) == {}


def test_hit_counters_that_mislead_are_problems_of_the_replica_with_their_reason(outside: Outside) -> None:
    outside.version = "0.10.2"
    for tick in range(1, 62):
        replica = outside.tick(
            looked_up(100.0 * tick, 32.0 * tick, preemptions_total=float(max(0, tick - 30)))
        )
    (problem,) = replica.problems
    assert problem.reason is ProblemReason.INFLATED_BY_RECOMPUTE
    assert problem.detail.startswith("engine 0: 31 preemptions in the last 5 minutes")
    # Before five minutes are over nothing is known to rise; the scrape at 295 s is near enough.
    assert dict(replica.problems_total)[ProblemReason.INFLATED_BY_RECOMPUTE] == 2
    # Five minutes without a preemption: what is found again now is found by new requests.
    for tick in range(62, 123):
        replica = outside.tick(looked_up(100.0 * tick, 32.0 * tick, preemptions_total=31.0))
    assert replica.problems == ()


def test_what_is_remembered_of_an_engine_goes_with_it(outside: Outside) -> None:
    def page(*names: str, tokens: float) -> VllmPage:
        (one,) = looked_up(tokens, 0.0).engines
        return replace(PAGE, engines=tuple(replace(one, engine=name) for name in names))

    for tick in range(20):
        replica = outside.tick(page("0", "1", tokens=100.0 * tick))
    assert [bool(engine.hit_windows) for engine in replica.engines] == [True, True]
    outside.tick(page("0", tokens=5_000.0))
    replica = outside.tick(page("0", "1", tokens=5_100.0))
    assert [bool(engine.hit_windows) for engine in replica.engines] == [True, False]


def test_metrics_that_vanish_are_told_by_their_names_until_they_are_back(outside: Outside) -> None:
    whole = replace(PAGE, metrics=frozenset({"vllm:a", "vllm:b_total", "vllm:c"}))
    poor = replace(whole, metrics=frozenset({"vllm:b_total"}))
    assert outside.tick(whole).problems == ()
    # While a server starts, nothing is missing.
    assert outside.tick(replace(whole, engines=(), metrics=frozenset())).lost_metrics == ()
    replica = outside.tick(poor)
    assert replica.lost_metrics == ("vllm:a", "vllm:c")
    (problem,) = replica.problems
    assert problem.reason is ProblemReason.METRICS_LOST
    assert problem.detail.startswith("vllm:a, vllm:c: on this server's page before and gone now")
    assert outside.tick(REFUSED).lost_metrics == ()
    assert outside.tick(poor).lost_metrics == ("vllm:a", "vllm:c")
    replica = outside.tick(whole)
    assert (replica.lost_metrics, replica.problems) == ((), ())


def test_problems_are_counted_by_reason_and_never_reset(outside: Outside) -> None:
    problem = PageProblem(ProblemReason.BAD_VALUE, "dropped")
    outside.tick(replace(PAGE, problems=(problem, problem)))
    outside.tick(replace(PAGE, problems=(problem,)))
    assert outside.tick(PAGE).problems_total == ((ProblemReason.BAD_VALUE, 3),)
    assert outside.tick(REFUSED).problems_total == ((ProblemReason.BAD_VALUE, 3),)


def test_a_problem_is_logged_when_its_kind_comes_up_and_on_one_line(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    def with_problem(detail: str) -> VllmPage:
        return replace(PAGE, problems=(PageProblem(ProblemReason.BAD_VALUE, detail),))

    outside.tick(with_problem("-0.25 dropped\nERROR forged"))
    outside.tick(with_problem("-0.5 dropped"))
    outside.tick(PAGE)
    outside.tick(with_problem("-0.75 dropped"))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "replica r: bad_value: -0.25 dropped\N{REPLACEMENT CHARACTER}ERROR forged",
        "replica r: bad_value: -0.75 dropped",
    ]


def test_counters_that_rise_or_stay_are_no_restart(outside: Outside) -> None:
    for count in (0.0, 5.0, 5.0, 900.0):
        replica = outside.tick(working(prompt_tokens_total=count))
    assert (replica.events, replica.restarts_total) == ((), 0)


def test_another_model_and_other_engines_behind_the_same_url_are_events(outside: Outside) -> None:
    outside.tick()
    other = replace(ENGINE, model_name="another")
    replica = outside.tick(replace(PAGE, engines=(other, replace(other, engine="1"))))
    assert kinds(replica) == [EventKind.MODEL_CHANGED, EventKind.ENGINES_CHANGED]
    assert replica.events[1].detail == "engines 0 -> 0, 1"


def test_only_the_latest_events_are_kept(outside: Outside) -> None:
    for number in range(200):
        replica = outside.tick(PAGE if number % 2 else REFUSED)
    assert len(replica.events) == 50
    assert replica.events[-1].at == outside.now


def test_a_wedged_server_answers_scrapes_while_its_counters_stand_still_and_health_fails(
    outside: Outside,
) -> None:
    assert outside.tick(working(generation_tokens_total=7.0)).state is ReplicaState.SERVING
    outside.healthy = False
    # As long as counters move, nobody asks for its health.
    assert outside.tick(working(generation_tokens_total=8.0)).state is ReplicaState.SERVING
    assert outside.health_asked == 0
    assert outside.tick(working(generation_tokens_total=8.0)).state is ReplicaState.WEDGED
    assert outside.tick().state is ReplicaState.WEDGED
    outside.healthy = True
    assert outside.tick().state is ReplicaState.SERVING


def test_an_idle_server_is_asked_for_its_health_only_now_and_then(outside: Outside) -> None:
    idle = replace(PAGE, engines=(replace(ENGINE, requests_running=0.0, generation_tokens_total=7.0),))
    for _ in range(IDLE_HEALTH_TICKS):
        assert outside.tick(idle).state is ReplicaState.SERVING
    assert outside.health_asked == 0
    outside.healthy = False
    assert outside.tick(idle).state is ReplicaState.WEDGED
    assert outside.health_asked == 1


def test_a_server_whose_health_cannot_be_asked_is_not_called_wedged_while_nothing_is_to_do(
    outside: Outside,
) -> None:
    idle = replace(PAGE, engines=(replace(ENGINE, requests_running=0.0, generation_tokens_total=7.0),))
    outside.healthy = None
    states = {outside.tick(idle).state for _ in range(2 * IDLE_HEALTH_TICKS + 1)}
    assert outside.health_asked == 2
    assert states == {ReplicaState.SERVING}


@pytest.mark.parametrize(
    ("reason", "healthy", "state"),
    [
        (FailureReason.UNAVAILABLE, True, ReplicaState.SCALING),
        (FailureReason.UNAVAILABLE, False, ReplicaState.DOWN),
        (FailureReason.UNAVAILABLE, None, ReplicaState.DOWN),
        (FailureReason.STATS_DISABLED, True, ReplicaState.STATS_DISABLED),
        (FailureReason.REFUSED, True, ReplicaState.DOWN),
        (FailureReason.NOT_VLLM, True, ReplicaState.DOWN),
    ],
)
def test_a_failure_has_the_state_it_stands_for(
    outside: Outside, reason: FailureReason, *, healthy: bool | None, state: ReplicaState
) -> None:
    outside.healthy = healthy
    assert outside.tick(SourceFailure("metrics", reason, "x")).state is state


def test_a_page_without_engines_is_a_server_that_starts(outside: Outside) -> None:
    assert outside.tick(replace(PAGE, engines=())).state is ReplicaState.STARTING


def test_a_sleeping_engine_has_neither_used_nor_free_blocks(outside: Outside) -> None:
    awake = replace(ENGINE, sleeping=False)
    assert outside.tick(replace(PAGE, engines=(awake,))).state is ReplicaState.SERVING
    replica = outside.tick(replace(PAGE, engines=(replace(ENGINE, sleeping=True),)))
    assert replica.state is ReplicaState.SLEEPING
    seen = replica.engines[0].observation
    assert (seen.num_blocks, seen.used_blocks, seen.free_blocks) == (128, None, None)
    assert all(row.headroom is None for row in replica.engines[0].sessions)


def test_an_engine_that_vanishes_from_the_page_vanishes(outside: Outside) -> None:
    outside.tick(replace(PAGE, engines=(ENGINE, replace(ENGINE, engine="1"))))
    replica = outside.tick(PAGE)
    assert [e.snapshot.engine for e in replica.engines] == ["0"]


def test_a_fault_of_ours_ends_the_tick_and_not_the_monitor(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> tuple[Scrape, VllmPage] | SourceFailure:
        raise ZeroDivisionError("a bug")

    first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=0.01)
    board = Board((first,))
    sources = ReplicaSources(broken, outside.resolve, outside.unasked, outside.ask_health)
    sampler = ReplicaSampler(first, (1024,), sources, board)

    async def run() -> None:
        task = asyncio.create_task(sampler.run())
        while dict(board.fleet.replicas[0].failures_total).get(("metrics", FailureReason.INTERNAL), 0) < 2:  # noqa: ASYNC110  the board has no event
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))
    assert "a fault of kvheadroom" in str(board.fleet.replicas[0].sources[0].failure)
    assert "please report it" in caplog.text


def test_a_fault_of_ours_in_finding_facts_leaves_the_observed_part(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: VllmPage) -> Resolution:
        raise ZeroDivisionError("a bug")

    first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=5.0)
    board = Board((first,))
    sources = ReplicaSources(outside.fetch, broken, outside.unasked, outside.ask_health)
    asyncio.run(ReplicaSampler(first, (1024,), sources, board).tick(1000.0))
    replica = board.fleet.replicas[0]
    assert replica.engines[0].observation.num_blocks == 128
    assert replica.failures_total == ((("facts", FailureReason.INTERNAL), 1),)
    assert [(s.source, s.up) for s in replica.sources] == [("metrics", True), ("facts", False)]
    assert "please report it" in caplog.text


def test_numbers_are_shown_while_slow_sources_of_facts_are_still_being_asked(outside: Outside) -> None:
    release = asyncio.Event()

    async def slow(page: VllmPage) -> Resolution:
        await release.wait()
        return await outside.resolve(page)

    first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=5.0)
    board = Board((first,))
    sources = ReplicaSources(outside.fetch, slow, outside.unasked, outside.ask_health)
    sampler = ReplicaSampler(first, (1024,), sources, board)

    async def run() -> None:
        for now in (1000.0, 1005.0):
            await sampler.tick(now)
            (engine,) = board.fleet.replicas[0].engines
            assert engine.observation.num_blocks == 128
            assert engine.facts.version is None
        release.set()
        await sampler.tick(1010.0)
        (engine,) = board.fleet.replicas[0].engines
        assert engine.facts.version is not None
        assert outside.resolved == 1

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_age_counts_from_the_scrape_and_not_from_its_end(outside: Outside) -> None:
    outside.tick()
    taken_at = outside.now
    asyncio.run(outside.sampler.tick(taken_at + 4.0))
    assert outside.board.fleet.replicas[0].last_success_at == taken_at


def test_a_fleet_is_spread_over_the_interval_and_some_are_asked_together() -> None:
    from kvheadroom.monitor.sampler import PHASES, _phase

    at_once = Counter(_phase(f"http://10.0.{n // 250}.{n % 250}:8000") for n in range(500))
    assert _phase("http://a:1") == _phase("http://a:1")
    assert sorted(at_once) == pytest.approx([moment / PHASES for moment in range(PHASES)])
    assert max(at_once.values()) < 3 * 500 / PHASES


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.999])
def test_the_first_gap_is_never_longer_than_an_interval(
    outside: Outside, phase: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvheadroom.monitor.sampler._phase", lambda _: phase)
    clock = [100.0]
    times: list[float] = []

    async def sleep(seconds: float) -> None:
        clock[0] += max(0.0, seconds)

    async def fetch() -> tuple[Scrape, VllmPage] | SourceFailure:
        times.append(clock[0])
        if len(times) == 6:
            raise asyncio.CancelledError
        clock[0] += 0.25  # a scrape takes its time
        return REFUSED

    monkeypatch.setattr("kvheadroom.monitor.sampler.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("kvheadroom.monitor.sampler.asyncio.sleep", sleep)
    first = ReplicaAssessment(replica="r", url="http://r:1", interval_seconds=5.0)
    sources = ReplicaSources(fetch, outside.resolve, outside.unasked, outside.ask_health)
    sampler = ReplicaSampler(first, (1024,), sources, Board((first,)))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sampler.run())
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] - 100.0 == pytest.approx(phase)
    assert gaps[0] <= 5.0
    # From the second tick on they come once an interval, at the replica's own phase of it.
    assert gaps[1:] == pytest.approx([5.0] * 4)
    assert (times[1] - 100.0) % 5.0 == pytest.approx(phase * 5.0)


def test_missing_facts_reach_the_board(outside: Outside) -> None:
    replica = outside.tick()
    assert [m.fact for m in replica.engines[0].facts.missing] == ["kv_cache_memory_bytes"]
    assert all(isinstance(m, MissingFact) for m in replica.engines[0].facts.missing)


@pytest.mark.parametrize(("flags", "looks"), [({}, 0), ({"kv_offloading_size": 1}, 1)])
def test_a_host_is_looked_at_only_where_a_tier_lies_in_it(
    outside: Outside, flags: dict[str, Any], looks: int
) -> None:
    asked: list[float] = []

    async def read_host() -> HostUse | None:
        asked.append(outside.now)
        return HostUse(shm_total_bytes=4096, engines=1)

    async def resolve(page: VllmPage) -> Resolution:
        return Resolution({e.engine: facts(flags=flags) for e in page.engines}, outside.sources)

    sources = ReplicaSources(outside.fetch, resolve, outside.unasked, outside.ask_health, read_host)
    first = outside.board.fleet.replicas[0]
    outside.sampler = ReplicaSampler(first, (1024,), sources, outside.board)
    for _ in range(6):
        [engine] = outside.tick().engines
    # Six ticks of 5 s are within half a minute.
    assert len(asked) == looks
    found = [finding for finding, _ in engine.warmth.findings]
    assert found == [WarmFinding.TIER_ABOVE_SHM] * looks
