"""A recording through the daemon's own code: what its ticks and series are."""

import gzip
import json
from pathlib import Path

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest import daemon_run
from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.histories import History, Series, Values
from kvheadroom.lab.recordings import read_recording
from tests.lab.backtest.series import find_events, page, recording


def run(path: Path, *wanted: str, every_seconds: float = 1.0) -> History:
    return run_recording(
        read_recording(path),
        "r",
        every_seconds=every_seconds,
        wanted=frozenset(wanted),
        report=lambda _: None,
    )


def usages(history: History, engine: int = 0) -> list[float | None]:
    return [None if tick is None else tick.kv_usage_ratio for tick in history.engines[engine].ticks]


def only(history: History, name: str, **labels: str) -> Values:
    """The values of the one series with that name and those labels."""
    [values] = [
        values
        for series, values in history.series.items()
        if series.name == name and all(series.label(key) == value for key, value in labels.items())
    ]
    return values


def test_a_tick_shows_the_last_scrape_at_or_before_it(tmp_path: Path) -> None:
    path = recording(tmp_path / "r.gz", page(0.1), page(0.2), page(0.3), page(0.4), every_seconds=0.4)
    assert usages(run(path, every_seconds=0.5)) == [0.1, 0.2, 0.3]


def test_a_scrape_some_microseconds_after_a_tick_is_there_as_in_prometheus(tmp_path: Path) -> None:
    path = recording(tmp_path / "r.gz", page(0.1), page(0.2), every_seconds=1.0004)
    assert usages(run(path)) == [0.1, 0.2]
    assert run(path).engines[0].stretches[0].ends_at == 1.0
    path = recording(tmp_path / "s.gz", page(0.1), page(0.2), every_seconds=1.0006)
    assert usages(run(path)) == [0.1, 0.1]


