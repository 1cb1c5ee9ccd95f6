"""Other ways to put the same model on the same GPUs, which are easily overlooked.

Only the room for KV is counted. What an alternative costs in speed or quality is not modelled, and each says so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, plan_deployment


class Kind(StrEnum):
    """What is done differently."""

    STAGES = "pipeline stages"
    ENGINES = "data-parallel engines"
    CONTEXT = "contexts spread over GPUs"
    TYPE = "type of the cache"


TRADES: Mapping[Kind, str] = {
    Kind.STAGES: "layers are split over the stages, so what tensor parallelism copies to every GPU is held once per "
    "stage. Not modelled: speed; tokens pass the stages one after the other, and stages wait for each other.",
    Kind.ENGINES: "each GPU is an engine with a pool of its own. Not modelled: speed; a session stays on its engine, "
    "the router must keep them even, and the fullest engine preempts first.",
    Kind.CONTEXT: "the tokens of a context are spread over the GPUs and not copied. Not modelled: speed; every decoding "
    "step exchanges partial results.",
    Kind.TYPE: "fewer bytes per token. Not modelled: the quality of the answers, which must be measured, and the speed "
    "of the kernels.",
}
"""Why each holds more, and what it costs that is not modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One other way.

    Attributes:
        flags: what is changed, as on vLLM's command line.
        tokens: pool tokens of all engines on the same GPUs, None where there is no pool.
        ratio: tokens against those of the way it is compared with.
    """

    flags: str
    plan: DeploymentPlan
    tokens: int | None
    ratio: float | None
    kind: Kind


def alternatives(base: DeploymentPlan) -> tuple[Alternative, ...]:
    """What vLLM would start on the GPUs of one replica of `base`, most tokens first.

    What vLLM refuses is left out, for it is no alternative, and so is a type that saves nothing. What has no room, or
    cannot be told, stays with its reason.
    """
    found = []
    have = base.fleet.replica_tokens
    for changes, kind in _changes(base):
        plan = plan_deployment(base.request.with_flags(changes))
        tokens = plan.fleet.replica_tokens
        if plan.outcome is Outcome.REFUSED or (kind is Kind.TYPE and (tokens or 0) <= (have or 0)):
            continue
        found.append(
            Alternative(
                flags=spelt(changes),
                plan=plan,
                tokens=tokens,
                ratio=None if tokens is None or not have else tokens / have,
                kind=kind,
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.tokens or 0)))


_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "enable_expert_parallel": "-ep",
}


def spelt(flags: Mapping[str, Any]) -> str:
    """Flags as on vLLM's command line, in its short form where it has one."""
    words = []
    for name, value in flags.items():
        option = _SHORT.get(name, "--" + name.replace("_", "-"))
        if value is not None:
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words)


def _changes(base: DeploymentPlan) -> Iterator[tuple[dict[str, Any], Kind]]:
    """Flags to change, None for one to leave out, and what kind of way it is."""
    sizes, facts = base.facts.parallelism, base.facts
    gpus = sizes.tensor * sizes.pipeline
    if sizes.prefill_context > 1 or base.data_parallel > 1 or facts.model is None:
        return
    for stages in (2, 4):
        if gpus % stages == 0 and stages != sizes.pipeline:
            tp = gpus // stages
            shape = {"tensor_parallel_size": tp, "pipeline_parallel_size": stages}
            fits = tp % sizes.decode_context == 0
            yield shape | ({} if fits else {"decode_context_parallel_size": None}), Kind.STAGES
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
            Kind.ENGINES,
        )
    if base.outcome is Outcome.NO_ROOM:
        # What changes the cache alone does not help.
        return
    spread = _widest_context(base)
    if spread is not None:
        yield {"decode_context_parallel_size": spread}, Kind.CONTEXT
    for dtype in _CACHE_TYPES:
        # The layout is latent attention's own (config/vllm.py validate_nvfp4_kv_cache_with_mla). That vLLM does not refuse
        # it elsewhere, for FlashInfer takes what begins with nvfp4, makes it no way to recommend.
        if facts.model.stack.latent or not dtype.endswith("_ds_mla"):
            yield {"kv_cache_dtype": dtype}, Kind.TYPE


def _widest_context(base: DeploymentPlan) -> int | None:
    """The most GPUs that vLLM lets a context be spread over, where that is more than now."""
    sizes = base.facts.parallelism
    for spread in range(sizes.tensor, sizes.decode_context, -1):
        if sizes.tensor % spread == 0:
            plan = plan_deployment(base.request.with_flags({"decode_context_parallel_size": spread}))
            if plan.outcome is not Outcome.REFUSED:
                return spread
    return None


_CACHE_TYPES = ("fp8", "nvfp4", "nvfp4_ds_mla")
