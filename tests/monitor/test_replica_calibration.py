"""Starts of a running fleet, stepped by hand: which are measured, when, and what they make of the others' figures."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.calibration import Reliability
from kvheadroom.capacity.calibration_samples import Exclusion
from kvheadroom.capacity.fleet import ReplicaAssessment, SourceStatus
from kvheadroom.capacity.readings import (
    EchoedFlags,
    EngineSnapshot,
    FailureReason,
    Scrape,
    SourceFailure,
    VllmPage,
)
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.calibration_learner import CalibrationLearner
from kvheadroom.monitor.replica_calibration import ReplicaCalibration
from kvheadroom.monitor.sampler import ReplicaSampler, ReplicaSources, Resolution
from tests.capacity.facts_builder import TINY_LLAMA, facts

T = TypeVar("T")
GIB = 2**30
BLOCKS = 131_072
"""Of 16 KiB: half of 10 GiB less weights of 1 GiB less these is an overhead of 2 GiB."""
REFUSED = SourceFailure("metrics", FailureReason.REFUSED, "nothing listens there")
SMALL = {**TINY_LLAMA, "vocab_size": 4096, "intermediate_size": 512}
UP: tuple[SourceStatus, ...] = (SourceStatus(source="version", failure=None),)


async def at_once(path: str, work: Callable[[], T], *, timeout_seconds: float) -> T:
    return work()


def page(*blocks: int | None, started_at: float | None = 100.0, **told: Any) -> VllmPage:
    engines = tuple(
        EngineSnapshot(
            engine=str(number),
            model_name="m",
            num_blocks=one,
            block_size=16,
            attention_block_size=16,
            **told,
        )
        for number, one in enumerate(blocks)
    )
    return VllmPage(format="text", engines=engines, process_start_time_seconds=started_at)


class Server:
    """One replica: what its page and its other sources say."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        self.fleet = fleet
        self.answer: VllmPage | SourceFailure = page(BLOCKS)
        self.said: dict[str, Any] = {}
        self.sources = UP
        self.foreign_bytes: int | None = None
        self.first = ReplicaAssessment(replica=name, url=f"http://{name}:1", interval_seconds=5.0)
        self.restart_sampler()

    def restart_sampler(self) -> None:
        """As a reload does that changes a setting of the replica."""
        known = [one for one in self.fleet.board.fleet.replicas if one.replica == self.first.replica]
        before = known[0] if known else self.first
        sources = ReplicaSources(self._fetch, self._resolve, self._unasked, self._healthy)
        calibration = ReplicaCalibration(before, self.fleet.learner, lambda: self.foreign_bytes)
        self.sampler = ReplicaSampler(before, (1024,), sources, self.fleet.board, calibration=calibration)

    async def _fetch(self) -> tuple[Scrape, VllmPage] | SourceFailure:
        if isinstance(self.answer, SourceFailure):
            return self.answer
        return Scrape(b"", self.fleet.now, 0.01), self.answer

    async def _resolve(self, asked: VllmPage) -> Resolution:
        given: dict[str, Any] = {
            "gpu": "H100",
            "hbm_bytes": 10 * GIB,
            "weights_bytes": GIB,
            "flags": {"block_size": 16, "gpu_memory_utilization": 0.5},
            "version": "0.33.0",
        }
        return Resolution({e.engine: facts(**given | self.said) for e in asked.engines}, self.sources)

    def _unasked(self, asked: VllmPage) -> Resolution:
        return Resolution({e.engine: facts(version=None) for e in asked.engines}, ())

    async def _healthy(self) -> bool | None:
        return True


