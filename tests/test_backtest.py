"""`kvheadroom backtest` as a command."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.lab.backtest.alert_rules import own_rules
from tests.daemon import COMMAND, hear_signals
from tests.doubles.http_server import Answer
from tests.doubles.prometheus_api import Asked, instants, matrix, prometheus_api
from tests.end_to_end.prometheus_server import Binaries
from tests.lab.backtest.series import page, recording
from tests.lab.test_recordings import BAD

RECORDINGS = Path(__file__).parent / "recordings" / "backtest"
DOCUMENT = Path(__file__).parents[1] / "docs" / "backtest.md"


def backtest(*arguments: str | Path, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "backtest", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=None if path is None else os.environ | {"PATH": path},
    )


def told(*arguments: str | Path) -> list[dict[str, Any]]:
    answer = backtest(*arguments, "--json")
    recordings: list[dict[str, Any]] = json.loads(answer.stdout)["recordings"]
    return recordings


def test_several_recordings_are_scored_each_by_itself() -> None:
    first, second = told("--recording", RECORDINGS / "steady.jsonl.gz", RECORDINGS / "chat.jsonl.gz")
    assert (first["name"], first["episodes"]) == ("steady", [])
    assert (second["name"], second["episodes"]) == ("chat", [121.506])
    assert [
        one["name"]
        for one in told(
            "--recording", RECORDINGS / "chat.jsonl.gz", "--recording", RECORDINGS / "steady.jsonl.gz"
        )
    ] == ["chat", "steady"]


def test_people_get_a_table_and_standard_error_the_progress(prometheus2: Binaries) -> None:
    answer = backtest("--recording", RECORDINGS / "steady.jsonl.gz", "--promtool", prometheus2.promtool)
    assert answer.returncode == 0
    assert "  0 preemptions (0 events) in 0 episodes\n" in answer.stdout
    assert "  alert KvHeadroomWorkingSetExceedsPool  " in answer.stdout
    assert (
        answer.stderr
        == "kvheadroom: steady: 300 pages\nkvheadroom: steady: promtool evaluates 3 of 3 alerts\n"
    )


def test_the_example_in_the_docs_is_what_the_tool_prints(prometheus2: Binaries) -> None:
    answer = backtest("--recording", RECORDINGS / "chat.jsonl.gz", "--promtool", prometheus2.promtool)
    [example] = re.findall(r"```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert answer.stdout == example


def test_alerts_of_a_file_take_the_place_of_the_packages_own(prometheus2: Binaries, tmp_path: Path) -> None:
    rules = tmp_path / "r.yml"
    rules.write_text(
        "groups: [{name: g, rules: [{alert: Full, expr: 'vllm:kv_cache_usage_perc > 0.8'},"
        " {alert: Odd, expr: 'nothing > 0'}]}]"
    )
    chosen = ("--rules", rules, "--promtool", prometheus2.promtool)
    [one] = told("--recording", RECORDINGS / "burst.jsonl.gz", *chosen)
    alerts = [signal for signal in one["signals"] if signal["kind"] == "alert"]
    [usage] = [signal for signal in one["signals"] if signal["name"] == "usage > 0.8"]
    assert [alert["name"] for alert in alerts] == ["Full", "Odd"]
    assert {**alerts[0], "name": "usage > 0.8", "kind": "baseline"} == usage
    assert alerts[1] == {
        "name": "Odd",
        "kind": "alert",
        "evaluated": False,
        "reason": "none of its metrics was there: nothing",
    }
    assert backtest("--recording", RECORDINGS / "burst.jsonl.gz", *chosen).returncode == 1


def test_without_promtool_all_but_the_alerts_are_scored_and_it_ends_with_1(tmp_path: Path) -> None:
    answer = backtest("--recording", RECORDINGS / "burst.jsonl.gz", "--json", path=str(tmp_path))
    assert answer.returncode == 1
    [one] = json.loads(answer.stdout)["recordings"]
    alerts = [signal for signal in one["signals"] if not signal["evaluated"]]
    assert [(alert["name"], alert["kind"]) for alert in alerts] == [
        (alert.name, "alert") for alert in own_rules().alerts
    ]
    assert any(alert["reason"].startswith("promtool is not on the PATH; ") for alert in alerts)
    scored = [signal for signal in one["signals"] if signal["evaluated"]]
    assert len(scored) == len(one["signals"]) - len(alerts)
    assert [signal["name"] for signal in scored if signal["kind"] == "forecast"] == [
        "probability within 600s >= 0.5",
        "probability within 120s >= 0.5",
        "probability within 30s >= 0.5",
        "exhaustion within 60s",
    ]
    assert sum(signal["kind"] == "baseline" for signal in scored) == 11


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_promtool_too_and_leaves_nothing_behind(ending: signal.Signals, tmp_path: Path) -> None:
    promtool, ran_as, left = tmp_path / "promtool", tmp_path / "pid", tmp_path / "tmp"
    promtool.write_text(f'#!/bin/sh\n[ "$1" = check ] && exit 0\necho $$ > {ran_as}\nexec sleep 100\n')
    promtool.chmod(0o755)
    left.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "backtest", "--recording", RECORDINGS / "burst.jsonl.gz", "--promtool", promtool],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(left)},
        preexec_fn=hear_signals,
    )
    deadline = time.monotonic() + 60
    while not (ran_as.exists() and ran_as.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(ending)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert list(left.iterdir()) == []
    # One that ended, and that nobody has asked for yet, has no command line any more.
    told = Path("/proc", ran_as.read_text().strip(), "cmdline")
    assert not told.exists() or told.read_bytes() == b""


def test_rules_that_do_not_parse_end_it_before_anything_is_scored(
    prometheus2: Binaries, tmp_path: Path
) -> None:
    rules = tmp_path / "r.yml"
    rules.write_text("groups: [{name: g, rules: [{alert: A, expr: 'sum(x'}]}]")
    answer = backtest("--recording", "x", "--rules", rules, "--promtool", prometheus2.promtool)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"kvheadroom: --rules: {rules}: promtool refuses it: {rules}: 1:")
    assert "unclosed left parenthesis" in answer.stderr


def test_scale_horizon_and_every_are_what_was_said() -> None:
    [one] = told("--recording", RECORDINGS / "chat.jsonl.gz", "--scale", "production", "--every", "5s")
    assert (one["horizon_seconds"], one["every_seconds"], one["episode_gap_seconds"]) == (900, 5, 300)
    assert one["episodes"] == [121.506]
    [one] = told("--recording", RECORDINGS / "chat.jsonl.gz", "--horizon", "20s")
    assert (one["horizon_seconds"], one["episode_gap_seconds"]) == (20, 20)
    [waiting] = [signal for signal in one["signals"] if signal["name"] == "waiting > 0"]
    assert (waiting["missed"], waiting["false_alarms"]) == (1, 2), "both of its alarms began too early"


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        recording(tmp_path / folder / "r.jsonl.gz", page(), page())
    names = [one["name"] for one in told("--recording", *tmp_path.glob("*/r.jsonl.gz"))]
    assert sorted(names) == [str(tmp_path / "a" / "r.jsonl.gz"), str(tmp_path / "b" / "r.jsonl.gz")]


def test_what_cannot_be_scored_is_said_and_ends_with_1(tmp_path: Path) -> None:
    path = recording(tmp_path / "r.jsonl.gz", *[page(preemptions=None)] * 3)
    answer = backtest("--recording", path, "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["recordings"][0]["episodes"] is None
    assert "kvheadroom: r: its pages have no num_preemptions_total, so nothing is scored\n" in answer.stderr


# --- a Prometheus ---


def vllm_history(asked: Asked) -> Answer:
    """One server, half full, that preempted 600 s ago."""
    figures = {
        "vllm:num_requests_running": "3",
        "vllm:num_requests_waiting": "0",
        "vllm:kv_cache_usage_perc": "0.5",
    }
    name = asked["query"].removeprefix("group by (job, instance) (last_over_time(").split("{")[0]
    labels = {"job": "v", "instance": "gpu-7:8000", "engine": "0"}
    at = instants(asked)
    if name == "vllm:num_preemptions_total":
        return matrix((labels, [(one, "4" if one < time.time() - 600 else "5") for one in at]))
    return matrix((labels, [(one, figures[name]) for one in at])) if name in figures else matrix()


def test_the_history_of_a_prometheus_is_scored_at_production_scale() -> None:
    with prometheus_api(vllm_history) as (url, _):
        answer = backtest("--prometheus", url, "--range", "1h", "--json")
    [one] = json.loads(answer.stdout)["recordings"]
    assert (one["name"], one["duration_seconds"]) == ("gpu-7:8000", 3600)
    assert (one["every_seconds"], one["horizon_seconds"], one["episode_gap_seconds"]) == (15, 900, 300)
    assert len(one["episodes"]) == 1
    assert abs(one["started_at"] + one["episodes"][0] - (time.time() - 600)) < 60
    assert "kvheadroom: history: part 1 of 1, from 20" in answer.stderr


def test_what_was_fetched_is_gone_on_with_next_time(tmp_path: Path) -> None:
    chosen = ("--range", "10m", "--every", "5s", "--scale", "small", "--state", tmp_path / "new", "--json")
    with prometheus_api(vllm_history) as (url, seen):
        first = backtest("--prometheus", url, *chosen)
        asked = len(seen)
        second = backtest("--prometheus", f"{url}/", *chosen)
        assert len(seen) == asked
    assert second.stdout == first.stdout
    assert "kvheadroom: going on with what " in second.stderr


def test_a_history_of_nothing_has_no_score_and_ends_with_1() -> None:
    with prometheus_api(lambda _: matrix()) as (url, _):
        answer = backtest("--prometheus", url, "--select", '{job="x"}')
    assert answer.returncode == 1
    assert answer.stdout.splitlines()[0] == "Prometheus: 7.0 days, looked at every 15 s; horizon 900 s"
    assert (
        f'Prometheus at {url} has neither vllm:num_requests_running nor kvheadroom_requests_running matching job="x"'
        in (answer.stdout)
    )
    assert "so nothing is scored" in answer.stdout


def test_the_token_stands_in_a_file_and_is_sent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc123\n")
    with prometheus_api(vllm_history) as (url, seen):
        backtest("--prometheus", url, "--range", "1m", "--bearer-token-file", tmp_path / "token")
        assert {headers.get("Authorization") for _, headers in seen} == {"Bearer abc123"}


@pytest.mark.parametrize("name", ["empty", "cut off", "only failures", "out of order", "no JSON"])
def test_a_file_that_is_no_recording_ends_it_before_anything_is_scored(name: str, tmp_path: Path) -> None:
    content, _ = BAD[name]
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(content())
    answer = backtest("--recording", RECORDINGS / "steady.jsonl.gz", path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"kvheadroom: {path}: ")
    assert answer.stderr.count("\n") == 1


def test_a_recording_that_is_too_long_ends_it_before_anything_is_scored(tmp_path: Path) -> None:
    path = recording(tmp_path / "r.jsonl.gz", page(), page(), every_seconds=3e7)
    answer = backtest("--recording", RECORDINGS / "steady.jsonl.gz", path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(
        "kvheadroom: --every: r lasts 347.2 days, which would be 30,000,001 ticks; "
    )


def test_a_scrape_that_came_late_leaves_an_episode_whole() -> None:
    """In this recording of a busy machine a scrape came after 1.8 s, in the midst of preemptions, in place of 0.5 s."""
    [one] = told("--recording", RECORDINGS.parent / "loads" / "burst.metrics.jsonl.gz")
    assert one["episodes"] == [14.001, 50.507, 84.513]
    assert one["preemptions"] == 110
    assert one["problems"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "backtest: say what to score: --recording FILE or --prometheus URL"),
        (
            ("--recording", "x", "--prometheus", "http://h"),
            "backtest: give either --recording or --prometheus",
        ),
        (("--recording", "x", "--range", "7d"), "--range: is for --prometheus URL"),
        (("--recording", "x", "--bearer-token-file", "f"), "--bearer-token-file: is for --prometheus URL"),
        (
            ("--prometheus", "h:9090"),
            "--prometheus: 'h:9090' is no server's address; write e.g. http://host:8000",
        ),
        (("--prometheus", "http://a:b@h"), "--prometheus: an address may not hold a user or password"),
        (("--prometheus", "http://h", "--range", "0d"), "--range: '0d' must be from 1s to "),
        (("--prometheus", "http://h", "--range", "long"), "--range: 'long' is no duration"),
        (
            ("--prometheus", "http://h", "--range", "52w", "--every", "1s"),
            "--range: with this --every it has more",
        ),
        (
            ("--prometheus", "http://h", "--ca-file", "/nowhere"),
            "--ca-file: /nowhere cannot be read: No such",
        ),
        (("--prometheus", "http://h", "--ca-file", __file__), "holds no certificate (PEM)"),
        (
            ("--prometheus", "http://h", "--bearer-token-file", "/dev/null"),
            "/dev/null cannot be read: it is no",
        ),
        (
            ("--prometheus", "http://h", "--bearer-token-file", __file__),
            "must hold one line of printable ASCII",
        ),
        (("--prometheus", "http://h", "--state", "/dev/null"), "--state: /dev/null: "),
        (("--recording", "/nowhere"), "/nowhere: cannot be read: No such file or directory"),
        (("--recording", "x", "--every", "0s"), "--every: '0s' must be from 0.1s to "),
        (("--recording", "x", "--every", "fast"), "--every: 'fast' is no duration"),
        (("--recording", "x", "--horizon", "0s"), "--horizon: '0s' must be from 1s to "),
        (("--recording", "x", "--rules", "/nowhere"), "--rules: /nowhere: cannot be read: No such file or "),
        (
            ("--recording", "x", "--promtool", "/nowhere"),
            "--promtool: /nowhere is no program that can be run",
        ),
        (("--recording", "x", "--scale", "huge"), "invalid choice: 'huge'"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], said: str) -> None:
    answer = backtest(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
