"""What the overhead of a GPU is made of, as `overhead` estimates it and as facts, budget and ledger carry it."""

from dataclasses import dataclass
from enum import StrEnum


class OverheadPart(StrEnum):
    """What the overhead of a GPU is made of. A closed list."""

    CONTEXT = "context"
    ACTIVATIONS = "activations"
    WORKSPACES = "workspaces"
    ENCODER = "encoder"
    CUDA_GRAPHS = "cuda_graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadEstimate:
    """Bytes of one GPU.

    Attributes:
        parts: in a fixed order; those that are 0 as well.
        low_bytes, high_bytes: where eight of ten public starts lie.
    """

    parts: tuple[tuple[OverheadPart, int], ...]
    low_bytes: int
    high_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(size for _, size in self.parts)

    def of(self, part: OverheadPart) -> int:
        """One part."""
        return dict(self.parts)[part]
