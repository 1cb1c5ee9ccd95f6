"""A file that holds a start-up log -> what it says; plain or compressed, of any size, read in little memory."""

import contextlib
import gzip
import hashlib
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar

from kvheadroom.capacity.logged_start import LoggedStart, LogProblem, LogProblemKind, LogReading
from kvheadroom.capacity.readings import FailureReason, SourceFailure, one_line
from kvheadroom.sources.start_log import KEEP_THE_START, read_start_log
from kvheadroom.sources.start_log_lines import MOST_CHARACTERS

T = TypeVar("T")

SOURCE = "start_log"
MOST_BYTES = 1024**3
_GZIP = b"\x1f\x8b"


def read_log_file(path: str) -> LogReading | SourceFailure:
    """Read one file, plain or compressed with gzip; blocking."""

    def read(lines: "_FileLines") -> LogReading:
        reading = read_start_log(lines)
        if not lines.is_cut:
            return reading
        told = f"only its first {MOST_BYTES // 1024**2} MiB were read; {KEEP_THE_START}"
        problems = (*reading.problems, LogProblem(LogProblemKind.TOO_LARGE, told))
        return LogReading(starts=reading.starts, problems=problems)

    return _with_lines(path, read)


def fingerprints(path: str, starts: Sequence[LoggedStart]) -> tuple[str, ...] | SourceFailure:
    """What tells each of these starts from every other, in whatever file it stands: a digest of its lines; blocking.

    A log that has grown since gives the same starts the same.
    """

    def read(lines: "_FileLines") -> tuple[str, ...]:
        digests = [hashlib.sha256() for _ in starts]
        waiting = sorted(range(len(starts)), key=lambda index: starts[index].first_line)
        present: list[int] = []
        for number, line in enumerate(lines, start=1):
            while waiting and starts[waiting[0]].first_line <= number:
                present.append(waiting.pop(0))
            present = [index for index in present if number <= starts[index].last_line]
            if not present and not waiting:
                break
            for index in present:
                digests[index].update(line.encode())
        return tuple(
            f"{digest.hexdigest()[:16]}/{start.engine or 0}"
            for start, digest in zip(starts, digests, strict=True)
        )

    return _with_lines(path, read)


@contextlib.contextmanager
def kept_as_file(stream: BinaryIO) -> Iterator[str]:
    """The path of a file with what a stream gives, as much as is read of a log; it goes with the context, or the process."""
    with tempfile.TemporaryFile() as file:
        left = MOST_BYTES + MOST_CHARACTERS
        while left > 0 and (piece := stream.read(min(left, MOST_CHARACTERS))):
            left -= len(piece)
            file.write(piece)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _with_lines(path: str, use: "Callable[[_FileLines], T]") -> T | SourceFailure:
    def failed(reason: FailureReason, detail: str) -> SourceFailure:
        return SourceFailure(SOURCE, reason, f"{one_line(path)}: {detail}")

    try:
        # No pipe or device is opened: reading it could last for ever.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return failed(
                FailureReason.BAD_ANSWER, "it is not a regular file; give the file that holds the log"
            )
        with Path(path).open("rb") as file:
            is_gzip = file.read(2) == _GZIP
            file.seek(0)
            return use(_FileLines(gzip.GzipFile(fileobj=file) if is_gzip else file))
    except (FileNotFoundError, NotADirectoryError):
        return failed(FailureReason.NOT_FOUND, "there is no such file on this machine")
    except PermissionError:
        return failed(
            FailureReason.NO_PERMISSION,
            "it may not be read; give it a mode that lets kvheadroom's user read it",
        )
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return failed(
            FailureReason.BAD_ANSWER, "its compression is damaged or it was cut; compress the log again"
        )
    except OSError as error:
        return failed(FailureReason.UNREACHABLE, f"it cannot be read ({error.strerror})")
    except ValueError:
        return failed(FailureReason.BAD_ANSWER, "its path is no path")


class _FileLines:
    """The lines of a file, each cut at what is kept of one; bytes that are no UTF-8 are replaced."""

    def __init__(self, file: gzip.GzipFile | BufferedReader) -> None:
        self._file = file
        self.is_cut = False

    def __iter__(self) -> Iterator[str]:
        read = 0
        while piece := self._file.readline(MOST_CHARACTERS):
            read += len(piece)
            line = piece
            while not piece.endswith(b"\n") and (piece := self._file.readline(MOST_CHARACTERS)):
                read += len(piece)
                if read > MOST_BYTES:
                    break
            if read > MOST_BYTES:
                self.is_cut = True
                return
            yield line.decode("utf-8", errors="replace")
