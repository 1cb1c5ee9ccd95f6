"""A recording being written: whole gzip members, one after the other, at the end of one file.

A member is written when it is complete, so what stands in the file can be read at any moment, also after SIGKILL. A write
that fails half way is taken back. What stood in the file before is never changed.
"""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.masking import Masks
from kvheadroom.lab.recording_lines import MAX_TEXT_BYTES, CutOffError, RecordingError, unpack
from kvheadroom.lab.recordings import Recording, read_recording

NAMES_SUFFIX = ".names.json"
"""Beside a masked recording: which word stands for which name. It is not part of what is passed on."""
_MAX_NAMES_BYTES = 64 * 1024**2


class WriteError(Exception):
    """The disk does not take it; the message says why."""


class RecordingFile:
    """The file of a recording, new or to be continued.

    Attributes:
        before: what the file holds already, None for a new one.
        size_bytes: the file's size.
    """

    def __init__(self, path: Path, *, server: str, interval_seconds: float, masked: bool) -> None:
        """Look at what is there; nothing is written yet.

        Raises:
            OperatorError: the file cannot be continued with this, or no file can be made there.
        """
        self.path = path
        self.masks = Masks() if masked else None
        self.before: Recording | None = None
        self.size_bytes = 0
        self.text_bytes = 0
        self.dropped_bytes = 0
        """What a killed recorder left unfinished at the end."""
        self._server = server
        self._names = path.with_name(path.name + NAMES_SUFFIX)
        self._num_names_written = 0
        self._file: int | None = None
        self._is_new = False
        """Whether this made the file, so that it may remove it."""
        try:
            found = path.stat()
        except FileNotFoundError:
            self._check_new()
        except OSError as error:
            raise OperatorError(f"--out: {path}: {error.strerror}") from error
        else:
            if not stat.S_ISREG(found.st_mode):
                raise OperatorError(f"--out: {path} is no regular file")
            try:
                self._continue(interval_seconds, masked=masked)
            except BaseException:
                self.close()
                raise

    def _check_new(self) -> None:
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise OperatorError(f"--out: {self.path.parent} is no folder that can be written to")
        if self.masks is not None and self._names.exists():
            raise OperatorError(
                f"--out: {self._names} is of another recording; give another --out, or move it away"
            )

    def _continue(self, interval_seconds: float, *, masked: bool) -> None:
        self._open(os.O_RDWR)
        self.before, self.size_bytes = _read_whole_members(self.path)
        self.text_bytes = self.before.text_bytes
        self.dropped_bytes = self.path.stat().st_size - self.size_bytes
        other = self._what_differs(self.before.last_origin, interval_seconds, masked=masked)
        if other is not None:
            raise OperatorError(f"--out: {self.path} {other}; give another --out, it is not overwritten")

    def _what_differs(self, origin: Any, interval_seconds: float, *, masked: bool) -> str | None:
        if "interval_seconds" not in origin or "masked" not in origin:
            return "was not made by `kvheadroom record`"
        if origin["masked"] != masked:
            return "was recorded " + ("with --mask" if origin["masked"] else "without --mask")
        if origin["interval_seconds"] != interval_seconds:
            return f"was recorded with --interval {origin['interval_seconds']:g}s"
        server = origin.get("server")
        if masked:
            server, names = _read_names(self._names)
            self.masks = Masks(names)
            self._num_names_written = self._num_names()
        return None if server == self._server else "is of another server"

    def _open(self, flags: int) -> int:
        try:
            file = self._file = os.open(self.path, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OperatorError(f"--out: {self.path}: {error.strerror}") from error
        self._is_new = bool(flags & os.O_CREAT)
        # Two recorders in one file would tear each other's lines apart. Some networks' file systems have no locks.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OperatorError(f"--out: {self.path} is being written by another recorder") from error
        except OSError:
            pass
        return file

    def append(self, lines: list[str], max_bytes: int) -> str | None:
        """Write lines as one member; where the file would become too large, nothing is written, and it is told why.

        Raises:
            WriteError: the disk does not take it; the file is as it was before.
            OperatorError: the file cannot be made.
        """
        text = "".join(f"{line}\n" for line in lines).encode()
        member = gzip.compress(text, compresslevel=6, mtime=0)
        if self.size_bytes + len(member) > max_bytes:
            return f"--max-size {size(max_bytes)} is reached"
        if self.text_bytes + len(text) > MAX_TEXT_BYTES:
            return "it is as long as can be read back"
        file = self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL) if self._file is None else self._file
        try:
            # A word must not stand in the recording before it stands there.
            self._write_names()
            _write_at(file, member, self.size_bytes)
        except OSError as error:
            # Shrinking needs no space. What cannot even be shrunk is told as cut off by whoever reads it.
            with contextlib.suppress(OSError):
                os.ftruncate(file, self.size_bytes)
            raise WriteError(f"{self.path} cannot be written: {error.strerror}") from error
        self.size_bytes += len(member)
        self.text_bytes += len(text)
        return None

    def close(self) -> None:
        """Close it; a new file in which nothing was written is removed."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._is_new and not self.size_bytes:
            for path in (self.path,) if self.masks is None else (self.path, self._names):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _num_names(self) -> int:
        return 0 if self.masks is None else sum(map(len, self.masks.names.values()))

    def _write_names(self) -> None:
        if self.masks is None or self._num_names() == self._num_names_written:
            return
        content = json.dumps(
            {"server": self._server, "names": self.masks.names}, indent=1, ensure_ascii=False
        )
        fresh = self._names.with_name(self._names.name + ".new")
        try:
            # Not for others to read: it undoes the masking.
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_at(file, content.encode(), 0)
            finally:
                os.close(file)
            fresh.replace(self._names)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        self._num_names_written = self._num_names()


def size(size_bytes: float) -> str:
    """Bytes as MB or kB (powers of ten), as `--max-size` is given."""
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.1f} kB"


def _write_at(file: int, content: bytes, offset: int) -> None:
    os.ftruncate(file, offset)
    written = 0
    while written < len(content):
        count = os.pwrite(file, content[written:], offset + written)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count
    os.fsync(file)


def _read_whole_members(path: Path) -> tuple[Recording, int]:
    """(what a file holds, the offset after its last whole member).

    Raises:
        OperatorError: it is no recording that can be continued.
    """
    ends: list[int] = []
    try:
        with contextlib.suppress(CutOffError), path.open("rb") as file:
            for _ in unpack(file, str(path), ends):
                pass
        end = ends[-1] if ends else 0
        return read_recording(path, end_offset=end), end
    except OSError as error:
        raise OperatorError(f"--out: {path}: {error.strerror}") from error
    except RecordingError as error:
        raise OperatorError(f"--out: {error}; give another --out, it is not overwritten") from error


def _read_names(path: Path) -> tuple[str, dict[str, dict[str, str]]]:
    """(server, words) of the file beside a masked recording."""
    needed = f"--out: {path} is needed to go on with a masked recording"
    try:
        if path.stat().st_size > _MAX_NAMES_BYTES:
            raise OperatorError(f"{needed}, and is too large")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise OperatorError(f"{needed}, and cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        content = None
    server = content.get("server") if isinstance(content, dict) else None
    names = content.get("names") if isinstance(content, dict) else None
    if not isinstance(server, str) or not isinstance(names, dict) or not all(map(_are_words, names.values())):
        raise OperatorError(f"{needed}, and holds something else")
    return server, names


def _are_words(words: Any) -> bool:
    return isinstance(words, dict) and all(isinstance(word, str) for word in words.values())
