"""What vLLM printed while it started: the bytes that each rank found, took and left, as figures that say how exact they are.

Logs print GiB rounded to two decimals, the weights to four up to 0.13; what is worked out from them is known no better.
Nothing here is guessed: a figure that the log does not hold is `None`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.release_rules import parse_release

V0_UTILIZATION_UNCERTAINTY = 0.005
_FIRST_WITH_ESTIMATES = (0, 18, 0)


@dataclass(frozen=True, slots=True)
class Printed:
    """A figure as it was printed.

    Attributes:
        uncertainty_bytes: half a unit of its last decimal; 0 where bytes were printed.
    """

    bytes: int
    uncertainty_bytes: int

    def __str__(self) -> str:
        """In the log's own unit."""
        return f"{self.bytes / GIB:.2f} GiB"


class StartOutcome(StrEnum):
    """How a start ended, as far as the log tells; `cut`: neither its end nor an error stands there."""

    STARTED = "started"
    FAILED = "failed"
    CUT = "cut"


class LogProblemKind(StrEnum):
    """What is wrong with a log. A closed list."""

    NOT_VLLM = "not_vllm"
    NO_START = "no_start"
    CUT = "cut"
    CONTRADICTION = "contradiction"
    UNIT = "unit"
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class LogProblem:
    """One sentence for a person, with the lines it is about and the way out."""

    kind: LogProblemKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRank:
    """One worker process, which has one GPU (0.33.0 `v1/worker/gpu_worker.py` determine_available_memory).

    Attributes:
        label: as vLLM names the process: `TP0`, `DP1_TP3`, `rank0` (up to 0.9), `pid=532` where only that is told; empty
            where nothing is, as for the one process of one GPU.
        total: of the GPU.
        free_at_start: before anything was loaded.
        utilization: `gpu_memory_utilization`, 0-1.
        utilization_uncertainty: half a unit of its last decimal; 0 where it was printed whole.
        requested: the budget, `total x utilization`; less `external_weights` where there are any.
        external_weights: held by another process, from 0.32.
        weights: what loading the model took.
        consumed: weights and what is outside PyTorch, as one; from 0.27.
        non_torch: outside PyTorch; up to 0.26.
        activation: the peak of a pass with as many tokens as fit a step. In 0.18 and from 0.27 with the graph estimate in
            it, where `graphs_counted`.
        cudagraph_estimate: from 0.18.
        graphs_counted: whether the estimate was taken off what is left for the KV cache; None where the log is silent.
        cudagraph: what capturing took in the end.
        available: for the KV cache; below 0 where the budget was not enough.
        is_pinned: `available` was set with `kv_cache_memory_bytes` or a stored plan, not measured.
        multimodal_reserve: taken off `available` for decoding in the API servers, from 0.25.
    """

    label: str = ""
    total: Printed | None = None
    free_at_start: Printed | None = None
    utilization: float | None = None
    utilization_uncertainty: float = 0.0
    requested: Printed | None = None
    external_weights: Printed | None = None
    weights: Printed | None = None
    consumed: Printed | None = None
    non_torch: Printed | None = None
    activation: Printed | None = None
    cudagraph_estimate: Printed | None = None
    graphs_counted: bool | None = None
    cudagraph: Printed | None = None
    available: Printed | None = None
    is_pinned: bool = False
    multimodal_reserve: Printed | None = None

    @property
    def left(self) -> Printed | None:
        """What it has for KV blocks: the reserve is taken off after `available` was printed."""
        available, reserve = self.available, self.multimodal_reserve
        if available is None or reserve is None:
            return available
        return Printed(
            available.bytes - reserve.bytes, available.uncertainty_bytes + reserve.uncertainty_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStart:
    """One start of one engine. All of it may be shown: of the arguments only what decides the cache is kept.

    Attributes:
        release: of vLLM, as printed.
        model: as the server was given it.
        flags: by vLLM's names, values as in `OperatorFacts.flags`, besides `quantization`.
        engine: the data-parallel index; None where the log names none.
        num_gpu_blocks: before an override.
        pool_tokens: of `GPU KV cache size`.
        failure: one sentence with the known figures; empty where it did not fail.
        is_cold: whether any graph of the model was compiled anew, not loaded from torch.compile's cache (0.33.0
            `compilation/backends.py`, `decorators.py`); None where the log tells neither, as of a start that compiles
            nothing.
        first_line: of the log, from 1.
    """

    release: str | None = None
    model: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    engine: int | None = None
    ranks: tuple[LoggedRank, ...] = ()
    num_gpu_blocks: int | None = None
    pool_tokens: int | None = None
    outcome: StartOutcome = StartOutcome.CUT
    failure: str = ""
    is_cold: bool | None = None
    first_line: int = 1
    last_line: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReading:
    """All starts of one log in the order they begin, and what is wrong with it."""

    starts: tuple[LoggedStart, ...] = ()
    problems: tuple[LogProblem, ...] = ()


def contradictions(rank: LoggedRank, release: str | None) -> Iterator[str]:
    """What cannot all be true of one rank, each a clause; nothing where the figures for a check are missing.

    Args:
        release: of vLLM, as printed; None where it is not known.
    """
    total, weights, estimate = rank.total, rank.weights, rank.cudagraph_estimate
    if total is not None and weights is not None and _is_above(weights, total):
        yield f"the weights ({weights}) are more than the GPU's memory ({total})"
    if total is not None and rank.free_at_start is not None and _is_above(rank.free_at_start, total):
        yield f"more was free at the start ({rank.free_at_start}) than the GPU has ({total})"
    if estimate is not None:
        if estimate.bytes < -estimate.uncertainty_bytes:
            yield f"the estimate of the CUDA graphs is below zero ({estimate})"
        elif total is not None and estimate.bytes + (weights.bytes if weights else 0) > total.bytes:
            yield (
                f"the estimate of the CUDA graphs ({estimate}) is implausible: with the weights it is more than the GPU's "
                f"memory ({total})"
            )
    if rank.cudagraph is not None and rank.cudagraph.bytes < -rank.cudagraph.uncertainty_bytes:
        yield f"what the CUDA graphs took is below zero ({rank.cudagraph})"
    yield from _budget(rank)
    yield from _identity(rank, release)


def _is_above(one: Printed, other: Printed) -> bool:
    return one.bytes - other.bytes > one.uncertainty_bytes + other.uncertainty_bytes


def _budget(rank: LoggedRank) -> Iterator[str]:
    """`request_memory`, 0.33.0 `v1/worker/utils.py`."""
    if rank.total is None or rank.utilization is None or rank.requested is None:
        return
    external = rank.external_weights or Printed(0, 0)
    expected = rank.total.bytes * rank.utilization - external.bytes
    rounding = (
        rank.total.uncertainty_bytes * rank.utilization
        + rank.total.bytes * rank.utilization_uncertainty
        + rank.requested.uncertainty_bytes
        + external.uncertainty_bytes
    )
    if abs(rank.requested.bytes - expected) > rounding + 1:
        yield (
            f"the budget ({rank.requested}) is not {rank.utilization:g} of the GPU's memory ({rank.total}), which is "
            f"{expected / GIB:.2f} GiB"
        )


def _identity(rank: LoggedRank, release: str | None) -> Iterator[str]:
    """Budget = consumed + activation + left for the KV cache, and the graph estimate where it was taken off on its own.

    0.18 and 0.27 and later count the estimate with the activation, 0.19 to 0.26 beside it, so both are right; and of a rank
    whose estimate is not told, any of it may be missing.
    """
    if rank.is_pinned or rank.requested is None or rank.available is None or rank.activation is None:
        return
    held = [rank.consumed] if rank.consumed is not None else [rank.weights, rank.non_torch]
    parts = [*held, rank.activation, rank.available]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return
    gap = rank.requested.bytes - sum(part.bytes for part in known)
    rounding = rank.requested.uncertainty_bytes + sum(part.uncertainty_bytes for part in known)
    if abs(gap) <= rounding or (gap > 0 and _may_hide_an_estimate(rank, release)):
        return
    estimate = rank.cudagraph_estimate
    if estimate is not None and abs(gap - estimate.bytes) <= rounding + estimate.uncertainty_bytes:
        return
    said = " + ".join(f"{part.bytes / GIB:.2f}" for part in known)
    yield (
        f"what it holds and leaves ({said} GiB) does not add up to the budget ({rank.requested}): {abs(gap) / GIB:.2f} GiB "
        f"{'missing' if gap > 0 else 'too much'}"
    )


def _may_hide_an_estimate(rank: LoggedRank, release: str | None) -> bool:
    known = None if release is None else parse_release(release)
    return (
        rank.cudagraph_estimate is None
        and rank.graphs_counted is not False
        and (known is None or known >= _FIRST_WITH_ESTIMATES)
        # V0 measured no graphs, and rounded the utilization.
        and rank.utilization_uncertainty < V0_UTILIZATION_UNCERTAINTY
    )
