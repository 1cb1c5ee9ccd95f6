"""Parts that a checkpoint holds in another type than config.json says, by the types and shapes of its headers.

vLLM 0.33.0 creates parameters by config.json alone, but for AWQ and GPTQ, where it asks the headers which layers are
quantized (`maybe_update_config`, quantization/auto_awq.py and auto_gptq.py). What it creates packed it loads only where
the checkpoint has it packed alike: where our reading of config.json differs from the headers of such a part, the headers
are right. Into what it creates in 8 bits it casts whatever there is, and likewise into the model's dtype what is not
quantized: of those only the shape counts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.layers import divide
from kvheadroom.capacity.stored_model import StoredTensor
from kvheadroom.capacity.weights.contradiction import ContradictionError, CutBlockError
from kvheadroom.capacity.weights.matching import Found, Matching
from kvheadroom.capacity.weights.parts import (
    FLOAT32,
    Blueprint,
    CacheScales,
    Experts,
    Linear,
    Part,
    Tensor,
    Vocabulary,
)
from kvheadroom.capacity.weights.schemes import DTYPE_BYTES, UNQUANTIZED, Scheme
from kvheadroom.capacity.weights.shares import Ranks, bits_of, format_of, held_bytes, out_sizes
from kvheadroom.capacity.weights.stored import PACKED_IN_32, PLAIN

Key = tuple[str, str]
"""Beginning of a part's names, and its own name."""
_CAST_BITS = 8
_SHAPE = ".weight_shape"
_BESIDE_OF_OTHERS = (
    _SHAPE, ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point",
)  # fmt: skip
# Two numbers of 64 bits, and of an expert's two matrices in 16 bits (compressed_tensors_wNa16.py,
# compressed_tensors_moe_wna16.py).
_SHAPE_BYTES, _EXPERT_SHAPE_BYTES = 16, 8
_SMALL = 8  # numbers that are no row or column of a matrix: one for each output at most


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTypes:
    """The parts whose types are the headers'.

    Attributes:
        plain: they are not quantized, though the scheme would.
        stored: they are quantized in another way than the scheme has it.
        told: names of such parts that config.json speaks of otherwise.
        cast: names of parts that are made in 8 bits, as config.json says, and are not stored so.
        widened: names of parts that are made in the model's dtype, as config.json says, and are stored in 8 bits.
    """

    plain: frozenset[Key] = frozenset()
    stored: Mapping[Key, tuple[Found, ...]]
    told: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.plain or self.stored)

    def covers(self, key: Key) -> bool:
        """Whether a part is one of them."""
        return key in self.plain or key in self.stored

    def held_bytes(self, part: Part, ranks: Ranks, dtype: str, prefix: str) -> int:
        """Bytes of such a part on the first tensor-parallel rank."""
        found = self.stored.get((prefix, part.name))
        if found is None:
            return held_bytes(part, ranks, UNQUANTIZED, dtype, prefix)
        if isinstance(part, Linear):
            return _linear_bytes(part, found, ranks, dtype)
        if isinstance(part, Experts):
            return _expert_bytes(part, found, ranks, dtype)
        raise NotModelledError(f"{prefix}{part.name} is quantized in a way that is not modelled")

    def stored_bytes(self, part: Part, dtype: str, prefix: str) -> int:
        """Bytes of such a part in the checkpoint."""
        found = self.stored.get((prefix, part.name))
        if found is None:
            return held_bytes(part, Ranks(), UNQUANTIZED, dtype, prefix)
        return sum(each.matrix.size_bytes for each in found)


AS_CONFIGURED = OwnTypes(stored={})


