"""The lines of a recording, read one by one: gzip members -> text -> one entry for each scrape.

What a file may claim is bounded: a line has at most `MAX_LINE_BYTES`, a recording `MAX_TEXT_BYTES` when unpacked.
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


class Reader:
    """One reading of a recording.

    Attributes:
        origin: what the last header so far says.
        text_bytes: unpacked so far.
    """

    def __init__(self, path: Path, end_offset: int | None = None) -> None:
        self._path = path
        self._end_offset = end_offset
        self.origin: Mapping[str, Any] = {}
        self.text_bytes = 0

    def entries(self) -> Iterator[Entry]:
        """Every scrape, in order.

        Raises:
            RecordingError: naming the file and the line.
        """
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
