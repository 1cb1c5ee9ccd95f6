"""The README's two commands, run in a fresh clone as a newcomer would."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.daemon import hear_signals, wait_for

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What git tracks or would track, and nothing that was built here."""
    folder = tmp_path_factory.mktemp("fresh") / "kvheadroom"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    yield folder
    shutil.rmtree(folder)


def readme_commands() -> list[str]:
    block = re.search(r"## Try it\n.*?```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.split("#")[0].strip() for line in block[1].splitlines()]


def test_the_readme_names_two_commands_and_ci_runs_the_second() -> None:
    assert readme_commands() == ["make run", "make test"]
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_the_first_command_ends_in_a_page_that_shows_a_pool(clone: Path) -> None:
    command = [*readme_commands()[0].split(), "LISTEN=127.0.0.1:0"]
    process = subprocess.Popen(
        command,
        cwd=clone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("open "):
                break
        else:
            raise AssertionError("".join(lines))
        url = lines[-1].split()[1]
        assert any("This is a replay of a recording" in line for line in lines)
        wait_for(lambda: "12,288" in requests.get(url, timeout=5).text, "the pool on the page")
        started = time.monotonic()
        # Ctrl-C reaches everything in the foreground: make and what it runs.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(5)
        assert time.monotonic() - started < 1.0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_second_command_installs_checks_and_runs_tests(clone: Path) -> None:
    # One small file stands for the tests: this test is itself part of the whole run.
    run = subprocess.run(
        [*readme_commands()[1].split(), "PYTEST=tests/test_config.py"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d+ passed", run.stdout)


def test_make_alone_lists_what_there_is_to_do() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^make (\w+)", listed, re.MULTILINE)
    assert {"run", "test", "check", "lab", "bench", "golden", "dashboards"} <= set(targets)


@pytest.mark.parametrize("python", ["false", "/nowhere/python"])
def test_make_says_what_is_missing_on_the_machine(clone: Path, python: str) -> None:
    shutil.rmtree(clone / ".venv", ignore_errors=True)
    run = subprocess.run(
        ["make", "run", f"PYTHON={python}"], cwd=clone, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert f"Python 3.11 or newer is needed as {python}" in run.stdout
