"""The sum that people do on paper, and the way from it to what vLLM does, one assumption after the other.

The sum: tokens = (GB on the box x utilization - overhead - total_size / TP) x DCP / bytes per token. Its assumptions
are the parameters; its bytes per token are those of the layout, which are right where all layers hold every token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, plan_deployment
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_catalogue import GPUS
from kvheadroom.capacity.rank_weights import RankWeights
from kvheadroom.capacity.weights import DRAFT_MODEL

GB = 10**9
PAPER_OVERHEAD_BYTES = 12 * GB
"""What the sum takes off each GPU for context, communication, activations and CUDA graphs where nobody says another number."""
_PLANNING = "v1/core/kv_cache_planning.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleSum:
    """The sum with its assumptions; nothing is rounded to blocks, and no block is set aside.

    Attributes:
        hbm_bytes: of one GPU; the GB on its box.
        weights_bytes: all that the checkpoint holds (`total_size`), shared out evenly over TP.
        bytes_per_token: of one GPU, without context parallelism.
    """

    hbm_bytes: int
    utilization: float
    overhead_bytes: int
    weights_bytes: int
    tensor_parallel: int
    decode_context: int
    bytes_per_token: float

    @property
    def weights_per_gpu_bytes(self) -> float:
        """An even share."""
        return self.weights_bytes / self.tensor_parallel

    @property
    def budget_bytes(self) -> float:
        """What the utilization allows."""
        return self.hbm_bytes * self.utilization

    @property
    def kv_bytes(self) -> float:
        """What is left for the cache of one GPU; 0 or less: the weights and the overhead do not fit."""
        return self.budget_bytes - self.overhead_bytes - self.weights_per_gpu_bytes

    @property
    def weights_over_budget_bytes(self) -> float:
        """By how much the weights alone exceed the budget; 0 or less: they do not."""
        return self.weights_per_gpu_bytes - self.budget_bytes

    @property
    def tokens(self) -> int | None:
        """Tokens of one engine; None where nothing is left."""
        return None if self.kv_bytes <= 0 else self.tokens_of(self.kv_bytes)

    def tokens_of(self, kv_bytes: float) -> int:
        """Tokens that so many bytes hold; below 0 where they are missing."""
        return round(kv_bytes * self.decode_context / self.bytes_per_token)

    def sessions(self, session_tokens: int) -> float | None:
        """Sessions of one length."""
        return None if self.tokens is None else self.tokens / session_tokens

    def session_bytes(self, session_tokens: int) -> float:
        """Bytes of one GPU for one session."""
        return session_tokens * self.bytes_per_token / self.decode_context

    def starts(self, max_model_len: int) -> bool:
        """Whether one request of max_model_len fits, by this sum."""
        return self.kv_bytes >= self.session_bytes(max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeStep:
    """One assumption put right.

    Attributes:
        key: a short name of the step, the same for every start.
        step: what is put right.
        kv_bytes: bytes for the cache of one GPU after it.
        change_bytes: what it changed of them.
        tokens: tokens of one engine after it.
        change_tokens: what it changed of them; the start and all changes add up to the last step's tokens.
        source: where the right figure is from.
    """

    key: str
    step: str
    kv_bytes: int
    change_bytes: int
    tokens: int
    change_tokens: int
    source: str


def simple_sum(plan: DeploymentPlan) -> SimpleSum | str:
    """The sum for one start; a string says why it has no answer."""
    facts, layout = plan.facts, plan.layout
    if layout is None:
        return plan.reason
    if not facts.pool_from_hbm:
        return "the size of the pool is given by a flag, so there is nothing to sum up"
    unlike = [
        name
        for name, size in (
            ("pipeline stages", facts.pipeline_parallel_size.value),
            ("prefill context parallelism", facts.prefill_context_parallel_size.value),
            ("data parallelism", plan.data_parallel),
        )
        if size > 1
    ]
    if unlike:
        return f"the sum on paper knows no {unlike[0]}"
    if not layout.holds_every_token:
        return (
            "no number of bytes per token is right for this model: its layers do not all hold every token, so a "
            "session has a fixed part and a slope"
        )
    hbm = marketed_bytes(plan)
    if hbm is None:
        return "the GB on the box of this GPU are not known (--marketed-gb X)"
    weights = checkpoint_bytes(plan)
    if weights is None:
        return "the size of the weights is not known"
    return SimpleSum(
        hbm_bytes=hbm,
        utilization=facts.gpu_memory_utilization.value,
        overhead_bytes=PAPER_OVERHEAD_BYTES if facts.overhead_bytes.assumed else facts.overhead_bytes.value,
        weights_bytes=weights,
        tensor_parallel=facts.tensor_parallel_size.value,
        decode_context=layout.decode_context,
        bytes_per_token=layout.bytes_per_block / layout.groups[0].block_size,
    )


def marketed_bytes(plan: DeploymentPlan) -> int | None:
    """The GB on the box; what was said wins."""
    if plan.request.marketed_bytes is not None:
        return plan.request.marketed_bytes
    operator = plan.request.operator
    if operator.hbm_bytes is not None:
        return operator.hbm_bytes
    gpu = GPUS.get(operator.gpu or "")
    return None if gpu is None or gpu.marketed_gb is None else round(gpu.marketed_gb * GB)


def checkpoint_bytes(plan: DeploymentPlan) -> int | None:
    """All weights of the checkpoint: as said, as its index says, or as its config makes them."""
    if plan.facts.weights_bytes is not None:
        return plan.facts.weights_bytes.value
    weights = plan.weights
    return None if weights is None or weights.plan is None else weights.plan.total_bytes


def as_the_sum_takes_it(plan: DeploymentPlan) -> DeploymentPlan:
    """The start whose bytes per token the sum takes.

    The sum knows no refusals, and an attention backend is named in it for its bytes per token. Where vLLM refuses
    the backend with the type that `auto` becomes, it takes those of an 8-bit cache.
    """
    flags = plan.request.operator.flags
    if plan.outcome is not Outcome.REFUSED or plan.layout is not None:
        return plan
    if "attention_backend" not in flags or flags.get("kv_cache_dtype", "auto") != "auto":
        return plan
    other = plan_deployment(plan.request.with_flags({"kv_cache_dtype": "fp8"}))
    return plan if other.layout is None else other


def bridge(plan: DeploymentPlan, simple: SimpleSum) -> tuple[BridgeStep, ...]:
    """From the sum to vLLM's own figures, one assumption at a time; empty where vLLM makes no pool."""
    layout, pool, available = plan.layout, plan.pool, plan.kv_bytes
    if layout is None or pool is None or available is None or pool.pool_tokens is None:
        return ()
    steps = [
        (key, step, round(kv_bytes), simple.tokens_of(kv_bytes), source)
        for key, step, kv_bytes, source in _byte_steps(plan.facts, plan.weights, simple, available)
    ]
    tokens, in_blocks = pool.num_blocks * layout.block_tokens, pool.pool_bytes
    counting = "v1/core/kv_cache_utils.py update_kv_cache_capacity"
    steps.append(("blocks", "whole blocks only", in_blocks, tokens, f"{_PLANNING} get_kv_cache_configs"))
    if pool.pool_tokens != tokens:
        steps.append(
            ("counting", "counted in requests of max_model_len", in_blocks, pool.pool_tokens, counting)
        )
    steps.append(
        (
            "null_block",
            "the null block, which holds no request's tokens",
            in_blocks - layout.bytes_per_block,
            pool.pool_tokens - layout.block_tokens,
            "v1/core/block_pool.py BlockPool",
        )
    )
    return tuple(
        BridgeStep(
            key=key,
            step=step,
            kv_bytes=kv_bytes,
            change_bytes=kv_bytes - steps[max(i - 1, 0)][2],
            tokens=tokens,
            change_tokens=tokens - steps[max(i - 1, 0)][3],
            source=source,
        )
        for i, (key, step, kv_bytes, tokens, source) in enumerate(steps)
    )


