"""Layers -> groups that share a block table: `get_kv_cache_groups` of vLLM 0.33.0 `v1/core/kv_cache_planning.py`.

Every group takes blocks from the same pool, so a block must hold the widest of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvheadroom.capacity.kv_specs import HOLDS_EVERY_TOKEN, Kind, KvSpec, RequestShape, ceil_div, round_up
from kvheadroom.capacity.release_rules import PackedBlocks


class CannotGroupError(ValueError):
    """vLLM would not start with such layers, or only in a way that is not modelled; one sentence."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one block table.

    Attributes:
        layers: places of its layers in the whole model's list; specs in the same order.
        distinct: its different specs.
    """

    layers: tuple[int, ...]
    specs: tuple[KvSpec, ...]
    distinct: tuple[KvSpec, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "distinct", tuple(dict.fromkeys(self.specs)))

    @property
    def block_size(self) -> int:
        """Tokens of one block of the group."""
        return self.specs[0].block_size

    def context_tokens(self, decode_context: int) -> int:
        """Tokens of one context that a block holds, over the GPUs that share it (`resolve_dcp_kv_block_size`, 0.33.0 `v1/core/kv_cache_utils.py`)."""
        return self.block_size * (decode_context if self.specs[0].dcp_sharded else 1)

    def blocks(self, tokens: int, shape: RequestShape) -> int:
        """Blocks that one request needs of this group."""
        return max(spec.blocks(tokens, shape) for spec in self.distinct)

    def of_stage(self, stage: range) -> "KvGroup":
        """The same group, with the layers of one pipeline stage only."""
        kept = [(i, spec) for i, spec in zip(self.layers, self.specs, strict=True) if i in stage]
        return KvGroup(tuple(i for i, _ in kept), tuple(spec for _, spec in kept))


def group_layers(
    specs: Sequence[KvSpec],
    *,
    block_outermost: bool,
    promote_windows: bool,
    largest_kind_factor: float,
) -> tuple[KvGroup, ...]:
    """Groups of the whole model.

    Args:
        block_outermost: the layout keeps all layers' parts of one block together, so pages may differ in size.
        promote_windows: `--disable-hybrid-kv-cache-manager`: windows keep every token.
        largest_kind_factor: layers are padded up to the commonest kind where it has less than this many times the
            layers of the rarest (`ReleaseRules.largest_kind_factor`).

    Raises:
        CannotGroupError: with the reason.
    """
    specs = list(specs)
    if promote_windows:
        specs = _promote_windows(specs)
    everything = range(len(specs))
    if _mergeable(specs) or _one_type(specs):
        return (_group(specs, everything),)
    packed = _packed_groups(specs) if block_outermost else None
    if packed is not None:
        return packed
    try:
        return _equal_groups(_equal_pages(specs), largest_kind_factor)
    except CannotGroupError:
        latent = any(spec.kind is Kind.LATENT for spec in specs)
        window = any(spec.kind is Kind.WINDOW for spec in specs)
        if not (latent and window) or any(spec.kind in (Kind.LATENT_WINDOW, Kind.CHUNKED) for spec in specs):
            raise
        # Windows that cannot share pages with latent attention keep every token.
        promoted = _promote_windows(specs)
        if not _one_type(promoted):
            raise
        return (_group(promoted, everything),)


def bytes_per_block(
    groups: Iterable[KvGroup], *, block_outermost: bool, packed: PackedBlocks = PackedBlocks.OVER_ONE_ANOTHER
) -> int:
    """Bytes of one block of the pool on one GPU (`_get_kv_cache_bytes_per_block`)."""
    groups = [group for group in groups if group.specs]
    windows = any(group.specs[0].kind is Kind.LATENT_WINDOW for group in groups)
    if windows and packed is not PackedBlocks.OVER_ONE_ANOTHER:
        return _slotted_bytes(groups, packed)
    if not block_outermost:
        return max(sum(spec.stride for spec in group.specs) for group in groups)
    widest = max(sum(spec.page_bytes for spec in group.specs) for group in groups)
    return round_up(widest, math.lcm(*{spec.stride_multiple for group in groups for spec in group.specs}))


def _slotted_bytes(groups: Sequence[KvGroup], packed: PackedBlocks) -> int:
    """Bytes of one block where every layer has a slot of one of the sizes of full latent attention.

    vLLM 0.22.0 and 0.24.0: `v1/core/kv_cache_utils.py` _get_kv_cache_groups_uniform_groups, _pool_bytes_per_block.
    """
    latent = (spec for group in groups for spec in group.specs if spec.kind is Kind.LATENT)
    sizes = sorted({spec.page_bytes for spec in latent})
    slots: Counter[int] = Counter()
    for group in groups:
        fitting = [[size for size in sizes if size >= spec.page_bytes] for spec in group.specs]
        if not all(fitting):
            raise CannotGroupError("the blocks of latent windows are larger than those of latent attention")
        # `|` keeps the larger count of each.
        slots |= Counter(larger[0] for larger in fitting)
    if packed is PackedBlocks.BY_TUPLES:
        return sum(sizes) * max(slots.values())
    return sum(size * count for size, count in slots.items())


def _group(specs: Sequence[KvSpec], layers: Iterable[int]) -> KvGroup:
    layers = tuple(layers)
    return KvGroup(layers, tuple(specs[i] for i in layers))


def _mergeable(specs: Sequence[KvSpec]) -> bool:
    """Whether one spec can stand for all (`merge`): equal, but for the windows of promoted layers."""
    distinct = set(specs)
    if len(distinct) == 1:
        return True
    if len({replace(spec, window=None, chunk=None) for spec in distinct}) > 1:
        return False
    if next(iter(distinct)).kind not in HOLDS_EVERY_TOKEN:
        return False
    windows = {spec.window for spec in distinct} - {None}
    chunks = {spec.chunk for spec in distinct} - {None}
    return len(windows) <= 1 and len(chunks) <= 1 and not (windows and chunks)


def _one_type(specs: Sequence[KvSpec]) -> bool:
    """Whether all need the same number of token slots (`UniformTypeKVCacheSpecs.is_uniform_type`)."""
    distinct = set(specs)
    if len({(spec.block_size, spec.dcp_sharded) for spec in distinct}) > 1:
        return False
    kinds = {spec.kind for spec in distinct}
    if kinds <= HOLDS_EVERY_TOKEN:
        return True
    if len(kinds) > 1:
        return False
    kind = kinds.pop()
    if kind is Kind.STATE:
        return len({(spec.type_key, spec.page_bytes) for spec in distinct}) == 1
    return len({(spec.window, spec.chunk) for spec in distinct}) == 1


def _promote_windows(specs: Sequence[KvSpec]) -> list[KvSpec]:
    """Windows and chunks become full attention where there is some (`_promote_local_kv_cache_specs`)."""
    if _mergeable(specs) or _one_type(specs):
        return list(specs)
    if any(spec.kind is Kind.LATENT_WINDOW for spec in specs):
        raise CannotGroupError("vLLM cannot do without the hybrid KV cache manager for this model")
    local = (Kind.WINDOW, Kind.CHUNKED)
    full = {spec.block_size for spec in specs if spec.kind in HOLDS_EVERY_TOKEN}
    promoted = [_promoted(spec, full) if full and spec.kind in local else spec for spec in specs]
    if not (_mergeable(promoted) or _one_type(promoted)):
        raise CannotGroupError(
            "without the hybrid KV cache manager all layers must become one type, and these do not"
        )
    return promoted


def _promoted(spec: KvSpec, full: set[int]) -> KvSpec:
    block_size = next(iter(full)) if len(full) == 1 else spec.block_size
    padded = spec.padded_bytes
    if padded is not None:
        padded = max(padded, spec.unpadded_bytes * block_size // spec.block_size)
    return replace(spec, kind=Kind.FULL, block_size=block_size, padded_bytes=padded, extra_tokens=0)


def _equal_pages(specs: Sequence[KvSpec]) -> list[KvSpec]:
    """Every layer's block made as large as the largest (`unify_kv_cache_spec_page_size`)."""
    largest = max(spec.page_bytes for spec in specs)
    return [_with_page(spec, largest) for spec in specs]


