"""Makes the recording of one scenario: a real vLLM, the load, `kvheadroom record`, and what is kept of it."""

import asyncio
import contextlib
import gzip
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvheadroom.lab.page_changes import PageChanges, encode
from kvheadroom.lab.recordings import read_entries
from tests.daemon import COMMAND, wait_for
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_server import VllmServer
from tests.loads.client import Client
from tests.loads.measured import PAGES_SUFFIX, REQUESTS_SUFFIX
from tests.loads.plan import plan
from tests.loads.scenarios import COMMON_FLAGS, SEED, Scenario

QUIET_SECONDS = 3.0
"""Recorded before the first request and after the last answer."""


def flags_of(scenario: Scenario) -> Mapping[str, str | int | bool]:
    """Of `vllm serve`."""
    return {**COMMON_FLAGS, **scenario.flags}


def make(scenario: Scenario, python: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the recording and its request log into `folder`, beside what else comes about."""
    raw = folder / "raw.jsonl.gz"
    model = write_model(folder / scenario.model, scenario.model)
    with VllmServer(python, model, flags_of(scenario), folder / "vllm.log", progress=progress) as server:
        server.give_way()
        client = Client(
            server.base_url, seed=SEED, seconds=scenario.seconds, max_model_len=scenario.max_model_len
        )
        with _recorded(server.base_url, raw, scenario.interval_seconds):
            time.sleep(QUIET_SECONDS)
            log = asyncio.run(client.run(plan(scenario, SEED)))
            time.sleep(QUIET_SECONDS)
    _write(folder / f"{scenario.name}{PAGES_SUFFIX}", _with_load(raw, scenario))
    _write(folder / f"{scenario.name}{REQUESTS_SUFFIX}", (encode(sent.line()) for sent in log))


@contextlib.contextmanager
def _recorded(url: str, out: Path, interval_seconds: float) -> Iterator[None]:
    """`kvheadroom record` beside the block."""
    command = [*COMMAND, "record", "--target", url, "--out", str(out), "--interval", f"{interval_seconds}s"]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: out.exists() and out.stat().st_size > 0, "the first page", seconds=30)
        yield
        recorder.send_signal(signal.SIGINT)
        _, told = recorder.communicate(timeout=30)
        if recorder.returncode:
            raise RuntimeError(told)
    finally:
        recorder.kill()
        recorder.wait()
        if recorder.stderr is not None:
            recorder.stderr.close()


def _with_load(raw: Path, scenario: Scenario) -> Iterator[str]:
    """The recording's lines, with headers that name no address but tell the flags and the load."""
    changes = PageChanges()
    header: dict[str, Any] = {}
    for number, entry in enumerate(read_entries(raw)):
        told = {key: value for key, value in entry.origin.items() if key != "server"} | {
            "load": scenario.name,
            "seed": SEED,
            "flags": flags_of(scenario),
        }
        if told != header:
            header = told
            yield encode({"origin": header})
        at = {"i": number, "t": entry.taken_at}
        if entry.failure is not None:
            yield encode(at | {"err": entry.failure})
        else:
            yield encode(at | changes.told(entry.page))


def _write(path: Path, lines: Iterator[str]) -> None:
    """One gzip member without name and time, so that the same lines are the same bytes."""
    text = "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
