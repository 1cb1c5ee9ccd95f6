"""`record` on a real vLLM under load: what is read back, by `inspect` and `demo`, is what the server said then."""

import gzip
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.lab.recording_lines import Entry
from kvheadroom.lab.recordings import read_entries, read_recording
from kvheadroom.sources.kept_lines import kept_lines
from tests.daemon import COMMAND, daemon
from tests.end_to_end.load import Shape, steady_load
from tests.end_to_end.page_proxy import Handed, page_proxy
from tests.end_to_end.test_main_job import compare_snapshot, vllm_samples
from tests.end_to_end.vllm_server import VllmServer

# Two cores serve the model, the load and the recorder: a page can take a second.
INTERVAL = "2s"
LOAD = Shape(clients=12, prompt_tokens=150, output_tokens=200, deadline_seconds=120)


def command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, timeout=90
    )


@dataclass
class Recorded:
    """A recording in two goes, and the pages that the server gave meanwhile."""

    file: Path
    handed: Handed
    entries: tuple[Entry, ...]

    def page_of(self, entry: Entry) -> bytes:
        return self.handed.page_taken_at(entry.taken_at)

    def inspected(self, entry: Entry) -> dict[str, Any]:
        """What `inspect` reads a moment after the scrape of an entry."""
        after = entry.taken_at - self.entries[0].taken_at
        at = () if entry is self.entries[-1] else ("--at", f"{after * 1000 + 1:.0f}ms")
        run = command("inspect", self.file, *at, "--json")
        assert run.returncode == 0, run.stderr
        report = json.loads(run.stdout)
        assert report["problems"] == []
        (engine,) = report["engines"]
        assert isinstance(engine, dict)
        return engine


@pytest.fixture(scope="module")
def recorded(tiny_gqa_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    out = tmp_path_factory.mktemp("recorded") / "busy.jsonl.gz"
    with page_proxy(tiny_gqa_server.base_url) as handed:
        with steady_load(tiny_gqa_server.base_url, LOAD):
            for duration in ("10s", "8s"):
                run = command(
                    "record", "--target", handed.base_url, "--out", out, "--interval", INTERVAL, "--duration", duration
                )  # fmt: skip
                assert (run.returncode, run.stdout) == (0, ""), run.stderr
        entries = tuple(entry for entry in read_entries(out) if entry.failure is None)
        yield Recorded(out, handed, entries)


def test_every_page_that_was_recorded_is_the_one_that_the_server_gave(recorded: Recorded) -> None:
    assert len(recorded.entries) >= 5
    busy = 0
    for entry in recorded.entries:
        page = recorded.page_of(entry)
        assert entry.page == kept_lines(page)
        busy += vllm_samples(page)["vllm:num_requests_running"] > 0
    assert busy >= 4, "the server was idle, and nothing is proved"
    origin = read_recording(recorded.file).origin
    assert origin["vllm_version"].startswith("0.32.0")
    assert (origin["model_name"], origin["max_model_len"], origin["interval_seconds"]) == ("tiny", 2048, 2.0)


def test_inspect_reads_of_each_instant_the_numbers_of_its_page(recorded: Recorded) -> None:
    for entry in recorded.entries:
        compare_snapshot(recorded.inspected(entry), vllm_samples(recorded.page_of(entry)))


def test_the_demo_shows_the_same_numbers_in_the_same_order(recorded: Recorded) -> None:
    inspected = [recorded.inspected(entry) for entry in recorded.entries]
    assert len({json.dumps(engine) for engine in inspected}) == len(inspected)
    shown: dict[float, dict[str, Any]] = {}
    seconds = recorded.entries[-1].taken_at - recorded.entries[0].taken_at
    # It plays from a moment after this on, and begins anew a second after its end.
    until = time.monotonic() + seconds
    with daemon("demo", "--recording", recorded.file) as demo:
        while time.monotonic() < until:
            status = demo.get("/api/v1/status").json()
            assert "This is a replay of a recording" in status["notice"]
            for engine in status["replicas"][0]["engines"]:
                shown[engine["taken_at"]] = engine["snapshot"]
            time.sleep(0.2)
    places = [inspected.index(snapshot) for snapshot in shown.values()]
    assert places == sorted(places)
    assert len(set(places)) >= 4


def test_a_masked_recording_has_the_same_numbers_and_no_name(
    recorded: Recorded, tiny_gqa_server: VllmServer, tmp_path: Path
) -> None:
    out = tmp_path / "masked.jsonl.gz"
    run = command("record", "--target", tiny_gqa_server.base_url, "--out", out, "--duration", "1s", "--mask")
    assert run.returncode == 0, run.stderr
    text = gzip.decompress(out.read_bytes()).decode()
    for name in ("tiny", "127.0.0.1", tiny_gqa_server.host_and_port):
        assert name not in text
    (engine,) = json.loads(command("inspect", out, "--json").stdout)["engines"]
    assert engine["model_name"] == "model-1"
    now = recorded.inspected(recorded.entries[-1])
    assert engine["preemptions_total"] >= now["preemptions_total"]
    assert {k: engine[k] for k in ("num_blocks", "pool_tokens")} == {"num_blocks": 128, "pool_tokens": 4096}
