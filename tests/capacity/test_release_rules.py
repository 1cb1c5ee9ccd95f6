"""What changed between releases: each rule, on either side of the release that its source names."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.prediction import logged_tokens, plan_pool, predict
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import BY_ID, facts_of, layout_of


def planned(row: str, version: str, flags: Mapping[str, Any] | None = None, **config: Any) -> KvLayout:
    """A row of the truth file as another release plans it; flags with None are left out."""
    case = BY_ID[row]
    return layout_of(
        {
            **case,
            "vllm_version": version,
            "flags": {**case["flags"], **(flags or {})},
            "config": {**case["config"], **config},
        }
    )


def sizes(layout: KvLayout) -> list[int]:
    return [len(group.specs) for group in layout.groups]


@pytest.mark.parametrize(("version", "longest"), [("0.28.0", 128), ("0.29.0", 112)])
def test_a_start_needs_room_for_the_null_block_from_0_29_on(version: str, longest: int) -> None:
    # 1,024 B per token, so 8 blocks of 16 tokens
    pool = predict(facts(version=version, flags={"kv_cache_memory_bytes": 8 * 16 * 1024})).pool
    assert pool is not None
    assert (pool.num_blocks, pool.longest_bootable) == (8, longest)


@pytest.mark.parametrize(("version", "in_flight"), [("0.25.1", 100), ("0.26.0", 200)])
def test_windows_hold_one_batch_before_0_26(version: str, in_flight: int) -> None:
    resolved = facts(
        version=version,
        config={**TINY_LLAMA, "sliding_window": 64},
        gpu="H200",
        flags={"max_num_batched_tokens": 100},
    )
    assert resolved.in_flight_tokens == in_flight


@pytest.mark.parametrize(("version", "tokens"), [("0.27.0", 8192), ("0.28.0", 16384)])
def test_cards_from_160_gib_on_batch_no_more_than_others_before_0_28(version: str, tokens: int) -> None:
    resolved = facts(version=version, gpu="B200").max_num_batched_tokens
    assert resolved is not None
    assert resolved.value == tokens


@pytest.mark.parametrize(
    ("version", "row", "layers"),
    [
        # 4 layers of one kind, 5 of the other: 5 < 4 x 1.5, and 5 < 4 x 1.25 is not true.
        ("0.17.0", (4, 5), [4, 3, 2]),
        ("0.18.0", (4, 5), [4, 5]),
        ("0.12.0", (5, 6), [5, 6]),
        ("0.11.2", (5, 6), [5, 3, 3]),
    ],
)
def test_groups_grew_as_large_as_the_commonest_kind_step_by_step(
    version: str, row: tuple[int, int], layers: list[int]
) -> None:
    windows, full = row
    config = {
        **BY_ID["gpt-oss-20b-tp1"]["config"],
        "num_hidden_layers": windows + full,
        "layer_types": ["sliding_attention"] * windows + ["full_attention"] * full,
    }
    layout = planned("gpt-oss-20b-tp1", version, **config)
    assert sorted(sizes(layout)) == sorted(layers)


@pytest.mark.parametrize(("version", "groups"), [("0.13.0", 1), ("0.14.0", 4)])
def test_chunked_layers_keep_every_token_before_0_14(version: str, groups: int) -> None:
    assert planned("llama4-scout-mm-tp8", version).num_kv_groups == groups


@pytest.mark.parametrize(("version", "dtype"), [("0.31.0", "auto"), ("0.32.0", "fp8_e4m3")])
def test_glm_dsa_keeps_16_bits_on_blackwell_before_0_32(version: str, dtype: str) -> None:
    assert planned("glm51-tp8-b200", version).kv_dtype == dtype


@pytest.mark.parametrize(
    ("version", "flag", "dtype"),
    [
        ("0.11.0", "auto", "fp8_ds_mla"),
        ("0.11.1", "auto", "auto"),
        ("0.17.0", "fp8_e4m3", "fp8_ds_mla"),
        ("0.18.0", "fp8_e4m3", "fp8_e4m3"),
        ("0.17.0", "bfloat16", "auto"),
    ],
)
def test_deepseek_v32_packed_every_fp8_cache_before_0_18(version: str, flag: str, dtype: str) -> None:
    assert planned("dsv32-tp8-b200-fp8", version, {"kv_cache_dtype": flag}).kv_dtype == dtype


@pytest.mark.parametrize(("version", "caches"), [("0.20.2", 156), ("0.21.0", 99)])
def test_every_sparse_layer_has_an_indexer_before_0_21(version: str, caches: int) -> None:
    flags = {"kv_cache_dtype": "bfloat16", "attention_backend": None}
    assert sizes(planned("glm53-nvfp4-tp8-ctx256k", version, flags)) == [caches]


@pytest.mark.parametrize(
    ("version", "flags", "blocks"),
    [
        ("0.14.1", {"enable_prefix_caching": True}, 1),
        ("0.16.0", {"enable_prefix_caching": True}, 2),
        ("0.16.0", {}, 1),
        ("0.25.1", {}, 1),
        ("0.26.0", {}, 2),
        ("0.26.0", {"enable_prefix_caching": False}, 1),
    ],
)
def test_a_recurrent_state_takes_two_blocks_where_prefixes_are_cached(
    version: str, flags: dict[str, Any], blocks: int
) -> None:
    layout = planned("q35-27b-tp1-h200", version, flags)
    assert layout.groups[0].blocks(4096, layout.shape) == blocks


@pytest.mark.parametrize(
    ("version", "row", "blocks"),
    [
        ("0.31.0", "glm53flash-h200-tp2-kvauto-mtp3", 5),
        ("0.32.0", "glm53flash-h200-tp2-kvauto-mtp3", 6),
        ("0.32.0", "q35-27b-tp1-h200", 2),
        ("0.33.0", "q35-27b-tp1-h200", 3),
    ],
)
def test_a_block_to_save_a_state_in_came_with_0_32_and_for_delta_nets_with_0_33(
    version: str, row: str, blocks: int
) -> None:
    layout = planned(row, version)
    assert layout.groups[0].blocks(4096, layout.shape) == blocks


@pytest.mark.parametrize(
    ("version", "block_size"), [("0.19.0", 960), ("0.20.0", 944), ("0.26.0", 944), ("0.27.0", 1024)]
)
def test_blocks_of_latent_attention_beside_states_were_finer_before_0_27(
    version: str, block_size: int
) -> None:
    layout = planned("kimi-linear-48b-tp4", version, {"tensor_parallel_size": 2})
    assert layout.block_size == block_size


@pytest.mark.parametrize(
    ("version", "block_bytes"),
    [
        # 21 layers have rows of 37,440 B and keys of 8,640 B, 20 have 1,728 B; of 43 windows, padded to 37,440 B, 22
        # are in one group.
        ("0.23.0", (37_440 + 8_640 + 1_728) * 22),
        ("0.24.0", 37_440 * 22 + 8_640 * 21 + 1_728 * 20),
        ("0.26.0", 37_440 * 22 + 8_640 * 21 + 1_728 * 20),
        ("0.27.0", (37_440 + 8_640) * 21 + 1_728 * 20),
    ],
)
def test_unlike_blocks_were_packed_less_densely_before_0_27(version: str, block_bytes: int) -> None:
    assert planned("dsv4-flash-h200-tp4-kvfp8", version).bytes_per_block == block_bytes


@pytest.mark.parametrize(("version", "tokens"), [("0.20.0", 75_840), ("0.20.1", 298_125)])
def test_the_log_divided_blocks_by_groups_before_0_20_1(version: str, tokens: int) -> None:
    case = {**BY_ID["kimi-linear-48b-tp4"], "vllm_version": version}
    case["flags"] = {"tensor_parallel_size": 2, "max_model_len": 120_000, "block_size": 960}
    layout, resolved = layout_of(case), facts_of(case)
    # 318 // 4 x 960, and 318 / 128 x 120,000
    pool = plan_pool(layout, (318 * layout.bytes_per_block,), None, 120_000)
    assert not isinstance(pool, str | None)
    assert logged_tokens(pool, layout, resolved) == tokens


def test_what_old_releases_did_by_rules_of_their_own_is_unknown() -> None:
    mamba = {**BY_ID["granite4-h-small-tp1"], "vllm_version": "0.27.0"}
    mamba["flags"] = {**mamba["flags"], "enable_prefix_caching": True}
    assert "Mamba states before vLLM 0.28" in str(plan_layout(facts_of(mamba)))
    assert isinstance(plan_layout(facts_of({**mamba, "vllm_version": "0.28.0"})), KvLayout)
    mamba["flags"] = {**mamba["flags"], "enable_prefix_caching": False}
    assert isinstance(plan_layout(facts_of(mamba)), KvLayout)
    kimi = next(row for row in BY_ID.values() if row["config"]["architectures"][0].startswith("KimiK3"))
    assert "Kimi-K3 before vLLM 0.32" in str(plan_layout(facts_of({**kimi, "vllm_version": "0.31.0"})))
