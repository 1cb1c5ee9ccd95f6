"""What is known of starts, in memory and in a file. The file is read and written beside the ticks, in a thread that nobody waits for."""

import asyncio
import contextlib
import errno
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from kvheadroom.capacity.calibration import Calibration
from kvheadroom.capacity.calibration_key import CalibrationKey
from kvheadroom.capacity.calibration_samples import CalibrationSample
from kvheadroom.capacity.fleet import CalibrationFile
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.monitor.calibration_store import MOST_SAMPLES, StoredSamples, add_samples, read_samples

log = logging.getLogger(__name__)

SOURCE = "calibration"
FILE_SECONDS = 30.0
"""A disk that hangs longer is told; the thread goes on, and no second one is started meanwhile."""
AGAIN_SECONDS = (5.0, 15.0, 60.0)
"""A file that cannot be read or written is tried again, ever more slowly."""

T = TypeVar("T")


class InThread(Protocol):
    """Does blocking work on a file that may lie on a dead mount."""

    def __call__(self, path: str, work: Callable[[], T], *, timeout_seconds: float) -> Awaitable[T]:
        """What it gives or raises; TimeoutError with the reason. Work under way for the same `path` is waited for, not started again."""


class CalibrationLearner:
    """Learns from the samples that it is given; without a file for the life of the daemon.

    Args:
        in_thread: for the file.
        publish: how the file fares, None where there is none.
    """

    def __init__(self, in_thread: InThread, publish: Callable[[CalibrationFile | None], None]) -> None:
        self._in_thread = in_thread
        self._publish = publish
        self._calibration = Calibration()
        self._measured = Calibration()
        """What was measured in this life, which goes into every file that is used."""
        self._file: _File | None = None
        self._failures: Counter[FailureReason] = Counter()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def calibration(self) -> Calibration:
        """All that is known: a value, replaced and never changed."""
        return self._calibration

    def keep(self, sample: CalibrationSample) -> None:
        """Learn from one start now, and write it down when the disk can take it."""
        self._measured = self._measured.plus(sample, MOST_SAMPLES)
        self._calibration = self._calibration.plus(sample, MOST_SAMPLES)
        if self._file is not None:
            self._file.pending[sample.key, sample.start] = sample
            self._tell()
        self._asked.set()

    def use(self, path: Path | None, *, start: bool) -> None:
        """Keep what is learned there from now on, and use what stands there; the same file is read anew.

        Args:
            start: read and write it; False when that is done by hand.
        """
        status = None if path is None else CalibrationFile(path=str(path))
        if self._file is not None and status is not None and self._file.path == path:
            # How it fared is told until it was read again.
            status = self._file.status
        pending = {
            (sample.key, sample.start): sample
            for these in self._measured.samples.values()
            for sample in these
        }
        self._file = None if path is None or status is None else _File(path, status, pending)
        if self._file is None:
            self._calibration = self._measured
        self._tell()
        self._asked.set()
        if start and self._task is None and path is not None:
            self._task = asyncio.create_task(self._run())

    async def work(self) -> bool:
        """Read the file if it was not read yet, and write what is not in it; False where something is to be tried again."""
        file = self._file
        if file is None:
            return True
        if not file.is_read:
            await self._read(file)
        if file.is_read and file.pending and file is self._file:
            await self._write(file)
        return file.is_read and not file.pending

    async def close(self) -> None:
        """End reading and writing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        attempts = 0
        while True:
            self._asked.clear()
            try:
                well = await self.work()
            except Exception as error:
                log.exception("calibration: keeping it failed, please report it")
                well = False
                if self._file is not None:
                    self._failed(self._file, FailureReason.INTERNAL, f"a fault of kvheadroom: {error!r}")
            attempts = 0 if well else attempts + 1
            again = None if well else AGAIN_SECONDS[min(attempts, len(AGAIN_SECONDS)) - 1]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(again):
                    await self._asked.wait()

    async def _read(self, file: "_File") -> None:
        try:
            stored = await self._in_thread(
                f"{file.path} (reading)", partial(read_samples, file.path), timeout_seconds=FILE_SECONDS
            )
        except TimeoutError as error:
            self._failed(file, FailureReason.TIMEOUT, f"{file.path}: {error}")
            return
        if file is not self._file:
            return
        if stored.problem and not stored.damaged:
            self._failed(file, _reason(stored.error), f"{stored.problem}. {_NOT_KEPT}")
            return
        # A damaged one is set aside by the first writing.
        file.is_read = True
        self._take(stored)
        if stored.damaged:
            detail = (
                f"{stored.problem}; it is set aside when the next start is kept, and nothing of it is used"
            )
            self._failed(file, FailureReason.BAD_ANSWER, detail)
        else:
            self._well(file)

    async def _write(self, file: "_File") -> None:
        samples = tuple(file.pending.values())
        try:
            written = await self._in_thread(
                f"{file.path} (writing)", partial(_add, file.path, samples), timeout_seconds=FILE_SECONDS
            )
        except TimeoutError:
            detail = f"{file.path}: not written within {FILE_SECONDS:g} s; does its disk hang?"
            self._failed(file, FailureReason.TIMEOUT, f"{detail} {_NOT_KEPT}")
        except OSError as error:
            detail = str(error) if error.strerror is None else f"{file.path}: {error.strerror}"
            self._failed(file, _reason(error), f"{detail}. {_NOT_KEPT}")
        else:
            # After a timeout it is those of the writing that was under way.
            for sample in written.samples:
                if file.pending.get((sample.key, sample.start)) is sample:
                    del file.pending[sample.key, sample.start]
            if file is not self._file:
                return
            if written.told:
                log.warning("calibration: %s", written.told)
                file.status = replace(file.status, note=written.told)
            # Others may have written there as well.
            if not written.stored.problem:
                self._take(written.stored)
            self._well(file)

    def _take(self, stored: StoredSamples) -> None:
        """Know what stands in the file and what was measured here."""
        known = Calibration.of(stored.samples)
        for these in self._measured.samples.values():
            for sample in these:
                known = known.plus(sample, MOST_SAMPLES)
        # Whoever made figures of samples that are still the same need not make them again.
        before = self._calibration.samples
        self._calibration = Calibration(
            {
                key: same if (same := before.get(key)) == these else these
                for key, these in known.samples.items()
            }
        )
        for sample in stored.samples:
            if self._file is not None and self._file.pending.get((sample.key, sample.start)) == sample:
                del self._file.pending[sample.key, sample.start]

    def _failed(self, file: "_File", reason: FailureReason, detail: str) -> None:
        failure = SourceFailure(SOURCE, reason, detail)
        self._failures[reason] += 1
        if file.status.failure != failure:
            # Said once per change.
            log.warning("calibration: %s", detail)
        file.status = replace(file.status, attempted=True, failure=failure)
        self._tell()

    def _well(self, file: "_File") -> None:
        if file.status.failure is not None:
            log.info("calibration: %s is kept again", file.path)
        file.status = replace(file.status, attempted=True, failure=None)
        self._tell()

    def _tell(self) -> None:
        if self._file is None:
            self._publish(None)
            return
        samples = sum(len(these) for these in self._calibration.samples.values())
        failures = tuple(sorted(self._failures.items()))
        self._publish(replace(self._file.status, samples=samples, failures_total=failures))


_NOT_KEPT = "What is learned is known until kvheadroom ends, and writing it is tried again"


@dataclass(slots=True)
class _File:
    """A file in use.

    Attributes:
        pending: what is not in it yet.
    """

    path: Path
    status: CalibrationFile
    pending: dict[tuple[CalibrationKey, str], CalibrationSample]
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class _Written:
    """What was written, and what the file holds since; `told` is what happened to a damaged one."""

    samples: tuple[CalibrationSample, ...]
    stored: StoredSamples
    told: str


def _add(path: Path, samples: tuple[CalibrationSample, ...]) -> _Written:
    told = add_samples(path, samples)
    return _Written(samples, read_samples(path), told)


_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def _reason(error: OSError | None) -> FailureReason:
    if error is None or error.errno is None:
        return FailureReason.BAD_ANSWER
    return FailureReason.NO_PERMISSION if error.errno in _NOT_ALLOWED else FailureReason.IO_ERROR
