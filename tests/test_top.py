"""`kvheadroom top` as a process: live in a terminal, once, as JSON, through a pipe, by a daemon and by itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.top import Latest
from tests.daemon import COMMAND, Daemon, daemon, wait_for
from tests.doubles.http_server import http_server, text_answer
from tests.doubles.terminal import CURSOR_HIDDEN, OTHER_SCREEN, OWN_SCREEN, terminal
from tests.test_daemon import config_file, vllm_answers

REPLAY = "This is a replay of a recording, not a live server"


def top(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run to its end, its output piped."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return subprocess.run(
        [*COMMAND, "top", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**kept, "PYTHONIOENCODING": "utf-8", **environment},
    )


@pytest.fixture(scope="module")
def demo() -> Iterator[Daemon]:
    with daemon("demo") as running:
        wait_for(lambda: running.value("kvheadroom_observed_pool_tokens") == 12288, "the replayed pool")
        yield running


def test_what_a_daemon_knows_is_shown_once_as_plain_text(demo: Daemon) -> None:
    piped = top("--from", demo.url)
    assert (piped.returncode, piped.stderr) == (0, "")
    assert "\x1b" not in piped.stdout
    lines = piped.stdout.splitlines()
    assert re.fullmatch(r".+; (no|\d+) more sessions? of 4,096 tokens fits?\.", lines[0])
    assert piped.stdout.startswith(top("--from", demo.url, "--once").stdout[:10])
    assert REPLAY in piped.stdout
    assert f"\nfrom {demo.url}\n" in piped.stdout
    assert re.search(r"^\S.*  replay engine 0  tiny +\d s old$", piped.stdout, re.MULTILINE)
    assert re.search(
        r"of 3 sessions of 4,096 tokens in use;\s+\d more fit;\s+predicted 3$", piped.stdout, re.MULTILINE
    )
    assert re.search(r"\d running, \d+ waiting", piped.stdout)
    assert "1 engine, assumed: tensor_parallel_size" in piped.stdout
    assert max(map(len, lines)) <= 80
    wide = top("--from", demo.url, COLUMNS="200").stdout
    assert re.search(r"^verdict +engine +KV pool in use +tokens +sessions in use", wide, re.MULTILINE)


def test_json_is_the_document_of_the_api(demo: Daemon) -> None:
    told = top("--from", demo.url, "--json")
    assert (told.returncode, told.stderr) == (0, "")
    document = json.loads(told.stdout)
    of_the_api = demo.get("/api/v1/status").json()
    assert document.keys() == of_the_api.keys()
    assert document["replicas"][0].keys() == of_the_api["replicas"][0].keys()
    assert document["notice"] == of_the_api["notice"]
    assert document["verdict"]["sentence"].endswith("of 4,096 tokens fit")
    assert [one["replica"] for one in document["worst_first"]] == ["replay"]


def test_servers_are_looked_at_by_itself_with_a_target_or_a_config(tmp_path: Path) -> None:
    with http_server(vllm_answers()) as (url, _):
        name = url.removeprefix("http://")
        once = top("--target", url, "--once")
        assert (once.returncode, once.stderr) == (0, "")
        # 50 blocks are free, and a session takes 64.
        assert once.stdout.startswith(
            "The engine has no room for one more session; no more sessions of 2,048 tokens\nfit.\n"
        )
        assert f"no room  {name} engine 0  tiny" in once.stdout
        assert "no forecast: watched without a gap for 0 s; it takes 30 s, or a queue" in once.stdout
        kept = tmp_path / "learned.json"
        file = config_file(
            tmp_path, f"calibration_file: {kept}\nreplicas:\n  - {{url: '{url}', name: a}}\n  - {{url: 'http://127.0.0.1:1', name: b}}\n"
        )  # fmt: skip
        told = top("--config", file, "--json")
        document = json.loads(told.stdout)
        assert told.returncode == 1, "a server is down"
        assert [(one["replica"], one["verdict"]) for one in document["worst_first"]] == [
            ("b", "down"),
            ("a", "no_room"),
        ]
        assert document["calibration"] is None
        assert not kept.exists(), "the file is the daemon's"
        few = top("--config", file, "--most", "1")
        assert few.returncode == 1
        assert few.stdout.startswith("1 of 2 servers is down; the engine has no room for one more session; ")
        assert "... and 1 more that are not shown: 1 no room\n" in few.stdout


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>", "no JSON; is it kvheadroom that answers there?"),
        ('{"replicas": []}', "it has no verdict; is it a kvheadroom of this release?"),
    ],
)
def test_what_is_no_daemon_of_ours_is_told(body: str, message: str) -> None:
    with http_server({"/api/v1/status": text_answer(body)}) as (url, _):
        told = top("--from", url, "--once")
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == f"kvheadroom: GET {url}/api/v1/status: {message}\n"


def test_a_daemon_that_is_not_there_is_told() -> None:
    told = top("--from", "http://127.0.0.1:1", "--json")
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == (
        "kvheadroom: GET http://127.0.0.1:1/api/v1/status: nothing listens there; is kvheadroom running?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "ftp://host"), "kvheadroom: --from: 'ftp://host' is no server's address"),
        (
            ("--from", "http://a", "--target", "http://b"),
            "kvheadroom: --from: what is watched is the daemon's",
        ),
        (("--from", "http://a", "--shard", "0/2"), "kvheadroom: --from: what is watched is the daemon's"),
        (("--most", "0"), "kvheadroom: --most: '0' is no number of engines; write e.g. 20"),
        (("--most", "ten"), "kvheadroom: --most: 'ten' is no number of engines; write e.g. 20"),
        (("--config", "/nowhere.yaml"), "kvheadroom: /nowhere.yaml"),
    ],
)
def test_what_makes_no_sense_is_said_and_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    told = top(*arguments)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(message)


def test_a_name_with_escape_sequences_draws_nothing(demo: Daemon) -> None:
    document = demo.get("/api/v1/status").json()
    hostile = "\x1b[2J\x1b]0;owned\x07[blink]x"
    document["replicas"][0]["replica"] = document["worst_first"][0]["replica"] = hostile
    document["replicas"][0]["engines"][0]["model_name"] = hostile
    document["notice"] = hostile
    with http_server({"/api/v1/status": text_answer(json.dumps(document))}) as (url, _):
        told = top("--from", url)
        assert (
            "\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}[blink]x"
            in told.stdout
        )
        assert "\x1b" not in told.stdout
        assert "\x07" not in told.stdout
        assert "\x1b" not in top("--from", url, "--json").stdout
        with terminal([*COMMAND, "top", "--from", url]) as inside:
            inside.wait_for(b"[blink]x")
            inside.type("q")
            assert inside.end() == 0
            # The board itself moves the cursor and never clears the screen after a name.
            assert b"\x1b]0;" not in inside.written
            assert b"\x07" not in inside.written


def test_numbers_of_a_daemon_that_is_silent_are_withheld_after_three_looks(
    demo: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("kvheadroom.top.time.monotonic", lambda: now)
    latest = Latest()
    assert latest.view()[0] is None
    latest.tell(demo.get("/api/v1/status").json())
    now += 12.0
    view, age = latest.view()
    assert view is not None
    assert (len(view.rows), view.faults, age) == (1, (), 12.0)
    latest.tell(SourceFailure("daemon", FailureReason.REFUSED, "nothing listens there"))
    view, _ = latest.view()
    assert view is not None
    assert (len(view.rows), view.faults) == (1, ("nothing listens there; this is what it said 12 s ago",))
    now += 3.5
    view, _ = latest.view()
    assert view is not None
    assert (view.rows, view.faults) == ((), ("nothing listens there",))


# -- live


def test_the_board_is_live_and_q_leaves_the_terminal_as_it_was(demo: Daemon) -> None:
    with terminal([*COMMAND, "top", "--from", demo.url]) as inside:
        inside.wait_for(b"engine 0  tiny")
        assert OTHER_SCREEN in inside.written
        assert CURSOR_HIDDEN in inside.written
        assert f"from {demo.url}; q ends" in inside.words
        ages: set[str] = set()
        deadline = time.monotonic() + 30
        while len(ages) < 4 and time.monotonic() < deadline:
            inside.read()
            ages |= set(re.findall(r"(\d+) s old", inside.words))
        assert len(ages) >= 4, "it goes on"
        inside.wait_for(b"\x1b[1;3")
        inside.type("x")
        inside.read(0.5)
        assert inside.process.poll() is None, "another key is no end"
        inside.type("q")
        assert inside.end() == 0
        assert inside.is_as_before
        assert "Traceback" not in inside.words


@pytest.mark.parametrize("end", ["ctrl-c", "SIGTERM", "SIGHUP"])
def test_ctrl_c_and_signals_leave_the_terminal_as_it_was(demo: Daemon, end: str) -> None:
    with terminal([*COMMAND, "top", "--from", demo.url], NO_COLOR="1") as inside:
        inside.wait_for(b"engine 0  tiny")
        if end == "ctrl-c":
            inside.type("\x03")
        else:
            inside.process.send_signal(getattr(signal, end))
        assert inside.end() == 0
        assert inside.is_as_before
        assert "Traceback" not in inside.words
        assert not re.search(rb"\x1b\[[\d;]*\b(?:3|4|9)[0-7]m", inside.written), "NO_COLOR"


def test_ctrl_z_gives_the_terminal_back_and_fg_goes_on(demo: Daemon) -> None:
    with terminal([*COMMAND, "top", "--from", demo.url]) as inside:
        inside.wait_for(b"engine 0  tiny")
        inside.type("\x1a")
        inside.wait_for(OWN_SCREEN)
        _, status = os.waitpid(inside.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        inside.read()
        assert inside.is_as_before
        inside.process.send_signal(signal.SIGCONT)
        inside.wait_for(OTHER_SCREEN, times=2)
        inside.type("q")
        assert inside.end() == 0
        assert inside.is_as_before


def test_another_size_of_the_terminal_is_drawn_for(demo: Daemon) -> None:
    with terminal([*COMMAND, "top", "--from", demo.url], width=80) as inside:
        inside.wait_for(b"engine 0  tiny")
        assert "sessions in use  predicted" not in inside.words
        inside.resize(200, 30)
        inside.process.send_signal(signal.SIGWINCH)
        inside.wait_for(b"sessions in use  predicted")
        inside.type("q")
        assert inside.end() == 0


def test_servers_are_watched_live_by_itself() -> None:
    with http_server(vllm_answers()) as (url, _), terminal([*COMMAND, "top", "--target", url]) as inside:
        inside.wait_for(b"engine 0  tiny")
        assert "watched here every 5 s; q ends" in inside.words
        inside.type("q")
        assert inside.end() == 0
        assert inside.is_as_before


def test_a_daemon_that_goes_away_is_told_and_one_that_comes_back_is_shown() -> None:
    with daemon("demo") as running:
        wait_for(lambda: running.value("kvheadroom_observed_pool_tokens") == 12288, "the replayed pool")
        with terminal([*COMMAND, "top", "--from", running.url], width=200) as inside:
            inside.wait_for(b"engine 0  tiny")
            running.stop()
            inside.wait_for(b"is kvheadroom running?; this is what it said")
            with daemon("demo", listen=running.url.removeprefix("http://")):
                inside.wait_for(REPLAY.encode(), times=inside.written.count(REPLAY.encode()) + 1)
                inside.type("q")
                assert inside.end() == 0
                assert inside.is_as_before


def test_a_crash_leaves_the_terminal_as_it_was() -> None:
    program = (
        "import sys\n"
        "from kvheadroom.outputs.live_screen import LiveScreen, open_console\n"
        "from rich.text import Text\n"
        "with LiveScreen(open_console(sys.stdout)) as screen:\n"
        "    screen.show([Text('a board')])\n"
        "    raise RuntimeError('a fault of ours')\n"
    )
    with terminal([sys.executable, "-c", program]) as inside:
        assert inside.end(20) == 1
        assert b"a board" in inside.written
        assert inside.is_as_before
        # What went wrong stands on the screen that stays.
        assert inside.written.rfind(b"a fault of ours") > inside.written.rfind(OWN_SCREEN)


def test_a_document_that_cannot_be_shown_ends_nothing() -> None:
    with (
        http_server({"/api/v1/status": text_answer("[]")}) as (url, _),
        terminal([*COMMAND, "top", "--from", url], width=150) as inside,
    ):
        inside.wait_for(b"no status; is it kvheadroom that answers there?")
        inside.type("q")
        assert inside.end() == 0
        assert inside.is_as_before


def test_a_terminal_that_can_do_nothing_gets_plain_text_once(demo: Daemon) -> None:
    with terminal([*COMMAND, "top", "--from", demo.url], TERM="dumb") as inside:
        assert inside.end(30) == 0
        assert b"\x1b" not in inside.written
        assert b"engine 0  tiny" in inside.written
