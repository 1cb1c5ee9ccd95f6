"""Rules that anybody would write first. A forecast must beat them; each is also PromQL, and means what Prometheus makes of it.

Pure: the firing of every tick from the samples of every tick, as if Prometheus had scraped and evaluated at each.
"""

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvheadroom.lab.backtest.events import TOLERANCE_SECONDS, EngineSample, Scale

USAGE_LIMITS = (0.8, 0.9, 0.95)
SHORT_HOLD_SECONDS = 5.0

Ticks = Sequence[EngineSample | None]


@dataclass(frozen=True, slots=True)
class Baseline:
    """One rule.

    Attributes:
        expression: PromQL on what kvheadroom exports, for Prometheus 3, whose ranges are open to the left.
        hold_seconds: its `for`.
        holds: (samples of every tick, seconds between ticks) -> whether the expression holds, None where nothing is known.
    """

    name: str
    expression: str
    hold_seconds: float
    holds: Callable[[Ticks, float], list[bool | None]]

    def firing(self, ticks: Ticks, every_seconds: float) -> list[bool | None]:
        """Whether it fires at each tick; None where the engine was not known."""
        return held(self.holds(ticks, every_seconds), self.hold_seconds, every_seconds)


def baselines(scale: Scale) -> tuple[Baseline, ...]:
    """Each rule without and with `for`."""
    span = f"{scale.horizon_seconds:g}"
    plain = [
        *(
            Baseline(
                f"usage > {limit}",
                f"kvheadroom_kv_usage_ratio > {limit}",
                0.0,
                _above("kv_usage_ratio", limit),
            )
            for limit in USAGE_LIMITS
        ),
        Baseline(
            "predict_linear on usage",
            f"predict_linear(kvheadroom_kv_usage_ratio[{_duration(scale.horizon_seconds)}], {span}) > 1",
            0.0,
            _full_within(scale.horizon_seconds),
        ),
        Baseline("waiting > 0", "kvheadroom_requests_waiting > 0", 0.0, _above("requests_waiting", 0.0)),
    ]
    rules = [*plain, _with_hold(plain[-1], SHORT_HOLD_SECONDS)]
    rules += [_with_hold(rule, scale.hold_seconds) for rule in plain]
    return tuple(dict.fromkeys(rules))


def _with_hold(rule: Baseline, seconds: float) -> Baseline:
    return Baseline(f"{rule.name} for {seconds:g}s", rule.expression, seconds, rule.holds)


def _duration(seconds: float) -> str:
    """As PromQL writes it, which takes whole numbers alone."""
    return f"{round(seconds * 1000)}ms"


def held(holds: Sequence[bool | None], hold_seconds: float, every_seconds: float) -> list[bool | None]:
    """Prometheus's `for` (rules/alerting.go): fires once the expression has held at every tick of so many seconds."""
    fires: list[bool | None] = []
    since: int | None = None
    for tick, active in enumerate(holds):
        if not active:
            since = None
        elif since is None:
            since = tick
        fires.append(
            None
            if active is None
            else since is not None and (tick - since) * every_seconds >= hold_seconds - TOLERANCE_SECONDS
        )
    return fires


def _above(field: str, limit: float) -> Callable[[Ticks, float], list[bool | None]]:
    figure = operator.attrgetter(field)

    def holds(ticks: Ticks, _: float) -> list[bool | None]:
        values = (None if tick is None else figure(tick) for tick in ticks)
        return [None if value is None else value > limit for value in values]

    return holds


def _full_within(seconds: float) -> Callable[[Ticks, float], list[bool | None]]:
    """Whether the line through the usage of the last `seconds` passes 1 within as many seconds from now."""

    def holds(ticks: Ticks, every_seconds: float) -> list[bool | None]:
        window: deque[tuple[int, float]] = deque()
        answers: list[bool | None] = []
        for number, tick in enumerate(ticks):
            usage = None if tick is None else tick.kv_usage_ratio
            if usage is not None:
                window.append((number, usage))
            while window and (number - window[0][0]) * every_seconds >= seconds - TOLERANCE_SECONDS:
                window.popleft()
            if usage is None:
                answers.append(None)
            else:
                ahead = _line_at(window, number + seconds / every_seconds)
                answers.append(ahead is not None and ahead > 1.0)
        return answers

    return holds


def _line_at(points: Sequence[tuple[int, float]], x: float) -> float | None:
    """The least-squares line at x (Prometheus's `predict_linear`); None with less than two points.

    Through equal values it is that value exactly, as in Prometheus: a full pool is not predicted to be more than full.
    """
    if len(points) < 2:
        return None
    if all(y == points[0][1] for _, y in points):
        return points[0][1]
    mean_x = sum(at for at, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((at - mean_x) * (y - mean_y) for at, y in points) / sum(
        (at - mean_x) ** 2 for at, _ in points
    )
    return mean_y + slope * (x - mean_x)
