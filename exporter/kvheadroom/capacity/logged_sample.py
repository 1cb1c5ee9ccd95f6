"""What a start-up log tells of the overhead: a sample, or why it is none; and what all its ranks together tell of the pool."""

import bisect
from collections.abc import Iterator

from kvheadroom.capacity.calibration_samples import (
    MOST_FOREIGN_RATIO,
    Basis,
    CalibrationSample,
    Excluded,
    Exclusion,
    SampleSource,
    basis_of,
    checked_sample,
)
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, Printed, StartOutcome, contradictions
from kvheadroom.capacity.prediction import logged_tokens, plan_pool

MOST_WEIGHTS_OFF_RATIO = 0.25
"""By so much of the larger one the weights that a log tells and the predicted ones may differ. In public logs those of a checkpoint that is stored
as its config.json says differ by at most 15%, those of another format by 42% and more."""
MOST_TOTAL_OFF_RATIO = 0.015
"""By so much the memory of a GPU in a log and what is taken for it may differ; the driver moves it by up to 0.6%."""


def excluded_by_outcome(logged: LoggedStart) -> Excluded | None:
    """Why a start is none by how it ended, whatever engine it is of; None where it came up."""
    if logged.outcome is StartOutcome.FAILED:
        return Excluded(Exclusion.FAILED_START, f"this start failed: {logged.failure}")
    if logged.outcome is StartOutcome.CUT:
        return Excluded(
            Exclusion.UNFINISHED_START, "the log ends, or another start follows, before this start does"
        )
    return None


def sample_of_log(
    facts: EngineFacts, logged: LoggedStart, *, start: str, evidence: str
) -> CalibrationSample | Excluded:
    """What a start-up log tells, by the rank that left the least: vLLM gives all ranks its pool.

    Args:
        facts: of such an engine, with what the log says of flags and release.
    """
    ended = excluded_by_outcome(logged)
    if ended is not None:
        return ended
    base = basis_of(facts)
    if isinstance(base, Excluded):
        return base
    ranks = [(rank, left) for rank in logged.ranks if (left := rank.left) is not None]
    if any(rank.is_pinned for rank, _ in ranks):
        return Excluded(Exclusion.POOL_BY_FLAG, "the pool was set by a flag or a stored plan, not measured")
    if not ranks:
        return Excluded(Exclusion.UNKNOWN, "the log does not say what was left for the KV cache")
    # Some releases let another rank tell the GPU's memory than the one that tells what was left.
    for rank in logged.ranks:
        said = next(contradictions(rank, logged.release), None) or next(_not_these(facts, base, rank), None)
        if said is not None:
            return Excluded(Exclusion.IMPOSSIBLE, said)
        if (foreign := _foreign(rank)) is not None:
            return Excluded(Exclusion.FOREIGN_MEMORY, foreign)
    if logged.is_cold and facts.gpu is None:
        return Excluded(
            Exclusion.COLD_START,
            "it compiled the model anew, on a GPU that the catalogue lacks: one that shares its memory with the CPU measures less "
            "until the next start",
        )

    def overhead_of(rank: LoggedRank, left: Printed) -> int:
        return base.requested_bytes - base.weights.stage_bytes[stage_of(facts, rank.label)] - left.bytes

    # The rank that holds the most beside its weights leaves the least.
    rank, left = max(ranks, key=lambda one: overhead_of(*one))
    overhead, rounding = overhead_of(rank, left), left.uncertainty_bytes
    pool = logged_pool(facts, logged)
    if pool is not None and len(base.weights.stage_bytes) == 1:
        by_pool = base.requested_bytes - base.weights.stage_bytes[0] - pool.bytes
        # Most releases let one rank alone tell what it left, and then the pool is that of another.
        if by_pool - overhead > pool.uncertainty_bytes + rounding:
            overhead, rounding = by_pool, pool.uncertainty_bytes
    return checked_sample(
        facts,
        base,
        overhead,
        rounding,
        start=start,
        source=SampleSource.LOG,
        model=logged.model or "",
        measured_weights_bytes=None if rank.weights is None else rank.weights.bytes,
        is_cold=bool(logged.is_cold),
        settings=_unusual(facts, rank),
        evidence=evidence + (f", {rank.label}" if rank.label and len(ranks) > 1 else ""),
    )


