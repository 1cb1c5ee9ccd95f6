"""Processes with the words of a vLLM server, which answer as one did: short-lived, on loopback, without vLLM.

Run as a program by `Launcher`: whatever its command line says, it listens where the environment tells.
"""

import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.doubles.http_server import Answer, http_server, text_answer

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "exporter" / "kvheadroom" / "recordings" / "tiny-llama"
_PROGRAM = f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}]; from tests.doubles import vllm_stand_in; vllm_stand_in.main()\n"
_PLACE = "STAND_IN_LISTENS_AT"
_KIND = "STAND_IN_KIND"
_RELEASE = "STAND_IN_RELEASE"
_MODEL = "STAND_IN_MODEL"
CPU_BUILD = "0.32.0+cpu"
"""A build for CPUs that says so."""


@dataclass(frozen=True)
class StandIn:
    """A running one."""

    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # With its children; the group is its own.
            os.killpg(self.pid, 9)
        self.process.wait()


@contextlib.contextmanager
def stand_in(
    folder: Path,
    *words: str,
    place: str,
    kind: str = "plain",
    environment: Mapping[str, str] | None = None,
    module: bool = False,
    release: str = CPU_BUILD,
    model: str | Path = MODEL,
    launcher: Sequence[str] = (),
) -> Iterator[StandIn]:
    """`python .../vllm WORDS`, from when it answers.

    Args:
        place: the port or the path of a socket where it listens.
        kind: `plain`, `forked` for an engine with the words of its server, `titled` for one with a title, `children` for a
            server whose child answers.
        model: what it calls its model at /v1/models.
        launcher: words that start it, and end by being replaced by it.
        module: `python -m vllm.entrypoints.openai.api_server WORDS` instead.
    """
    program = folder / "vllm"
    launch: list[str] = [str(program)]
    if module:
        package = folder / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True, exist_ok=True)
        program = package / "api_server.py"
        launch = ["-m", "vllm.entrypoints.openai.api_server"]
    program.write_text(_PROGRAM)
    process = subprocess.Popen(
        [*launcher, sys.executable, *launch, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={
            "HOME": str(folder),
            **(environment or {}),
            _PLACE: place,
            _KIND: kind,
            _RELEASE: release,
            _MODEL: str(model),
        },
    )
    running = StandIn(process)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        yield running
    finally:
        running.stop()
        assert process.stdout is not None
        process.stdout.close()


def main() -> None:
    """What the processes do."""
    kind, place = os.environ[_KIND], os.environ[_PLACE]
    if kind == "forked" and os.fork() == 0:
        time.sleep(180)
        return
    if kind == "titled":
        _child("VLLM::EngineCore", "import time; time.sleep(180)")
    if kind == "children":
        child = _child("VLLM::APIServer_0", _PROGRAM, {_KIND: "plain"})
        child.wait()
        return
    port = int(place) if place.isdecimal() else 0
    with http_server(_answers(), port=port, unix_socket=None if port else Path(place)):
        print("listens", flush=True)
        time.sleep(180)


def _child(title: str, program: str, more: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """A process of whose words a title is left, as setproctitle does it."""
    child = subprocess.Popen(
        [title], executable=sys.executable, stdin=subprocess.PIPE, env={**os.environ, **(more or {})}
    )
    assert child.stdin is not None
    child.stdin.write(program.encode())
    child.stdin.close()
    return child


def _answers() -> dict[str, Answer]:
    recorded = REPOSITORY / "tests" / "recordings" / "captures" / "gqa_light_steady.metrics.gz"
    began = b"process_start_time_seconds %f" % time.time()
    page = re.sub(rb"(?m)^process_start_time_seconds .*$", began, gzip.decompress(recorded.read_bytes()))
    model = {"id": "tiny", "root": os.environ.get(_MODEL, str(MODEL)), "parent": None, "max_model_len": 2048}
    return {
        "/metrics": text_answer(page),
        "/version": text_answer(json.dumps({"version": os.environ.get(_RELEASE, CPU_BUILD)})),
        "/v1/models": text_answer(json.dumps({"data": [model]})),
    }
