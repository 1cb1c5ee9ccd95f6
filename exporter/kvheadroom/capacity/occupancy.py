"""How full the blocks in use are: an estimate, since vLLM tells blocks and never tokens.

A request fills its blocks one after the other, and shared blocks are full, so every block in use is full but the last one
of each running request (v1/core/single_type_kv_cache_manager.py). That bounds the tokens from both sides. Between the bounds
the lengths of finished requests tell: a running one has its prompt and, on average, half of its answer. Where they do not fit
the bounds, the running ones are others than those that finished.
"""

from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.prefix_cache import mean_tokens
from kvheadroom.capacity.readings import EngineSnapshot

NARROW = 0.1
"""Bounds so near to one another, as shares of the pool, are an estimate by themselves: their middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOccupancy:
    """Tokens in the pool, as shares of the tokens that its usable blocks have room for.

    Attributes:
        estimate_ratio: None where it cannot be estimated.
        least_ratio, most_ratio: what it is at least and at most.
        unknown: why there is no estimate, one sentence; empty where there is one.
    """

    estimate_ratio: float | None = None
    least_ratio: float | None = None
    most_ratio: float | None = None
    unknown: str = ""


def estimate_occupancy(
    snapshot: EngineSnapshot, facts: EngineFacts, observation: Observation, grown: Growth
) -> TokenOccupancy:
    """The share of the pool that holds tokens, beside the share that is handed out.

    Args:
        grown: tells the lengths of finished requests.
    """
    running, used = snapshot.requests_running, observation.used_tokens
    if used is None or observation.free_tokens is None or observation.block_size is None:
        return TokenOccupancy(unknown="blocks in use are no tokens here, or not told")
    if running is None:
        return TokenOccupancy(unknown="the server does not tell its running requests")
    room = used + observation.free_tokens
    if used == 0:
        return TokenOccupancy(estimate_ratio=0.0, least_ratio=0.0, most_ratio=0.0)
    # A draft's tokens have room kept ahead of them.
    holders = running + _waiting_with_blocks(snapshot)
    if holders == 0:
        return TokenOccupancy(unknown="blocks are in use although no request runs")
    empty_at_most = holders * (observation.block_size - 1 + facts.draft.lookahead_tokens)
    least = max(0.0, used - empty_at_most)
    bounds = TokenOccupancy(least_ratio=least / room, most_ratio=used / room)
    prompt = mean_tokens(grown, "finished_prompt_tokens_total")
    answer = mean_tokens(grown, "finished_generation_tokens_total")
    guess = None if prompt is None or answer is None else running * (prompt + answer / 2)
    if guess is not None and least <= guess <= used:
        return _with(bounds, guess / room, "")
    if used - least <= NARROW * room:
        # How full last blocks are is spread evenly where requests are much longer than a block.
        return _with(bounds, (least + used) / 2 / room, "")
    if guess is None:
        return _with(bounds, None, "too few requests have finished to tell their lengths")
    return _with(bounds, None, "running requests are not as long as those that finished, or share blocks")


def _waiting_with_blocks(snapshot: EngineSnapshot) -> float:
    """Requests in the queue that may hold blocks which a connector fills: deferred ones, or any where that is not told."""
    if snapshot.requests_waiting_deferred is not None:
        return snapshot.requests_waiting_deferred
    return snapshot.requests_waiting or 0.0 if snapshot.external_prefix_cache_queries_total else 0.0


def _with(bounds: TokenOccupancy, estimate_ratio: float | None, unknown: str) -> TokenOccupancy:
    return TokenOccupancy(
        estimate_ratio=estimate_ratio,
        least_ratio=bounds.least_ratio,
        most_ratio=bounds.most_ratio,
        unknown=unknown,
    )