class Fleet:
    """Servers `a` and `b` and one learner."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.board = Board(())
        self.learner = CalibrationLearner(at_once, self.board.set_calibration)
        self.a, self.b = Server(self, "a"), Server(self, "b")
        self.board = Board((self.a.first, self.b.first))
        self.a.restart_sampler()
        self.b.restart_sampler()

    def tick(self, *, after: float = 5.0, times: int = 1) -> dict[str, ReplicaAssessment]:
        for _ in range(times):
            self.now += after
            for server in (self.a, self.b):
                asyncio.run(server.sampler.tick(self.now))
        return {one.replica: one for one in self.board.fleet.replicas}

    def settle(self) -> dict[str, ReplicaAssessment]:
        """30 s, and one scrape more, so that each has seen what the others' starts tell."""
        return self.tick(times=8)

    def engine(self, name: str = "a") -> Assessment:
        (replica,) = (one for one in self.board.fleet.replicas if one.replica == name)
        (engine,) = replica.engines
        return engine

    def excluded(self, name: str = "a") -> dict[str, int]:
        (replica,) = (one for one in self.board.fleet.replicas if one.replica == name)
        return {str(reason): count for reason, count in replica.excluded_starts_total}

    def starts(self) -> dict[str, int]:
        """Overhead by start, of all that was learned."""
        samples = self.learner.calibration.samples.values()
        return {one.start: one.overhead_bytes for these in samples for one in these}


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def blocks_of(engine: Assessment) -> int | None:
    calibrated = engine.calibrated
    return (
        None
        if calibrated is None or calibrated.prediction.pool is None
        else calibrated.prediction.pool.num_blocks
    )


def test_a_start_calibrates_the_others_of_its_kind_and_not_itself(fleet: Fleet) -> None:
    fleet.b.answer = page(120_000, started_at=200.0)
    fleet.settle()
    # (5 - 1) GiB - blocks x 16 KiB.
    assert fleet.starts() == {"a/0/100": 2 * GIB, "b/0/200": 4 * GIB - 120_000 * 16_384}
    assert blocks_of(fleet.engine("a")) == 120_000
    assert blocks_of(fleet.engine("b")) == BLOCKS
    learned = fleet.engine("b").calibrated
    assert learned is not None
    assert (learned.learned.overhead_bytes, learned.learned.samples) == (2 * GIB, 1)
    assert learned.learned.reliability is Reliability.ONE_SAMPLE
    # The raw prediction stays what it was.
    assert fleet.engine("a").prediction == fleet.engine("b").prediction
    assert fleet.engine("a").facts.overhead_bytes.value != 2 * GIB


def test_what_an_engine_says_of_its_own_pool_never_moves_its_calibrated_figure() -> None:
    figures = []
    for own in (BLOCKS, 77_777, 140_000):
        fleet = Fleet()
        fleet.a.answer = page(own, pool_tokens=own * 17, max_concurrency=31_337.5, kv_usage_ratio=0.5)
        fleet.b.answer = page(120_000)
        fleet.settle()
        assert fleet.starts()["a/0/100"] == 4 * GIB - own * 16_384
        engine = fleet.engine("a")
        assert engine.calibrated is not None
        assert engine.ledger is not None
        figures.append(
            (
                engine.prediction,
                engine.calibrated,
                [(row.calibrated, row.calibrated_fewest, row.calibrated_most) for row in engine.sessions],
                [term.calibrated_bytes for term in engine.ledger.terms],
            )
        )
    assert figures[0] == figures[1] == figures[2]


def test_a_start_that_was_measured_calibrates_the_next_one_of_the_same_engine(fleet: Fleet) -> None:
    fleet.b.answer = REFUSED
    fleet.settle()
    assert fleet.engine().calibrated is None
    assert fleet.engine().own_start is not None
    fleet.a.answer = page(140_000, started_at=300.0)
    fleet.tick()
    assert blocks_of(fleet.engine()) == BLOCKS
    fleet.settle()
    # Its own is kept for the one after it, and has no say in its own.
    assert set(fleet.starts()) == {"a/0/100", "a/0/300"}
    assert blocks_of(fleet.engine()) == BLOCKS
    fleet.a.answer = page(130_000, started_at=400.0)
    fleet.tick()
    # The median of 2 GiB and 4 GiB - 140,000 x 16 KiB.
    assert blocks_of(fleet.engine()) == (BLOCKS + 140_000) // 2


@pytest.mark.parametrize(
    "said",
    [
        {"version": "0.34.0"},
        {"gpu": "H200"},
        {"flags": {"block_size": 16, "gpu_memory_utilization": 0.5, "max_num_seqs": 31}},
    ],
)
def test_a_start_of_another_kind_has_no_say(fleet: Fleet, said: dict[str, Any]) -> None:
    fleet.b.said = said
    fleet.settle()
    assert len(fleet.starts()) == 2
    assert fleet.engine("a").calibrated is None
    assert fleet.engine("b").calibrated is None


