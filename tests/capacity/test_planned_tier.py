"""A tier in host memory in a plan: what it holds and takes, and that it starts nothing which does not start without it."""

from typing import Any

import pytest

from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, PlanRequest, plan_deployment
from kvheadroom.capacity.facts import OperatorFacts
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.planned_tier import DOES_NOT_HELP, PlannedTier, planned_tier, why_no_help
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.capacity.warm_findings import WarmFinding
from tests.capacity.facts_builder import TINY_LLAMA

GIB, MIB = 2**30, 2**20


def start(version: str = "0.33.0", **flags: Any) -> DeploymentPlan:
    return plan_deployment(
        PlanRequest(
            model_files=ModelFiles(folder="", config=TINY_LLAMA),
            operator=OperatorFacts(flags={"max_model_len": 2048, **flags}, gpu="H200", weights_bytes=MIB),
            version=version,
            session_tokens=(1024,),
        )
    )


@pytest.mark.parametrize("size", [0.001, 1, 1000])
def test_no_tier_makes_one_request_fit_that_does_not_fit_in_the_gpus_pool(size: float) -> None:
    # 2,048 tokens take 2 MiB; with the null block one block too few is there.
    without, beside = (
        start(kv_cache_memory_bytes=2 * MIB),
        start(kv_cache_memory_bytes=2 * MIB, kv_offloading_size=size),
    )
    assert without.outcome is beside.outcome is Outcome.TOO_LONG
    assert beside.pool == without.pool
    assert beside.pool is not None
    assert beside.pool.longest_bootable == 2048 - 16
    assert why_no_help(beside) == DOES_NOT_HELP
    assert why_no_help(without) == ""


def test_nor_does_it_make_room_for_a_pool_beside_the_weights() -> None:
    beside = start(gpu_memory_utilization=0.0001, kv_offloading_size=100)
    assert (beside.outcome, why_no_help(beside)) == (Outcome.NO_ROOM, DOES_NOT_HELP)


def test_where_it_starts_nothing_is_said_of_help() -> None:
    assert start(kv_offloading_size=1).outcome is Outcome.STARTS
    assert why_no_help(start(kv_offloading_size=1)) == ""


def test_a_tier_that_is_not_modelled_does_not_help_either() -> None:
    beside = start(kv_cache_memory_bytes=2 * MIB, kv_offloading_size=1, kv_offloading_backend="lmcache")
    assert "LMCache" in str(planned_tier(beside))
    assert why_no_help(beside) == DOES_NOT_HELP


def test_a_planned_tier_has_its_sessions_and_what_it_takes() -> None:
    tier = planned_tier(start(kv_offloading_size=1))
    assert isinstance(tier, PlannedTier)
    # 16 KiB a block of 16 tokens.
    assert (tier.tier.num_chunks, tier.sessions, tier.need.bytes) == (65_536, ((1024, 1024.0),), GIB)
    assert tier.findings == ()
    assert planned_tier(start()) is None


def test_the_engines_of_a_replica_share_the_machine_that_it_is_planned_on() -> None:
    host = HostUse(total_bytes=8 * GIB, shm_total_bytes=4 * GIB, shm_free_bytes=3 * GIB // 2)
    alone = planned_tier(start(kv_offloading_size=1), host)
    assert isinstance(alone, PlannedTier)
    assert alone.findings == ()
    two = planned_tier(start(kv_offloading_size=1, data_parallel_size=2), host)
    assert isinstance(two, PlannedTier)
    [(finding, why)] = two.findings
    assert finding is WarmFinding.TIER_ABOVE_SHM
    assert "if it is to run on this machine: the tiers of 2 engines take 2.00 GiB" in why
    assert "which has 1.50 GiB free" in why
