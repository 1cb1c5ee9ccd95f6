"""What one start of an engine tells of the overhead, and which starts tell nothing.

vLLM gives the pool what the budget leaves (`v1/worker/gpu_worker.py` determine_available_memory, 0.33.0), so one start measures
`overhead = ceil(total * gpu_memory_utilization) - weights - pool`, with total and weights as the raw prediction has them. What those are wrong
by is in it, and so it corrects the prediction of the next start of the same kind. A start is never used for its own calibrated figure.
"""

import bisect
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.layers import IndexerLayer
from kvheadroom.capacity.logged_start import (
    GIB,
    LoggedRank,
    LoggedStart,
    Printed,
    StartOutcome,
    contradictions,
)
from kvheadroom.capacity.observation import Observation
from kvheadroom.capacity.overhead import EDITION, estimate_overhead, scheduled
from kvheadroom.capacity.prediction import logged_tokens, plan_pool
from kvheadroom.capacity.rank_weights import RankWeights, weights_of
from kvheadroom.capacity.readings import EngineSnapshot

MOST_FOREIGN_RATIO = 0.05
"""Share of a GPU that may be taken before vLLM's first look at it: its context, and NCCL from 0.11.0 on, take up to 4.0% in public logs."""
MOST_OVERHEAD_RATIO = 0.5
"""Share of a GPU that an overhead may be; of 107 public starts the largest but one is 14%, and one of 40% kept workspaces for a million tokens."""
MOST_WEIGHTS_OFF_RATIO = 0.25
"""By so much of the larger one the weights that a log tells and the predicted ones may differ. In public logs those of a checkpoint that is stored
as its config.json says differ by at most 15%, those of another format by 42% and more."""
MOST_TOTAL_OFF_RATIO = 0.015
"""By so much the memory of a GPU in a log and what is taken for it may differ; the driver moves it by up to 0.6%."""


class Exclusion(StrEnum):
    """Why a start is no sample. A closed list."""

    COLD_START = "cold_start"
    FAILED_START = "failed_start"
    UNFINISHED_START = "unfinished_start"
    FOREIGN_MEMORY = "foreign_memory"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    IMPOSSIBLE = "impossible"
    POOL_BY_FLAG = "pool_by_flag"
    PIPELINE_STAGES = "pipeline_stages"
    UNKNOWN = "unknown"


class SampleSource(StrEnum):
    """Where a sample was taken. A closed list."""

    LOG = "log"
    FLEET = "fleet"
    PROMETHEUS = "prometheus"


@dataclass(frozen=True, slots=True)
class Excluded:
    """A start that is no sample; `detail` is one sentence."""

    reason: Exclusion
    detail: str