@pytest.mark.parametrize(
    ("scrapes", "after"),
    # 30 s are over at the seventh scrape of 5 s, the third of 15 s; of 60 s it takes three.
    [(7, 5.0), (3, 15.0), (3, 60.0), (4, 11.0)],
)
def test_a_start_is_measured_once_it_has_stood_still_for_30_s_and_3_scrapes(
    fleet: Fleet, scrapes: int, after: float
) -> None:
    # The first asks for the facts and has them.
    fleet.tick(after=after, times=scrapes - 1)
    assert fleet.starts() == {}
    own = fleet.engine().own_start
    assert own is not None
    assert "its own is not measured yet: it is measured once nothing of it has changed" in own.why_alone
    fleet.tick(after=after)
    assert set(fleet.starts()) == {"a/0/100", "b/0/100"}


def test_a_scrape_that_fails_begins_the_wait_anew(fleet: Fleet) -> None:
    fleet.tick(times=6)
    fleet.a.answer = REFUSED
    fleet.tick()
    fleet.a.answer = page(BLOCKS)
    fleet.tick(times=6)
    assert set(fleet.starts()) == {"b/0/100"}
    fleet.tick()
    assert set(fleet.starts()) == {"a/0/100", "b/0/100"}
    assert fleet.excluded() == {}


def test_a_clock_that_is_set_back_begins_the_wait_anew(fleet: Fleet) -> None:
    fleet.tick(times=6)
    fleet.tick(after=-1000.0)
    fleet.tick(times=5)
    assert fleet.starts() == {}
    fleet.tick()
    assert set(fleet.starts()) == {"a/0/100", "b/0/100"}


def test_a_start_that_gives_way_while_its_facts_are_not_known_is_told_so(fleet: Fleet) -> None:
    down = SourceFailure("models", FailureReason.HTTP_STATUS, "401")
    fleet.a.sources = (*UP, SourceStatus(source="models", failure=down))
    fleet.tick(times=3)
    fleet.a.answer = page(90_000, started_at=300.0)
    fleet.tick()
    assert fleet.excluded() == {"unknown": 1}


def test_nothing_is_measured_while_a_source_of_facts_is_down(fleet: Fleet) -> None:
    down = SourceFailure("models", FailureReason.HTTP_STATUS, "401")
    fleet.a.sources = (*UP, SourceStatus(source="models", failure=down))
    fleet.tick(times=20)
    assert set(fleet.starts()) == {"b/0/100"}
    own = fleet.engine().own_start
    assert own is not None
    assert own.told == "not all of its facts are known while models is down"
    fleet.a.sources = UP
    fleet.tick(after=60.0, times=4)
    assert set(fleet.starts()) == {"a/0/100", "b/0/100"}


def test_a_start_that_gives_way_before_it_stood_still_is_counted_and_not_learned_from(fleet: Fleet) -> None:
    fleet.tick(times=3)
    fleet.a.answer = page(90_000, started_at=300.0)
    fleet.settle()
    assert set(fleet.starts()) == {"a/0/300", "b/0/100"}
    assert fleet.excluded() == {"restarting": 1}
    fleet.tick(times=10)
    assert fleet.excluded() == {"restarting": 1}


def test_of_two_servers_in_turn_at_one_address_nothing_is_learned(fleet: Fleet) -> None:
    for _ in range(20):
        fleet.a.answer = page(BLOCKS)
        fleet.tick()
        fleet.a.answer = page(90_000, started_at=300.0)
        fleet.tick()
    assert set(fleet.starts()) == {"b/0/100"}
    # Each of them once, however often it came back.
    assert fleet.excluded() == {"restarting": 2}


def test_a_pool_that_changes_under_the_same_process_is_waited_for(fleet: Fleet) -> None:
    fleet.tick(times=6)
    fleet.a.answer = page(90_000)
    fleet.tick(times=6)
    assert "a/0/100" not in fleet.starts()
    fleet.tick()
    assert fleet.starts()["a/0/100"] == 4 * GIB - 90_000 * 16_384


