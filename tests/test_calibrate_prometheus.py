"""`kvheadroom calibrate --prometheus` as a command."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvheadroom.monitor.calibration_store import read_samples
from tests.daemon import COMMAND
from tests.doubles.http_server import Answer
from tests.doubles.prometheus_api import Asked, prometheus_api, refusal
from tests.exported_history import KEY, OVERHEAD, START, Series, beside, prometheus_with, sample
from tests.test_past_replicas import BLOCKS, MODEL, STARTED, TARGET, WEIGHTS, overhead, vllm


def at_any_time(*series: Series) -> Callable[[Asked], Answer]:
    """A Prometheus that says it of every instant."""
    return prometheus_with(*((labels, lambda _, value=value: value(-60.0)) for labels, value in series))


def calibrate(url: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "calibrate", "--prometheus", url, "--range", "1h", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_what_is_learned_is_told_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "learned.json"
    with prometheus_api(at_any_time(sample(), *beside())) as (url, _):
        run = calibrate(url, "--out", out)
    assert run.returncode == 0
    assert f"Kept in {out}: 1 start of this run\n" in run.stdout
    assert "  overhead          4.77  5.12           4.56  4.90\n" in run.stdout
    assert "overhead_gb: 5.123\n" in run.stdout
    first, *parts = run.stderr.splitlines()
    assert first == "kvheadroom: looking for kvheadroom_overhead_sample_bytes"
    assert len(parts) == 1
    assert parts[0].startswith("kvheadroom: history: part 1 of 1, from ")
    [kept] = read_samples(out).samples
    assert (kept.key, kept.start, kept.overhead_bytes) == (KEY, START, OVERHEAD)


def test_the_same_as_one_document_with_what_vllm_itself_told(tmp_path: Path) -> None:
    model, config = tmp_path / "llama", tmp_path / "kvheadroom.yaml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    replica = {
        "url": f"http://{TARGET['instance']}",
        "model": str(model),
        "gpu": "H200",
        "weights_bytes": WEIGHTS,
    }
    config.write_text(json.dumps({"replicas": [replica]}))
    with prometheus_api(at_any_time(sample(), *beside(), *vllm(first=-60, last=0))) as (url, _):
        run = calibrate(url, "--config", config, "--vllm-version", "0.33.0", "--json")
    answer = json.loads(run.stdout)
    assert (run.returncode, answer["problems"]) == (0, [])
    assert [(one["sample"]["start"], one["sample"]["overhead_bytes"]) for one in answer["starts"]] == [
        (START, OVERHEAD),
        (f"{TARGET['instance']}/0/{STARTED}", overhead(BLOCKS)),
    ]
    assert {one["sample"]["source"] for one in answer["starts"]} == {"prometheus"}


def test_a_prometheus_that_refuses_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "learned.json"
    with prometheus_api(lambda _: refusal(401, "who")) as (url, _):
        run = calibrate(url, "--out", out)
    assert run.returncode == 1
    assert not out.exists()
    assert " ".join(run.stdout.split()) == (
        f"careful: Prometheus at {url}: it refuses access (401); give --bearer-token-file Nothing is learned."
    )


def test_samples_may_be_kept_beside_what_was_fetched(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    with prometheus_api(at_any_time(sample(), *beside())) as (url, _):
        for _ in range(2):
            run = calibrate(url, "--out", out, "--state", tmp_path, "--json")
            assert (run.returncode, json.loads(run.stdout)["set_aside"]) == (0, None)
    assert [one.start for one in read_samples(out).samples] == [START]


def test_broken_off_it_keeps_what_was_answered_and_learns_nothing(tmp_path: Path) -> None:
    out, state, scratch = tmp_path / "learned.json", tmp_path / "state", tmp_path / "scratch"
    scratch.mkdir()
    told = at_any_time(sample(), *beside())

    def slow(asked: Asked) -> Answer:
        """The second part is not answered in time."""
        if not asked["query"].startswith("group") and float(asked["start"]) > time.time() - 200_000:
            time.sleep(20)
        return told(asked)

    def command(url: str, *more: str | Path) -> list[str | Path]:
        source: list[str | Path] = ["--prometheus", url, "--range", "5d", "--every", "60s", "--out", out]
        return [*COMMAND, "calibrate", *source, *more]

    environment = os.environ | {"TMPDIR": str(scratch)}
    with prometheus_api(slow) as (url, _):
        for more in ((), ("--state", state)):
            run = subprocess.Popen(
                command(url, *more),
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            assert run.stderr is not None
            for line in run.stderr:
                if "part 2 of 2" in line:
                    break
            run.send_signal(signal.SIGINT)
            shown, _ = run.communicate(timeout=15)
            assert (run.returncode, shown) == (130, "")
        assert not out.exists()
        assert list(scratch.iterdir()) == []
        assert [one.name for one in sorted(state.iterdir())] == [
            "calibration-history.json",
            "part-00000.json.gz",
        ]
    with prometheus_api(told) as (other, _):
        again = subprocess.run(
            command(other, "--state", state), capture_output=True, text=True, check=False, timeout=60
        )
    assert again.returncode == 2
    assert again.stderr == (
        f"kvheadroom: --state: {state} holds a history of another address, --range, --every, --select or --config; give another "
        "folder\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--range", "7d"], "--range: is for --prometheus URL"),
        (["--every", "60s", "--log", "x"], "--every: is for --prometheus URL"),
        (["--ca-file", "x"], "--ca-file: is for --prometheus URL"),
        (
            ["--prometheus", "http://p", "--log", "x"],
            "calibrate: give either --log, --target or --prometheus",
        ),
        (
            ["--prometheus", "http://p", "--gpu", "H100"],
            "--gpu: is for --log FILE; of a history it stands in the config",
        ),
        (
            ["--prometheus", "http://p", "--vllm-version", "0.33.0"],
            "--vllm-version: of a history it is for --config FILE; what kvheadroom measured tells it",
        ),
        (
            ["--prometheus", "p:9090"],
            "--prometheus: 'p:9090' is no server's address; write e.g. http://host:8000",
        ),
        (
            ["--prometheus", "http://p", "--range", "1y"],
            "--range: '1y' is no duration; write a number with its unit, e.g. 5s or 1m",
        ),
        (
            ["--prometheus", "http://p", "--range", "300d", "--every", "1s"],
            "--range: with this --every it has more than 2,000,000 ticks",
        ),
        (
            ["--prometheus", "http://p", "--config", "gone.yaml"],
            "gone.yaml: cannot be read (No such file or directory)",
        ),
        (
            ["--prometheus", "http://p", "--bearer-token-file", "gone"],
            "--bearer-token-file: gone cannot be read: No such file or directory",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(arguments: list[str], message: str) -> None:
    run = subprocess.run(
        [*COMMAND, "calibrate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode, run.stderr, run.stdout) == (2, f"kvheadroom: {message}\n", "")
