"""What vLLM printed on people's own servers, against the prediction from the same bytes."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from docs.accuracy import PAGE, accuracy_page
from tests.accuracy import startup_logs
from tests.accuracy.startup_logs import (
    CASES,
    GIB,
    HALF_OF_LAST_DIGIT,
    LARGEST_RANK_GAP,
    LEFT_OUT,
    LOGS,
    compare,
    config_of,
)

BAR = [line for line, log in enumerate(LOGS, 1) if log["bar"]]
# All lines with a case. A line that changes its verdict is a finding: look for the release that changed.
VERDICTS = {"inside": 22, "explained": 10, "outside": 1, "not predicted": 1}


def test_every_line_is_compared_or_left_out_with_a_reason() -> None:
    assert sorted([*CASES, *LEFT_OUT]) == list(range(1, len(LOGS) + 1))
    assert all(LEFT_OUT.values())
    assert set(BAR) <= set(CASES)


@pytest.mark.parametrize("line", BAR)
def test_a_line_of_a_public_model_comes_out_within_its_rounding(line: int) -> None:
    found = compare(line)
    assert found.inside, (found.printed, found.predicted, found.unknown)
    # Nothing that the log does not show was added.
    assert "if" not in found.case


def with_another_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": with_another_layer(config["text_config"])}
    return {**config, "num_hidden_layers": config["num_hidden_layers"] + 1}


@pytest.mark.parametrize("line", BAR)
def test_a_model_with_one_layer_more_would_not_come_out(line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_logs, "config_of", lambda model: with_another_layer(config_of(model)))
    assert compare(line).verdict == "outside"


def test_the_other_lines_come_out_as_the_page_counts_them() -> None:
    assert Counter(compare(line).verdict for line in CASES) == VERDICTS


@pytest.mark.parametrize("line", [line for line, case in CASES.items() if "if" in case])
def test_a_line_is_explained_only_where_it_would_not_come_out_by_itself(line: int) -> None:
    found = compare(line)
    assert not found.inside
    assert found.explained
    assert found.case["because"]


@pytest.mark.parametrize("line", [line for line, case in CASES.items() if "slowest_rank" in case])
def test_the_slowest_rank_explains_only_what_fewer_bytes_give(line: int) -> None:
    found = compare(line)
    assert line not in BAR
    assert found.slowest_rank_bytes is not None
    least = found.log["available_kv_gib"] * GIB - HALF_OF_LAST_DIGIT
    assert least * (1 - LARGEST_RANK_GAP) < found.slowest_rank_bytes < least


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == accuracy_page()
