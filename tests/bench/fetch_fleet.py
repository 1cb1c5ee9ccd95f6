"""Fetching and parsing alone, as the daemon does it, or with all that the core makes of a page: run by `tests.bench.fleet`.

Usage: python -m tests.bench.fetch_fleet PORT TARGETS INTERVAL_SECONDS [FILE]

With a FILE it does the latter, and keeps in there: how many forecasts were made so far, and in how many seconds of CPU.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from kvheadroom.capacity import assessment
from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.facts import EngineFacts, MissingFact, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.forecast import forecast
from kvheadroom.capacity.prediction import Prediction, predict
from kvheadroom.capacity.readings import Scrape, SourceFailure, VllmPage
from kvheadroom.monitor.history import EngineHistory
from kvheadroom.monitor.sampler import _phase
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, open_session
from kvheadroom.sources.vllm_pages import VllmPages
from tests.bench.fleet_server import address


class Timed:
    """Takes the place of `forecast` in the core and adds up what it costs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._number, self._spent = 0, 0.0

    def __call__(self, *given: Any) -> Any:
        """As `forecast`."""
        began = time.thread_time()
        told = forecast(*given)
        self._spent += time.thread_time() - began
        self._number += 1
        if self._number % 100 == 0:
            # Whole at every instant: another process reads it.
            new = self._file.with_suffix(".new")
            new.write_text(f"{self._number} {self._spent}")
            new.replace(self._file)
        return told


class Assessing:
    """History, windows, states, what binds and the forecast of one server."""

    def __init__(self, interval_seconds: float) -> None:
        self._history = EngineHistory(interval_seconds)
        self._prediction: Prediction | None = None
        self._facts: EngineFacts | None = None

    def take(self, scrape: Scrape, page: VllmPage) -> None:
        """One page."""
        [snapshot] = page.engines
        if self._facts is None:
            missing = MissingFact("model_files", "not asked for here", "nothing")
            answers = ServerAnswers(version="0.32.0", model_root=None, max_model_len=2048)
            self._facts = resolve_facts(
                operator=OperatorFacts(flags={}),
                answers=answers,
                echoed=snapshot.echoed,
                model_files=None,
                model_files_missing=missing,
            )
            self._prediction = predict(self._facts)
        self._history.add(snapshot, scrape.taken_at, page.process_start_time_seconds)
        reading = Reading(
            facts=self._facts,
            snapshot=snapshot,
            taken_at=scrape.taken_at,
            past=self._history.window_starts(),
            recent=self._history.recent(),
            five_minutes=self._history.five_minutes(),
        )
        assess(reading, (), self._prediction)


async def scrape(session: Session, url: str, interval_seconds: float, *, forecasts: bool) -> None:
    """One target for ever, at the phase that the daemon asks it at."""
    only = "forecast" if forecasts else "fetch"
    endpoint, pages = Endpoint(url, headers=(("X-Only", only),)), VllmPages(session)
    assessing = Assessing(interval_seconds)
    turn = time.monotonic() + _phase(url) * interval_seconds
    while True:
        await asyncio.sleep(turn - time.monotonic())
        told = await pages.fetch(endpoint, time.monotonic() + interval_seconds)
        if forecasts and not isinstance(told, SourceFailure):
            assessing.take(*told)
        turn += interval_seconds


async def main(port: int, targets: int, interval_seconds: float, file: Path | None) -> None:
    """All targets."""
    if file is not None:
        vars(assessment)["forecast"] = Timed(file)
    async with open_session() as session:
        urls = [f"http://{address(target)}:{port}" for target in range(targets)]
        await asyncio.gather(
            *(scrape(session, url, interval_seconds, forecasts=file is not None) for url in urls)
        )


if __name__ == "__main__":
    uvloop.run(
        main(
            int(sys.argv[1]),
            int(sys.argv[2]),
            float(sys.argv[3]),
            Path(sys.argv[4]) if len(sys.argv) > 4 else None,
        )
    )
