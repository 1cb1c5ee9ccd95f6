"""The KV cache's tier in host memory: how many chunks, tokens and sessions it holds, as vLLM's own connector makes it.

`chunks = bytes // round_up(worker_bytes_per_block * copies * blocks_per_chunk, page)`, where a chunk is so many blocks of one KV group for all
workers of the engine (vLLM 0.33.0 `v1/kv_offload/cpu/spec.py` CPUOffloadingSpec,
`distributed/kv_transfer/kv_connector/v1/offloading/config.py` build_offloading_config). What changed between releases stands in `offload_rules`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.kv_groups import KvGroup
from kvheadroom.capacity.kv_specs import Kind, ceil_div, round_up
from kvheadroom.capacity.model_config import shown
from kvheadroom.capacity.offload_rules import OFFLOADING_CONNECTOR, OneCopy

SEVERAL = "MultiConnector"
_CPU_SPEC = "CPUOffloadingSpec"
_TIERED_SPEC = "TieringOffloadingSpec"
_NO_DEDUPLICATION = frozenset({Kind.STATE, Kind.FULL, Kind.WINDOW, Kind.CHUNKED, Kind.CROSS})


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTier:
    """The tier of one engine.

    Attributes:
        given_bytes: what was asked for, for this engine.
        chunk_bytes: of one chunk in host memory, all workers together; `content_bytes` of them without what it is rounded up by.
        least_stored_bytes: that may be copied for a chunk: of the group with the least to keep, without what its blocks are padded by.
        blocks_per_chunk: of the GPU's pool.
        copies: of what a block holds: 1 where ranks that hold the same store it once.
        num_chunks: 0 where not one fits; then every store fails.
        bytes: chunks x chunk_bytes, of the host's memory.
        tokens: as vLLM counts: of requests of max_model_len; None where that is not known.
        group_chunks: (tokens of a chunk, most chunks of a request or None) of each group that is stored.
        stores_answers: as they are generated; else only once they are part of a prompt.
        is_alone: what a connector supplies comes from here; else there are other connectors, or tiers behind this one.
        in_shared_memory: it is a file of `/dev/shm`, of exactly its size; else each worker pins its own part.
        notes: what is assumed or to be known, each one sentence.
    """

    given_bytes: int
    chunk_bytes: int
    content_bytes: int
    least_stored_bytes: int
    blocks_per_chunk: int
    copies: int
    num_chunks: int
    tokens: int | None
    group_chunks: tuple[tuple[int, int | None], ...]
    stores_answers: bool = False
    is_alone: bool = True
    in_shared_memory: bool = False
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Of the host's memory, padding included."""
        return self.num_chunks * self.chunk_bytes

    def chunks_per_session(self, tokens: int) -> int:
        """Chunks that a session of so many tokens takes, the last one counted whole."""
        return _chunks(self.group_chunks, tokens)


def plan_tier(facts: EngineFacts, layout: KvLayout) -> OffloadTier | str | None:
    """The tier; a string says why it is not known; None where no flag asks for one."""
    settings = _settings(facts)
    if settings is None or isinstance(settings, str):
        return settings
    given, extra = settings
    return _tier(facts, layout, given, extra)


def tier_of_size(facts: EngineFacts, layout: KvLayout, given_bytes: int) -> OffloadTier | str:
    """The tier that the same flags would make, were it of this size; a string says why that is not known.

    Args:
        given_bytes: of one engine.
    """
    settings = _settings(facts)
    if isinstance(settings, str):
        return settings
    return _tier(facts, layout, given_bytes, {} if settings is None else settings[1])


def _tier(facts: EngineFacts, layout: KvLayout, given: int, extra: Mapping[str, Any]) -> OffloadTier | str:
    rules = facts.rules.offload
    if not rules.takes_bytes:
        return (
            "vLLM takes the size of the tier in bytes from 0.14.0 on; before, each worker has a number of blocks of its own, which is not "
            "modelled"
        )
    groups = [
        group for group in layout.groups if not rules.prefix_groups_only or group.specs[0].prefix_cacheable
    ]
    if not groups:
        return "vLLM refuses: no layer's cache can be offloaded"
    tokens = [group.context_tokens(layout.decode_context) for group in groups]
    per_chunk = _blocks_per_chunk(extra, tokens)
    if isinstance(per_chunk, str):
        return per_chunk
    sizes = facts.parallelism
    workers = sizes.tensor * sizes.pipeline * sizes.prefill_context
    is_alike = _is_alike(facts, layout)
    copies = 1 if is_alike else workers
    content_bytes = layout.stage_bytes_per_block[0] * copies * per_chunk
    chunk_bytes = round_up(content_bytes, rules.page_bytes)
    if chunk_bytes == 0:
        return "the first pipeline stage keeps no cache"
    chunks = given // chunk_bytes
    group_chunks = tuple(
        (size * per_chunk, _most_chunks(group, size * per_chunk))
        for group, size in zip(groups, tokens, strict=True)
    )
    in_shared_memory = rules.in_shared_memory or extra.get("spec_name") == _TIERED_SPEC
    length = None if facts.max_model_len is None else facts.max_model_len.value
    return OffloadTier(
        given_bytes=given,
        chunk_bytes=chunk_bytes,
        content_bytes=content_bytes,
        least_stored_bytes=min(
            content_bytes,
            *(
                sum(spec.unpadded_bytes for spec in group.specs) * copies // sizes.pipeline * per_chunk
                for group in groups
            ),
        ),
        blocks_per_chunk=per_chunk,
        copies=copies,
        num_chunks=chunks,
        tokens=None if length is None else chunks * length // _chunks(group_chunks, length),
        group_chunks=group_chunks,
        stores_answers=not rules.prompts_only or not extra.get("offload_prompt_only", True),
        is_alone=_is_alone(facts, extra),
        in_shared_memory=in_shared_memory,
        notes=tuple(_notes(is_alike=is_alike, chunks=chunks, in_shared_memory=in_shared_memory)),
    )


