"""The pieces that encoders are made of, all counted as the encoder's."""

from collections.abc import Iterable
from dataclasses import replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.model_config import MOST_LAYERS
from kvheadroom.capacity.weights.parts import Linear, Part, Parts, Tensor, column, gated_mlp, row
from kvheadroom.capacity.weights.parts import whole as whole_linear

VISION = "vision"


def table(name: str, *shape: int) -> Tensor:
    """A tensor that every rank holds whole."""
    return Tensor(term=VISION, name=name, shape=shape)


def linear(
    name: str,
    inputs: int,
    outputs: int,
    *,
    bias: bool = False,
    whole_matrix: bool = True,
    quantized: bool = True,
) -> Linear:
    """A matrix that every rank holds whole, unless it is one whose outputs are divided."""
    make = whole_linear if whole_matrix else column
    return make(VISION, name, inputs, outputs, bias=bias, quantized=quantized)


def mlp(
    inputs: int,
    inner: int,
    first: str,
    second: str,
    *,
    bias: bool = True,
    out: int | None = None,
    quantized: bool = True,
) -> Parts:
    """Two matrices, the first divided by its outputs, the second by its inputs."""
    matrices = (
        column(VISION, first, inputs, inner, bias=bias),
        row(VISION, second, inner, out or inputs, bias=bias),
    )
    return tuple(replace(matrix, quantized=quantized) for matrix in matrices)


def gated(width: int, inner: int, *, name: str = "mlp", bias: bool = False) -> Parts:
    """An MLP of three matrices."""
    return gated_mlp(width, inner, name=name, bias=bias)


def repeated(name: str, parts: Iterable[Part], count: int) -> Parts:
    """The same layer `count` times."""
    if count > MOST_LAYERS:
        raise NotModelledError(f"{name} has {count} layers, more than any encoder has")
    parts = tuple(parts)
    return tuple(
        replace(part, name=f"{name}.{index}.{part.name}") for index in range(count) for part in parts
    )


def layered(prefix: str, parts: Iterable[Part]) -> Parts:
    """Parts under the name of what they stand in, counted as the encoder's."""
    return tuple(replace(part, name=prefix + part.name, term=VISION) for part in parts)


def with_heads(parts: Iterable[Part], heads: int) -> Parts:
    """Parts of an encoder that is not divided where its heads cannot be."""
    return tuple(replace(part, heads=heads) if isinstance(part, Linear) else part for part in parts)
