"""How long an idle session stays in each tier of the cache, and what its return costs.

Both tiers evict what nobody has asked for longest. So content stays until as much other content was asked for as the tier holds of what no request
uses: `seconds = blocks / (blocks per second)`. What is new is counted; of what is found again only an upper limit is known, for a prefix
that is found ten times in that time is the same content once. So there are two figures: the longer counts what is new alone, the shorter takes
everything for different.

Rules: vLLM 0.33.0 `v1/core/block_pool.py` (free blocks are taken oldest first), `v1/kv_offload/cpu/policies/lru.py`; Che, Tung, Wang,
"Hierarchical Web caching systems" (2002) for the characteristic time of a cache.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.history import Growth
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.kv_specs import HOLDS_BATCHES, HOLDS_EVERY_TOKEN, Kind
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.offload_tier import OffloadTier
from kvheadroom.capacity.readings import EngineSnapshot


class Tier(StrEnum):
    """Where cached content lies. A closed list."""

    HBM = "hbm"
    HOST = "host"


class Answer(StrEnum):
    """Whether an idle session is still there. A closed list."""

    YES = "yes"
    NO = "no"
    PERHAPS = "perhaps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long what nobody asks for stays in one tier, by what went on in one window.

    Attributes:
        window: its name in WINDOWS.
        low_seconds, high_seconds: between which it lies. Both None where nothing was evicted since the server's start; the shorter alone
            where nobody knows how much was asked for.
    """

    tier: Tier
    window: str
    low_seconds: float | None
    high_seconds: float | None

    def answer(self, idle_seconds: float) -> Answer:
        """Whether what was idle for so long is still there."""
        if self.high_seconds is None or (self.low_seconds is not None and idle_seconds <= self.low_seconds):
            return Answer.YES
        return Answer.NO if idle_seconds > self.high_seconds else Answer.PERHAPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured of this engine over one window; None where nothing was.

    Attributes:
        prefill_tokens_per_second: tokens computed for a prompt, by the time from its first scheduling to its first token, the mean of
            those that finished: under the load that there was.
        load_bytes_per_second: what one worker loads from the host's memory while it loads.
    """

    window: str
    prefill_tokens_per_second: float | None
    load_bytes_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCost:
    """Seconds until a session of so many tokens can go on; None where no rate was measured.

    Attributes:
        recompute_seconds: its whole prompt is computed again.
        reload_seconds: it is loaded from the host's memory.
    """

    session_tokens: int
    recompute_seconds: float | None
    reload_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmContent:
    """What the blocks of the pool hold now.

    Attributes:
        referenced_blocks: of running requests.
        cached_blocks: of no request, and may be found again; None where that is not known.
        blank_blocks: without content.
    """

    referenced_blocks: int
    cached_blocks: int | None
    blank_blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers of one engine.

    Attributes:
        layout: None where the model is not known.
        planned: the tier in host memory; a string says why it is not known; None where no flag asks for one.
        since_start: what the counters grew by since the server's start.
        caches: prefix caching is on; else nothing that is freed in the pool is found again. None where nobody tells it.
        blocks_per_token: that each token takes over all groups; None where that is not known.
        blocks_ever: that were taken for new content since the server's start; None where that is not known.
    """

    snapshot: EngineSnapshot
    observation: Observation
    layout: KvLayout | None
    planned: OffloadTier | str | None
    since_start: Growth
    caches: bool | None
    blocks_per_token: float | None = field(init=False)
    blocks_ever: float | None = field(init=False)

    def __post_init__(self) -> None:
        """What every window needs is made once."""
        each = _blocks_per_token(self.layout, self.observation)
        object.__setattr__(self, "blocks_per_token", each)
        object.__setattr__(self, "blocks_ever", _new_blocks(self.since_start, each))

    @property
    def host(self) -> OffloadTier | None:
        """The tier in host memory, where it is known."""
        return self.planned if isinstance(self.planned, OffloadTier) else None


