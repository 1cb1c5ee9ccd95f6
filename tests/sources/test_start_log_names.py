"""What tells one start in a log from every other."""

import gzip
from pathlib import Path

from kvheadroom.capacity.logged_start import LogReading
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.sources.start_log_file import fingerprints, read_log_file
from tests.made_logs import whole_log

SERVING = (
    "(APIServer pid=1) INFO 10-06 18:00:00 [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 tokens/s\n"
)


def names(path: Path) -> tuple[str, ...]:
    reading = read_log_file(str(path))
    assert isinstance(reading, LogReading)
    found = fingerprints(str(path), reading.starts)
    assert isinstance(found, tuple)
    return found


def test_a_start_is_known_again_in_a_copy_a_packed_one_and_behind_and_before_other_lines(
    tmp_path: Path,
) -> None:
    path, log = tmp_path / "log", whole_log()
    path.write_text(log)
    (name,) = names(path)
    path.write_bytes(gzip.compress(log.encode()))
    assert names(path) == (name,)
    path.write_text(SERVING + log + SERVING)
    assert names(path) == (name,)


def test_two_starts_of_one_log_are_two_and_a_restart_adds_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(whole_log())
    (first,) = names(path)
    path.write_text(whole_log() + SERVING + whole_log(at="10-07 09:00:00"))
    both = names(path)
    assert both[0] == first
    assert len(set(both)) == 2


def test_without_a_start_nothing_is_named_and_a_file_that_went_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(SERVING)
    assert names(path) == ()
    gone = fingerprints(str(tmp_path / "gone"), ())
    assert isinstance(gone, SourceFailure)
    assert gone.reason is FailureReason.NOT_FOUND
