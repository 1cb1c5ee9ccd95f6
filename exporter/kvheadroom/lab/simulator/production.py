"""The production workload: coding sessions on one GLM-5.3 engine for two weeks, as a recording and a request log.

It is fixed, so that what is scored on it can be compared: docs/simulator.md tells what was given and what was chosen.
"""

import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvheadroom import __version__
from kvheadroom.lab.page_changes import WHOLE_EVERY, PageChanges, encode
from kvheadroom.lab.recording_lines import FORMAT
from kvheadroom.lab.simulator.engine import EngineSettings, Request
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import log_line
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Arrivals, Run
from kvheadroom.lab.simulator.speeds import ConstantRates
from kvheadroom.lab.simulator.workload import (
    DAY_SECONDS,
    CodingSessions,
    LogNormal,
    WorkdayArrivals,
    Workdays,
)

VERSION = "0.33.0"
STARTS_AT = 1_767_571_200.0
"""Monday, 5 January 2026, 0:00 UTC."""

ENGINE = EngineSettings(
    num_blocks=31_310,
    block_size=64,
    max_model_len=1_048_576,
    max_num_batched_tokens=2048,
    max_num_seqs=1024,
    rules=rules_of(VERSION),
    async_scheduling=True,
)
POOL_TOKENS = ENGINE.num_blocks * ENGINE.block_size
SPEED = ConstantRates(prefill_tokens_per_second=8000.0, decode_tokens_per_second=30.0)
SESSIONS = CodingSessions(
    final_tokens=LogNormal(median=90_000, sigma=0.6),
    shortest_final_tokens=30_000,
    longest_final_tokens=256_000,
    first_tokens=LogNormal(median=12_000, sigma=0.5),
    new_tokens=LogNormal(median=1500, sigma=1.0),
    output_tokens=LogNormal(median=1200, sigma=0.9),
    tool_seconds=LogNormal(median=4.0, sigma=1.0),
    human_seconds=LogNormal(median=180.0, sigma=0.9),
    human_share=0.12,
    max_tokens=32_000,
    patience_seconds=90.0,
)
WORKDAYS = Workdays(sessions=SESSIONS, num_days=14, lowest_peak=0.7, highest_peak=1.2, seed=1)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out.

    Attributes:
        peaks: of each day, as `Workdays` describes them.
        num_pages: in the recording.
        num_requests: in the log.
    """

    peaks: tuple[float, ...]
    num_pages: int
    num_requests: int


def simulate(
    recording: Path,
    log: Path,
    workdays: Workdays = WORKDAYS,
    *,
    interval_seconds: float = 15.0,
    watch: Callable[[Run, float], None] | None = None,
) -> Simulated:
    """Simulate the engine under these sessions, and write both files anew.

    Args:
        recording: takes a page each `interval_seconds`, as docs/recordings.md describes it.
        log: takes every request, as docs/simulator.md describes it; those of the last night to their end.
        watch: is shown the run at every page, with its unix seconds.
    """
    ends_at = STARTS_AT + workdays.num_days * DAY_SECONDS
    sessions = WorkdayArrivals(workdays, starts_at=STARTS_AT, pool_tokens=POOL_TOKENS, speed=SPEED)
    num_pages = int(workdays.num_days * DAY_SECONDS / interval_seconds)
    with recording.open("wb") as recording_file, log.open("wb") as log_file:
        logged = _Logged(sessions, log_file)
        run = Run(ENGINE, logged, SPEED, starts_at=STARTS_AT)
        pages = Pages(ENGINE, model_name="GLM-5.3", starts_at=STARTS_AT)
        changes = PageChanges()
        lines = [encode({"origin": _origin(workdays, interval_seconds)})]
        for index in range(num_pages):
            at = STARTS_AT + index * interval_seconds
            run.advance(at)
            lines.append(encode({"i": index, "t": at, **changes.told(pages.text(run))}))
            if watch is not None:
                watch(run, at)
            if len(lines) > WHOLE_EVERY:
                _write(recording_file, lines)
                lines = []
        _write(recording_file, lines)
        run.advance(ends_at + DAY_SECONDS)
        logged.flush()
    return Simulated(sessions.peaks, num_pages, logged.num_requests)


def _origin(workdays: Workdays, interval_seconds: float) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "what": f"simulated /metrics of a vLLM server, a page every {interval_seconds:g} s; no vLLM ran",
        "recorded_by": f"kvheadroom {__version__}, lab/simulator",
        "interval_seconds": interval_seconds,
        "kept": "what the simulator knows of vLLM's series, without HELP",
        "masked": False,
        "seed": workdays.seed,
        "vllm_version": VERSION,
        "model_name": "GLM-5.3",
        "max_model_len": ENGINE.max_model_len,
    }


def _write(file: BinaryIO, lines: Iterable[str]) -> None:
    """One gzip member, without the time of its writing, so that the same simulation gives the same file."""
    file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=6, mtime=0))


class _Logged:
    """Arrivals whose requests are written down as they end."""

    def __init__(self, arrivals: Arrivals, file: BinaryIO) -> None:
        self.num_requests = 0
        self.next_at = arrivals.next_at
        self.take = arrivals.take
        self.leaves = arrivals.leaves
        self._arrivals = arrivals
        self._file = file
        self._lines: list[str] = []

    def ended(self, request: Request, at: float, *, left: bool) -> None:
        self.num_requests += 1
        self._lines.append(log_line(self.num_requests, request, at, left=left))
        if len(self._lines) >= 1000:
            self.flush()
        self._arrivals.ended(request, at, left=left)

    def flush(self) -> None:
        if self._lines:
            _write(self._file, self._lines)
        self._lines = []
