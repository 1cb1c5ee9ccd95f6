"""When the next preemption will come, for who knows how long every answer is: what no forecast from outside can beat by much.

The oracle knows what is in the engine to the last block, and the length of every answer and the patience of every client that
is here. It knows nothing of requests that are still to come, so it is no seer: docs/simulator.md.
"""

from collections.abc import Sequence

from kvheadroom.lab.simulator.run import Run

_LOOK_SECONDS = 15.0
"""How far the copy runs on before it is asked whether anything was preempted."""


class Oracle:
    """Asked at every page of a run.

    Attributes:
        horizon_seconds: how far it looks ahead.
        answers: seconds from each page to the next preemption; None where none comes within the horizon.
    """

    def __init__(self, horizon_seconds: float) -> None:
        self.horizon_seconds = horizon_seconds
        self.answers: list[float | None] = []

    def watch(self, run: Run, at: float) -> None:
        """Keep the answer of this page."""
        self.answers.append(seconds_to_preemption(run, at, self.horizon_seconds))


def seconds_to_preemption(run: Run, at: float, horizon_seconds: float) -> float | None:
    """How long until the engine preempts if nothing new arrives; None where it does not within the horizon.

    What the step under way preempted is past. A preemption is dated to the begin of the step that needed the blocks; the page
    tells it when that step is over, or later (`v1/metrics/stats.py` of vLLM 0.33.0).

    Args:
        run: which stays as it is.
        at: now, unix seconds, as far as `run` has advanced.
    """
    if run.fits_at_full_length():
        # Most pages are such: no need of a copy.
        return None
    alone, end, until = run.alone(), at + horizon_seconds, at
    while until < end and not alone.fits_at_full_length():
        until = min(until + _LOOK_SECONDS, end)
        alone.advance(until)
        if alone.preempted_at:
            return alone.preempted_at[0] - at
    return None


def fires_within(answers: Sequence[float | None], seconds: float) -> list[bool]:
    """The oracle as a signal: whether at each page a preemption is so near."""
    return [answer is not None and answer <= seconds for answer in answers]
