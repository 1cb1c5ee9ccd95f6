"""What was fetched of a Prometheus, kept in a folder that others may have written to."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.history_folder import HistoryFolder, Plan, Wanted
from kvheadroom.sources.prometheus_api import RangeSeries

WANTED = Wanted(
    url="http://p:9090", select="", every_seconds=15.0, range_seconds=3600.0, rule_metrics=("up", "x")
)
PLAN = Plan(
    wanted=WANTED,
    start=1_800_000_000.0,
    origin=0,
    servers=(("vllm", "gpu-7:8000"), ("vllm", "gpu-8:8000")),
    part_ticks=100,
)
ANSWERS = {"running": [RangeSeries({"job": "v"}, {0: "3", 99: "NaN"})], "preemptions": []}


@pytest.fixture
def folder(tmp_path: Path) -> HistoryFolder:
    kept = HistoryFolder(tmp_path)
    kept.keep_plan(PLAN)
    kept.keep_part(2, ANSWERS)
    return kept


def test_what_was_kept_is_there_again(folder: HistoryFolder) -> None:
    assert folder.plan(WANTED) == PLAN
    assert folder.part(2, ANSWERS) == ANSWERS
    assert folder.part(1, ANSWERS) is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        [1],
        {"running": []},
        {"running": [], "preemptions": [], "more": []},
        {"running": [], "preemptions": [[["job"], {"0": "1"}]]},
        {"running": [], "preemptions": [[{"job": 1}, {"0": "1"}]]},
        {"running": [], "preemptions": [[{"job": "v"}, {"0": 1}]]},
        {"running": [], "preemptions": [[{"job": "v"}, {"0": "1\nvllm:num_preemptions_total 9"}]]},
        {"running": [], "preemptions": [[{"job": "v"}, {"first": "1"}]]},
        {"running": [], "preemptions": [[{"job": "v"}]]},
        {"running": [], "preemptions": None},
    ],
    ids=str,
)
def test_a_part_that_was_not_written_here_is_not_taken(
    content: object, folder: HistoryFolder, tmp_path: Path
) -> None:
    [part] = tmp_path.glob("part-*")
    part.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert folder.part(2, ANSWERS) is None
    assert not part.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"servers": [["gpu-7:8000"]]},
        {"servers": [[]]},
        {"servers": 7},
        {"origin": 7},
        {"origin": -1},
        {"origin": "vllm"},
        {"start": "now"},
        {"start": float("nan")},
        {"start": 1e300},
        {"part_ticks": 0},
        {"part_ticks": 1.5},
        {"part_ticks": float("inf")},
        {"more": 1},
        {"wanted": None},
    ],
    ids=str,
)
def test_a_plan_that_was_not_written_here_is_refused(
    change: dict[str, Any], folder: HistoryFolder, tmp_path: Path
) -> None:
    plan = tmp_path / "history.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    with pytest.raises(OperatorError, match=r"--state: .*history\.json is damaged; give another folder"):
        folder.plan(WANTED)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe{", b"null", b""])
def test_a_plan_that_cannot_be_read_is_refused(content: bytes, folder: HistoryFolder, tmp_path: Path) -> None:
    (tmp_path / "history.json").write_bytes(content)
    with pytest.raises(OperatorError, match=r"history\.json is damaged; give another folder"):
        folder.plan(WANTED)


def test_a_folder_in_place_of_the_plan_is_refused(folder: HistoryFolder, tmp_path: Path) -> None:
    (tmp_path / "history.json").unlink()
    (tmp_path / "history.json").mkdir()
    with pytest.raises(OperatorError, match=r"history\.json is damaged; give another folder"):
        folder.plan(WANTED)