def hbm_content(tiers: Tiers) -> HbmContent | None:
    """What the pool holds; None where its blocks are not told.

    vLLM tells what is referenced alone. Whatever is not was filled once as many blocks were taken as there are, for freed blocks
    keep their content until they are taken again.
    """
    observation = tiers.observation
    used, free = observation.used_blocks, observation.free_blocks
    if used is None or free is None:
        return None
    if tiers.caches is False:
        return HbmContent(referenced_blocks=used, cached_blocks=0, blank_blocks=free)
    taken = tiers.blocks_ever
    if taken is None or tiers.caches is None:
        return HbmContent(referenced_blocks=used, cached_blocks=None, blank_blocks=None)
    cached = min(free, max(0, int(taken) - used))
    return HbmContent(referenced_blocks=used, cached_blocks=cached, blank_blocks=free - cached)


def retentions(tiers: Tiers, growths: Mapping[str, Growth]) -> tuple[Retention, ...]:
    """Of each tier and window where it can be told; none of a window in which nothing came in.

    An engine that sleeps has dropped what was cached, in its connector as well (`v1/engine/core.py` sleep, 0.33.0).
    """
    if tiers.snapshot.sleeping:
        return ()
    found = []
    for window, grown in growths.items():
        if tiers.caches and (one := _hbm_retention(tiers, window, grown)) is not None:
            found.append(one)
        if (one := _host_retention(tiers, window, grown)) is not None:
            found.append(one)
    return tuple(found)


def _hbm_retention(tiers: Tiers, window: str, grown: Growth) -> Retention | None:
    free, usable = tiers.observation.free_blocks, tiers.observation.usable_blocks
    new, hits = _new_blocks(grown, tiers.blocks_per_token), _hit_blocks(grown, tiers.blocks_per_token)
    if free is None or usable is None or new is None or hits is None or grown.seconds is None:
        return None
    if tiers.blocks_ever is not None and tiers.blocks_ever < usable:
        return Retention(tier=Tier.HBM, window=window, low_seconds=None, high_seconds=None)
    if new < _LEAST:
        return None
    return Retention(
        tier=Tier.HBM,
        window=window,
        low_seconds=free * grown.seconds / (new + hits),
        high_seconds=free * grown.seconds / new,
    )


def _new_blocks(grown: Growth, each: float | None) -> float | None:
    """Blocks that were taken for new content: of tokens computed, loaded and generated.

    Args:
        each: blocks of a token.
    """
    prompts, generated, hits = (
        grown.of("prompt_tokens_total"),
        grown.of("generation_tokens_total"),
        local_hits(grown),
    )
    if prompts is None or generated is None or each is None or hits is None:
        return None
    return max(0.0, prompts - hits + generated) * each


def _hit_blocks(grown: Growth, each: float | None) -> float | None:
    hits = local_hits(grown)
    return None if hits is None or each is None else hits * each


def local_hits(grown: Growth) -> float | None:
    """Prompt tokens found in the pool, each request counted once where the release tells it."""
    by_source = grown.of("prompt_tokens_local_cache_hit_total")
    return grown.of("prefix_cache_hits_total") if by_source is None else by_source


def external_hits(grown: Growth) -> float | None:
    """Prompt tokens that a KV connector supplied, each request counted once where the release tells it."""
    by_source = grown.of("prompt_tokens_external_kv_transfer_total")
    return grown.of("external_prefix_cache_hits_total") if by_source is None else by_source


_GROWS_WITH_TOKENS = (HOLDS_EVERY_TOKEN | HOLDS_BATCHES) - {Kind.CROSS}


def _blocks_per_token(layout: KvLayout | None, observation: Observation) -> float | None:
    """Blocks that each token takes over all groups; None with recurrent states, of which vLLM keeps some.

    Of a model that is not known, the engine's own block size tells it where the page shows that there is one group.
    """
    if layout is None:
        size = None if observation.used_tokens is None else observation.block_size
        return 1 / size if size else None
    if any(group.specs[0].kind is Kind.STATE for group in layout.groups):
        return None
    return sum(
        1 / group.context_tokens(layout.decode_context)
        for group in layout.groups
        if group.specs[0].kind in _GROWS_WITH_TOKENS
    )


