"""Memory of a GPU that is held for nothing, or that will be missed: named, in bytes, with the way out.

Why the thresholds are as they are is in docs/decisions/0021-memory-findings.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.fleet import FleetAssessment, ReplicaAssessment
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.gpu_ledger import gpu_rests
from kvheadroom.capacity.gpus import GpuSnapshot
from kvheadroom.capacity.ledger import Term
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.overhead_parts import OverheadPart


class Finding(StrEnum):
    """A closed list."""

    POOL_ABOVE_DEMAND = "pool_above_demand"
    ROOM_OUTSIDE_BUDGET = "room_outside_budget"
    FOREIGN_MEMORY = "foreign_memory"
    GREW_SINCE_START = "grew_since_start"
    SLOWEST_RANK = "slowest_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFinding:
    """One finding.

    Attributes:
        engine, model_name: of an engine's; empty for that of a GPU.
        gpu: of a GPU's; empty for that of an engine.
        bytes: what it is about, of one GPU: above the demand; that the pool could have more; that others hold; that the overhead
            grew by. Of `slowest_rank` what the other GPUs leave unused together.
        why: one sentence without its full stop.
        way_out: what to do, as the end of a sentence.
        gpu_memory_utilization: that is proposed; None where none is.
    """

    finding: Finding
    replica: str
    engine: str = ""
    model_name: str = ""
    gpu: str = ""
    bytes: int
    why: str
    way_out: str
    gpu_memory_utilization: float | None = None


LEAST_MARGIN_BYTES = GIB
MARGIN_RATIO = 0.02
"""Kept free of a GPU's memory, whichever is more: what a start takes differs by as much from one to the next."""
NOISE_BYTES = 128 * 2**20
"""Of a GPU, before others count as being there, and one rank as holding more than another."""
DEMAND_RATIO = 0.5
"""Share of a pool that all requests at once must be able to fill."""
SAME_CARD_RATIO = 0.95
"""CUDA's total of a card is at least so much of the driver's, and no more than all of it."""

_STEP_PARTS = (OverheadPart.ACTIVATIONS, OverheadPart.WORKSPACES, OverheadPart.ENCODER)


def memory_findings(fleet: FleetAssessment) -> tuple[MemoryFinding, ...]:
    """Of every engine and every GPU of this machine."""
    found: list[MemoryFinding] = []
    for replica in fleet.replicas:
        for engine in replica.engines:
            above = _pool_above_demand(replica, engine)
            # Whose pool is too large already has no use for a larger one.
            one = _room_outside_budget(fleet, replica, engine) if above is None else above
            if one is not None:
                found.append(one)
        found += _foreign_memory(fleet, replica)
        found += _grew_since_start(fleet, replica)
        found += _slowest_rank(fleet, replica)
    return tuple(found)


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _margin(total_bytes: int) -> int:
    return max(LEAST_MARGIN_BYTES, int(MARGIN_RATIO * total_bytes))


def _block_bytes(observation: Observation) -> int | None:
    if not observation.pool_bytes or not observation.num_blocks:
        return None
    return observation.pool_bytes // observation.num_blocks


def _blocks_of_longest(engine: Assessment) -> int | None:
    """Blocks of a request of max_model_len tokens."""
    length = engine.facts.max_model_len
    if length is None or length.assumed:
        return None
    rows = (row for row in engine.sessions if row.session_tokens == length.value)
    return next((row.blocks_per_session for row in rows), None)


def _pool_above_demand(replica: ReplicaAssessment, engine: Assessment) -> MemoryFinding | None:
    """Whether all requests that may run at once, each as long as it may be, fill less than half of the pool."""
    facts, observation = engine.facts, engine.observation
    seqs, usable = facts.max_num_seqs, observation.usable_blocks
    each, block = _blocks_of_longest(engine), _block_bytes(observation)
    if seqs is None or not usable or not each or block is None or engine.snapshot.sleeping:
        return None
    if seqs.assumed and not (facts.command_line is not None and facts.command_line.is_whole):
        return None
    demand = seqs.value * each
    if demand >= DEMAND_RATIO * usable:
        return None
    unused = (usable - demand) * block
    cached = engine.snapshot.echoed.enable_prefix_caching is not False
    flag = (
        f"--kv-cache-memory-bytes {(demand + 1) * block} (vLLM 0.11 and later)"
        if facts.num_gpu_blocks_override is None
        else f"--num-gpu-blocks-override {demand + 1}"
    )
    return MemoryFinding(
        finding=Finding.POOL_ABOVE_DEMAND,
        replica=replica.replica,
        engine=engine.snapshot.engine,
        model_name=engine.snapshot.model_name or "",
        bytes=unused,
        why=f"{seqs.value:,} requests (max_num_seqs) of max_model_len tokens fill {demand:,} of {usable:,} blocks; the other "
        f"{_gib(unused)} of each GPU {'hold nothing but cached prefixes' if cached else 'are never used'}",
        way_out=f"{flag} gives them back; a larger max_num_seqs uses them"
        + (", and cached prefixes may be worth them" if cached else ""),
    )


