"""Hand-made histories, short to write."""

from collections.abc import Sequence

from kvheadroom.lab.backtest.events import EngineSample, Episode, Stretch


def samples(
    preemptions: Sequence[float | None],
    *,
    running: Sequence[float | None] | None = None,
    waiting: Sequence[float | None] | None = None,
    finished: Sequence[float | None] | None = None,
    usage: Sequence[float | None] | None = None,
    every_seconds: float = 1.0,
) -> tuple[EngineSample, ...]:
    """A sample every so often; what is not said stays the same all the time."""
    same = [0.0] * len(preemptions)
    rows = zip(preemptions, running or same, waiting or same, finished or same, usage or same, strict=True)
    return tuple(
        EngineSample(
            at=number * every_seconds,
            preemptions_total=count,
            requests_running=run,
            requests_waiting=wait,
            finished_total=done,
            kv_usage_ratio=use,
        )
        for number, (count, run, wait, done, use) in enumerate(rows)
    )


def seen(starts_at: float, ends_at: float) -> Stretch:
    """A stretch of which only the ends matter."""
    return Stretch((EngineSample(at=starts_at), EngineSample(at=ends_at)))


def episode(*events: float) -> Episode:
    return Episode(events)


def firing(text: str) -> list[bool | None]:
    """`.` silent, `#` firing, `?` not known; a letter per tick."""
    return [{".": False, "#": True, "?": None}[letter] for letter in text]
