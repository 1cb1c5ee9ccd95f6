"""What flags say of the size of LMCache's tier, and what is made of its own counters."""

from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.history import moment_of
from kvheadroom.capacity.lmcache_tier import lmcache_bytes
from kvheadroom.capacity.prefix_cache import LMCACHE
from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.capacity.warmth import Tier
from tests.capacity.facts_builder import facts

GIB = 2**30


def connector(extra: Any, **flags: Any) -> dict[str, Any]:
    own = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": own, **flags}


SIZED = {"lmcache.max_local_cpu_size": 2.5}


@pytest.mark.parametrize(
    ("flags", "version", "size"),
    [
        (connector(SIZED), "0.33.0", 5 * GIB // 2),
        (connector({"lmcache.max_local_cpu_size": 3}, tensor_parallel_size=2), "0.33.0", 6 * GIB),
        (connector({**SIZED, "lmcache.local_cpu": True}), "0.20.0", 5 * GIB // 2),
        (connector({**SIZED, "lmcache.local_cpu": False}), "0.33.0", None),
        # Its own default of 5 GiB is no flag: a file or a variable may say otherwise.
        (connector({}), "0.33.0", None),
        (connector(None), "0.33.0", None),
        *((connector({"lmcache.max_local_cpu_size": bad}), "0.33.0", None) for bad in (0, -1, "3", True, float("nan"), float("inf"), 1e300, None)),
        ({"kv_transfer_config": {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": SIZED}}, "0.33.0", None),
        ({"kv_offloading_size": 6, "kv_offloading_backend": "lmcache", "tensor_parallel_size": 2}, "0.22.1", 6 * GIB),
        # From 0.23 on LMCache is a server of its own, which the size does not reach.
        ({"kv_offloading_size": 6, "kv_offloading_backend": "lmcache"}, "0.23.0", None),
        ({"kv_offloading_size": 6}, "0.22.1", None),
        ({}, "0.33.0", None),
    ],
)  # fmt: skip
def test_the_size_is_told_where_a_flag_of_vllm_tells_it(
    flags: dict[str, Any], version: str, size: int | None
) -> None:
    assert lmcache_bytes(facts(flags=flags, version=version)) == size


def test_one_of_several_connectors_is_found() -> None:
    own = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": SIZED}
    for children, size in (
        ([{"kv_connector": "NixlConnector"}, own], 5 * GIB // 2),
        ([None, {"kv_connector": "NixlConnector"}], None),
        ("x", None),
    ):
        several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
        assert lmcache_bytes(facts(flags={"kv_transfer_config": several})) == size


NOW = EngineSnapshot(
    engine="0",
    num_blocks=1001,
    block_size=16,
    kv_usage_ratio=0.2,
    prefix_cache_queries_total=500.0,
    prefix_cache_hits_total=100.0,
    external_prefix_cache_queries_total=400.0,
    external_prefix_cache_hits_total=40.0,
    lmcache_lookup_tokens_total=2000.0,
    lmcache_lookup_hits_total=900.0,
    lmcache_host_bytes=4.5e9,
)


def seen(**before: float | None) -> Assessment:
    past = {"1m": moment_of(replace(NOW, **before), 940.0)}  # type: ignore[arg-type]
    return assess(Reading(facts=facts(flags=connector(SIZED)), snapshot=NOW, taken_at=1000.0, past=past), ())


def test_its_hit_rate_is_that_of_its_look_ups_and_stands_beside_those_of_vllm() -> None:
    told = seen(
        lmcache_lookup_tokens_total=1000.0,
        lmcache_lookup_hits_total=200.0,
        external_prefix_cache_queries_total=200.0,
    )
    [window] = told.hit_windows
    assert window.lmcache is not None
    assert (window.lmcache.ratio, window.lmcache.basis) == (0.7, LMCACHE)
    assert window.external is not None
    assert window.external.ratio == 0.0


@pytest.mark.parametrize(
    "before",
    [
        {"lmcache_lookup_tokens_total": None, "lmcache_lookup_hits_total": None},
        {"lmcache_lookup_tokens_total": 2000.0, "lmcache_lookup_hits_total": 200.0},
        {"lmcache_lookup_tokens_total": 1000.0, "lmcache_lookup_hits_total": 901.0},
        # More found than asked for.
        {"lmcache_lookup_tokens_total": 1900.0, "lmcache_lookup_hits_total": 200.0},
    ],
)
def test_where_nothing_was_asked_for_or_counters_fell_there_is_no_hit_rate(
    before: dict[str, float | None],
) -> None:
    told = seen(**before, prefix_cache_queries_total=400.0)
    [window] = told.hit_windows
    assert window.lmcache is None


def test_the_planned_size_is_a_tier_in_host_memory_without_tokens() -> None:
    capacities = {one.tier: one for one in seen().warmth.capacities}
    host = capacities[Tier.HOST]
    assert (host.bytes, host.tokens, host.sessions, host.is_told) == (5 * GIB // 2, None, (), False)
    # Nothing of LMCache is taken for vLLM's own tier.
    assert seen().warmth.host_need is None
    assert [one.tier for one in seen().warmth.saved] == [Tier.HBM]
