"""One way to start a model on GPUs -> what vLLM would make of it, and how much a fleet of it holds.

The steps are those of every prediction: facts, layout, budget, pool. New are the units of a planner: sessions of N
tokens, engines of a replica, replicas on so many GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvheadroom.capacity.facts import AUTO_LENGTH, NO_LENGTH_TO_FIT, EngineFacts, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.kv_cache import KvLayout, Refusal, plan_layout
from kvheadroom.capacity.memory import MemoryTerm, NoRoom, PoolBudget, plan_budget
from kvheadroom.capacity.prediction import PredictedPool, less_than_a_block, plan_pool
from kvheadroom.capacity.rank_weights import RankWeights, weights_of
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.stored_model import ModelFiles


class Outcome(StrEnum):
    """What becomes of a start. A closed list."""

    STARTS = "starts"
    TOO_LONG = "max_model_len does not fit"
    NO_ROOM = "no room for the KV cache"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to be started.

    Attributes:
        operator: flags by vLLM's names, with data_parallel_size; the GPU; weights and overhead where they are said.
        version: vLLM's release, None: the newest that is known, and marked so.
        session_tokens: lengths to count sessions of; empty: the usual one, at most max_model_len.
        gpus: GPUs of the whole fleet, None: one replica.
        marketed_bytes: the GB on the box of a card, for the sum on paper; None: the catalogue's.
        draft_files: of a draft model, None where there is none or they are not known.
    """

    model_files: ModelFiles
    operator: OperatorFacts
    version: str | None = None
    session_tokens: tuple[int, ...] = ()
    gpus: int | None = None
    marketed_bytes: int | None = None
    draft_files: ModelFiles | None = None

    def with_flags(self, changes: Mapping[str, Any]) -> "PlanRequest":
        """The same with other flags; None takes a flag away."""
        flags = {**self.operator.flags, **changes}
        flags = {name: value for name, value in flags.items() if value is not None}
        return replace(self, operator=replace(self.operator, flags=flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFit:
    """How many sessions of one length an engine holds.

    Attributes:
        blocks: blocks of one session, over all groups of layers.
        session_bytes: of one GPU, the stage with the widest blocks.
        sessions: num_blocks / blocks, as vLLM counts its "maximum concurrency".
        whole_sessions: sessions that really fit at once, the null block set aside.
    """

    session_tokens: int
    blocks: int
    session_bytes: int
    sessions: float
    whole_sessions: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one GPU for each token of such a session."""
        return self.session_bytes / self.session_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas on the GPUs that there are.

    Attributes:
        gpus_per_replica: TP x PP x PCP x DP (vLLM 0.33.0 `config/parallel.py`, world_size_across_dp).
        engines: engines of one replica, one for each data-parallel rank.
        replica_tokens: pool tokens of one replica, None where there is no pool.
        tokens: pool tokens of all replicas.
    """

    gpus: int
    gpus_per_replica: int
    engines: int
    replicas: int
    idle_gpus: int
    replica_tokens: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """One start, with every number that led to its outcome.

    Attributes:
        outcome: what vLLM does at the max_model_len that was asked for.
        reason: why not, one or more sentences; empty where it starts.
        layout, budget, pool: as far as they could be made.
        weights: of one GPU; None where they are not known.
        fits: one for each session length that max_model_len admits.
    """

    request: PlanRequest
    facts: EngineFacts
    outcome: Outcome
    reason: str
    layout: KvLayout | None = None
    budget: PoolBudget | NoRoom | None = None
    pool: PredictedPool | None = None
    weights: RankWeights | None = None
    fits: tuple[SessionFit, ...] = ()
    fleet: Fleet

    @property
    def data_parallel(self) -> int:
        """Engines of one replica."""
        return self.fleet.engines

    @property
    def label(self) -> str:
        """`TP 8`, `TP 4 x PP 2`, ..., with the type of the cache where it is said."""
        sizes, dtype = self.facts.parallelism, self.facts.kv_cache_dtype
        others = (
            ("PP", sizes.pipeline),
            ("DP", self.data_parallel),
            ("DCP", sizes.decode_context),
            ("PCP", sizes.prefill_context),
        )
        parts = [f"TP {sizes.tensor}", *(f"{name} {size}" for name, size in others if size > 1)]
        return " x ".join(parts) + ("" if dtype.assumed else f", {dtype.value}")

    @property
    def weights_bytes(self) -> int | None:
        """Weights of one GPU, the stage with the most; None where they are not known."""
        return None if self.weights is None else max(self.weights.stage_bytes)

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """The sum that leads to the bytes for KV blocks."""
        return () if self.budget is None else self.budget.terms

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for KV blocks of one GPU, the stage with the least; None where there are none, or none are known."""
        return self.budget.available_bytes if isinstance(self.budget, PoolBudget) else None


USUAL_SESSION_TOKENS = 262_144


def facts_of_start(request: PlanRequest) -> EngineFacts:
    """What is known of such an engine; `--max-model-len auto` counts as not said."""
    flags = dict(request.operator.flags)
    if flags.get("max_model_len") == AUTO_LENGTH:
        del flags["max_model_len"]
    return resolve_facts(
        operator=replace(request.operator, flags=flags),
        answers=ServerAnswers(version=request.version),
        echoed=EchoedFlags(),
        model_files=request.model_files,
        draft_tensors=None if request.draft_files is None else request.draft_files.tensors,
    )


def plan_deployment(request: PlanRequest, facts: EngineFacts | None = None) -> DeploymentPlan:
    """What vLLM would make of this start.

    Args:
        facts: where more is known of it than the request tells; None: `facts_of_start`.
    """
    engines = request.operator.flags.get("data_parallel_size", 1)
    fit_length = request.operator.flags.get("max_model_len") == AUTO_LENGTH
    if facts is None:
        facts = facts_of_start(request)
    layout = plan_layout(facts)
    planned = layout if isinstance(layout, KvLayout) else None
    budget = plan_budget(facts)
    made = budget if isinstance(budget, PoolBudget | NoRoom) else None
    weights = _weights(facts, made)

    def ends(outcome: Outcome, reason: str = "", pool: PredictedPool | None = None) -> DeploymentPlan:
        return DeploymentPlan(
            request=request,
            facts=facts,
            outcome=outcome,
            reason=reason,
            layout=planned,
            budget=made,
            pool=pool,
            weights=weights,
            fits=() if planned is None or pool is None else _fits(request, planned, pool),
            fleet=_fleet(request, facts, engines, pool),
        )

    if facts.obstacles:
        return ends(Outcome.UNKNOWN, "; ".join(facts.obstacles))
    if isinstance(layout, Refusal):
        return ends(Outcome.REFUSED, "; ".join(layout.reasons))
    if fit_length and facts.model is not None and facts.model.takes_any_length:
        return ends(Outcome.REFUSED, NO_LENGTH_TO_FIT)
    if planned is None:
        return ends(Outcome.UNKNOWN, layout if isinstance(layout, str) else "the layout is not known")
    if isinstance(budget, str):
        return ends(Outcome.UNKNOWN, budget)
    if isinstance(budget, NoRoom):
        return ends(Outcome.NO_ROOM, str(budget))
    override = facts.num_gpu_blocks_override
    pool = plan_pool(
        planned,
        None if budget is None else budget.stage_available_bytes,
        None if override is None else override.value,
        None if facts.max_model_len is None else facts.max_model_len.value,
        fit_length=fit_length,
        reserves_null_block=facts.rules.reserves_null_block,
    )
    if pool is not None and pool.num_blocks < 1:
        return ends(Outcome.NO_ROOM, less_than_a_block(pool, planned))
    too_much = _over_the_card(facts, planned, weights, pool)
    if too_much:
        return ends(Outcome.NO_ROOM, too_much)
    if pool is None or pool.boots is None:
        reasons = [fact.why for fact in facts.missing if fact.fact != "max_model_len"]
        if facts.max_model_len is None and facts.model is not None:
            reasons.append(facts.model.context_unknown)
        return ends(Outcome.UNKNOWN, "; ".join(reasons), pool)
    return ends(*_verdict(pool), pool)


def _weights(facts: EngineFacts, budget: PoolBudget | NoRoom | None) -> RankWeights | None:
    """The weights of one GPU; of a pool whose size is given the budget does not tell them."""
    if budget is not None and budget.weights is not None:
        return budget.weights
    weights = None if facts.pool_from_hbm or facts.obstacles else weights_of(facts)
    return weights if isinstance(weights, RankWeights) else None


def _over_the_card(
    facts: EngineFacts, layout: KvLayout, weights: RankWeights | None, pool: PredictedPool | None
) -> str:
    """Why a pool of a given size and the weights are more than the GPU has; empty where they are not, or not known.

    vLLM allocates such a pool as it is told (vLLM 0.33.0 `v1/worker/gpu_worker.py` determine_available_memory), beside
    weights that are loaded before.
    """
    if facts.pool_from_hbm or facts.hbm_bytes is None or weights is None or pool is None:
        return ""
    stages = [
        (held + pool.num_blocks * size, held)
        for held, size in zip(weights.stage_bytes, layout.stage_bytes_per_block, strict=True)
    ]
    total, held = max(stages)
    have = facts.hbm_bytes.value
    if total <= have:
        return ""
    card = f"the {have / 1e9:.2f} GB of the GPU"
    if max(weights.stage_bytes) > have:
        held = max(weights.stage_bytes)
        return (
            f"the weights alone ({held / 1e9:.2f} GB per GPU) exceed {card}, by {(held - have) / 1e9:.2f} GB"
        )
    return (
        f"weights ({held / 1e9:.2f} GB per GPU) and the KV cache of the given size ({(total - held) / 1e9:.2f} GB) exceed "
        f"{card}, by {(total - have) / 1e9:.2f} GB: vLLM runs out of memory"
    )


def _verdict(pool: PredictedPool) -> tuple[Outcome, str]:
    if pool.boots:
        return Outcome.STARTS, ""
    if not pool.longest_bootable:
        return Outcome.TOO_LONG, "not even one token fits beside the null block"
    asked, longest = pool.max_model_len, pool.longest_bootable
    return Outcome.TOO_LONG, f"the pool is smaller than one request of {asked:,} tokens; {longest:,} starts"


def _fits(request: PlanRequest, layout: KvLayout, pool: PredictedPool) -> tuple[SessionFit, ...]:
    longest = pool.max_model_len
    lengths = request.session_tokens or (min(USUAL_SESSION_TOKENS, longest or USUAL_SESSION_TOKENS),)
    fits = []
    for length in lengths:
        if longest is not None and length > longest:
            continue
        blocks = layout.blocks_per_session(length)
        fits.append(
            SessionFit(
                session_tokens=length,
                blocks=blocks,
                session_bytes=blocks * layout.bytes_per_block,
                sessions=pool.num_blocks / blocks,
                whole_sessions=(pool.num_blocks - 1) // blocks,
            )
        )
    return tuple(fits)


def _fleet(request: PlanRequest, facts: EngineFacts, engines: int, pool: PredictedPool | None) -> Fleet:
    size = facts.parallelism
    per_replica = size.tensor * size.pipeline * size.prefill_context * engines
    gpus = per_replica if request.gpus is None else request.gpus
    replicas = gpus // per_replica
    tokens = None if pool is None or pool.pool_tokens is None else pool.pool_tokens * engines
    return Fleet(
        gpus=gpus,
        gpus_per_replica=per_replica,
        engines=engines,
        replicas=replicas,
        idle_gpus=gpus - replicas * per_replica,
        replica_tokens=tokens,
        tokens=None if tokens is None else tokens * replicas,
    )
