"""Blocks -> sessions. A session is one conversation of N tokens of context."""

from dataclasses import dataclass, replace

from kvheadroom.capacity.calibration import CalibratedPrediction
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.kv_specs import ceil_div
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCapacity:
    """How many sessions of `session_tokens` tokens fit one engine.

    Attributes:
        blocks_per_session: blocks one such session holds on the running engine.
        predicted, observed: num_blocks / blocks per session: vLLM's "maximum concurrency", a float.
        calibrated: the same with the learned overhead; `calibrated_fewest` and `calibrated_most` at the ends of its interval, None
            where that leaves no pool.
        whole_sessions: floor(usable blocks / blocks per session).
        in_use: used blocks / blocks per session.
        headroom: floor(free blocks / blocks per session): whole sessions that fit now.
    """

    session_tokens: int
    blocks_per_session: int | None
    predicted: float | None
    calibrated: float | None = None
    calibrated_fewest: float | None = None
    calibrated_most: float | None = None
    observed: float | None
    whole_sessions: int | None
    in_use: float | None
    headroom: int | None


def count_sessions(
    facts: EngineFacts,
    prediction: Prediction,
    observation: Observation,
    session_tokens: tuple[int, ...],
    calibrated: CalibratedPrediction | None = None,
) -> tuple[SessionCapacity, ...]:
    """One row per length: those asked for that the server admits, and max_model_len itself.

    A session longer than max_model_len is refused by vLLM, so no number is given for it. Without the
    model's layout only max_model_len can be counted, from vLLM's own maximum concurrency.
    """
    longest = None if facts.max_model_len is None else facts.max_model_len.value
    lengths = {length for length in session_tokens if longest is None or length <= longest}
    if longest is not None:
        lengths.add(longest)
    layout = prediction.layout
    if layout is not None and not layout.holds_every_token and not _agrees(layout, observation, longest):
        layout = None
    rows = []
    for length in sorted(lengths):
        row = _count(length, prediction, observation, layout, is_max_model_len=length == longest)
        if calibrated is not None:
            row = _with_calibrated(row, calibrated)
        if any(one is not None for one in (row.predicted, row.calibrated, row.observed)):
            rows.append(row)
    return tuple(rows)


def _with_calibrated(row: SessionCapacity, calibrated: CalibratedPrediction) -> SessionCapacity:
    layout = calibrated.prediction.layout
    if layout is None:
        return row
    blocks = layout.blocks_per_session(row.session_tokens)
    value, fewest, most = (
        None if pool is None else pool.num_blocks / blocks
        for pool in (calibrated.prediction.pool, calibrated.fewest, calibrated.most)
    )
    return replace(row, calibrated=value, calibrated_fewest=fewest, calibrated_most=most)


def _agrees(layout: KvLayout, observation: Observation, longest: int | None) -> bool:
    """Whether the engine's own blocks per request are those of the layout, so that it can be counted by it."""
    if longest is None or observation.num_blocks is None or not observation.max_concurrency:
        return False
    return round(observation.num_blocks / observation.max_concurrency) == layout.blocks_per_session(longest)


def _count(
    length: int,
    prediction: Prediction,
    observation: Observation,
    layout: KvLayout | None,
    *,
    is_max_model_len: bool,
) -> SessionCapacity:
    predicted = None
    if prediction.pool is not None and prediction.layout is not None:
        predicted = prediction.pool.num_blocks / prediction.layout.blocks_per_session(length)

    blocks = observed = None
    num_blocks, block_size = observation.num_blocks, observation.block_size
    if layout is not None and not layout.holds_every_token:
        blocks = layout.blocks_per_session(length)
    elif layout is not None and block_size is not None:
        blocks = ceil_div(length, block_size)
    elif is_max_model_len and num_blocks is not None and observation.max_concurrency:
        blocks = round(num_blocks / observation.max_concurrency)
    if is_max_model_len and observation.max_concurrency is not None:
        observed = observation.max_concurrency
    elif blocks and num_blocks is not None:
        observed = num_blocks / blocks

    usable, used, free = observation.usable_blocks, observation.used_blocks, observation.free_blocks
    return SessionCapacity(
        session_tokens=length,
        blocks_per_session=blocks,
        predicted=predicted,
        observed=observed,
        whole_sessions=usable // blocks if blocks and usable is not None else None,
        in_use=used / blocks if blocks and used is not None else None,
        headroom=free // blocks if blocks and free is not None else None,
    )
