"""The overhead of one GPU before anything was measured: what vLLM's profiling would find, part by part.

vLLM gives the pool what is left of the budget after the weights, what else it took since its first look at the GPU, the peak of one
dummy step, and, in some releases, an estimate of its CUDA graphs (`v1/worker/gpu_worker.py` determine_available_memory). What that
step allocates follows from the model's shapes and the scheduler's limits; how much of it is alive at once, and what libraries take, does
not, and is fitted to public start-up logs (`tests/accuracy/overheads.py`, docs/accuracy.md).
"""

import bisect
import math
from dataclasses import dataclass

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB, batch_defaults
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.layers import (
    GatedDeltaState,
    IndexerLayer,
    KdaState,
    Mamba1State,
    Mamba2State,
    State,
    StateLayer,
)
from kvheadroom.capacity.model_geometry import ModelGeometry
from kvheadroom.capacity.overhead_parts import OverheadEstimate, OverheadPart

EDITION = 1
"""Counted up where `estimate_overhead` gives another figure for the same facts: what was measured against an older one is not carried over."""
MOST_TOO_HIGH = 0.029
MOST_TOO_LOW = 0.012
"""Share of the GPU's memory by which nine of ten public starts at most had less, and had more, than estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The numbers that no source file gives, fitted to logs.

    Attributes:
        context_bytes: kernels, cuBLAS, buffers of attention backends.
        linked_bytes, unlinked_bytes: more of it where several GPUs share each layer, with and without NVLink: NCCL, custom all-reduce.
        sorting_bytes: alive for each logit while vLLM samples by sorting them.
        sampling_bytes: the same where a kernel samples without sorting.
        lean_sampling_bytes: the same where no 32-bit copy of the logits is made.
        mlp_values: values of an MLP's width alive for each token of a step.
        state_values: values of a recurrent layer's width alive for each token of a step.
        graph_bytes: CUDA graphs of any size together.
        graph_layer_bytes: of each layer for each captured size.
        encoder_bytes: the dummy step of an encoder that takes videos.
    """

    context_bytes: float
    linked_bytes: float
    unlinked_bytes: float
    sorting_bytes: float
    sampling_bytes: float
    lean_sampling_bytes: float
    mlp_values: float
    state_values: float
    graph_bytes: float
    graph_layer_bytes: float
    encoder_bytes: float


FITTED = Fitted(
    context_bytes=0.25 * GIB,
    linked_bytes=1.8 * GIB,
    unlinked_bytes=0.0,
    sorting_bytes=38.6,
    sampling_bytes=15.8,
    lean_sampling_bytes=6.9,
    mlp_values=3.0,
    state_values=24.0,
    graph_bytes=0.3 * GIB,
    graph_layer_bytes=0.36 * 2**20,
    encoder_bytes=3.5 * GIB,
)


_ACTIVATION_BYTES = 2
_HIDDEN_VALUES = 4
"""Values of the hidden size alive for each token: the residual stream, the norm's output, queries and what attention gives."""
_LONGEST_WHOLE = 32_768
_LEAST_WHOLE = 2_048
_SEQS_OF_FIRST_ENGINE = 256
"""Defaults of the first engine (config.py SchedulerConfig, 0.7.3): a step holds a whole prompt, up to 32,768 tokens."""
_LARGEST_MOE_CHUNK = 32_768
"""Tokens that go through a layer's experts at once (envs.py VLLM_FUSED_MOE_CHUNK_SIZE)."""
_INDEXER_PREFIXES = 40
"""Requests of max_model_len that the sparse indexer gathers keys of at once (`v1/attention/backends/mla/indexer.py`
get_max_prefill_buffer_size)."""


