"""Every command line of README, CONTRIBUTING and docs, run as it stands there: against servers and files of the names that it uses, on loopback."""

import contextlib
import gzip
import json
import os
import random
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

import kvheadroom
from tests.capacity.article_models import CONFIGS
from tests.capacity.lru_day import POOL_TOKENS, lru_day
from tests.daemon import daemon, hear_signals, wait_for
from tests.doubles.http_server import http_server
from tests.doubles.prometheus_api import Told, prometheus_api
from tests.doubles.vllm_pages import gpu_server
from tests.doubles.vllm_stand_in import MODEL, stand_in
from tests.end_to_end.server_process import free_loopback_port
from tests.exported_history import beside, sample
from tests.made_logs import model_folder, whole_log
from tests.test_backtest import vllm_history
from tests.test_calibrate_prometheus import at_any_time
from tests.test_plan_model import tiny
from tests.test_plan_reuse import Double, series_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BURST = ROOT / "tests" / "recordings" / "backtest" / "burst.jsonl.gz"

OUTSIDE = {
    r"docker compose .*": "needs Docker; tests/test_deploy.py checks the files, and their Prometheus and Alertmanager read theirs",
    r"docker logs NAME .*": "needs a container that runs; what it prints is made here",
    r"python3 -m venv .*": "installs from a package index; tests/test_readme.py installs a fresh clone by `make run`",
}


def blocks() -> Iterator[tuple[Path, str]]:
    """(page, command line) of all blocks of shell, and of the examples in `--help`."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text()
        if page.name == "command-line.md":
            for line in re.findall(
                r"^  ((?:kvheadroom (?:[a-z]+ )|docker |kubectl )\S.*)$", text, re.MULTILINE
            ):
                yield page, line
            continue
        for block in re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                yield page, line


def lines() -> list[str]:
    """Each command line once, without its comment."""
    found = (re.sub(r"\s+# .*$", "", line).strip() for _, line in blocks())
    return list(dict.fromkeys(line for line in found if line and not line.startswith("#")))


def outside(line: str) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in OUTSIDE)


INSIDE = [line for line in lines() if not outside(line)]


COMMIT = "0123456789" * 4
PATH_OF_JSON = """import json, sys
value = json.load(sys.stdin)
for name in sys.argv[1].strip(".").split("."):
    value = value[name]
print(json.dumps(value))
"""


@dataclass(frozen=True)
class World:
    """What the commands of the docs find by the names that stand there."""

    folder: Path
    vllm: str
    monitor: str
    prometheus: dict[str, str]
    environment: dict[str, str]


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    for name, config in (("glm-nvfp4", "nvfp4"), ("glm-fp8", "fp8"), ("glm", "nvfp4")):
        (folder / "models" / name).mkdir(parents=True)
        shutil.copy(CONFIGS[config], folder / "models" / name / "config.json")
    model_folder(folder / "models" / "llama")
    snapshot = folder / "hub" / "models--zai-org--GLM-5" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copy(CONFIGS["nvfp4"], snapshot / "config.json")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    shim = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvheadroom "$@"\n'
    program(folder / "bin" / "kvheadroom", shim)
    program(folder / "home" / "kvheadroom" / "bin" / "kvheadroom", shim)
    # Of a cluster that is not here: what a pod printed.
    program(folder / "bin" / "kubectl", "#!/bin/sh\ncat start.log\n")
    # Not every machine has jq; of it the docs need a path alone.
    program(folder / "bin" / "jq", f"#!{sys.executable}\n{PATH_OF_JSON}")
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
        "PYTHONUNBUFFERED": "1",
        # The commands run elsewhere, and PYTHONPATH may be relative to here.
        "PYTHONPATH": f"{Path(kvheadroom.__file__).parents[1]}:{ROOT}",
    }
    (folder / "served").mkdir()
    served = gpu_server(POOL_TOKENS // 16 + 1, root=tiny(folder / "served"), max_model_len=16_384)
    with contextlib.ExitStack() as stack:
        vllm, _ = stack.enter_context(http_server(served))
        watched = stack.enter_context(daemon("demo"))
        told: dict[str, Told] = {
            "plan": Double(*series_of(lru_day(random.Random(7), 1000)[0], job="vllm")),
            "backtest": vllm_history,
            "calibrate": at_any_time(sample(), *beside()),
        }
        prometheus = {name: stack.enter_context(prometheus_api(answer))[0] for name, answer in told.items()}
        wait_for(lambda: watched.value("kvheadroom_observed_pool_tokens") == 12_288, "the demo's pool")
        yield World(folder, vllm, watched.url, prometheus, environment)


@pytest.fixture
def server_here(line: str, tmp_path: Path) -> Iterator[None]:
    """A server in this machine's table of processes, for the commands that find those."""
    finds = re.search(r"kvheadroom (check|serve|top)\b", line)
    if finds is None or re.search("--(target|config|from)", line):
        yield
        return
    port = str(free_loopback_port())
    with stand_in(tmp_path, "serve", str(MODEL), "--port", port, place=port):
        yield


def as_here(line: str, world: World, own: Path) -> str:
    """The same with addresses and folders that are there, and times that nobody has to wait for."""
    for name in ("plan", "backtest", "calibrate"):
        if f"kvheadroom {name}" in line:
            line = line.replace("http://prometheus:9090", world.prometheus[name])
    for there, here in {
        "http://host:8000": world.vllm,
        "http://monitor:9878": world.monitor,
        "http://127.0.0.1:9878": world.monitor,
        " /models/": f" {world.folder}/models/",
        " /etc/prometheus/": f" {own}/etc/",
        " /var/lib/grafana/": f" {own}/grafana/",
        "--range 7d": "--range 1h",
        "--duration 8h": "--duration 2s",
        "--interval 5s": "--interval 1s",
    }.items():
        line = line.replace(there, here)
    return line


