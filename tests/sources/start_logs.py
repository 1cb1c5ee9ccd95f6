"""The recorded start-up logs, and figures in the words of a log."""

from pathlib import Path

from kvheadroom.capacity.gpu_cards import GIB
from kvheadroom.capacity.logged_start import LoggedRank, LoggedStart, LogReading, Printed
from kvheadroom.sources.start_log import read_start_log

FOLDER = Path(__file__).parents[1] / "recordings" / "start_logs"


def log(name: str) -> str:
    return (FOLDER / f"{name}.log").read_text("utf-8")


def read(text: str) -> LogReading:
    return read_start_log(text.splitlines())


def only_start(text: str) -> LoggedStart:
    (start,) = read(text).starts
    return start


def only_rank(text: str) -> LoggedRank:
    (rank,) = only_start(text).ranks
    return rank


def gib(number: str) -> Printed:
    """A figure of at least two decimals, as `format_gib` and `%.4f` round."""
    decimals = max(2, len(number.partition(".")[2]))
    return Printed(round(float(number) * GIB), round(GIB / 10**decimals / 2))


def messages(reading: LogReading) -> list[str]:
    return [f"{problem.kind}: {problem.message}" for problem in reading.problems]