def own_types(blueprint: Blueprint, scheme: Scheme, matching: Matching) -> OwnTypes:
    """The parts of a checkpoint that are held otherwise than the scheme has it.

    Raises:
        ContradictionError: one of them is quantized in part, or packed where vLLM makes it in the model's dtype.
    """
    plain, stored, told, cast, widened = set(), {}, [], [], []
    placed = [("", part) for _, parts in blueprint.around for part in parts]
    placed += [
        (f"model.layers.{number}.", part) for number, parts in enumerate(blueprint.layers) for part in parts
    ]
    for prefix, part in placed:
        key = (prefix, part.name)
        found = tuple(each for each in matching.found.get(key, ()) if not each.matrix.bias)
        if isinstance(part, Tensor | CacheScales) or not found:
            continue
        quantized = {each.matrix.quantized for each in found}
        if len(quantized) > 1:
            raise ContradictionError(f"{prefix}{part.name} is quantized in part, which vLLM does not load")
        bits, form = bits_of(part, scheme, prefix), format_of(part, scheme)
        if not quantized.pop():
            if bits is None:
                continue
            if scheme.asks_headers and isinstance(part, Linear):
                plain.add(key)
            elif form is not None and not form.packed:
                cast.append(prefix + part.name)
            else:
                plain.add(key)
                told.append(prefix + part.name)
        elif form is None and not (scheme.by_headers and part.quantized):
            _hold_loadable(part, found, prefix)
            widened.append(prefix + part.name)
        elif bits is None or not all(_has_bits(part, each, bits) for each in found):
            stored[key] = found
            if not scheme.by_headers:
                told.append(prefix + part.name)
    return OwnTypes(
        plain=frozenset(plain), stored=stored, told=tuple(told), cast=tuple(cast), widened=tuple(widened)
    )


def _hold_loadable(part: Linear | Experts | Vocabulary, found: tuple[Found, ...], prefix: str) -> None:
    """Into the model's dtype vLLM casts numbers of 8 bits, but neither unpacks them nor takes scales."""
    if any(each.matrix.beside or not _has_bits(part, each, _CAST_BITS) for each in found):
        kind = found[0].matrix.tensor.dtype
        raise ContradictionError(
            f"{prefix}{part.name} is stored in {kind}, and by config.json vLLM makes it in the model's own dtype"
        )


def _has_bits(part: Linear | Experts | Vocabulary, found: Found, bits: int) -> bool:
    """Whether a tensor is as large as it is with so many bits for each number."""
    tensor = found.matrix.tensor
    return tensor.size_bytes * tensor.count * 8 == _elements(part, found) * bits


def _elements(part: Linear | Experts | Vocabulary, found: Found) -> int:
    if isinstance(part, Experts):
        return part.count * part.hidden * part.intermediate * (found.after - found.first)
    if isinstance(part, Vocabulary):
        return part.rows * part.width
    return part.inputs * sum(out.size for out in part.outs[found.first : found.after])


def _linear_bytes(part: Linear, found: tuple[Found, ...], ranks: Ranks, dtype: str) -> int:
    if part.row_multiple != 1:
        raise NotModelledError(f"{part.name} is quantized in a way that is not modelled")
    tensor = 1 if ranks.leaves_whole(part) else ranks.tensor
    held = out_sizes(part, tensor)
    total = sum(held) * DTYPE_BYTES[dtype] if part.bias else 0
    for each in found:
        outs = part.outs[each.first : each.after]
        full = sum(out.size for out in outs)
        for stored in _counted(each, dtype):
            if math.prod(stored.shape) == 1:
                # vLLM has one for each output; a checkpoint that holds them as one matrix has one in all.
                total += stored.size_bytes * len(outs)
            elif part.row:
                total += _part_of_inputs(stored, full, part.inputs, tensor)
            else:
                total += _part_of_outputs(stored, part.inputs, sum(held[each.first : each.after]), full)
    return total + (_SHAPE_BYTES if _has_shape(found) else 0)


def _counted(found: Found, dtype: str) -> Iterator[StoredTensor]:
    """The tensors of a matrix as vLLM makes them, but for its shape, which it keeps once for all outputs of a part.

    Scales of caches are of the attention layer, not of the matrix whose name they have.
    """
    matrix = found.matrix.tensor
    yield matrix
    for stored in found.matrix.beside:
        if not stored.name.endswith(_BESIDE_OF_OTHERS):
            yield _as_made(stored, matrix, dtype)


