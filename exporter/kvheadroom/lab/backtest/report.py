"""Results -> JSON, and a table for people."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvheadroom.lab.backtest.probabilities import base_rate, brier, reliability
from kvheadroom.lab.backtest.results import BASELINE, FORECAST, EngineResult, SignalResult

BASE_RATE = "always the base rate"
_MOST_PROBLEMS = 20


def as_json(results: Sequence[EngineResult]) -> dict[str, Any]:
    """What `--json` prints; seconds count from the start of the recording."""
    return {"recordings": [_recording(result) for result in results]}


def _recording(result: EngineResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "started_at": result.started_at,
        "duration_seconds": _seconds(result.duration_seconds),
        "every_seconds": result.every_seconds,
        "horizon_seconds": result.scale.horizon_seconds,
        "episode_gap_seconds": result.scale.episode_gap_seconds,
        "alarm_gap_seconds": result.scale.alarm_gap_seconds,
        "episodes": None
        if result.episodes is None
        else [_seconds(episode.preempted_at) for episode in result.episodes],
        "events": None
        if result.episodes is None
        else [_seconds(event) for episode in result.episodes for event in episode.events],
        "preemptions": None if result.episodes is None else result.preemptions,
        "signals": [_signal(signal) for signal in result.signals],
        "brier": _briers(result),
        "reliability": {
            signal.name: {
                f"{horizon:g}": [
                    {
                        "at_least": one.at_least,
                        "below": one.below,
                        "ticks": one.ticks,
                        "mean_probability": one.mean_probability,
                        "came_ratio": one.came_ratio,
                    }
                    for one in reliability(judged)
                ]
                for horizon, judged in signal.judged.items()
            }
            for signal in result.signals
            if signal.judged
        },
        "problems": list(result.problems),
    }


def _signal(signal: SignalResult) -> dict[str, Any]:
    told: dict[str, Any] = {"name": signal.name, "kind": signal.kind, "evaluated": signal.score is not None}
    figures = signal.score
    if figures is None:
        return told | {"reason": signal.why_not}
    return told | {
        "firing": [[_seconds(alarm.started_at), _seconds(alarm.ended_at)] for alarm in figures.alarms],
        "warned": [
            {
                "preempted_at": _seconds(one.preempted_at),
                "warned_at": _seconds(one.warned_at),
                "lead_seconds": _seconds(one.lead_seconds),
            }
            for one in figures.warned
        ],
        "missed": figures.missed,
        "false_alarms": figures.false_alarms,
        "started_late": figures.started_late,
        "undecided": figures.undecided,
        "time_firing_ratio": figures.time_firing_ratio,
    }


def _briers(result: EngineResult) -> dict[str, dict[str, float]]:
    """Signal -> horizon -> score, and what always saying the base rate would have scored."""
    scores: dict[str, dict[str, float]] = {}
    for signal in result.signals:
        for horizon, judged in signal.judged.items():
            value, rate = brier(judged), base_rate(judged)
            if value is not None and rate is not None:
                scores.setdefault(signal.name, {})[f"{horizon:g}"] = value
                scores.setdefault(BASE_RATE, {}).setdefault(f"{horizon:g}", rate * (1 - rate))
    return scores


def _seconds(value: float) -> float:
    """To the millisecond: scrapes are no more exact."""
    return round(value, 3)


def table(results: Sequence[EngineResult]) -> Iterator[str]:
    """What people read, one line after the other."""
    for number, result in enumerate(results):
        if number:
            yield ""
        yield from _engine_table(result)


def _engine_table(result: EngineResult) -> Iterator[str]:
    scale = result.scale
    yield (
        f"{result.name}: {_span(result.duration_seconds)}, looked at every {_span(result.every_seconds)}; "
        f"horizon {_span(scale.horizon_seconds)}"
    )
    for problem in result.problems[:_MOST_PROBLEMS]:
        yield f"  careful: {problem}"
    if len(result.problems) > _MOST_PROBLEMS:
        yield f"  careful: and {len(result.problems) - _MOST_PROBLEMS} more; --json has them all"
    if result.episodes is None:
        return
    events = sum(len(episode.events) for episode in result.episodes)
    yield (
        f"  {_count(round(result.preemptions), 'preemption')} ({_count(events, 'event')}) in "
        f"{_count(len(result.episodes), 'episode')}{_starts(result)}"
    )
    heads = ("signal", "warned", "lead", "false", "late", "open", "firing", "Brier")
    rows = [_row(signal, len(result.episodes)) for signal in result.signals if signal.score is not None]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows) if rows else ():
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        yield "  " + "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()
    rate = next((base_rate(judged) for signal in result.signals for judged in signal.judged.values()), None)
    if rate is not None:
        yield f"  Brier of always saying the base rate ({rate:.3f}): {rate * (1 - rate):.3f}"
    for signal in result.signals:
        if signal.kind == FORECAST:
            yield from _against_rules(signal, result.signals)
            yield from _reliability_lines(signal)
    for signal in result.signals:
        if signal.score is None:
            yield f"  {signal.kind} {signal.name}: not evaluated, {signal.why_not}"


def _against_rules(forecast: SignalResult, signals: Sequence[SignalResult]) -> Iterator[str]:
    """The Brier score of a forecast beside that of the best simple rule, at the forecast's horizon."""
    for horizon, judged in forecast.judged.items():
        own = brier(judged)
        rules = [
            (score, signal.name)
            for signal in signals
            if signal.kind == BASELINE and (score := brier(signal.judged.get(horizon, ()))) is not None
        ]
        if own is not None and rules:
            best, name = min(rules)
            yield f"  {forecast.name}: Brier {own:.3f}; of the simple rules, taken as 0 or 1, the best has {best:.3f} ({name})"


def _reliability_lines(signal: SignalResult) -> Iterator[str]:
    """What came of what a forecast said."""
    for judged in signal.judged.values():
        ranges = [
            f"{one.at_least:.1f}..{one.below:.1f}: {one.came_ratio:.0%} of {one.ticks:,}"
            for one in reliability(judged)
        ]
        if ranges:
            yield f"  {signal.name}: said, and of how many ticks it came: {'; '.join(ranges)}"


def _row(signal: SignalResult, episodes: int) -> tuple[str, ...]:
    figures = signal.score
    assert figures is not None  # noqa: S101  only what was evaluated has a row
    leads = sorted(one.lead_seconds for one in figures.warned)
    shown = "–" if not leads else "..".join(dict.fromkeys((f"{leads[0]:.1f}", f"{leads[-1]:.1f}"))) + " s"
    ratio = figures.time_firing_ratio
    score = next((brier(judged) for judged in signal.judged.values()), None)
    return (
        signal.name if signal.kind == BASELINE else f"{signal.kind} {signal.name}",
        f"{len(figures.warned)}/{episodes}",
        shown,
        str(figures.false_alarms),
        str(figures.started_late),
        str(figures.undecided),
        "–" if ratio is None else f"{ratio:.1%}",
        "–" if score is None else f"{score:.3f}",
    )


def _starts(result: EngineResult) -> str:
    episodes = result.episodes or ()
    if not episodes:
        return ""
    first = ", ".join(f"{episode.preempted_at:.1f}" for episode in episodes[:8])
    more = f" and {len(episodes) - 8} more" if len(episodes) > 8 else ""
    return f", starting at {first}{more} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _span(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.1f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.1f} s" if seconds % 1 else f"{seconds:.0f} s"
