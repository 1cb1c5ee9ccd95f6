"""The weights of each pipeline stage, held to the parameters that vLLM's own model classes create.

How the rows were made stands in docs/capacity-model.md, "Weights on each rank".
"""

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.facts import OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.stored_model import ModelFiles, TensorInventory
from kvheadroom.capacity.weights import DRAFT_MODEL, WeightPlan, plan_weights, target_bytes
from kvheadroom.capacity.weights.contradiction import AnotherCheckpoint
from kvheadroom.capacity.weights.registry import BUILDS
from tests.capacity.facts_builder import facts
from tests.capacity.truth import BY_ID, facts_of

ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "weights.jsonl.gz").read_bytes()).splitlines()
]

# Real pairs of config.json and the `total_size` of the index beside it; the table says which.
CHECKPOINTS: dict[str, Any] = json.loads((Path(__file__).parent / "checkpoints.json").read_text())

# What this version answers, of all rows. Raise the numbers when more is modelled.
ANSWERED = {"exact": 3011, "near": 9, "unknown": 155}
# Bytes of a quantized checkpoint may be off by so much: scales of experts that other ranks hold, padding of kernels.
NEAR = 0.01
LLAMA = "llama31-8b-tp1-h100"
PUBLIC_ROWS = 150
DRAFTED = [number for number, row in enumerate(ROWS) if "draft_bytes" in row]
DRAFTS_ANSWERED = 84
GLM, NEMOTRON = "glm53-nvfp4q-weights-tp4", "nemh-nano30b-tp1"


