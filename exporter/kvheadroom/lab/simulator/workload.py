"""Coding sessions that arrive over working days: each request sends the whole history and something new."""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvheadroom.lab.simulator.block_pool import Chain
from kvheadroom.lab.simulator.engine import Request
from kvheadroom.lab.simulator.speeds import ConstantRates

DAY_SECONDS = 86_400.0
_MEAN_OF_SESSIONS = 4_000
"""So many sessions are drawn to know what one holds on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A lognormal distribution.

    Attributes:
        median: half of the values are below.
        sigma: of the logarithms.
    """

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return self.median * math.exp(rng.gauss(0.0, self.sigma))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingSessions:
    """What sessions are like; times in seconds.

    Attributes:
        final_tokens: a session ends when its history has so many tokens, drawn within `shortest` and `longest`.
        first_tokens: of its first prompt.
        new_tokens: that each later request adds, a tool's result or a message.
        output_tokens: of each answer.
        tool_seconds: from an answer to the next request.
        human_seconds: the same where a human reads first.
        human_share: of the answers.
        max_tokens: what requests ask for.
        patience_seconds: a client that has no token by then goes away, and its session ends.
    """

    final_tokens: LogNormal
    shortest_final_tokens: int
    longest_final_tokens: int
    first_tokens: LogNormal
    new_tokens: LogNormal
    output_tokens: LogNormal
    tool_seconds: LogNormal
    human_seconds: LogNormal
    human_share: float
    max_tokens: int
    patience_seconds: float

    def turns(self, rng: random.Random) -> Iterator["Turn"]:
        """The requests of one session."""
        final = 0.0
        while not self.shortest_final_tokens <= final <= self.longest_final_tokens:
            final = self.final_tokens.draw(rng)
        num_prompt_tokens, num_prefix_tokens = max(1, int(self.first_tokens.draw(rng))), 0
        while True:
            num_output_tokens = min(max(1, int(self.output_tokens.draw(rng))), self.max_tokens)
            by_human = rng.random() < self.human_share
            pause = (self.human_seconds if by_human else self.tool_seconds).draw(rng)
            num_new_tokens = max(1, int(self.new_tokens.draw(rng)))
            history = num_prompt_tokens + num_output_tokens
            if history + num_new_tokens >= final:
                yield Turn(num_prompt_tokens, num_prefix_tokens, num_output_tokens, None)
                return
            yield Turn(num_prompt_tokens, num_prefix_tokens, num_output_tokens, pause)
            num_prompt_tokens, num_prefix_tokens = history + num_new_tokens, history


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        num_prefix_tokens: of the prompt, those of the session's history.
        pause_seconds: from its end to the next one, None after the last.
    """

    num_prompt_tokens: int
    num_prefix_tokens: int
    num_output_tokens: int
    pause_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workdays:
    """How many sessions arrive when.

    Attributes:
        num_days: all of them working days.
        lowest_peak, highest_peak: the day's peak demand, drawn evenly between them: tokens of all open sessions as a share
            of the pool, on average and if nothing had to wait.
    """

    sessions: CodingSessions
    num_days: int
    lowest_peak: float
    highest_peak: float
    seed: int


def day_shape(seconds: float) -> float:
    """Arrivals at a time of day as a share of the day's peak: a night with few, a peak before noon and one after."""
    hour = seconds / 3600.0 % 24.0
    morning = math.exp(-0.5 * ((hour - 10.5) / 1.5) ** 2)
    afternoon = math.exp(-0.5 * ((hour - 15.5) / 1.5) ** 2)
    return 0.05 + 0.95 * max(morning, afternoon)


