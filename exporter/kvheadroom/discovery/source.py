"""What a source of servers is, and what it hands over."""

from dataclasses import dataclass
from typing import Protocol

from kvheadroom.capacity.readings import SourceFailure
from kvheadroom.config import ReplicaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One answer of a source.

    Attributes:
        replicas: all servers that there are now; None when nothing could be found out, and those found before stay.
        left_out: a sentence for each that cannot be watched.
        note: a sentence for people about what the source sees, shown as it is.
        failure: why the answer is not whole; its `source` is the name of the source.
    """

    replicas: tuple[ReplicaConfig, ...] | None
    left_out: tuple[str, ...] = ()
    note: str | None = None
    failure: SourceFailure | None = None


class Discovery(Protocol):
    """A source of servers."""

    @property
    def name(self) -> str:
        """Its place in the config, as `file_sd_configs[0]`; no two have the same."""

    @property
    def settings(self) -> object:
        """What it was made of: one with equal settings is kept at a reload, with all that it remembers."""

    @property
    def interval_seconds(self) -> float:
        """The time between two questions."""

    async def find(self, *, anew: bool) -> Found:
        """All servers that there are now. It ends within a deadline of its own.

        Args:
            anew: the config was just loaded, so what is only remembered may be forgotten.
        """