def estimate_overhead(facts: EngineFacts, fitted: Fitted = FITTED) -> OverheadEstimate | str:
    """The parts; a string says why there are none."""
    model = facts.model
    if facts.platform.value == CPU:
        return "a CPU has no such overhead"
    if model is None:
        return "the model's sizes are not known"
    if facts.hbm_bytes is None:
        return "the GPU is not known"
    dummy = step_parts(facts, fitted)
    if dummy is None:
        return "the model's sizes are not known"
    _, seqs = scheduled(facts)
    step = max(dummy.forward, dummy.sampler)
    sizes = {
        OverheadPart.CONTEXT: _context(facts, fitted),
        OverheadPart.ACTIVATIONS: step,
        OverheadPart.WORKSPACES: max(dummy.workspaces, _indexer(facts, model)),
        # The encoder's dummy step comes before the model's.
        OverheadPart.ENCODER: max(0, fitted.encoder_bytes - step) if model.takes_videos else 0,
        OverheadPart.CUDA_GRAPHS: _graphs(facts, model, seqs, fitted),
    }
    parts = tuple((part, round(sizes[part])) for part in OverheadPart)
    total = sum(size for _, size in parts)
    return OverheadEstimate(
        parts=parts,
        low_bytes=max(0, total - round(MOST_TOO_HIGH * facts.hbm_bytes.value)),
        high_bytes=total + round(MOST_TOO_LOW * facts.hbm_bytes.value),
    )


@dataclass(frozen=True, slots=True)
class DummyStep:
    """What vLLM's dummy step has alive, in bytes of one GPU.

    Attributes:
        forward: at the peak of a layer.
        sampler: while it samples, after the layers.
        workspaces: of the experts, where they outlive the layer.
        sampler_constant: the name in `Fitted` of what `sampler` is made of.
    """

    forward: float
    sampler: float
    workspaces: int
    sampler_constant: str


def step_parts(facts: EngineFacts, fitted: Fitted) -> DummyStep | None:
    """The dummy step; None where config.json does not tell the model's sizes."""
    model = facts.model
    if model is None or model.hidden_size is None:
        return None
    tokens, seqs = scheduled(facts)
    forward = _forward(facts, model, model.hidden_size, tokens, fitted)
    experts = _experts(facts, model, model.hidden_size, tokens)
    if not facts.rules.keeps_workspaces:
        forward, experts = forward + experts, 0
    constant = "sampling_bytes"
    if facts.rules.sorts_logits:
        constant = "sorting_bytes"
    elif facts.rules.second_runner_is_lean and runs_second_runner(facts, model):
        constant = "lean_sampling_bytes"
    # Logits of every request that may run, of the whole vocabulary on every GPU.
    sampler = seqs * (model.vocab_size or 0) * float(getattr(fitted, constant))
    return DummyStep(forward, sampler, experts, constant)


_LINKED = ((8, 0), (9, 0))
_LINKED_FROM = 10
_LINKED_ABOVE_BYTES = 70 * GIB


def _context(facts: EngineFacts, fitted: Fitted) -> float:
    if facts.tensor_parallel_size.value == 1:
        return fitted.context_bytes
    return fitted.context_bytes + (fitted.linked_bytes if is_linked(facts) else fitted.unlinked_bytes)


def is_linked(facts: EngineFacts) -> bool:
    """Whether its GPUs are of the kind that NVLink joins; of a card that the catalogue lacks, by its memory."""
    if facts.capability is None:
        return facts.hbm_bytes is not None and facts.hbm_bytes.value >= _LINKED_ABOVE_BYTES
    return facts.capability in _LINKED or facts.capability[0] in (_LINKED_FROM, _LINKED_FROM + 1)


def scheduled(facts: EngineFacts) -> tuple[int, int]:
    """(tokens, requests) of a step at most; of a card that the catalogue lacks, vLLM's default for its memory."""
    defaults = batch_defaults("", 0 if facts.hbm_bytes is None else facts.hbm_bytes.value)
    tokens, seqs = facts.max_num_batched_tokens, facts.max_num_seqs
    most = defaults.max_num_seqs if seqs is None else seqs.value
    if tokens is not None and not tokens.assumed:
        return tokens.value, min(most, tokens.value)
    if facts.rules.prefills_whole:
        length = 0 if facts.max_model_len is None else facts.max_model_len.value
        usual = _LEAST_WHOLE if length > _LONGEST_WHOLE else max(length, _LEAST_WHOLE)
        return usual, _SEQS_OF_FIRST_ENGINE if seqs is None or seqs.assumed else most
    usual = defaults.max_num_batched_tokens if tokens is None else tokens.value
    return usual, min(most, usual)


