"""What one engine's past tells of reuse: the stretches of the last day, and what was learned of them beside the ticks."""

import logging
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.expected_hits import learn
from kvheadroom.capacity.history import Moment, growth
from kvheadroom.capacity.reuse import (
    LEAST_STRETCHES,
    MOST_STRETCHES,
    STRETCH_SECONDS,
    Reuse,
    ReuseQuestion,
    Stretch,
    TierContent,
    stretch_of,
)
from kvheadroom.capacity.tier_sizes import ask

LearnLater: TypeAlias = Callable[
    [Callable[[list[Stretch], ReuseQuestion], Reuse | str], list[Stretch], ReuseQuestion],
    "Future[Reuse | str]",
]
"""`submit` of an executor."""
log = logging.getLogger(__name__)
LEARN_EVERY = 6
"""Stretches: an hour. Learning takes some tenths of a second."""

_WIDTH = len(Stretch._fields)


class ReuseLearner:
    """Of one engine.

    Attributes:
        reuse: what was learned last; a string says why nothing is known.

    Args:
        tier_bytes: sizes of a tier in host memory to say the expected hits of.
    """

    def __init__(self, tier_bytes: tuple[int, ...], later: LearnLater) -> None:
        self._tier_bytes = tier_bytes
        self._later = later
        self._first: Moment | None = None
        self._follows = False
        self._usage = self._waiting = 0.0
        self._num_scrapes = 0
        self._stretches = array("d")
        self._wait = 0
        """Stretches until there is to be learned again."""
        self._num_blocks: int | None = None
        self._tier: TierContent | None = None
        self._learning: Future[Reuse | str] | None = None
        self.reuse: Reuse | str = "nothing was learned so far"

    def see(self, now: Moment, *, goes_on: bool) -> None:
        """One scrape more.

        Args:
            goes_on: it follows the one before, of the same run of the server, after a gap perhaps.
        """
        usage, waiting = now.of("kv_usage_ratio"), now.of("requests_waiting")
        if not goes_on or usage is None:
            self._first, self._follows = None, False
        if not goes_on:
            # A server that was started again may have another tier.
            self._wait = min(self._wait, 1)
        if usage is None:
            return
        if self._first is None:
            self._begin(now)
            return
        self._usage += usage
        self._waiting += waiting or 0.0
        self._num_scrapes += 1
        if now.taken_at - self._first.taken_at >= STRETCH_SECONDS:
            self._end(self._first, now)
            self._begin(now)

    def assessed(self, assessment: Assessment) -> None:
        """Take what was learned meanwhile, and learn again when it is time."""
        num_blocks = assessment.snapshot.num_blocks
        # A page that leaves it out for once is of the same pool.
        if num_blocks not in (None, self._num_blocks):
            self._forget()
            self._num_blocks = num_blocks
        if self._learning is not None and self._learning.done():
            learned, self._learning = self._learning, None
            self.reuse = _told(learned)
        if self._wait > 0 or self._learning is not None:
            return
        question = ask(assessment.facts, assessment.warmth.tiers, self._tier_bytes)
        if isinstance(question, str):
            self.reuse = question
            self._wait = 1
            return
        if self._tier not in (None, question.tier):
            self._forget()
        self._tier = question.tier
        stretches = self.stretches()
        self._wait = LEARN_EVERY if len(stretches) >= LEAST_STRETCHES else 1
        self._learning = self._later(learn, stretches, question)

    def _forget(self) -> None:
        """What another pool or tier found says at which age that one was, not this one."""
        del self._stretches[:]
        self._wait, self._learning = 0, None

    def _begin(self, now: Moment) -> None:
        self._first, self._usage, self._waiting, self._num_scrapes = now, 0.0, 0.0, 0

    def _end(self, first: Moment, now: Moment) -> None:
        one = stretch_of(
            growth(first, now),
            usage=self._usage / self._num_scrapes,
            waiting=self._waiting / self._num_scrapes,
            follows=self._follows,
        )
        self._follows = one is not None
        if one is None:
            return
        self._stretches.extend(one)
        if len(self._stretches) > MOST_STRETCHES * _WIDTH:
            del self._stretches[:_WIDTH]
        self._wait -= 1

    def stretches(self) -> list[Stretch]:
        """Of the last day, oldest first."""
        figures = self._stretches
        return [
            Stretch._make(figures[place : place + _WIDTH])._replace(
                follows=figures[place + _WIDTH - 1] == 1.0
            )
            for place in range(0, len(figures), _WIDTH)
        ]


def _told(learned: "Future[Reuse | str]") -> Reuse | str:
    error = learned.exception()
    if error is None:
        return learned.result()
    log.error("nothing can be learned of an engine's past, please report it", exc_info=error)
    return f"a fault of kvheadroom: {error!r}"
