"""docs/capacity-model.md names the code that holds its rules, and counts what is checked."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from kvheadroom.capacity.families.registry import KNOWN_ARCHITECTURES
from tests.capacity.test_truth import ANSWERED
from tests.capacity.truth import ROWS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/capacity-model.md").read_text()
README = (ROOT / "README.md").read_text()


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
    assert f"{len(KNOWN_ARCHITECTURES)} model architectures" in README


def test_the_rows_are_counted_as_they_are() -> None:
    assert f"holds {len(ROWS):,} rows" in TEXT
    assert f"against {len(ROWS):,} plans" in README
    for form, words in (
        ("exact", "are planned"),
        ("refused", "are refused"),
        ("unknown", "are unknown to us"),
    ):
        assert f"{ANSWERED[form]:,} {words}" in TEXT
