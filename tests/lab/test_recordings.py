"""Recordings: any instant comes back exactly, and what is no recording is refused by name."""

import gzip
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.recording_lines import CutOffError, RecordingError
from kvheadroom.lab.recordings import Playback, read_recording
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
    assert recording.entry_at(0.0).page == recording.entry_at(1.4).page == "# HELP a A\na 1\nb 1\n"
    assert recording.entry_at(1.5).page == "# HELP a A\na 1\nb 2\nc 3\n"
    assert recording.entry_at(3.0).page == "a 7\nb 7\n"
    assert [offset for offset, _ in recording.pages()] == [0.0, 1.5, 3.0]


def test_the_last_instant_is_reached_whatever_its_time_rounds_to(tmp_path: Path) -> None:
    first, last = 1795990219.7459402, 1795990409.2479463
    recording = read_recording(
        write(tmp_path / "r.gz", {"t": first, "text": "a 1\n"}, {"t": last, "d": {"a": "2"}})
    )
    assert recording.entry_at(recording.duration_seconds).page == "a 2\n"


def test_a_failed_scrape_and_a_silence_are_gaps_with_their_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.gz",
        {"origin": {"interval_seconds": 1.0}},
        {"t": 9.0, "err": "refused"},
        {"t": 10.0, "text": "a 1\n"},
        {"t": 11.0, "err": "timeout"},
        {"t": 12.0, "d": {"a": "2"}},
        {"t": 3612.0, "d": {"a": "3"}},
    )
    recording = read_recording(path)
    assert (recording.num_pages, recording.num_failures) == (3, 2)
    assert recording.entry_at(0.5).page == "a 1\n"
    assert recording.entry_at(5.0).page == "a 2\n", "three intervals long a page stands for what follows"
    assert recording.entry_at(3602.0).page == "a 3\n"
    for offset, why in (
        (1.5, r"the scrape at 1\.000 s failed \(timeout\)"),
        (5.1, r"nothing was recorded for some time after 2\.000 s"),
        (3602.1, "there is nothing at 3602.1 s; it lasts 3602.000 s"),
        (-1, "there is nothing at -1 s"),
    ):
        with pytest.raises(RecordingError, match=why):
            recording.entry_at(offset)


def test_a_header_holds_for_the_lines_after_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.gz",
        {"origin": {"vllm_version": "0.32.0"}},
        {"t": 1, "text": "a 1\n"},
        {"origin": {"vllm_version": "0.33.0"}},
        {"t": 2, "d": {}},
    )
    recording = read_recording(path)
    assert recording.origin["vllm_version"] == recording.entry_at(0).origin["vllm_version"] == "0.32.0"
    assert recording.last_origin["vllm_version"] == recording.entry_at(1).origin["vllm_version"] == "0.33.0"


def test_it_is_played_forward_and_begins_anew(tmp_path: Path) -> None:
    pages = [{"t": 100.0 + i, "text": f"a {i}\n"} for i in range(5)]
    playback = Playback(read_recording(write(tmp_path / "r.gz", *pages)))
    asked = (0.0, 0.9, 3.2, 4.0, 99.0, 1.0, 0.0)
    assert [playback.entry_at(offset).page for offset in asked] == [f"a {i}\n" for i in (0, 0, 3, 4, 4, 1, 0)]


def packed(*lines: bytes) -> bytes:
    return gzip.compress(b"".join(line + b"\n" for line in lines))


