"""A start as a planner sees it: vLLM's own figures, sessions, fleets, and other ways to use the same GPUs."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvheadroom.capacity.alternatives import Kind, alternatives, spelt
from kvheadroom.capacity.deployment import DeploymentPlan, Outcome, PlanRequest, plan_deployment
from kvheadroom.capacity.facts import OperatorFacts
from kvheadroom.capacity.gpu_catalogue import catalogue_name
from kvheadroom.capacity.plan_figures import figures
from kvheadroom.capacity.stored_model import ModelFiles
from tests.capacity.article_models import request
from tests.capacity.facts_builder import TINY_LLAMA
from tests.capacity.truth import BY_ID, ROWS, is_refused

GLM = [row for row in ROWS if row["id"].startswith("glm53") and isinstance(row.get("available_bytes"), int)]


def planned(row: dict[str, Any]) -> DeploymentPlan:
    flags = {**row["flags"], "kv_cache_memory_bytes": row["available_bytes"]}
    return plan_deployment(
        PlanRequest(
            model_files=ModelFiles(folder="", config=row["config"]),
            # The bytes of a row are not what its weights leave of its GPU.
            operator=OperatorFacts(flags=flags, gpu=catalogue_name(row["gpu"]), hbm_bytes=10**13),
            version=row["vllm_version"],
        )
    )


def test_there_are_rows_to_hold_it_to() -> None:
    assert len(GLM) > 40
    assert any(is_refused(row) for row in GLM)


@pytest.mark.parametrize("row", GLM, ids=lambda row: row["id"])
def test_a_start_is_what_vllm_itself_makes_of_it(row: dict[str, Any]) -> None:
    plan, expected = planned(row), row["expected"]
    if is_refused(row):
        assert plan.outcome is Outcome.REFUSED
        assert plan.reason
        return
    assert plan.pool is not None, plan.reason
    assert plan.pool.num_blocks == expected["num_blocks"]
    assert plan.pool.pool_tokens == expected["kv_cache_size_tokens"]
    assert (plan.outcome is Outcome.STARTS) == expected["boots"]
    # With blocks that are given, the estimate of the rows is that of the bytes.
    if "num_gpu_blocks_override" not in row["flags"]:
        assert plan.pool.longest_bootable == expected["estimated_max_model_len"]


def pool_of(kv_bytes: int, **flags: Any) -> DeploymentPlan:
    return plan_deployment(request(kv_cache_memory_bytes=kv_bytes, **flags))


def test_the_longest_that_starts_leaves_the_null_block_out() -> None:
    plan = pool_of(37_570_000_000, tensor_parallel_size=4)
    assert plan.pool is not None
    assert (plan.pool.pool_tokens, plan.pool.longest_bootable) == (787_584, 787_520)
    assert plan.outcome is Outcome.TOO_LONG
    assert "787,520 starts" in plan.reason
    assert pool_of(37_570_000_000, tensor_parallel_size=4, max_model_len=787_520).outcome is Outcome.STARTS
    assert pool_of(37_570_000_000, tensor_parallel_size=4, max_model_len=787_584).outcome is Outcome.TOO_LONG


def test_a_pool_of_a_given_size_must_fit_the_card_beside_the_weights() -> None:
    card, weights = 182_642 * 1024**2, 58_365_186_672
    fits = pool_of(card - weights, tensor_parallel_size=8)
    assert (fits.outcome, fits.weights_bytes) == (Outcome.STARTS, weights)
    block = 3_052_800
    over = pool_of(card - weights + block, tensor_parallel_size=8)
    assert (over.outcome, over.weights_bytes, over.pool) == (Outcome.NO_ROOM, weights, None)
    many = pool_of(200 * 10**9, tensor_parallel_size=8)
    assert "weights (58.37 GB per GPU) and the KV cache of the given size (200.00 GB)" in many.reason
    assert "exceed the 191.51 GB of the GPU, by 66.85 GB: vLLM runs out of memory" in many.reason
    blocks = plan_deployment(request(num_gpu_blocks_override=70_000, tensor_parallel_size=8))
    assert blocks.outcome is Outcome.NO_ROOM
    assert "(213.70 GB)" in blocks.reason


@pytest.mark.parametrize("flags", [{"kv_cache_memory_bytes": 10**10}, {"num_gpu_blocks_override": 3_000}])
def test_weights_that_are_more_than_the_card_do_not_start_with_any_pool(flags: dict[str, Any]) -> None:
    plan = plan_deployment(request(tensor_parallel_size=2, max_model_len=65_536, **flags))
    assert (plan.outcome, plan.fits) == (Outcome.NO_ROOM, ())
    assert plan.weights_bytes is not None
    assert plan.weights_bytes > 182_642 * 1024**2
    assert "the weights alone (" in plan.reason


def test_every_stage_holds_its_own_weights_beside_a_pool_of_a_given_size() -> None:
    stages: dict[str, Any] = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    plan = pool_of(1, **stages)
    assert plan.weights is not None
    widest = max(plan.weights.stage_bytes)
    assert pool_of(182_642 * 1024**2 - widest, **stages).outcome is Outcome.STARTS
    assert pool_of(182_642 * 1024**2 - min(plan.weights.stage_bytes), **stages).outcome is Outcome.NO_ROOM


def test_a_pool_of_a_given_size_on_a_card_that_is_not_known_is_believed() -> None:
    asked = PlanRequest(
        model_files=ModelFiles(folder="", config=TINY_LLAMA),
        operator=OperatorFacts(flags={"kv_cache_memory_bytes": 10**13}, gpu="H100", weights_bytes=10**6),
    )
    assert plan_deployment(asked).outcome is Outcome.NO_ROOM
    unknown = replace(asked, operator=replace(asked.operator, gpu=None))
    assert plan_deployment(unknown).outcome is Outcome.STARTS


def test_a_length_that_vllm_finds_itself_is_the_longest_that_starts() -> None:
    plan = pool_of(37_570_000_000, tensor_parallel_size=4, max_model_len=-1)
    assert plan.outcome is Outcome.STARTS
    assert plan.pool is not None
    assert plan.pool.max_model_len == 787_520


def test_sessions_are_vllms_concurrency_and_whole_ones_leave_the_null_block_out() -> None:
    (fit,) = pool_of(37_570_000_000, tensor_parallel_size=4).fits
    assert (fit.blocks, round(fit.sessions, 4), fit.whole_sessions) == (4096, 3.0044, 3)
    # 12,288 blocks are three sessions of 4,096, but one block is the null block.
    (fit,) = pool_of(12_288 * 3_052_800, tensor_parallel_size=4).fits
    assert (fit.sessions, fit.whole_sessions) == (3.0, 2)


def test_sessions_above_max_model_len_are_not_counted() -> None:
    assert pool_of(10**10, tensor_parallel_size=4, max_model_len=32_768).fits == ()
    usual = replace(request(tensor_parallel_size=4, max_model_len=32_768), session_tokens=())
    (fit,) = plan_deployment(usual).fits
    assert fit.session_tokens == 32_768


def test_a_fleet_is_cut_into_whole_replicas() -> None:
    fleet = plan_deployment(request(gpus=20, tensor_parallel_size=4, data_parallel_size=2)).fleet
    assert (fleet.gpus_per_replica, fleet.engines, fleet.replicas, fleet.idle_gpus) == (8, 2, 2, 4)
    fleet = pool_of(37_570_000_000, tensor_parallel_size=4, data_parallel_size=2).fleet
    assert (fleet.replica_tokens, fleet.tokens) == (2 * 787_584, 7 * 2 * 787_584)
    fleet = plan_deployment(request(gpus=3, tensor_parallel_size=4)).fleet
    assert (fleet.replicas, fleet.idle_gpus) == (0, 3)


def test_a_copy_for_prefill_takes_gpus_and_adds_no_tokens() -> None:
    tiny = PlanRequest(
        model_files=ModelFiles(folder="", config=TINY_LLAMA),
        operator=OperatorFacts(
            flags={"prefill_context_parallel_size": 2, "kv_cache_memory_bytes": 1 << 24}, gpu="H100"
        ),
    )
    assert plan_deployment(tiny).fleet.gpus_per_replica == 2


@pytest.mark.parametrize("changes", [{}, {"kv_cache_memory_bytes": 1 << 30}, {"num_gpu_blocks_override": 9}])
@pytest.mark.parametrize("weights_bytes", [None, 1 << 30])
def test_more_stages_than_layers_are_refused_before_anything_is_made_for_each(
    changes: dict[str, int], weights_bytes: int | None
) -> None:
    asked = request().with_flags({"pipeline_parallel_size": 10_000_000, **changes})
    # With a stage's figures for each of them this would take minutes.
    plan = plan_deployment(replace(asked, operator=replace(asked.operator, weights_bytes=weights_bytes)))
    assert plan.outcome is Outcome.REFUSED
    assert plan.reason == "pipeline_parallel_size=10000000 is more than the 78 layers"


@pytest.mark.parametrize(
    "name", ["llama31-8b-tp1-b200", "qwen3-next-80b-tp4-b200", "gemma3-27b-tp2-b200-fp8"]
)
def test_a_cache_type_of_latent_attention_is_offered_to_no_other_model(name: str) -> None:
    row = next(row for row in ROWS if row["id"] == name)
    found = [other.flags for other in alternatives(planned(row))]
    assert found
    assert not [flags for flags in found if "ds_mla" in flags]


def others(kv_bytes: int, **flags: Any) -> dict[str, int | None]:
    return {other.flags: other.tokens for other in alternatives(pool_of(kv_bytes, **flags))}


def test_the_same_eight_gpus_hold_twice_as_much_in_two_stages() -> None:
    found = others(95_585_000_000, tensor_parallel_size=8)
    assert pool_of(95_585_000_000, tensor_parallel_size=8).fleet.replica_tokens == 2_003_840
    assert found["-tp 4 -pp 2"] == 3_974_720
    assert found["-dcp 8"] == 16_030_720
    assert found["--kv-cache-dtype nvfp4_ds_mla"] == 3_162_112
    assert list(found.values()) == sorted(found.values(), key=lambda tokens: -(tokens or 0))


def test_types_that_save_nothing_and_ways_that_vllm_refuses_are_no_alternatives() -> None:
    found = others(95_585_000_000, tensor_parallel_size=8)
    assert "--kv-cache-dtype fp8" not in found
    assert "--kv-cache-dtype nvfp4" not in found
    # 64 heads over 3 GPUs are refused, and so is every other way on them.
    assert others(95_585_000_000, tensor_parallel_size=3) == {}


def test_where_the_weights_do_not_fit_only_other_splits_are_alternatives() -> None:
    base = plan_deployment(request("fp8", tensor_parallel_size=4))
    assert base.outcome is Outcome.NO_ROOM
    assert {other.kind for other in alternatives(base)} == {Kind.STAGES, Kind.ENGINES}


def test_weights_are_those_of_vllms_own_classes_on_every_stage_and_engine() -> None:
    # weight_bytes_rank0 of the rows glm53-nvfp4q-weights-tp4 and glm53-nvfp4q-tp8-mtp1.
    four = plan_deployment(request(tensor_parallel_size=4))
    assert four.weights_bytes == 113_582_936_688
    assert four.outcome is Outcome.STARTS
    eight = plan_deployment(request(tensor_parallel_size=8))
    assert eight.weights_bytes == 58_365_186_672
    stages = plan_deployment(request(tensor_parallel_size=4, pipeline_parallel_size=2))
    assert stages.weights is not None
    assert len(stages.weights.stage_bytes) == 2
    assert stages.budget is not None
    assert stages.pool is not None
    # The fewest blocks of all stages, each with its own bytes per block and its own weights.
    assert stages.layout is not None
    requested = math.ceil(182_642 * 1024**2 * 0.92) - 12 * 10**9
    assert stages.pool.num_blocks == min(
        (requested - held) // size
        for held, size in zip(stages.weights.stage_bytes, stages.layout.stage_bytes_per_block, strict=True)
    )


def test_the_same_eight_gpus_hold_more_in_stages_and_engines_with_their_own_weights() -> None:
    found = {other.flags: other for other in alternatives(plan_deployment(request(tensor_parallel_size=8)))}
    base = plan_deployment(request(tensor_parallel_size=8)).fleet.replica_tokens
    assert base is not None
    for flags in ("-tp 4 -pp 2", "-tp 1 -dp 8 -ep", "-dcp 8"):
        assert (found[flags].tokens or 0) > 2 * base
    # An engine on each GPU holds all of the attention: 88 GB of weights, not 58.
    assert found["-tp 1 -dp 8 -ep"].plan.weights_bytes == 88_163_478_384


def test_a_checkpoint_that_its_config_does_not_make_is_shared_out_evenly_and_says_so() -> None:
    # This config.json names no quantization: it would make twice the bytes of the FP8 checkpoint.
    plan = plan_deployment(request("fp8", tensor_parallel_size=8))
    assert plan.weights_bytes == math.ceil(755_617_140_000 / 8)
    assert plan.weights is not None
    assert "an even share for each GPU: config.json would make" in plan.weights.note
    assert "and the checkpoint has 755.62 GB: one of them is not this model's, or " in plan.weights.doubt
    for flags in ({"pipeline_parallel_size": 2}, {"data_parallel_size": 2}):
        unknown = plan_deployment(request("fp8", tensor_parallel_size=8, **flags))
        assert unknown.outcome is Outcome.UNKNOWN
        assert "is not known: config.json would make" in unknown.reason


def air(weights_bytes: int, **flags: Any) -> DeploymentPlan:
    row = BY_ID["glm45-air-tp4"]
    return plan_deployment(
        PlanRequest(
            model_files=ModelFiles(folder="", config=row["config"]),
            operator=OperatorFacts(flags={**row["flags"], **flags}, gpu="H200", weights_bytes=weights_bytes),
            version="0.33.0",
        )
    )


def test_a_checkpoint_with_copies_in_its_mtp_layer_is_still_known_tensor_by_tensor() -> None:
    # The files of GLM-4.5-Air: its MTP layer has an embedding and an output layer of its own, 1.1% of the whole.
    loaded = air(218_500_000_000)
    assert loaded.weights is not None
    assert loaded.weights.plan is not None
    one = air(220_937_000_000)
    assert one.weights is not None
    assert one.weights.plan is not None
    assert one.weights_bytes == loaded.weights_bytes
    assert one.weights.plan.total_bytes == 220_937_000_000
    held = sum(term.total_bytes for term in one.weights.plan.terms)
    assert one.weights.plan.not_loaded_bytes == 220_937_000_000 - held
    stages = air(220_937_000_000, pipeline_parallel_size=2)
    assert stages.outcome is Outcome.STARTS
    more = air(230_000_000_000)
    assert more.weights is not None
    assert more.weights.plan is None
    assert (
        "config.json would make 218.50 GB of weights, and the checkpoint has 230.00 GB" in more.weights.doubt
    )


def test_weights_that_nobody_said_are_made_from_the_config_and_marked() -> None:
    asked = request(tensor_parallel_size=8)
    plan = plan_deployment(replace(asked, operator=replace(asked.operator, weights_bytes=None)))
    assert plan.weights_bytes == 58_365_186_672
    assert plan.facts.missing == ()
    assert "as config.json makes them" in dict(plan.facts.assumed())["weights_bytes"]


def test_sixteen_bits_have_eight_as_an_alternative() -> None:
    found = others(95_585_000_000, tensor_parallel_size=8, kv_cache_dtype="bfloat16")
    assert found["--kv-cache-dtype fp8"] == 2_003_840


def test_every_other_way_says_what_is_not_modelled() -> None:
    from kvheadroom.capacity.alternatives import TRADES

    assert set(TRADES) == set(Kind)
    assert all("Not modelled:" in text for text in TRADES.values())


def test_flags_are_spelt_as_on_vllms_command_line() -> None:
    flags = {"tensor_parallel_size": 1, "enable_expert_parallel": True, "block_size": 64, "dtype": None}
    assert spelt(flags) == "-tp 1 -ep --block-size 64"


def test_missing_facts_make_a_plan_unknown_with_the_reason() -> None:
    asked = request(tensor_parallel_size=8)
    unknown = plan_deployment(replace(asked, operator=replace(asked.operator, gpu=None)))
    assert unknown.outcome is Outcome.UNKNOWN
    assert unknown.reason


def test_figures_are_the_numbers_of_the_plan_in_the_order_in_which_they_are_made() -> None:
    plan = plan_deployment(request(tensor_parallel_size=8))
    assert plan.pool is not None
    values = {figure.name: figure.value for figure in figures(plan)}
    assert values["gpu_memory_total"] == 182_642 * 1024**2
    assert values["bytes_per_block"] == 3_052_800
    assert values["bytes_per_token"] == 47_700
    assert values["num_blocks"] == plan.pool.num_blocks
    assert values["kv_cache_size_tokens"] == plan.pool.pool_tokens
    assert values["sessions of 262,144 tokens"] == plan.fits[0].sessions
    assert values["fleet_tokens"] == plan.fleet.tokens
    terms = [values[name] for name in ("hbm_total", "outside_utilization", "weights", "overhead")]
    assert sum(term for term in terms if isinstance(term, int)) == values["kv_cache_memory"]
    assert all(figure.how and figure.source for figure in figures(plan))
