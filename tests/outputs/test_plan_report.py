"""The planner's text and JSON for models of every kind."""

import json
import random
from typing import Any

import pytest

from kvheadroom.capacity.cases import needs_remote_code
from kvheadroom.capacity.deployment import Outcome, PlanRequest
from kvheadroom.capacity.facts import AUTO_LENGTH, OperatorFacts
from kvheadroom.capacity.gpu_catalogue import catalogue_name
from kvheadroom.capacity.model_plan import ModelPlan, plan_model
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.outputs.plan_json import plan_json
from kvheadroom.outputs.plan_report import plan_report
from tests.capacity.article_models import request as article_request
from tests.capacity.truth import BY_ID, ROWS, is_refused
from tests.conftest import Golden

SAMPLE = 60


def planned(row: dict[str, Any], chance: random.Random, *, by_sum: bool) -> ModelPlan:
    flags = {name: value for name, value in row["flags"].items() if value is not None}
    if flags.get("max_model_len") == "auto":
        flags["max_model_len"] = AUTO_LENGTH
    if chance.random() < 0.4:
        flags["kv_cache_memory_bytes"] = chance.randrange(1, 10**11)
    request = PlanRequest(
        model_files=ModelFiles(folder="", config=row["config"]),
        operator=OperatorFacts(
            flags=flags,
            gpu=None if row["gpu"] is None else catalogue_name(row["gpu"]),
            weights_bytes=chance.choice([None, chance.randrange(1, 10**12)]),
        ),
        version=row["vllm_version"],
        gpus=chance.choice([None, 1, 56]),
        session_tokens=chance.choice([(), (1,), (8192, 10**6)]),
    )
    return plan_model("a-model", "a folder", (request,), by_sum=by_sum)


def test_every_kind_of_model_is_told_within_100_columns_and_as_json(seeded: random.Random) -> None:
    # The command line has neither KV connectors nor backends of the prefill: what is wrong with one is found by the reader of cases.
    rows = [row for row in ROWS if not {"kv_transfer_config", "kda_prefill_backend"} & row["flags"].keys()]
    for row in seeded.sample(rows, SAMPLE):
        for by_sum in (False, True):
            model = planned(row, seeded, by_sum=by_sum)
            lines = list(plan_report([model], by_sum=by_sum, explain=True))
            assert max(map(len, lines)) <= 100, row["id"]
            assert lines[0].startswith("TP "), row["id"]
            document = json.loads(plan_json([model], by_sum=by_sum))
            (told,) = document["models"][0]["plans"]
            assert told["outcome"] == str(model.rows[0].plan.outcome)
            if needs_remote_code(row["config"]):
                assert any("careful: its configuration is" in line for line in lines)
            elif is_refused(row):
                assert model.rows[0].plan.outcome in (Outcome.REFUSED, Outcome.NO_ROOM, Outcome.UNKNOWN), row[
                    "id"
                ]


@pytest.mark.parametrize("row", ["b6-fit-mamba", "b8-fit-fmamba", "b8-fit-mamba2"])
def test_a_length_to_be_fitted_is_refused_where_the_model_has_none(row: str) -> None:
    assert is_refused(BY_ID[row])
    model = planned(BY_ID[row], random.Random(1), by_sum=False)
    assert model.rows[0].plan.outcome is Outcome.REFUSED
    assert (
        model.rows[0].plan.reason
        == "max_model_len=-1 needs a longest context in config.json, and there is none"
    )


def test_figures_of_many_stages_stand_within_100_columns() -> None:
    request = PlanRequest(
        model_files=ModelFiles(folder="", config=BY_ID["llama31-8b-tp1-h100"]["config"]),
        operator=OperatorFacts(flags={"pipeline_parallel_size": 32}, gpu="H100"),
    )
    model = plan_model("a-model", "a folder", (request,), by_sum=False)
    lines = list(plan_report([model], by_sum=False, explain=True))
    assert max(map(len, lines)) <= 100
    told = " ".join(" ".join(lines).split())
    embedding = 128_256 * 4096 * 2
    stages = [f"stage 1: {embedding:,} B", *(f"stage {stage}: 0 B" for stage in range(2, 33))]
    assert f"weights of embedding {', '.join(stages)} " in told


def test_the_articles_comparison_reads_as_it_is_meant_to(golden: Golden) -> None:
    models = [
        plan_model(
            f"glm-5.3-{name}",
            "a folder",
            tuple(article_request(name, tensor_parallel_size=tp) for tp in (4, 8)),
            by_sum=True,
        )
        for name in ("nvfp4", "fp8")
    ]
    golden.check("plan_article.txt", "\n".join(plan_report(models, by_sum=True, explain=False)) + "\n")
