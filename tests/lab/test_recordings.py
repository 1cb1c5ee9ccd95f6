"""Recordings: any instant comes back exactly, and what is no recording is refused by name."""

import gzip
import json
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.recordings import RecordingError, read_recording
from kvheadroom.sources.vllm_metrics import parse_page

SHIPPED = Path(__file__).parents[2] / "exporter" / "kvheadroom" / "recordings" / "chat.jsonl.gz"


def write(path: Path, *entries: object) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)
    return path


def test_an_instant_is_the_whole_page_with_its_changes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.gz",
        {"origin": {"vllm_version": "9"}},
        {"t": 100.0, "text": "# HELP a A\na 1\nb 1\n"},
        {"t": 101.5, "d": {"b": "2", "c": "3"}},
        {"t": 103.0, "text": "a 7\nb 7\n"},
    )
    recording = read_recording(path)
    assert recording.origin == {"vllm_version": "9"}
    assert recording.duration_seconds == 3.0
    assert recording.page_at(0.0) == recording.page_at(1.4) == "# HELP a A\na 1\nb 1\n"
    assert recording.page_at(1.5) == "# HELP a A\na 1\nb 2\nc 3\n"
    assert recording.page_at(99.0) == "a 7\nb 7\n"


@pytest.mark.parametrize(
    "entries",
    [[], [{"t": 1.0, "d": {}}], [{"text": "a 1"}], [[1]], [{"t": 2, "text": ""}, {"t": 1, "d": {}}]],
)
def test_what_is_no_recording_is_refused_by_name(tmp_path: Path, entries: list[object]) -> None:
    with pytest.raises(RecordingError, match=r"r\.gz"):
        read_recording(write(tmp_path / "r.gz", *entries))


def test_a_file_that_is_no_gzip_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("{}")
    for name in ("plain", "absent"):
        with pytest.raises(RecordingError, match=name):
            read_recording(tmp_path / name)


def test_the_shipped_recording_tells_the_story_it_is_shipped_for() -> None:
    recording = read_recording(SHIPPED)
    assert SHIPPED.stat().st_size < 200_000
    assert recording.origin["vllm_version"] == "0.32.0"
    usage, preemptions, waiting = [], [], []
    for offset in recording.offsets:
        page = parse_page(recording.page_at(offset).encode())
        assert isinstance(page, VllmPage)
        assert page.problems == ()
        (engine,) = page.engines
        assert (engine.num_blocks, engine.pool_tokens) == (384, 12288)
        usage.append(engine.kv_usage_ratio or 0.0)
        preemptions.append(engine.preemptions_total or 0.0)
        waiting.append(engine.requests_waiting or 0.0)
    assert usage[0] == 0.0
    assert max(usage) > 0.95
    assert (preemptions[0], preemptions[-1]) == (0.0, 5.0)
    assert max(waiting) >= 10
