"""Which tensor of a checkpoint is which part of a blueprint, by name and number of elements.

A checkpoint may hold in one tensor what vLLM holds in several, and the other way round; parts of one kind that vLLM
divides alike need not be told apart.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvheadroom.capacity.weights.parts import (
    Blueprint,
    CacheScales,
    Experts,
    Linear,
    Part,
    Parts,
    Tensor,
    Vocabulary,
)
from kvheadroom.capacity.weights.stored import Matrix, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A tensor of a part; `first` to before `after` are the outputs of the part that it holds."""

    matrix: Matrix
    first: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What a part should have in the checkpoint, and has not.

    Attributes:
        spared: vLLM may do without it: a bias is filled with zeros, and what stands around the layers in two places, as the
            embedding of Phi-3-Vision, is one tensor in the checkpoint.
    """

    name: str
    elements: int
    spared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """What belongs together.

    Attributes:
        found: the tensors of each part that has any, by the name of its layer and its own.
        missing: parts without a tensor of their size.
        left: tensors that are of no part.
    """

    found: Mapping[tuple[str, str], tuple[Found, ...]]
    missing: tuple[Missing, ...]
    left: tuple[Matrix, ...]

    @property
    def complete(self) -> bool:
        """Whether each part has its tensors, and each tensor its part."""
        return not self.missing and not self.left


@dataclass(frozen=True, slots=True)
class _Piece:
    """One output of a part: what a checkpoint may hold as a tensor of its own, and the modules that it may stand in."""

    name: str
    elements: int
    modules: frozenset[str] = frozenset()

    def is_of(self, matrix: Matrix) -> bool:
        """Whether the tensor has its name."""
        return matrix.module == self.name or matrix.module in self.modules


# Tensors of 8 bits may stand for twice as many numbers of 4, so size alone does not tell one of these from two.
_EXPERT_MODULES = {
    "gate": frozenset({"gate_proj", "w1"}),
    "up": frozenset({"up_proj", "w3", "v1"}),
    "down": frozenset({"down_proj", "w2"}),
}
_EXPERTS = "experts"


class _Certainty(Enum):
    """What speaks for a tensor beside its size, the surest first."""

    PIECE = "it has the name of this one output"
    PART = "it has a name of the part"
    SIZE = "nothing else"


@dataclass(slots=True)
class _Chain:
    """Pieces of a part that stand one behind the other, so that several of them may be one tensor."""

    key: tuple[str, str]
    names: frozenset[str]
    pieces: tuple[_Piece, ...]
    bias: bool = False
    whole_tail: bool = False
    of_experts: bool = False
    done: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = [False] * len(self.pieces)

    def suits(self, matrix: Matrix, first: int, after: int, certainty: "_Certainty") -> bool:
        """Whether the tensor may be the pieces from `first` to before `after`."""
        if self.whole_tail:
            named = any(matrix.tail == name or matrix.tail.endswith(f".{name}") for name in self.names)
            return named or certainty is _Certainty.SIZE
        # A shared expert has modules of the same names, and may be as large as all the others packed.
        if matrix.bias != self.bias or (_EXPERTS in _path(matrix) and not self.of_experts):
            return False
        if certainty is _Certainty.PIECE:
            return after - first == 1 and self.pieces[first].is_of(matrix)
        if certainty is _Certainty.PART:
            of_a_piece = any(piece.is_of(matrix) for piece in self.pieces)
            named = matrix.module in self.names or (self.of_experts and _EXPERTS in _path(matrix))
            return named and (not of_a_piece or len(self.pieces) == 1)
        return True


def _path(matrix: Matrix) -> set[str]:
    return set(matrix.tail.split("."))


def match(blueprint: Blueprint, stored: Stored) -> Matching:
    """The tensors of each part."""
    matcher = _Matcher()
    around = tuple(part for _, parts in blueprint.around for part in parts)
    matcher.run("", around, stored.around)
    for number, parts in enumerate(blueprint.layers):
        matcher.run(f"model.layers.{number}.", parts, stored.layers[number])
    return Matching(
        found={key: tuple(found) for key, found in matcher.found.items()},
        missing=tuple(matcher.missing),
        left=tuple(matcher.left),
    )


class _Matcher:
    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[Found]] = defaultdict(list)
        self.missing: list[Missing] = []
        self.left: list[Matrix] = []

    def run(self, prefix: str, parts: Parts, matrices: Iterable[Matrix]) -> None:
        pool: dict[int, list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            for elements in matrix.elements:
                pool[elements].append(matrix)
        chains = [chain for part in parts for chain in _chains(prefix, part)]
        taken: set[int] = set()
        for certainty in _Certainty:
            for chain in chains:
                self._fill(chain, pool, taken, certainty)
        placed = [
            (chain, piece, done)
            for chain in chains
            for piece, done in zip(chain.pieces, chain.done, strict=True)
        ]
        twins = {(piece.name, piece.elements) for _, piece, done in placed if done and not prefix}
        self.missing += [
            Missing(
                name=f"{prefix}{piece.name}",
                elements=piece.elements,
                spared=chain.bias or (piece.name, piece.elements) in twins,
            )
            for chain, piece, done in placed
            if not done
        ]
        self.left += [matrix for matrix in matrices if id(matrix) not in taken]

    def _fill(
        self, chain: _Chain, pool: dict[int, list[Matrix]], taken: set[int], certainty: _Certainty
    ) -> None:
        for first, after in _runs(len(chain.pieces)):
            if any(chain.done[first:after]):
                continue
            elements = sum(piece.elements for piece in chain.pieces[first:after])
            for matrix in pool.get(elements, ()):
                if id(matrix) not in taken and chain.suits(matrix, first, after, certainty):
                    taken.add(id(matrix))
                    self.found[chain.key].append(Found(matrix=matrix, first=first, after=after))
                    chain.done[first:after] = [True] * (after - first)
                    break


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """Every run of neighbours, the longest first."""
    for length in range(count, 0, -1):
        for first in range(count - length + 1):
            yield first, first + length


def _chains(prefix: str, part: Part) -> Iterator[_Chain]:
    key, last = (prefix, part.name), part.name.rpartition(".")[2]
    if isinstance(part, CacheScales):
        return
    if isinstance(part, Tensor):
        tail = ".".join(part.name.split(".")[-2:])
        piece = _Piece(part.name, math.prod(part.shape))
        yield _Chain(key, frozenset({part.name, tail}), (piece,), whole_tail=True)
    elif isinstance(part, Vocabulary):
        names = frozenset({last})
        yield _Chain(key, names, (_Piece(last, part.rows * part.width),))
        if part.bias:
            yield _Chain(key, names, (_Piece(last, part.rows),), bias=True)
    elif isinstance(part, Experts):
        outs = ("gate", "up") if part.gated else ("up",)
        names = frozenset({last})
        matrix = part.count * part.intermediate * part.hidden
        pieces = tuple(_Piece(name, matrix, _EXPERT_MODULES[name]) for name in (*outs, "down"))
        yield _Chain(key, names, pieces, of_experts=True)
        if part.bias:
            inner = tuple(_Piece(name, part.count * part.intermediate) for name in outs)
            yield _Chain(
                key, names, (*inner, _Piece("down", part.count * part.hidden)), bias=True, of_experts=True
            )
    else:
        yield from _of_linear(key, last, part)


def _of_linear(key: tuple[str, str], last: str, part: Linear) -> Iterator[_Chain]:
    names = frozenset({last, *(out.name for out in part.outs)})
    yield _Chain(key, names, tuple(_Piece(out.name, out.size * part.inputs) for out in part.outs))
    if part.bias:
        yield _Chain(key, names, tuple(_Piece(out.name, out.size) for out in part.outs), bias=True)
