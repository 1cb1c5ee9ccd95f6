"""Alerts evaluated by promtool, of both generations of Prometheus."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.capacity.errors import OperatorError
from kvheadroom.lab.backtest import promtool as promtool_module
from kvheadroom.lab.backtest.alarms import find_alarms
from kvheadroom.lab.backtest.alert_rules import Rules, own_rules, read_rules
from kvheadroom.lab.backtest.baselines import baselines
from kvheadroom.lab.backtest.daemon_run import run_recording
from kvheadroom.lab.backtest.events import SMALL, EngineSample
from kvheadroom.lab.backtest.histories import (
    ALWAYS_WANTED,
    PROBABILITY,
    EngineHistory,
    History,
    Series,
    Values,
)
from kvheadroom.lab.backtest.promtool import ABSENT, check_rules, find_promtool, run_alerts, target_problems
from kvheadroom.lab.backtest.results import AlertRun, Firing
from kvheadroom.lab.recordings import read_recording
from tests.end_to_end.prometheus_server import Binaries, generation_of
from tests.lab.backtest.series import firing

RECORDINGS = Path(__file__).parents[2] / "recordings" / "backtest"
Rule = dict[str, Any]


@pytest.fixture(scope="session")
def promtool(each_prometheus: Binaries) -> Path:
    return each_prometheus.promtool


def rules_file(tmp_path: Path, *rules: Rule) -> Rules:
    path = tmp_path / "r.yml"
    path.write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    return read_rules(path)


def series(name: str, **labels: str) -> Series:
    return Series(name, tuple(sorted(labels.items())))


def history_of(
    told: dict[Series, Values], *, engines: Sequence[str] = ("0",), every_seconds: float = 1.0
) -> History:
    ticks = len(next(iter(told.values())))
    seen = tuple(EngineSample(at=tick * every_seconds) for tick in range(ticks))
    return History(
        name="h",
        duration_seconds=(ticks - 1) * every_seconds,
        every_seconds=every_seconds,
        engines=tuple(EngineHistory(engine=engine, stretches=(), ticks=seen) for engine in engines),
        series=told,
    )


def run(promtool: Path | None, rules: Rules, history: History) -> tuple[AlertRun, ...]:
    return run_alerts(promtool, rules, history, lambda _: None)


def fires(promtool: Path, tmp_path: Path, rule: Rule, history: History, engine: str = "0") -> str:
    """A letter per tick."""
    [alert] = run(promtool, rules_file(tmp_path, {"alert": "A", **rule}), history)
    assert alert.why_not is None
    return "".join({True: "#", False: ".", None: "?"}[fires] for fires in alert.firing[engine])


def test_for_and_keep_firing_for_are_prometheuss(promtool: Path, tmp_path: Path) -> None:
    rule = {"expr": "x > 0", "for": "2s", "keep_firing_for": "3s"}
    told: Values = [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]
    # 3 s are counted from the first tick at which it no longer held.
    assert fires(promtool, tmp_path, rule, history_of({series("x"): told})) == "...#####....."


def test_ticks_of_half_a_second_and_long_histories_are_told_exactly(promtool: Path, tmp_path: Path) -> None:
    ticks = [3, 77, 7_201, 7_202, 9_999]
    told = [float(tick in ticks) for tick in range(10_000)]
    shown = fires(promtool, tmp_path, {"expr": "x > 0"}, history_of({series("x"): told}, every_seconds=0.5))
    assert [tick for tick, letter in enumerate(shown) if letter == "#"] == ticks


def test_a_series_that_ends_is_stale_at_once(promtool: Path, tmp_path: Path) -> None:
    told: Values = [None, 1, 1, None, None, 1, None]
    assert fires(promtool, tmp_path, {"expr": "x > 0"}, history_of({series("x"): told})) == ".##..#."


def test_every_value_is_told_as_it_is(promtool: Path, tmp_path: Path) -> None:
    values: Values = [1e-07, 1e20, -1.5, float("nan"), float("inf"), float("-inf"), 0.1 + 0.2, 2.0**53, 0.0]
    told = history_of({series("x"): values})
    for expression, shown in (
        ("x == 1e-07", "#........"),
        ("x == 1e20", ".#......."),
        ("x == -1.5", "..#......"),
        ("x != x", "...#....."),
        ("x == Inf", "....#...."),
        ("x == -Inf", ".....#..."),
        ("x == 0.30000000000000004", "......#.."),
        ("x == 9007199254740992", ".......#."),
        ("x == 0", "........#"),
    ):
        assert fires(promtool, tmp_path, {"expr": expression}, told) == shown


def test_an_alert_is_about_the_engine_that_its_labels_name(promtool: Path, tmp_path: Path) -> None:
    told = history_of(
        {series("x", engine="0"): [0, 1, 0], series("x", engine="1"): [0, 0, 1]}, engines=("0", "1")
    )
    assert fires(promtool, tmp_path, {"expr": "x > 0"}, told, "0") == ".#."
    assert fires(promtool, tmp_path, {"expr": "x > 0"}, told, "1") == "..#"


def test_an_alert_without_an_engine_is_about_all_of_them(promtool: Path, tmp_path: Path) -> None:
    told = history_of(
        {series("x", engine="0"): [0, 1, 0], series("x", engine="1"): [0, 0, 1]}, engines=("0", "1")
    )
    for engine in ("0", "1"):
        assert fires(promtool, tmp_path, {"expr": "sum(x) > 0"}, told, engine) == ".##"


def test_an_alert_of_an_engine_that_was_never_seen_is_about_none(promtool: Path, tmp_path: Path) -> None:
    told = history_of({series("x", engine="7"): [1, 1]})
    assert fires(promtool, tmp_path, {"expr": "x > 0"}, told) == ".."


def test_odd_labels_come_through(promtool: Path, tmp_path: Path) -> None:
    odd = 'a"}{,\\ \n\t\x7f\x85–😀\ufeff'
    told = history_of({series("x", p=odd, engine="0"): [0, 1], series("x", engine="1"): [1, 0]})
    assert fires(promtool, tmp_path, {"expr": "x > 0"}, told) == ".#"


def test_recording_rules_are_evaluated_before_the_alerts_below_them(promtool: Path, tmp_path: Path) -> None:
    rules = rules_file(
        tmp_path, {"record": "a:b", "expr": "sum(x)"}, {"alert": "A", "expr": "a:b > 2", "for": "1s"}
    )
    [alert] = run(promtool, rules, history_of({series("x", i="1"): [1, 2, 2], series("x", i="2"): [1, 1, 1]}))
    assert alert.firing == {"0": firing("..#")}


def test_groups_are_taken_in_the_order_of_the_file_at_every_tick(promtool: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    groups = [
        {"name": "g", "limit": 5, "rules": [{"record": "a:b", "expr": "x"}]},
        {"name": "h", "interval": "1h", "rules": [{"alert": "A", "expr": "a:b > 0"}]},
    ]
    path.write_text(json.dumps({"groups": groups}))
    for _ in range(3):
        [alert] = run(promtool, read_rules(path), history_of({series("x"): [0, 1, 0, 1]}))
        assert alert.firing == {"0": firing(".#.#")}


def test_a_group_of_which_nothing_can_be_evaluated_is_no_hindrance(promtool: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    groups = [
        {"name": "g", "rules": [{"alert": "A", "expr": "hour() > 3"}]},
        {"name": "h", "rules": [{"alert": "B", "expr": "x > 0", "labels": {"who": "{{ $labels.engine }}"}}]},
    ]
    path.write_text(json.dumps({"groups": groups}))
    first, second = run(promtool, read_rules(path), history_of({series("x", engine="0"): [0, 1]}))
    assert first.why_not is not None
    assert second.firing == {"0": firing(".#")}


def test_an_alert_on_a_forecast_has_no_score_where_there_was_no_forecast(
    promtool: Path, tmp_path: Path
) -> None:
    soon = (
        'kvheadroom_forecast_preemption_probability_ratio{horizon="10m"} >= 0.7 unless ignoring (horizon) x'
    )
    near = "kvheadroom_forecast_exhaustion_seconds < 60 unless x"
    never = "kvheadroom_forecast_unavailable and x"
    rules = rules_file(
        tmp_path,
        *({"alert": name, "expr": expr} for name, expr in (("A", soon), ("B", near), ("C", never))),
    )
    first, second, third = run(promtool, rules, history_of({series("x"): [0, 1]}))
    assert first.why_not == (
        "there was no forecast at any time, and it goes by kvheadroom_forecast_preemption_probability_ratio"
    )
    assert (
        second.why_not
        == "there was no forecast at any time, and it goes by kvheadroom_forecast_exhaustion_seconds"
    )
    assert third.why_not is None
    # That it is not within ten minutes is a forecast too.
    said: dict[Series, Values] = {series("x"): [None, None], series(PROBABILITY, horizon="10m"): [0.1, 0.9]}
    first, second, _ = run(promtool, rules, history_of(said))
    assert (first.firing, second.firing) == ({"0": firing(".#")}, {"0": firing("..")})


def test_an_alert_of_metrics_that_were_not_there_has_no_score(promtool: Path, tmp_path: Path) -> None:
    rules = rules_file(
        tmp_path,
        {"alert": "A", "expr": "DCGM_FI_DEV_FB_USED > 3"},
        {"alert": "B", "expr": "x > 0 or y > 0"},
        {"alert": "C", "expr": "absent(z)"},
    )
    first, second, third = run(promtool, rules, history_of({series("x"): [0, 1]}))
    assert (first.firing, first.why_not) == ({}, "none of its metrics was there: DCGM_FI_DEV_FB_USED")
    assert second.firing == {"0": firing(".#")}
    assert third.firing == {"0": firing("##")}


def test_an_alert_that_may_be_silent_for_its_selection_alone_is_told(promtool: Path, tmp_path: Path) -> None:
    rules = rules_file(
        tmp_path,
        {"alert": "A", "expr": 'x{job="mine"} > 0'},
        {"alert": "B", "expr": 'x{job=~"v.*"} > 0'},
        {"alert": "C", "expr": "x > 9"},
    )
    history = history_of(
        {
            series("x", job="vllm", instance="i"): [1, 1],
            series("y", job="kvheadroom", instance="i", replica="i", engine="0"): [1, 1],
            series("up", job="kvheadroom", instance="i"): [1, 1],
        }
    )
    [told] = target_problems(rules, run(promtool, rules, history), history)
    assert told.startswith(
        "h: alert A never fired; it selects by job, instance or replica, and here series have "
    )
    assert told.endswith(' have {instance="i", job="kvheadroom", replica="i"} or {instance="i", job="vllm"}')


def test_a_rule_that_fails_on_the_series_says_so_and_the_others_are_evaluated(
    promtool: Path, tmp_path: Path
) -> None:
    rules = rules_file(
        tmp_path,
        {"record": "a:b", "expr": "x * on () x"},
        {"alert": "A", "expr": "x * on () x > 0"},
        {"alert": "B", "expr": "a:b > 0"},
        {"alert": "C", "expr": "x > 1"},
    )
    told = history_of({series("x", i="1"): [1, 2], series("x", i="2"): [1, 1]})
    first, second, third = run(promtool, rules, told)
    assert first.why_not is not None
    assert second.why_not is not None
    assert first.why_not.startswith("Prometheus cannot evaluate A: found duplicate series")
    assert second.why_not.startswith("Prometheus cannot evaluate a:b: found duplicate series")
    assert third.firing == {"0": firing(".#")}


def test_rules_that_prometheus_does_not_understand_are_refused(promtool: Path, tmp_path: Path) -> None:
    rules = rules_file(tmp_path, {"alert": "A", "expr": "x >> 1"})
    with pytest.raises(
        OperatorError, match=r"--rules: .*r.yml: promtool refuses it: .*parse error: unexpected"
    ):
        check_rules(promtool, rules)
    check_rules(promtool, own_rules())


# --- promtool itself ---


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "promtool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_promtool_each_alert_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_promtool(None) is None
    rules = rules_file(tmp_path, {"alert": "A", "expr": "x"}, {"alert": "B", "expr": "y"})
    assert [alert.why_not for alert in run(None, rules, history_of({series("x"): [1]}))] == [ABSENT, ABSENT]
    assert ABSENT.startswith("promtool is not on the PATH")


def test_a_chosen_promtool_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"--promtool: .*nothing is no program that can be run"):
        find_promtool(tmp_path / "nothing")


def test_a_promtool_of_this_folder_is_found_from_any_other(
    prometheus2: Binaries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "promtool").symlink_to(prometheus2.promtool)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    rules = rules_file(tmp_path, {"alert": "A", "expr": "x > 0"})
    [alert] = run(find_promtool(Path("./promtool")), rules, history_of({series("x"): [0, 1]}))
    assert alert.firing == {"0": firing(".#")}


def test_the_promtool_of_this_folder_comes_before_that_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "path"):
        (tmp_path / folder).mkdir()
        script(tmp_path / folder, "exit 1").rename(tmp_path / folder / "promtool")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_promtool(Path("./promtool")) == tmp_path / "here" / "promtool"
    assert find_promtool(None) == tmp_path / "path" / "promtool"
    (tmp_path / "here" / "promtool").unlink()
    assert find_promtool(Path("promtool")) == tmp_path / "path" / "promtool"


SAYS_THAT_IT_FIRES = (
    'printf \'  expr: "ALERTS", time: 0s,\\n exp: nil\\n got: {kvheadroom_backtest="0"} 1E+00\\n\''
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 0", "promtool did not say that it evaluated anything; is it Prometheus's?"),
        ("kill -9 $$", "promtool was ended by signal 9"),
        (f"{SAYS_THAT_IT_FIRES}; kill -9 $$", "promtool was ended by signal 9"),
        (f"{SAYS_THAT_IT_FIRES}; exit 137", 'promtool failed: expr: "ALERTS", time: 0s,'),
        ("echo 'out of memory' >&2; exit 2", "promtool failed: out of memory"),
        ("exit 1", "promtool failed: it does not say why"),
        (
            'printf \'  expr: "ALERTS", time: 0s,\\n exp: nil\\n got: {a="b"} 1E+00\\n\'; exit 1',
            'promtool answered what is not understood: got: {a="b"} 1E+00',
        ),
        (
            "echo '  expr: \"x\", time: 0s, err: query timed out'; exit 1",
            'promtool failed: expr: "x", time: 0s, err: query timed out',
        ),
        ("sleep 9", "promtool took longer than 0 minutes"),
    ],
)
def test_a_promtool_that_fails_gives_no_score(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promtool_module, "RUN_SECONDS", 1.0)
    rules = rules_file(tmp_path, {"alert": "A", "expr": "x"})
    [alert] = run(script(tmp_path, text), rules, history_of({series("x"): [1]}))
    assert (alert.firing, alert.why_not) == ({}, said)


# --- real recordings ---


def replayed(name: str, wanted: frozenset[str], every_seconds: float) -> History:
    recording = read_recording(RECORDINGS / f"{name}.jsonl.gz")
    return run_recording(
        recording, name, every_seconds=every_seconds, wanted=ALWAYS_WANTED | wanted, report=lambda _: None
    )


@pytest.mark.parametrize("name", ["steady", "chat", "burst"])
def test_the_simple_rules_are_what_prometheus_makes_of_their_expressions(
    name: str, promtool: Path, tmp_path: Path
) -> None:
    simple = baselines(SMALL)
    rules = rules_file(
        tmp_path,
        *({"alert": one.name, "expr": one.expression, "for": f"{one.hold_seconds:g}s"} for one in simple),
    )
    history = replayed(name, rules.metrics, 1.0)
    [engine] = history.engines
    is_generation_2 = generation_of(promtool) == "2.x"
    for one, alert in zip(simple, run(promtool, rules, history), strict=True):
        ours, theirs = one.firing(engine.ticks, 1.0), alert.firing[engine.engine]
        if "predict_linear" in one.name and is_generation_2:
            # Prometheus 2 has one sample more in a range: both of its ends.
            differing = sum(a is not b for a, b in zip(ours, theirs, strict=True))
            assert differing <= 2
        else:
            assert ours == theirs, one.name


# Firing from and to, in seconds, of an evaluation of the same pages by a Prometheus server over blocks (2.42 and 3.5.3, every
# 0.5 s as they were recorded; the rules' `for` by a state machine of its own), with pauses up to 5 s closed.
BY_SERVER = {
    "burst": {
        "Waiting": [(19.5, 29.5), (64.5, 79.0), (109.5, 120.5)],
        "Usage": [(20.0, 30.5), (66.5, 81.0), (110.0, 126.0)],
        "UsageFor15s": [],
        "WaitingFor5s": [(24.5, 28.5), (69.5, 79.0), (114.5, 120.5)],
        "Predict": [(20.0, 43.0), (83.5, 97.0)],
    },
    "chat": {
        "Waiting": [(82.5, 84.5), (91.5, 182.0)],
        "Usage": [(76.5, 84.0), (93.5, 147.5), (154.0, 182.0)],
        "UsageFor15s": [],
        "WaitingFor5s": [(96.5, 102.0), (108.5, 182.0)],
        "Predict": [(66.0, 148.0)],
    },
}
RULES: dict[str, Rule] = {
    "Waiting": {"expr": "vllm:num_requests_waiting > 0"},
    "Usage": {"expr": "vllm:kv_cache_usage_perc > 0.8"},
    "UsageFor15s": {"expr": "vllm:kv_cache_usage_perc > 0.8", "for": "15s"},
    "WaitingFor5s": {"expr": "vllm:num_requests_waiting > 0", "for": "5s"},
    "Predict": {"expr": "predict_linear(vllm:kv_cache_usage_perc[1m], 60) > 1"},
}


@pytest.mark.parametrize("name", ["chat", "burst"])
def test_rules_fire_on_real_recordings_as_in_a_prometheus_server(
    name: str, promtool: Path, tmp_path: Path
) -> None:
    rules = rules_file(tmp_path, *({"alert": alert, **rule} for alert, rule in RULES.items()))
    history = replayed(name, rules.metrics, 0.5)
    for alert in run(promtool, rules, history):
        shown = [(one.started_at, one.ended_at) for one in _alarms(alert.firing["0"])]
        expected = BY_SERVER[name][alert.name]
        # A slope depends on when exactly its samples were taken: there at their scrape, here at the tick.
        tolerance = 0.5 if alert.name == "Predict" else 0.0
        assert len(shown) == len(expected), alert.name
        for ours, theirs in zip(shown, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance, rel=0), alert.name


def test_looked_at_every_five_seconds_the_bursts_leave_the_known_leads(
    promtool: Path, tmp_path: Path
) -> None:
    """As measured with a Prometheus server that evaluated every 5 s, from an alert's start to the counter's rise."""
    rules = rules_file(tmp_path, *({"alert": alert, **rule} for alert, rule in RULES.items()))
    rises = (20.552, 67.5, 116.5)
    starts = {
        alert.name: [one.started_at for one in find_alarms(alert.firing["0"], 5.0, 5.0)]
        for alert in run(promtool, rules, replayed("burst", rules.metrics, 5.0))
    }
    leads = {
        name: [rise - at for rise, at in zip(rises, starts[name], strict=True)]
        for name in ("Waiting", "Usage")
    }
    assert [round(statistics.median(one), 1) for one in leads.values()] == [2.5, 0.6]
    assert starts["UsageFor15s"] == []


def _alarms(fires: Firing) -> Sequence[Any]:
    return find_alarms(fires, 0.5, 5.0)
