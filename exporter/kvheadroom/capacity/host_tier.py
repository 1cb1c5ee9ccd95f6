"""The host's memory against the tier of the KV cache that lies in it: what it takes, and what is there.

Up to 0.26 each worker has a pinned tensor for each tensor of its cache, or one where all layers' blocks lie together (vLLM 0.26.0
`v1/kv_offload/cpu/gpu_worker.py` CPUOffloadingWorker, `v1/worker/kv_connector_model_runner_mixin.py` use_uniform_kv_cache), and PyTorch's
allocator of pinned memory rounds each up to a power of two (CachingHostAllocator; vllm issue 53042). From 0.27 the tier is a file of
`/dev/shm` of exactly its size (`v1/kv_offload/cpu/shared_offload_region.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.kv_cache import KvLayout
from kvheadroom.capacity.kv_groups import KvGroup
from kvheadroom.capacity.kv_specs import Kind
from kvheadroom.capacity.offload_tier import OffloadTier
from kvheadroom.capacity.overhead import runs_second_runner
from kvheadroom.capacity.warm_findings import WarmFinding, in_gib

_NOTABLE = 1.1
"""So much more than was asked for is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """Host memory that the tier of one engine takes, all its workers together.

    Attributes:
        tier_bytes: that the tier holds.
        low_bytes, high_bytes: between which it lies; equal where it is known how vLLM cuts the tier.
        fitting_bytes: the largest size to ask for whose tensors are rounded up to half as much; None where the tensors are not known, or are not
            rounded up by much.
        in_shared_memory: the tier lies in `/dev/shm`.
    """

    tier_bytes: int
    low_bytes: int
    high_bytes: int
    fitting_bytes: int | None = None
    in_shared_memory: bool = False

    @property
    def bytes(self) -> int | None:
        """What it takes; None where it is only known between which two."""
        return self.low_bytes if self.low_bytes == self.high_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What the kernel says of the memory of a server's machine and of the server's own processes; None where it does not tell.

    Attributes:
        total_bytes, available_bytes: of the machine (MemTotal, MemAvailable).
        shared_bytes: of the machine, whoever uses them (Shmem).
        shm_total_bytes, shm_free_bytes: of `/dev/shm` as the server sees it.
        limit_bytes, limit_used_bytes: of the tightest memory limit of the server's control groups.
        processes: of the server, that were read.
        processes_shared_bytes: theirs added up (RssShmem): what several of them share counts for each.
        processes_anonymous_bytes: theirs added up (RssAnon).
        engines: of the server, by the titles of its processes; None where none has one.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    shared_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    limit_bytes: int | None = None
    limit_used_bytes: int | None = None
    processes: int = 0
    processes_shared_bytes: int | None = None
    processes_anonymous_bytes: int | None = None
    engines: int | None = None


def host_need(facts: EngineFacts, layout: KvLayout, tier: OffloadTier) -> HostNeed:
    """What the tier of one engine takes of the host's memory."""
    if tier.in_shared_memory or not facts.rules.offload.rounds_allocations or not tier.num_chunks:
        return HostNeed(
            tier_bytes=tier.bytes,
            low_bytes=tier.bytes,
            high_bytes=tier.bytes,
            in_shared_memory=tier.in_shared_memory,
        )
    per_stage = facts.parallelism.tensor * facts.parallelism.prefill_context
    blocks = tier.num_chunks * tier.blocks_per_chunk
    # The second model runner keeps a tensor for each layer; what else has vLLM take the first is not known here (0.26.0 `config/vllm.py`
    # use_v2_model_runner).
    is_first_runner = facts.model is not None and not runs_second_runner(facts, facts.model)
    cuts = list(_cuts(layout, in_one_tensor=tier.is_alone and is_first_runner))
    if not cuts:
        # A tensor of 2^n + 1 bytes takes nearly twice as much.
        return HostNeed(tier_bytes=tier.bytes, low_bytes=tier.bytes, high_bytes=2 * tier.bytes)
    needs = [per_stage * rounded_bytes(blocks, pages) for pages in cuts]
    return HostNeed(
        tier_bytes=tier.bytes,
        low_bytes=min(needs),
        high_bytes=max(needs),
        fitting_bytes=_fitting(cuts[0], tier) if len(set(needs)) == 1 else None,
    )


def rounded_bytes(blocks: int, pages: Iterable[int]) -> int:
    """Pinned memory of tensors of so many blocks, each rounded up to a power of two.

    Args:
        pages: bytes of a block in each tensor.
    """
    return sum(1 << (blocks * page - 1).bit_length() for page in pages if page)


