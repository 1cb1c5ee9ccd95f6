"""After how long prompts come back to their content, and which share of them a tier of another size would find: what is asked and told.

The sums are in `reuse_curve`, `reuse_ages` and `expected_hits`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.warmth import external_hits, local_hits

STRETCH_SECONDS = 600.0
"""How long a stretch of time is that one point is made of."""
MOST_STRETCHES = 144
"""A day."""
LEAST_STRETCHES = 12
"""With prompts in them: two hours."""
LAST_STRETCHES = 6
"""The last hour."""
WIDEST = 0.1
"""Of an interval whose middle is told: the middle is at most half of it off."""


class Stretch(NamedTuple):
    """One stretch of time of one engine.

    Attributes:
        seconds: how long it is.
        prompts: tokens that were counted; `found_in_pool` of these, and `found_outside` of these by a KV connector.
        generated: tokens of answers.
        usage: share of the pool that running requests held, on average.
        waiting: requests, on average.
        follows: the one before it ended where this one begins, in the same run of the server.
    """

    seconds: float
    prompts: float
    found_in_pool: float
    found_outside: float
    generated: float
    usage: float
    waiting: float
    follows: bool


def stretch_of(grown: Growth, *, usage: float, waiting: float, follows: bool) -> Stretch | None:
    """Of what the counters grew by; None where the page does not tell prompts, or what was found of them."""
    prompts, generated = grown.of("prompt_tokens_total"), grown.of("generation_tokens_total")
    in_pool = local_hits(grown)
    if grown.seconds is None or prompts is None or generated is None or in_pool is None:
        return None
    # A look-up is counted as its request is admitted, and the prompt with its first token: at the ends more may be found than asked.
    in_pool = min(in_pool, prompts)
    return Stretch(
        seconds=grown.seconds,
        prompts=prompts,
        found_in_pool=in_pool,
        found_outside=min(external_hits(grown) or 0.0, prompts - in_pool),
        generated=generated,
        usage=usage,
        waiting=waiting,
        follows=follows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContent:
    """What a tier in host memory holds.

    Attributes:
        tokens: 0 where there is no tier.
        stores_answers: as they are generated; else only once they are part of a prompt.
    """

    tokens: float
    stores_answers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSize:
    """A tier that could be: bytes of one engine's, and the tokens that fit in them; 0 of both for none."""

    bytes: int
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseQuestion:
    """What is asked of the stretches of one engine.

    Attributes:
        pool_tokens: that requests and cached content share.
        tier: as it is.
        sizes: to say the expected hits of.
    """

    pool_tokens: float
    tier: TierContent
    sizes: tuple[TierSize, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHits:
    """Between which shares of prompt tokens lies what the pool and a tier of one size would find together."""

    size: TierSize
    low_ratio: float
    high_ratio: float

    @property
    def ratio(self) -> float | None:
        """The middle; None where the two are further apart than WIDEST."""
        return (self.low_ratio + self.high_ratio) / 2 if self.high_ratio - self.low_ratio <= WIDEST else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lately:
    """The last hour against what was learned of the time before it, as shares of its prompt tokens.

    Attributes:
        found_ratio: that was found, in the pool or outside.
        expected_ratio: that would have been, had prompts come back to their content as before.
    """

    found_ratio: float
    expected_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What was learned.

    Attributes:
        seconds: of the stretches in which something was asked for.
        prompts: tokens in them.
        pool_ratio: share of these that was found in the pool.
        outside_ratio: share that a KV connector supplied.
        oldest_seconds: the oldest age at which a share was seen.
        points: (age in seconds, share of prompt tokens that had been asked for within it before), ascending in both.
        expected: of each size that was asked for.
        lately: None where too little is known of the time before.
    """

    seconds: float
    prompts: float
    pool_ratio: float
    outside_ratio: float
    oldest_seconds: float
    points: tuple[tuple[float, float], ...]
    expected: tuple[ExpectedHits, ...]
    lately: Lately | None

    @property
    def found_ratio(self) -> float:
        """Share of the prompt tokens that was found at all."""
        return self.pool_ratio + self.outside_ratio
