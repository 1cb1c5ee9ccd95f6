"""How fast a simulated engine computes: at constant rates, or as fast as a recording shows that it did."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.recordings import Recording
from kvheadroom.lab.simulator.scheduler import Step
from kvheadroom.sources.vllm_metrics import parse_page

SHORTEST_STEP_SECONDS = 0.0005
"""Of a step whose time is not known; where the simulated engine is behind the recorded one, it catches up at this pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantRates:
    """A step takes the time of its prompts' tokens, or that of one token where anything decodes, whichever is longer.

    Attributes:
        prefill_tokens_per_second: of the engine.
        decode_tokens_per_second: of each session.
    """

    prefill_tokens_per_second: float
    decode_tokens_per_second: float

    @property
    def decode_seconds(self) -> float:
        """Of a step that only decodes."""
        return _exact(1.0 / self.decode_tokens_per_second)

    def step_end(self, begins_at: float, step: Step) -> float:
        """When a step is over."""
        decodes = self.decode_seconds if step.num_decodes else 0.0
        return begins_at + max(_exact(step.num_prefill_tokens / self.prefill_tokens_per_second), decodes)


def _exact(seconds: float) -> float:
    """The nearest time that today's unix seconds can be told apart by.

    Sums of such are exact, so it makes no difference how many steps are taken at once.
    """
    return round(seconds * 2.0**22) / 2.0**22


class RecordedRates:
    """The n-th token is there when the recorded engine had generated n.

    A step that gives tokens ends when the recording's `generation_tokens_total`, taken as linear from scrape to scrape,
    reaches the simulated one; a step that gives none takes no time to speak of.
    """

    decode_seconds = None

    def __init__(self, taken_at: Sequence[float], generated: Sequence[float]) -> None:
        """Rates between scrapes.

        Args:
            taken_at: unix seconds of the scrapes.
            generated: tokens since the first scrape.
        """
        self._taken_at = taken_at
        self._generated = generated
        self._num_tokens = 0

    def step_end(self, begins_at: float, step: Step) -> float:
        """When a step is over; what comes after the recording takes no time to speak of either."""
        soonest = begins_at + SHORTEST_STEP_SECONDS
        if not step.num_outputs:
            return soonest
        self._num_tokens += step.num_outputs
        return max(soonest, self._reached_at(self._num_tokens))

    def _reached_at(self, num_tokens: int) -> float:
        after = bisect_left(self._generated, num_tokens)
        if after == len(self._generated):
            return -math.inf
        if after == 0:
            return self._taken_at[0]
        done, then = self._generated[after - 1], self._taken_at[after - 1]
        share = (num_tokens - done) / (self._generated[after] - done)
        return then + share * (self._taken_at[after] - then)


def recorded_rates(recording: Recording) -> RecordedRates:
    """The rates of a recording of one engine.

    Raises:
        OperatorError: it does not tell them.
    """
    taken_at: list[float] = []
    generated: list[float] = []
    for offset, text in recording.pages():
        page = parse_page(text.encode())
        if not isinstance(page, VllmPage) or len(page.engines) != 1:
            raise OperatorError(f"{recording.path}: rates are taken from pages of one engine only")
        tokens = page.engines[0].generation_tokens_total
        if tokens is None or (generated and tokens < generated[-1]):
            raise OperatorError(
                f"{recording.path}: generation_tokens_total is absent or falls; no rates can be taken from it"
            )
        taken_at.append(recording.first_at + offset)
        generated.append(tokens)
    return RecordedRates(taken_at, [value - generated[0] for value in generated])
