"""How full one engine's pool was over the last hour, as it is drawn."""

import math
from dataclasses import dataclass
from itertools import pairwise

from kvheadroom.capacity.assessment import Assessment


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCourse:
    """The KV usage of one engine, one scrape a minute and the newest.

    Attributes:
        points: (seconds before now, at most 0; usage 0-1), oldest first; at least two.
        seconds: how far back they reach.
        least_ratio, most_ratio: of these scrapes; between two of them it may have been less or more.
        preemptions: counted since the first of them; None where the page does not tell them at both ends.
        preempted: seconds before now, of each scrape that counted more than the one before.
    """

    points: tuple[tuple[float, float], ...]
    seconds: float
    least_ratio: float
    most_ratio: float
    preemptions: float | None
    preempted: tuple[float, ...]


def usage_course(engine: Assessment, now: float) -> UsageCourse | None:
    """None where fewer than two scrapes of the same run tell the usage."""
    past, usage = engine.last_hour, engine.snapshot.kv_usage_ratio
    # What is not a number is not equal to itself either.
    points = [
        (at - now, ratio)
        for at, ratio in zip(past.times, past.kv_usage_ratios, strict=True)
        if ratio == ratio  # noqa: PLR0124
    ]
    if usage is not None and (not past.times or engine.taken_at > past.times[-1]):
        points.append((engine.taken_at - now, usage))
    if len(points) < 2:
        return None
    ratios = [ratio for _, ratio in points]
    times = [*past.times, engine.taken_at]
    counted = engine.snapshot.preemptions_total
    counts = [*past.preemptions_totals, math.nan if counted is None else counted]
    return UsageCourse(
        points=tuple(points),
        seconds=-points[0][0],
        least_ratio=min(ratios),
        most_ratio=max(ratios),
        preemptions=None if math.isnan(counts[-1] - counts[0]) else counts[-1] - counts[0],
        preempted=tuple(
            [
                at - now
                for at, (before, after) in zip(times[1:], pairwise(counts), strict=True)
                if after > before
            ]
        ),
    )
