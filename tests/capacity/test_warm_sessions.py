"""What is said of warm sessions as a whole: capacities, answers, what was spared, and what keeps a tier from paying."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.history import COUNTERS, moment_of
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.readings import EngineSnapshot, ToldTier
from kvheadroom.capacity.warm_findings import WarmFinding
from kvheadroom.capacity.warm_sessions import Warmth
from kvheadroom.capacity.warmth import Answer, Tier
from tests.capacity.facts_builder import facts

GIB = 2**30
SAID: dict[str, Any] = {
    "engine": "0",
    "num_blocks": 1001,
    "block_size": 16,
    "attention_block_size": 16,
    "kv_usage_ratio": 0.2,
    "prompt_tokens_total": 100_000.0,
    "prompt_tokens_local_cache_hit_total": 20_000.0,
    "prompt_tokens_external_kv_transfer_total": 5_000.0,
    "generation_tokens_total": 10_000.0,
    "prefix_cache_queries_total": 100_000.0,
}


def warmth(
    known: EngineFacts | None = None,
    *,
    lately: dict[str, Any] | None = None,
    window: str = "1m",
    seconds: float = 60.0,
    idle_seconds: tuple[float, ...] = (),
    **said: Any,
) -> Warmth:
    """Of an engine whose counters had the values of `lately` when the window began."""
    now = EngineSnapshot(**{**SAID, **said})
    past = {} if lately is None else {window: moment_of(replace(now, **lately), 10_000.0 - seconds)}
    reading = Reading(facts=known or facts(), snapshot=now, taken_at=10_000.0, past=past)
    return assess(reading, (1024,), idle_seconds=idle_seconds).warmth


def offloading(size_gib: float = 1.0, **rest: Any) -> EngineFacts:
    return facts(flags={"kv_offloading_size": size_gib}, **rest)


# 1,600 new tokens a minute are 100 blocks, with as much found again 200; 800 are free.
BUSY = {"prompt_tokens_total": 96_800.0, "prompt_tokens_local_cache_hit_total": 18_400.0}


def found(of: Warmth) -> list[WarmFinding]:
    return [finding for finding, _ in of.findings]


def test_both_tiers_are_told_in_bytes_tokens_and_sessions() -> None:
    hbm, host = warmth(offloading()).capacities
    assert (hbm.tier, hbm.bytes, hbm.tokens, hbm.is_told) == (Tier.HBM, 1001 * 16_384, 1001 * 16, True)
    assert dict(hbm.sessions) == {1024: 1001 / 64, 2048: 1001 / 128}
    # 65,536 chunks of 16 tokens.
    assert (host.tier, host.bytes, host.tokens, host.is_told) == (Tier.HOST, GIB, 1_048_576, False)
    assert dict(host.sessions) == {1024: 1024.0, 2048: 512.0}


def test_what_vllm_tells_of_its_tier_comes_before_the_plan() -> None:
    told = ToldTier(num_chunks=640, blocks_per_chunk=1, size_bytes=640 * 20_480, size_tokens=10_240)
    _, host = warmth(offloading(), told_tier=told).capacities
    assert (host.bytes, host.tokens, host.is_told) == (640 * 20_480, 10_240, True)
    assert dict(host.sessions) == {1024: 10.0, 2048: 5.0}
    # Without the model's layout nobody knows the chunks of a session.
    [alone] = [one for one in warmth(facts(), told_tier=told).capacities if one.tier is Tier.HOST]
    assert (alone.tokens, alone.sessions) == (10_240, ())


def test_without_a_tier_there_is_hbm_alone() -> None:
    of = warmth()
    assert [one.tier for one in of.capacities] == [Tier.HBM]
    assert of.host is None
    assert [one.tier for one in of.saved] == [Tier.HBM]


def test_a_tier_that_is_not_modelled_says_why() -> None:
    known = facts(flags={"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}})
    assert warmth(known).host == "the tier of 'LMCacheConnectorV1' is not modelled"


def test_after_lunch_a_session_is_out_of_hbm_and_in_host_memory() -> None:
    of = warmth(
        offloading(),
        lately={**BUSY, "offload_store_bytes_total": 5 * GIB - GIB // 100},
        offload_store_bytes_total=float(5 * GIB),
        idle_seconds=(60.0, 2700.0, 36_000.0),
    )
    answers = {(one.tier, one.idle_seconds): one.answer for one in of.answers if one.session_tokens == 1024}
    # HBM between 800 / 200 and 800 / 100 minutes; host memory up to 100 minutes, at least 1,048,576 / 3,200 minutes.
    assert answers == {
        (Tier.HBM, 60.0): Answer.YES,
        (Tier.HBM, 2700.0): Answer.NO,
        (Tier.HBM, 36_000.0): Answer.NO,
        (Tier.HOST, 60.0): Answer.YES,
        (Tier.HOST, 2700.0): Answer.YES,
        (Tier.HOST, 36_000.0): Answer.NO,
    }


def test_the_longest_window_answers() -> None:
    now, before = EngineSnapshot(**SAID), EngineSnapshot(**{**SAID, **BUSY})
    # A busy minute after a quiet hour: 4 to 8 minutes by the one, 4 to 8 hours by the other.
    past = {
        "1m": moment_of(before, 10_000.0 - 60.0),
        "1h": moment_of(before, 10_000.0 - 3600.0),
    }
    reading = Reading(facts=facts(), snapshot=now, taken_at=10_000.0, past=past)
    answers = assess(reading, (1024,), idle_seconds=(3600.0,)).warmth.answers
    assert {one.answer for one in answers} == {Answer.YES}


def test_a_session_that_is_longer_than_a_tier_is_never_in_it() -> None:
    # 64 chunks: 1,024 tokens, and not 2,048.
    of = warmth(
        offloading(64 * 16_384 / GIB),
        lately={**BUSY, "offload_store_bytes_total": 0.0},
        offload_store_bytes_total=100.0,
        idle_seconds=(1.0,),
    )
    answers = {one.session_tokens: one.answer for one in of.answers if one.tier is Tier.HOST}
    assert answers == {1024: Answer.YES, 2048: Answer.NO}


def test_what_was_spared_is_its_tokens_by_the_speed_since_the_start() -> None:
    of = warmth(offloading(), prefill_computed_tokens_total=75_000.0, prefill_seconds_total=150.0)
    spared = {one.tier: (one.tokens, one.prefill_seconds) for one in of.saved}
    assert spared == {Tier.HBM: (20_000.0, 40.0), Tier.HOST: (5_000.0, 10.0)}
    assert warmth(offloading()).saved[0].prefill_seconds is None


def test_a_rate_is_of_the_longest_window_in_which_it_was_measured() -> None:
    of = warmth(
        offloading(),
        lately={"prefill_computed_tokens_total": 0.0, "prefill_seconds_total": 0.0},
        prefill_computed_tokens_total=4_000.0,
        prefill_seconds_total=2.0,
    )
    [cost] = [one for one in of.costs if one.session_tokens == 1024]
    assert (cost.recompute_seconds, cost.reload_seconds) == (1024 / 2000, None)


@pytest.mark.parametrize(
    ("window", "lately", "said", "finding"),
    [
        ("1m", {"offload_allocation_failures_total": 1.0}, {"offload_allocation_failures_total": 3.0}, WarmFinding.TIER_TOO_SMALL),
        ("1h", {"offload_store_bytes_total": 0.0, "offload_load_bytes_total": 7.0},
         {"offload_store_bytes_total": 1e9, "offload_load_bytes_total": 7.0}, WarmFinding.TIER_NOT_PAYING),
        ("1h", {"offload_store_bytes_total": 0.0}, {"offload_store_bytes_total": 1e9}, WarmFinding.TIER_NOT_PAYING),
        ("1h", {"offload_store_bytes_total": 5.0, "prompt_tokens_total": 0.0}, {"offload_store_bytes_total": 5.0}, WarmFinding.NOTHING_STORED),
    ],
)  # fmt: skip
def test_what_keeps_a_tier_from_paying_is_found(
    window: str, lately: dict[str, Any], said: dict[str, Any], finding: WarmFinding
) -> None:
    assert found(warmth(offloading(), lately=lately, window=window, seconds=3600.0, **said)) == [finding]
    # Of an engine without a tier nothing is said.
    assert found(warmth(facts(), lately=lately, window=window, seconds=3600.0, **said)) == []


@pytest.mark.parametrize(
    ("window", "lately", "said"),
    [
        ("1m", {"offload_allocation_failures_total": 3.0}, {"offload_allocation_failures_total": 3.0}),
        # A load came, though the counter was not there when the hour began.
        ("1h", {"offload_store_bytes_total": 0.0, "offload_load_bytes_total": None},
         {"offload_store_bytes_total": 1e9, "offload_load_bytes_total": 7.0}),
        # Less than an hour.
        ("5m", {"offload_store_bytes_total": 0.0}, {"offload_store_bytes_total": 1e9}),
        # Too few tokens for many chunks.
        ("1h", {"offload_store_bytes_total": 5.0, "prompt_tokens_total": 99_000.0}, {"offload_store_bytes_total": 5.0}),
    ],
)  # fmt: skip
def test_what_is_as_it_should_be_is_not_found(
    window: str, lately: dict[str, Any], said: dict[str, Any]
) -> None:
    assert found(warmth(offloading(), lately=lately, window=window, seconds=3600.0, **said)) == []


def test_a_tier_without_a_chunk_is_found_at_once() -> None:
    of = warmth(offloading(1e-6))
    assert found(of) == [WarmFinding.TIER_TOO_SMALL]
    assert [one.sessions for one in of.capacities if one.tier is Tier.HOST] == [((1024, 0.0), (2048, 0.0))]


def test_where_nobody_says_whether_prefixes_are_cached_a_look_up_tells() -> None:
    assert warmth(lately=BUSY).retentions != ()
    assert warmth(lately=BUSY, prefix_cache_queries_total=0.0).retentions == ()
    off = facts(flags={"enable_prefix_caching": False})
    assert warmth(off, lately=BUSY).retentions == ()


def test_a_time_to_answer_for_that_is_said_twice_is_answered_once() -> None:
    of = warmth(lately=BUSY, idle_seconds=(300.0, 60.0, 300.0))
    assert [one.idle_seconds for one in of.answers if one.session_tokens == 1024] == [60.0, 300.0]


def test_where_nobody_tells_of_prefix_caching_nothing_is_said_to_be_lost() -> None:
    of = warmth(lately=BUSY, prefix_cache_queries_total=None)
    assert of.retentions == ()
    assert of.content is not None
    assert (of.content.referenced_blocks, of.content.cached_blocks, of.content.blank_blocks) == (
        200,
        None,
        None,
    )


def test_an_engine_that_sleeps_keeps_nothing() -> None:
    before = {**BUSY, "offload_store_bytes_total": float(4 * GIB)}
    awake = warmth(offloading(), lately=before, offload_store_bytes_total=float(5 * GIB))
    assert {one.tier for one in awake.retentions} == set(Tier)
    of = warmth(
        offloading(),
        lately=before,
        offload_store_bytes_total=float(5 * GIB),
        sleeping=True,
        idle_seconds=(1.0,),
    )
    assert (of.retentions, of.answers) == ((), ())


SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [
            {"kv_connector": "NixlConnector"},
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": GIB}},
        ]
    },
}
TIERED = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": GIB, "spec_name": "TieringOffloadingSpec"},
}


@pytest.mark.parametrize("connector", [SEVERAL, TIERED])
def test_what_other_tiers_may_have_supplied_is_not_put_down_to_host_memory(connector: dict[str, Any]) -> None:
    of = warmth(facts(flags={"kv_transfer_config": connector}))
    assert [one.tier for one in of.capacities] == [Tier.HBM, Tier.HOST]
    assert [one.tier for one in of.saved] == [Tier.HBM]


def test_where_the_engine_tells_of_other_chunks_than_its_flags_no_session_is_counted_in_them() -> None:
    told = ToldTier(num_chunks=160, blocks_per_chunk=4, size_bytes=160 * 65_536, size_tokens=10_240)
    of = warmth(offloading(), told_tier=told, lately=BUSY, idle_seconds=(60.0,))
    [host] = [one for one in of.capacities if one.tier is Tier.HOST]
    assert (host.bytes, host.tokens, host.sessions) == (160 * 65_536, 10_240, ())
    assert isinstance(of.host, str)
    assert of.host.startswith("its chunks have 4 blocks, and by the flags that are known 1")
    known = facts(
        flags={
            "kv_offloading_size": 1.0,
            "kv_transfer_config": {"kv_connector_extra_config": {"blocks_per_chunk": 4}},
        }
    )
    [host] = [one for one in warmth(known, told_tier=told).capacities if one.tier is Tier.HOST]
    assert dict(host.sessions) == {1024: 10.0, 2048: 5.0}


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-9])
def test_what_is_next_to_nothing_is_divided_by_nowhere(tiny: float) -> None:
    names = [name for name in COUNTERS if name not in ("prompt_tokens_total", "generation_tokens_total")]
    for name in names:
        counters: dict[str, Any] = {**dict.fromkeys(COUNTERS, 2.0**53), name: tiny}
        of = warmth(
            offloading(),
            lately=dict.fromkeys(COUNTERS, 0.0),
            idle_seconds=(60.0,),
            **counters,
        )
        shown = [one.prefill_seconds for one in of.saved]
        shown += [
            rate for one in of.rates for rate in (one.prefill_tokens_per_second, one.load_bytes_per_second)
        ]
        shown += [cost for one in of.costs for cost in (one.recompute_seconds, one.reload_seconds)]
        shown += [end for one in of.retentions for end in (one.low_seconds, one.high_seconds)]
        shown += [value for _, value in of.measured_idle_seconds]
        assert all(math.isfinite(value) for value in shown if value is not None), name


def test_a_tier_in_which_stores_found_no_room_says_what_the_longest_prompt_takes() -> None:
    failed = {"offload_allocation_failures_total": 0.0}
    # 2,048 tokens are 128 chunks of 16 KiB: 2 MiB.
    small = warmth(offloading(2**-10), lately=failed, offload_allocation_failures_total=3.0)
    [(finding, why)] = small.findings
    assert finding is WarmFinding.TIER_TOO_SMALL
    assert why.endswith("make it larger, at least 2.00 MiB, which is what one prompt of 2,048 tokens takes")
    large = warmth(offloading(1), lately=failed, offload_allocation_failures_total=3.0)
    [(_, why)] = large.findings
    assert "room for 512.0 prompts of 2,048 tokens, 2.00 MiB each, and needs as much for each" in why
    none = warmth(offloading(2**-17))
    [(_, why)] = none.findings
    assert why == (
        "not one chunk (0.02 MiB) fits in the tier in host memory; make it larger, at least 2.00 MiB, which is what one prompt of "
        "2,048 tokens takes"
    )


def test_without_the_longest_length_no_size_is_suggested() -> None:
    failed = {"offload_allocation_failures_total": 0.0}
    told = ToldTier(num_chunks=640, blocks_per_chunk=1, size_bytes=640 * 20_480, size_tokens=10_240)
    alone = warmth(facts(), lately=failed, offload_allocation_failures_total=3.0, told_tier=told)
    [(_, why)] = alone.findings
    assert why.endswith("that no transfer holds; make it larger")


def test_what_the_host_has_is_joined_to_the_tier_of_its_engine() -> None:
    now = EngineSnapshot(**SAID)
    use = HostUse(shm_total_bytes=GIB, engines=2, processes_shared_bytes=7)
    reading = Reading(facts=offloading(1), snapshot=now, taken_at=10_000.0, host_use=use)
    of = assess(reading, (1024,)).warmth
    assert of.host_need is not None
    assert (of.host_need.bytes, of.host_use) == (GIB, use)
    # Two engines of the host have a tier each.
    assert found(of) == [WarmFinding.TIER_ABOVE_SHM]
    without = assess(replace(reading, facts=facts()), (1024,)).warmth
    assert (without.host_need, without.host_use, without.findings) == (None, None, ())
