"""A simulated engine under load: time goes from one end of a step to the next."""

import heapq
import itertools
from copy import copy, deepcopy
from typing import NoReturn, Protocol

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.simulator.engine import EngineSettings, Request, Told
from kvheadroom.lab.simulator.meters import Meters
from kvheadroom.lab.simulator.scheduler import Scheduler, Step


class Arrivals(Protocol):
    """Where requests come from, and where their ends are told."""

    def next_at(self) -> float | None:
        """When the next one arrives; None if no other does before one that is here has ended."""

    def take(self) -> Request:
        """The next one."""

    def leaves(self, request: Request) -> bool:
        """Whether the client goes away, now that its request's `leaves_at` has come."""

    def ended(self, request: Request, at: float, *, left: bool) -> None:
        """A request ended, or its client went away, so that the client can go on."""


class Speed(Protocol):
    """How fast the engine computes."""

    @property
    def decode_seconds(self) -> float | None:
        """Of a step that only decodes; None where it depends on more."""

    def step_end(self, begins_at: float, step: Step) -> float:
        """When a step is over."""


class Run:
    """One engine from its start on; times in seconds.

    Attributes:
        told: the gauges, as of the end of the last step.
        meters: the counters and histograms.
        num_steps: so far.
        preempted_at: when each step began that preempted something, in order.
    """

    def __init__(
        self, settings: EngineSettings, arrivals: Arrivals, speed: Speed, *, starts_at: float
    ) -> None:
        self.told = Told()
        self.meters = Meters(settings.max_model_len)
        self.num_steps = 0
        self.preempted_at: list[float] = []
        self._settings = settings
        self._arrivals = arrivals
        self._speed = speed
        self._scheduler = Scheduler(settings)
        self._now = self._step_ends_at = starts_at
        self._step: Step | None = None
        self._leaving: list[tuple[float, int, Request]] = []
        self._order = itertools.count()

    def advance(self, until: float) -> None:
        """Let time go on: every step that is over at `until` is accounted for.

        Raises:
            OperatorError: a request is longer than the engine takes.
        """
        scheduler = self._scheduler
        while True:
            if self._step is not None:
                if self._step_ends_at > until:
                    return
                self._finish_step(self._step)
            self._take_arrivals()
            if not scheduler.running and not scheduler.waiting:
                next_at = self._arrivals.next_at()
                if next_at is None or next_at > until:
                    return
                self._now = max(self._now, next_at)
            elif not self._decode_many(until):
                self._step = scheduler.schedule()
                if self._step.num_preempted:
                    self.preempted_at.append(self._now)
                self._step_ends_at = self._speed.step_end(self._now, self._step)

    def fits_at_full_length(self) -> bool:
        """Whether nothing can be preempted before something new arrives, however long the answers are."""
        return self._scheduler.fits_at_full_length()

    def alone(self) -> "Run":
        """A copy of this run that goes on as if nothing new arrived, its counters begun anew; this one stays as it is."""
        alone = Run(self._settings, _NothingNew(self._arrivals), copy(self._speed), starts_at=self._now)
        leaving = [one for one in self._leaving if not one[2].has_ended]
        heapq.heapify(leaving)
        # One call, so that a request is the same one in the queues, in the step and among those that may leave.
        alone._scheduler, alone._step, alone._leaving = deepcopy(
            (self._scheduler, self._step, leaving), {id(self._settings): self._settings}
        )
        alone._step_ends_at, alone.told = self._step_ends_at, self.told
        return alone

    def _take_arrivals(self) -> None:
        """What the engine's input queue holds before a step: new requests, and those whose clients went away."""
        while (at := self._arrivals.next_at()) is not None and at <= self._now:
            request = self._arrivals.take()
            if request.num_prompt_tokens + request.output_end > self._settings.longest_tokens:
                raise OperatorError(
                    f"session {request.session}, turn {request.turn}: {request.num_prompt_tokens} tokens and "
                    f"{request.output_end} of output are more than the engine takes"
                )
            self._scheduler.add(request)
            if request.leaves_at is not None:
                heapq.heappush(self._leaving, (request.leaves_at, next(self._order), request))
        has_left = False
        while self._leaving and self._leaving[0][0] <= self._now:
            request = heapq.heappop(self._leaving)[2]
            if not request.has_ended and self._arrivals.leaves(request):
                # vLLM's front end forgets such a request; no counter or histogram tells of it.
                self._end(request, left=True)
                has_left = True
        if has_left:
            self._tell()

    def _decode_many(self, until: float) -> bool:
        """Do at once the steps that only decode and are over before anything else happens; False if there are none."""
        seconds = self._speed.decode_seconds
        if seconds is None:
            return False
        next_at = self._arrivals.next_at()
        ends_by = until if next_at is None else min(until, next_at)
        if self._leaving:
            ends_by = min(ends_by, self._leaving[0][0])
        most = int((ends_by - self._now) / seconds)
        num_steps = self._scheduler.decode_steps(most) if most > 0 else 0
        if not num_steps:
            return False
        self._scheduler.decode(num_steps)
        self.num_steps += num_steps
        self._now += num_steps * seconds
        self.meters.generation_tokens += num_steps * len(self._scheduler.running)
        self._end_finished(self._scheduler.running)
        return True

    def _finish_step(self, step: Step) -> None:
        self._step, self._now = None, self._step_ends_at
        self.num_steps += 1
        self.meters.preemptions += step.num_told
        outputs = self._scheduler.finish_step(step)
        for request in outputs:
            self.meters.preemptions += request.num_untold
            request.num_untold = 0
            if request.first_token_at is None:
                request.first_token_at = self._now
                self.meters.first_token(request, self._now)
        self.meters.generation_tokens += len(outputs)
        self._end_finished(outputs)

    def _end_finished(self, requests: list[Request]) -> None:
        for request in [one for one in requests if one.num_output_tokens >= one.output_end]:
            self._end(request, left=False)
            self.meters.ended(request, self._now)
        self._tell()

    def _end(self, request: Request, *, left: bool) -> None:
        request.has_ended = True
        self._scheduler.remove(request)
        self._arrivals.ended(request, self._now, left=left)

    def _tell(self) -> None:
        scheduler = self._scheduler
        self.told = Told(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_used=scheduler.pool.num_usable - scheduler.pool.num_free,
            queries=scheduler.queries,
            hits=scheduler.hits,
            external_queries=scheduler.external_queries,
            external_hits=scheduler.external_hits,
            stored_chunks=scheduler.tier.num_stored,
            loaded_chunks=scheduler.tier.num_loaded,
            refused_stores=scheduler.tier.num_refused,
        )


class _NothingNew:
    """No request comes; the clients of those that are here lose patience as they would."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.leaves = arrivals.leaves

    def next_at(self) -> float | None:
        return None

    def take(self) -> NoReturn:
        raise AssertionError("nothing new arrives")

    def ended(self, request: Request, at: float, *, left: bool) -> None:
        """Nobody goes on."""