PAGE = b'{"t":1,"text":"a 1\\n"}'
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "empty inside": (packed, "is empty"),
    "no gzip": (lambda: PAGE, "is no gzip file"),
    "cut off": (lambda: SHIPPED.read_bytes()[:-500], "is cut off in the middle"),
    "cut off within the gzip header": (lambda: SHIPPED.read_bytes()[:5], "is cut off in the middle"),
    "damaged": (lambda: packed(PAGE)[:-6] + b"\0\0\0\0\0\0", "is no gzip file|is damaged"),
    "something after the gzip": (lambda: packed(PAGE) + b"more", "is damaged"),
    "only a header": (lambda: packed(b'{"origin":{}}'), "holds no page"),
    "only failures": (lambda: packed(b'{"t":1,"err":"timeout"}'), "holds no page"),
    "no JSON": (lambda: packed(PAGE, b"{nonsense"), "line 2 is no JSON"),
    "no UTF-8": (lambda: packed(PAGE, b'{"t":2,"text":"\xff"}'), "line 2 is no JSON"),
    "half a character": (lambda: packed(PAGE, b'{"t":2,"d":{"a":"\\ud800"}}'), "line 2 is no JSON"),
    "nested too deeply": (lambda: packed(b'{"t":' + b"[" * 100_000), "line 1 is no JSON"),
    "another JSON": (lambda: packed(b"[1]"), "holds a line that is no JSON object|line 1 is neither a header"),
    "another format's lines": (lambda: packed(b'{"log":{"version":"1.2"}}'), "line 1 is neither a header nor a scrape"),
    "another format's header": (lambda: packed(b'{"origin":{"format":2}}', PAGE), "says format '2'; this version reads"),
    "a header that is none": (lambda: packed(b'{"origin":"here"}', PAGE), "line 1 is no header"),
    "an interval of none": (lambda: packed(b'{"origin":{"interval_seconds":0}}', PAGE), "an interval that is none"),
    "out of order": (lambda: packed(PAGE, b'{"t":0.5,"d":{}}'), "line 2 is out of order"),
    "a time that is none": (lambda: packed(b'{"t":NaN,"text":"a 1\\n"}'), "line 1 is neither a header nor a scrape"),
    "changes of nothing": (lambda: packed(b'{"t":1,"d":{}}'), "line 1 tells changes, and no whole page stands before"),
    "a scrape of nothing": (lambda: packed(PAGE, b'{"t":2}'), "line 2 holds neither a page nor why there is none"),
    "a number for a page": (lambda: packed(b'{"t":1,"text":7}'), "line 1 holds something else than text"),
    "a number for a value": (lambda: packed(PAGE, b'{"t":2,"d":{"a":1}}'), "line 2 holds something else than text"),
    "a gigabyte of zeros": (lambda: gzip.compress(bytes(16 << 20)) * 64, "holds a line that is no JSON object"),
    "a gigabyte in a line": (
        lambda: gzip.compress(b'{"t":1,"text":"') + gzip.compress(b"a" * (16 << 20)) * 64,
        "a line is longer than 64 MiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_recording_is_refused_in_one_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    content, sentence = BAD[name]
    path = tmp_path / "r.gz"
    path.write_bytes(content())
    with pytest.raises(RecordingError, match=sentence) as refused:
        read_recording(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_a_bomb_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    path.write_bytes(BAD["a gigabyte of zeros"][0]())
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(RecordingError):
            read_recording(path)
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5


def test_a_bomb_of_good_lines_ends_at_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.gz"
    path.write_bytes(packed(PAGE) + packed(*[b'{"t":1,"d":{}}'] * 1000))
    assert read_recording(path).num_pages == 1001
    monkeypatch.setattr("kvheadroom.lab.recording_lines.MAX_TEXT_BYTES", 10_000)
    with pytest.raises(RecordingError, match="GiB when unpacked; it is not read"):
        read_recording(path)


def test_a_file_cut_off_between_two_members_is_whole_and_within_one_is_told_apart(tmp_path: Path) -> None:
    members = [packed(PAGE), packed(b'{"t":2,"d":{"a":"2"}}')]
    path = tmp_path / "r.gz"
    path.write_bytes(members[0])
    assert read_recording(path).num_pages == 1
    for length in range(1, len(members[1])):
        path.write_bytes(members[0] + members[1][:length])
        with pytest.raises(CutOffError):
            read_recording(path)
    path.write_bytes(b"".join(members))
    assert read_recording(path).num_pages == 2


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "absent", "No such file"), (tmp_path, "no regular file")):
        with pytest.raises(RecordingError, match=why):
            read_recording(path)


def test_the_shipped_recording_tells_the_story_it_is_shipped_for() -> None:
    recording = read_recording(SHIPPED)
    assert SHIPPED.stat().st_size < 200_000
    assert recording.origin["vllm_version"] == "0.32.0"
    usage, preemptions, waiting = [], [], []
    for _, text in recording.pages():
        page = parse_page(text.encode())
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