@dataclass(frozen=True, slots=True, order=True)
class CalibrationKey:
    """What the overhead of a GPU depends on; starts of different keys are never mixed.

    Attributes:
        geometry: architecture, and a digest of config.json without its quantization and what no layer reads.
        weight_format: quantization with a digest of its settings, or the type.
        gpu: a name of the catalogue, else the bytes of the GPU.
        parallelism: as `tp8 dp2 ep`.
        release: of vLLM, without the build.
        settings: the flags that matter, as `name=value`, by name.
    """

    geometry: str
    weight_format: str
    gpu: str
    parallelism: str
    release: str
    settings: str

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of its GPU, by the catalogue or as the name says it; None where that leaves it open."""
        if self.gpu in GPUS:
            return GPUS[self.gpu].cuda_total_bytes
        size, _, unit = self.gpu.partition(" ")
        return (
            int(size) if unit == "bytes" and size.isascii() and size.isdecimal() and len(size) < 20 else None
        )

    def is_near(self, other: "CalibrationKey") -> bool:
        """Whether it differs in parallel sizes and settings at most."""
        return (self.geometry, self.weight_format, self.gpu, self.release) == (
            other.geometry,
            other.weight_format,
            other.gpu,
            other.release,
        )

    def differences(self, other: "CalibrationKey") -> tuple[str, ...]:
        """What `other` has differently, for people: `tp4 in place of tp8`; nothing for the same key."""
        changed = []
        for name in ("geometry", "weight_format", "gpu", "parallelism", "release"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                changed.append(f"{'vLLM ' if name == 'release' else ''}{its} in place of {mine}")
        mine, its = _settings(self.settings), _settings(other.settings)
        changed += [
            f"{name}={its.get(name, 'unset')} in place of {mine.get(name, 'unset')}"
            for name in sorted(mine.keys() | its.keys())
            if mine.get(name) != its.get(name)
        ]
        return tuple(changed)


def _settings(text: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSample:
    """One start of one engine.

    Attributes:
        start: what tells the start from every other; never used for its own prediction.
        overhead_bytes: of one GPU, beside the weights and in the total that the raw prediction has; of the rank that left the least.
        uncertainty_bytes: by so much it may be off: the last decimal of a log, or what is rounded down to whole blocks.
        estimated_bytes: what was estimated before, None where nothing could be, by this `edition` of the estimate.
        measured_weights_bytes: of one GPU, where a log tells; None elsewhere.
        is_cold: the model was compiled anew, which only a log tells.
        measured_at: unix seconds; None where only the day of a year is told.
        model: its name, for people.
        evidence: where it stands, for people.
    """

    key: CalibrationKey
    start: str
    source: SampleSource
    overhead_bytes: int
    uncertainty_bytes: int
    estimated_bytes: int | None
    edition: int = EDITION
    measured_weights_bytes: int | None = None
    is_cold: bool = False
    measured_at: float | None = None
    model: str
    evidence: str

    @property
    def residual_bytes(self) -> int | None:
        """Measured minus estimated; None where it would be estimated otherwise now."""
        if self.estimated_bytes is None or self.edition != EDITION:
            return None
        return self.overhead_bytes - self.estimated_bytes


def key_of(facts: EngineFacts) -> CalibrationKey | str:
    """The key of an engine; a string says what is missing for it."""
    if facts.model is None or facts.model_files is None:
        return "the model's config.json is not known"
    if facts.version is None:
        return "the release of vLLM is not known"
    if facts.gpu is None and facts.hbm_bytes is None:
        return "the GPU is not known"
    config = facts.model_files.config
    shape = {name: value for name, value in config.items() if name not in _NO_SHAPE}
    quantization = facts.model.quantization
    if quantization is None:
        weight_format = str(facts.model.dtype if facts.dtype.value == "auto" else facts.dtype.value)
    else:
        weight_format = f"{quantization} {_digest(_quantization(config))}"
    return CalibrationKey(
        geometry=f"{facts.model.architecture} {_digest(shape)}",
        weight_format=weight_format,
        gpu=facts.gpu or ("" if facts.hbm_bytes is None else f"{facts.hbm_bytes.value} bytes"),
        parallelism=" ".join(_parallelism(facts)),
        release=facts.version.value.partition("+")[0],
        settings=" ".join(f"{name}={value}" for name, value in sorted(_flags(facts).items())),
    )


_NO_SHAPE = (
    "_name_or_path",
    "transformers_version",
    "quantization_config",
    "compression_config",
    "torch_dtype",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "auto_map",
)
"""Keys of config.json that change neither a shape nor what runs."""


def _quantization(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:12]


def _canonical(value: Any) -> str:
    """The same text for the same content, in whatever order its keys stand."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name!r}:{_canonical(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return repr(value)


def _parallelism(facts: EngineFacts) -> Iterator[str]:
    sizes = facts.parallelism
    yield f"tp{sizes.tensor}"
    others = (
        ("pp", sizes.pipeline),
        ("dp", facts.data_parallel_size.value),
        ("dcp", sizes.decode_context),
        ("pcp", sizes.prefill_context),
    )
    yield from (f"{name}{size}" for name, size in others if size > 1)
    if facts.enable_expert_parallel.value:
        yield "ep"


def _flags(facts: EngineFacts) -> dict[str, str]:
    """Effective values, so that a default and the same value said are one key."""
    tokens, seqs = scheduled(facts)
    found = {
        "max_num_batched_tokens": str(tokens),
        "max_num_seqs": str(seqs),
        "kv_cache_dtype": facts.kv_cache_dtype.value,
    }
    if facts.flags.enforce_eager:
        found["enforce_eager"] = "true"
    if facts.flags.attention_backend is not None:
        found["attention_backend"] = facts.flags.attention_backend
    if facts.draft.method is not None:
        found["speculative"] = f"{facts.draft.method}:{facts.draft.tokens}"
    if facts.max_model_len is not None and _grows_with_length(facts):
        found["max_model_len"] = str(facts.max_model_len.value)
    return found


def _grows_with_length(facts: EngineFacts) -> bool:
    """Whether the overhead itself depends on max_model_len: the sparse indexer's workspace does."""
    return facts.model is not None and any(isinstance(cache, IndexerLayer) for cache in facts.model.caches())


