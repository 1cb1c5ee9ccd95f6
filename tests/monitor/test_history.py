"""What is remembered of an engine: windows reach back whole or not at all, and memory is bounded."""

import math
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvheadroom.capacity.readings import EngineSnapshot
from kvheadroom.monitor.history import LONGEST_GAP_SECONDS, EngineHistory
from tests.capacity.moments import told

START = 1_700_000_000.0


def said(tokens: float | None, usage: float | None = 0.5) -> EngineSnapshot:
    return EngineSnapshot(engine="0", kv_usage_ratio=usage, prompt_tokens_total=tokens)


def history(times: Iterable[float], interval: float = 5.0) -> EngineHistory:
    """Scrapes at these seconds; the counter is the second itself."""
    kept = EngineHistory(interval)
    for at in times:
        kept.add(said(at), START + at, 100.0)
    return kept


def starts(kept: EngineHistory) -> dict[str, float]:
    """At which second each window begins."""
    return {name: moment.taken_at - START for name, moment in kept.window_starts().items()}


def every(step: float, until: float) -> list[float]:
    return [step * number for number in range(int(until / step) + 1)]


def test_a_window_is_known_once_it_reaches_back_whole() -> None:
    assert starts(history(every(5.0, 50.0))) == {}
    assert starts(history(every(5.0, 60.0))) == {"1m": 0.0}
    assert starts(history(every(5.0, 290.0))) == {"1m": 230.0}
    assert starts(history(every(5.0, 300.0))) == {"1m": 240.0, "5m": 0.0}
    assert starts(history(every(5.0, 3_600.0))) == {"1m": 3_540.0, "5m": 3_300.0, "1h": 0.0}
    assert starts(history(every(5.0, 10_000.0))) == {"1m": 9_940.0, "5m": 9_700.0, "1h": 6_420.0}


def test_a_scrape_that_comes_a_little_late_does_not_shorten_a_window_by_an_interval() -> None:
    assert starts(history([*every(30.0, 270.0), 301.2], 30.0)) == {"1m": 240.0, "5m": 0.0}


def test_a_window_begins_with_what_the_page_said_then() -> None:
    kept = history(every(5.0, 59.0))
    kept.add(said(None, usage=0.75), START + 60.0, 100.0)
    assert told(kept.window_starts()["1m"]) == {"prompt_tokens_total": 0.0, "kv_usage_ratio": 0.5}
    kept = history(every(5.0, 0.0))
    kept.add(said(None, usage=0.75), START + 5.0, 100.0)
    for at in every(5.0, 60.0):
        kept.add(said(at), START + 10.0 + at, 100.0)
    # Absent then is absent, and no 0.
    assert told(kept.window_starts()["1m"]) == {"prompt_tokens_total": 0.0, "kv_usage_ratio": 0.5}
    first, second, absent, *_ = kept.five_minutes().of("prompt_tokens_total")
    assert (first, absent) == (0.0, 0.0)
    assert math.isnan(second)


@pytest.mark.parametrize(
    ("tokens", "after", "started_at", "goes_on"),
    [
        (1_000.0, 5.0, 100.0, True),
        # Its page does not tell the start time for once.
        (1_000.0, 5.0, None, True),
        (1_000.0, 15.0, 100.0, True),
        # A gap of more than three scrapes, another process, a counter that fell, a clock set back.
        (1_000.0, 15.1, 100.0, False),
        (1_000.0, 5.0, 200.0, False),
        (40.0, 5.0, None, False),
        (1_000.0, -3.0, 100.0, False),
        (1_000.0, 7_196.0, 100.0, False),
    ],
)
def test_a_gap_a_restart_or_a_clock_set_back_begins_anew(
    tokens: float, after: float, started_at: float | None, *, goes_on: bool
) -> None:
    kept = history(every(5.0, 600.0))
    kept.add(said(tokens), START + 600.0 + after, started_at)
    assert bool(kept.window_starts()) is goes_on
    if not goes_on:
        assert list(kept.five_minutes().of("prompt_tokens_total")) == [tokens]
        assert kept.window_starts() == {}


@pytest.mark.parametrize(("interval", "longest"), [(0.5, 15.0), (1.0, 15.0), (5.0, 15.0), (30.0, 90.0)])
def test_a_server_that_answers_late_for_a_while_keeps_its_past(interval: float, longest: float) -> None:
    for gap, goes_on in ((longest, True), (longest + 0.1, False)):
        kept = history(every(interval, 600.0), interval)
        kept.add(said(1_000.0), START + 600.0 + gap, 100.0)
        assert bool(kept.window_starts()) is goes_on


@pytest.mark.parametrize(("interval", "known"), [(15.0, {"1m", "5m"}), (60.0, {"1m", "5m"}), (120.0, {"5m"})])
def test_no_window_is_made_of_scrapes_that_are_further_apart_than_it_is_long(
    interval: float, known: set[str]
) -> None:
    assert starts(history(every(interval, 1_800.0), interval)).keys() == known


def test_past_figures_are_those_of_every_scrape_of_five_minutes() -> None:
    past = history(every(5.0, 4_000.0)).five_minutes()
    assert [at - START for at in past.times] == every(5.0, 4_000.0)[-61:]
    assert [START + tokens for tokens in past.of("prompt_tokens_total")] == list(past.times)
    assert list(past.of("kv_usage_ratio")) == [0.5] * len(past.times)
    assert list(EngineHistory(5.0).five_minutes().times) == []