def case(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its config: rows that the other table has name it by their id."""
    return row if "config" in row else BY_ID[row["id"]]


@cache
def target(number: int) -> tuple[int, ...] | str:
    return target_bytes(facts_of(case(ROWS[number])))


def plan_of(name: str) -> WeightPlan:
    plan = plan_weights(facts_of(BY_ID[name]))
    assert isinstance(plan, WeightPlan), plan
    return plan


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: ROWS[number]["id"])
def test_the_weights_are_those_of_vllms_own_classes_or_unknown(number: int) -> None:
    row, stages = ROWS[number], target(number)
    if isinstance(stages, str):
        assert stages
    elif "quantization_config" in json.dumps(case(row)["config"]):
        assert stages == pytest.approx(row["weight_bytes_rank0"], rel=NEAR)
    else:
        assert stages == tuple(row["weight_bytes_rank0"])


def drafted(row: Mapping[str, Any]) -> WeightPlan | str:
    """Of a draft model with a checkpoint that has neither embedding nor output layer."""
    known = facts_of(case(dict(row)))
    model = known.draft.model
    if model is None:
        return plan_weights(known)
    tensors = TensorInventory(sizes={"fc.weight": None})
    return plan_weights(replace(known, draft=replace(known.draft, model=replace(model, tensors=tensors))))


@pytest.mark.parametrize("number", DRAFTED, ids=lambda number: ROWS[number]["id"])
def test_a_draft_adds_what_vllms_own_classes_add_or_is_unknown(number: int) -> None:
    row = ROWS[number]
    plan = drafted(row)
    if isinstance(plan, str):
        assert plan
        return
    assert plan.draft_bytes == (*(0,) * (len(plan.stage_bytes) - 1), row["draft_bytes"])


def outcome(number: int) -> str:
    row, stages = ROWS[number], target(number)
    if isinstance(stages, str):
        return "unknown"
    return "exact" if stages == tuple(row["weight_bytes_rank0"]) else "near"


def test_as_many_rows_are_answered_as_ever() -> None:
    assert Counter(map(outcome, range(len(ROWS)))) == ANSWERED


def test_the_weights_of_every_row_of_the_public_table_are_known() -> None:
    public = {name for name, row in list(BY_ID.items())[:PUBLIC_ROWS] if not row["expected"].get("refused")}
    assert {ROWS[number]["id"] for number in range(len(ROWS)) if outcome(number) == "exact"} >= public


def test_as_many_drafts_are_answered_as_ever() -> None:
    answered = [isinstance(drafted(ROWS[number]), WeightPlan) for number in DRAFTED]
    assert answered.count(True) == DRAFTS_ANSWERED


def test_every_architecture_whose_weights_are_claimed_stands_in_the_rows() -> None:
    held = {
        case(row)["config"]["architectures"][0]
        for number, row in enumerate(ROWS)
        if not isinstance(target(number), str)
    }
    assert set(BUILDS) - held == set()


def test_the_terms_are_the_whole() -> None:
    for row in ROWS:
        plan = plan_weights(facts_of(case(row)))
        if isinstance(plan, str):
            continue
        by_stage = zip(*(term.stage_bytes for term in plan.terms), strict=True)
        assert tuple(map(sum, by_stage)) == plan.stage_bytes
        made = sum(term.total_bytes for term in plan.terms if term.name != DRAFT_MODEL)
        assert made + plan.not_loaded_bytes == plan.total_bytes
        assert plan.replicated_bytes <= max(plan.stage_bytes)


def test_what_every_rank_of_glm_holds_whole_is_told() -> None:
    plan = plan_of(GLM)
    assert plan.replicated_bytes == 3_146_975_856
    assert plan.stage_bytes == (113_582_936_688,)
    assert {term.name for term in plan.terms if term.replicated} == {"norms", "indexer", "router"}


def test_the_layer_of_multi_token_prediction_is_in_the_checkpoint_and_loaded_only_with_it() -> None:
    without = plan_of(GLM)
    known = facts_of(
        {
            **BY_ID[GLM],
            "flags": {
                **BY_ID[GLM]["flags"],
                "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
            },
        }
    )
    loaded = plan_weights(known)
    assert isinstance(loaded, WeightPlan)
    assert (loaded.not_loaded_bytes, loaded.total_bytes) == (0, without.total_bytes)
    assert without.not_loaded_bytes > 0 == without.draft_bytes[0]
    assert loaded.stage_bytes[0] - without.stage_bytes[0] == loaded.draft_bytes[0] > 0


def test_a_checkpoint_is_as_large_as_its_index_says() -> None:
    # `total_size` of meta-llama/Llama-3.1-8B's index.
    assert plan_of("llama31-8b-tp1-h100").total_bytes == 16_060_522_496


def test_without_a_gpu_only_weights_that_depend_on_it_are_unknown() -> None:
    def on_no_gpu(name: str) -> WeightPlan | str:
        row = BY_ID[name]
        return plan_weights(
            resolve_facts(
                operator=OperatorFacts(flags=row["flags"]),
                answers=ServerAnswers(version=row["vllm_version"]),
                echoed=EchoedFlags(),
                model_files=ModelFiles(folder="", config=row["config"]),
                sizes_weights=False,
            )
        )

    assert on_no_gpu("llama31-8b-tp1-h100") == plan_of("llama31-8b-tp1-h100")
    assert "depend on the GPU" in str(on_no_gpu(NEMOTRON))


def test_a_case_answers_with_the_weights_of_the_target() -> None:
    row = BY_ID["llama31-8b-tp1-h100"]
    assert plan_case(row)["weight_bytes_rank0"] == 16_060_522_496
    divided = plan_case({**row, "flags": {"pipeline_parallel_size": 2}})
    assert sum(divided["weight_bytes_rank0"]) == 16_060_522_496
    assert plan_case({**row, "gpu": "CPU"})["weight_bytes_rank0"] is None


def with_tensors(name: str, sizes: Mapping[str, int | None], problem: str = "") -> WeightPlan | str:
    known = facts_of(BY_ID[name])
    assert known.model_files is not None
    tensors = TensorInventory(sizes=sizes, problem=problem)
    return plan_weights(replace(known, model_files=replace(known.model_files, tensors=tensors)))


def test_headers_that_make_the_size_of_config_json_confirm_it() -> None:
    plan = with_tensors(LLAMA, {"model.embed_tokens.weight": 10**9, "rest": 15_060_522_496, "x.k_scale": 256})
    assert isinstance(plan, WeightPlan)
    assert (plan.basis, plan.total_bytes, plan.not_loaded_bytes) == ("headers", 16_060_522_752, 0)
    assert plan.stage_bytes == plan_of(LLAMA).stage_bytes


def test_headers_of_another_size_leave_the_weights_unknown() -> None:
    said = with_tensors(LLAMA, {"rest": 9_000_000_000})
    assert isinstance(said, AnotherCheckpoint)
    assert said == "config.json would make 16.06 GB of weights to load, and the checkpoint has 9.00 GB"


AIR = "glm45-air-tp4"
AIR_COPIES = 2 * 151_552 * 4096 * 2
"""What GLM-4.5-Air's checkpoint holds beside its weights: an embedding and an output layer in its MTP layer."""


def test_layers_of_multi_token_prediction_may_hold_copies_of_the_vocabulary() -> None:
    assert plan_of(AIR).spare_bytes == AIR_COPIES
    assert plan_of(LLAMA).spare_bytes == 0
    assert plan_of(GLM).spare_bytes > 0
    names = with_tensors(GLM, {"model.layers.77.mlp.w": None})
    assert isinstance(names, WeightPlan)
    assert names.spare_bytes == 0


def test_layers_of_multi_token_prediction_that_are_not_modelled_have_the_room_of_a_layer() -> None:
    row = BY_ID[LLAMA]
    known = facts_of(row)
    assert known.model is not None
    stack = replace(known.model.stack, mtp=known.model.stack.layers[:1])
    plan = plan_weights(replace(known, model=replace(known.model, stack=stack)))
    assert isinstance(plan, WeightPlan)
    layer = (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) * 2
    assert plan.spare_bytes == layer + 2 * (2 * 128_256 * 4096 + 2 * 4096 * 4096)


def test_of_files_that_lie_nothing_is_taken() -> None:
    said = with_tensors(LLAMA, {"rest": 9_000_000_000}, "a.safetensors: its header is no JSON")
    assert said == plan_of(LLAMA)


@pytest.mark.parametrize("name", ["model.layers.78.mlp.w", "mtp.layers.0.w", "model.mtp.w"])
def test_headers_tell_the_layer_of_multi_token_prediction(name: str) -> None:
    expected = plan_of(GLM)
    loaded = expected.total_bytes - expected.not_loaded_bytes
    plan = with_tensors(GLM, {"model.layers.77.mlp.w": loaded, name: 20_000_000_000})
    assert isinstance(plan, WeightPlan)
    assert plan.not_loaded_bytes == 20_000_000_000
    assert plan.total_bytes == loaded + 20_000_000_000


def test_an_output_layer_that_is_tied_is_not_loaded_from_its_copy() -> None:
    row = BY_ID[LLAMA]
    tied = {**row, "config": {**row["config"], "tie_word_embeddings": True}}
    known = facts_of(tied)
    assert known.model_files is not None
    copy = 128256 * 4096 * 2
    tensors = TensorInventory(sizes={"rest": 16_060_522_496 - copy, "lm_head.weight": copy})
    plan = plan_weights(replace(known, model_files=replace(known.model_files, tensors=tensors)))
    assert isinstance(plan, WeightPlan)
    assert plan.not_loaded_bytes == copy
    assert plan.stage_bytes == (16_060_522_496 - copy,)


def test_an_index_tells_by_its_names_whether_there_is_multi_token_prediction() -> None:
    without = with_tensors(GLM, {"model.layers.77.mlp.w": None})
    beside = with_tensors(GLM, {"model.layers.77.mlp.w": None, "model.layers.78.mlp.w": None})
    assert isinstance(without, WeightPlan)
    assert isinstance(beside, WeightPlan)
    assert (without.basis, without.not_loaded_bytes) == ("index", 0)
    assert beside.not_loaded_bytes == plan_of(GLM).not_loaded_bytes > 0
    assert beside.total_bytes - beside.not_loaded_bytes == without.total_bytes


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_real_checkpoints_are_as_large_as_config_json_makes_them(name: str) -> None:
    made = plan_weights(facts(config=CHECKPOINTS[name]["config"], gpu="H100"))
    assert isinstance(made, WeightPlan), made
    # The one that is larger stores a buffer of 257 positions in int64.
    stored = 257 * 8 if name == "deepseek-ocr" else 0
    assert made.total_bytes + stored == CHECKPOINTS[name]["total_size"]