def _with_page(spec: KvSpec, page: int) -> KvSpec:
    if spec.page_bytes == page:
        return spec
    if spec.kind is Kind.STATE:
        return replace(spec, padded_bytes=page)
    if page % spec.page_bytes == 0:
        wider = replace(spec, block_size=spec.block_size * (page // spec.page_bytes))
        if wider.page_bytes == page:
            return wider
    elif spec.kind is not Kind.LATENT:
        return replace(spec, padded_bytes=page)
    raise CannotGroupError("the blocks of these layers cannot be made equally large")


def _equal_groups(specs: Sequence[KvSpec], largest_kind_factor: float) -> tuple[KvGroup, ...]:
    """Groups of equally many layers, each of one kind (`_get_kv_cache_groups_uniform_page_size`)."""
    kinds: list[list[int]] = []
    for distinct in dict.fromkeys(specs):
        layers = [i for i, spec in enumerate(specs) if spec == distinct]
        for kind in kinds:
            if _mergeable([distinct, *(specs[i] for i in kind)]):
                kind.extend(layers)
                break
        else:
            kinds.append(layers)
    fewest, most = min(map(len, kinds)), max(map(len, kinds))
    size = most if most < fewest * largest_kind_factor else fewest
    groups = []
    for layers in kinds:
        count = ceil_div(len(layers), size)
        # Every count-th layer, so that each pipeline stage has its share of every group.
        groups += [_group(specs, layers[i::count]) for i in range(count)]
    return tuple(groups)


def _packed_groups(specs: Sequence[KvSpec]) -> tuple[KvGroup, ...] | None:
    """Groups whose pages differ in size, packed side by side (`_get_packed_kv_cache_groups`)."""
    if len({spec.page_bytes for spec in specs}) == 1:
        return None
    buckets: list[list[int]] = []
    places: dict[KvSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        if spec not in places:
            bucket = next((b for b in buckets if _one_type([spec, *{specs[j] for j in b}])), None)
            if bucket is None:
                bucket = []
                buckets.append(bucket)
            places[spec] = bucket
        places[spec].append(i)
    plans = [_Bucket(specs, bucket) for bucket in buckets]
    floor = max((plan.repeats for plan in plans if plan.balanced and len(plan.pages) > 1), default=0)
    repeats = _least_padding([plan.repeats for plan in plans if plan.balanced], floor) if floor else None
    for plan in plans:
        plan.count = ceil_div(plan.repeats, repeats) if plan.balanced and repeats is not None else 1

    def is_state(plan: _Bucket) -> bool:
        kind = plan.first.kind
        return kind in (Kind.STATE, Kind.RING) or (
            repeats is None and kind in (Kind.WINDOW, Kind.LATENT_WINDOW)
        )

    # What a block must hold however states are split: they can go down to one state per group.
    anchor = max(plan.widest(len(plan.layers) if is_state(plan) else plan.count) for plan in plans)
    groups: list[KvGroup] = []
    for plan in plans:
        count = plan.count
        if is_state(plan):
            per_block = max(anchor // plan.first.page_bytes, 1)
            count = max(count, ceil_div(len(plan.layers), per_block))
        groups += plan.split(count)
    return tuple(groups)


class _Bucket:
    """Layers of one type, by the size of their pages."""

    def __init__(self, specs: Sequence[KvSpec], layers: list[int]) -> None:
        self._specs = specs
        self.layers = layers
        self.first = specs[layers[0]]
        self.pages: dict[int, list[int]] = {}
        for i in layers:
            self.pages.setdefault(specs[i].page_bytes, []).append(i)
        self.balanced = len({len(same) for same in self.pages.values()}) == 1
        self.repeats = max(Counter(specs[i].page_bytes for i in layers).values())
        self.count = 1

    def widest(self, count: int) -> int:
        """Bytes of the widest of `count` groups."""
        return sum(ceil_div(len(layers), count) * page for page, layers in self.pages.items())

    def split(self, count: int) -> list[KvGroup]:
        """`count` groups with equally many repeats of the pattern of pages."""
        if count == 1:
            return [_group(self._specs, self.layers)]
        repeats = list(zip(*self.pages.values(), strict=False))
        return [
            _group(self._specs, [i for repeat in repeats[n::count] for i in repeat]) for n in range(count)
        ]


def _least_padding(counts: Sequence[int], smallest: int) -> int:
    """The size of a part, at least `smallest`, that pads `counts` least; the largest of equals."""
    sizes = range(max(1, smallest), max(counts) + 1)
    if not sizes:
        return max(1, smallest)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
