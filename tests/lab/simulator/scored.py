"""What warns of a simulated engine's preemptions, held against simple rules and against the oracle: one table."""

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvheadroom.lab.backtest.alarms import Score, score
from kvheadroom.lab.backtest.events import PRODUCTION, Episode, Scale
from kvheadroom.lab.backtest.forecasts import forecasts
from kvheadroom.lab.backtest.histories import EngineHistory, History
from kvheadroom.lab.backtest.results import BASELINE, FORECAST, EngineResult, Firing
from kvheadroom.lab.simulator.oracle import fires_within

ORACLE, HINDSIGHT = "oracle", "hindsight"
THRESHOLDS = tuple(tenth / 10 for tenth in range(1, 10))
"""At which a probability is taken for an alarm, to compare it at the false alarms of another signal."""
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    kind: str
    score: Score
    days: float

    @property
    def median_lead_seconds(self) -> float | None:
        """Of the episodes that it warned of."""
        leads = [one.lead_seconds for one in self.score.warned]
        return statistics.median(leads) if leads else None

    @property
    def false_per_day(self) -> float:
        return self.score.false_alarms / self.days


def rows(
    history: History, result: EngineResult, answers: Sequence[float | None], scale: Scale = PRODUCTION
) -> list[Row]:
    """Everything that was scored, then probabilities at other thresholds, the oracle, and who knows what really came.

    Args:
        result: of the only engine of `history`.
        answers: the oracle's, one for each tick.
    """
    [engine] = history.engines
    episodes = result.episodes or ()
    days = history.duration_seconds / DAY_SECONDS

    def row(name: str, kind: str, firing: Firing) -> Row:
        assert len(firing) == history.num_ticks
        figures = score(
            firing,
            episodes,
            every_seconds=history.every_seconds,
            scale=scale,
            stretches=engine.stretches,
        )
        return Row(name=name, kind=kind, score=figures, days=days)

    found = [
        Row(name=signal.name, kind=signal.kind, score=signal.score, days=days)
        for signal in result.signals
        if signal.score is not None
    ]
    found += [row(name, FORECAST, firing) for name, firing in _other_thresholds(history, engine, scale)]
    span = f"{scale.horizon_seconds:g}s"
    found.append(row(f"oracle within {span}", ORACLE, fires_within(answers, scale.horizon_seconds)))
    came = [event for episode in episodes for event in episode.events]
    found.append(row(f"what came within {span}", HINDSIGHT, _followed(came, history, scale.horizon_seconds)))
    return found


def _other_thresholds(
    history: History, engine: EngineHistory, scale: Scale
) -> Iterator[tuple[str, list[bool | None]]]:
    for forecast in forecasts(history, engine, scale):
        for threshold in THRESHOLDS if forecast.probabilities else ():
            yield (
                f"probability within {forecast.horizon_seconds:g}s >= {threshold:g}",
                [
                    None if tick is None else value is not None and value >= threshold
                    for tick, value in zip(engine.ticks, forecast.probabilities, strict=True)
                ],
            )


def _followed(events: Sequence[float], history: History, horizon_seconds: float) -> list[bool]:
    fires = []
    for tick in range(history.num_ticks):
        at = tick * history.every_seconds
        following = bisect_right(events, at)
        fires.append(following < len(events) and events[following] - at <= horizon_seconds)
    return fires


def blind_leads(
    history: History, episodes: Sequence[Episode], usage_above: float, horizon_seconds: float
) -> list[float | None]:
    """Seconds from every page with so high a usage, outside an episode, to the next episode; None where none comes in time.

    What an alarm reaches that goes off at random while the engine is busy.
    """
    [engine] = history.engines
    firsts = [episode.preempted_at for episode in episodes]
    leads: list[float | None] = []
    for tick in engine.ticks:
        if tick is None or tick.kv_usage_ratio is None or tick.kv_usage_ratio <= usage_above:
            continue
        begun = bisect_right(firsts, tick.at)
        if begun and tick.at <= episodes[begun - 1].last_at:
            continue
        comes = begun < len(firsts) and firsts[begun] - tick.at <= horizon_seconds
        leads.append(firsts[begun] - tick.at if comes else None)
    return leads


def best_baseline(found: Sequence[Row]) -> Row:
    """The simple rule that warns of most episodes; of two alike, the one with fewer false alarms."""
    return max(
        (row for row in found if row.kind == BASELINE),
        key=lambda row: (len(row.score.warned), -row.score.false_alarms),
    )


def table(found: Sequence[Row], episodes: Sequence[Episode]) -> Iterator[str]:
    """One line a signal; its lead also as a share of the best simple rule's and of the oracle's."""
    best = best_baseline(found)
    [oracle] = (row for row in found if row.kind == ORACLE)
    heads = ("signal", "warned", "median lead", "false/day", "late", "firing", "x best rule", "x oracle")
    cells = [
        (
            row.name if row.kind == BASELINE else f"{row.kind} {row.name}".replace("oracle oracle", "oracle"),
            f"{len(row.score.warned)}/{len(episodes)}",
            "–" if row.median_lead_seconds is None else f"{row.median_lead_seconds:.1f} s",
            f"{row.false_per_day:.2f}",
            str(row.score.started_late),
            f"{row.score.time_firing_ratio or 0.0:.1%}",
            _times(row, best),
            _times(row, oracle),
        )
        for row in found
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, *cells):
        rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        yield "  ".join([line[0].ljust(widths[0]), *rest])
    yield f"best rule: {best.name}, it warns of most episodes"
    for row in found:
        if row.kind == FORECAST:
            within = row.false_per_day <= best.false_per_day
            yield (
                f"{row.name}: {_times(row, best)} x the lead of the best rule (2 are asked for), "
                f"{'at no more' if within else 'at MORE'} false alarms; {_times(row, oracle)} x the oracle's (0.7); "
                f"{row.false_per_day:.2f} false a day (1)"
            )


def _times(row: Row, other: Row) -> str:
    lead, to = row.median_lead_seconds, other.median_lead_seconds
    return "–" if lead is None or not to else f"{lead / to:.2f}"
