"""The overhead before anything is measured: its parts by vLLM's rules, and held to what people's logs printed."""

from dataclasses import fields
from typing import Any

import pytest

from kvheadroom.capacity.facts import EngineFacts, Origin
from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.memory import PoolBudget, plan_budget
from kvheadroom.capacity.overhead import FITTED, captured_sizes, estimate_overhead
from kvheadroom.capacity.overhead_parts import OverheadEstimate, OverheadPart
from tests.accuracy.overheads import LINES, fit, judged, median_error, share_within, starts
from tests.capacity.facts_builder import TINY_LLAMA, facts
from tests.capacity.truth import BY_ID

LLAMA = {**TINY_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128_256}
H100 = {"gpu": "H100", "weights_bytes": 10**9}


def estimate(**changes: Any) -> OverheadEstimate:
    found = estimate_overhead(of(**changes))
    assert isinstance(found, OverheadEstimate), found
    return found


def of(
    *,
    config: dict[str, Any] | None = None,
    version: str = "0.19.0",
    flags: dict[str, Any] | None = None,
    **rest: Any,
) -> EngineFacts:
    return facts(config=config or LLAMA, version=version, flags=flags, **{**H100, **rest})


def part(which: OverheadPart, **changes: Any) -> int:
    return estimate(**changes).of(which)


def test_the_median_error_on_public_ledgers_is_far_below_two_percent_of_the_gpu() -> None:
    lines = judged()
    assert len(lines) >= 100
    assert median_error(lambda one: one.error_ratio, lines) < 0.005
    assert share_within(0.02, lines) > 0.75
    # The guess that it replaces, on the same lines.
    assert median_error(lambda one: one.flat_error_ratio, lines) > 0.1


def test_no_single_source_carries_it() -> None:
    others = [one for one in judged() if "planner PR" not in str(one.start.line["source"])]
    assert len(others) >= 50
    assert median_error(lambda one: one.error_ratio, others) < 0.02


def test_the_constants_are_those_that_all_lines_together_give() -> None:
    fitted = fit(starts())
    for field in fields(FITTED):
        ours, theirs = getattr(FITTED, field.name), getattr(fitted, field.name)
        assert ours == pytest.approx(
            theirs, rel=0.05, abs=0.02 * GIB if field.name.endswith("_bytes") and ours > 1e6 else 0.2
        ), field.name


def test_eight_of_ten_starts_lie_between_the_bounds() -> None:
    inside = [
        one.estimate.low_bytes <= one.start.measured_bytes <= one.estimate.high_bytes for one in judged()
    ]
    assert 0.75 <= sum(inside) / len(inside) <= 0.9


def test_every_line_is_judged_or_left_out_with_a_reason() -> None:
    assert all(line.get("left_out", "?") for line in LINES)
    assert len(starts()) == sum("left_out" not in line for line in LINES)


def test_the_sampler_of_1024_requests_outweighs_a_step_of_8192_tokens() -> None:
    assert part(OverheadPart.ACTIVATIONS) == round(1024 * 128_256 * FITTED.sampling_bytes)
    # Before a kernel did it, all logits were sorted.
    assert part(OverheadPart.ACTIVATIONS, version="0.16.0") == round(1024 * 128_256 * FITTED.sorting_bytes)


