"""A model's files, as far as they tell of its cache and its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, or `count` alike ones of as many experts.

    Attributes:
        name: with `*` for the number of the expert where they are several.
        dtype: the word of the safetensors format, such as BF16.
        shape: of one.
        size_bytes: of one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInventory:
    """The tensors of a checkpoint.

    Attributes:
        sizes: bytes of each by its name; None where an index told no more than the name.
        stored: with their types and shapes, experts together; empty where no header told them.
        problem: what is wrong with the files, or empty; then nothing else is known.
    """

    sizes: Mapping[str, int | None] = field(default_factory=dict)
    stored: tuple[StoredTensor, ...] = ()
    problem: str = ""

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all of them, None where they are not known."""
        sizes = [size for size in self.sizes.values() if size is not None]
        return sum(sizes) if sizes and len(sizes) == len(self.sizes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The model's files, read.

    Attributes:
        folder: where they lie.
        config: config.json, parsed.
        weights_bytes: of all tensors, by the files' headers or the index; None where they are not known.
        weights_unknown: why not, one sentence; empty where they are, or where nobody looked.
        weights_faulty: that is a fault of files that are there, and not that there are none.
        weights_doubts: what does not fit together among the weights' files, each one sentence.
        tensors: None without safetensors files and without an index.
        shards: the file of each tensor, of a model on a hub whose index alone was fetched.
        assumed_because: why these may be the wrong files, or empty.
    """

    folder: str
    config: Mapping[str, Any]
    weights_bytes: int | None = None
    weights_unknown: str = ""
    weights_faulty: bool = False
    weights_doubts: tuple[str, ...] = ()
    tensors: TensorInventory | None = None
    shards: Mapping[str, str] = field(default_factory=dict)
    assumed_because: str = ""
