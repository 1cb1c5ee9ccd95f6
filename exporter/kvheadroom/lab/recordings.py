"""Recorded `/metrics` pages of a vLLM server, read back: docs/recordings.md describes the format.

A recording is read line by line and never held as a whole, so that its length costs time but no memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvheadroom.lab.recording_lines import Entry, Reader, RecordingError

GAP_INTERVALS = 3
"""A page is the server's last word for as many intervals; after that nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording that was read from end to end and is in order.

    Attributes:
        origin: what its first header says, empty without one.
        last_origin: what its last header says.
        first_at: unix seconds of the first page; offsets count from here.
        last: the last page.
        ends_at: unix seconds of the last entry, a failed scrape perhaps.
        num_pages, num_failures: scrapes that gave a page, and that did not.
        text_bytes: its size when unpacked.
    """

    path: Path
    origin: Mapping[str, Any]
    last_origin: Mapping[str, Any]
    first_at: float
    last: Entry = field(repr=False)
    ends_at: float
    num_pages: int
    num_failures: int
    text_bytes: int

    @property
    def duration_seconds(self) -> float:
        """From the first page to the last."""
        return self.last.taken_at - self.first_at

    def pages(self) -> Iterator[tuple[float, str]]:
        """(seconds since the first page, page) of every scrape that gave one."""
        for entry in read_entries(self.path):
            if entry.failure is None:
                yield entry.taken_at - self.first_at, entry.page

    def entry_at(self, offset_seconds: float) -> Entry:
        """The page that was the server's last word `offset_seconds` after the first page.

        Raises:
            RecordingError: none was recorded there.
        """
        if not 0 <= offset_seconds <= self.ends_at - self.first_at:
            raise RecordingError(
                f"{self.path}: there is nothing at {offset_seconds:g} s; it lasts {self.duration_seconds:.3f} s"
            )
        entry = Playback(self).entry_at(offset_seconds)
        gap = self.gap_at(entry, offset_seconds)
        if gap is not None:
            raise RecordingError(f"{self.path}: there is no page at {offset_seconds:g} s: {gap}")
        return entry

    def gap_at(
        self, entry: Entry, offset_seconds: float, interval_seconds: float | None = None
    ) -> str | None:
        """Why `entry`, the last before that instant, tells nothing about it; None where it does.

        Args:
            interval_seconds: between scrapes, in place of what the header says.
        """
        at = entry.taken_at - self.first_at
        if entry.failure is not None:
            return f"the scrape at {at:.3f} s failed ({entry.failure})"
        interval = entry.origin.get("interval_seconds") if interval_seconds is None else interval_seconds
        if isinstance(interval, int | float) and offset_seconds - at > GAP_INTERVALS * interval:
            return f"nothing was recorded for some time after {at:.3f} s"
        return None


def is_meant_as_recording(name: str) -> bool:
    """Whether a file is compressed, by its name or content; what is wrong with it is told when it is read."""
    try:
        path = Path(name)
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return name.endswith(".gz") or file.read(2) == b"\x1f\x8b"
    except (OSError, ValueError):
        # Reading it as a page tells what is wrong.
        return False


class Playback:
    """A recording played forward; asked for an earlier instant, it starts anew."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._start()

    def _start(self) -> None:
        self._entries = read_entries(self._recording.path)
        # A recording may begin with scrapes that failed; it counts from its first page.
        self._current = next(entry for entry in self._entries if entry.failure is None)
        self._next = next(self._entries, None)

    def entry_at(self, offset_seconds: float) -> Entry:
        """The last entry at or before that instant, counted from the first page."""
        first_at = self._recording.first_at
        if offset_seconds < self._current.taken_at - first_at:
            self._start()
        while self._next is not None and self._next.taken_at - first_at <= offset_seconds:
            self._current, self._next = self._next, next(self._entries, None)
        return self._current


def read_recording(path: Path, *, end_offset: int | None = None) -> Recording:
    """Read a recording from end to end, and keep what it amounts to.

    Args:
        end_offset: read only so many bytes of the file.

    Raises:
        RecordingError: naming the file and the line.
    """
    reader = Reader(path, end_offset)
    first: Entry | None = None
    last: Entry | None = None
    ends_at = 0.0
    num_pages = num_failures = 0
    for entry in reader.entries():
        ends_at = entry.taken_at
        if entry.failure is not None:
            num_failures += 1
            continue
        first, last = first or entry, entry
        num_pages += 1
    if first is None or last is None:
        raise RecordingError(f"{path}: holds no page" if reader.text_bytes else f"{path}: is empty")
    return Recording(
        path=path,
        origin=first.origin,
        last_origin=reader.origin,
        first_at=first.taken_at,
        last=last,
        ends_at=ends_at,
        num_pages=num_pages,
        num_failures=num_failures,
        text_bytes=reader.text_bytes,
    )


def read_entries(path: Path) -> Iterator[Entry]:
    """Every scrape of a recording, in order.

    Raises:
        RecordingError: naming the file and the line.
    """
    return Reader(path).entries()
