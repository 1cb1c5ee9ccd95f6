"""The sum on paper: a public article's tables digit for digit, and the way from there to vLLM."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.article import BridgeStep, SimpleSum, as_the_sum_takes_it, simple_sum
from kvheadroom.capacity.deployment import PlanRequest, plan_deployment
from kvheadroom.capacity.facts import OperatorFacts
from kvheadroom.capacity.model_plan import PlannedRow, ladder, plan_model
from kvheadroom.capacity.stored_model import ModelFiles
from tests.capacity.article_models import request
from tests.capacity.facts_builder import TINY_LLAMA
from tests.capacity.truth import BY_ID

SESSION = 262_144


def row(model: str = "nvfp4", **options: Any) -> PlannedRow:
    return plan_model("m", "", (request(model, **options),), by_sum=True).rows[0]


def summed(planned: PlannedRow) -> SimpleSum:
    assert isinstance(planned.simple, SimpleSum), planned.simple
    return planned.simple


def test_a_token_takes_576_bytes_in_78_layers_and_132_in_21() -> None:
    simple = summed(row(tensor_parallel_size=8))
    assert simple.bytes_per_token == 47_700 == 576 * 78 + 132 * 21
    assert f"{simple.session_bytes(SESSION) / 1e9:.2f}" == "12.50"
    assert f"{simple.session_bytes(1_048_576) / 1e9:.2f}" == "50.02"


@pytest.mark.parametrize(
    ("model", "tp", "dcp", "weights_gb", "kv_gb", "tokens", "sessions", "replicas", "fleet", "starts"),
    [
        ("nvfp4", 4, 1, "116.03", "37.57", 787_653, "3.00", 14, "11.03M", False),
        ("nvfp4", 8, 1, "58.01", "95.59", 2_003_889, "7.64", 7, "14.03M", True),
        ("fp8", 8, 1, "94.45", "59.15", 1_239_997, "4.73", 7, "8.68M", True),
        ("nvfp4", 8, 8, "58.01", "95.59", 16_031_116, "61.15", 7, "112.22M", True),
    ],
)
def test_the_articles_table_comes_out_digit_for_digit(
    model: str,
    tp: int,
    dcp: int,
    weights_gb: str,
    kv_gb: str,
    tokens: int,
    sessions: str,
    replicas: int,
    fleet: str,
    starts: bool,  # noqa: FBT001
) -> None:
    planned = row(model, tensor_parallel_size=tp, decode_context_parallel_size=dcp)
    simple = summed(planned)
    fleet_tokens = planned.fleet_tokens(by_sum=True)
    assert fleet_tokens is not None
    assert (
        f"{simple.weights_per_gpu_bytes / 1e9:.2f}",
        f"{simple.kv_bytes / 1e9:.2f}",
        simple.tokens,
        f"{simple.sessions(SESSION):.2f}",
        planned.plan.fleet.replicas,
        f"{fleet_tokens / 1e6:.2f}M",
        planned.starts(by_sum=True),
    ) == (weights_gb, kv_gb, tokens, sessions, replicas, fleet, starts)


@pytest.mark.parametrize(
    ("options", "sessions_tp4", "sessions_tp8"),
    [
        ({"decode_context_parallel_size": 4}, "12.02", "30.58"),
        ({"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8"}, "2.66", "6.76"),
        ({"attention_backend": "FLASHMLA_SPARSE"}, "2.66", "6.76"),
        ({"overhead_gb": 24}, "2.04", "6.68"),
    ],
)
def test_the_articles_what_ifs_come_out_digit_for_digit(
    options: dict[str, Any], sessions_tp4: str, sessions_tp8: str
) -> None:
    sessions = [summed(row(**options, tensor_parallel_size=tp)).sessions(SESSION) for tp in (4, 8)]
    assert [f"{held:.2f}" for held in sessions] == [sessions_tp4, sessions_tp8]


def test_weights_over_the_budget_are_told_by_how_much() -> None:
    planned = row("fp8", tensor_parallel_size=4)
    simple = summed(planned)
    # 755.617 / 4 - 180 x 0.92
    assert f"{simple.weights_per_gpu_bytes / 1e9:.2f}" == "188.90"
    assert f"{simple.weights_over_budget_bytes / 1e9:.3f}" == "23.304"
    assert (simple.tokens, simple.sessions(SESSION), planned.starts(by_sum=True)) == (None, None, False)
    assert planned.fleet_tokens(by_sum=True) is None


def test_multi_token_prediction_adds_one_cache_layer_and_one_indexer() -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    assert summed(row(tensor_parallel_size=8, speculative_config=mtp)).bytes_per_token == 47_700 + 576 + 132


def test_the_backend_that_vllm_refuses_is_counted_as_with_fp8_and_stays_refused() -> None:
    plan = plan_deployment(request(tensor_parallel_size=8, attention_backend="FLASHMLA_SPARSE"))
    taken = as_the_sum_takes_it(plan)
    assert plan.outcome == "refused"
    assert taken.request.operator.flags["kv_cache_dtype"] == "fp8"
    assert summed(row(tensor_parallel_size=8, attention_backend="FLASHMLA_SPARSE")).bytes_per_token == 53_940


def test_dcp_that_does_not_divide_tp_is_refused_and_has_no_sum() -> None:
    planned = row(tensor_parallel_size=4, decode_context_parallel_size=8)
    assert planned.plan.outcome == "refused"
    assert isinstance(planned.simple, str)
    assert "tensor_parallel_size=4 is not divisible by decode_context_parallel_size=8" in planned.simple


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"pipeline_parallel_size": 2}, "knows no pipeline stages"),
        ({"data_parallel_size": 2}, "knows no data parallelism"),
        ({"kv_cache_memory_bytes": 10**10}, "given by a flag"),
    ],
)
def test_where_the_sum_has_no_answer_it_says_why(flags: dict[str, Any], words: str) -> None:
    simple = simple_sum(plan_deployment(request(tensor_parallel_size=8, **flags)))
    assert isinstance(simple, str)
    assert words in simple


def test_windows_have_no_bytes_per_token_that_is_right() -> None:
    asked = request(tensor_parallel_size=1)
    config = {**TINY_LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    asked = replace(asked, model_files=replace(asked.model_files, config=config))
    simple = simple_sum(plan_deployment(asked))
    assert isinstance(simple, str)
    assert "no number of bytes per token is right" in simple


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 8},
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 8},
    ],
)
def test_the_steps_from_the_sum_to_vllm_add_up_to_the_token(flags: dict[str, Any]) -> None:
    planned = row(**flags)
    simple, pool, layout = summed(planned), planned.plan.pool, planned.plan.layout
    steps = planned.bridge
    assert pool is not None
    assert layout is not None
    assert steps[0].tokens == simple.tokens
    assert steps[0].kv_bytes == round(simple.kv_bytes)
    assert steps[0].tokens + sum(step.change_tokens for step in steps) == steps[-1].tokens
    assert steps[0].kv_bytes + sum(step.change_bytes for step in steps) == steps[-1].kv_bytes
    # The last two are vLLM's own: its pool, and what of it requests can hold.
    assert steps[-2].tokens == pool.pool_tokens
    assert steps[-2].kv_bytes == pool.num_blocks * layout.bytes_per_block
    assert steps[-1].tokens == (pool.num_blocks - 1) * layout.block_tokens
    assert [step.key for step in steps if step.key in ("sum", "memory", "blocks", "null_block")] == [
        "sum", "memory", "blocks", "null_block",
    ]  # fmt: skip


@pytest.mark.parametrize(("tp", "not_loaded", "replicated"), [(4, 104_329, -49_481), (8, 52_164, -57_728)])
def test_weights_that_are_not_loaded_and_those_that_are_copied_are_steps_of_their_own(
    tp: int, not_loaded: int, replicated: int
) -> None:
    steps = {step.key: step for step in row(tensor_parallel_size=tp).bridge}
    # 19.91 GB of multi-token prediction, of which the sum counts 1 / TP; 3.147 GB of which it leaves out 1 - 1 / TP.
    assert steps["not_loaded"].change_bytes == pytest.approx(19.906e9 / tp, rel=1e-4)
    assert steps["replicated"].change_bytes == pytest.approx(-3.146975e9 * (tp - 1) / tp, rel=1e-6)
    assert (steps["not_loaded"].change_tokens, steps["replicated"].change_tokens) == (not_loaded, replicated)
    # The checkpoint has three MLPs of 0.2 GB and less in FP8, which config.json makes in bfloat16.
    assert abs(steps["files"].change_bytes) < 2e8
    assert abs(steps["shapes"].change_bytes) < 1e6


def test_padding_for_kernels_and_what_the_files_hold_are_steps_of_their_own() -> None:
    case = BY_ID["glm46-tp8"]
    asked = PlanRequest(
        model_files=ModelFiles(folder="", config=case["config"]),
        operator=OperatorFacts(flags={"tensor_parallel_size": 8}, gpu="B200"),
    )

    def steps(weights_bytes: int | None) -> dict[str, BridgeStep]:
        operator = replace(asked.operator, weights_bytes=weights_bytes)
        made = plan_model("m", "", (replace(asked, operator=operator),), by_sum=True)
        return {step.key: step for step in made.rows[0].bridge}

    alone = steps(None)
    assert "files" not in alone
    # TRT-LLM's kernels take the 192 columns of a rank as 256: a third more of 160 experts in 89 layers.
    padding = 89 * 160 * 3 * 5120 * (256 - 192) * 2
    assert alone["shapes"].change_bytes == pytest.approx(-padding, rel=0.01)
    assert "kernels' padding" in alone["shapes"].step
    made = plan_deployment(asked).weights
    assert made is not None
    assert made.plan is not None
    more = steps(made.plan.total_bytes + 8 * 10**8)
    assert more["files"].change_bytes == 10**8
    assert more["shapes"].change_bytes == alone["shapes"].change_bytes
    assert "config.json" in more["files"].step


def test_of_an_even_share_there_is_no_step_of_padding() -> None:
    keys = {step.key: step.step for step in row("fp8", tensor_parallel_size=8).bridge}
    assert keys["memory"]
    assert "files" not in keys
    assert keys.get("shapes", "whole bytes only") == "whole bytes only"


def test_the_document_tells_the_steps_as_they_are() -> None:
    text = (Path(__file__).parents[2] / "docs/capacity-model.md").read_text()
    table = text[text.index("| the sum on paper |") : text.index("So 1M starts on four GPUs")]
    told = [
        [cell.strip() for cell in line.split("|")[2:4]] for line in table.splitlines() if line.startswith("|")
    ]
    rows = [row(tensor_parallel_size=tp) for tp in (4, 8)]
    changes = [[f"{step.change_tokens:+,}" for step in planned.bridge[1:]] for planned in rows]
    start = [f"{planned.bridge[0].tokens:,}" for planned in rows]
    pools = [f"{planned.bridge[-2].tokens:,}" for planned in rows]
    assert told == [
        start,
        *map(list, zip(*[one[:-1] for one in changes], strict=True)),
        pools,
        [one[-1] for one in changes],
    ]
    assert [planned.starts(by_sum=True) for planned in rows] == [False, True]
    assert [planned.starts(by_sum=False) for planned in rows] == [True, True]


def test_with_multi_token_prediction_nothing_is_left_out() -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    keys = [step.key for step in row(tensor_parallel_size=8, speculative_config=mtp).bridge]
    assert "replicated" in keys
    assert "not_loaded" not in keys


def test_a_card_of_180_gb_has_191_51_as_cuda_counts() -> None:
    memory = next(step for step in row(tensor_parallel_size=8).bridge if step.key == "memory")
    # ceil(182,642 MiB x 0.92) - 180e9 x 0.92
    assert memory.change_bytes == 176_192_896_369 - 165_600_000_000


def test_memory_that_was_said_is_the_same_on_both_sides() -> None:
    asked = request(tensor_parallel_size=8)
    asked = replace(asked, operator=replace(asked.operator, hbm_bytes=180 * 10**9))
    (planned,) = plan_model("m", "", (asked,), by_sum=True).rows
    assert summed(planned).tokens == 2_003_889
    assert "memory" not in [step.key for step in planned.bridge]


def test_a_smaller_checkpoint_and_fewer_copies_are_told_in_one_ladder() -> None:
    models = tuple(
        plan_model(name, "", tuple(request(name, tensor_parallel_size=tp) for tp in (4, 8)), by_sum=True)
        for name in ("nvfp4", "fp8")
    )
    weights = [model.weights_bytes for model in models]
    assert weights[0] is not None
    assert weights[1] is not None
    assert f"{1 - weights[0] / weights[1]:.1%}" == "38.6%"
    rungs = ladder(models, by_sum=True)
    assert [(rung.model, rung.label, rung.replicas, rung.tokens) for rung in rungs] == [
        ("fp8", "TP 8", 7, 8_679_979),
        ("nvfp4", "TP 4", 14, 11_027_142),
        ("nvfp4", "TP 8", 7, 14_027_223),
    ]
    assert [None if rung.ratio is None else f"{rung.ratio - 1:.1%}" for rung in rungs] == [
        None,
        "27.0%",
        "27.2%",
    ]
