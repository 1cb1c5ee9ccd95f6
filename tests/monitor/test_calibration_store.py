"""The calibration file: what was in it stays in it, whatever happens to the process or the disk."""

import errno
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.calibration_samples import CalibrationSample, SampleSource
from kvheadroom.monitor import calibration_store
from kvheadroom.monitor.calibration_store import MOST_BYTES, MOST_SAMPLES, add_samples, read_samples

KEY = CalibrationKey("LlamaForCausalLM 0123", "bfloat16", "H100", "tp1", "0.33.0", "kv_cache_dtype=auto")
SAMPLE = CalibrationSample(
    key=KEY,
    start="a/0/100",
    source=SampleSource.FLEET,
    overhead_bytes=2_147_483_648,
    uncertainty_bytes=16_383,
    estimated_bytes=2_000_000_001,
    measured_at=1_795_990_000.25,
    model="tiny",
    evidence="the page of a, engine 0",
)


def sample(start: int, **told: Any) -> CalibrationSample:
    return replace(SAMPLE, start=f"a/0/{start}", overhead_bytes=10**9 + start, **told)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def beside(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir() if one != path)


def test_what_was_written_is_read_as_it_was(path: Path) -> None:
    log = replace(
        SAMPLE,
        key=replace(KEY, release="0.34.0"),
        source=SampleSource.LOG,
        estimated_bytes=None,
        measured_weights_bytes=7,
        is_cold=True,
        measured_at=None,
        model="ü",
    )
    assert add_samples(path, [SAMPLE]) == ""
    assert add_samples(path, [log]) == ""
    assert read_samples(path).samples == (SAMPLE, log)
    assert path.stat().st_mode & 0o777 == 0o644


def test_without_a_file_nothing_is_known_and_nothing_is_wrong(path: Path) -> None:
    assert read_samples(path) == calibration_store.StoredSamples()
    assert not path.exists()


def test_a_start_that_is_there_already_is_replaced(path: Path) -> None:
    add_samples(path, [sample(1), sample(2)])
    again = replace(sample(1), overhead_bytes=5)
    add_samples(path, [again])
    assert set(read_samples(path).samples) == {again, sample(2)}


def test_the_latest_of_a_kind_are_kept(path: Path) -> None:
    add_samples(path, [sample(number) for number in range(MOST_SAMPLES + 3)])
    kept = read_samples(path).samples
    assert kept == tuple(sample(number) for number in range(3, MOST_SAMPLES + 3))


