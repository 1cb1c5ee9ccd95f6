"""Why there is no plan of the weights: config.json and a checkpoint that are not of one model, and what vLLM refuses."""

from collections.abc import Sequence

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.layers import NotDivisibleError

_SMALLEST_IN_GB = 10**8
_FEW = 3
_LONGEST_NAME = 100


class AnotherCheckpoint(str):
    """A reason that is a contradiction of config.json and the checkpoint."""

    __slots__ = ()


class RefusedByVllm(str):
    """A reason for which vLLM does not start, so that there are no weights to count."""

    __slots__ = ()


class ContradictionError(NotModelledError):
    """The checkpoint holds what vLLM, by config.json, does not load."""


class NotTakenError(NotModelledError):
    """vLLM does not start with such a checkpoint, whatever its headers say."""


class CutBlockError(NotDivisibleError):
    """Tensor parallelism would cut a block of scales, and vLLM does not start with that."""


def why_unknown(reason: Exception) -> str:
    """What was raised in place of a plan, as the kind of answer that it is."""
    if isinstance(reason, NotTakenError | CutBlockError):
        return RefusedByVllm(reason)
    return AnotherCheckpoint(reason) if isinstance(reason, ContradictionError) else str(reason)


def another_checkpoint(
    what: str, made_bytes: int, stored_bytes: int, differences: str = ""
) -> AnotherCheckpoint:
    """That config.json makes so many bytes of something, and the checkpoint has another number; `differences` say where."""
    made, stored = size_text(made_bytes), size_text(stored_bytes)
    contradiction = f"config.json would make {made} of {what}, and the checkpoint has {stored}"
    return AnotherCheckpoint(f"{contradiction} ({differences})" if differences else contradiction)


def size_text(size_bytes: int) -> str:
    """A size for people: GB, or bytes where it is small."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= _SMALLEST_IN_GB else f"{size_bytes:,} bytes"


def first_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(name[:_LONGEST_NAME] for name in names[:_FEW])
    return f"{shown} and {len(names) - _FEW} more" if len(names) > _FEW else shown