def logged_pool(facts: EngineFacts, logged: LoggedStart) -> Printed | None:
    """The pool of all ranks, by the blocks or the tokens that the log tells; less than a block too small."""
    layout = plan_layout(facts)
    if not isinstance(layout, KvLayout):
        return None
    blocks = logged.num_gpu_blocks
    if blocks is None and logged.pool_tokens is not None:
        blocks = _blocks_of(facts, layout, logged.pool_tokens)
    if blocks is None:
        return None
    return Printed(blocks * layout.bytes_per_block, layout.bytes_per_block - 1)


def _blocks_of(facts: EngineFacts, layout: KvLayout, tokens: int) -> int | None:
    """The fewest blocks of which the log of the release names so many tokens; None where it names them of no number."""
    length = None if facts.max_model_len is None else facts.max_model_len.value

    def named(blocks: int) -> int:
        pool = plan_pool(layout, None, blocks, length)
        return 0 if pool is None else logged_tokens(pool, layout, facts) or 0

    blocks = bisect.bisect_left(range(_MOST_BLOCKS), tokens, key=named)
    return blocks if blocks < _MOST_BLOCKS and named(blocks) == tokens else None


_MOST_BLOCKS = 2**32


def stage_of(facts: EngineFacts, label: str) -> int:
    """The pipeline stage of a rank, by its label (`PP1_TP0`, 0.33.0 `v1/executor/multiproc_executor.py`), else the first."""
    return min(_index("PP", label) or 0, facts.pipeline_parallel_size.value - 1)


def _index(name: str, label: str) -> int | None:
    """The number behind a name in the label of a rank."""
    for part in label.split("_"):
        if part.startswith(name) and part[len(name) :].isdecimal():
            return int(part[len(name) :])
    return None


def _not_these(facts: EngineFacts, base: Basis, rank: LoggedRank) -> Iterator[str]:
    """What shows that a rank is of another engine than these facts are of."""
    for name, flag in _SIZES:
        index, size = _index(name, rank.label), getattr(facts, flag).value
        if index is not None and index >= size:
            yield f"rank {rank.label} is of an engine on more GPUs than {flag}={size} gives"
    if (
        rank.total is not None
        and abs(rank.total.bytes - base.total_bytes) > MOST_TOTAL_OFF_RATIO * base.total_bytes
    ):
        yield (
            f"the GPU has {rank.total}, and {base.total_bytes / GIB:,.2f} GiB are taken for it: it is not that card, or set `hbm_bytes: N` "
            "beside it"
        )
    predicted = base.weights.stage_bytes[stage_of(facts, rank.label)]
    loaded = rank.weights
    if (
        loaded is not None
        and abs(loaded.bytes - predicted) > MOST_WEIGHTS_OFF_RATIO * max(loaded.bytes, predicted)
        and rank.external_weights is None
    ):
        yield (
            f"loading took {loaded}, and {predicted / GIB:,.2f} GiB are the weights of this model for one GPU: it is another model, another "
            "format of the weights or another parallel size"
        )


_SIZES = (("TP", "tensor_parallel_size"), ("PP", "pipeline_parallel_size"))


def _foreign(rank: LoggedRank) -> str | None:
    if rank.total is None or rank.free_at_start is None:
        return None
    taken = rank.total.bytes - rank.free_at_start.bytes
    if taken <= MOST_FOREIGN_RATIO * rank.total.bytes:
        return None
    return f"{taken / GIB:,.2f} GiB of the GPU were taken before this start looked at it"


def _unusual(facts: EngineFacts, rank: LoggedRank) -> str:
    """That an environment variable keeps a release from taking CUDA graphs off, where it would."""
    if rank.graphs_counted is False and facts.rules.subtracts_graphs:
        return "cuda_graphs_counted=false"
    return ""