def furnished(own: Path, line: str, world: World) -> None:
    """The files that the commands name."""
    (own / "etc").mkdir(parents=True)
    (own / "tests").symlink_to(ROOT / "tests")
    log = whole_log(model=str(world.folder / "models" / "llama"))
    for name in ("start.log", "node2.log"):
        (own / name).write_text(log)
    (own / "node1.log.gz").write_bytes(gzip.compress(log.replace("10-06", "10-07").encode()))
    shutil.copy(CONFIGS["nvfp4"], own / "config.json")
    if "kvheadroom record" not in line:
        for name in ("night", "a", "b"):
            shutil.copy(BURST, own / f"{name}.jsonl.gz")
    rules = {
        "groups": [{"name": "mine", "rules": [{"alert": "Waits", "expr": "vllm:num_requests_waiting > 0"}]}]
    }
    (own / "my.rules.yml").write_text(json.dumps(rules))
    replica = {"url": world.vllm, "name": "glm-a", "gpu": "H100", "flags": {"tensor_parallel_size": 1}}
    (own / "kvheadroom.yaml").write_text(json.dumps({"replicas": [replica]}))


SAYS = {
    "check": r"\d of \d replicas complete",
    "top": r"more\s+sessions?\s+of\s+[\d,]+\s+tokens\s+fits?\b",
    "plan": r"sessions\s+of\s+[\d,]+\s+tokens|\"sessions\": ",
    "record": r"pages? written",
    "inspect": r"^engine 0 ",
    "backtest": r"in \d episodes?\b|\"episodes\": ",
    "calibrate": r"overhead",
    "rules": r"^wrote \S+\.rules\.yml$",
    "dashboards": r"(?s)(wrote \S+\.json\n){4}",
}
SAYS_ELSE = {
    # A server elsewhere does not tell its GPU; on a GPU node it is known.
    "kvheadroom calibrate --target http://host:8000": r"left out, unknown: the GPU is not known",
}
MAY_END_WITH_1 = {
    "kvheadroom plan ": "a model does not start at its max_model_len on all of the GPUs that are asked for",
    "kvheadroom check": "what else runs on this machine may lack something",
    "kvheadroom top": "the same",
    "kvheadroom calibrate ": "figures that are made up are doubtful, which is said",
    "kvheadroom backtest --prometheus ": "the history here tells too little for a forecast, which is said",
}
"""What begins so; the others end with 0."""


@pytest.mark.usefixtures("server_here")
@pytest.mark.parametrize("line", [line for line in INSIDE if line.partition(" ")[0] != "make"])
def test_a_command_line_of_the_docs_does_what_it_says(
    request: pytest.FixtureRequest, world: World, tmp_path: Path, line: str
) -> None:
    own = tmp_path / "own"
    furnished(own, line, world)
    command = as_here(line, world, own)
    named = re.search(r"kvheadroom ([a-z]+)", command)
    assert named is not None, f"neither kvheadroom nor make, and no reason why it is not run: {line}"
    if named[1] in ("serve", "demo"):
        serves(command, own, world)
        return
    environment = world.environment
    if named[1] == "backtest":
        promtool: Path = request.getfixturevalue("prometheus2").promtool
        environment = {**environment, "PATH": f"{environment['PATH']}:{promtool.parent}"}
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=own,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    said = run.stdout + run.stderr
    if ">" in command:
        said += Path(own / command.rpartition(">")[2].strip()).read_text()
    shown = line.removeprefix("~/kvheadroom/bin/")
    may_lack = any(beginning in shown for beginning in MAY_END_WITH_1)
    assert run.returncode in ((0, 1) if may_lack else (0,)), said
    assert "Traceback" not in said
    assert re.search(SAYS_ELSE.get(line, SAYS[named[1]]), said, re.MULTILINE), said


def serves(command: str, own: Path, world: World) -> None:
    """It opens its address, has a page there, and ends by Ctrl-C."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} --web.listen-address 127.0.0.1:0"],
        cwd=own,
        env=world.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear_signals,
    )
    try:
        assert process.stdout is not None
        said = []
        for text in process.stdout:
            said.append(text)
            if text.startswith("open http://"):
                break
        else:
            raise AssertionError("".join(said))
        address = said[-1].split()[1]
        wait_for(lambda: "more session" in requests.get(address, timeout=5).text, "the verdict")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("line", [line for line in INSIDE if line.partition(" ")[0] == "make"])
def test_a_target_of_make_that_the_docs_name_is_there(line: str) -> None:
    # What it does is long, or installs: tests/test_readme.py runs `make run` and `make test` in a fresh clone.
    words = shlex.split(line)
    run = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    for setting, option in (("TARGET", "--target"), ("CONFIG", "--config")):
        value = next((word.partition("=")[2] for word in words if word.startswith(f"{setting}=")), None)
        if value is not None:
            assert f'kvheadroom serve {option} "{value}"' in re.sub(r"\s+", " ", run.stdout)


def test_what_is_not_run_stands_in_the_docs_and_is_little() -> None:
    for pattern in OUTSIDE:
        assert any(re.fullmatch(pattern, line) for line in lines()), pattern
    assert len([line for line in lines() if outside(line)]) <= 4
    assert len(INSIDE) > 40


def test_no_command_line_hides_in_another_kind_of_block() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if kind not in ("sh", "bash", "shell", "console") and page.name != "command-line.md":
                hidden = re.findall(
                    r"^(?:\$ |kvheadroom |docker |make |curl |kubectl ).*$", block, re.MULTILINE
                )
                assert hidden == [], (page, hidden)
