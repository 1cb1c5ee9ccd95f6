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


@dataclass(frozen=True, slots=True)
class OffloadRules:
    """How bytes become chunks, and what is kept of a request.

    Attributes:
        since: the first release that does so.
        takes_bytes: the tier's size is given in bytes; before, in blocks of each worker, and `--kv-offloading-size` did not work.
        page_bytes: chunks are rounded up to a multiple of it.
        one_copy: where MLA under tensor parallelism is stored once.
        prefix_groups_only: groups that take no part in prefix caching are not stored.
        prompts_only: blocks of answers are stored only once they are part of a prompt.
        rounds_allocations: each tensor of a worker is pinned on its own, and its size rounded up to a power of two.
        in_shared_memory: the tier is one file of `/dev/shm`.
        tells_capacity: `kv_offload_config_info` is on the page.
        keeps_hybrid_manager: layers of several kinds keep their groups beside vLLM's own connector; before, the hybrid KV cache manager was
            switched off.
        lookups_after_local: a connector is asked for what the engine's own cache had not; before, for whole prompts.
    """

    since: tuple[int, int, int]
    takes_bytes: bool = False
    page_bytes: int = 1
    one_copy: OneCopy = OneCopy.NEVER
    prefix_groups_only: bool = False
    prompts_only: bool = False
    rounds_allocations: bool = True
    in_shared_memory: bool = False
    tells_capacity: bool = False
    lookups_after_local: bool = False
    keeps_hybrid_manager: bool = False


_BY_BLOCKS = OffloadRules((0, 11, 0))
_BY_BYTES = replace(_BY_BLOCKS, since=(0, 14, 0), takes_bytes=True)
_AFTER_LOCAL = replace(_BY_BYTES, since=(0, 16, 0), lookups_after_local=True)
_HYBRIDS = replace(_AFTER_LOCAL, since=(0, 22, 0), keeps_hybrid_manager=True)
_PROMPTS = replace(_HYBRIDS, since=(0, 23, 0), prompts_only=True)
_SHARED = replace(
    _PROMPTS,
    since=(0, 27, 0),
    page_bytes=4096,
    one_copy=OneCopy.LATENT,
    rounds_allocations=False,
    in_shared_memory=True,
)
_PREFIXES = replace(_SHARED, since=(0, 31, 0), one_copy=OneCopy.REPLICATED, prefix_groups_only=True)
_TOLD = replace(_PREFIXES, since=(0, 33, 0), tells_capacity=True)

RELEASES = (_BY_BLOCKS, _BY_BYTES, _AFTER_LOCAL, _HYBRIDS, _PROMPTS, _SHARED, _PREFIXES, _TOLD)
"""From old to new."""


def offload_rules(release: tuple[int, int, int]) -> OffloadRules:
    """The rules of a release; of one older than all that were read, those of the oldest."""
    return next((rules for rules in reversed(RELEASES) if rules.since <= release), RELEASES[0])
