"""The history of a Prometheus, real and lying, as recordings."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import PRODUCTION, SMALL
from kvheadroom.lab.backtest.histories import ALWAYS_WANTED, History
from kvheadroom.lab.backtest.history_folder import Wanted
from kvheadroom.lab.backtest.prometheus_history import Fetched, fetch_history
from kvheadroom.lab.backtest.results import EngineResult, score_history
from kvheadroom.lab.recordings import read_recording
from kvheadroom.sources import prometheus_parts as module
from kvheadroom.sources.prometheus_api import PrometheusApi
from tests.doubles.http_server import Answer, text_answer
from tests.doubles.prometheus_api import Asked, instants, matrix, prometheus_api, refusal
from tests.end_to_end.prometheus_server import Binaries, PrometheusServer

RECORDINGS = Path(__file__).parents[2] / "recordings" / "backtest"
NOW = 1_800_000_000.0
LABELS = {"job": "v", "instance": "gpu-7:8000", "engine": "0", "model_name": "m"}


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES_SECONDS", (0.0, 0.0))


def fetch(
    url: str,
    folder: Path,
    *,
    range_seconds: float = 300.0,
    every_seconds: float = 1.0,
    now: float = NOW,
    select: str = "",
    rule_metrics: tuple[str, ...] = (),
) -> Fetched:
    state, recordings = folder / "state", folder / f"recordings-{time.monotonic_ns()}"
    state.mkdir(exist_ok=True)
    recordings.mkdir()
    wanted = Wanted(
        url=url,
        select=select,
        every_seconds=every_seconds,
        range_seconds=range_seconds,
        rule_metrics=rule_metrics,
    )
    api = PrometheusApi(url=url, timeout_seconds=3.0)
    return fetch_history(api, wanted, now=now, state=state, recordings=recordings, report=lambda _: None)


def histories(fetched: Fetched, *wanted: str, every_seconds: float = 1.0) -> list[History]:
    return [
        run_recording(
            read_recording(server.recording),
            server.name,
            every_seconds=every_seconds,
            wanted=ALWAYS_WANTED | frozenset(wanted),
            report=lambda _: None,
            target=(server.job, server.instance),
        )
        for server in fetched.servers
    ]


def _nothing(_: float) -> str | None:
    return None


def told_of(
    asked: Asked, values: dict[str, Callable[[float], str | None]], *labels: dict[str, str]
) -> list[tuple[dict[str, str], list[tuple[float, str]]]]:
    """One series of the metric that is asked for, for each of the labels; seconds count from the range's end."""
    found = re.search(r"last_over_time\((\S+?)\{", asked["query"]) or re.match(r"([\w:]+)", asked["query"])
    assert found is not None
    value = values.get(found[1], _nothing)
    points = [(at, text) for at in instants(asked) if (text := value(at - NOW)) is not None]
    return [(one | {"__name__": found[1]}, points) for one in labels or (LABELS,) if points]


def telling(
    values: dict[str, Callable[[float], str | None]], *labels: dict[str, str]
) -> Callable[[Asked], Answer]:
    """A Prometheus that has no more than that."""
    return lambda asked: matrix(*told_of(asked, values, *labels))


STEADY: dict[str, Callable[[float], str | None]] = {
    "vllm:num_requests_running": lambda _: "3",
    "vllm:num_requests_waiting": lambda _: "0",
    "vllm:kv_cache_usage_perc": lambda _: "0.5",
    "vllm:num_preemptions_total": lambda at: "7" if at < -100 else "9",
}


# --- the real one ---


@pytest.fixture(scope="module")
def started_at() -> float:
    return float(int(time.time()) - 170)


