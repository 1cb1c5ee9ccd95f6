"""What a model's weights are made of, and how vLLM divides each kind over tensor-parallel ranks.

One class per kind of module of vLLM 0.33.0's `model_executor/layers/`. Sizes are those of the whole model, in
elements; `shares` makes one rank's bytes of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

FLOAT32 = "float32"
ROUTER_DTYPE = "as the kernels of the GPU's generation want it"
"""Of a router that computes in float32: it is kept in float32 where no kernel does so from 16 bits
(`force_fp32_compute`, fused_moe/router/gate_linear.py)."""


@dataclass(frozen=True, slots=True)
class Out:
    """One output of a linear layer; several are one matrix in vLLM and tensors of their own in the checkpoint.

    Attributes:
        name: last part of the checkpoint's name (`q_proj`).
        size: elements.
        unit: elements that stay together; where there are fewer units than ranks, every rank holds one
            (`QKVParallelLinear`: K and V heads).
        whole: every rank holds it whole.
    """

    name: str
    size: int
    unit: int = 1
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A matrix (linear.py).

    Attributes:
        term: what it is counted under.
        name: vLLM's name below its layer.
        row: its inputs are divided (`RowParallelLinear`), else its outputs.
        bias: it has a bias, which with divided inputs every rank holds whole.
        dtype: None: that of the model.
        quantized: the checkpoint's scheme may apply to it.
        row_multiple: a rank's outputs are padded to a multiple of it.
        heads: attention heads of the encoder that it stands in, which every rank holds whole where tensor
            parallelism does not divide them; 0: it is divided in any case.
        shared_expert: every rank holds it whole where experts are spread over data-parallel ranks
            (`use_sequence_parallel_moe`, config/parallel.py).
    """

    term: str
    name: str
    inputs: int
    outs: tuple[Out, ...]
    row: bool = False
    bias: bool = False
    dtype: str | None = None
    quantized: bool = True
    row_multiple: int = 1
    heads: int = 0
    shared_expert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts (fused_moe/routed_experts.py): each a pair of matrices, or three where gated.

    Attributes:
        intermediate: inner size of one expert.
        bias: both matrices have one.
        fast_routing: FlashInfer's TRT-LLM kernels know its way to choose experts, and its activation
            (fused_moe/experts/trtllm_bf16_moe.py).
        narrowest_slice: the model pads the slices of tensor-parallel ranks to it.
    """

    name: str
    count: int
    hidden: int
    intermediate: int
    gated: bool = True
    bias: bool = False
    fast_routing: bool = False
    narrowest_slice: int = 0
    quantized: bool = True
    term: str = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """An embedding or an output layer (vocab_parallel_embedding.py): rows padded to `padding`, divided over ranks.

    Attributes:
        quantized: the checkpoint's scheme may apply to it.
    """

    term: str
    name: str
    rows: int
    width: int
    bias: bool = False
    padding: int = 64
    quantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Anything else: norms, convolutions, tables.

    Attributes:
        divided: over tensor-parallel ranks, else every rank holds it whole.
        units: where there are fewer of them than ranks, every rank holds one; 0: it has to divide.
        dtype: None: that of the model.
    """

    term: str
    name: str
    shape: tuple[int, ...]
    divided: bool = False
    units: int = 0
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScales:
    """The scales that an attention layer of a quantized checkpoint registers for its KV cache.

    Attributes:
        quantized: the class tells its attention layers how the checkpoint is quantized.
        latent: it is latent attention.
    """

    name: str
    quantized: bool = True
    latent: bool = False
    term: str = "attention"


Part = Linear | Experts | Vocabulary | Tensor | CacheScales
Parts = tuple[Part, ...]


