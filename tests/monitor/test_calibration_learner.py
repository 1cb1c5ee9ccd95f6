"""The learner and its file, stepped by hand: what is learned is used at once, kept when the disk can take it, and never lost on the way."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from kvheadroom.capacity.calibration_samples import CalibrationSample
from kvheadroom.capacity.fleet import CalibrationFile
from kvheadroom.capacity.readings import FailureReason
from kvheadroom.monitor import calibration_learner
from kvheadroom.monitor.calibration_learner import CalibrationLearner
from kvheadroom.monitor.calibration_store import MOST_SAMPLES, StoredSamples, add_samples, read_samples
from kvheadroom.sources.slow_files import SlowFiles
from tests.monitor.test_calibration_store import KEY, sample

T = TypeVar("T")


class Disk:
    """Runs the work at once, unless a test makes it fail before it."""

    def __init__(self) -> None:
        self.fault: OSError | None = None
        self.asked: list[str] = []
        self.meanwhile: Callable[[], None] | None = None

    async def __call__(self, path: str, work: Callable[[], T], *, timeout_seconds: float) -> T:
        self.asked.append(path.rpartition(" ")[2])
        if self.fault is not None:
            raise self.fault
        answer = work()
        if self.meanwhile is not None:
            self.meanwhile()
        return answer


class Keeper:
    """A learner, its disk, and what it publishes."""

    def __init__(self, path: Path | None) -> None:
        self.disk = Disk()
        self.published: CalibrationFile | None = None
        self.learner = CalibrationLearner(self.disk, self._publish)
        self.learner.use(path, start=False)

    def _publish(self, status: CalibrationFile | None) -> None:
        self.published = status

    def work(self) -> bool:
        return asyncio.run(self.learner.work())

    @property
    def status(self) -> CalibrationFile:
        assert self.published is not None
        return self.published

    @property
    def reason(self) -> FailureReason | None:
        return None if self.status.failure is None else self.status.failure.reason

    def starts(self) -> list[int]:
        return sorted(one.overhead_bytes - 10**9 for one in self.learner.calibration.samples.get(KEY, ()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "calibration.json"


def test_without_a_file_it_learns_for_as_long_as_it_lives() -> None:
    keeper = Keeper(None)
    keeper.learner.keep(sample(1))
    assert keeper.work()
    assert (keeper.starts(), keeper.published, keeper.disk.asked) == ([1], None, [])
    for number in range(2, MOST_SAMPLES + 5):
        keeper.learner.keep(sample(number))
    assert keeper.starts() == list(range(5, MOST_SAMPLES + 5))


def test_what_is_learned_is_used_at_once_and_is_there_in_the_next_life(path: Path) -> None:
    keeper = Keeper(path)
    assert not keeper.status.attempted
    assert keeper.work()
    assert keeper.status == CalibrationFile(path=str(path), attempted=True)
    keeper.learner.keep(sample(1))
    assert keeper.starts() == [1]
    assert keeper.work()
    assert keeper.status.samples == 1
    after = Keeper(path)
    assert after.starts() == []
    after.work()
    assert after.starts() == [1]
    assert after.disk.asked == ["(reading)"]


def test_a_start_that_was_measured_anew_is_written_again_and_one_that_is_there_is_not(path: Path) -> None:
    add_samples(path, [sample(1)])
    keeper = Keeper(path)
    keeper.learner.keep(sample(1))
    keeper.work()
    assert keeper.disk.asked == ["(reading)"]
    assert keeper.starts() == [1]
    keeper.learner.keep(sample(2))
    keeper.work()
    assert keeper.disk.asked == ["(reading)", "(writing)"]
    assert {one.overhead_bytes for one in read_samples(path).samples} == {10**9 + 1, 10**9 + 2}


def test_two_daemons_of_one_file_lose_nothing_and_learn_from_each_other(path: Path) -> None:
    one, other = Keeper(path), Keeper(path)
    for keeper in (one, other):
        keeper.work()
    one.learner.keep(sample(1))
    one.work()
    assert other.starts() == []
    other.learner.keep(sample(2))
    other.work()
    assert other.starts() == [1, 2]
    assert one.starts() == [1]
    # A reload reads it anew.
    one.learner.use(path, start=False)
    one.work()
    assert one.starts() == [1, 2]


@pytest.mark.parametrize("content", [b"{", b"\0" * 99, b'{"format": 1}'])
def test_a_damaged_file_is_told_and_set_aside_when_there_is_something_to_keep(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    keeper = Keeper(path)
    assert keeper.work()
    assert keeper.reason is FailureReason.BAD_ANSWER
    assert path.read_bytes() == content
    keeper.learner.keep(sample(1))
    assert keeper.work()
    assert keeper.reason is None
    assert keeper.status.note.endswith(
        "it was set aside as calibration.json.damaged-1, and learning begins anew"
    )
    assert keeper.status.failures_total == ((FailureReason.BAD_ANSWER, 1),)
    assert (keeper.starts(), len(read_samples(path).samples)) == ([1], 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING]
    assert "calibration.json: this is no calibration (" in caplog.messages[0]


def test_the_file_of_a_newer_kvheadroom_stays_and_learning_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = b'{"format": 2}'
    path.parent.mkdir()
    path.write_bytes(newer)
    keeper = Keeper(path)
    keeper.learner.keep(sample(1))
    for _ in range(3):
        assert not keeper.work()
    assert keeper.reason is FailureReason.BAD_ANSWER
    assert keeper.starts() == [1]
    assert path.read_bytes() == newer
    # Said once, counted each time.
    assert len(caplog.messages) == 1
    assert keeper.status.failures_total == ((FailureReason.BAD_ANSWER, 3),)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, FailureReason.IO_ERROR),
        (errno.EIO, FailureReason.IO_ERROR),
        (errno.EROFS, FailureReason.NO_PERMISSION),
        (errno.EACCES, FailureReason.NO_PERMISSION),
    ],
)
def test_a_disk_that_takes_nothing_is_told_once_and_what_is_learned_waits_in_memory(
    path: Path, number: int, reason: FailureReason, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    add_samples(path, [sample(1)])
    keeper = Keeper(path)
    keeper.work()
    keeper.disk.fault = OSError(number, os.strerror(number))
    keeper.learner.keep(sample(2))
    for _ in range(3):
        assert not keeper.work()
    keeper.learner.keep(sample(3))
    assert not keeper.work()
    assert (keeper.reason, keeper.starts()) == (reason, [1, 2, 3])
    assert keeper.status.failures_total == ((reason, 4),)
    assert len(caplog.messages) == 1
    assert f"{path}: {os.strerror(number)}. What is learned is known until" in caplog.messages[0]
    keeper.disk.fault = None
    assert keeper.work()
    assert keeper.reason is None
    assert len(read_samples(path).samples) == 3
    assert caplog.messages[1:] == [f"calibration: {path} is kept again"]


def test_a_file_that_may_not_be_read_is_asked_for_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_samples(path, [sample(1)])
    keeper = Keeper(path)
    real = Path.open

    def closed(self: Path, mode: str) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", closed)
    keeper.learner.keep(sample(2))
    assert not keeper.work()
    assert (keeper.reason, keeper.starts()) == (FailureReason.NO_PERMISSION, [2])
    # What cannot be read is not written over.
    assert keeper.disk.asked == ["(reading)"]
    monkeypatch.setattr(Path, "open", real)
    assert keeper.work()
    assert keeper.starts() == [1, 2]
    assert len(read_samples(path).samples) == 2


def test_a_disk_that_hangs_is_a_timeout_and_holds_up_nothing_that_is_learned(path: Path) -> None:
    keeper = Keeper(path)
    keeper.disk.fault = TimeoutError("not read within 30 s; does its disk hang?")
    keeper.learner.keep(sample(1))
    assert not keeper.work()
    assert (keeper.reason, keeper.starts()) == (FailureReason.TIMEOUT, [1])
    keeper.disk.fault = None
    keeper.work()
    assert keeper.reason is None
    keeper.disk.fault = TimeoutError()
    keeper.learner.keep(sample(2))
    assert not keeper.work()
    assert keeper.reason is FailureReason.TIMEOUT
    assert "not written within 30 s; does its disk hang?" in str(keeper.status.failure)


def test_another_file_is_taken_over_with_what_was_measured_and_without_the_first_ones(
    path: Path, tmp_path: Path
) -> None:
    add_samples(path, [sample(1)])
    other = tmp_path / "other.json"
    add_samples(other, [sample(2)])
    keeper = Keeper(path)
    keeper.work()
    keeper.learner.keep(sample(3))
    keeper.work()
    assert keeper.starts() == [1, 3]
    keeper.learner.use(other, start=False)
    keeper.work()
    assert keeper.starts() == [2, 3]
    assert len(read_samples(other).samples) == 2
    assert len(read_samples(path).samples) == 2
    assert keeper.status.path == str(other)
    keeper.learner.use(None, start=False)
    assert (keeper.starts(), keeper.published) == ([3], None)


@pytest.mark.parametrize("slow", ["(reading)", "(writing)"])
def test_what_comes_of_a_file_after_another_was_taken_is_not_used(
    path: Path, tmp_path: Path, slow: str
) -> None:
    add_samples(path, [sample(1)])
    other = tmp_path / "other.json"
    add_samples(other, [sample(2)])
    keeper = Keeper(path)
    keeper.learner.keep(sample(3))

    def reload() -> None:
        if keeper.disk.asked[-1] == slow:
            keeper.disk.meanwhile = None
            keeper.learner.use(other, start=False)

    keeper.disk.meanwhile = reload
    keeper.work()
    assert (keeper.status.path, keeper.status.attempted) == (str(other), False)
    keeper.work()
    assert keeper.starts() == [2, 3]
    assert len(read_samples(other).samples) == 2


def test_a_start_that_is_measured_anew_while_it_is_written_is_written_again(path: Path) -> None:
    keeper = Keeper(path)
    keeper.work()
    keeper.learner.keep(sample(1))
    again = replace(sample(1), overhead_bytes=10**9 + 7)

    def measure() -> None:
        keeper.disk.meanwhile = None
        keeper.learner.keep(again)

    keeper.disk.meanwhile = measure
    assert not keeper.work()
    assert keeper.work()
    assert read_samples(path).samples == (again,)


def test_a_file_that_cannot_be_read_after_it_was_written_takes_nothing_away(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_samples(path, [sample(1)])
    keeper = Keeper(path)
    keeper.work()
    monkeypatch.setattr(calibration_learner, "read_samples", lambda _: StoredSamples(problem="it is gone"))
    keeper.learner.keep(sample(2))
    assert keeper.work()
    assert keeper.starts() == [1, 2]


def test_a_kind_of_which_nothing_new_was_read_keeps_its_samples_as_they_were(path: Path) -> None:
    add_samples(path, [sample(1)])
    keeper = Keeper(path)
    keeper.work()
    before = keeper.learner.calibration.samples[KEY]
    keeper.learner.use(path, start=False)
    keeper.work()
    assert keeper.learner.calibration.samples[KEY] is before


class Until:
    """Publishes until what is published is `enough`."""

    def __init__(self, enough: Callable[[CalibrationFile], bool]) -> None:
        self._enough = enough
        self._reached = asyncio.Event()
        self.last: CalibrationFile | None = None

    def publish(self, status: CalibrationFile | None) -> None:
        self.last = status
        if status is not None and self._enough(status):
            self._reached.set()

    async def wait(self) -> CalibrationFile:
        async with asyncio.timeout(10):
            await self._reached.wait()
        assert self.last is not None
        return self.last


def failures(status: CalibrationFile) -> int:
    return sum(count for _, count in status.failures_total)


def test_the_daemon_keeps_trying_beside_the_ticks_until_the_disk_takes_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_learner, "AGAIN_SECONDS", (0.01, 0.02))
    tries = 0

    def full_twice(where: Path, samples: tuple[CalibrationSample, ...]) -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add_samples(where, samples)

    monkeypatch.setattr(calibration_learner, "add_samples", full_twice)

    async def run() -> CalibrationFile:
        until = Until(lambda status: failures(status) == 2 and status.failure is None)
        learner = CalibrationLearner(SlowFiles().read, until.publish)
        learner.use(path, start=True)
        learner.keep(sample(1))
        try:
            return await until.wait()
        finally:
            await learner.close()

    assert asyncio.run(run()).samples == 1
    assert tries == 3
    assert len(read_samples(path).samples) == 1


def test_a_fault_of_ours_is_told_and_ends_neither_the_learner_nor_the_daemon(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_learner, "AGAIN_SECONDS", (0.01,))
    monkeypatch.setattr(calibration_learner, "read_samples", lambda where: 1 / 0)

    async def run() -> CalibrationFile:
        until = Until(lambda status: failures(status) > 1)
        learner = CalibrationLearner(SlowFiles().read, until.publish)
        learner.use(path, start=True)
        try:
            status = await until.wait()
            learner.keep(sample(1))
            assert learner.calibration.samples[KEY] == (sample(1),)
            return status
        finally:
            await learner.close()

    failure = asyncio.run(run()).failure
    assert failure is not None
    assert failure.reason is FailureReason.INTERNAL
