"""What the command line of a running server says of its cache: its words, the file of `--config`, its environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FITTED_LENGTH = "it is auto, so vLLM takes the longest that fits"
"""Why max_model_len is not clear where it is fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """All of it may be shown: nothing here is a secret, whatever the command line holds.

    Attributes:
        flags: by vLLM's names, values as in `OperatorFacts.flags`.
        unclear: flags that are said to what is not known, each with why.
        unmodelled: names of flags that are set, change the cache, and are not modelled.
        unweighed: names of flags that are set and change what the weights take of a GPU's memory.
        config_fault: why the file of `--config` could not be read, to be put after its name; empty where it could.
        doubts: why more flags may be set than these, each one sentence; empty: all of it was read.
        cpu_pool_bytes: of the pool, if this is vLLM's CPU backend (VLLM_CPU_KVCACHE_SPACE); it wins over the flag.
        on_cpu: it says that this is vLLM's CPU backend.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    unclear: Mapping[str, str] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()
    unweighed: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    config_fault: str = ""
    cpu_pool_bytes: int | None = None
    on_cpu: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a flag that is not here is surely at vLLM's default."""
        return not self.doubts and not self.config_fault
