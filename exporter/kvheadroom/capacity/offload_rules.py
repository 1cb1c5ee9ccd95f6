"""What a release of vLLM makes of a KV cache tier in host memory, as data.

Read in the source of 0.11.0 to 0.33.0: `config/vllm.py`, `v1/kv_offload/cpu/spec.py`,
`distributed/kv_transfer/kv_connector/v1/offloading/config.py` (before 0.19 `offloading_connector.py`).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

OFFLOADING_CONNECTOR = "OffloadingConnector"


class OneCopy(StrEnum):
    """When a tensor-parallel engine keeps one copy of what all its ranks hold alike."""

    NEVER = "never"
    LATENT = "one group of latent attention"
    REPLICATED = "all layers alike on every rank"


class Hybrids(StrEnum):
    """When the hybrid KV cache manager stays on beside vLLM's own connector."""

    NEVER = "never"
    BY_SIZE = (
        "where --kv-offloading-size alone asks for it, which vLLM looks at too late to switch the manager off"
    )
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class OffloadRules:
    """How bytes become chunks, and what is kept of a request.

    Attributes:
        since: the first release that does so.
        takes_bytes: the tier's size is given in bytes; before, in blocks of each worker, and `--kv-offloading-size` did not work.
        page_bytes: chunks are rounded up to a multiple of it.
        one_copy: where MLA under tensor parallelism is stored once.
        prefix_groups_only: groups that take no part in prefix caching are not stored.
        prompts_only: blocks of answers are stored only once they are part of a prompt, unless `offload_prompt_only` is false.
        rounds_allocations: each tensor of a worker is pinned on its own, and its size rounded up to a power of two.
        in_shared_memory: the tier is one file of `/dev/shm`.
        sizes_lmcache: with `--kv-offloading-backend lmcache` the size is that of LMCache in the server's own processes; later LMCache is a server
            of its own, which the size does not reach.
        keeps_hybrid_manager: layers of several kinds keep their groups beside vLLM's own connector.
    """

    since: tuple[int, int, int]
    takes_bytes: bool = False
    page_bytes: int = 1
    one_copy: OneCopy = OneCopy.NEVER
    prefix_groups_only: bool = False
    prompts_only: bool = False
    rounds_allocations: bool = True
    in_shared_memory: bool = False
    sizes_lmcache: bool = True
    keeps_hybrid_manager: Hybrids = Hybrids.NEVER


_BY_BLOCKS = OffloadRules((0, 11, 0))
_BY_BYTES = replace(_BY_BLOCKS, since=(0, 14, 0), takes_bytes=True)
_OF_THE_SIZE = replace(_BY_BYTES, since=(0, 21, 0), keeps_hybrid_manager=Hybrids.BY_SIZE)
_HYBRIDS = replace(_OF_THE_SIZE, since=(0, 22, 0), keeps_hybrid_manager=Hybrids.ALWAYS)
_PROMPTS = replace(_HYBRIDS, since=(0, 23, 0), prompts_only=True, sizes_lmcache=False)
_SHARED = replace(
    _PROMPTS,
    since=(0, 27, 0),
    page_bytes=4096,
    one_copy=OneCopy.LATENT,
    rounds_allocations=False,
    in_shared_memory=True,
)
_PREFIXES = replace(_SHARED, since=(0, 31, 0), one_copy=OneCopy.REPLICATED, prefix_groups_only=True)

RELEASES = (_BY_BLOCKS, _BY_BYTES, _OF_THE_SIZE, _HYBRIDS, _PROMPTS, _SHARED, _PREFIXES)
"""From old to new."""


def offload_rules(release: tuple[int, int, int]) -> OffloadRules:
    """The rules of a release; of one older than all that were read, those of the oldest."""
    return next((rules for rules in reversed(RELEASES) if rules.since <= release), RELEASES[0])