def test_past_figures_stay_as_they_were_when_handed_over() -> None:
    kept = history(every(5.0, 1_000.0))
    past, start = kept.five_minutes(), kept.window_starts()["5m"]
    # As text, since NaN is never equal to itself.
    before = repr((past, start))
    kept.add(said(1_005.0), START + 1_005.0, 100.0)
    kept.add(said(0.0), START + 1_010.0, 200.0)
    assert repr((past, start)) == before
    assert len(kept.five_minutes().times) == 1


def ages(kept: EngineHistory) -> dict[str, float]:
    """How long ago each of the recent instants is."""
    assert kept.recent().previous is not None
    now = kept.five_minutes().times[-1]
    recent = kept.recent()
    names = ("previous", "seconds_10", "seconds_30", "oldest")
    told = {name: getattr(recent, name) for name in names}
    return {name: now - moment.taken_at for name, moment in told.items() if moment is not None}


def test_recent_instants_are_those_nearest_to_so_long_ago() -> None:
    seconds = {"seconds_10": 10.0, "seconds_30": 30.0}
    assert ages(history(every(1.0, 100.0), 1.0)) == {"previous": 1.0, **seconds, "oldest": 100.0}
    assert ages(history(every(5.0, 1_000.0))) == {"previous": 5.0, **seconds, "oldest": 305.0}
    assert ages(history(every(5.0, 20.0))) == {"previous": 5.0, "seconds_10": 10.0, "oldest": 20.0}
    # Scrapes 15 s apart have none that is near to 10 s ago.
    apart = ages(history(every(15.0, 90.0), 15.0))
    assert apart == {"previous": 15.0, "seconds_30": 30.0, "oldest": 90.0}


def test_the_mean_usage_is_of_the_scrapes_of_30_seconds() -> None:
    kept = EngineHistory(5.0)
    for number, usage in enumerate([1.0, 1.0, 0.2, 0.3, 0.4, None, 0.6, 0.7, 0.8]):
        kept.add(said(0.0, usage), START + 5.0 * number, 100.0)
    # Of 10 to 40 s; one page did not tell it.
    assert kept.recent().usage_of_30_seconds == pytest.approx(0.5)
    assert history(every(5.0, 20.0)).recent().usage_of_30_seconds is None


def test_after_a_restart_or_a_gap_there_is_no_scrape_before() -> None:
    for at, started_at in ((1_005.0, 200.0), (2_000.0, 100.0)):
        kept = history(every(5.0, 1_000.0))
        kept.add(said(5_000.0), START + at, started_at)
        recent = kept.recent()
        assert recent.previous is recent.seconds_10 is recent.seconds_30 is None
        kept.add(said(5_001.0), START + at + 5.0, started_at)
        previous = kept.recent().previous
        assert previous is not None
        assert previous.of("prompt_tokens_total") == 5_000.0


@pytest.mark.parametrize("interval", [0.25, 1.0, 5.0])
def test_memory_is_bounded_however_long_and_often_it_is_asked(interval: float, seeded: random.Random) -> None:
    kept = EngineHistory(interval)
    tracemalloc.start()
    try:
        at = START
        for number in range(int(4_000 / interval)):
            at += interval * seeded.uniform(0.9, 1.1)
            kept.add(said(float(number)), at, 100.0)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # At the shortest of the intervals.
    assert len(kept.five_minutes().times) <= min(300 / (0.9 * interval), 334) + 2
    assert set(kept.window_starts()) == {"1m", "5m", "1h"}
    assert held < (88_000 if interval <= 1.0 else 32_000)


def test_counters_of_lmcache_that_are_cleared_are_no_restart_of_the_server() -> None:
    kept = EngineHistory(5.0)
    for number in range(13):
        lookups = 1000.0 + number if number < 12 else 0.0
        kept.add(
            replace(said(float(number)), lmcache_lookup_tokens_total=lookups), START + 5.0 * number, 100.0
        )
    moment = kept.window_starts()["1m"]
    assert moment.taken_at == START
    assert moment.of("lmcache_lookup_tokens_total") == 1000.0


@pytest.mark.parametrize(
    ("after", "tokens", "started_at", "follows"),
    [
        (5.0, 5_000.0, 100.0, True),
        # A gap ends what is kept, and not the run.
        (120.0, 5_000.0, 100.0, True),
        (120.1, 5_000.0, 100.0, False),
        (30.0, 5_000.0, 200.0, False),
        (30.0, 1.0, 100.0, False),
        (-1.0, 5_000.0, 100.0, False),
    ],
)
def test_a_scrape_follows_another_one_of_the_same_run_for_two_minutes(
    after: float, tokens: float, started_at: float, *, follows: bool
) -> None:
    kept = history(every(5.0, 1_000.0))
    assert kept.add(said(tokens), START + 1_000.0 + after, started_at) is follows
    assert bool(kept.window_starts()) is (follows and after <= LONGEST_GAP_SECONDS)


def test_the_last_hour_has_a_scrape_a_minute_and_is_copied_no_more_often() -> None:
    kept = history(every(5.0, 7_205.0))
    hour = kept.last_hour()
    assert [at - START for at in hour.times] == [3_600.0 + 60.0 * number for number in range(61)]
    assert list(hour.kv_usage_ratios) == [0.5] * 61
    kept.add(said(7_210.0), START + 7_210.0, 100.0)
    assert kept.last_hour() is hour
    kept.add(said(7_260.0), START + 7_260.0, 100.0)
    assert kept.last_hour().times[-1] == START + 7_260.0
    assert hour.times[-1] == START + 7_200.0


def test_the_last_hour_begins_anew_after_a_restart() -> None:
    kept = history(every(5.0, 600.0))
    kept.add(said(0.0), START + 605.0, 200.0)
    assert [at - START for at in kept.last_hour().times] == [605.0]
