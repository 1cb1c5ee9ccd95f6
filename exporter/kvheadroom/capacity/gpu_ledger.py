"""What is on a GPU of this machine, term by term, as its driver counts it.

vLLM takes its pool whole as it starts, so weights and pool are in what the driver calls used, however many requests run. What is
left of it is context, communication, CUDA graphs, workspaces and whatever PyTorch keeps: the overhead as it is now, where the pool tells the one
that vLLM measured as it started (`ledger`).
"""

from dataclasses import dataclass
from enum import StrEnum

from kvheadroom.capacity.assessment import Assessment
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.fleet import FleetAssessment, GpuRest, ReplicaState
from kvheadroom.capacity.gpus import GpuSnapshot


class GpuTerm(StrEnum):
    """A closed list."""

    RESERVED = "reserved"
    OTHERS = "others"
    WEIGHTS = "weights"
    KV_POOL = "kv_pool"
    REST = "rest"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLedger:
    """One GPU that serves one replica.

    Attributes:
        total_bytes: reserved + used + free of NVML, which is its total within 1%; the terms add up to it.
        terms: (term, bytes) of those that are known; none where `unknown` says why.
        note: what else stands in `rest`, one sentence; empty where nothing does.
        unknown: why there are no terms, one sentence.
    """

    gpu: str
    replica: str
    total_bytes: int
    terms: tuple[tuple[GpuTerm, int], ...] = ()
    note: str = ""
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmTotals:
    """The memory of one GPU by three counts, in bytes; vLLM budgets with CUDA's.

    Attributes:
        as_sold_bytes: by the box; None where that is not known, and of a MIG device, which nobody sells.
        nvml_bytes: of the GPUs of this machine that serve the engine's replica; None where there are none, they differ, or their
            memory is the host's.
    """

    as_sold_bytes: int | None
    cuda_bytes: int
    nvml_bytes: int | None


def hbm_totals(fleet: FleetAssessment, replica: str, facts: EngineFacts) -> HbmTotals | None:
    """Of the GPUs of one engine; None where CUDA's total is not known."""
    if facts.hbm_bytes is None:
        return None
    gpus = () if fleet.gpus is None else fleet.gpus.gpus_of(replica)
    totals = {gpu.total_bytes for gpu in gpus if gpu.accounting != "host"}
    return HbmTotals(
        as_sold_bytes=None if any(gpu.parent is not None for gpu in gpus) else facts.marketed_bytes,
        cuda_bytes=facts.hbm_bytes.value,
        nvml_bytes=totals.pop() if len(totals) == 1 else None,
    )


def gpu_ledgers(fleet: FleetAssessment) -> tuple[GpuLedger, ...]:
    """Of each GPU of this machine that gave numbers and serves somebody."""
    if fleet.gpus is None:
        return ()
    engines = {replica.replica: replica.engines for replica in fleet.replicas}
    served = fleet.served()
    ledgers = []
    for gpu in fleet.gpus.reading.gpus:
        replicas = served.get(gpu.gpu, [])
        if gpu.accounting == "host" or not replicas:
            continue
        total = _total(gpu)
        if len(replicas) > 1:
            why = f"{len(replicas)} replicas run on it, and which memory is whose is not known"
            ledgers += [
                GpuLedger(gpu=gpu.gpu, replica=replica, total_bytes=total, unknown=why)
                for replica in replicas
            ]
            continue
        [replica] = replicas
        others = fleet.gpus.others_bytes(gpu.gpu, replica)
        ledgers.append(_ledger(gpu, replica, engines.get(replica, ()), others))
    return tuple(ledgers)


def gpu_rests(fleet: FleetAssessment) -> tuple[GpuRest, ...]:
    """Of each replica that serves, where the driver tells what its processes hold, as of the last list of processes.

    Unlike the ledger's rest it has nothing of others in it, however old that list is.
    """
    if fleet.gpus is None:
        return ()
    serving = {one.replica: one for one in fleet.replicas if one.state is ReplicaState.SERVING}
    rests = []
    for one in fleet.gpus.runs.others:
        held = _held(serving[one.replica].engines) if one.replica in serving else ""
        if not isinstance(held, str) and one.own_bytes >= sum(held):
            rests.append(GpuRest(one.gpu, one.replica, one.own_bytes - sum(held)))
    return tuple(rests)


def _ledger(gpu: GpuSnapshot, replica: str, engines: tuple[Assessment, ...], others: int | None) -> GpuLedger:
    held, total = _held(engines), _total(gpu)
    if isinstance(held, str):
        return GpuLedger(gpu=gpu.gpu, replica=replica, total_bytes=total, unknown=held)
    weights, pool = held
    rest = gpu.used_bytes - weights - pool - (others or 0)
    if rest < 0:
        why = (
            f"weights and pool are {-rest / 2**30:,.2f} GiB more than what is in use there: the weights are others than predicted, "
            "or it serves somebody else"
        )
        return GpuLedger(gpu=gpu.gpu, replica=replica, total_bytes=total, unknown=why)
    terms = (
        (GpuTerm.RESERVED, gpu.reserved_bytes),
        (GpuTerm.OTHERS, others),
        (GpuTerm.WEIGHTS, weights),
        (GpuTerm.KV_POOL, pool),
        (GpuTerm.REST, rest),
        (GpuTerm.FREE, gpu.free_bytes),
    )
    unseen = [
        what
        for what, size in (("what the driver reserves", gpu.reserved_bytes), ("other processes", others))
        if size is None
    ]
    return GpuLedger(
        gpu=gpu.gpu,
        replica=replica,
        total_bytes=total,
        terms=tuple((term, size) for term, size in terms if size is not None),
        note=f"{' and '.join(unseen)} cannot be told apart here and would be in the rest" if unseen else "",
    )


def _total(gpu: GpuSnapshot) -> int:
    return (gpu.reserved_bytes or 0) + gpu.used_bytes + gpu.free_bytes


def _held(engines: tuple[Assessment, ...]) -> tuple[int, int] | str:
    """(weights, pool) of one GPU, or why they are not known."""
    if not engines:
        return "no numbers of its replica are there"
    if any(engine.snapshot.sleeping for engine in engines):
        return "an engine on it sleeps"
    if any(engine.facts.pipeline_parallel_size.value > 1 for engine in engines):
        return "which pipeline stage runs on it is not known"
    pools = {engine.observation.pool_bytes for engine in engines}
    if len(pools) > 1:
        return "the engines of its replica have pools of different sizes, and which runs on it is not known"
    budget = engines[0].prediction.budget
    [pool] = pools
    if pool is None or budget is None or budget.weights is None:
        return "the bytes of the pool or the weights are not known"
    [weights] = budget.weights.stage_bytes
    return weights, pool
