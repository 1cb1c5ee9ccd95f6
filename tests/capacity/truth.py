"""The rows of vLLM's own planning functions."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvheadroom.capacity.facts import EngineFacts, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpu_catalogue import catalogue_name
from kvheadroom.capacity.kv_cache import KvLayout, plan_layout
from kvheadroom.capacity.readings import EchoedFlags
from kvheadroom.capacity.stored_model import ModelFiles

ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "truth.jsonl.gz").read_bytes()).splitlines()
]
BY_ID = {row["id"]: row for row in ROWS}


def is_refused(row: Mapping[str, Any]) -> bool:
    """Whether vLLM itself would not start."""
    return bool(row["expected"].get("refused"))


def facts_of(case: Mapping[str, Any]) -> EngineFacts:
    """The facts of one row, or of one made from it; `--max-model-len auto` counts as not said."""
    flags = {name: value for name, value in case["flags"].items() if value not in (-1, "auto", None)}
    return resolve_facts(
        operator=OperatorFacts(flags=flags, gpu=None if case["gpu"] is None else catalogue_name(case["gpu"])),
        answers=ServerAnswers(version=case["vllm_version"]),
        echoed=EchoedFlags(),
        model_files=ModelFiles(folder="", config=case["config"]),
        sizes_weights=False,
    )


def layout_of(case: Mapping[str, Any]) -> KvLayout:
    """The layout of one row that vLLM plans."""
    layout = plan_layout(facts_of(case))
    assert isinstance(layout, KvLayout), layout
    return layout
