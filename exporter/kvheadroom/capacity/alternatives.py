"""Other ways to put the same model on the same GPUs, which are easily overlooked.

Only the room for KV is counted. What an alternative costs in speed or quality is not modelled, and each says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, plan_deployment

_SPLIT_LAYERS = (
    "Layers are split over the stages, so what tensor parallelism copies to every GPU is held once per stage. "
    "Not modelled: speed; a token passes the stages one after the other, and stages wait for each other."
)
_SPLIT_ENGINES = (
    "Each GPU is an engine with a pool of its own. Not modelled: speed; a session stays on its engine, the router "
    "must keep them even, and the busiest engine is full first."
)
_SPLIT_CONTEXT = (
    "The tokens of a context are spread over the GPUs instead of copied. Not modelled: speed; every decoding step "
    "exchanges partial results."
)
_FEWER_BITS = "Fewer bytes per token. Not modelled: quality of the answers, which must be measured, and speed of the kernels."


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One other way.

    Attributes:
        flags: what is changed, as on vLLM's command line.
        tokens: pool tokens of all engines on the same GPUs, None where there is no pool.
        ratio: tokens against those of the way it is compared with.
        trade: why it holds more or less, and what is not modelled.
    """

    flags: str
    plan: DeploymentPlan
    tokens: int | None
    ratio: float | None
    trade: str


def alternatives(base: DeploymentPlan) -> tuple[Alternative, ...]:
    """What vLLM would start on the GPUs of one replica of `base`, most tokens first.

    What vLLM refuses is left out, for it is no alternative, and so is a type that saves nothing. What has no room, or
    cannot be told, stays with its reason.
    """
    found = []
    have = base.fleet.replica_tokens
    for changes, trade in _changes(base):
        plan = plan_deployment(base.request.with_flags(changes))
        tokens = plan.fleet.replica_tokens
        if plan.outcome is Outcome.REFUSED or (trade is _FEWER_BITS and (tokens or 0) <= (have or 0)):
            continue
        found.append(
            Alternative(
                flags=spelt(changes),
                plan=plan,
                tokens=tokens,
                ratio=None if tokens is None or not have else tokens / have,
                trade=trade,
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.tokens or 0)))


def spelt(flags: Mapping[str, Any]) -> str:
    """Flags as on vLLM's command line."""
    words = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if value is not None:
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words)


def _changes(base: DeploymentPlan) -> Iterator[tuple[dict[str, Any], str]]:
    """Flags to change, None for one to leave out, and what they trade."""
    sizes, facts = base.facts.parallelism, base.facts
    gpus = sizes.tensor * sizes.pipeline
    if sizes.prefill_context > 1 or base.data_parallel > 1 or facts.model is None:
        return
    for stages in (2, 4):
        if gpus % stages == 0 and stages != sizes.pipeline:
            tp = gpus // stages
            shape = {"tensor_parallel_size": tp, "pipeline_parallel_size": stages}
            fits = tp % sizes.decode_context == 0
            yield shape | ({} if fits else {"decode_context_parallel_size": None}), _SPLIT_LAYERS
    # With a pool of a given size nothing tells what an engine of one GPU would have left.
    if gpus > 1 and facts.pool_from_hbm:
        experts = facts.model.num_experts
        yield (
            {
                "tensor_parallel_size": 1,
                "data_parallel_size": gpus,
                "enable_expert_parallel": True if experts else None,
                "pipeline_parallel_size": None,
                "decode_context_parallel_size": None,
            },
            _SPLIT_ENGINES,
        )
    spread = _widest_context(base)
    if spread is not None:
        yield {"decode_context_parallel_size": spread}, _SPLIT_CONTEXT
    for changes in _CACHE_TYPES:
        yield changes, _FEWER_BITS


def _widest_context(base: DeploymentPlan) -> int | None:
    """The most GPUs that vLLM lets a context be spread over, where that is more than now."""
    sizes = base.facts.parallelism
    for spread in range(sizes.tensor, sizes.decode_context, -1):
        if sizes.tensor % spread == 0:
            plan = plan_deployment(base.request.with_flags({"decode_context_parallel_size": spread}))
            if plan.outcome is not Outcome.REFUSED:
                return spread
    return None


_CACHE_TYPES: tuple[dict[str, Any], ...] = (
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "nvfp4"},
    {"kv_cache_dtype": "nvfp4_ds_mla", "attention_backend": "FLASHMLA_SPARSE"},
)