@pytest.fixture(scope="module")
def prometheus(
    each_prometheus: Binaries, started_at: float, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    """One that scraped the bursts every 0.5 s and ended a moment ago."""
    folder = tmp_path_factory.mktemp("prometheus")
    recording = read_recording(RECORDINGS / "burst.jsonl.gz")
    with (folder / "history").open("w") as file:
        for offset, page in recording.pages():
            for line in page.splitlines():
                sample = re.fullmatch(r"([a-z_:]+)(?:\{(.*)\})? (\S+)", line)
                if sample is not None:
                    labels = 'job="llm",instance="gpu-7:8000"' + (f",{sample[2]}" if sample[2] else "")
                    file.write(f"{sample[1]}{{{labels}}} {sample[3]} {started_at + offset:.3f}\n")
        file.write("# EOF\n")
    command = [
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        "-q",
        str(folder / "history"),
        str(folder / "blocks"),
    ]
    subprocess.run([each_prometheus.promtool, *command], check=True, capture_output=True)
    with PrometheusServer(each_prometheus, [], blocks=folder / "blocks") as server:
        yield server


def result_of(history: History) -> EngineResult:
    [result] = score_history(history, (), SMALL)
    return result


def test_a_real_history_is_scored_as_the_recording_that_it_was(
    prometheus: PrometheusServer, started_at: float, tmp_path: Path
) -> None:
    fetched = fetch(prometheus.base_url, tmp_path, now=started_at + 149.9, range_seconds=149.0)
    assert fetched.problems == ()
    [server] = fetched.servers
    assert (server.name, server.job, server.instance) == ("gpu-7:8000", "llm", "gpu-7:8000")
    [history] = histories(fetched)
    recording = read_recording(RECORDINGS / "burst.jsonl.gz")
    direct = run_recording(recording, "burst", every_seconds=1.0, wanted=ALWAYS_WANTED, report=lambda _: None)
    assert history.started_at == started_at
    assert [
        (tick and tick.kv_usage_ratio, tick and tick.requests_waiting) for tick in history.engines[0].ticks
    ] == [(tick and tick.kv_usage_ratio, tick and tick.requests_waiting) for tick in direct.engines[0].ticks]
    ours, theirs = result_of(history), result_of(direct)
    assert ours.episodes is not None
    assert theirs.episodes is not None
    assert [one.preempted_at for one in ours.episodes] == [21.0, 68.0, 112.0]
    # A scrape every half a second tells some of them apart from a request that finished, and shows them earlier.
    assert [one.preempted_at for one in theirs.episodes] == [20.552, 66.502, 111.021]
    for signal, same in zip(ours.signals, theirs.signals, strict=True):
        assert signal.score is not None
        assert same.score is not None
        assert (signal.name, signal.score.alarms) == (same.name, same.score.alarms)


def test_only_what_is_selected_is_asked_for(
    prometheus: PrometheusServer, started_at: float, tmp_path: Path
) -> None:
    fetched = fetch(
        prometheus.base_url, tmp_path, now=started_at + 100, range_seconds=20, select='job="other"'
    )
    assert fetched.servers == ()
    [problem] = fetched.problems
    assert problem.startswith(
        f"Prometheus at {prometheus.base_url} has neither vllm:num_requests_running nor "
        'kvheadroom_requests_running matching job="other" since '
    )


def test_a_selection_that_is_no_promql_is_told_in_prometheuss_words(
    prometheus: PrometheusServer, tmp_path: Path
) -> None:
    [problem] = fetch(prometheus.base_url, tmp_path, select="job=").problems
    assert problem.startswith(f"Prometheus at {prometheus.base_url}: it answered with status 400: ")
    assert "parse error" in problem


# --- one that lies ---


def test_a_history_without_vllm_is_told_and_gives_no_server(tmp_path: Path) -> None:
    with prometheus_api(lambda _: matrix()) as (url, _):
        fetched = fetch(url, tmp_path)
    assert fetched.servers == ()
    assert fetched.problems[0].startswith(f"Prometheus at {url} has neither vllm:num_requests_running nor ")


def test_one_that_refuses_or_is_not_there_is_told(tmp_path: Path) -> None:
    with prometheus_api(lambda _: refusal(401, "who")) as (url, _):
        assert fetch(url, tmp_path).problems == (
            f"Prometheus at {url}: it refuses access (401); give --bearer-token-file",
        )
    assert fetch(url, tmp_path).problems == (
        f"Prometheus at {url}: it cannot be reached (Connection refused)",
    )


def test_an_answer_that_fails_once_is_asked_for_again(tmp_path: Path) -> None:
    told, failures = telling(STEADY), [1, 2]

    def answer(asked: Asked) -> Answer:
        return refusal(503, "starting") if failures and failures.pop() else told(asked)

    with prometheus_api(answer) as (url, _):
        fetched = fetch(url, tmp_path)
    assert (fetched.problems, len(fetched.servers), failures) == ((), 1, [])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (refusal(500, "out of memory"), "it is not available (500): out of memory"),
        (text_answer('{"status":"succ'), "the answer is no JSON object; is this Prometheus's address?"),
        (refusal(422, "too many samples"), "it answered with status 422: too many samples"),
    ],
)
def test_a_part_of_which_anything_is_missing_is_a_gap_as_a_whole(
    answer: Answer, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_TICKS", 100)
    told = telling(STEADY)

    def lying(asked: Asked) -> Answer:
        is_second = float(asked["start"]) == NOW - 200 and asked["query"].startswith("vllm:num_pre")
        return answer if is_second else told(asked)

    with prometheus_api(lying) as (url, _):
        fetched = fetch(url, tmp_path)
    assert fetched.problems == (
        f"Prometheus did not answer for 2027-01-15 07:56:40 UTC to 2027-01-15 07:58:19 UTC: {why}",
    )
    [history] = histories(fetched)
    [engine] = history.engines
    assert [(one.starts_at, one.ends_at) for one in engine.stretches] == [(0.0, 99.0), (200.0, 300.0)]
    assert (
        "gpu-7:8000: engine 0 did not tell its preemptions from 99.0 s to 200.0 s, with 2 preemptions in it: not scored"
        in (history.problems)
    )
    assert [tick is None for tick in engine.ticks[104:200]] == [True] * 96


def test_what_was_answered_is_kept_and_only_the_rest_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_TICKS", 100)
    told, is_broken = telling(STEADY), True

    def answer(asked: Asked) -> Answer:
        return refusal(500, "broken") if is_broken and float(asked["start"]) == NOW - 200 else told(asked)

    with prometheus_api(answer) as (url, seen):
        first = fetch(url, tmp_path)
        assert len(first.problems) == 1
        is_broken = False
        seen.clear()
        second = fetch(url, tmp_path, now=NOW + 5000)
        assert second.problems == ()
        assert {re.search(r"start=(\d+)", path)[1] for path, _ in seen} == {str(int(NOW - 200))}  # type: ignore[index]
        seen.clear()
        third = fetch(url, tmp_path, now=NOW + 9000)
        assert seen == []
    for fetched in (second, third):
        [history] = histories(fetched)
        assert (history.started_at, history.duration_seconds) == (NOW - 300, 300.0)
        assert len(history.engines[0].stretches) == 1


def test_a_part_that_is_damaged_in_the_folder_is_asked_for_again(tmp_path: Path) -> None:
    with prometheus_api(telling(STEADY)) as (url, seen):
        fetch(url, tmp_path)
        [part] = (tmp_path / "state").glob("part-*")
        part.write_bytes(part.read_bytes()[:-20])
        seen.clear()
        assert fetch(url, tmp_path).problems == ()
        assert seen


def test_labels_that_no_page_can_have_are_left_out(tmp_path: Path) -> None:
    """Prometheus 3 takes any text as the name of a label."""

    def answer(asked: Asked) -> Answer:
        return matrix(*told_of(asked, STEADY, LABELS | {"k8s.pod.name": "p", "é": "e", "pod": "q"}))

    with prometheus_api(answer) as (url, _):
        [history] = histories(fetch(url, tmp_path), "vllm:kv_cache_usage_perc")
    assert [(one.starts_at, one.ends_at) for one in history.engines[0].stretches] == [(0.0, 300.0)]
    assert not [problem for problem in history.problems if "bad line" in problem]
    [series] = [series for series in history.series if series.name == "vllm:kv_cache_usage_perc"]
    assert (series.label("pod"), series.label("k8s.pod.name")) == ("q", "")


def test_a_folder_of_another_history_is_refused(tmp_path: Path) -> None:
    with prometheus_api(telling(STEADY)) as (url, _):
        fetch(url, tmp_path)
        for change in (
            {"range_seconds": 301.0},
            {"every_seconds": 2.0},
            {"select": "a"},
            {"rule_metrics": ("x",)},
        ):
            with pytest.raises(OperatorError, match="holds a history of another address, --range, --every"):
                fetch(url, tmp_path, **change)
        (tmp_path / "state" / "history.json").write_text("{}")
        with pytest.raises(OperatorError, match=r"history\.json is damaged"):
            fetch(url, tmp_path)
        (tmp_path / "state" / "history.json").unlink()
        with pytest.raises(OperatorError, match="holds something else"):
            fetch(url, tmp_path)


def test_one_that_stays_silent_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TICKS", 100)
    told = telling(STEADY)

    def answer(asked: Asked) -> Answer:
        return told(asked) if asked["query"].startswith("group") else refusal(500, "broken")

    with prometheus_api(answer) as (url, seen):
        fetched = fetch(url, tmp_path, range_seconds=900.0)
        assert len(seen) == 1 + 3 * 3
    assert len(fetched.problems) == 10
    assert [problem.rsplit(": ", 1)[1] for problem in fetched.problems] == ["broken"] * 3 + [
        "not asked any more"
    ] * 7


def test_warnings_are_told_once_and_what_came_with_them_is_asked_for_again(tmp_path: Path) -> None:
    told = telling(STEADY)

    def answer(asked: Asked) -> Answer:
        return told(asked) if asked["query"].startswith("group") else matrix(warnings=["a store is missing"])

    with prometheus_api(answer) as (url, seen):
        assert fetch(url, tmp_path).problems == ("Prometheus warns: a store is missing",)
        seen.clear()
        assert fetch(url, tmp_path).problems == ("Prometheus warns: a store is missing",)
        assert seen


def test_servers_that_differ_in_their_job_alone_are_told_apart(tmp_path: Path) -> None:
    with prometheus_api(telling(STEADY, LABELS, LABELS | {"job": "w"}, LABELS | {"instance": "b"})) as (
        url,
        _,
    ):
        fetched = fetch(url, tmp_path)
    assert [server.name for server in fetched.servers] == ["b", "v/gpu-7:8000", "w/gpu-7:8000"]
    assert all(len(history.engines) == 1 for history in histories(fetched))


def test_several_engines_of_a_server_are_kept_apart(tmp_path: Path) -> None:
    with prometheus_api(telling(STEADY, LABELS, LABELS | {"engine": "1"})) as (url, _):
        [history] = histories(fetch(url, tmp_path))
    assert [engine.engine for engine in history.engines] == ["0", "1"]


def test_a_server_that_was_not_there_for_a_while_is_unknown_then(tmp_path: Path) -> None:
    def there(value: str) -> Callable[[float], str | None]:
        return lambda at: None if -250 < at <= -200 else value

    values = STEADY | {name: there(told(-300) or "") for name, told in STEADY.items()}
    with prometheus_api(telling(values)) as (url, _):
        [history] = histories(fetch(url, tmp_path), "vllm:kv_cache_usage_perc")
    assert [(one.starts_at, one.ends_at) for one in history.engines[0].stretches] == [
        (0.0, 50.0),
        (101.0, 300.0),
    ]
    [up] = [
        values
        for series, values in history.series.items()
        if series.name == "up" and series.label("job") == "v"
    ]
    assert up[49:53] == (1.0, 1.0, 0.0, 0.0)
    assert up[99:102] == (0.0, 0.0, 1.0)


def test_labels_that_change_do_not_break_an_engine_in_two_and_another_model_is_told(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Answer:
        before = {name: _until(-150, value) for name, value in STEADY.items()}
        after = {name: _from(-149, value) for name, value in STEADY.items()}
        return matrix(
            *told_of(asked, before, LABELS | {"pod": "a"}),
            *told_of(asked, after, LABELS | {"pod": "b", "model_name": "n"}),
        )

    with prometheus_api(answer) as (url, _):
        [history] = histories(fetch(url, tmp_path), "vllm:kv_cache_usage_perc")
    [engine] = history.engines
    assert [(one.starts_at, one.ends_at) for one in engine.stretches] == [(0.0, 300.0)]
    assert "gpu-7:8000: at 151.0 s model changed: engine 0: model m -> n" in history.problems
    pods = {
        series.label("pod"): [value is not None for value in values]
        for series, values in history.series.items()
        if series.name == "vllm:kv_cache_usage_perc"
    }
    assert pods == {"a": [True] * 151 + [False] * 150, "b": [False] * 151 + [True] * 150}


def _until(end: float, value: Callable[[float], str | None]) -> Callable[[float], str | None]:
    return lambda at: value(at) if at <= end else None


def _from(start: float, value: Callable[[float], str | None]) -> Callable[[float], str | None]:
    return lambda at: value(at) if at >= start else None


def test_a_restart_is_known_by_the_start_of_its_process(tmp_path: Path) -> None:
    values = STEADY | {"process_start_time_seconds": lambda at: "1799990000" if at < -100 else "1799999900.5"}
    with prometheus_api(telling(values, LABELS | {"pod": "a"})) as (url, _):
        [history] = histories(fetch(url, tmp_path))
    assert [problem for problem in history.problems if "restart" in problem] == [
        "gpu-7:8000: at 200.0 s restarted: its process started anew"
    ]


def test_where_only_kvheadroom_was_scraped_its_metrics_are_the_history(tmp_path: Path) -> None:
    values: dict[str, Callable[[float], str | None]] = {
        "kvheadroom_requests_running": lambda _: "3",
        "kvheadroom_requests_waiting": lambda _: "1",
        "kvheadroom_kv_usage_ratio": lambda _: "0.75",
        "kvheadroom_preemptions_total": lambda at: "7" if at < -100 else "9",
    }
    labels = {"job": "kv", "instance": "gpu-7:9878", "replica": "glm-a", "engine": "0", "model_name": "glm"}
    with prometheus_api(telling(values, labels)) as (url, _):
        fetched = fetch(url, tmp_path)
    assert [(server.name, server.job, server.instance) for server in fetched.servers] == [
        ("glm-a", "vllm", "glm-a")
    ]
    [history] = histories(fetched, "kvheadroom_kv_usage_ratio")
    [result] = score_history(history, (), PRODUCTION)
    assert [episode.preempted_at for episode in result.episodes or ()] == [200.0]
    [usage] = [
        values for series, values in history.series.items() if series.name == "kvheadroom_kv_usage_ratio"
    ]
    assert set(usage) == {0.75}
    [lacking] = fetched.problems
    assert lacking.startswith("only kvheadroom was scraped, so the size of the pool")


def test_metrics_of_rules_are_fetched_where_they_are_the_servers_own(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(parameters: Asked) -> Answer:
        asked.append(parameters["query"])
        return telling(STEADY)(parameters)

    with prometheus_api(answer) as (url, _):
        fetch(
            url,
            tmp_path,
            select='a="b"',
            rule_metrics=("kvheadroom_x", "up", "vllm:e2e_bucket", "process_cpu"),
        )
    assert 'vllm:e2e_bucket{a="b"}' in asked
    assert 'process_cpu and on (job, instance) vllm:num_requests_running{a="b"}' in asked
    assert not any("kvheadroom_x" in query or query.startswith("up") for query in asked)
