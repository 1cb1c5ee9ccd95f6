"""What kvheadroom exported of starts of engines, as a Prometheus keeps it -> typed values."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.exported_starts import ExportedSample
from kvheadroom.sources.prometheus_api import RangeSeries
from kvheadroom.sources.prometheus_parts import Answers

SAMPLE = "kvheadroom_overhead_sample_bytes"
_KEY_LABELS = ("geometry", "weight_format", "gpu", "parallelism", "release", "settings")
_OWN_LABELS = ("start", *_KEY_LABELS, "edition")
"""Beside those that every series of an engine has."""
_MOST_LABEL = 1024
_ESTIMATED, _POOL, _BLOCKS = (
    "kvheadroom_predicted_memory_bytes",
    "kvheadroom_observed_pool_bytes",
    "kvheadroom_observed_blocks",
)


@dataclass(frozen=True, slots=True)
class UnreadableSample:
    """A series of which no start can be made.

    Attributes:
        name: of its engine, as far as it is told.
        why: one sentence without its full stop.
    """

    name: str
    why: str


def exported_queries(select: str) -> dict[str, str]:
    """Metric -> PromQL.

    Args:
        select: matchers that narrow it, empty for everything.
    """
    own = {_ESTIMATED: 'term="overhead"'}
    return {
        name: f"{name}{{{', '.join(filter(None, (own.get(name), select)))}}}"
        for name in (SAMPLE, _ESTIMATED, _POOL, _BLOCKS)
    }


def read_exported(
    answers: Answers, at: Callable[[int], float]
) -> Iterator[ExportedSample | UnreadableSample]:
    """Every series of one part of a history.

    Args:
        at: unix seconds of a step.
    """
    beside = {
        name: {_joined_by(one.labels, ()): one for one in answers[name]}
        for name in (_ESTIMATED, _POOL, _BLOCKS)
    }
    for series in answers[SAMPLE]:
        if series.values:
            yield _read(series, at, beside)


_Beside = Mapping[str, Mapping[frozenset[tuple[str, str]], RangeSeries]]


def _read(
    series: RangeSeries, at: Callable[[int], float], beside: _Beside
) -> ExportedSample | UnreadableSample:
    labels = {name: series.labels.get(_shown(name, series.labels), "") for name in _LABELS}
    name = f"{labels['replica']} engine {labels['engine']}"
    # A label whose value is empty is none for Prometheus.
    lost = [one for one in _LABELS if not labels[one] and one not in ("settings", "model_name")]
    if lost:
        return UnreadableSample(name, f"its series has no label {', '.join(lost)}: does Prometheus drop it?")
    edition = labels["edition"]
    if not (edition.isascii() and edition.isdecimal() and len(edition) < 10):
        return UnreadableSample(name, f"its label edition is {edition[:40]!r}, and no number")
    if not all(len(text) <= _MOST_LABEL and text.isprintable() for text in labels.values()):
        return UnreadableSample(name, "one of its labels cannot be one of kvheadroom's")
    joined = _joined_by(series.labels, _OWN_LABELS)
    steps = sorted(series.values)

    def last(*metrics: str) -> list[float] | None:
        """Values of other metrics of the engine, at the last step at which all of them stand beside it."""
        others = [beside[metric].get(joined) for metric in metrics]
        found = [one.values for one in others if one is not None]
        if len(found) < len(metrics):
            return None
        step = next((step for step in reversed(steps) if all(step in one for one in found)), None)
        return None if step is None else [float(one[step]) for one in found]

    return ExportedSample(
        start=labels["start"],
        replica=labels["replica"],
        engine=labels["engine"],
        model=labels["model_name"],
        key=CalibrationKey(**{one: labels[one] for one in _KEY_LABELS}),
        edition=int(edition),
        seen=(at(steps[0]), at(steps[-1])),
        # Of several "not a number" one is kept.
        values=frozenset(
            math.nan if math.isnan(value) else value for value in map(float, series.values.values())
        ),
        estimated_bytes=_estimated(last(_ESTIMATED)) if int(edition) else None,
        block_bytes=_of_a_block(last(_POOL, _BLOCKS)),
    )


_LABELS = ("replica", "engine", "model_name", *_OWN_LABELS)


def _shown(name: str, labels: Mapping[str, str]) -> str:
    """A label's name: a target may have one of the same name, and Prometheus keeps ours as `exported_` then."""
    exported = f"exported_{name}"
    return exported if exported in labels else name


def _joined_by(labels: Mapping[str, str], own: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """What the series of one engine at one target have in common.

    Args:
        own: labels that only this metric has.
    """
    left_out = {"__name__", "term", *(_shown(name, labels) for name in own)}
    return frozenset((name, value) for name, value in labels.items() if name not in left_out)


def _estimated(told: list[float] | None) -> int | None:
    return None if told is None or not _is_bytes(told[0]) else round(told[0])


def _of_a_block(told: list[float] | None) -> int | None:
    if told is None or not all(map(_is_bytes, told)) or not 1 <= told[1] <= told[0]:
        return None
    return int(told[0]) // int(told[1])


def _is_bytes(value: float) -> bool:
    return 0 <= value < 2**50