def test_with_few_requests_the_layers_of_a_step_outweigh_the_sampler() -> None:
    flags = {"max_num_seqs": 8}
    # 8,192 tokens x 2 B x (3 x 14,336 of the MLP + 4 x 4,096)
    assert part(OverheadPart.ACTIVATIONS, flags=flags) == 8192 * 2 * (3 * 14_336 + 4 * 4_096)
    shared = {**flags, "tensor_parallel_size": 2}
    assert part(OverheadPart.ACTIVATIONS, flags=shared) == 8192 * 2 * (3 * 14_336 // 2 + 4 * 4_096)
    more = {**flags, "max_num_batched_tokens": 16_384}
    assert part(OverheadPart.ACTIVATIONS, flags=more) == 2 * part(OverheadPart.ACTIVATIONS, flags=flags)


def test_it_does_not_grow_with_the_context_where_nothing_of_it_is_kept() -> None:
    # Llama-3.1-8B on 24 GB: 20K fits, 29K does not, 35K does: a step of the first engine holds a prompt of up to 32,768 tokens.
    sizes = [
        part(OverheadPart.ACTIVATIONS, version="0.6.4", max_model_len=length, gpu="RTX3090")
        for length in (20_000, 29_000, 35_000)
    ]
    assert sizes[1] > sizes[0] > sizes[2]
    assert part(OverheadPart.ACTIVATIONS, max_model_len=2048) == part(
        OverheadPart.ACTIVATIONS, max_model_len=32_768
    )


def test_the_sparse_indexer_gathers_the_keys_of_forty_longest_requests() -> None:
    glm = BY_ID["glm53-nvfp4-tp4"]["config"]
    sized = {
        "gpu": "B200",
        "weights_bytes": 10**9,
        "version": "0.33.0",
        "flags": {"tensor_parallel_size": 4, "max_num_batched_tokens": 2048},
    }
    size = estimate(config=glm, max_model_len=262_144, **sized).of(OverheadPart.WORKSPACES)
    assert size == 40 * 262_144 * 132  # 1,384,120,320 B
    # A short context leaves the experts' workspace: 2 B x 2,048 tokens x 8 experts x (6,144 + 2,048 / 4).
    size = estimate(config=glm, max_model_len=8192, **sized).of(OverheadPart.WORKSPACES)
    assert size == 2 * 2048 * 8 * (6144 + 512)


def test_experts_keep_a_workspace_for_every_token_and_choice() -> None:
    qwen = BY_ID["qwen3-30b-a3b-tp8"]["config"]
    # 2 B x 8,192 tokens x 8 experts x (2,048 hidden + 768 inner)
    assert part(OverheadPart.WORKSPACES, config=qwen) == 2 * 8192 * 8 * (2048 + 768)
    # Ranks share each expert, 768 / 4, unless experts stay whole.
    shared = {"tensor_parallel_size": 4}
    assert part(OverheadPart.WORKSPACES, config=qwen, flags=shared) == 2 * 8192 * 8 * (2048 + 192)
    whole = {**shared, "enable_expert_parallel": True}
    assert part(OverheadPart.WORKSPACES, config=qwen, flags=whole) == 2 * 8192 * 8 * (2048 + 768)
    # Before 0.13 the experts' workspace ended with the layer.
    assert part(OverheadPart.WORKSPACES, config=qwen, version="0.12.0") == 0
    # Data-parallel engines run each other's tokens, up to 32,768 at once.
    together = {"data_parallel_size": 8, "enable_expert_parallel": True}
    assert part(OverheadPart.WORKSPACES, config=qwen, flags=together) == 2 * 32_768 * 8 * (2048 + 768)


@pytest.mark.parametrize(
    ("version", "config", "subtracted"),
    [
        ("0.19.1", LLAMA, False),
        ("0.20.0", LLAMA, True),
        ("0.23.0", LLAMA, False),  # by then the second model runner serves Llama, and makes no estimate
        ("0.28.0", LLAMA, False),
        ("0.29.0", LLAMA, True),
        ("0.28.0", BY_ID["qwen3-30b-a3b-tp8"]["config"], True),
    ],
)
def test_cuda_graphs_count_where_the_release_takes_them_off_before_it_sizes_the_pool(
    version: str,
    config: dict[str, Any],
    subtracted: bool,  # noqa: FBT001  a row of the table
) -> None:
    assert (part(OverheadPart.CUDA_GRAPHS, version=version, config=config) > 0) is subtracted
    assert part(OverheadPart.CUDA_GRAPHS, version=version, config=config, flags={"enforce_eager": True}) == 0


@pytest.mark.parametrize(("tokens", "sizes"), [(1, 2), (8, 5), (32, 11), (128, 35), (256, 51), (1024, 51)])
def test_sizes_of_cuda_graphs_are_counted_as_vllm_lists_them(tokens: int, sizes: int) -> None:
    assert captured_sizes(tokens) == sizes


def test_several_gpus_take_more_where_nvlink_joins_them() -> None:
    shared = {"tensor_parallel_size": 2}
    alone = part(OverheadPart.CONTEXT)
    assert part(OverheadPart.CONTEXT, flags=shared) == alone + round(FITTED.linked_bytes)
    assert part(OverheadPart.CONTEXT, flags=shared, gpu="RTX3090") == alone + round(FITTED.unlinked_bytes)
    # A card that the catalogue lacks goes by its memory.
    assert part(OverheadPart.CONTEXT, flags=shared, gpu=None, hbm_bytes=80 * GIB) == alone + round(
        FITTED.linked_bytes
    )


def test_an_encoder_that_takes_videos_has_a_dummy_step_of_its_own() -> None:
    videos = {**LLAMA, "video_token_id": 7}
    flags = {"max_num_seqs": 8}
    step = part(OverheadPart.ACTIVATIONS, flags=flags)
    assert part(OverheadPart.ENCODER, flags=flags) == 0
    assert part(OverheadPart.ENCODER, flags=flags, config=videos) == round(FITTED.encoder_bytes) - step


def test_a_prediction_takes_the_estimate_and_says_so() -> None:
    found = of()
    assert found.overhead_bytes.value == estimate().total_bytes
    assert found.overhead_bytes.origin is Origin.ESTIMATED
    note = dict(found.assumed())["overhead_bytes"]
    assert note == "2.34 GB (`overhead_gb`; estimated, 0.0 to 3.4 in eight of ten public starts)"
    budget = plan_budget(found)
    assert isinstance(budget, PoolBudget)
    assert -found.overhead_bytes.value in [term.bytes for term in budget.terms]
    assert budget.overhead == found.overhead_estimate == estimate()


def test_what_the_operator_says_wins_and_a_model_without_sizes_keeps_the_guess() -> None:
    said = of(overhead_bytes=7)
    assert said.overhead_bytes.value == 7
    # What the shapes would make is not shown beside it.
    assert said.overhead_estimate is None
    without = {key: value for key, value in TINY_LLAMA.items() if key != "hidden_size"}
    guess = of(config=without).overhead_bytes
    assert (guess.value, guess.origin) == (12 * 10**9, Origin.ASSUMED)
    assert estimate_overhead(of(config=without)) == "the model's sizes are not known"
    assert estimate_overhead(of(gpu="cpu")) == "a CPU has no such overhead"