def sample_of_engine(
    facts: EngineFacts,
    snapshot: EngineSnapshot,
    observation: Observation,
    *,
    start: str,
    foreign_bytes: int | None,
    measured_at: float,
    evidence: str,
) -> CalibrationSample | Excluded:
    """What the pool of a running engine tells.

    Args:
        foreign_bytes: of other processes on its GPUs now, the most of one; None where nobody knows.
    """
    if snapshot.sleeping:
        return Excluded(Exclusion.ASLEEP, "it sleeps, and has given its memory up")
    base = _basis(facts)
    if isinstance(base, Excluded):
        return base
    if facts.pipeline_parallel_size.value > 1:
        return Excluded(Exclusion.PIPELINE_STAGES, "which pipeline stage left the least is not told")
    if foreign_bytes is not None and foreign_bytes > MOST_FOREIGN_RATIO * base.total_bytes:
        return Excluded(
            Exclusion.FOREIGN_MEMORY, f"other processes hold {foreign_bytes / GIB:,.2f} GiB of its GPU"
        )
    if snapshot.blocks_are_shared:
        return Excluded(Exclusion.UNKNOWN, "its page adds up the blocks of several engines")
    if not observation.pool_bytes or not observation.num_blocks:
        return Excluded(Exclusion.UNKNOWN, observation.unknown or "the bytes of its pool are not known")
    overhead = base.requested_bytes - max(base.weights.stage_bytes) - observation.pool_bytes
    rounding = observation.pool_bytes // observation.num_blocks - 1
    return _sample(
        facts,
        base,
        overhead,
        rounding,
        start=start,
        source=SampleSource.FLEET,
        model=snapshot.model_name or "",
        measured_at=measured_at,
        evidence=evidence,
    )


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
    base = _basis(facts)
    if isinstance(base, Excluded):
        return base
    ranks = [rank for rank in logged.ranks if rank.available is not None]
    if any(rank.is_pinned for rank in ranks):
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
    found = [_of_rank(facts, base, rank) for rank in ranks]
    # The rank that holds the most beside its weights leaves the least.
    worst = max(range(len(ranks)), key=lambda index: found[index][0])
    overhead, rounding = found[worst]
    rank = ranks[worst]
    pool = logged_pool(facts, logged)
    if pool is not None and len(base.weights.stage_bytes) == 1:
        by_pool = base.requested_bytes - base.weights.stage_bytes[0] - pool.bytes
        # Most releases let one rank alone tell what it left, and then the pool is that of another.
        if by_pool - overhead > pool.uncertainty_bytes + rounding:
            overhead, rounding = by_pool, pool.uncertainty_bytes
    return _sample(
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


def _of_rank(facts: EngineFacts, base: "_Basis", rank: LoggedRank) -> tuple[int, int]:
    """(overhead, rounding) of one rank; the frontend's reserve is taken off what was left after it was printed."""
    available = rank.available or Printed(0, 0)
    reserve = rank.multimodal_reserve or Printed(0, 0)
    weights = base.weights.stage_bytes[stage_of(facts, rank.label)]
    overhead = base.requested_bytes - weights - available.bytes + reserve.bytes
    return overhead, available.uncertainty_bytes + reserve.uncertainty_bytes


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


def _not_these(facts: EngineFacts, base: "_Basis", rank: LoggedRank) -> Iterator[str]:
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


@dataclass(frozen=True, slots=True)
class _Basis:
    """What the raw prediction says, in bytes of one GPU."""

    key: CalibrationKey
    total_bytes: int
    requested_bytes: int
    weights: RankWeights


def _basis(facts: EngineFacts) -> _Basis | Excluded:
    if not facts.pool_from_hbm:
        return Excluded(Exclusion.POOL_BY_FLAG, "a flag gives the pool, and nothing is left over")
    if facts.obstacles:
        return Excluded(Exclusion.UNKNOWN, facts.obstacles[0])
    key = key_of(facts)
    if isinstance(key, str):
        return Excluded(Exclusion.UNKNOWN, key)
    weights = weights_of(facts)
    if weights is None or isinstance(weights, str):
        return Excluded(Exclusion.UNKNOWN, weights or "the model's weights are not known")
    if facts.hbm_bytes is None:
        return Excluded(Exclusion.UNKNOWN, "the GPU is not known")
    total = facts.hbm_bytes.value
    requested = math.ceil(total * facts.gpu_memory_utilization.value)
    return _Basis(key, total, requested, weights)


def _sample(
    facts: EngineFacts,
    base: _Basis,
    overhead: int,
    rounding: int,
    *,
    settings: str = "",
    **rest: Any,
) -> CalibrationSample | Excluded:
    if overhead < -rounding:
        return Excluded(
            Exclusion.IMPOSSIBLE,
            f"weights and pool are {-overhead / GIB:,.2f} GiB more than gpu_memory_utilization allows: the weights, the GPU's memory or "
            "the utilization are not what is taken here",
        )
    if overhead > MOST_OVERHEAD_RATIO * base.total_bytes:
        return Excluded(
            Exclusion.IMPOSSIBLE,
            f"{overhead / GIB:,.2f} GiB of overhead are more than half of the GPU: the weights, the GPU's memory or the parallel sizes "
            "are not what is taken here",
        )
    estimate = estimate_overhead(facts)
    key = base.key
    if settings:
        together = " ".join(sorted([*key.settings.split(), settings]))
        key = CalibrationKey(key.geometry, key.weight_format, key.gpu, key.parallelism, key.release, together)
    return CalibrationSample(
        key=key,
        overhead_bytes=max(0, overhead),
        uncertainty_bytes=rounding,
        estimated_bytes=None if isinstance(estimate, str) else estimate.total_bytes,
        **rest,
    )
