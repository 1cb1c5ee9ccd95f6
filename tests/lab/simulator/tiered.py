"""A simulated day with tiers of several sizes: what each found, and what the figures of one of them say of the others."""

import random
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from kvheadroom.capacity.expected_hits import learn
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.capacity.reuse import Reuse, ReuseQuestion, TierContent, TierSize
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.production import ENGINE, POOL_TOKENS, SESSIONS, SPEED, STARTS_AT, WORKDAYS
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.workload import DAY_SECONDS, LogNormal, WorkdayArrivals, Workdays
from kvheadroom.monitor.history import EngineHistory
from kvheadroom.monitor.reuse_learner import ReuseLearner
from kvheadroom.sources.vllm_metrics import parse_page

PAGE_SECONDS = 60.0
CHUNK_BYTES = 3_052_800
"""Of a block of GLM-5.3: 64 tokens of 47,700 B."""


@dataclass(frozen=True)
class TieredDay:
    """One simulated day.

    Attributes:
        found_ratio: of its prompt tokens.
        learner: that saw its pages.
    """

    tier_chunks: int
    found_ratio: float
    learner: ReuseLearner

    def expected(self, sizes: Iterable[int]) -> Reuse:
        """What its pages say of tiers of so many chunks."""
        question = ReuseQuestion(
            pool_tokens=POOL_TOKENS - ENGINE.block_size,
            tier=TierContent(tokens=self.tier_chunks * ENGINE.block_size, stores_answers=False),
            sizes=tuple(
                TierSize(bytes=size * CHUNK_BYTES, tokens=size * ENGINE.block_size) for size in sizes
            ),
        )
        reuse = learn(self.learner.stretches(), question)
        assert isinstance(reuse, Reuse)
        return reuse


def simulate_day(workdays: Workdays, tier_chunks: int) -> TieredDay:
    """One day, with a page each minute."""
    settings = replace(ENGINE, tier_chunks=tier_chunks, chunk_bytes=CHUNK_BYTES if tier_chunks else 0)
    arrivals = WorkdayArrivals(
        replace(workdays, num_days=1), starts_at=STARTS_AT, pool_tokens=POOL_TOKENS, speed=SPEED
    )
    run = Run(settings, arrivals, SPEED, starts_at=STARTS_AT)
    pages = Pages(settings, model_name="GLM-5.3", starts_at=STARTS_AT)
    history, learner = EngineHistory(PAGE_SECONDS), ReuseLearner((), _never)
    at = STARTS_AT
    while at < STARTS_AT + DAY_SECONDS:
        at += PAGE_SECONDS
        run.advance(at)
        page = parse_page(pages.text(run).encode())
        assert isinstance(page, VllmPage)
        goes_on = history.add(page.engines[0], at, STARTS_AT)
        assert history.last is not None
        learner.see(history.last, goes_on=goes_on)
    return TieredDay(tier_chunks, run.meters.cached_tokens / run.meters.prompt_tokens, learner)


def _never(*_: Any) -> Future[Reuse | str]:
    raise AssertionError("nobody asks")


def some_workday(rng: random.Random, most: float) -> Workdays:
    """Coding sessions with pauses from a minute to half an hour, whose histories are up to so many times the pool."""
    peak = rng.uniform(0.3, most)
    sessions = replace(
        SESSIONS,
        human_share=rng.uniform(0.1, 0.5),
        human_seconds=LogNormal(median=60.0 * 25.0 ** rng.random(), sigma=rng.uniform(0.5, 1.5)),
        tool_seconds=LogNormal(median=rng.uniform(2.0, 15.0), sigma=1.0),
    )
    return replace(
        WORKDAYS, sessions=sessions, lowest_peak=peak, highest_peak=peak + 0.3, seed=rng.randrange(10**6)
    )
