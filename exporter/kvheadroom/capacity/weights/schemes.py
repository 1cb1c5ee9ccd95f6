"""How many bytes a matrix takes, by the scheme that the checkpoint is quantized with.

Sizes are those of the parameters that vLLM 0.33.0 creates (`model_executor/layers/quantization/`), before kernels
repack any.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvheadroom.capacity.layers import NotDivisibleError
from kvheadroom.capacity.weights.contradiction import CutBlockError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "uint8": 1}

_SMALLEST_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix on one rank.

    Attributes:
        name: vLLM's name of the module.
        names: last parts of the checkpoint's names of its outputs.
        outs: elements of each output.
    """

    name: str
    names: tuple[str, ...]
    outs: tuple[int, ...]
    inputs: int

    @property
    def elements(self) -> int:
        """Elements of the matrix."""
        return sum(self.outs) * self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a quantized matrix is stored.

    Attributes:
        bits: of one element.
        rows, columns: elements that share a scale; None: all of them. Both None: a scale for each output.
        scale_bytes: of one scale; 0: that of the model's dtype.
        zero_bits: of the zero point that comes with each scale.
        per_output_bytes: what else every output has: scales of scales, of activations.
        expert_output_bytes: the same for each of an expert's outputs; None: as much.
        expert_bytes: what else each of an expert's two matrices has.
        fixed_bytes: what else every linear layer's matrix has.
        expert_dtype_numbers: numbers in the model's dtype that each of an expert's outputs has.
        refines: experts whose inner size is no multiple of a block get smaller blocks (`refine_fp8_moe_block_shape`,
            fused_moe/oracle/fp8.py).
        padded: kernels have experts padded to multiples of their own.
        packed: several numbers stand in one, so that vLLM cannot make it of unquantized ones as it loads.
        strict_outputs: blocks of scales must divide a rank's outputs where a matrix has several too
            (`_maybe_allow_fp8_block_shape_mismatch`, model_executor/layers/linear.py, asks for fp8.py's sizes alone).
    """

    bits: int
    rows: int | None = None
    columns: int | None = None
    scale_bytes: int = 4
    zero_bits: int = 0
    per_output_bytes: int = 0
    expert_output_bytes: int | None = None
    expert_bytes: int = 0
    fixed_bytes: int = 0
    expert_dtype_numbers: int = 0
    refines: bool = False
    padded: bool = False
    packed: bool = False
    strict_outputs: bool = False

    def hold_divided(self, name: str, outs: tuple[int, ...], inputs: int, *, row: bool) -> None:
        """Blocks of scales are not cut by tensor parallelism (`validate_fp8_block_shape`, utils/fp8_utils.py).

        Args:
            outs, inputs: of one rank's slice.
            row: the inputs are divided, else the outputs.

        Raises:
            CutBlockError: vLLM refuses to start.
        """
        if self.rows is None or self.rows == 1 or self.columns is None:
            return
        if row and inputs % self.columns:
            raise CutBlockError(
                f"vLLM refuses a rank's slice of {name}: its inputs ({inputs}) are no multiple of the {self.columns} that share "
                "a scale"
            )
        if not row and (len(outs) == 1 or self.strict_outputs):
            for out in outs:
                if out % self.rows:
                    raise CutBlockError(
                        f"vLLM refuses a rank's slice of {name}: its outputs ({out}) are no multiple of the {self.rows} that "
                        "share a scale"
                    )

    def linear_bytes(self, outs: tuple[int, ...], inputs: int, dtype: str) -> int:
        """Bytes of a linear layer's matrix."""
        width = sum(outs)
        return (
            width * inputs * self.bits // 8
            + self._scales(width, inputs, dtype)
            + len(outs) * self.per_output_bytes
            + self.fixed_bytes
        )

    def of_expert(self, inner: int, hidden: int) -> "Format":
        """The format of experts whose slice on one rank is `inner` wide."""
        if not self.columns or not inner % self.columns:
            return self
        if not self.refines or not self.rows:
            raise NotDivisibleError(
                f"a rank's slice of an expert ({inner}) is no multiple of the {self.columns} that share a scale"
            )
        block = math.gcd(self.rows, self.columns, inner, hidden)
        if block < _SMALLEST_BLOCK:
            raise NotDivisibleError(
                f"a rank's slice of an expert ({inner}) is too narrow for blocks of scales"
            )
        return replace(self, rows=block, columns=block)

    def expert_matrix_bytes(self, outs: tuple[int, ...], inputs: int, dtype: str) -> int:
        """Bytes of one of an expert's two matrices."""
        extra = self.per_output_bytes if self.expert_output_bytes is None else self.expert_output_bytes
        return (
            sum(outs) * inputs * self.bits // 8
            + sum(self._scales(out, inputs, dtype) for out in outs)
            + len(outs) * extra
            + self.expert_bytes
            + sum(outs) * self.expert_dtype_numbers * DTYPE_BYTES[dtype]
        )

    def _scales(self, width: int, inputs: int, dtype: str) -> int:
        if self.rows is None and self.columns is None:
            return 0
        if self.rows == 1 and self.columns and inputs % self.columns:
            raise NotDivisibleError(
                f"a rank's inputs of a matrix ({inputs}) are no multiple of the {self.columns} that share a scale"
            )
        count = math.ceil(width / (self.rows or width)) * math.ceil(inputs / (self.columns or inputs))
        return count * (self.scale_bytes or DTYPE_BYTES[dtype]) + count * self.zero_bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What is quantized, and how.

    Attributes:
        linear, experts, head: the format of linear layers, routed experts and the output layer; None: the model's
            own dtype.
        skips: whether a module is left as it is, by its name and those of its outputs.
        float32_scales, own_scales: numbers that an attention layer registers for its cache, in float32 and in the
            model's dtype.
        latent_scales: latent attention does so too.
        asks_headers: vLLM asks the checkpoint's headers which linear layers are quantized.
        by_headers: how each layer is held is not read from config.json, the checkpoint's headers tell it.
    """

    linear: Format | None = None
    experts: Format | None = None
    head: Format | None = None
    skips: Callable[[str, tuple[str, ...]], bool] | None = None
    float32_scales: int = 0
    own_scales: int = 0
    latent_scales: bool = False
    asks_headers: bool = False
    by_headers: bool = False

    def format_of_linear(self, matrix: Matrix, *, quantized: bool) -> Format | None:
        """The format of a linear layer's matrix; None: the model's own dtype."""
        return self.linear if quantized and not self.leaves(matrix.name, matrix.names) else None

    def leaves(self, name: str, names: tuple[str, ...]) -> bool:
        """Whether a module is left as it is, by its name and those of its outputs."""
        return self.skips is not None and self.skips(name, names)

    def _applies(self, matrix: Matrix) -> bool:
        return not self.leaves(matrix.name, matrix.names)

    def linear_bytes(self, matrix: Matrix, dtype: str, *, quantized: bool) -> int:
        """Bytes of a linear layer's matrix with its scales, on one rank."""
        form = self.format_of_linear(matrix, quantized=quantized)
        if form is None:
            return matrix.elements * DTYPE_BYTES[dtype]
        return form.linear_bytes(matrix.outs, matrix.inputs, dtype)

    def quantizes_experts(self, name: str) -> bool:
        """Whether it applies to routed experts."""
        names = ("gate_proj", "up_proj", "down_proj")
        return self.experts is not None and not self.leaves(name, names)

    def pads_experts(self, name: str) -> bool:
        """Whether kernels have its experts padded."""
        return self.experts is not None and self.experts.padded and self.quantizes_experts(name)

    def expert_bytes(self, first: Matrix, second: Matrix, dtype: str, *, quantized: bool) -> int:
        """Bytes of the matrices of one expert."""
        if self.experts is None or not quantized or not self.quantizes_experts(first.name):
            return (first.elements + second.elements) * DTYPE_BYTES[dtype]
        form = self.experts.of_expert(second.inputs, first.inputs)
        return sum(form.expert_matrix_bytes(matrix.outs, matrix.inputs, dtype) for matrix in (first, second))

    def vocabulary_bytes(self, matrix: Matrix, dtype: str, *, quantized: bool) -> int:
        """Bytes of an embedding or output layer."""
        if self.head is None or not quantized or not self._applies(matrix):
            return matrix.elements * DTYPE_BYTES[dtype]
        return self.head.linear_bytes(matrix.outs, matrix.inputs, dtype)

    def cache_scale_bytes(self, dtype: str, *, latent: bool) -> int:
        """Bytes of what an attention layer registers for its cache."""
        if latent and not self.latent_scales:
            return 0
        return 4 * self.float32_scales + DTYPE_BYTES[dtype] * self.own_scales


UNQUANTIZED = Scheme()
