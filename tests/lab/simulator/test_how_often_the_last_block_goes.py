"""The formula under the forecast, held to the simulated scheduler: while the next one does not fit, growth / need preemptions a second."""

import random

from kvheadroom.capacity.assessment import Reading, assess
from kvheadroom.capacity.readings import VllmPage
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.request_log import LoggedArrivals
from kvheadroom.lab.simulator.run import Run
from kvheadroom.monitor.history import EngineHistory
from kvheadroom.sources.vllm_metrics import parse_page
from tests.capacity.facts_builder import facts
from tests.lab.simulator.test_run import RATES, request, settings


def expected_and_counted(number: int, longest_output: int) -> tuple[float, float]:
    """(preemptions by the formula, preemptions) of one made-up load, at the seconds at which the next one does not fit."""
    rng = random.Random(f"last block/{number}")
    engine = settings(num_blocks=200, max_num_seqs=64, max_num_batched_tokens=512)
    log = sorted(
        (
            request(str(session), rng.uniform(0, 120), rng.randint(50, 300), rng.randint(20, longest_output))
            for session in range(400)
        ),
        key=lambda one: one.sent_at,
    )
    run = Run(engine, LoggedArrivals(log, engine.block_size), RATES, starts_at=0.0)
    pages, history = Pages(engine, model_name="m", starts_at=0.0), EngineHistory(1.0)
    known = facts(flags={"block_size": engine.block_size}, max_model_len=engine.max_model_len)
    expected = counted = 0.0
    before: tuple[float, float] | None = None
    for second in range(1, 200):
        run.advance(float(second))
        page = parse_page(pages.text(run).encode())
        assert isinstance(page, VllmPage)
        [snapshot] = page.engines
        assert snapshot.preemptions_total is not None
        if before is not None:
            expected += before[0]
            counted += snapshot.preemptions_total - before[1]
        history.add(snapshot, float(second), 1.0)
        reading = Reading(
            facts=known,
            snapshot=snapshot,
            taken_at=float(second),
            past=history.window_starts(),
            recent=history.recent(),
            five_minutes=history.five_minutes(),
        )
        load = assess(reading, ()).forecast.load
        before = None
        if load is not None and load.queue and load.free < load.need:
            before = load.growth / load.need, snapshot.preemptions_total
    return expected, counted


def test_while_the_next_one_does_not_fit_the_last_block_goes_growth_through_need_times_a_second() -> None:
    for longest_output in (100, 400):
        loads = [expected_and_counted(number, longest_output) for number in range(6)]
        expected, counted = (sum(column) for column in zip(*loads, strict=True))
        print(
            f"answers of up to {longest_output} tokens: {expected:.1f} by the formula, {counted:.0f} preemptions"
        )
        assert counted > 50
        assert 0.75 < counted / expected < 1.33