def _host_retention(tiers: Tiers, window: str, grown: Growth) -> Retention | None:
    """Of the tier by what is stored: what chunks are rounded up by is stored by nobody, and in some there is less than in others."""
    held = _held_bytes(tiers.host, tiers.snapshot)
    stored, seconds = grown.of("offload_store_bytes_total"), grown.seconds
    if held is None or stored is None or seconds is None:
        return None
    least, most = held
    ever = tiers.since_start.of("offload_store_bytes_total")
    if ever is not None and ever < least:
        return Retention(tier=Tier.HOST, window=window, low_seconds=None, high_seconds=None)
    if stored < _LEAST:
        return None
    asked = _asked_bytes(grown, tiers.host)
    return Retention(
        tier=Tier.HOST,
        window=window,
        low_seconds=None if asked is None else least * seconds / max(stored, asked),
        high_seconds=most * seconds / stored,
    )


def _asked_bytes(grown: Growth, tier: OffloadTier | None) -> float | None:
    """Bytes in the tier of all prompts together, and of answers where they are stored: what requests may have touched there."""
    prompts = grown.of("prompt_tokens_total")
    answers = grown.of("generation_tokens_total") if tier is not None and tier.stores_answers else 0.0
    if tier is None or prompts is None or answers is None:
        return None
    if any(most is not None for _, most in tier.group_chunks):
        return None
    return (prompts + answers) * sum(tier.content_bytes / tokens for tokens, _ in tier.group_chunks)


def _held_bytes(tier: OffloadTier | None, snapshot: EngineSnapshot) -> tuple[int, int] | None:
    """At least and at most so many stored bytes are in the tier when it is full; its size where nothing else is known."""
    told = snapshot.told_tier
    if tier is not None:
        chunks = tier.num_chunks if told is None or told.num_chunks is None else told.num_chunks
        return chunks * tier.least_stored_bytes, chunks * tier.content_bytes
    return None if told is None or told.size_bytes is None else (told.size_bytes, told.size_bytes)


def rates(window: str, grown: Growth) -> Rates:
    """What was measured in one window."""
    computed, prefill = grown.of("prefill_computed_tokens_total"), grown.of("prefill_seconds_total")
    loaded, loading = grown.of("offload_load_bytes_total"), grown.of("offload_load_seconds_total")
    return Rates(
        window=window,
        prefill_tokens_per_second=_quotient(computed, prefill),
        load_bytes_per_second=_quotient(loaded, loading),
    )


_LEAST = 1e-6
"""What is smaller is no count and no time of anything, and what is divided by it may overflow."""


def _quotient(whole: float | None, by: float | None) -> float | None:
    """None where either is not told, or nothing."""
    if whole is None or by is None or whole < _LEAST or by < _LEAST:
        return None
    return whole / by


def resume_costs(
    facts: EngineFacts, tiers: Tiers, measured: Rates, session_tokens: Iterable[int]
) -> tuple[ResumeCost, ...]:
    """For each length that the server admits and of which something was measured.

    The times of all workers are added up as their bytes are, so what one worker loads is its own share by its own speed.
    """
    longest = None if facts.max_model_len is None else facts.max_model_len.value
    found = []
    for length in session_tokens:
        if longest is not None and length > longest:
            continue
        speed = measured.prefill_tokens_per_second
        recompute = None if speed is None else length / speed
        reload = None
        host, layout = tiers.host, tiers.layout
        if host is not None and layout is not None and measured.load_bytes_per_second is not None:
            blocks = host.chunks_per_session(length) * host.blocks_per_chunk
            reload = blocks * layout.bytes_per_block / measured.load_bytes_per_second
        if recompute is not None or reload is not None:
            found.append(
                ResumeCost(session_tokens=length, recompute_seconds=recompute, reload_seconds=reload)
            )
    return tuple(found)


def measured_idle_seconds(grown: Growth) -> float | None:
    """How long sampled blocks had not been asked for when another content took their place, on average (`--kv-cache-metrics`).

    Of a block that was never found again since it was taken, and so with the time that its own request ran
    (`v1/core/kv_cache_metrics.py`, 0.33.0).
    """
    blocks, seconds = grown.of("evicted_blocks_total"), grown.of("evicted_block_idle_seconds_total")
    return None if blocks is None or blocks < 1 or seconds is None else seconds / blocks
