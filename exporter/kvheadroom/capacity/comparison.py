"""Predicted against observed capacity of one engine."""

from dataclasses import dataclass

from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Difference:
    """Observed minus predicted; None where one side is not known.

    Attributes:
        ratio: observed pool tokens / predicted pool tokens - 1.
    """

    tokens: int | None
    blocks: int | None
    bytes: int | None
    ratio: float | None


def compare(prediction: Prediction, observation: Observation) -> Difference | None:
    """The difference, or None when there is no predicted pool."""
    pool = prediction.pool
    if pool is None:
        return None
    tokens = _minus(observation.pool_tokens, pool.pool_tokens)
    return Difference(
        tokens=tokens,
        blocks=_minus(observation.num_blocks, pool.num_blocks),
        bytes=_minus(observation.pool_bytes, pool.pool_bytes),
        ratio=tokens / pool.pool_tokens if tokens is not None and pool.pool_tokens else None,
    )


def _minus(observed: int | None, predicted: int | None) -> int | None:
    return None if observed is None or predicted is None else observed - predicted
