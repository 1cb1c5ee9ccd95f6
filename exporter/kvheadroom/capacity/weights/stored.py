"""The names of a checkpoint's tensors: which layer and which module each is of, and how many numbers it stands for."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvheadroom.capacity.stored_model import StoredTensor

_EXPERT = re.compile(r"(?<=\bexperts)\.\d+(?=\.)")
_LAYER = re.compile(r"^(?P<before>(?:[A-Za-z_]\w*\.)*?(?:layers|h|blocks|block))\.(?P<number>\d{1,6})\.")
_MTP = re.compile(r"(?:^|\.)mtp(?:\.|_)")

_MAIN = re.compile(r"[._](?:weight_packed|qweight|weight|blocks)$")
_BIAS = re.compile(r"[._]bias$")
# What stands beside a matrix that is held in few bits, by the names that quantizers give it.
_BESIDE = re.compile(
    r"(?:[._](?:weight_scale|weight_scale_inv|weight_scale_2|weight_global_scale|weight_zero_point|weight_shape"
    r"|weight_g_idx|input_scale|input_global_scale|input_zero_point|scales|scale_inv|qzeros|g_idx)"
    r"|\.(?:output_scale|[kqv]_scale|[kqv]_zero_point|prob_scale|kv_scale))$"
)
_SCALE = ".scale"
# Buffers that vLLM makes itself, and masks of old checkpoints.
_BUFFER = re.compile(
    r"(?:^|\.)(?:inv_freq|cos_cached|sin_cached|position_ids|masked_bias|attn\.bias|attention\.bias)$"
)
PACKED_IN_32 = frozenset({"I32", "U32"})
"""Types that several numbers are packed into."""
_PACKED_IN_8 = frozenset({"U8", "I8"})
PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of tensors that are not quantized."""
_ENCODER = re.compile(r"vision|visual|audio|encoder|image|img|vit")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


def together(tensors: Iterable[StoredTensor]) -> tuple[StoredTensor, ...]:
    """The tensors, with the experts of one layer that are alike as one."""
    counts = Counter(
        (_EXPERT.sub(".*", tensor.name), tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in tensors
    )
    return tuple(StoredTensor(*alike, count=count) for alike, count in counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A tensor that is a parameter of its own, with what stands beside it.

    Attributes:
        tail: its name behind that of the layer.
        module: the last part of its module's name.
        bias: it is one.
        beside: scales and the like of the same module.
    """

    tensor: StoredTensor
    tail: str
    module: str
    bias: bool = False
    beside: tuple[StoredTensor, ...] = ()

    @property
    def quantized(self) -> bool:
        """Whether it is held in few bits."""
        return self.tensor.dtype not in PLAIN

    @property
    def elements(self) -> tuple[int, ...]:
        """The numbers that it may stand for: several where the bits of one are not told by the type."""
        stored = math.prod(self.tensor.shape) * self.tensor.count
        if self.tensor.dtype in PACKED_IN_32:
            return stored * 8, stored * 4, stored
        if self.tensor.dtype in _PACKED_IN_8:
            return stored, stored * 2
        return (stored,)

    @property
    def size_bytes(self) -> int:
        """Bytes, with what stands beside it."""
        return sum(each.size_bytes * each.count for each in (self.tensor, *self.beside))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint's tensors by where they belong.

    Attributes:
        layers: of the language model's layers.
        around: of everything else that is no multi-token prediction.
        mtp_bytes, head_bytes: of multi-token prediction, and of output layers.
    """

    layers: tuple[tuple[Matrix, ...], ...]
    around: tuple[Matrix, ...]
    mtp_bytes: int
    head_bytes: int


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to multi-token prediction: behind the layers, or under a name of its own."""
    if _MTP.search(name):
        return True
    found = _LAYER.match(name)
    return found is not None and int(found["number"]) >= layers and _is_text(found["before"])


def is_head(name: str) -> bool:
    """Whether it is the output layer."""
    return name in _HEADS


def _is_text(before: str) -> bool:
    return re.fullmatch(r"(?:(?:model|language_model)\.)*layers", before) is not None


def sorted_out(tensors: Iterable[StoredTensor], layers: int) -> Stored:
    """Where each tensor belongs; `layers` are those of the language model."""
    by_layer: dict[str, dict[int, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    around: list[StoredTensor] = []
    mtp = heads = 0
    for tensor in tensors:
        if is_mtp(tensor.name, layers):
            mtp += tensor.size_bytes * tensor.count
            continue
        if is_head(tensor.name):
            heads += tensor.size_bytes
        found = _LAYER.match(tensor.name)
        if found is None:
            around.append(tensor)
        else:
            by_layer[found["before"]][int(found["number"])].append(tensor)
    main = _language_model(by_layer, layers)
    for before, numbered in by_layer.items():
        if before != main:
            around.extend(tensor for group in numbered.values() for tensor in group)
    of_main = by_layer.get(main, {})
    return Stored(
        layers=tuple(_matrices(of_main.get(number, ()), f"{main}.{number}.") for number in range(layers)),
        around=_matrices(around, ""),
        mtp_bytes=mtp,
        head_bytes=heads,
    )


def _language_model(by_layer: dict[str, dict[int, list[StoredTensor]]], layers: int) -> str:
    """Of the stacks of layers with enough of them, the largest that is no encoder's."""
    whole = {
        before: sum(tensor.size_bytes * tensor.count for group in numbered.values() for tensor in group)
        for before, numbered in by_layer.items()
        if set(range(layers)) <= set(numbered)
    }
    return max(whole, key=lambda before: (not _ENCODER.search(before), whole[before]), default="")


def _matrices(tensors: Iterable[StoredTensor], prefix: str) -> tuple[Matrix, ...]:
    beside: dict[str, list[StoredTensor]] = defaultdict(list)
    mains = []
    named = {tensor.name for tensor in tensors}
    for tensor in tensors:
        if _BUFFER.search(tensor.name):
            continue
        if found := _BESIDE.search(tensor.name):
            beside[tensor.name[: found.start()]].append(tensor)
        elif tensor.name.endswith(_SCALE) and f"{tensor.name[: -len(_SCALE)]}.weight" in named:
            beside[tensor.name[: -len(_SCALE)]].append(tensor)
        else:
            mains.append(tensor)
    return tuple(_matrix(tensor, prefix, beside) for tensor in mains)


def _matrix(tensor: StoredTensor, prefix: str, beside: dict[str, list[StoredTensor]]) -> Matrix:
    tail = tensor.name[len(prefix) :]
    found = _MAIN.search(tail) or _BIAS.search(tail)
    module = tail if found is None else tail[: found.start()]
    bias = _BIAS.search(tail) is not None
    return Matrix(
        tensor=tensor,
        tail=tail,
        module=module.rpartition(".")[2],
        bias=bias,
        beside=() if bias else tuple(beside.get(prefix + module, ())),
    )
