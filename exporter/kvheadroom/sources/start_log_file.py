"""A file that holds a start-up log -> what it says; plain or compressed, of any size, read in little memory."""

import gzip
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from kvheadroom.capacity.logged_start import LogProblem, LogProblemKind, LogReading
from kvheadroom.capacity.readings import FailureReason, SourceFailure, one_line
from kvheadroom.sources.start_log import KEEP_THE_START, read_start_log
from kvheadroom.sources.start_log_lines import MOST_CHARACTERS

SOURCE = "start_log"
MOST_BYTES = 1024**3
_GZIP = b"\x1f\x8b"


def read_log_file(path: str) -> LogReading | SourceFailure:
    """Read one file, plain or compressed with gzip; blocking."""

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
            lines = _FileLines(gzip.GzipFile(fileobj=file) if is_gzip else file)
            reading = read_start_log(lines)
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
    if not lines.is_cut:
        return reading
    told = f"only its first {MOST_BYTES // 1024**2} MiB were read; {KEEP_THE_START}"
    return LogReading(
        starts=reading.starts, problems=(*reading.problems, LogProblem(LogProblemKind.TOO_LARGE, told))
    )


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
