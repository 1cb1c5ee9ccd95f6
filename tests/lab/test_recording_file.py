"""The file of a recording: whole at every moment, continued, never overwritten."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.recording_file import NAMES_SUFFIX, RecordingFile, WriteError
from kvheadroom.lab.recording_lines import CutOffError
from kvheadroom.lab.recordings import read_recording
from tests.lab.test_recordings import PAGE, packed, write

SERVER = "http://host:8000"
MB = 1_000_000


def opened(path: Path, **other: Any) -> RecordingFile:
    return RecordingFile(path, **{"server": SERVER, "interval_seconds": 1.0, "masked": False, **other})


def header(**other: Any) -> str:
    return json.dumps({"origin": {"interval_seconds": 1.0, "masked": False, "server": SERVER, **other}})


def page(at: int) -> str:
    return json.dumps({"t": at, "text": f"vllm:a {at}\n"})


def recorded(path: Path, *, masked: bool = False) -> bytes:
    """A recording of one page."""
    file = opened(path, masked=masked)
    if file.masks is not None:
        file.masks.word_for("model", "alice")
    lines = [header(masked=True, server=None) if masked else header(), page(1)]
    assert file.append(lines, MB) is None
    file.close()
    return path.read_bytes()


def test_a_file_is_continued_and_what_stood_there_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    before = recorded(path)
    file = opened(path)
    assert file.before is not None
    assert (file.before.num_pages, file.size_bytes) == (1, len(before))
    assert path.read_bytes() == before, "nothing is written before there is something to write"
    assert file.append([header(), page(5)], MB) is None
    file.close()
    assert path.read_bytes().startswith(before)
    assert [at for at, _ in read_recording(path).pages()] == [0, 4]


def test_what_a_killed_recorder_left_unfinished_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    before = recorded(path)
    for left in (1, 5, 30):
        path.write_bytes(before + packed(PAGE, PAGE, PAGE)[:left])
        with pytest.raises(CutOffError):
            read_recording(path)
        file = opened(path)
        assert (file.dropped_bytes, file.size_bytes) == (left, len(before))
        assert file.append([page(2)], MB) is None
        file.close()
        assert [text for _, text in read_recording(path).pages()] == ["vllm:a 1\n", "vllm:a 2\n"]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"server": "http://other:8000"}, "is of another server"),
        ({"interval_seconds": 5.0}, "was recorded with --interval 1s"),
        ({"masked": True}, "was recorded without --mask"),
    ],
)
def test_a_recording_of_something_else_is_refused_and_left_as_it_is(
    other: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.gz"
    before = recorded(path)
    with pytest.raises(OperatorError, match=f"{why}; give another --out, it is not overwritten"):
        opened(path, **other)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["r.gz"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"my thesis", "is no gzip file"),
        (packed(PAGE), "was not made by `kvheadroom record`"),
        (packed(PAGE)[:-3], "is empty"),
        (packed(PAGE) + b"my thesis", "is damaged"),
        (packed(b'{"log":1}'), "neither a header nor a scrape"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(
    content: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.gz"
    path.write_bytes(content)
    with pytest.raises(OperatorError, match=why) as refused:
        opened(path)
    assert str(refused.value).endswith("it is not overwritten")
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_made_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "absent" / "r.gz", "is no folder"), (tmp_path, "is no regular file")):
        with pytest.raises(OperatorError, match=why):
            opened(path)


def test_two_recorders_cannot_write_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    first = opened(path)
    assert first.append([header(), page(1)], MB) is None
    with pytest.raises(OperatorError, match="is being written by another recorder"):
        opened(path)
    first.close()
    opened(path).close()


def test_two_recorders_cannot_make_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    first, second = opened(path), opened(path)
    assert first.append([header(), page(1)], MB) is None
    with pytest.raises(OperatorError, match="File exists"):
        second.append([header(), page(1)], MB)
    second.close()
    first.close()
    assert read_recording(path).num_pages == 1


def test_the_file_never_grows_above_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    before = recorded(path)
    file = opened(path)
    limit = len(before) + 60
    assert file.append([page(2)], limit) is None
    assert file.append([page(3)], limit) == "--max-size 0.2 kB is reached"
    file.close()
    assert path.stat().st_size == file.size_bytes <= limit
    assert read_recording(path).num_pages == 2


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path / "r.gz")
    assert file.append([header(), page(1)], MB) is None
    monkeypatch.setattr("kvheadroom.lab.recording_file.MAX_TEXT_BYTES", file.text_bytes + 40)
    assert file.append([page(2)], MB) is None
    assert file.append([page(3)], MB) == "it is as long as can be read back"
    file.close()


@pytest.mark.parametrize("taken", [0, 7])
def test_a_write_that_fails_half_way_is_taken_back(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.gz"
    before = recorded(path)
    file = opened(path)
    pwrite = os.pwrite

    def full(number: int, content: bytes, offset: int) -> int:
        if offset >= len(before) + taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(number, content[: len(before) + taken - offset], offset)

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(WriteError, match="cannot be written: No space left"):
        file.append([page(2)], MB)
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert file.append([page(2)], MB) is None, "it can go on once there is space"
    file.close()
    assert read_recording(path).num_pages == 2


def test_a_file_in_which_nothing_could_be_written_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for masked in (True, False):
        if not masked:
            (tmp_path / "r.gz.names.json").write_text("mine")
        file = opened(tmp_path / "r.gz", masked=masked)
        if file.masks is not None:
            file.masks.word_for("model", "alice")
        monkeypatch.setattr("os.pwrite", full)
        with pytest.raises(WriteError, match="cannot be written: No space left"):
            file.append([header(), page(1)], MB)
        monkeypatch.undo()
        file.close()
        # What it did not make it does not remove.
        assert [found.read_text() for found in tmp_path.iterdir()] == ([] if masked else ["mine"])


def test_names_stand_beside_a_masked_recording_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    recorded(path, masked=True)
    names = tmp_path / f"r.gz{NAMES_SUFFIX}"
    assert names.stat().st_mode & 0o777 == 0o600
    assert json.loads(names.read_bytes()) == {"server": SERVER, "names": {"model": {"alice": "model-1"}}}
    file = opened(path, masked=True)
    assert file.masks is not None
    assert [file.masks.word_for("model", name) for name in ("bob", "alice")] == ["model-2", "model-1"]
    file.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        ("nonsense", "holds something else"),
        ("[]", "holds something else"),
        ('{"server": "http://host:8000", "names": {"model": {"alice": 1}}}', "holds something else"),
        ('{"server": "http://host:8001", "names": {}}', "is of another server"),
    ],
)
def test_a_masked_recording_is_not_continued_without_its_names(
    content: str | None, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.gz"
    before = recorded(path, masked=True)
    names = tmp_path / f"r.gz{NAMES_SUFFIX}"
    names.unlink()
    if content is not None:
        names.write_text(content)
    with pytest.raises(OperatorError, match=why):
        opened(path, masked=True)
    assert path.read_bytes() == before


def test_names_of_an_earlier_recording_are_not_overwritten(tmp_path: Path) -> None:
    recorded(tmp_path / "r.gz", masked=True)
    (tmp_path / "r.gz").rename(tmp_path / "old.gz")
    with pytest.raises(OperatorError, match=r"names\.json is of another recording; give another --out"):
        opened(tmp_path / "r.gz", masked=True)


def test_a_recording_that_was_not_made_by_record_is_not_continued(tmp_path: Path) -> None:
    path = write(tmp_path / "r.gz", {"origin": {"vllm_version": "0.32.0"}}, {"t": 1, "text": "vllm:a 1\n"})
    with pytest.raises(OperatorError, match="was not made by `kvheadroom record`"):
        opened(path)
