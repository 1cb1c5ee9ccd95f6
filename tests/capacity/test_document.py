"""docs/capacity-model.md names the code that holds its rules, and counts what is checked."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.cases import plan_case
from kvheadroom.capacity.families.registry import KNOWN_ARCHITECTURES
from tests.capacity.test_truth import ANSWERED
from tests.capacity.truth import BY_ID, ROWS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/capacity-model.md").read_text()
PLANNING = (ROOT / "docs/planning.md").read_text()


def named() -> Iterator[tuple[str, str]]:
    """(module, name in it) of every `module.function` that is one of the core's."""
    rooms = {path.stem: path for path in (ROOT / "exporter/kvheadroom/capacity").rglob("*.py")}
    for module, name in re.findall(r"`(?:families/)?([a-z_0-9]+)\.([A-Za-z_]\w*)[\w.]*`", TEXT):
        if module in rooms and name != "py":
            place = "families." if rooms[module].parent.name == "families" else ""
            yield place + module, name


def test_every_function_that_the_document_names_is_there() -> None:
    names = set(named())
    assert len(names) > 30
    gone = [
        f"{module}.{name}"
        for module, name in names
        if not hasattr(importlib.import_module(f"kvheadroom.capacity.{module}"), name)
    ]
    assert gone == []


def test_every_architecture_is_listed_and_no_other() -> None:
    listed = re.findall(
        r"\b\w+(?:For\w+|Model|ChatModel|LMHeadModel)\b", TEXT[TEXT.index("## Known architectures") :]
    )
    drafts = set(listed) - KNOWN_ARCHITECTURES
    assert set(listed) - drafts == KNOWN_ARCHITECTURES
    assert all("agle" in name for name in drafts)
    assert f"{len(KNOWN_ARCHITECTURES)} model architectures" in PLANNING


def test_the_rows_are_counted_as_they_are() -> None:
    assert f"holds {len(ROWS):,} rows" in TEXT
    assert f"against {len(ROWS):,} plans" in PLANNING
    for form, words in (
        ("exact", "are planned"),
        ("refused", "are refused"),
        ("unknown", "are unknown to us"),
    ):
        assert f"{ANSWERED[form]:,} {words}" in TEXT


def flash(**flags: Any) -> dict[str, Any]:
    """GLM-5.3-Flash on H200 with three drafted tokens, as the document plans it."""
    row = BY_ID["glm53flash-h200-tp2-kvauto-mtp3"]
    case = {**row, "flags": {**row["flags"], **flags}, "available_bytes": 33_560_000_000}
    return plan_case({**case, "lengths": [8192, 262144, 1048576]})


@pytest.mark.parametrize(
    ("flags", "tokens", "blocks"),
    [
        ({}, 2_534_242, [23, 133, 475]),
        ({"kv_cache_dtype": "fp8"}, 4_722_720, [21, 78, 254]),
        ({"kv_cache_dtype": "fp8", "enable_prefix_caching": False}, 4_836_979, [15, 72, 248]),
    ],
)
def test_the_figures_of_glm_53_flash_are_the_cores(
    flags: dict[str, Any], tokens: int, blocks: list[int]
) -> None:
    answer = flash(**flags)
    assert answer["kv_cache_size_tokens"] == tokens
    assert [at["blocks_per_request"] for at in answer["at_len"].values()] == blocks
    section = TEXT[TEXT.index("## Example: GLM-5.3-Flash") : TEXT.index("## Short examples")]
    assert f"{tokens:,}" in section
    per_token = blocks[2] * answer["bytes_per_block"] * 2 / 1_048_576
    assert flags != {"kv_cache_dtype": "fp8"} or f"{per_token / 1000:.1f} KB" in section