def test_events_are_found_in_every_scrape_and_not_only_at_ticks(tmp_path: Path) -> None:
    pages = [page(preemptions=number // 2) for number in range(6)]
    history = run(recording(tmp_path / "r.gz", *pages, every_seconds=0.5), every_seconds=2.0)
    [stretch] = history.engines[0].stretches
    assert find_events(stretch.samples) == (1.0, 2.0)
    assert history.num_ticks == len(history.engines[0].ticks) == 2


def test_finished_requests_of_all_reasons_are_added_up(tmp_path: Path) -> None:
    history = run(recording(tmp_path / "r.gz", page(finished=3), page(finished=5)))
    assert [sample.finished_total for sample in history.engines[0].stretches[0].samples] == [4, 6]


def test_the_series_are_what_the_daemon_makes_of_the_page_and_the_page_itself(tmp_path: Path) -> None:
    history = run(
        recording(tmp_path / "r.gz", page(0.5), page(0.25, more='node_x{job="a"} 7\n')),
        "kvheadroom_used_blocks",
        "vllm:kv_cache_usage_perc",
        "node_x",
    )
    assert only(history, "kvheadroom_used_blocks", replica="r", engine="0", job="kvheadroom") == (50, 25)
    assert only(history, "vllm:kv_cache_usage_perc", instance="r", engine="0", job="vllm") == (0.5, 0.25)
    assert only(history, "node_x", exported_job="a", job="vllm") == (None, 7)
    assert only(history, "up", job="vllm") == only(history, "up", job="kvheadroom") == (1, 1)
    names = {series.name for series in history.series}
    assert names == {"kvheadroom_used_blocks", "vllm:kv_cache_usage_perc", "node_x", "up"}


def test_without_wanted_names_no_series_are_kept(tmp_path: Path) -> None:
    assert run(recording(tmp_path / "r.gz", page(), page())).series == {}


def test_labels_are_stored_by_name_with_their_escapes_read(tmp_path: Path) -> None:
    odd = 'x{path="C:\\\\a",quote="\\"",line="\\n",empty=""} 1\n'
    history = run(recording(tmp_path / "r.gz", page(more=odd)), "x")
    assert (
        Series("x", (("instance", "r"), ("job", "vllm"), ("line", "\n"), ("path", "C:\\a"), ("quote", '"')))
        in history.series
    )


def test_a_line_that_is_no_sample_gives_no_series(tmp_path: Path) -> None:
    history = run(recording(tmp_path / "r.gz", page(more='x{a="b" 1\nx\nx{a="1",a="2"} \n')), "x")
    assert {series.name for series in history.series} == {"up"}


def test_in_a_gap_the_daemon_withholds_its_numbers_and_nothing_is_scraped(tmp_path: Path) -> None:
    pages = [page(0.1), page(0.2), *[None] * 10, page(0.3)]
    history = run(recording(tmp_path / "r.gz", *pages), "vllm:kv_cache_usage_perc")
    # The page stands for three intervals, then the daemon keeps what it had for three ticks.
    assert usages(history) == [0.1] + [0.2] * 7 + [None] * 4 + [0.3]
    assert only(history, "vllm:kv_cache_usage_perc") == (0.1, *[0.2] * 4, *[None] * 7, 0.3)
    assert only(history, "up", job="vllm") == (*[1.0] * 5, *[0.0] * 7, 1.0)


def test_a_failed_scrape_is_a_gap_with_what_was_lost_in_it(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    with gzip.open(path, "wt") as file:
        for entry in (
            {"t": 10, "text": page(preemptions=2)},
            {"t": 11, "text": page(preemptions=2)},
            *({"t": at, "err": "timeout"} for at in range(12, 20)),
            {"t": 20, "text": page(preemptions=9)},
        ):
            file.write(json.dumps(entry) + "\n")
    history = run(path)
    [engine] = history.engines
    assert [find_events(stretch.samples) for stretch in engine.stretches] == [(), ()]
    assert (
        "r: engine 0 did not tell its preemptions from 1.0 s to 10.0 s, with 7 preemptions in it: not scored"
        in history.problems
    )


def test_without_a_header_the_usual_distance_of_scrapes_says_what_is_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    with gzip.open(path, "wt") as file:
        for at in (0, 5, 10, 15, 30, 46):
            file.write(json.dumps({"t": at, "text": page()}) + "\n")
    stretches = run(path, every_seconds=5.0).engines[0].stretches
    assert [(one.starts_at, one.ends_at) for one in stretches] == [(0.0, 30.0), (46.0, 46.0)]


def test_what_is_not_counted_for_a_while_is_a_gap(tmp_path: Path) -> None:
    pages = [*[page(preemptions=None)] * 9, *[page(preemptions=2)] * 2, *[page(preemptions=None)] * 9]
    pages += [*[page(preemptions=3)] * 2, *[page(preemptions=None)] * 9]
    history = run(recording(tmp_path / "r.gz", *pages))
    assert [(one.starts_at, one.ends_at) for one in history.engines[0].stretches] == [(9, 10), (20, 21)]
    assert [problem for problem in history.problems if "did not tell" in problem] == [
        "r: engine 0 did not tell its preemptions from 0.0 s to 9.0 s: not scored",
        "r: engine 0 did not tell its preemptions from 10.0 s to 20.0 s, with 1 preemptions in it: not scored",
        "r: engine 0 did not tell its preemptions from 21.0 s to 30.0 s: not scored",
    ]
    assert usages(history) == [0.5] * 31, "the rest of the page is known"


def test_a_scrape_that_came_late_is_a_gap_only_beyond_the_longest_pause(tmp_path: Path) -> None:
    pages = [page(preemptions=0), page(preemptions=0), None, None, None, page(preemptions=1)]
    path = recording(tmp_path / "r.gz", *pages)

    def stretches(longest_pause_seconds: float) -> list[tuple[float, float]]:
        history = run_recording(
            read_recording(path),
            "r",
            every_seconds=1.0,
            wanted=frozenset(),
            report=lambda _: None,
            longest_pause_seconds=longest_pause_seconds,
        )
        return [(one.starts_at, one.ends_at) for one in history.engines[0].stretches]

    assert stretches(3.9) == [(0, 1), (5, 5)]
    assert stretches(4.0) == [(0, 5)]


def test_how_far_it_is_is_told_now_and_then(tmp_path: Path) -> None:
    def told(num_ticks: int) -> list[str]:
        reports: list[str] = []
        path = recording(tmp_path / f"{num_ticks}.gz", page(), page(), every_seconds=num_ticks - 1.0)
        run_recording(read_recording(path), "r", every_seconds=1.0, wanted=frozenset(), report=reports.append)
        return reports

    assert told(500) == []
    assert told(1001) == ["r: tick 500 of 1,001", "r: tick 1,000 of 1,001"]
    assert len(told(20_000)) == 19


def test_of_several_servers_behind_one_address_nothing_can_be_scored(tmp_path: Path) -> None:
    pages = [
        page(preemptions=10 if number % 2 else 3, more=f"process_start_time_seconds {800 + number % 2}\n")
        for number in range(6)
    ]
    history = run(recording(tmp_path / "r.gz", *pages))
    assert history.why_not == (
        "several servers answer at its address in turn, and what one has counted the other has not"
    )
    assert run(recording(tmp_path / "one.gz", *pages[::2])).why_not is None


def test_every_restart_of_a_long_history_is_told(tmp_path: Path) -> None:
    pages = [page(more=f"process_start_time_seconds {number}\n") for number in range(1, 71)]
    history = run(recording(tmp_path / "r.gz", *pages))
    assert sum("restarted" in problem for problem in history.problems) == 69


def test_a_clock_that_jumped_ahead_leaves_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    with gzip.open(path, "wt") as file:
        for at in (0, 1, 2, 3602, 3603):
            file.write(json.dumps({"t": at, "text": page()}) + "\n")
    history = run(path, every_seconds=60.0)
    assert [one.starts_at for one in history.engines[0].stretches] == [0.0, 3602.0]
    assert (
        history.problems[-1] == "r: engine 0 did not tell its preemptions from 2.0 s to 3602.0 s: not scored"
    )


def test_a_restart_and_another_model_are_told(tmp_path: Path) -> None:
    def started(at: int) -> str:
        return f"process_start_time_seconds {at}\n"

    history = run(
        recording(
            tmp_path / "r.gz",
            page(preemptions=9, more=started(1)),
            page(preemptions=0, more=started(1000), model="other"),
            page(preemptions=1, more=started(1000), model="other"),
        )
    )
    assert "r: at 1.0 s restarted: its process started anew" in history.problems
    assert "r: at 1.0 s model changed: engine 0: model m -> other" in history.problems
    assert find_events(history.engines[0].stretches[0].samples) == (2.0,)


def test_a_value_that_cannot_be_true_is_told_and_left_out(tmp_path: Path) -> None:
    history = run(recording(tmp_path / "r.gz", page(0.5), page(-0.3875), page(0.5)))
    assert usages(history) == [0.5, None, 0.5]
    assert history.problems == (
        "r: bad value, at 1 of 3 ticks: engine 0: kv_cache_usage_perc = -0.3875 dropped, it is negative",
    )


def test_engines_of_one_server_are_kept_apart(tmp_path: Path) -> None:
    history = run(
        recording(tmp_path / "r.gz", page(0.1) + page(0.9, engine="1", preemptions=5)),
        "vllm:kv_cache_usage_perc",
    )
    assert [engine.engine for engine in history.engines] == ["0", "1"]
    assert (usages(history, 0), usages(history, 1)) == ([0.1], [0.9])
    assert only(history, "vllm:kv_cache_usage_perc", engine="1") == (0.9,)


def test_an_engine_that_comes_later_or_goes_is_known_for_its_time_alone(tmp_path: Path) -> None:
    both = page(0.1) + page(0.9, engine="1", preemptions=5)
    history = run(recording(tmp_path / "r.gz", page(0.1), *[both] * 3, *[page(0.1)] * 6, both))
    first, second = history.engines
    assert (first.engine, len(first.stretches), second.engine) == ("0", 1, "1")
    assert [(one.starts_at, one.ends_at) for one in second.stretches] == [(1.0, 3.0), (10.0, 10.0)]
    assert [tick is None for tick in second.ticks] == [True] + [False] * 3 + [True] * 6 + [False]
    assert [find_events(one.samples) for one in second.stretches] == [(), ()], "5 is no rise"
    assert "r: engine 1 did not tell its preemptions from 3.0 s to 10.0 s: not scored" in history.problems


def test_a_counter_that_fell_without_a_word_of_the_process_is_told_as_a_restart(tmp_path: Path) -> None:
    pages = [
        page(preemptions=9, finished=90),
        page(preemptions=0, finished=0),
        page(preemptions=1, finished=0),
    ]
    history = run(recording(tmp_path / "r.gz", *pages))
    assert [problem for problem in history.problems if "restarted" in problem]
    assert find_events(history.engines[0].stretches[0].samples) == (2.0,)


def test_two_series_of_one_figure_are_told(tmp_path: Path) -> None:
    twice = page(0.5) + 'vllm:kv_cache_usage_perc{engine="0",model_name="other"} 0.25\n'
    history = run(recording(tmp_path / "r.gz", twice, twice))
    assert usages(history) == [0.5, 0.5]
    [problem] = history.problems
    assert problem == (
        "r: duplicate series, at 2 of 2 ticks: engine 0: kv_cache_usage_perc stands there 2 times; the largest"
        " value is taken"
    )


def test_pages_without_an_engine_give_a_history_without_one(tmp_path: Path) -> None:
    text = "# TYPE vllm:num_requests_running gauge\n"
    history = run(recording(tmp_path / "r.gz", text, text))
    assert history.engines == ()


def test_more_ticks_than_can_be_held_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_run, "MAX_TICKS", 2)
    path = recording(tmp_path / "r.gz", page(), page(), page())
    with pytest.raises(
        OperatorError, match=r"--every: r lasts 0\.0 days, which would be 3 ticks; at most 2 "
    ):
        run(path)
