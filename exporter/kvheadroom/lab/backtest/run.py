"""A backtest from its order to its results."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import Scale
from kvheadroom.lab.backtest.histories import ALWAYS_WANTED
from kvheadroom.lab.backtest.results import EngineResult, score_history
from kvheadroom.lab.recordings import read_recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be scored, and how.

    Attributes:
        recordings: files of `kvheadroom record`.
        every_seconds: from one look to the next.
    """

    recordings: tuple[Path, ...]
    every_seconds: float
    scale: Scale


def backtest(order: Order, report: Callable[[str], None]) -> tuple[EngineResult, ...]:
    """Score every recording.

    Args:
        report: takes a sentence of progress now and then.

    Raises:
        OperatorError: a recording cannot be read; all are looked through before the first is scored.
    """
    recordings = [read_recording(path) for path in order.recordings]
    results: list[EngineResult] = []
    for name, recording in zip(names_of(order.recordings), recordings, strict=True):
        report(f"{name}: {recording.num_pages:,} pages")
        history = run_recording(
            recording, name, every_seconds=order.every_seconds, wanted=ALWAYS_WANTED, report=report
        )
        results += score_history(history, (), order.scale)
    return tuple(results)


def names_of(paths: tuple[Path, ...]) -> list[str]:
    """A name for each recording: the file's without its endings, or the whole path where two would have the same."""
    short = [path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".metrics") for path in paths]
    counts = Counter(short)
    return [name if counts[name] == 1 else str(path) for name, path in zip(short, paths, strict=True)]
