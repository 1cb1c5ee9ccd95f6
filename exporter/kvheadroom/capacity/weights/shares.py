"""How many bytes of each part one tensor-parallel rank holds.

Sources, vLLM 0.33.0: `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `fused_moe/config.py`
(`FusedMoEParallelConfig.make`) and `fused_moe/expert_map_manager.py`.
"""

import math
from dataclasses import dataclass

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.layers import NotDivisibleError, divide
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    ROUTER_DTYPE,
    CacheScales,
    Experts,
    Linear,
    Out,
    Part,
    Tensor,
    Vocabulary,
)
from kvheadroom.capacity.weights.schemes import DTYPE_BYTES, Format, Matrix, Scheme

__all__ = ["NotDivisibleError", "Ranks", "bits_of", "format_of", "held_bytes", "out_sizes", "stored_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Over how many GPUs things are divided.

    Attributes:
        tensor: tensor-parallel ranks.
        experts: ranks over which experts are divided: tensor, data and prefill-context parallel ones together.
        expert_parallel: each of them holds whole experts (`--enable-expert-parallel`), else a slice of every one.
        whole_shared_experts: every rank holds shared experts whole.
        trtllm: unquantized experts run on FlashInfer's TRT-LLM kernels where these know the routing, which pads
            them (`unquantized_round_up_hidden_size_and_intermediate_size`, fused_moe/oracle/unquantized.py).
        float32_routers: no kernel computes a router in float32 from 16 bits.
        mxfp4_multiples: inner and hidden size of MXFP4 experts are padded to them
            (`mxfp4_round_up_hidden_size_and_intermediate_size`, fused_moe/oracle/mxfp4.py); None: not known.
    """

    tensor: int = 1
    experts: int = 1
    expert_parallel: bool = False
    whole_shared_experts: bool = False
    trtllm: bool = False
    float32_routers: bool = False
    mxfp4_multiples: tuple[int, int] | None = (1, 1)

    def holds_whole(self, part: Part) -> bool:
        """Whether every tensor-parallel rank holds all of `part`."""
        if isinstance(part, Tensor):
            return not part.divided
        if isinstance(part, Linear):
            return self.leaves_whole(part) or (not part.row and all(out.whole for out in part.outs))
        return isinstance(part, CacheScales)

    def leaves_whole(self, part: Linear) -> bool:
        """Whether a matrix that could be divided is not."""
        return bool(part.heads % self.tensor) or (part.shared_expert and self.whole_shared_experts)


_TRTLLM_MULTIPLE = 128
_ONE = Ranks()


def held_bytes(part: Part, ranks: Ranks, scheme: Scheme, dtype: str, prefix: str = "") -> int:
    """Bytes of `part` on the first tensor-parallel rank.

    Args:
        dtype: that of the model.
        prefix: vLLM's name of the layer that the part stands in.

    Raises:
        NotDivisibleError: vLLM cannot divide it so.
    """
    if isinstance(part, Tensor):
        elements = math.prod(part.shape)
        if part.divided:
            elements = divide(elements, min(ranks.tensor, part.units or ranks.tensor), part.name)
        return elements * DTYPE_BYTES[part.dtype or dtype]
    if isinstance(part, CacheScales):
        return scheme.cache_scale_bytes(dtype, latent=part.latent) if part.quantized else 0
    if isinstance(part, Vocabulary):
        padded = -(-part.rows // part.padding) * part.padding if ranks is not _ONE else part.rows
        rows = divide(padded, ranks.tensor, "the vocabulary")
        matrix = Matrix(name=prefix + part.name, outs=(rows,), names=(part.name,), inputs=part.width)
        bias = rows * DTYPE_BYTES[dtype] if part.bias else 0
        return scheme.vocabulary_bytes(matrix, dtype, quantized=part.quantized) + bias
    if isinstance(part, Experts):
        return _expert_bytes(part, ranks, scheme, dtype, prefix)
    return _linear_bytes(part, ranks, scheme, dtype, prefix)


def stored_bytes(part: Part, scheme: Scheme, dtype: str, prefix: str = "") -> int:
    """Bytes of `part` in the checkpoint, which need not have the scales of a cache."""
    return 0 if isinstance(part, CacheScales) else held_bytes(part, _ONE, scheme, dtype, prefix)


def _linear_bytes(part: Linear, ranks: Ranks, scheme: Scheme, dtype: str, prefix: str) -> int:
    tensor = 1 if ranks.leaves_whole(part) else ranks.tensor
    outs = out_sizes(part, tensor)
    if padding := -sum(outs) % part.row_multiple:
        outs += (padding,)
    own = part.dtype or dtype
    if own == ROUTER_DTYPE:
        own = FLOAT32 if ranks.float32_routers else dtype
    matrix = Matrix(
        name=prefix + part.name,
        names=tuple(out.name for out in part.outs),
        outs=outs,
        inputs=divide(part.inputs, tensor, f"the inputs of {part.name}") if part.row else part.inputs,
    )
    divided = tensor > 1 and (part.row or not all(out.whole for out in part.outs))
    if (
        divided
        and part.row_multiple == 1
        and (form := scheme.format_of_linear(matrix, quantized=part.quantized))
    ):
        form.hold_divided(matrix.name, outs, matrix.inputs, row=part.row)
    bias = sum(outs) * DTYPE_BYTES[own] if part.bias else 0
    return scheme.linear_bytes(matrix, own, quantized=part.quantized) + bias


def out_sizes(part: Linear, tensor: int) -> tuple[int, ...]:
    """Elements of each output on the first of `tensor` ranks."""
    return tuple(_out_size(out, tensor, part.name) for out in part.outs)


def format_of(part: Linear | Experts | Vocabulary, scheme: Scheme) -> Format | None:
    """The format that the scheme has for such matrices; None where it has none, or the class gives the matrix no scheme."""
    if not part.quantized:
        return None
    if isinstance(part, Experts):
        return scheme.experts
    return scheme.linear if isinstance(part, Linear) else scheme.head


def bits_of(part: Linear | Experts | Vocabulary, scheme: Scheme, prefix: str) -> int | None:
    """Bits of each number of a matrix in the scheme; None where the scheme leaves it in the model's dtype."""
    form = format_of(part, scheme)
    if form is None:
        return None
    if isinstance(part, Experts):
        return form.bits if scheme.quantizes_experts(prefix + part.name) else None
    names = tuple(out.name for out in part.outs) if isinstance(part, Linear) else (part.name,)
    return None if scheme.leaves(prefix + part.name, names) else form.bits


def _out_size(out: Out, tensor: int, name: str) -> int:
    if out.size < 1 or out.unit < 1:
        raise NotDivisibleError(f"config.json leaves {name} without an output")
    if out.whole:
        return out.size
    units = out.size // out.unit
    if units < tensor and out.unit > 1:
        divide(tensor, units, f"tensor_parallel_size by the {units} heads of {name}; it")
        return out.unit
    return divide(units, tensor, f"the outputs of {name}") * out.unit


def _expert_bytes(part: Experts, ranks: Ranks, scheme: Scheme, dtype: str, prefix: str) -> int:
    count, inner, hidden = part.count, part.intermediate, part.hidden
    if ranks.expert_parallel:
        # The first ranks take one more where experts do not divide evenly.
        count = -(-count // ranks.experts)
    else:
        if ranks.tensor > 1:
            inner = max(inner, part.narrowest_slice * ranks.tensor)
        inner = divide(inner, ranks.experts, "the inner size of an expert")
    if (
        ranks.trtllm
        and part.fast_routing
        and not (part.quantized and scheme.quantizes_experts(prefix + part.name))
    ):
        inner = -(-inner // _TRTLLM_MULTIPLE) * _TRTLLM_MULTIPLE
    if part.quantized and scheme.pads_experts(prefix + part.name):
        if ranks.mxfp4_multiples is None:
            raise NotModelledError("how experts in MXFP4 are padded on this GPU is not modelled")
        inner, hidden = (
            -(-size // multiple) * multiple
            for size, multiple in zip((inner, hidden), ranks.mxfp4_multiples, strict=True)
        )
    up = inner * (2 if part.gated else 1)
    first = Matrix(
        name=prefix + part.name,
        names=("w1", "w3") if part.gated else ("w1",),
        outs=(inner,) * (2 if part.gated else 1),
        inputs=hidden,
    )
    second = Matrix(name=prefix + part.name, names=("w2",), outs=(hidden,), inputs=inner)
    bias = (up + hidden) * DTYPE_BYTES[dtype] if part.bias else 0
    return count * (scheme.expert_bytes(first, second, dtype, quantized=part.quantized) + bias)
