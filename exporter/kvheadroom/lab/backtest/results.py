"""A history and what its rules did -> how every signal did on every engine."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvheadroom.lab.backtest.alarms import Score, score
from kvheadroom.lab.backtest.baselines import baselines
from kvheadroom.lab.backtest.events import (
    PRODUCTION,
    Episode,
    Rise,
    Scale,
    count_preemptions,
    date_rises,
    find_episodes,
)
from kvheadroom.lab.backtest.forecasts import forecasts
from kvheadroom.lab.backtest.histories import EngineHistory, History, Values
from kvheadroom.lab.backtest.probabilities import Judged, judge

ALERT, FORECAST, BASELINE = "alert", "forecast", "baseline"
Firing = Sequence[bool | None]


@dataclass(frozen=True, slots=True)
class AlertRun:
    """What Prometheus made of one alert.

    Attributes:
        firing: engine -> whether it fired at each tick.
        why_not: why it could not be evaluated; None where it was.
    """

    name: str
    firing: Mapping[str, Firing]
    why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalResult:
    """How one signal did on one engine.

    Attributes:
        kind: alert, forecast or baseline.
        score: None where it was not evaluated; `why_not` says why.
        judged: horizon in seconds -> each tick's probability and what came; a signal that fires says 1, else 0.
    """

    name: str
    kind: str
    score: Score | None
    why_not: str | None = None
    judged: Mapping[float, tuple[Judged, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One engine of one history.

    Attributes:
        name: of the history, and of the engine where the history has several.
        started_at: unix seconds of second 0, None where that is not known.
        episodes: None where the engine does not tell its preemptions: then nothing is scored.
        problems: a sentence each.
        preemptions: how many there were, several in one event perhaps.
    """

    name: str
    duration_seconds: float
    every_seconds: float
    scale: Scale
    episodes: tuple[Episode, ...] | None
    signals: tuple[SignalResult, ...]
    problems: tuple[str, ...]
    started_at: float | None = None
    preemptions: float = 0.0

    @property
    def is_scored(self) -> bool:
        """Whether every signal has a score."""
        return self.episodes is not None and all(signal.score is not None for signal in self.signals)


def score_history(history: History, alerts: Iterable[AlertRun], scale: Scale) -> tuple[EngineResult, ...]:
    """Score every signal; a history without engines gives one result with nothing in it but the reason."""
    empty = EngineResult(
        name=history.name,
        started_at=history.started_at,
        duration_seconds=history.duration_seconds,
        every_seconds=history.every_seconds,
        scale=scale,
        episodes=None,
        signals=(),
        problems=(*history.problems, f"{history.name}: no engine of vLLM was seen, so nothing is scored"),
    )
    if history.why_not is not None:
        reason = f"{history.name}: {history.why_not}, so nothing is scored"
        return (replace(empty, problems=(*history.problems, reason)),)
    if not history.engines:
        return (empty,)
    alerts = tuple(alerts)
    several = len(history.engines) > 1
    return tuple(
        _score_engine(
            replace(empty, name=f"{history.name} engine {engine.engine}" if several else history.name),
            history,
            engine,
            alerts,
        )
        for engine in history.engines
    )


def _score_engine(
    result: EngineResult, history: History, engine: EngineHistory, alerts: Sequence[AlertRun]
) -> EngineResult:
    if not engine.tells_preemptions:
        reason = f"{result.name}: its pages have no num_preemptions_total, so nothing is scored"
        return replace(result, problems=(*history.problems, reason))
    if all(stretch.starts_at == stretch.ends_at for stretch in engine.stretches):
        reason = f"{result.name}: it was seen at single instants alone, so nothing is scored"
        return replace(result, problems=(*history.problems, reason))
    every_seconds, scale = history.every_seconds, result.scale
    rises = tuple(rise for stretch in engine.stretches for rise in date_rises(stretch.samples))
    events = tuple(rise.dated_at for rise in rises)
    episodes = find_episodes(events, scale.episode_gap_seconds)

    told = tuple(forecasts(history, engine, scale))

    def said(firing: Firing) -> Mapping[float, Values]:
        """What only fires, as probabilities: at the horizon of its alarms, and to compare at those of the forecasts."""
        every_tick: Values = [None if fires is None else float(fires) for fires in firing]
        return {scale.horizon_seconds: every_tick} | {
            # A forecast is silent at some ticks, and easy ones may be among them: compared is where it said something.
            one.horizon_seconds: [
                None if forecast is None else value
                for forecast, value in zip(one.probabilities, every_tick, strict=True)
            ]
            for one in sorted(told, key=lambda one: one.horizon_seconds or 0.0)
            if one.horizon_seconds is not None
        }

    def scored(name: str, kind: str, firing: Firing, probabilities: Mapping[float, Values]) -> SignalResult:
        # Probabilities of each tick, by their horizon in seconds.
        if all(fires is None for fires in firing):
            why_not = "the engine did not tell at any tick what it needs"
            return SignalResult(name=name, kind=kind, score=None, why_not=why_not, judged={})
        judged = {
            horizon: judge(
                [(tick * every_seconds, value) for tick, value in enumerate(values)],
                events,
                horizon,
                engine.stretches,
            )
            for horizon, values in probabilities.items()
        }
        figures = score(
            firing, episodes, every_seconds=every_seconds, scale=scale, stretches=engine.stretches
        )
        return SignalResult(name=name, kind=kind, score=figures, judged=judged)

    signals: list[SignalResult] = []
    for alert in alerts:
        firing = alert.firing.get(engine.engine)
        if firing is None:
            signals.append(
                SignalResult(name=alert.name, kind=ALERT, score=None, why_not=alert.why_not, judged={})
            )
        else:
            signals.append(scored(alert.name, ALERT, firing, said(firing)))
    for one in told:
        own = {} if one.horizon_seconds is None else {one.horizon_seconds: one.probabilities}
        signals.append(scored(one.name, FORECAST, one.firing, own))
    for rule in baselines(scale):
        firing = rule.firing(engine.ticks, every_seconds)
        signals.append(scored(rule.name, BASELINE, firing, said(firing)))
    return replace(
        result,
        episodes=episodes,
        preemptions=sum(count_preemptions(stretch.samples) for stretch in engine.stretches),
        signals=tuple(signals),
        problems=(*history.problems, *_doubts(result, engine, rises)),
    )


def _doubts(result: EngineResult, engine: EngineHistory, rises: Sequence[Rise]) -> Iterator[str]:
    """What of the scores is not to be relied on."""
    scale = result.scale
    for rise in rises:
        if rise.counted_at - rise.dated_at >= scale.episode_gap_seconds:
            yield (
                f"{result.name}: what was counted at {rise.counted_at:.1f} s is dated to {rise.dated_at:.1f} s, when fewer "
                "requests ran and more waited; a client that hung up looks the same"
            )
    apart = statistics.median(
        after.at - before.at for stretch in engine.stretches for before, after in pairwise(stretch.samples)
    )
    if PRODUCTION.alarm_gap_seconds > scale.alarm_gap_seconds <= apart:
        yield (
            f"{result.name}: its scrapes are {apart:g} s apart, too far for the scale of a tiny model; take "
            "--scale production"
        )
    if all(stretch.ends_at - stretch.starts_at < scale.horizon_seconds for stretch in engine.stretches):
        yield (
            f"{result.name}: no stretch of it is as long as the horizon of {scale.horizon_seconds:g} s, so no alarm can be "
            "told to be false"
        )