def _as_made(scale: StoredTensor, matrix: StoredTensor, dtype: str) -> StoredTensor:
    """A scale in the type that vLLM makes it in, whatever the checkpoint has it in.

    That is float32 (`create_fp8_scale_parameter`, utils/fp8_utils.py; compressed_tensors_w8a8_int8.py), or the model's dtype
    for groups of whole numbers (compressed_tensors_wNa16.py, compressed_tensors_w4a8_int.py).
    """
    if scale.dtype not in PLAIN:
        return scale
    in_groups = matrix.dtype == "I8" and len(scale.shape) > 1 and scale.shape[-1] > 1
    own = dtype if matrix.dtype in PACKED_IN_32 or in_groups else FLOAT32
    return replace(scale, size_bytes=math.prod(scale.shape) * DTYPE_BYTES[own])


def _has_shape(found: tuple[Found, ...]) -> bool:
    return any(stored.name.endswith(_SHAPE) for each in found for stored in each.matrix.beside)


def _part_of_outputs(stored: StoredTensor, inputs: int, held: int, full: int) -> int:
    """Of a tensor of a matrix whose outputs are divided: what runs along the inputs alone is whole."""
    numbers = math.prod(stored.shape)
    if numbers <= _SMALL or (numbers == inputs and len(stored.shape) == 1 and inputs != full):
        return stored.size_bytes
    if _in_blocks(stored) and 1 < stored.shape[0] < full and stored.shape[0] * held % full:
        raise _cut(stored)
    return -(-stored.size_bytes * held // full)


def _part_of_inputs(stored: StoredTensor, outputs: int, inputs: int, ranks: int) -> int:
    """Of a tensor of a matrix whose inputs are divided: what runs along the outputs alone is whole."""
    numbers = math.prod(stored.shape)
    if numbers <= _SMALL or numbers == outputs:
        return stored.size_bytes
    divide(inputs, ranks, "the inputs of a matrix")
    if _in_blocks(stored) and 1 < stored.shape[-1] < inputs and stored.shape[-1] % ranks:
        raise _cut(stored)
    return divide(stored.size_bytes, ranks, f"{stored.name}, of which each GPU has a slice,")


def _in_blocks(stored: StoredTensor) -> bool:
    """Whether it may be the scales of blocks, which vLLM does not cut (`validate_fp8_block_shape`, utils/fp8_utils.py)."""
    rows_and_columns = 2
    return (
        len(stored.shape) == rows_and_columns
        and stored.dtype in PLAIN
        and not stored.name.endswith(".scales")
    )


def _cut(stored: StoredTensor) -> CutBlockError:
    return CutBlockError(f"tensor parallelism would cut a block of {stored.name}, which vLLM refuses")


def _expert_bytes(part: Experts, found: tuple[Found, ...], ranks: Ranks, dtype: str) -> int:
    count, slices = part.count, 1
    if ranks.expert_parallel:
        # The first ranks take one more where experts do not divide evenly.
        count = -(-count // ranks.experts)
    else:
        slices = ranks.experts
        divide(part.intermediate, slices, "the inner size of an expert")
    inner = part.intermediate // slices
    ups = 2 if part.gated else 1
    one = (ups * inner + part.hidden) * DTYPE_BYTES[dtype] if part.bias else 0
    for each in found:
        down = each.first >= ups
        if each.after > ups > each.first:
            raise NotModelledError(f"{part.name} is held in one tensor, which is not modelled")
        full = part.hidden if down else part.intermediate * (each.after - each.first)
        for stored in _counted(each, dtype):
            alone = _of_one_expert(stored, part.count)
            if down:
                one += _part_of_inputs(alone, part.hidden, part.intermediate, slices)
            else:
                one += _part_of_outputs(alone, part.hidden, full // slices, full)
    return (one + (_EXPERT_SHAPE_BYTES if _has_shape(found) else 0)) * count


def _of_one_expert(stored: StoredTensor, count: int) -> StoredTensor:
    if stored.count == count:
        return stored
    if stored.count == 1 and stored.shape and stored.shape[0] == count:
        return StoredTensor(stored.name, stored.dtype, stored.shape[1:], stored.size_bytes // count)
    raise NotModelledError(f"{stored.name} is not of as many experts as config.json says")