class Stage(Enum):
    """The pipeline stages that hold what stands around the layers."""

    FIRST = "first"
    LAST = "last"
    ENDS = "first and last"
    ALL = "all"

    def holds(self, stage: int, stages: int) -> bool:
        """Whether stage number `stage` of `stages` is one of them."""
        first, last = stage == 0, stage == stages - 1
        return {
            Stage.FIRST: first,
            Stage.LAST: last,
            Stage.ENDS: first or last,
            Stage.ALL: True,
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A whole model.

    Attributes:
        layers: parts of each layer that pipeline stages share out.
        around: what stands around them, and where.
        mtp: what multi-token prediction adds; None: that is not modelled, or there is none.
    """

    layers: tuple[Parts, ...]
    around: tuple[tuple[Stage, Parts], ...]
    mtp: "Mtp | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """The layers of multi-token prediction, which stand on the last pipeline stage.

    Attributes:
        parts: what they hold; the checkpoint has it whether it is loaded or not.
        embedding: an embedding of their own until it gives way to the target's, which it does on one stage only
            (`maybe_share_target_embed`, v1/worker/gpu/spec_decode/eagle/utils.py).
        shares_over_stages: it gives way on several stages too (`has_own_embed_tokens`).
        heads: output layers that always give way to the target's.
        quantizable: how it is held in a quantized checkpoint is modelled.
    """

    parts: Parts
    embedding: Parts = ()
    shares_over_stages: bool = False
    heads: Parts = ()
    quantizable: bool = True


def column(
    term: str,
    name: str,
    inputs: int,
    outputs: int | Mapping[str, int],
    *,
    bias: bool = False,
    dtype: str | None = None,
    quantized: bool = True,
    shared_expert: bool = False,
) -> Linear:
    """A linear layer whose outputs are divided (`ColumnParallelLinear`, `MergedColumnParallelLinear`)."""
    sizes = {_last(name): outputs} if isinstance(outputs, int) else outputs
    return Linear(
        term=term,
        name=name,
        inputs=inputs,
        outs=tuple(Out(key, size) for key, size in sizes.items()),
        bias=bias,
        dtype=dtype,
        quantized=quantized,
        shared_expert=shared_expert,
    )


def row(
    term: str,
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    quantized: bool = True,
    shared_expert: bool = False,
) -> Linear:
    """A linear layer whose inputs are divided (`RowParallelLinear`)."""
    return Linear(
        term=term,
        name=name,
        inputs=inputs,
        outs=(Out(_last(name), outputs, whole=True),),
        row=True,
        bias=bias,
        quantized=quantized,
        shared_expert=shared_expert,
    )


def whole(
    term: str,
    name: str,
    inputs: int,
    outputs: int | Mapping[str, int],
    *,
    bias: bool = False,
    dtype: str | None = None,
    quantized: bool = True,
) -> Linear:
    """A linear layer that every rank holds whole (`ReplicatedLinear`, or `disable_tp`)."""
    sizes = {_last(name): outputs} if isinstance(outputs, int) else outputs
    return Linear(
        term=term,
        name=name,
        inputs=inputs,
        outs=tuple(Out(key, size, whole=True) for key, size in sizes.items()),
        bias=bias,
        dtype=dtype,
        quantized=quantized,
    )


def qkv(
    inputs: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    *,
    head_size_v: int | None = None,
    bias: bool = False,
    name: str = "self_attn.qkv_proj",
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    term: str = "attention",
    quantized: bool = True,
) -> Linear:
    """Q, K and V (`QKVParallelLinear`)."""
    size_v = head_size_v or head_size
    return Linear(
        term=term,
        name=name,
        inputs=inputs,
        outs=(
            Out(names[0], heads * head_size, head_size),
            Out(names[1], kv_heads * head_size, head_size),
            Out(names[2], kv_heads * size_v, size_v),
        ),
        bias=bias,
        quantized=quantized,
    )


def norm(name: str, size: int, *, bias: bool = False, dtype: str | None = None, term: str = "norms") -> Parts:
    """A norm of `size` elements, with a bias if it is a LayerNorm."""
    weight = Tensor(term=term, name=f"{name}.weight", shape=(size,), dtype=dtype)
    if not bias:
        return (weight,)
    return (weight, Tensor(term=term, name=f"{name}.bias", shape=(size,), dtype=dtype))


def norms(names: Iterable[str], size: int, *, bias: bool = False) -> Parts:
    """Several norms of one size."""
    return tuple(part for name in names for part in norm(name, size, bias=bias))


def gated_mlp(
    hidden: int, intermediate: int, *, name: str = "mlp", bias: bool = False, shared_expert: bool = False
) -> Parts:
    """The usual MLP of three matrices (`LlamaMLP`)."""
    return (
        column(
            "mlp",
            f"{name}.gate_up_proj",
            hidden,
            {"gate_proj": intermediate, "up_proj": intermediate},
            bias=bias,
            shared_expert=shared_expert,
        ),
        row("mlp", f"{name}.down_proj", intermediate, hidden, bias=bias, shared_expert=shared_expert),
    )


def plain_mlp(
    hidden: int,
    intermediate: int,
    *,
    names: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj"),
    bias: bool = False,
    term: str = "mlp",
) -> Parts:
    """An MLP of two matrices."""
    return (
        column(term, names[0], hidden, intermediate, bias=bias),
        row(term, names[1], intermediate, hidden, bias=bias),
    )


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]