def _byte_steps(
    facts: EngineFacts, weights: RankWeights | None, simple: SimpleSum, available: int
) -> Iterator[tuple[str, str, float, str]]:
    kv_bytes, tp = simple.kv_bytes, simple.tensor_parallel
    yield "sum", "the sum on paper", kv_bytes, "GB on the box x utilization - overhead - checkpoint / TP"
    if facts.hbm_bytes is not None:
        requested = math.ceil(facts.hbm_bytes.value * facts.gpu_memory_utilization.value)
        kv_bytes += requested - simple.budget_bytes
    if facts.hbm_bytes is not None and facts.hbm_bytes.value != simple.hbm_bytes:
        yield (
            "memory",
            f"memory as CUDA reports it, {facts.hbm_bytes.value / GB:.2f} GB, not {simple.hbm_bytes / GB:g} GB",
            kv_bytes,
            "v1/worker/utils.py request_memory",
        )
    if facts.overhead_bytes.value != simple.overhead_bytes:
        kv_bytes += simple.overhead_bytes - facts.overhead_bytes.value
        yield (
            "overhead",
            f"{facts.overhead_bytes.value / GB:.2f} GB of overhead as its shapes make likely, not {simple.overhead_bytes / GB:g} GB",
            kv_bytes,
            "fitted to public start-up logs (docs/accuracy.md)",
        )
    if weights is not None and weights.plan is not None:
        held = weights.plan
        if held.not_loaded_bytes:
            kv_bytes += held.not_loaded_bytes / tp
            yield (
                "not_loaded",
                f"{held.not_loaded_bytes / GB:.2f} GB of the checkpoint that this start does not load",
                kv_bytes,
                weights.origin,
            )
        if tp > 1 and held.replicated_bytes:
            kv_bytes -= held.replicated_bytes * (tp - 1) / tp
            yield (
                "replicated",
                f"{held.replicated_bytes / GB:.3f} GB that every GPU holds whole, not a share of it",
                kv_bytes,
                weights.origin,
            )
        if held.draft_model_bytes:
            kv_bytes -= held.draft_model_bytes
            yield (
                "draft",
                f"{held.draft_model_bytes / GB:.2f} GB of the draft model on each GPU",
                kv_bytes,
                weights.origin,
            )
        made = sum(term.total_bytes for term in held.terms if term.name != DRAFT_MODEL)
        if beside := simple.weights_bytes - held.not_loaded_bytes - made:
            kv_bytes += beside / tp
            yield "files", "the checkpoint's total against what config.json makes", kv_bytes, weights.origin
    if round(kv_bytes) != available:
        # KV heads are copied where there are fewer of them than GPUs; experts are padded to what a kernel takes.
        planned = weights is not None and weights.plan is not None
        rest = "kernels' padding, copied KV heads, types other than stored" if planned else "whole bytes only"
        yield "shapes", rest, available, "weights of one rank"