def _settings(facts: EngineFacts) -> tuple[int, Mapping[str, Any]] | str | None:
    """(bytes of the engine, the connector's own settings)."""
    size, backend, transfer = facts.offload.size_gib, facts.offload.backend, facts.offload.connector
    if size is not None:
        if backend == "lmcache":
            return "its tier is LMCache's, which has a size of its own"
        # The flag replaces the connector and its bytes, and leaves its other settings.
        return int(size * GIB), _section(transfer, "kv_connector_extra_config")
    if not transfer:
        return None
    name = transfer.get("kv_connector")
    extra = _section(transfer, "kv_connector_extra_config")
    if name == SEVERAL:
        children = extra.get("connectors")
        own = [
            one
            for one in (children if isinstance(children, list | tuple) else ())
            if isinstance(one, Mapping) and one.get("kv_connector") == OFFLOADING_CONNECTOR
        ]
        if not own:
            return f"of the connectors of {SEVERAL} none is {OFFLOADING_CONNECTOR}, and other tiers are not modelled"
        name, extra = OFFLOADING_CONNECTOR, _section(own[0], "kv_connector_extra_config")
    if name != OFFLOADING_CONNECTOR:
        return f"the tier of {shown(name)} is not modelled"
    if extra.get("spec_name", _CPU_SPEC) not in (_CPU_SPEC, _TIERED_SPEC):
        return f"its spec {shown(extra['spec_name'])} is not vLLM's own"
    given = _whole(extra.get("cpu_bytes_to_use"))
    if given is None or given < 1:
        return "cpu_bytes_to_use of kv_connector_extra_config is not known"
    return given, extra


def _is_alone(facts: EngineFacts, extra: Mapping[str, Any]) -> bool:
    is_one_of_several = (
        facts.offload.size_gib is None and (facts.offload.connector or {}).get("kv_connector") == SEVERAL
    )
    return not is_one_of_several and extra.get("spec_name", _CPU_SPEC) == _CPU_SPEC


def _section(of: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """A section of what an operator wrote, which may be anything; empty where it is none."""
    found = None if of is None else of.get(name)
    return found if isinstance(found, Mapping) else {}


def _whole(value: object) -> int | None:
    """As vLLM reads it, by `int()`: a number, or a text that is a whole one; None for anything else, and beyond what can be."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < _MOST_BYTES else None


_MOST_BYTES = 2**60


def _blocks_per_chunk(extra: Mapping[str, Any], tokens_per_block: list[int]) -> int | str:
    if extra.get("blocks_per_chunk") is not None and extra.get("block_size") is not None:
        return "vLLM refuses: block_size and blocks_per_chunk exclude each other in kv_connector_extra_config"
    name = "blocks_per_chunk" if extra.get("blocks_per_chunk") is not None else "block_size"
    if extra.get(name) is None:
        return 1
    number = _whole(extra[name])
    if number is None or number < 1:
        return f"vLLM refuses: {name} in kv_connector_extra_config is {shown(extra[name])}, and 1 or more is needed"
    if name == "blocks_per_chunk":
        return number
    if len(set(tokens_per_block)) > 1:
        return "vLLM refuses: block_size in kv_connector_extra_config needs groups with blocks of one size"
    if number % tokens_per_block[0]:
        return f"vLLM refuses: block_size {number} in kv_connector_extra_config is no multiple of the {tokens_per_block[0]} tokens of a block"
    return number // tokens_per_block[0]


def _is_alike(facts: EngineFacts, layout: KvLayout) -> bool:
    """Whether what one rank stores is all that the others would (`replicated_layout`)."""
    sizes, one_copy = facts.parallelism, facts.rules.offload.one_copy
    is_split = sizes.pipeline > 1 or sizes.prefill_context > 1 or sizes.decode_context > 1
    if one_copy is OneCopy.NEVER or sizes.tensor == 1 or is_split:
        return False
    kinds = {spec.kind for group in layout.groups for spec in group.distinct}
    if one_copy is OneCopy.LATENT:
        specs = {spec for group in layout.groups for spec in group.distinct}
        return kinds == {Kind.LATENT} and len(layout.groups) == 1 and len(specs) == 1
    return not kinds & _NO_DEDUPLICATION


def _most_chunks(group: KvGroup, tokens: int) -> int | None:
    """Chunks of a request that are of use, where the group looks back over a part (`get_sliding_window_size_in_chunks`)."""
    spec = group.specs[0]
    if spec.kind in (Kind.WINDOW, Kind.LATENT_WINDOW) and spec.window is not None:
        return max(ceil_div(spec.window, tokens), ceil_div(spec.window - 1 + spec.extra_tokens, tokens))
    if spec.kind is Kind.CHUNKED and spec.chunk is not None:
        return ceil_div(spec.chunk, tokens)
    return 1 if spec.kind is Kind.STATE else None


def _chunks(groups: tuple[tuple[int, int | None], ...], tokens: int) -> int:
    """Chunks of a request of so many tokens over all groups."""
    return sum(
        ceil_div(tokens, size) if most is None else min(ceil_div(tokens, size), most) for size, most in groups
    )


def _notes(*, is_alike: bool, chunks: int, in_shared_memory: bool) -> Iterator[str]:
    if chunks == 0:
        yield "not one chunk fits, so every store fails"
    if is_alike:
        yield (
            "every rank holds the same, and it is stored once: that is so with worker processes on one node (the default), not with Ray or "
            "several nodes"
        )
    if in_shared_memory:
        yield "the tier lies in /dev/shm, which must have room for it"
