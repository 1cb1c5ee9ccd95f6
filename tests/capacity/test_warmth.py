"""How long idle content stays in each tier, and what its return costs, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.history import Growth, growth, growth_since_start, moment_of
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.kv_specs import Kind
from kvheadroom.capacity.observation import observe
from kvheadroom.capacity.offload_tier import OffloadTier, plan_tier
from kvheadroom.capacity.prediction import predict
from kvheadroom.capacity.readings import EngineSnapshot, ToldTier
from kvheadroom.capacity.warmth import (
    Answer,
    Rates,
    Retention,
    Tier,
    Tiers,
    hbm_content,
    measured_idle_seconds,
    rates,
    resume_costs,
    retentions,
)
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import BY_ID, layout_of

# TINY_LLAMA: 1,024 B per token, blocks of 16 tokens, 16 KiB.
BLOCK_BYTES = 16 * 1024
GIB = 2**30


def said(**counters: Any) -> EngineSnapshot:
    """101 blocks, of which 20 are referenced and 80 free."""
    base: dict[str, Any] = {
        "engine": "0",
        "num_blocks": 101,
        "block_size": 16,
        "attention_block_size": 16,
        "kv_usage_ratio": 0.2,
        "prompt_tokens_total": 0.0,
        "prompt_tokens_local_cache_hit_total": 0.0,
        "generation_tokens_total": 0.0,
    }
    return EngineSnapshot(**{**base, **counters})


def of(snapshot: EngineSnapshot, known: EngineFacts | None = None, *, caches: bool = True) -> Tiers:
    known = known or facts()
    layout = predict(known).layout
    assert layout is not None
    return Tiers(
        snapshot=snapshot,
        observation=observe(snapshot, known, layout),
        layout=layout,
        planned=plan_tier(known, layout),
        since_start=growth_since_start(moment_of(snapshot, 1000.0)),
        caches=caches,
    )


def minute(before: EngineSnapshot, now: EngineSnapshot) -> dict[str, Growth]:
    return {"1m": growth(moment_of(before, 940.0), moment_of(now, 1000.0))}


def with_tier(size_gib: float, **flags: Any) -> EngineFacts:
    return facts(flags={"kv_offloading_size": size_gib, **flags})


# What the pool holds


def test_before_the_pool_was_full_once_what_is_not_referenced_is_part_cached_and_part_blank() -> None:
    # 640 tokens computed and 160 generated: 50 blocks, of which 20 are referenced.
    content = hbm_content(of(said(prompt_tokens_total=640.0, generation_tokens_total=160.0)))
    assert content is not None
    assert (content.referenced_blocks, content.cached_blocks, content.blank_blocks) == (20, 30, 50)


def test_once_it_was_full_all_of_it_is_cached() -> None:
    content = hbm_content(of(said(prompt_tokens_total=10_000.0)))
    assert content is not None
    assert (content.cached_blocks, content.blank_blocks) == (80, 0)


def test_what_was_found_again_took_no_new_block() -> None:
    content = hbm_content(of(said(prompt_tokens_total=10_000.0, prompt_tokens_local_cache_hit_total=9_520.0)))
    assert content is not None
    # 480 tokens: 30 blocks.
    assert content.cached_blocks == 10


def test_without_prefix_caching_nothing_is_cached() -> None:
    content = hbm_content(of(said(prompt_tokens_total=10_000.0), caches=False))
    assert content is not None
    assert (content.cached_blocks, content.blank_blocks) == (0, 80)


def test_what_is_not_told_is_not_known() -> None:
    assert hbm_content(of(said(kv_usage_ratio=None))) is None
    content = hbm_content(of(said(generation_tokens_total=None)))
    assert content is not None
    assert (content.cached_blocks, content.blank_blocks) == (None, None)


# Retention in HBM


def busy(**counters: Any) -> tuple[EngineSnapshot, EngineSnapshot]:
    """A minute in which 1,920 prompt tokens came, 960 of them found, and 640 were generated."""
    before = said(
        prompt_tokens_total=50_000.0,
        prompt_tokens_local_cache_hit_total=10_000.0,
        generation_tokens_total=5_000.0,
        **counters,
    )
    now = replace(
        before,
        prompt_tokens_total=51_920.0,
        prompt_tokens_local_cache_hit_total=10_960.0,
        generation_tokens_total=5_640.0,
    )
    return before, now


def test_idle_content_stays_until_as_many_blocks_were_taken_as_are_free() -> None:
    before, now = busy()
    [found] = retentions(of(now), minute(before, now))
    # 1,600 new tokens are 100 blocks a minute, and with what was found 160; 80 are free.
    assert (found.tier, found.window) == (Tier.HBM, "1m")
    assert found.high_seconds == pytest.approx(48.0)
    assert found.low_seconds == pytest.approx(30.0)


@pytest.mark.parametrize(("idle", "answer"), [(29, Answer.YES), (40, Answer.PERHAPS), (49, Answer.NO)])
def test_a_session_is_warm_perhaps_or_cold(idle: float, answer: Answer) -> None:
    before, now = busy()
    [found] = retentions(of(now), minute(before, now))
    assert found.answer(idle) is answer


def test_a_pool_that_was_never_full_keeps_everything() -> None:
    before, now = said(), said(prompt_tokens_total=640.0)
    [found] = retentions(of(now), minute(before, now))
    assert (found.low_seconds, found.high_seconds) == (None, None)
    assert found.answer(1e9) is Answer.YES


def test_of_a_model_that_is_not_known_the_block_size_of_one_group_tells_it() -> None:
    before, now = busy(pool_tokens=1616, max_concurrency=1616 / 2048)
    known = of(now)
    unknown = Tiers(
        snapshot=now,
        observation=observe(now, facts(), None),
        layout=None,
        planned=None,
        since_start=known.since_start,
        caches=True,
    )
    assert unknown.observation.used_tokens is not None
    assert retentions(unknown, minute(before, now)) == retentions(known, minute(before, now)) != ()
    # Whose page does not show that there is one group.
    silent = Tiers(
        snapshot=now,
        observation=replace(unknown.observation, used_tokens=None),
        layout=None,
        planned=None,
        since_start=known.since_start,
        caches=True,
    )
    assert retentions(silent, minute(before, now)) == ()


def test_a_window_in_which_nothing_came_in_tells_nothing() -> None:
    now = said(prompt_tokens_total=50_000.0)
    assert retentions(of(now), minute(now, now)) == ()


def test_with_recurrent_states_nobody_knows_how_many_blocks_a_token_takes() -> None:
    row = BY_ID["qwen3-next-80b-tp4@0.32.0"]
    layout = layout_of(row)
    assert any(group.specs[0].kind is Kind.STATE for group in layout.groups)
    before, now = busy()
    states = Tiers(
        snapshot=now,
        observation=observe(now, facts(), None),
        layout=layout,
        planned=None,
        since_start=growth_since_start(moment_of(now, 1000.0)),
        caches=True,
    )
    assert states.blocks_per_token is None
    assert retentions(states, minute(before, now)) == ()


def test_without_prefix_caching_there_is_no_retention() -> None:
    before, now = busy()
    assert retentions(of(now, caches=False), minute(before, now)) == ()


def test_up_to_0_15_the_hits_are_those_of_the_look_ups() -> None:
    before, now = busy()
    before = replace(before, prompt_tokens_local_cache_hit_total=None, prefix_cache_hits_total=10_000.0)
    now = replace(now, prompt_tokens_local_cache_hit_total=None, prefix_cache_hits_total=10_960.0)
    [found] = retentions(of(now), minute(before, now))
    assert found.high_seconds == pytest.approx(48.0)


# The tier in host memory


def stored(now: EngineSnapshot, ever: float, lately: float) -> tuple[EngineSnapshot, EngineSnapshot]:
    now = replace(now, offload_store_bytes_total=ever)
    return replace(now, offload_store_bytes_total=ever - lately), now


def test_the_tier_keeps_what_nobody_asks_for_until_it_was_written_over_once() -> None:
    known = with_tier(1)
    now = said(prompt_tokens_total=None)
    before, now = stored(now, 5 * GIB, GIB // 10)
    [found] = retentions(of(now, known), minute(before, now))
    assert (found.tier, found.low_seconds) == (Tier.HOST, None)
    # Of 1 GiB a tenth in a minute; what is no whole byte of GIB // 10 aside.
    assert found.high_seconds == pytest.approx(600.0)


def test_what_prompts_may_have_touched_makes_the_shorter_figure() -> None:
    known = with_tier(1)
    before, now = busy()
    before = replace(before, offload_store_bytes_total=5 * GIB - 983_040.0)
    now = replace(now, offload_store_bytes_total=5.0 * GIB)
    host = next(one for one in retentions(of(now, known), minute(before, now)) if one.tier is Tier.HOST)
    # 960 tokens stored, 1,920 asked for, of 1,048,576.
    assert host.high_seconds == pytest.approx(60 * 1_048_576 / 960)
    assert host.low_seconds == pytest.approx(60 * 1_048_576 / 1920)


def test_a_tier_that_was_never_full_keeps_everything() -> None:
    before, now = stored(said(prompt_tokens_total=None), GIB / 2, 1000.0)
    [found] = retentions(of(now, with_tier(1)), minute(before, now))
    assert found.answer(1e9) is Answer.YES


def test_what_the_engine_tells_of_its_tier_is_believed_first() -> None:
    told = ToldTier(num_chunks=32_768, blocks_per_chunk=1, size_bytes=GIB // 2, size_tokens=524_288)
    before, now = stored(said(prompt_tokens_total=None, told_tier=told), 5 * GIB, GIB // 10)
    [found] = retentions(of(now, with_tier(1)), minute(before, now))
    assert found.high_seconds == pytest.approx(300.0)
    # Also where no flag is known.
    [alone] = retentions(of(now), minute(before, now))
    assert alone.high_seconds == pytest.approx(300.0)


def test_a_tier_of_which_nothing_is_known_has_no_retention() -> None:
    before, now = stored(said(prompt_tokens_total=None), 5 * GIB, GIB // 10)
    assert retentions(of(now), minute(before, now)) == ()


# What it costs to come back


def measured(**rest: float) -> Rates:
    return Rates(
        window="5m",
        prefill_tokens_per_second=rest.get("prefill"),
        load_bytes_per_second=rest.get("load"),
    )


def test_rates_are_what_was_measured() -> None:
    before = said(
        prefill_seconds_total=10.0,
        prefill_computed_tokens_total=1_000.0,
        offload_load_bytes_total=0.0,
        offload_load_seconds_total=0.0,
    )
    now = replace(
        before,
        prefill_seconds_total=12.0,
        prefill_computed_tokens_total=9_000.0,
        offload_load_bytes_total=6e9,
        offload_load_seconds_total=0.5,
    )
    found = rates("1m", minute(before, now)["1m"])
    assert found.prefill_tokens_per_second == 4_000.0
    assert found.load_bytes_per_second == 12e9
    idle = rates("1m", minute(now, now)["1m"])
    assert (idle.prefill_tokens_per_second, idle.load_bytes_per_second) == (None, None)


def test_a_return_costs_its_tokens_by_what_was_measured() -> None:
    known = with_tier(1)
    [cost] = resume_costs(known, of(said(), known), measured(prefill=100.0, load=1e6), [1000])
    assert cost.recompute_seconds == 10.0
    # 63 chunks of 16 tokens: 1,008 tokens.
    assert cost.reload_seconds == pytest.approx(63 * BLOCK_BYTES / 1e6)


def test_each_worker_loads_its_own_share() -> None:
    known = with_tier(1, tensor_parallel_size=2)
    [cost] = resume_costs(known, of(said(), known), measured(load=1e6), [1000])
    assert cost.reload_seconds == pytest.approx(63 * BLOCK_BYTES / 2 / 1e6)


def test_what_was_not_measured_is_not_said() -> None:
    known = with_tier(1)
    assert resume_costs(known, of(said(), known), measured(), [1000]) == ()
    [cost] = resume_costs(known, of(said(), known), measured(prefill=100.0), [1000])
    assert cost.reload_seconds is None
    # Longer than the server takes.
    assert resume_costs(known, of(said(), known), measured(prefill=100.0), [4096]) == ()


def test_the_idle_time_of_evicted_blocks_is_their_mean() -> None:
    before = said(evicted_blocks_total=10.0, evicted_block_idle_seconds_total=100.0)
    now = replace(before, evicted_blocks_total=14.0, evicted_block_idle_seconds_total=260.0)
    assert measured_idle_seconds(minute(before, now)["1m"]) == 40.0
    assert measured_idle_seconds(minute(now, now)["1m"]) is None


def test_a_retention_says_yes_only_up_to_its_shorter_figure() -> None:
    only_high = Retention(tier=Tier.HOST, window="5m", low_seconds=None, high_seconds=100.0)
    assert [only_high.answer(idle) for idle in (50.0, 101.0)] == [Answer.PERHAPS, Answer.NO]


def test_while_some_chunks_may_hold_less_a_tier_counts_as_full_as_soon_as_it_may_be() -> None:
    """Groups of 3, 2 and 3 layers: a chunk has room for 3."""
    windows = {
        **TINY_LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "sliding_window": 512,
        "layer_types": [*["sliding_attention"] * 5, *["full_attention"] * 3],
    }
    known = facts(config=windows, flags={"kv_offloading_size": 1.0, "max_num_batched_tokens": 2048})
    layout = plan_layout(known)
    assert isinstance(layout, KvLayout)
    tier = plan_tier(known, layout)
    assert isinstance(tier, OffloadTier)
    assert [len(group.specs) for group in layout.groups] == [3, 2, 3]
    assert tier.least_stored_bytes * 3 == tier.content_bytes * 2
    least, most = (tier.num_chunks * each for each in (tier.least_stored_bytes, tier.content_bytes))

    def kept(ever: float) -> Retention | None:
        before, now = stored(said(), ever, GIB / 10)
        tiers = of(now, known)
        return next((one for one in retentions(tiers, minute(before, now)) if one.tier is Tier.HOST), None)

    assert kept(least - 1) == Retention(tier=Tier.HOST, window="1m", low_seconds=None, high_seconds=None)
    full = kept((least + most) / 2)
    assert full is not None
    assert full.high_seconds == pytest.approx(most * 60 / (GIB / 10))


@pytest.mark.parametrize(
    ("version", "extra", "asked"),
    [
        ("0.22.1", {}, 1920 + 640),
        ("0.23.0", {}, 1920),
        ("0.33.0", {"offload_prompt_only": True}, 1920),
        ("0.33.0", {"offload_prompt_only": False}, 1920 + 640),
    ],
)
def test_answers_that_are_stored_as_they_come_push_out_as_prompts_do(
    version: str, extra: dict[str, Any], asked: int
) -> None:
    flags = {"kv_offloading_size": 1.0, "kv_transfer_config": {"kv_connector_extra_config": extra}}
    known = facts(flags=flags, version=version)
    before, now = busy()
    before = replace(before, offload_store_bytes_total=5 * GIB - 983_040.0)
    now = replace(now, offload_store_bytes_total=5.0 * GIB)
    host = next(one for one in retentions(of(now, known), minute(before, now)) if one.tier is Tier.HOST)
    assert host.low_seconds == pytest.approx(60 * 1_048_576 / asked)
