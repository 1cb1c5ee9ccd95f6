"""Every plan of vLLM's own code: equal to the block, refused as vLLM refuses, or honestly unknown; never wrong."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.model_geometry import KNOWN_ARCHITECTURES

ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in gzip.decompress((Path(__file__).parent / "truth.jsonl.gz").read_bytes()).splitlines()
]
FIGURES = (
    "kv_cache_dtype",
    "block_size",
    "bytes_per_block",
    "num_blocks",
    "kv_cache_size_tokens",
    "max_concurrency",
    "needed_bytes_for_max_model_len",
    "boots",
    "estimated_max_model_len",
    "at_len",
)
# The generator of the rows estimated the length from the profiled bytes; vLLM does it from the overridden
# block count, as the text of its own refusal to start says (`boot_error` of the first).
ESTIMATED_BY_OTHER_MEANS = {"l8-ngb500-noboot": 7984, "glm53-b200-ngb20000": 1_048_576}

# What this version answers, of all rows. Raise the numbers when more is modelled.
ANSWERED = {"exact": 183, "refused": 41, "unknown": 412}


def answer(row: dict[str, Any]) -> dict[str, Any]:
    return plan_case({**row, "lengths": [int(length) for length in row["expected"].get("at_len", {})]})


def outcome(row: dict[str, Any]) -> str:
    got = answer(row)
    return "unknown" if "unknown" in got else "refused" if "refused" in got else "exact"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_an_answer_is_vllms_own_or_unknown(row: dict[str, Any]) -> None:
    got, expected = answer(row), row["expected"]
    assert got["id"] == row["id"]
    if "unknown" in got:
        assert set(got) == {"id", "unknown"}
        assert got["unknown"]
        return
    assert got.get("refused", False) == expected.get("refused", False), got
    if "refused" in got:
        assert set(got) == {"id", "refused", "error"}
        return
    assert set(got) == {"id", *FIGURES, "weight_bytes_rank0"}
    expected = {
        **expected,
        "estimated_max_model_len": ESTIMATED_BY_OTHER_MEANS.get(
            row["id"], expected["estimated_max_model_len"]
        ),
    }
    assert {name: got[name] for name in FIGURES} == {name: expected[name] for name in FIGURES}


def test_vllms_own_message_estimates_from_the_overridden_block_count() -> None:
    (row,) = (row for row in ROWS if row["id"] == "l8-ngb500-noboot")
    assert "the estimated maximum model length is 7984" in row["expected"]["boot_error"]


def test_as_many_rows_are_answered_as_ever() -> None:
    assert Counter(outcome(row) for row in ROWS) == ANSWERED


def test_every_architecture_that_is_claimed_stands_in_the_rows() -> None:
    held = {row["config"]["architectures"][0] for row in ROWS if outcome(row) == "exact"}
    assert held == KNOWN_ARCHITECTURES