def _cuts(layout: KvLayout, *, in_one_tensor: bool) -> Iterator[tuple[int, ...]]:
    """Bytes of a block in each tensor of one worker of each pipeline stage, for each way in which vLLM may cut them; none where it is not known.

    K and V in tensors of their own (0.19 and later, some backends) change nothing: twice the half is the same power of two.

    Args:
        in_one_tensor: layers of plain attention lie together wherever they may.
    """
    stages = list(_stages(layout))
    for groups, size in zip(stages, layout.stage_bytes_per_block, strict=True):
        if size != max(sum(spec.page_bytes for spec in group.specs) for group in groups):
            return
    by_layer = tuple(
        page
        for groups in stages
        for page in max(([spec.page_bytes for spec in group.specs] for group in groups), key=sum)
    )
    together = layout.stage_bytes_per_block
    specs = {spec for group in layout.groups for spec in group.specs}
    kinds = {spec.kind for spec in specs}
    may_lie_together = len(layout.groups) == 1 and len(specs) == 1 and Kind.STATE not in kinds
    if may_lie_together:
        yield together
    # Latent attention's need a backend that can, and another connector may want it otherwise.
    if not may_lie_together or kinds != {Kind.FULL} or not in_one_tensor:
        yield by_layer


def _stages(layout: KvLayout) -> Iterator[list[KvGroup]]:
    places = [0]
    for count in layout.stage_layers:
        places.append(places[-1] + count)
    for first, end in pairwise(places):
        groups = [group.of_stage(range(first, end)) for group in layout.groups]
        yield [group for group in groups if group.specs]


def _fitting(pages: tuple[int, ...], tier: OffloadTier) -> int | None:
    """A size a little smaller, all of whose tensors are just within a power of two."""
    if len(set(pages)) != 1:
        return None
    whole = 1 << (tier.num_chunks * tier.blocks_per_chunk * pages[0] - 1).bit_length()
    chunks = whole // 2 // (pages[0] * tier.blocks_per_chunk)
    return chunks * tier.chunk_bytes if 0 < chunks < tier.num_chunks else None


def host_findings(
    need: HostNeed, tier: OffloadTier, memory: HostUse | None, *, engines: int, runs: bool
) -> Iterator[tuple[WarmFinding, str]]:
    """What is wrong between the tiers of one server and its host's memory, each with a sentence and the way out.

    Args:
        memory: of its host; None where it is not known.
        engines: on this host; each has a tier of its own.
        runs: the server has its tier already; else it is to be started.
    """
    yield from _above_tier(need, tier, memory, engines)
    if memory is None:
        return
    low = need.low_bytes * engines
    where = "" if runs else "if it is to run on this machine: "
    taken = f"{where}{_each(engines)} {in_gib(low)}{'' if need.bytes is not None else ' or more'} of the host's memory"
    room = memory.shm_total_bytes if runs else memory.shm_free_bytes
    if need.in_shared_memory and room is not None and low > room:
        yield (
            WarmFinding.TIER_ABOVE_SHM,
            (
                f"{taken}, all in /dev/shm, which has {in_gib(room)}{'' if runs else ' free'}; give it more (docker `--shm-size`, in "
                "Kubernetes an emptyDir with `medium: Memory`, else `mount -o remount,size=N /dev/shm`), or the tier less"
            ),
        )
    yield from _above_host(low, taken, memory, runs=runs)


def _above_host(low: int, taken: str, memory: HostUse, *, runs: bool) -> Iterator[tuple[WarmFinding, str]]:
    anonymous = (memory.processes_anonymous_bytes or 0) if runs else 0
    beside = f", beside {in_gib(anonymous)} of its processes' own" if anonymous else ""
    limits = [
        (limit, what)
        for limit, what in (
            (memory.limit_bytes, "the memory limit of its control group"),
            (memory.total_bytes, "all that the machine has"),
        )
        if limit is not None
    ]
    if not limits:
        return
    limit, what = min(limits)
    if low + anonymous > limit:
        yield (
            WarmFinding.TIER_ABOVE_HOST_MEMORY,
            (
                f"{taken}{beside}, and {what} is {in_gib(limit)}: the kernel ends a process when it is filled; make the tier smaller or the limit "
                "larger"
            ),
        )


def _above_tier(
    need: HostNeed, tier: OffloadTier, memory: HostUse | None, engines: int
) -> Iterator[tuple[WarmFinding, str]]:
    asked = tier.given_bytes * engines
    # Of a file that all workers map, what each of them shows would count several times.
    measured = None if memory is None or need.in_shared_memory else memory.processes_shared_bytes
    is_measured = need.bytes is None and measured is not None and measured > _NOTABLE * asked
    if need.low_bytes <= _NOTABLE * tier.given_bytes and not is_measured:
        return
    planned = in_gib(need.low_bytes * engines)
    if need.bytes is None:
        planned += f" to {in_gib(need.high_bytes * engines)}"
    else:
        planned += f" ({need.low_bytes / tier.given_bytes:.2f} times)"
    seen = ""
    if measured is not None and measured >= asked:
        seen = f"; its processes have {in_gib(measured)} of shared memory, {measured / asked:.2f} times what was asked for"
    smaller = (
        f", or ask for {need.fitting_bytes * 100 // GIB / 100:.2f} GiB or less, which takes half"
        if need.fitting_bytes
        else ""
    )
    yield (
        WarmFinding.HOST_MEMORY_ABOVE_TIER,
        (
            f"{_each(engines)} {planned} of the host's memory, and {in_gib(asked)} were asked for: this vLLM pins each tensor on its own and rounds "
            f"it up to a power of two{seen}; use vLLM 0.27 or newer{smaller}"
        ),
    )


def _each(engines: int) -> str:
    return "the tier takes" if engines == 1 else f"the tiers of {engines} engines take"