def _step_bytes(engine: Assessment) -> int | None:
    """What a step may take that an engine need not hold yet: PyTorch takes it as it is first needed, and keeps it.

    As estimated; where the overhead was said as a whole, all that vLLM found as it started.
    """
    estimate = engine.facts.overhead_estimate
    if estimate is not None:
        return sum(estimate.of(part) for part in _STEP_PARTS)
    return None if engine.ledger is None else engine.ledger.of(Term.OVERHEAD).observed_bytes


def _ranks(fleet: FleetAssessment, replica: ReplicaAssessment) -> tuple[GpuSnapshot, ...]:
    """The GPUs of a replica where all of them are of this machine, have memory of their own, and serve nobody else."""
    if fleet.gpus is None or not replica.engines:
        return ()
    facts = replica.engines[0].facts
    parallel = facts.parallelism
    gpus = fleet.gpus.gpus_of(replica.replica)
    if len(gpus) != parallel.tensor * parallel.pipeline * parallel.prefill_context * len(replica.engines):
        return ()
    served = fleet.served()
    if any(gpu.accounting == "host" or len(served[gpu.gpu]) > 1 for gpu in gpus):
        return ()
    return gpus


def _budget(facts: EngineFacts, gpu: GpuSnapshot) -> tuple[int, int] | None:
    """(CUDA's total, what of it gpu_memory_utilization asks for); None where the total is that of another card."""
    if facts.hbm_bytes is None:
        return None
    total = facts.hbm_bytes.value
    if not SAME_CARD_RATIO * gpu.total_bytes <= total <= gpu.total_bytes:
        return None
    return total, math.ceil(total * facts.gpu_memory_utilization.value)


def _whole_percent(share: float) -> float:
    """A utilization, rounded down to two decimals."""
    return math.floor(share * 100) / 100


def _room_outside_budget(
    fleet: FleetAssessment, replica: ReplicaAssessment, engine: Assessment
) -> MemoryFinding | None:
    """What the pool could have of what is free on the tightest of its GPUs.

    Free there is also what a step has not taken yet, which is inside the budget. So no more is proposed than is outside it, and a
    step is taken off as if none of it were held.
    """
    gpus, step = _ranks(fleet, replica), _step_bytes(engine)
    each, block = _blocks_of_longest(engine), _block_bytes(engine.observation)
    if fleet.gpus is None or not gpus or step is None or not each or block is None:
        return None
    if engine.ledger is None or engine.ledger.problem:
        return None
    free = []
    for gpu in gpus:
        others, here = fleet.gpus.others_bytes(gpu.gpu, replica.replica), fleet.free_bytes(gpu)
        if others is None or others > NOISE_BYTES or here is None:
            return None
        free.append(here)
    budgets = [budget for gpu in gpus if (budget := _budget(engine.facts, gpu)) is not None]
    if len(budgets) < len(gpus):
        return None
    total, requested = budgets[0]
    margin, utilization = _margin(total), engine.facts.gpu_memory_utilization.value
    spare = min(min(free) - step, total - requested) - margin
    safe = _whole_percent((requested + spare) / total)
    added = math.ceil(total * safe) - requested
    blocks = added // block
    # Floats: 0.92 + 0.01 is not 0.93.
    if safe - utilization < 0.01 - 1e-9 or blocks < 1:
        return None
    return MemoryFinding(
        finding=Finding.ROOM_OUTSIDE_BUDGET,
        replica=replica.replica,
        engine=engine.snapshot.engine,
        model_name=engine.snapshot.model_name or "",
        bytes=added,
        why=f"{_gib(min(free))} are free on its fullest GPU; {_gib(step)} of them a step may take, and {_gib(margin)} should stay free",
        way_out=f"--gpu-memory-utilization {safe:g} in place of {utilization:g} would add {_gib(added)} to each GPU's pool: "
        f"{blocks:,} blocks, or {blocks / each:,.1f} requests of max_model_len tokens",
        gpu_memory_utilization=safe,
    )


