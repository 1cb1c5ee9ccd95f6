"""The production workload: what was asked for, the same each time, and readable by all of kvheadroom."""

import dataclasses
import gzip
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.lab.recordings import Recording, read_recording
from kvheadroom.lab.simulator.page import Pages
from kvheadroom.lab.simulator.production import (
    ENGINE,
    POOL_TOKENS,
    SESSIONS,
    SPEED,
    STARTS_AT,
    WORKDAYS,
    Simulated,
    simulate,
)
from kvheadroom.lab.simulator.request_log import LoggedArrivals, read_request_log
from kvheadroom.lab.simulator.run import Run
from kvheadroom.lab.simulator.workload import WorkdayArrivals, day_shape, mean_token_seconds
from kvheadroom.sources.vllm_metrics import parse_page

HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Files:
    recording: Recording
    log: Path
    told: Simulated


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The first day, with a page each minute."""
    folder = tmp_path_factory.mktemp("simulated")
    one_day = dataclasses.replace(WORKDAYS, num_days=1)
    told = simulate(folder / "day.jsonl.gz", folder / "day.requests.jsonl.gz", one_day, interval_seconds=60.0)
    return Files(read_recording(folder / "day.jsonl.gz"), folder / "day.requests.jsonl.gz", told)


def requests_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def snapshots(recording: Recording) -> Iterator[tuple[float, EngineSnapshot]]:
    for offset, text in recording.pages():
        page = parse_page(text.encode())
        assert isinstance(page, VllmPage)
        assert page.problems == ()
        yield offset, page.engines[0]


def test_the_engine_is_the_one_that_was_asked_for() -> None:
    assert POOL_TOKENS == 2_003_840
    assert ENGINE.block_size == 64
    assert (SPEED.prefill_tokens_per_second, SPEED.decode_tokens_per_second) == (8000.0, 30.0)
    assert (WORKDAYS.num_days, WORKDAYS.seed, WORKDAYS.lowest_peak, WORKDAYS.highest_peak) == (
        14,
        1,
        0.7,
        1.2,
    )


def test_the_page_is_read_as_that_engine(day: Files) -> None:
    assert day.recording.num_pages == day.told.num_pages == 1440
    assert day.recording.origin["vllm_version"] == "0.33.0"
    read = list(snapshots(day.recording))
    first = read[0][1]
    assert (first.num_blocks, first.block_size, first.pool_tokens) == (31_310, 64, 2_003_840)
    assert first.max_concurrency == pytest.approx(2_003_840 / 1_048_576)
    last = read[-1][1]
    assert last.requests_waiting == last.requests_waiting_capacity
    assert last.requests_waiting_deferred == 0
    assert last.external_prefix_cache_queries_total is None, (
        "there is no tier beside the pool, so nothing is said of one"
    )
    assert max(engine.kv_usage_ratio or 0 for _, engine in read) > 0.95
    assert (last.preemptions_total or 0) > 0


def test_counters_never_fall_and_agree_with_the_log(day: Files) -> None:
    read = [engine for _, engine in snapshots(day.recording)]
    for name in (
        "preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
    ):
        values = [getattr(engine, name) for engine in read]
        assert values[0] == 0
        assert all(before <= after for before, after in pairwise(values)), name
    ends_at = STARTS_AT + 86_340
    requests = requests_of(day.log)
    begun = [one for one in requests if one["t_first"] is not None and one["t_first"] <= ends_at]
    assert read[-1].prompt_tokens_total == sum(one["prompt_tokens"] for one in begun)
    assert len(requests) == day.told.num_requests
    assert {one["status"] for one in requests} == {200, -1}
    assert all((one["t_first"] is None) == (one["status"] == -1) for one in requests)


def test_the_same_seed_gives_the_same_files_and_another_one_others(tmp_path: Path) -> None:
    quiet = dataclasses.replace(WORKDAYS, num_days=1, lowest_peak=0.1, highest_peak=0.2)
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        simulate(
            tmp_path / f"{name}.gz",
            tmp_path / f"{name}.requests.gz",
            dataclasses.replace(quiet, seed=seed),
            interval_seconds=600.0,
        )
    for kind in ("gz", "requests.gz"):
        first, again, other = (
            (tmp_path / f"{name}.{kind}").read_bytes() for name in ("first", "again", "other")
        )
        assert first == again != other


def test_the_log_simulates_to_the_same_pages(day: Files) -> None:
    arrivals = LoggedArrivals(read_request_log(day.log), ENGINE.block_size)
    run = Run(ENGINE, arrivals, SPEED, starts_at=STARTS_AT)
    pages = Pages(ENGINE, model_name="GLM-5.3", starts_at=STARTS_AT)
    for offset, text in day.recording.pages():
        run.advance(STARTS_AT + offset)
        assert pages.text(run) == text, offset


def test_sessions_grow_to_their_length_and_send_their_history_again() -> None:
    rng = random.Random(5)
    finals = []
    for _ in range(2000):
        turns = list(SESSIONS.turns(rng))
        assert turns[0].num_prefix_tokens == 0
        assert all(turn.pause_seconds is not None for turn in turns[:-1])
        assert turns[-1].pause_seconds is None
        for before, after in pairwise(turns):
            assert after.num_prefix_tokens == before.num_prompt_tokens + before.num_output_tokens
            assert after.num_prompt_tokens > after.num_prefix_tokens
        finals.append(turns[-1].num_prompt_tokens + turns[-1].num_output_tokens)
    finals.sort()
    # The turn that would cross the drawn length is not sent, so sessions end up to a turn below it.
    assert 60_000 < finals[1000] < 100_000
    assert finals[-1] < 256_000 + 32_000
    assert sum(final < 30_000 - 10_000 for final in finals) < 40


def test_a_day_has_a_night_and_two_peaks() -> None:
    shape = [day_shape(quarter * HOUR / 4) for quarter in range(96)]
    assert max(shape) == day_shape(10.5 * HOUR) == day_shape(15.5 * HOUR) == 1.0
    assert max(shape[:24]) < 0.07, "until 6 in the morning"
    assert day_shape(13 * HOUR) < 0.35
    peaks = [at for at in range(1, 95) if shape[at - 1] < shape[at] >= shape[at + 1]]
    assert peaks == [42, 62]


def test_open_sessions_hold_at_a_days_peak_what_was_drawn() -> None:
    """Little's law: sessions per second x what one holds, which the arrivals are made by, against counting them."""
    held = mean_token_seconds(SESSIONS, 1, SPEED)
    again = mean_token_seconds(SESSIONS, 2, SPEED)
    assert held == pytest.approx(again, rel=0.1)
    flat = dataclasses.replace(WORKDAYS, num_days=1, lowest_peak=0.5, highest_peak=0.5)
    arrivals = WorkdayArrivals(flat, starts_at=0.0, pool_tokens=POOL_TOKENS, speed=SPEED)
    assert arrivals.peaks == (0.5,)
    firsts = 0
    while (at := arrivals.next_at()) is not None:
        request = arrivals.take()
        firsts += 1
        assert request.turn == 0, "no session goes on without its answer"
        assert 0 <= at < 86_400
    per_second = 0.5 * POOL_TOKENS / held
    expected = sum(per_second * day_shape(second) for second in range(0, 86_400, 10)) * 10
    assert firsts == pytest.approx(expected, abs=4 * expected**0.5)


@pytest.mark.lab
def test_all_fourteen_days_come_out_as_documented(tmp_path: Path) -> None:
    told = simulate(tmp_path / "all.jsonl.gz", tmp_path / "all.requests.jsonl.gz")
    assert (told.num_pages, told.num_requests) == (80_640, 106_773)
    requests = requests_of(tmp_path / "all.requests.jsonl.gz")
    assert sum(one["status"] == -1 for one in requests) == 684
    assert len({one["session"] for one in requests}) == 5_451
    read = list(snapshots(read_recording(tmp_path / "all.jsonl.gz")))
    days = [[engine for at, engine in read if at // 86_400 == day] for day in range(14)]
    preempted = [(day[-1].preemptions_total or 0) - (day[0].preemptions_total or 0) for day in days]
    assert preempted == [26, 0, 77, 60, 0, 0, 8, 38, 29, 41, 0, 18, 0, 0]
    high = sum((engine.kv_usage_ratio or 0) > 0.9 for _, engine in read)
    assert high / len(read) == pytest.approx(0.1026, abs=0.0001)