EXCLUDED: dict[str, tuple[Callable[[Server], None], Exclusion]] = {
    "others hold more than 5% of its GPU": (
        lambda server: setattr(server, "foreign_bytes", GIB // 2 + 1),
        Exclusion.FOREIGN_MEMORY,
    ),
    "it sleeps": (lambda server: setattr(server, "answer", page(BLOCKS, sleeping=True)), Exclusion.ASLEEP),
    "a flag gives its pool": (
        lambda server: setattr(server, "said", {"flags": {"num_gpu_blocks_override": BLOCKS}}),
        Exclusion.POOL_BY_FLAG,
    ),
    "the bytes come from a flag": (
        lambda server: setattr(server, "said", {"echoed": EchoedFlags(kv_cache_memory_bytes=GIB)}),
        Exclusion.POOL_BY_FLAG,
    ),
    "stages are not told apart": (
        lambda server: setattr(
            server,
            "said",
            {"flags": {"pipeline_parallel_size": 2}, "config": SMALL, "weights_bytes": None},
        ),
        Exclusion.PIPELINE_STAGES,
    ),
    "its GPU is not known": (
        lambda server: setattr(server, "said", {"gpu": None, "hbm_bytes": None}),
        Exclusion.UNKNOWN,
    ),
    "its pool is not told": (lambda server: setattr(server, "answer", page(None)), Exclusion.UNKNOWN),
    "more than there is": (
        lambda server: setattr(server, "answer", page(5 * GIB // 16_384)),
        Exclusion.IMPOSSIBLE,
    ),
}


@pytest.mark.parametrize("situation", EXCLUDED)
def test_a_start_that_tells_nothing_is_left_out_and_counted_once(fleet: Fleet, situation: str) -> None:
    arrange, reason = EXCLUDED[situation]
    arrange(fleet.a)
    fleet.settle()
    fleet.tick(times=10)
    assert set(fleet.starts()) == {"b/0/100"}
    assert fleet.excluded() == {str(reason): 1}
    assert fleet.engine("b").calibrated is None
    # A pool that a flag gives has no figure by an overhead either.
    has_figure = reason not in (Exclusion.POOL_BY_FLAG, Exclusion.PIPELINE_STAGES, Exclusion.UNKNOWN)
    if situation != "its pool is not told":
        assert (fleet.engine("a").calibrated is not None) == has_figure
    own = fleet.engine().own_start
    assert own is not None
    assert own.excluded is not None
    assert own.excluded.reason is reason
    # A reload that begins sampling anew counts it no second time.
    fleet.a.restart_sampler()
    fleet.settle()
    assert fleet.excluded() == {str(reason): 1}
    # Another start is another one.
    if reason is not Exclusion.UNKNOWN:
        assert isinstance(fleet.a.answer, VllmPage)
        fleet.a.answer = replace(fleet.a.answer, process_start_time_seconds=300.0)
        fleet.settle()
        assert fleet.excluded() == {str(reason): 2}


def test_memory_of_others_up_to_5_percent_or_not_known_leaves_nothing_out(fleet: Fleet) -> None:
    fleet.a.foreign_bytes = GIB // 2
    fleet.settle()
    assert set(fleet.starts()) == {"a/0/100", "b/0/100"}


def test_a_pool_that_was_sized_beside_others_stays_left_out_when_they_are_gone(fleet: Fleet) -> None:
    fleet.a.foreign_bytes = 5 * GIB
    fleet.settle()
    fleet.a.foreign_bytes = 0
    fleet.a.restart_sampler()
    fleet.settle()
    assert set(fleet.starts()) == {"b/0/100"}
    assert fleet.excluded() == {"foreign_memory": 1}


def test_a_start_that_slept_is_measured_when_it_is_awake(fleet: Fleet) -> None:
    fleet.a.answer = page(BLOCKS, sleeping=True)
    fleet.settle()
    fleet.a.answer = page(BLOCKS, sleeping=False)
    fleet.settle()
    assert fleet.starts()["a/0/100"] == 2 * GIB
    assert fleet.excluded() == {"asleep": 1}


def test_an_overhead_that_the_operator_says_is_predicted_with_and_the_real_one_still_learned(
    fleet: Fleet,
) -> None:
    fleet.a.said = {"overhead_bytes": GIB}
    fleet.b.said = {"overhead_bytes": 3 * GIB}
    fleet.settle()
    assert set(fleet.starts().values()) == {2 * GIB}
    predicted = [fleet.engine(name).prediction.pool for name in "ab"]
    # (4 - 1) GiB and (4 - 3) GiB in blocks of 16 KiB.
    assert [pool and pool.num_blocks for pool in predicted] == [3 * 65_536, 65_536]
    assert [blocks_of(fleet.engine(name)) for name in "ab"] == [BLOCKS, BLOCKS]


def test_engines_of_one_sum_of_blocks_are_left_out_and_calibrate_nobody(fleet: Fleet) -> None:
    fleet.b.answer = REFUSED
    fleet.a.answer = page(BLOCKS, BLOCKS, blocks_are_shared=True)
    replica = fleet.settle()["a"]
    assert fleet.starts() == {}
    assert fleet.excluded() == {"unknown": 2}
    assert [engine.calibrated for engine in replica.engines] == [None, None]
    # Where each tells its own, one is measured beside the other.
    fleet.a.answer = page(BLOCKS, 120_000, started_at=300.0)
    replica = fleet.settle()["a"]
    assert set(fleet.starts()) == {"a/0/300", "a/1/300"}
    assert [blocks_of(engine) for engine in replica.engines] == [120_000, BLOCKS]


def test_a_server_that_tells_no_start_time_is_known_by_its_blocks(fleet: Fleet) -> None:
    fleet.b.answer = REFUSED
    fleet.a.answer = page(BLOCKS, started_at=None)
    fleet.settle()
    assert fleet.starts() == {f"a/0/{BLOCKS} blocks": 2 * GIB}
    assert fleet.engine().calibrated is None
    fleet.a.answer = page(120_000, started_at=None)
    fleet.settle()
    assert len(fleet.starts()) == 2
    assert blocks_of(fleet.engine()) == BLOCKS


def test_a_page_that_leaves_the_start_time_out_for_a_while_is_of_the_same_start(fleet: Fleet) -> None:
    fleet.b.answer = REFUSED
    fleet.settle()
    fleet.a.answer = page(BLOCKS, started_at=None)
    fleet.settle()
    assert set(fleet.starts()) == {"a/0/100"}
    assert fleet.engine().calibrated is None


def test_the_figure_is_made_anew_only_when_something_was_learned_of_its_kind(fleet: Fleet) -> None:
    fleet.settle()
    before = fleet.engine().calibrated
    assert before is not None
    fleet.tick(times=3)
    assert fleet.engine().calibrated is before
    fleet.b.said = {"version": "0.34.0"}
    fleet.b.answer = page(BLOCKS, started_at=300.0)
    fleet.settle()
    assert len(fleet.starts()) == 3
    assert fleet.engine().calibrated is before
    fleet.b.said = {}
    fleet.b.answer = page(110_000, started_at=400.0)
    fleet.settle()
    after = fleet.engine().calibrated
    assert after is not None
    assert after.learned.samples == 2
    assert blocks_of(fleet.engine()) == (BLOCKS + 110_000) // 2


def test_facts_that_change_make_the_sample_anew(fleet: Fleet) -> None:
    fleet.settle()
    fleet.a.said = {"weights_bytes": GIB // 2}
    # A reload replaces the sampler, which asks for everything anew.
    fleet.a.restart_sampler()
    fleet.settle()
    assert fleet.starts()["a/0/100"] == 2 * GIB + GIB // 2


def test_facts_that_are_others_after_a_source_was_away_make_the_sample_anew(fleet: Fleet) -> None:
    fleet.settle()
    fleet.a.answer = REFUSED
    fleet.a.said = {"weights_bytes": GIB // 2}
    fleet.tick()
    fleet.a.answer = page(BLOCKS)
    fleet.settle()
    assert fleet.starts()["a/0/100"] == 2 * GIB + GIB // 2