def _foreign_memory(fleet: FleetAssessment, replica: ReplicaAssessment) -> Iterator[MemoryFinding]:
    """Whether others hold more than the budget leaves to them, so that vLLM would not start again.

    vLLM asks for as much free memory as gpu_memory_utilization stands for, also where a flag gives the pool
    (`v1/worker/utils.py` request_memory, 0.33.0).
    """
    if fleet.gpus is None or not replica.engines:
        return
    facts = replica.engines[0].facts
    if facts.gpu_memory_utilization.assumed:
        return
    for gpu in fleet.gpus.gpus_of(replica.replica):
        others = fleet.gpus.others_bytes(gpu.gpu, replica.replica)
        budget = _budget(facts, gpu)
        if others is None or budget is None:
            continue
        total, requested = budget
        if others <= total - requested:
            continue
        lower = _whole_percent((total - others - _margin(total)) / total)
        yield MemoryFinding(
            finding=Finding.FOREIGN_MEMORY,
            replica=replica.replica,
            gpu=gpu.gpu,
            bytes=others,
            why=f"other processes hold {_gib(others)}, and gpu_memory_utilization={facts.gpu_memory_utilization.value:g} leaves them "
            f'{_gib(total - requested)}: once stopped, vLLM would not start here again ("Free memory on device ... is less than '
            'desired GPU memory utilization")',
            way_out="stop them"
            + (f", or start vLLM with --gpu-memory-utilization {lower:g} or less" if lower > 0 else ""),
            gpu_memory_utilization=lower if lower > 0 else None,
        )


def _grew_since_start(fleet: FleetAssessment, replica: ReplicaAssessment) -> Iterator[MemoryFinding]:
    """Whether the overhead grew by more than a step may take, since it was first seen."""
    step = _step_bytes(replica.engines[0]) if replica.engines else None
    if fleet.gpus is None or step is None:
        return
    first = {one.gpu: one.rest_bytes for one in fleet.gpus.first_rests if one.replica == replica.replica}
    totals = {gpu.gpu: gpu.total_bytes for gpu in fleet.gpus.reading.gpus}
    for now in gpu_rests(fleet):
        if now.replica != replica.replica or now.gpu not in first or now.gpu not in totals:
            continue
        grew = now.rest_bytes - first[now.gpu]
        margin = _margin(totals[now.gpu])
        if grew <= step + margin:
            continue
        yield MemoryFinding(
            finding=Finding.GREW_SINCE_START,
            replica=replica.replica,
            gpu=now.gpu,
            bytes=grew,
            why=f"what its processes hold beside weights and pool grew by {_gib(grew)} since it was first seen, to {_gib(now.rest_bytes)}; "
            f"a step may take {_gib(step)} of that",
            way_out="a restart gives it back; if it goes on growing, vLLM runs out of memory",
        )


def _slowest_rank(fleet: FleetAssessment, replica: ReplicaAssessment) -> Iterator[MemoryFinding]:
    """Whether one GPU holds so much more than the others that they leave memory unused.

    All ranks of an engine get the pool of the one with the least room (`v1/core/kv_cache_planning.py` get_kv_cache_configs).
    """
    gpus = _ranks(fleet, replica)
    if len(gpus) < 2 or len(replica.engines) > 1 or len({gpu.total_bytes for gpu in gpus}) > 1:
        return
    rests = {one.gpu: one.rest_bytes for one in gpu_rests(fleet) if one.replica == replica.replica}
    if rests.keys() != {gpu.gpu for gpu in gpus}:
        return
    most, least = max(rests, key=rests.__getitem__), min(rests.values())
    block = _block_bytes(replica.engines[0].observation) or 0
    if rests[most] - least <= max(block, NOISE_BYTES):
        return
    unused = sum(rests[most] - rest for rest in rests.values())
    yield MemoryFinding(
        finding=Finding.SLOWEST_RANK,
        replica=replica.replica,
        gpu=most,
        bytes=unused,
        why=f"its processes hold {_gib(rests[most])} beside weights and pool, on another GPU {_gib(least)}; every GPU gets the pool of the "
        f"fullest, so the others leave {_gib(unused)} unused together",
        way_out="`nvidia-smi` shows what runs on it: often each rank has a context on the first GPU",
    )
