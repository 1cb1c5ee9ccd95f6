"""Recorded `/metrics` pages of a vLLM server, read back: docs/recordings.md describes the format.

A recording is read line by line and never held as a whole, so that its length costs time but no memory. What a file may
claim is bounded: a line has at most `MAX_LINE_BYTES`, a recording `MAX_TEXT_BYTES` when unpacked.
"""

import json
import math
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kvheadroom.capacity.errors import OperatorError

FORMAT = 1
MAX_LINE_BYTES = 64 * 1024**2
"""Four times the largest page that is taken from a server."""
MAX_TEXT_BYTES = 16 * 1024**3
LARGEST_TIME = 2.0**53
GAP_INTERVALS = 3
"""A page is the server's last word for as many intervals; after that nothing was recorded."""
_CHUNK_BYTES = 1024**2


class RecordingError(OperatorError):
    """The file is no recording that can be read; the message names it and says what is wrong."""


class CutOffError(RecordingError):
    """The file ends in the middle of its compressed data."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One scrape of a recording.

    Attributes:
        taken_at: unix seconds.
        failure: why the scrape gave no page, None where it gave one.
        whole: the whole page that this one is told against.
        changes: {series as it stands on the page: value}, what differs from `whole`.
        origin: what the header in force says.
    """

    taken_at: float
    failure: str | None
    whole: str = field(repr=False)
    changes: Mapping[str, str] = field(repr=False)
    origin: Mapping[str, Any] = field(repr=False)

    @property
    def page(self) -> str:
        """The page as it stood at that instant."""
        if not self.changes:
            return self.whole
        left = dict(self.changes)
        lines = []
        for line in self.whole.split("\n"):
            series = series_of(line)
            value = None if series is None else left.pop(series, None)
            lines.append(line if value is None else f"{series} {value}")
        new = [f"{series} {value}" for series, value in left.items()]
        # New series go before the final newline, so that the page stays well formed.
        return "\n".join(lines[:-1] + new + lines[-1:])


def series_of(line: str) -> str | None:
    """What stands before the value on a line of a page; None for a line that is no sample."""
    if line.startswith("#"):
        return None
    series, space, _ = line.rpartition(" ")
    return series if space else None


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

    def gap_at(self, entry: Entry, offset_seconds: float) -> str | None:
        """Why `entry`, the last before that instant, tells nothing about it; None where it does."""
        at = entry.taken_at - self.first_at
        if entry.failure is not None:
            return f"the scrape at {at:.3f} s failed ({entry.failure})"
        interval = entry.origin.get("interval_seconds")
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
    reader = _Reader(path, end_offset)
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
    return _Reader(path).entries()


class _Reader:
    """One reading of a recording."""

    def __init__(self, path: Path, end_offset: int | None = None) -> None:
        self._path = path
        self._end_offset = end_offset
        self.origin: Mapping[str, Any] = {}
        self.text_bytes = 0

    def entries(self) -> Iterator[Entry]:
        whole: str | None = None
        taken_at = 0.0
        for number, line in enumerate(self._lines(), start=1):
            where = f"{self._path}: line {number}"
            content = _parse(line, where)
            if "origin" in content:
                self.origin = _origin(content["origin"], where)
                continue
            at = content.get("t")
            if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at <= LARGEST_TIME:
                raise RecordingError(f"{where} is neither a header nor a scrape of a recording")
            if at < taken_at:
                raise RecordingError(f"{where} is out of order: its time is before that of the line above")
            taken_at = float(at)
            failure, changes = content.get("err"), content.get("d", {})
            if "text" in content:
                whole = content["text"]
            if failure is None and "text" not in content and "d" not in content:
                raise RecordingError(f"{where} holds neither a page nor why there is none")
            if not _is_text(failure, whole) or not _is_changes(changes):
                raise RecordingError(f"{where} holds something else than text where a page's text should be")
            if failure is None and whole is None:
                raise RecordingError(f"{where} tells changes, and no whole page stands before it")
            yield Entry(taken_at, failure, whole or "", changes, self.origin)

    def _lines(self) -> Iterator[bytes]:
        """The lines, unpacked."""
        buffer = b""
        for chunk in self._unpacked():
            self.text_bytes += len(chunk)
            if self.text_bytes > MAX_TEXT_BYTES:
                limit = MAX_TEXT_BYTES // 1024**3
                raise RecordingError(
                    f"{self._path}: is larger than {limit} GiB when unpacked; it is not read"
                )
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from lines
            if buffer and not buffer.startswith(b"{"):
                # It would be found to be no JSON, but only once it is there as a whole.
                raise RecordingError(f"{self._path}: holds a line that is no JSON object; it is no recording")
            if len(buffer) > MAX_LINE_BYTES:
                limit = MAX_LINE_BYTES // 1024**2
                raise RecordingError(f"{self._path}: a line is longer than {limit} MiB; it is no recording")
        if buffer:
            yield buffer

    def _unpacked(self) -> Iterator[bytes]:
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):
                raise RecordingError(f"{self._path}: is no regular file")
            with self._path.open("rb") as file:
                yield from unpack(file, str(self._path), end_offset=self._end_offset)
        except OSError as error:
            raise RecordingError(f"{self._path}: cannot be read: {error.strerror}") from error


def unpack(
    file: BinaryIO, name: str, ends: list[int] | None = None, *, end_offset: int | None = None
) -> Iterator[bytes]:
    """What gzip members hold, in pieces of bounded size, whatever they claim.

    Args:
        ends: takes the offset in the file after each whole member.
        end_offset: of the file, where to stop.

    Raises:
        RecordingError: it is no gzip, or damaged.
        CutOffError: it ends within a member.
    """
    packed, offset, inside = b"", 0, False
    member = zlib.decompressobj(wbits=31)

    def read() -> bytes:
        return file.read(_CHUNK_BYTES if end_offset is None else min(_CHUNK_BYTES, end_offset - file.tell()))

    try:
        while packed := packed or read():
            before = len(packed)
            piece = member.decompress(packed, _CHUNK_BYTES)
            packed = member.unused_data if member.eof else member.unconsumed_tail
            offset += before - len(packed)
            inside = not member.eof
            if piece:
                yield piece
            if member.eof:
                if ends is not None:
                    ends.append(offset)
                member = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        what = "is damaged" if offset else "is no gzip file; a recording is one"
        raise RecordingError(f"{name}: {what}") from error
    if inside:
        raise CutOffError(
            f"{name}: is cut off in the middle; copy it again (`kvheadroom record` can go on with its own)"
        )


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(line.decode("utf-8"))
        if b"\\u" in line:
            # Half a character, written as an escape, is no text that could be shown or sent.
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{where} is no JSON") from error
    if not isinstance(content, dict):
        raise RecordingError(f"{where} is neither a header nor a scrape of a recording")
    return content


def _origin(origin: Any, where: str) -> dict[str, Any]:
    if not isinstance(origin, dict):
        raise RecordingError(f"{where} is no header of a recording")
    said = origin.get("format", FORMAT)
    if said != FORMAT:
        raise RecordingError(f"{where} says format {str(said)[:40]!r}; this version reads format {FORMAT}")
    interval = origin.get("interval_seconds", 1)
    if not isinstance(interval, int | float) or not math.isfinite(interval) or interval <= 0:
        raise RecordingError(f"{where} says an interval that is none")
    return origin


def _is_text(*values: object) -> bool:
    return all(value is None or isinstance(value, str) for value in values)


def _is_changes(changes: object) -> bool:
    return isinstance(changes, dict) and all(isinstance(value, str) for value in changes.values())