def damaged(**changed: Any) -> bytes:
    whole = {
        "format": 1,
        "written_by": "kvheadroom 0.1.0",
        "samples": [
            {
                **{name: getattr(SAMPLE, name) for name in calibration_store._FIELDS},
                "key": {name: getattr(KEY, name) for name in KEY.__slots__},
                **changed,
            }
        ],
    }
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\0" * 4096,
        b"[]",
        b"{}",
        damaged()[:-40],
        damaged(overhead_bytes=-1),
        damaged(overhead_bytes=1.5),
        damaged(overhead_bytes="12 GB"),
        damaged(overhead_bytes=2**60),
        damaged(measured_at=float("nan")),
        damaged(source="oracle"),
        damaged(extra=1),
        damaged(key={"geometry": "x"}),
        b'{"format": 0, "written_by": "", "samples": []}',
        b"x" * (MOST_BYTES + 1),
    ],
    ids=range(16),
)
def test_a_damaged_file_is_told_used_for_nothing_and_set_aside_by_the_next_writing(
    path: Path, content: bytes
) -> None:
    path.write_bytes(content)
    stored = read_samples(path)
    assert (stored.samples, stored.damaged) == ((), True)
    assert f"{path}: this is no calibration (" in stored.problem
    told = add_samples(path, [SAMPLE])
    assert told.endswith("; it was set aside as calibration.json.damaged-1, and learning begins anew")
    assert read_samples(path).samples == (SAMPLE,)
    assert (path.parent / "calibration.json.damaged-1").read_bytes() == content
    # A second one takes the place of none.
    path.write_bytes(b"again")
    assert "calibration.json.damaged-2" in add_samples(path, [SAMPLE])
    assert (path.parent / "calibration.json.damaged-1").read_bytes() == content


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link, file = tmp_path / "calibration.json", tmp_path / "disk" / "kept.json"
    link.symlink_to(file)
    for sample in (SAMPLE, replace(SAMPLE, start="another")):
        add_samples(link, [sample])
    assert link.is_symlink()
    assert len(read_samples(file).samples) == 2
    # Beside it stands what its other writers stand in line at.
    assert sorted(one.name for one in tmp_path.iterdir()) == ["calibration.json", "disk"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        add_samples(tmp_path / "loop", [SAMPLE])
    (tmp_path / "loop").unlink()
    file.write_bytes(b"{")
    assert "it was set aside as kept.json.damaged-1" in add_samples(link, [SAMPLE])
    assert link.is_symlink()


def test_a_name_in_a_damaged_file_reaches_no_terminal_as_it_is(path: Path) -> None:
    path.write_bytes(damaged(**{"\x1b[2J": 1}))
    problem = read_samples(path).problem
    assert "\N{REPLACEMENT CHARACTER}[2J: Extra inputs are not permitted" in problem
    assert problem.isprintable()


def test_a_whole_file_is_none_of_the_damaged(path: Path) -> None:
    path.write_bytes(damaged())
    assert read_samples(path).samples == (SAMPLE,)


def test_the_file_of_a_newer_kvheadroom_stays_as_it_is(path: Path) -> None:
    newer = b'{"format": 2, "written_by": "kvheadroom 9", "learned": {"a": 1}}'
    path.write_bytes(newer)
    stored = read_samples(path)
    assert not stored.damaged
    assert "a newer kvheadroom wrote it" in stored.problem
    with pytest.raises(OSError, match="a newer kvheadroom wrote it"):
        add_samples(path, [SAMPLE])
    assert path.read_bytes() == newer


@pytest.mark.parametrize("name", ["device", "folder"])
def test_what_is_no_file_is_told_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/full")
    with pytest.raises(OSError, match="this is no file; name one"):
        add_samples(tmp_path / name, [SAMPLE])
    assert (tmp_path / name).exists()


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_samples(path, [sample(1)])
    before = path.read_bytes()
    real = os.fdopen

    def full(handle: int, mode: str) -> Any:
        os.close(handle)
        return real(os.open("/dev/full", os.O_WRONLY), mode)

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left") as error:
        add_samples(path, [sample(2)])
    assert error.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert beside(path) == [".calibration.json.lock"]


@pytest.mark.parametrize("step", ["write", "flush", "fsync", "replace"])
def test_a_crash_at_any_step_leaves_what_was_there_or_what_was_to_be(path: Path, step: str) -> None:
    add_samples(path, [sample(1)])
    program = f"""
import os, pathlib, sys
from kvheadroom.monitor import calibration_store as store
from tests.monitor.test_calibration_store import sample
real = os.fdopen
class File:
    def __init__(self, handle): self.file = real(handle, "wb")
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
    def write(self, content): return os._exit(7) if {step!r} == "write" else self.file.write(content)
    def flush(self): return os._exit(7) if {step!r} == "flush" else self.file.flush()
    def fileno(self): return self.file.fileno()
store.os.fdopen = lambda handle, mode: File(handle)
if {step!r} == "fsync": store.os.fsync = lambda handle: os._exit(7)
if {step!r} == "replace": pathlib.Path.replace = lambda self, to: os._exit(7)
store.add_samples(pathlib.Path(sys.argv[1]), [sample(2)])
"""
    run = subprocess.run([sys.executable, "-c", program, path], check=False, timeout=30)
    assert run.returncode == 7
    assert read_samples(path).samples == (sample(1),)
    assert len(beside(path)) == 2
    # The next writer is not held up, and sweeps up.
    add_samples(path, [sample(3)])
    assert read_samples(path).samples == (sample(1), sample(3))
    assert beside(path) == [".calibration.json.lock"]


KILLER = """
import os, pathlib, random, signal, sys, time
from kvheadroom.monitor.calibration_store import MOST_SAMPLES, add_samples, read_samples
from tests.monitor.test_calibration_store import sample

path, seeded = pathlib.Path(sys.argv[1]), random.Random(int(sys.argv[2]))
ends_at, kills, first = time.monotonic() + 4, 0, 0
while time.monotonic() < ends_at:
    hears, tells = os.pipe()
    child = os.fork()
    if child == 0:
        number = first
        while True:
            add_samples(path, [sample(number)])
            os.write(tells, b"%d " % number)
            number += 1
    os.close(tells)
    time.sleep(seeded.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(hears) as told:
        last = [first - 1, *map(int, told.read().split())][-1]
    kills += 1
    stored = read_samples(path)
    assert (stored.problem, stored.damaged) == ("", False), stored
    numbers = [int(one.start.rpartition("/")[2]) for one in stored.samples]
    # What it told is there, in order; one more may be, whose telling the kill has cut off.
    now = numbers[-1] if numbers else -1
    assert now in (last, last + 1), (now, last)
    assert numbers == list(range(max(0, now + 1 - MOST_SAMPLES), now + 1)), numbers
    first = now + 1
print(f"{kills} kills, {first} starts")
"""


def test_a_writer_killed_at_any_moment_leaves_a_file_that_can_be_read_with_all_that_it_told(
    path: Path, seeded: random.Random
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLER, path, str(seeded.randrange(2**32))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    print(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert int(run.stdout.split()[0]) > 10
    add_samples(path, [])
    assert beside(path) == [".calibration.json.lock"]


def test_two_writers_at_once_lose_nothing_of_each_other(path: Path) -> None:
    program = """
import pathlib, sys
from dataclasses import replace
from kvheadroom.monitor.calibration_store import add_samples
from tests.monitor.test_calibration_store import sample
for number in range(25):
    add_samples(pathlib.Path(sys.argv[1]), [replace(sample(number), start=f"{sys.argv[2]}/0/{number}")])
"""
    both = [subprocess.Popen([sys.executable, "-c", program, path, name]) for name in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    found = {one.start for one in read_samples(path).samples}
    assert found == {f"{name}/0/{number}" for name in "ab" for number in range(25)}


def test_a_folder_that_takes_nothing_is_told_and_the_file_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_samples(path, [sample(1)])
    real = os.open

    def read_only(name: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only file system"):
        add_samples(path, [sample(2)])
    assert read_samples(path).samples == (sample(1),)