class WorkdayArrivals:
    """The requests of all sessions; the next one of a session comes when its client has the answer and has paused.

    Attributes:
        peaks: of each day, as `Workdays` describes them.
    """

    def __init__(
        self, workdays: Workdays, *, starts_at: float, pool_tokens: int, speed: ConstantRates
    ) -> None:
        """Draw the days.

        Args:
            starts_at: unix seconds of the first midnight.
            pool_tokens: that the peaks are shares of.
            speed: that sessions have if nothing has to wait.
        """
        self._workdays = workdays
        self._starts_at = starts_at
        rng = random.Random(f"{workdays.seed}/days")  # noqa: S311 - a simulation
        self.peaks = tuple(
            rng.uniform(workdays.lowest_peak, workdays.highest_peak) for _ in range(workdays.num_days)
        )
        self._sessions_per_second = pool_tokens / mean_token_seconds(workdays.sessions, workdays.seed, speed)
        """That keep as many tokens open as the pool has."""
        self._rng = random.Random(f"{workdays.seed}/arrivals")  # noqa: S311
        self._num_sessions = 0
        self._due: list[tuple[float, int, _Session]] = []
        self._open: dict[Request, _Session] = {}
        self._add_session(0.0)

    def next_at(self) -> float | None:
        """When the next request is sent, as far as it is known."""
        return self._due[0][0] if self._due else None

    def take(self) -> Request:
        """The next one."""
        at, _, session = heapq.heappop(self._due)
        if not session.turn_number:
            self._add_session(at - self._starts_at)
        turn = session.turn
        sessions = self._workdays.sessions
        request = Request(
            session=f"s{session.number}",
            turn=session.turn_number,
            chain=session.chain,
            arrived_at=at,
            num_prompt_tokens=turn.num_prompt_tokens,
            num_prefix_tokens=turn.num_prefix_tokens,
            output_end=turn.num_output_tokens,
            max_tokens=sessions.max_tokens,
            ends_by="length" if turn.num_output_tokens == sessions.max_tokens else "stop",
            leaves_at=at + sessions.patience_seconds,
        )
        session.turn_number += 1
        self._open[request] = session
        return request

    def leaves(self, request: Request) -> bool:
        """Who still waits for a first token loses patience."""
        return request.first_token_at is None

    def ended(self, request: Request, at: float, *, left: bool) -> None:
        """The client has the answer, or went away for good."""
        session = self._open.pop(request)
        pause_seconds = session.turn.pause_seconds
        if not left and pause_seconds is not None:
            session.turn = next(session.turns)
            heapq.heappush(self._due, (at + pause_seconds, session.number, session))

    def _add_session(self, after: float) -> None:
        """The next new session, by thinning of a Poisson process."""
        end = self._workdays.num_days * DAY_SECONDS
        most = self._sessions_per_second * self._workdays.highest_peak
        at = after
        while True:
            at += self._rng.expovariate(most)
            if at >= end:
                return
            rate = self._sessions_per_second * self.peaks[int(at // DAY_SECONDS)] * day_shape(at)
            if self._rng.random() * most < rate:
                break
        self._num_sessions += 1
        session = _Session(self._workdays, self._num_sessions)
        heapq.heappush(self._due, (self._starts_at + at, session.number, session))


class _Session:
    __slots__ = ("chain", "number", "turn", "turn_number", "turns")

    def __init__(self, workdays: Workdays, number: int) -> None:
        self.number = number
        self.chain = Chain()
        self.turns = workdays.sessions.turns(random.Random(f"{workdays.seed}/session/{number}"))  # noqa: S311
        self.turn = next(self.turns)
        self.turn_number = 0


def mean_token_seconds(sessions: CodingSessions, seed: int, speed: ConstantRates) -> float:
    """Tokens of a session's history x the time it has them, over the session, pauses included, if nothing has to wait."""
    total = 0.0
    rng = random.Random(f"{seed}/mean")  # noqa: S311 - a simulation
    for _ in range(_MEAN_OF_SESSIONS):
        for turn in sessions.turns(rng):
            busy = (turn.num_prompt_tokens - turn.num_prefix_tokens) / speed.prefill_tokens_per_second
            busy += turn.num_output_tokens / speed.decode_tokens_per_second
            total += (turn.num_prompt_tokens + turn.num_output_tokens) * (busy + (turn.pause_seconds or 0.0))
    return total / _MEAN_OF_SESSIONS
