"""How full the blocks in use are: an estimate, never outside of what the blocks allow."""

import random
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.kv_specs import ceil_div
from kvheadroom.capacity.readings import EngineSnapshot
from tests.capacity.facts_builder import facts

# 301 blocks of 16 tokens, 300 of them usable.
ENGINE = EngineSnapshot(
    engine="0", num_blocks=301, block_size=16, max_concurrency=301 / 128, requests_running=100.0,
    kv_usage_ratio=200 / 300, finished_requests_total=1_000.0, finished_prompt_tokens_total=17_000.0,
    finished_generation_tokens_total=1_000.0,
)  # fmt: skip


def assessed(snapshot: EngineSnapshot, **known: Any) -> Assessment:
    reading = Reading(facts=facts(gpu="cpu", **known), snapshot=snapshot, taken_at=1.0)
    return assess(reading, ())


def test_prompts_just_over_a_block_fill_little_more_than_half_of_what_they_hold() -> None:
    # 100 requests of 17 tokens and half a token of answer hold two blocks of 16 each: usage is 66.7 %.
    result = assessed(ENGINE)
    assert result.snapshot.kv_usage_ratio == pytest.approx(0.667, abs=0.001)
    occupancy = result.occupancy
    # 36.5 %
    assert occupancy.estimate_ratio == pytest.approx(100 * 17.5 / 4_800)
    assert (occupancy.least_ratio, occupancy.most_ratio) == (1_700 / 4_800, 3_200 / 4_800)
    assert occupancy.unknown == ""


@pytest.mark.parametrize(
    ("other", "why"),
    [
        # Twice as long as those that finished: the blocks say otherwise.
        ({"finished_prompt_tokens_total": 60_000.0}, "not as long as those that finished, or share blocks"),
        ({"finished_prompt_tokens_total": 8_000.0}, "not as long as those that finished, or share blocks"),
        ({"finished_requests_total": 9.0}, "too few requests have finished"),
        ({"finished_generation_tokens_total": None}, "too few requests have finished"),
        ({"requests_running": None}, "does not tell its running requests"),
        ({"requests_running": 0.0}, "blocks are in use although no request runs"),
        ({"kv_usage_ratio": None}, "no tokens here, or not told"),
        ({"sleeping": True}, "no tokens here, or not told"),
    ],
)
def test_where_it_cannot_be_estimated_the_reason_is_told(other: dict[str, Any], why: str) -> None:
    occupancy = assessed(replace(ENGINE, **other)).occupancy
    assert occupancy.estimate_ratio is None
    assert why in occupancy.unknown


@pytest.mark.parametrize(
    ("waiting", "holders"),
    [
        ({"requests_waiting_deferred": 3.0, "requests_waiting": 9.0}, 103),
        # Before 0.20 the queue is not told apart; without a connector none of it holds a block.
        ({"requests_waiting": 9.0}, 100),
        ({"requests_waiting": 9.0, "external_prefix_cache_queries_total": 0.0}, 100),
        ({"requests_waiting": 9.0, "external_prefix_cache_queries_total": 640.0}, 109),
    ],
)
def test_requests_in_the_queue_that_a_connector_may_be_filling_blocks_for_count_as_holders(
    waiting: dict[str, Any], holders: int
) -> None:
    occupancy = assessed(replace(ENGINE, **waiting)).occupancy
    assert occupancy.least_ratio == pytest.approx((3_200 - holders * 15) / 4_800)


def test_an_idle_pool_holds_no_tokens() -> None:
    occupancy = assessed(replace(ENGINE, kv_usage_ratio=0.0, requests_running=0.0)).occupancy
    assert (occupancy.estimate_ratio, occupancy.unknown) == (0.0, "")


def test_pools_of_several_groups_have_no_tokens_to_count() -> None:
    # Two windows of 64 tokens and a full layer: 32 blocks of a request are not max_model_len / block size.
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32, "torch_dtype": "bfloat16",
        "max_position_embeddings": 2048, "sliding_window": 64, "sliding_window_pattern": 6, "vocab_size": 1000,
    }  # fmt: skip
    result = assessed(ENGINE, config=config)
    assert result.prediction.layout is not None
    assert result.prediction.layout.num_kv_groups > 1
    assert result.occupancy.estimate_ratio is None


def test_of_requests_much_longer_than_a_block_the_blocks_alone_tell() -> None:
    # 4 requests leave at most 4 x 15 tokens of 3,200 empty, whatever others were before.
    occupancy = assessed(replace(ENGINE, requests_running=4.0)).occupancy
    assert occupancy.estimate_ratio == pytest.approx((3_200 - 30) / 4_800)


def test_the_truth_lies_within_the_bounds_whatever_the_lengths(seeded: random.Random) -> None:
    for _ in range(200):
        block_size = seeded.choice([16, 32, 128])
        lengths = [seeded.randint(1, seeded.choice([20, 200, 2_000])) for _ in range(seeded.randint(1, 60))]
        used = sum(ceil_div(length, block_size) for length in lengths)
        usable = used + seeded.randint(0, 500)
        snapshot = replace(
            ENGINE, num_blocks=usable + 1, block_size=block_size, kv_usage_ratio=used / usable,
            requests_running=float(len(lengths)), finished_prompt_tokens_total=seeded.uniform(1e3, 1e6),
        )  # fmt: skip
        occupancy = assessed(snapshot).occupancy
        truth = sum(lengths) / (usable * block_size)
        assert occupancy.least_ratio is not None
        assert occupancy.most_ratio is not None
        assert occupancy.least_ratio <= truth <= occupancy.most_ratio
        if occupancy.estimate_ratio is not None:
            assert occupancy.least_ratio <= occupancy.estimate_ratio <= occupancy.most_ratio
