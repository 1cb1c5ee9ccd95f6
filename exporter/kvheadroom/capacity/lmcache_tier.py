"""LMCache's tier in host memory: what flags say of its size. No metric of it tells that.

Sources: lmcache 0.5.7 `v1/config.py` and `v1/storage_backend/local_cpu_backend.py` (`max_local_cpu_size`: GiB of each worker);
vLLM 0.22.1 `config/vllm.py`, which divides `--kv-offloading-size` by the workers, and 0.23.0, where LMCache is a server of its own that the size does not
reach.
"""

from collections.abc import Mapping
from typing import Any

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.offload_tier import SEVERAL

CONNECTOR = "LMCacheConnectorV1"
_MOST_GIB = 2**30


def lmcache_bytes(facts: EngineFacts) -> int | None:
    """Of one engine, all its workers together; None where no flag tells it: a file or a variable of LMCache may."""
    offload, sizes = facts.offload, facts.parallelism
    if offload.size_gib is not None:
        is_own = offload.backend == "lmcache" and facts.rules.offload.sizes_lmcache
        # vLLM divides by the workers of a prefill alone, and each of the others takes as much.
        return int(offload.size_gib * GIB) * sizes.prefill_context if is_own else None
    extra = _extra(offload.connector or {})
    if extra is None or extra.get("lmcache.local_cpu") is False:
        return None
    each = extra.get("lmcache.max_local_cpu_size")
    if isinstance(each, bool) or not isinstance(each, int | float) or not 0 < each <= _MOST_GIB:
        return None
    return int(each * GIB) * sizes.tensor * sizes.pipeline * sizes.prefill_context


def _extra(connector: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the connector is told, also as one of several."""
    extra = connector.get("kv_connector_extra_config")
    told: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
    if connector.get("kv_connector") == CONNECTOR:
        return told
    children = told.get("connectors") if connector.get("kv_connector") == SEVERAL else None
    for child in children if isinstance(children, list | tuple) else ():
        if isinstance(child, Mapping) and child.get("kv_connector") == CONNECTOR:
            own = child.get("kv_connector_extra_config")
            return own if isinstance(own, Mapping) else {}
    return None