def _forward(facts: EngineFacts, model: ModelGeometry, hidden: int, tokens: int, fitted: Fitted) -> float:
    """What one layer has alive for the tokens of a step: the hidden values, and those of its MLP or recurrent part, divided over TP."""
    inner = (model.shared_size or 0) if model.num_experts else (model.mlp_size or 0)
    if model.num_experts and model.first_dense_layers:
        inner = max(inner, model.mlp_size or 0)
    widths = [_width(cache.state) for cache in model.caches() if isinstance(cache, StateLayer)]
    widest = max(fitted.mlp_values * inner, fitted.state_values * max(widths, default=0))
    values = widest / facts.parallelism.tensor + _HIDDEN_VALUES * hidden
    return tokens * values * _ACTIVATION_BYTES


def _width(state: State) -> int:
    """Values that a recurrent layer gives for each token, on all GPUs together."""
    if isinstance(state, GatedDeltaState):
        return state.num_v_heads * state.head_v_dim
    if isinstance(state, KdaState):
        return state.num_heads * state.head_dim
    return state.intermediate_size if isinstance(state, Mamba1State | Mamba2State) else 0


def _experts(facts: EngineFacts, model: ModelGeometry, hidden: int, tokens: int) -> int:
    """Workspaces of fused experts: inputs and outputs of both multiplications for each (token, expert).

    `model_executor/layers/fused_moe/` workspace_shapes: M x topk x max(2 N, K) and M x topk x N.
    """
    inner = model.expert_size or model.mlp_size
    if not model.num_experts or not inner or not model.experts_per_token:
        return 0
    together = tokens * facts.data_parallel_size.value
    pairs = min(together, _LARGEST_MOE_CHUNK) * model.experts_per_token
    if not facts.enable_expert_parallel.value:
        inner = math.ceil(inner / facts.parallelism.tensor)
    return _ACTIVATION_BYTES * pairs * (max(2 * inner, hidden) + inner)


def _indexer(facts: EngineFacts, model: ModelGeometry) -> int:
    """Keys that the sparse indexer gathers for a prefill, with a 4-byte scale each."""
    heads = [cache.head_dim for cache in model.caches() if isinstance(cache, IndexerLayer)]
    if not heads or facts.max_model_len is None:
        return 0
    return _INDEXER_PREFIXES * facts.max_model_len.value * (max(heads) + 4)


def _graphs(facts: EngineFacts, model: ModelGeometry, seqs: int, fitted: Fitted) -> float:
    """CUDA graphs, where the release takes them off before the pool is sized."""
    if facts.flags.enforce_eager or not facts.rules.subtracts_graphs:
        return 0
    if runs_second_runner(facts, model) and not facts.rules.second_runner_subtracts_graphs:
        return 0
    return fitted.graph_bytes + fitted.graph_layer_bytes * model.num_layers * captured_sizes(
        seqs * (1 + facts.draft.tokens)
    )


_LARGEST_GRAPH = 512


def captured_sizes(tokens: int) -> int:
    """How many batch sizes get a graph (`_set_cudagraph_sizes`, config/vllm.py).

    1, 2, 4, multiples of 8 below 256 and of 16 from there, up to twice the tokens of a decode step.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_GRAPH + 1, 16)]
    return bisect.bisect_right(sizes, min(2 * tokens, _LARGEST_GRAPH))


def runs_second_runner(facts: EngineFacts, model: ModelGeometry) -> bool:
    """Whether vLLM's second model runner is its default for this model (`use_v2_model_runner`, config/vllm.py)."""
    runner = facts.rules.second_runner
    if runner.all or model.architecture in runner.architectures:
        return True
    return runner.dense and not model.num_experts and not model.stack.hybrid and not model.has_states
