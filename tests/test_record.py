"""`kvheadroom record` as a command: what a server said is read back, whatever ends the recording."""

import asyncio
import contextlib
import gzip
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.lab.masking import Masks
from kvheadroom.lab.recordings import read_entries, read_recording
from kvheadroom.lab.replay_server import replay
from kvheadroom.sources.kept_lines import kept_lines
from tests.conftest import capture
from tests.daemon import COMMAND, daemon, hear_signals, wait_for
from tests.doubles.http_server import Answer, http_server, text_answer
from tests.lab.test_recordings import BAD, SHIPPED
from tests.test_daemon import SHIPPED_MODEL, models, vllm_answers

OTHERS = 'python_info{version="3.12"} 1\nhttp_requests_total{handler="/v1/chat"} 7\nprocess_open_fds 9\n'


def pages_in_turn(pages: list[str], asked: list[str], *, seconds: float = 0.0) -> Answer:
    """A server's `/metrics`: one page after the other, the last for ever; `asked` takes what was answered."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        page = pages[min(len(asked), len(pages) - 1)]
        asked.append(page)
        time.sleep(seconds)
        text_answer(page)(request)

    return answer


def large_pages(count: int = 12) -> list[str]:
    """Pages of 1.2 MB that have few series in common: whatever is collected is written soon."""
    return [
        'vllm:num_requests_running{engine="0"} 1.0\n'
        + "".join(f'vllm:x{{y="{number * i * i * 7919 % 1000003}"}} {i}\n' for i in range(50_000))
        for number in range(1, count + 1)
    ]


def command(url: str, out: Path, *more: str) -> list[str]:
    return [*COMMAND, "record", "--target", url, "--out", str(out), *more]


def record(url: str, out: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(url, out, *more), capture_output=True, text=True, check=False, timeout=60)


@contextlib.contextmanager
def recording(url: str, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """A recorder that goes on, ended at the end."""
    process = subprocess.Popen(
        command(url, out, "--interval", "100ms", *more),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def ended(process: "subprocess.Popen[str]", number: int) -> tuple[int, str]:
    process.send_signal(number)
    _, told = process.communicate(timeout=20)
    return process.returncode, told


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_what_is_recorded_is_what_the_server_said_at_each_instant(tmp_path: Path) -> None:
    pages = [page + OTHERS for _, page in read_recording(SHIPPED).pages()][60:]
    asked: list[str] = []
    out = tmp_path / "r.jsonl.gz"
    with http_server({**vllm_answers(), "/metrics": pages_in_turn(pages, asked)}) as (url, seen):
        started = time.time()
        run = record(url, out, "--interval", "100ms", "--duration", "4s")
        ended_at = time.time()
    assert (run.returncode, run.stdout) == (0, "")
    found = list(read_recording(out).pages())
    assert [page for _, page in found] == [kept_lines(page.encode()) for page in asked]
    assert len(found) > 20
    assert len(set(asked)) > 10, "the pages differ, or nothing is proved"
    times = [line["t"] for line in lines_of(out) if "t" in line]
    assert started <= times[0] <= times[-1] <= ended_at
    assert f"--duration 4s is over; {len(found)} pages written" in run.stderr
    # The whole page is asked for: filtered ones have no histograms.
    assert {path for path, _ in seen} == {"/metrics", "/version", "/v1/models"}
    assert "vllm:time_to_first_token_seconds_bucket" in found[0][1]


def test_scrapes_keep_to_the_grid_of_the_interval_however_long_the_server_takes(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    slow = pages_in_turn(["vllm:x 1\n"], [], seconds=0.2)
    with http_server({**vllm_answers(), "/metrics": slow}) as (url, _):
        run = record(url, out, "--interval", "500ms", "--duration", "4s")
    assert run.returncode == 0, run.stderr
    offsets = [at for at, _ in read_recording(out).pages()]
    assert 5 <= len(offsets) <= 8
    # With the answer's 0.2 s added to each interval, it would be off by 0.1 s and more.
    assert statistics.median(abs(at - round(at / 0.5) * 0.5) for at in offsets) < 0.05


def test_only_vllms_own_series_and_the_start_time_are_kept_and_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("S3CRET")
    out = tmp_path / "r.jsonl.gz"
    answers = {**vllm_answers(), "/metrics": text_answer(capture("gqa_heavy") + OTHERS.encode())}
    with http_server(answers) as (url, seen):
        config = tmp_path / "c.yaml"
        config.write_text(
            f"replicas: [{{url: '{url}', name: a, api_key_file: '{tmp_path / 'key'}'}}, {{url: 'http://127.0.0.1:1'}}]"
        )
        run = subprocess.run(
            [*COMMAND, "record", "--config", str(config), "--replica", "a", "--out", str(out), "--duration", "500ms"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert [path for path, headers in seen if "Authorization" in headers] == ["/v1/models"]
    text = gzip.decompress(out.read_bytes()).decode()
    assert "S3CRET" not in text + run.stderr
    (page,) = [page for _, page in read_recording(out).pages()]
    names = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert "process_start_time_seconds" in names
    assert all(name.startswith("vllm:") for name in names - {"process_start_time_seconds"})


def test_the_header_says_what_is_known_of_the_server(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    with http_server(vllm_answers()) as (url, _):
        assert record(url, out, "--duration", "500ms").returncode == 0
        # What a server does not tell is absent.
        answers = {"/metrics": text_answer(capture("gqa_heavy"))}
        with http_server(answers) as (silent, _):
            assert record(silent, tmp_path / "s.jsonl.gz", "--duration", "500ms").returncode == 0
    origin = lines_of(out)[0]["origin"]
    assert origin.pop("recorded_on") in {
        time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (time.time(), time.time() - 60)
    }
    assert origin.pop("recorded_by").startswith("kvheadroom ")
    assert origin == {
        "format": 1,
        "what": "/metrics of a vLLM server, a page every 1 s",
        "interval_seconds": 1.0,
        "kept": "the vllm: series and process_start_time_seconds",
        "masked": False,
        "server": url,
        "vllm_version": "0.32.0",
        "architecture": "LlamaForCausalLM",
        "model_name": "tiny",
        "max_model_len": 2048,
    }
    silent_origin = lines_of(tmp_path / "s.jsonl.gz")[0]["origin"]
    assert {"vllm_version", "architecture", "max_model_len"} & silent_origin.keys() == set()


def test_a_masked_recording_names_nothing_and_plays_the_same(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    page = capture("gqa_heavy").replace(b"tiny", b"acme-secret-7b") + (
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="alice",waiting_lora_adapters=""} 1.8e+09\n'
    )
    answers = {
        "/metrics": text_answer(page),
        "/version": text_answer('{"version": "0.32.0+acme"}'),
        "/v1/models": models("/home/alice/acme-secret-7b"),
    }
    with http_server(answers) as (url, _):
        run = record(url, out, "--mask", "--duration", "500ms")
        assert run.returncode == 0, run.stderr
        assert "keep it to yourself" in run.stderr
        again = record(url, out, "--mask", "--duration", "500ms")
        assert again.returncode == 0, again.stderr
    text = gzip.decompress(out.read_bytes()).decode()
    for name in ("acme", "alice", "tiny", "127.0.0.1", url):
        assert name not in text
    assert [page for _, page in read_recording(out).pages()] == [Masks().mask_page(kept_lines(page))] * 2
    origin = lines_of(out)[0]["origin"]
    assert (origin["model_name"], origin["vllm_version"], origin["masked"]) == ("model-1", "0.32.0", True)
    names = json.loads((tmp_path / "r.jsonl.gz.names.json").read_text())
    assert names == {
        "server": url,
        "names": {"model": {"acme-secret-7b": "model-1"}, "adapter": {"alice": "adapter-1"}},
    }


def test_a_killed_recorder_leaves_a_file_that_is_whole_up_to_the_last_10_s_and_is_continued(
    tmp_path: Path,
) -> None:
    out = tmp_path / "r.jsonl.gz"
    asked: list[str] = []
    pages = [page for _, page in read_recording(SHIPPED).pages()][60:]
    with http_server({**vllm_answers(), "/metrics": pages_in_turn(pages, asked)}) as (url, _):
        with recording(url, out) as process:
            wait_for(lambda: out.exists() and out.stat().st_size > 0, "the first page")
            first = out.stat().st_size
            assert read_recording(out).num_pages == 1, "the first page is there at once"
            wait_for(lambda: out.stat().st_size > first, "what was collected in 10 s", seconds=20)
            process.send_signal(signal.SIGKILL)
            assert process.wait(10) == -signal.SIGKILL
        left = out.read_bytes()
        assert gzip.decompress(left), "gunzip reads it too"
        kept = [page for _, page in read_recording(out).pages()]
        assert len(kept) > 50
        assert kept == [kept_lines(page.encode()) for page in asked[: len(kept)]]
        answered = len(asked)
        run = record(url, out, "--interval", "100ms", "--duration", "500ms")
    assert run.returncode == 0, run.stderr
    assert out.read_bytes().startswith(left)
    both = [page for _, page in read_recording(out).pages()]
    assert both == kept + [kept_lines(page.encode()) for page in asked[answered:]]
    indexes = [line["i"] for line in lines_of(out) if "i" in line]
    assert indexes == list(range(len(both)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_everything_in_the_file(number: int, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    asked: list[str] = []
    with (
        http_server({**vllm_answers(), "/metrics": pages_in_turn(["vllm:x 1\n"], asked)}) as (url, _),
        recording(url, out) as process,
    ):
        wait_for(lambda: len(asked) > 10, "some scrapes")
        code, told = ended(process, number)
    assert code == 0, told
    pages = read_recording(out).num_pages
    # The scrape that was under way was left.
    assert len(asked) - 1 <= pages <= len(asked)
    assert f"ended; {pages} pages written" in told


def test_a_terminal_that_went_away_ends_no_recording_under_nohup(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    with http_server({**vllm_answers(), "/metrics": text_answer("vllm:x 1\n")}) as (url, seen):
        process = subprocess.Popen(
            ["nohup", *command(url, out, "--interval", "100ms")],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: len(seen) > 5, "some scrapes")
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            # Nobody reads what it tells any more.
            process.stderr.close()
            count = len(seen)
            wait_for(lambda: len(seen) > count + 5, "more scrapes")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
    assert abs(read_recording(out).num_pages - [path for path, _ in seen].count("/metrics")) <= 1


def test_a_scrape_that_fails_is_a_gap_with_its_reason_and_no_data(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    good = kept_lines(capture("gqa_heavy"))
    answers = [
        text_answer(good),
        text_answer("S3CRET", status=503),
        text_answer("<html>S3CRET</html>"),
        text_answer('python_info{version="S3CRET"} 1\n# TYPE python_info gauge\n'),
        text_answer(good.replace("tiny", "other")),
    ]
    count = 0

    def metrics(request: BaseHTTPRequestHandler) -> None:
        nonlocal count
        count += 1
        answers[min(count, len(answers)) - 1](request)

    with http_server({"/metrics": metrics, "/v1/models": models("tiny")}) as (url, _):
        run = record(url, out, "--interval", "100ms", "--duration", "3s")
    assert run.returncode == 0, run.stderr
    assert "S3CRET" not in gzip.decompress(out.read_bytes()).decode() + run.stderr
    entries = list(read_entries(out))
    assert [entry.failure for entry in entries[:4]] == [None, "unavailable", "not_vllm", "no_vllm_metrics"]
    assert {entry.failure for entry in entries[4:]} == {None}
    assert entries[4].page == good.replace("tiny", "other")
    assert "(3 scrapes failed)" in run.stderr
    # Another model answers after the outage: the header says so from then on.
    assert read_recording(out).last_origin["model_name"] == "other"
    failed_at = entries[1].taken_at - entries[0].taken_at
    told = subprocess.run(
        [*COMMAND, "inspect", str(out), "--at", f"{failed_at * 1000 + 1:.0f}ms"],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert (told.returncode, told.stdout) == (2, "")
    assert f": the scrape at {failed_at:.3f} s failed (unavailable)" in told.stderr


@pytest.mark.parametrize(
    ("page", "word"),
    [(None, "nothing listens there"), ("<html></html>", "HTML"), ("python_info 1", "no metrics page")],
)
def test_without_an_answer_it_ends_with_1_and_leaves_no_file(
    page: str | None, word: str, tmp_path: Path
) -> None:
    with http_server({} if page is None else {"/metrics": text_answer(page)}) as (url, _):
        run = record("http://127.0.0.1:1" if page is None else url, tmp_path / "r.jsonl.gz", "--mask")
    assert (run.returncode, run.stdout) == (1, "")
    assert word in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_hangs_is_given_up_at_ctrl_c_and_leaves_no_file(tmp_path: Path) -> None:
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        hung.settimeout(20)
        with recording(f"http://127.0.0.1:{hung.getsockname()[1]}", tmp_path / "r.jsonl.gz") as process:
            connection, _ = hung.accept()
            with connection:
                code, told = ended(process, signal.SIGINT)
    assert (code, told) == (1, "kvheadroom: ended before the first page; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_it_ends_before_the_file_is_larger_than_it_may_be(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    with http_server({"/metrics": pages_in_turn(large_pages(), [])}) as (url, _):
        run = record(url, out, "--interval", "100ms", "--max-size", "2MB")
        size = out.stat().st_size
        assert run.returncode == 0, run.stderr
        assert 0 < size <= 2_000_000
        assert f"--max-size 2.0 MB is reached; {read_recording(out).num_pages} pages written" in run.stderr
        refused = record(url, out, "--interval", "100ms", "--max-size", "100kB")
        assert refused.returncode == 2
        assert "--max-size" in refused.stderr
        small = record(url, tmp_path / "small.jsonl.gz", "--max-size", "1kB")
    assert small.returncode == 2
    assert "--max-size 1.0 kB is reached; not one more page of this server fits" in small.stderr
    assert not (tmp_path / "small.jsonl.gz").exists()
    assert out.stat().st_size == size


def test_a_disk_that_is_full_ends_it_with_what_is_written_readable(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    # The kernel lets a file grow to 2.5 MB, so the last write succeeds in part.
    limited = ["bash", "-c", 'ulimit -f 2500; exec "$@"', "bash"]
    with http_server({"/metrics": pages_in_turn(large_pages(), [])}) as (url, _):
        run = subprocess.run(
            [*limited, *command(url, out, "--interval", "100ms")],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert run.returncode == 1
    pages = read_recording(out).num_pages
    assert pages > 1
    assert f"cannot be written: File too large; {pages} pages written" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


def test_a_full_disk_takes_no_first_page_and_keeps_no_file(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash"]
    with http_server(vllm_answers()) as (url, _):
        run = subprocess.run(
            [*limited, *command(url, tmp_path / "r.jsonl.gz")],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert run.returncode == 1
    assert "cannot be written: File too large; nothing was written" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_servers_in_turn_at_one_address_are_not_asked_at_every_scrape(tmp_path: Path) -> None:
    pages = [f"process_start_time_seconds {i}\nvllm:x {i}\n" for i in range(1, 30)]
    with http_server({**vllm_answers(), "/metrics": pages_in_turn(pages, [])}) as (url, seen):
        run = record(url, tmp_path / "r.jsonl.gz", "--interval", "100ms", "--duration", "2s")
    assert run.returncode == 0, run.stderr
    assert 5 < read_recording(tmp_path / "r.jsonl.gz").num_pages <= 20
    assert [path for path, _ in seen].count("/version") == 2


def test_another_servers_recording_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    with http_server(vllm_answers()) as (url, _), http_server(vllm_answers()) as (other, _):
        assert record(url, out, "--duration", "500ms").returncode == 0
        before = out.read_bytes()
        for address, more, why in (
            (other, [], "is of another server"),
            (url, ["--interval", "2s"], "was recorded with --interval 1s"),
            (url, ["--mask"], "was recorded without --mask"),
        ):
            run = record(address, out, "--duration", "500ms", *more)
            assert run.returncode == 2
            assert why in run.stderr
            assert len(run.stderr.splitlines()) == 1
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--target", "http://h:1"], "--out"),
        (["--out", "{folder}/x"], "nothing to record; give --target URL"),
        (["--out", "{folder}/x", "--target", "h:1"], "--target: 'h:1' is no server's address"),
        (["--out", "{folder}/x", "--target", "http://h:1", "--replica", "a"], "either --target URL or --config FILE"),
        (["--out", "{folder}/x", "--config", "{config}"], "--replica: one server is recorded; name it: a, b"),
        (["--out", "{folder}/x", "--config", "{config}", "--replica", "c"], "--replica: one server is recorded"),
        (["--out", "{folder}/x", "--target", "http://h:1", "--interval", "1"], "--interval: '1' is no duration"),
        (["--out", "{folder}/x", "--target", "http://h:1", "--interval", "1ms"], "--interval: '1ms' must be from 0.1s to 3600s"),
        (["--out", "{folder}/x", "--target", "http://h:1", "--duration", "0s"], "--duration: '0s' must be from 0.1s"),
        (["--out", "{folder}/x", "--target", "http://h:1", "--max-size", "200"], "--max-size: '200' is no size"),
        (["--out", "/nowhere/x", "--target", "http://h:1"], "--out: /nowhere is no folder"),
        (["--out", "/dev/null", "--target", "http://h:1"], "--out: /dev/null is no regular file"),
    ],
)  # fmt: skip
def test_a_wrong_word_of_the_command_line_ends_with_2_and_names_it(
    arguments: list[str], word: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("replicas: [{url: 'http://h:1', name: a}, {url: 'http://h:2', name: b}]")
    run = subprocess.run(
        [*COMMAND, "record", *(a.format(config=config, folder=tmp_path) for a in arguments)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2
    assert word in run.stderr
    assert "Traceback" not in run.stderr


def test_the_shipped_recording_played_and_recorded_again_tells_the_same_story(tmp_path: Path) -> None:
    shipped = read_recording(SHIPPED)
    out = tmp_path / "r.jsonl.gz"
    ready, done = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        # A scrape each 0.1 s sees one of its 190 pages; it is over in 19 s, of which a busy machine may need some to start.
        async with replay(shipped, speed=10) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(done.wait)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        assert ready.wait(10)
        run = record(urls[0], out, "--interval", "100ms", "--duration", "8s")
    finally:
        done.set()
        server.join()
    assert run.returncode == 0, run.stderr
    again = read_recording(out)
    order = [kept_lines(page.encode()) for _, page in shipped.pages()]
    told = [page for _, page in again.pages()]
    # Each page is one of the shipped ones, and in their order.
    at = 0
    for page in told:
        at = order.index(page, at)
    assert at > 60
    assert len(set(told)) > 30
    assert again.origin["vllm_version"] == "0.32.0"
    assert (again.origin["model_name"], again.origin["max_model_len"]) == ("tiny", 4096)


def test_a_recording_is_inspected_at_any_instant_and_at_its_last_by_default() -> None:
    def engine(*arguments: str) -> tuple[str, dict[str, Any]]:
        run = subprocess.run(
            [*COMMAND, "inspect", str(SHIPPED), "--json", *arguments],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        report = json.loads(run.stdout)
        return report["source"], report["engines"][0]

    source, last = engine()
    assert source == f"{SHIPPED} at 189.002 s"
    assert (last["num_blocks"], last["preemptions_total"]) == (384, 5)
    assert engine("--at", "0s")[1]["preemptions_total"] == 0
    assert engine("--at", "125s")[1]["preemptions_total"] == 1
    source, two_minutes = engine("--at", "2m")
    assert source.endswith(("at 119.000 s", "at 119.999 s", "at 120.000 s"))
    pages = [page for at, page in read_recording(SHIPPED).pages() if at <= 120.0]
    running = re.search(r"^vllm:num_requests_running\S* (\S+)$", pages[-1], re.MULTILINE)
    assert running is not None
    assert two_minutes["requests_running"] == float(running[1]) > 0
    people = subprocess.run(
        [*COMMAND, "inspect", str(SHIPPED), "--at", "125s"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert people.stdout.splitlines()[0].startswith(f"{SHIPPED} at 12")
    assert "preempted 1 times" in people.stdout


@pytest.mark.parametrize(
    "name",
    [
        "empty",
        "no gzip",
        "cut off",
        "no JSON",
        "another format's header",
        "out of order",
        "a gigabyte of zeros",
    ],
)
def test_inspect_and_demo_refuse_what_is_no_recording_in_one_sentence(name: str, tmp_path: Path) -> None:
    content, sentence = BAD[name]
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(content())
    for arguments in (["inspect", str(path)], ["demo", "--recording", str(path)]):
        run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert (run.returncode, run.stdout) == (2, "")
        assert re.search(sentence, run.stderr)
        assert len(run.stderr.splitlines()) == 1
        assert run.stderr.startswith(f"kvheadroom: {path}")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["inspect", str(SHIPPED), "--at", "81"], "--at: '81' is no duration"),
        (["inspect", str(SHIPPED), "--at", "1h"], "there is nothing at 3600 s; it lasts 189.002 s"),
        (["inspect", str(SHIPPED_MODEL / "config.json"), "--at", "1s"], "is no recording, and has no instants"),
        (["inspect", "-", "--at", "1s"], "is no recording, and has no instants"),
        (["demo", "--recording", "/nowhere/r.gz"], "cannot be read: No such file"),
        (["demo", "--recording", "/dev/zero"], "is no regular file"),
    ],
)  # fmt: skip
def test_an_instant_or_file_that_is_not_there_ends_with_2(arguments: list[str], word: str) -> None:
    run = subprocess.run([*COMMAND, *arguments], input="", capture_output=True, text=True, check=False, timeout=30)  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert word in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_the_demo_plays_a_recording_of_ones_own_without_a_model_folder(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    with http_server(vllm_answers()) as (url, _):
        assert record(url, out, "--duration", "500ms").returncode == 0
    with daemon("demo", "--recording", out) as demo:
        assert "This is a replay of a recording, not a live server: vLLM 0.32.0, recorded on 2" in demo.output
        wait_for(lambda: demo.value("kvheadroom_observed_pool_tokens") == 4096, "the replayed pool")
        assert demo.value("kvheadroom_predicted_pool_tokens") is None
        assert demo.value("kvheadroom_missing_fact", fact="model_files") == 1
        assert demo.stop()[0] == 0
    assert "Traceback" not in demo.output


def test_a_gap_is_played_as_no_answer_and_never_as_an_old_page(tmp_path: Path) -> None:
    page = kept_lines(capture("gqa_heavy"))
    out = tmp_path / "r.jsonl.gz"
    with gzip.open(out, "wt") as file:
        for entry in (
            {"origin": {"interval_seconds": 1.0}},
            {"t": 1.0, "text": page},
            {"t": 2.0, "err": "timeout"},
            {"t": 600.0, "d": {}},
        ):
            file.write(json.dumps(entry) + "\n")
    with daemon("demo", "--recording", out) as demo:
        assert "a vLLM of a release that is not told, 599 s over and over" in demo.output
        wait_for(lambda: demo.value("kvheadroom_source_up", source="metrics") == 0, "the gap")
        assert (
            demo.value("kvheadroom_source_failures_total", source="metrics", reason="http_status") or 0
        ) > 0
        wait_for(
            lambda: demo.value("kvheadroom_observed_pool_tokens") is None, "the old numbers to be withheld"
        )


def test_progress_is_told_now_and_then_and_on_a_terminal_in_place(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl.gz"
    with http_server(vllm_answers()) as (url, _):
        run = record(url, out, "--interval", "100ms", "--duration", "1s")
        lines = run.stderr.splitlines()
        assert len(lines) == 2
        assert re.fullmatch(r"kvheadroom: 1 page, 0 failed, \d\.\d kB written, [\d.]+s left", lines[0])
        # `script` gives it a terminal.
        in_terminal = subprocess.run(
            [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)",
             *command(url, out, "--interval", "100ms", "--duration", "2s")],
            capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    told = in_terminal.stdout.decode()
    assert in_terminal.returncode == 0, told
    assert told.count("\r") - told.count("\r\n") >= 3
    assert "pages written" in told.splitlines()[-1]
