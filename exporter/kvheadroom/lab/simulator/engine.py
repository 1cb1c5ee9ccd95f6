"""One engine: what it was started with, a request on its way through it, and what it tells of itself after a step."""

from dataclasses import dataclass

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.scheduler_rules import SchedulerRules
from kvheadroom.lab.simulator.block_pool import Chain, Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        num_blocks: of the pool, the null block among them.
        block_size: tokens.
        watermark: share of the blocks that stays free when something is admitted beside what runs.
        async_scheduling: a step is scheduled before the one before it is accounted for.
        tier_chunks: of the tier in host memory, of one block each; 0 where there is none.
        chunk_bytes: of each of them.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    rules: SchedulerRules
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    async_scheduling: bool = False
    tier_chunks: int = 0
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            OperatorError: naming the setting.
        """
        whole = (
            self.num_blocks - 1,
            self.block_size,
            self.max_model_len,
            self.max_num_batched_tokens,
            self.max_num_seqs,
        )
        if min(whole) < 1:
            raise OperatorError(
                "an engine needs two blocks, and every other whole number of its settings at least 1"
            )
        if self.tier_chunks and not (self.enable_prefix_caching and self.chunk_bytes > 0 < self.tier_chunks):
            raise OperatorError("tier_chunks: a tier needs prefix caching and chunk_bytes")
        if not 0.0 <= self.watermark < 1.0:
            raise OperatorError(f"watermark: {self.watermark:g} is no share from 0 to below 1")
        if self.watermark and not self.rules.has_watermark:
            raise OperatorError("watermark: releases before 0.24 have no such flag")

    @property
    def watermark_blocks(self) -> int:
        """As `KVCacheManager` of vLLM counts them."""
        return int(self.watermark * self.num_blocks)

    @property
    def longest_tokens(self) -> int:
        """Tokens that one request can have before it preempts itself for ever, or is ended."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size)


class Request:
    """A request on its way through the engine; times in seconds.

    Attributes:
        session, turn: whose it is, for the log.
        chain: the sequence of its tokens.
        num_prefix_tokens: of its prompt, those that the session's history has too.
        output_end: it ends after so many tokens of output.
        ends_by: the reason its end is counted under.
        max_tokens: what it asks for at most.
        leaves_at: when its client may go away, None if it stays to the end.
        num_tokens: prompt and output so far.
        num_computed: of these, the ones that have their keys and values in blocks.
        num_untold: preemptions that no output has told of yet.
        num_cached_tokens: the prompt's tokens that were found when it was first admitted, in whichever tier; None before.
        num_external_tokens: of these, those that the engine's own cache had not.
        holding: its blocks, None while it waits.
        has_ended: whatever the end was.
    """

    __slots__ = (
        "arrived_at",
        "chain",
        "ends_by",
        "first_token_at",
        "has_ended",
        "holding",
        "leaves_at",
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_external_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prefix_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "num_untold",
        "output_end",
        "session",
        "turn",
    )

    def __init__(
        self,
        *,
        session: str,
        turn: int,
        chain: Chain,
        arrived_at: float,
        num_prompt_tokens: int,
        num_prefix_tokens: int,
        output_end: int,
        max_tokens: int,
        ends_by: str,
        leaves_at: float | None,
    ) -> None:
        self.session = session
        self.turn = turn
        self.chain = chain
        self.arrived_at = arrived_at
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens
        self.num_prefix_tokens = num_prefix_tokens
        self.output_end = output_end
        self.max_tokens = max_tokens
        self.ends_by = ends_by
        self.leaves_at = leaves_at
        self.holding: Holding | None = None
        self.num_computed = self.num_output_tokens = self.num_preemptions = self.num_untold = 0
        self.num_cached_tokens: int | None = None
        self.num_external_tokens = 0
        self.first_token_at: float | None = None
        self.has_ended = False


@dataclass(frozen=True, slots=True)
class Told:
    """The gauges, and the counters of lookups, as of the end of a step.

    Attributes:
        num_used: blocks that requests hold.
        queries, hits: tokens looked up and found in the prefix cache.
        external_queries, external_hits: tokens that it had not, looked up and found in the tier in host memory.
        stored_chunks, loaded_chunks, refused_stores: of the tier.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_used: int = 0
    queries: int = 0
    hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    stored_chunks: int = 0
    loaded_chunks: int = 0
    refused_stores: int = 0
