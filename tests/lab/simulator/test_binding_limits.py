"""What is told to bind, beside what stopped admission in the simulated scheduler, which a real one does not tell."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.recordings import read_recording
from kvheadroom.lab.simulator import run as run_module
from kvheadroom.lab.simulator.engine import EngineSettings
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals, LoggedRequest, read_request_log
from kvheadroom.lab.simulator.rules import rules_of
from kvheadroom.lab.simulator.run import Run, Speed
from kvheadroom.lab.simulator.scheduler import Scheduler, Step
from kvheadroom.lab.simulator.speeds import recorded_rates
from kvheadroom.monitor.history import EngineHistory
from kvheadroom.sources.vllm_metrics import parse_page
from tests.capacity.facts_builder import facts
from tests.conftest import TESTS
from tests.lab.simulator.test_run import RATES, request, settings

NUM_LOADS = 3
RECORDINGS = TESTS / "recordings" / "backtest"


class Watched(Scheduler):
    """Counts, for each step that left somebody waiting, what stopped admission; both where both would have."""

    def __init__(self, of: EngineSettings) -> None:
        super().__init__(of)
        self.stopped_by: Counter[Limit] = Counter()
        self._asked = False

    def schedule(self) -> Step:
        self._asked = False
        step = super().schedule()
        if self.waiting:
            tokens = sum(num_new for _, num_new in step.requests)
            if not self._asked or self._is_blocked:
                # Somebody was preempted in this step, or the next one does not fit.
                self.stopped_by[Limit.KV_POOL] += 1
            else:
                full = len(self.running) >= self.settings.max_num_seqs
                self.stopped_by[Limit.MAX_NUM_SEQS] += full
                self.stopped_by[Limit.TOKEN_BUDGET] += tokens >= self.settings.max_num_batched_tokens
        return step

    def _admit(self, scheduled: list[tuple[object, int]], budget: int) -> None:  # type: ignore[override]
        self._asked = True
        super()._admit(scheduled, budget)  # type: ignore[arg-type]

    def decode(self, num_steps: int) -> None:
        if self.waiting:
            full = len(self.running) >= self.settings.max_num_seqs
            self.stopped_by[Limit.MAX_NUM_SEQS if full else Limit.KV_POOL] += num_steps
        super().decode(num_steps)


@dataclass(frozen=True)
class Case:
    """A kind of load on an engine.

    Attributes:
        tells_flags: max_num_seqs and max_num_batched_tokens are in the config.
    """

    name: str
    engine: EngineSettings
    num_sessions: int
    seconds: float
    longest_prompt: int
    longest_output: int
    tells_flags: bool = True


def _engine(blocks: int, seqs: int, tokens: int, **more: object) -> EngineSettings:
    return settings(num_blocks=blocks, max_num_seqs=seqs, max_num_batched_tokens=tokens, **more)


_OLD = {"rules": rules_of("0.18.0")}
CASES = (
    Case("small pool", _engine(100, 64, 512), 60, 60.0, 300, 300),
    Case("small pool with a watermark", _engine(100, 64, 512, watermark=0.1), 60, 60.0, 300, 300),
    Case("small pool, 0.18", _engine(100, 64, 128, **_OLD), 60, 60.0, 300, 300),
    Case("small pool, flags not told", _engine(100, 64, 512), 60, 60.0, 300, 300, tells_flags=False),
    Case("few requests at once", _engine(1000, 4, 512), 60, 120.0, 200, 200),
    Case("few at once, flags not told", _engine(1000, 4, 512), 60, 120.0, 200, 200, tells_flags=False),
    Case("few at once and small pool", _engine(100, 6, 512), 60, 60.0, 200, 200),
    Case("long prompts", _engine(3000, 256, 128), 400, 20.0, 900, 20),
    Case("long prompts and small pool", _engine(120, 64, 64), 80, 60.0, 600, 100),
)


def load(case: Case, number: int) -> list[LoggedRequest]:
    """Sessions that go on with their history, up to 1,000 tokens; always the same of a number."""
    rng = random.Random(f"{case.name}/{number}")
    log = []
    for session in range(case.num_sessions):
        at, known = rng.uniform(0, case.seconds), 0
        for turn in range(rng.randint(1, 4)):
            prompt = known + rng.randint(1, case.longest_prompt)
            output = rng.randint(1, case.longest_output)
            if prompt + output > 1000:
                break
            log.append(request(str(session), at, prompt, output, turn=turn, prefix_tokens=known))
            known = prompt + output
            at += rng.uniform(2, 20)
    return sorted(log, key=lambda one: one.sent_at)


@dataclass
class Score:
    """Scrapes with a queue, by what was told: what stopped most steps since the scrape before, some, none, or no answer."""

    most: int = 0
    some: int = 0
    none: int = 0
    unknown: int = 0

    def row(self) -> str:
        told = (
            self.most + self.some + self.none + self.unknown,
            self.most,
            self.some,
            self.none,
            self.unknown,
        )
        return " | ".join(f"{number:,}" for number in told)


def score(
    into: Score,
    engine: EngineSettings,
    log: list[LoggedRequest],
    speed: Speed,
    *,
    starts_at: float,
    seconds: float,
    every: float,
    tells_flags: bool = True,
) -> None:
    """Look at an engine under load as the daemon would, and at its scheduler."""
    run = Run(engine, LoggedArrivals(log, engine.block_size), speed, starts_at=starts_at)
    scheduler = run._scheduler
    assert isinstance(scheduler, Watched)
    pages = Pages(engine, model_name="m", starts_at=starts_at)
    history = EngineHistory(every)
    version = "0.18.0" if engine.rules == rules_of("0.18.0") else "0.33.0"
    flags = {"block_size": engine.block_size}
    if tells_flags:
        flags |= {
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
        }
    known = facts(flags=flags, max_model_len=engine.max_model_len, version=version)
    for number in range(1, int(seconds / every) + 1):
        at = starts_at + number * every
        scheduler.stopped_by.clear()
        run.advance(at)
        page = parse_page(pages.text(run).encode())
        assert isinstance(page, VllmPage)
        [snapshot] = page.engines
        history.add(snapshot, at, starts_at)
        reading = Reading(
            facts=known, snapshot=snapshot, taken_at=at, past=history.window_starts(), recent=history.recent()
        )
        told = assess(reading, ()).binding_limit.limit
        stopped_by = +scheduler.stopped_by
        # Without a step since the scrape before nothing was decided.
        if snapshot.requests_waiting and stopped_by:
            if told is None:
                into.unknown += 1
            elif stopped_by[told] == max(stopped_by.values()):
                into.most += 1
            elif stopped_by[told]:
                into.some += 1
            else:
                into.none += 1


@pytest.fixture(scope="module")
def scored() -> "Callable[[str, float], Score]":
    """By the name of a case, or of a recording whose requests are sent again, and seconds between scrapes."""

    @cache
    def of(name: str, every: float) -> Score:
        result = Score()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "Scheduler", Watched)
            for case in (case for case in CASES if case.name == name):
                for number in range(NUM_LOADS):
                    score(
                        result,
                        case.engine,
                        load(case, number),
                        RATES,
                        starts_at=0.0,
                        seconds=250.0,
                        every=every,
                        tells_flags=case.tells_flags,
                    )
            if name in POOLS:
                _score_recorded(result, name, every)
        return result

    return of


POOLS = {"burst": (128, 2048), "chat": (384, 4096)}


def _score_recorded(into: Score, name: str, every: float) -> None:
    num_blocks, max_model_len = POOLS[name]
    engine = EngineSettings(
        num_blocks=num_blocks,
        block_size=32,
        max_model_len=max_model_len,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        rules=rules_of("0.32.0"),
    )
    recording = read_recording(RECORDINGS / f"{name}.jsonl.gz")
    score(
        into,
        engine,
        read_request_log(RECORDINGS / f"{name}.requests.jsonl.gz"),
        recorded_rates(recording),
        starts_at=recording.first_at,
        seconds=recording.duration_seconds,
        every=every,
    )


NAMES = (*(case.name for case in CASES), *POOLS)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_told_to_bind_stopped_admission(scored: "Callable[[str, float], Score]", name: str) -> None:
    every_second, every_five = scored(name, 1.0), scored(name, 5.0)
    told = every_second.most + every_second.some + every_second.none
    assert every_second.none <= 0.01 * told + (3 if name == "chat" else 0)
    assert every_second.most >= 0.8 * told
    assert every_five.none == 0
    if not name.endswith("flags not told"):
        assert told > 30


def test_a_limit_that_is_not_in_the_config_is_told_as_no_other(
    scored: "Callable[[str, float], Score]",
) -> None:
    few = scored("few at once, flags not told", 1.0)
    assert few.unknown > 500
    assert few.most == few.some == few.none == 0
    pool = scored("small pool, flags not told", 1.0)
    assert (pool.some, pool.none) == (0, 0)
    assert pool.most > 300


def test_the_table_of_docs_forecast_is_what_was_counted(scored: "Callable[[str, float], Score]") -> None:
    document = Path(TESTS.parent / "docs/forecast.md").read_text()
    rows = [
        f"| {f'`backtest/{name}` again' if name in POOLS else name} | {every:g} s | {scored(name, every).row()} |"
        for name in NAMES
        for every in (1.0, 5.0)
    ]
    print(*rows, sep="\n")
    assert "\n".join(rows) in document
