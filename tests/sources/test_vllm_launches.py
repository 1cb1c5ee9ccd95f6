"""Which processes are vLLM servers, by their words alone."""

import shlex

import pytest

from kvheadroom.sources.vllm_launches import Launch, is_engine, launch_of


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m -tp 2",
        "/opt/venv/bin/vllm serve m -tp 2",
        "/opt/venv/bin/python /opt/venv/bin/vllm serve m -tp 2",
        "/usr/bin/python3.12 -u -X dev -W ignore /usr/local/bin/vllm serve m -tp 2",
        "python3 -Xdev -uB /usr/local/bin/vllm serve m -tp 2",
        "python3.13t --check-hash-based-pycs always ./vllm serve m -tp 2",
        "pypy3.10 vllm serve m -tp 2",
        "python -m vllm.entrypoints.cli.main serve m -tp 2",
        "python -um vllm.scripts serve m -tp 2",
        "python -mvllm.scripts serve m -tp 2",
        "python /opt/src/vllm/entrypoints/cli/main.py serve m -tp 2",
        "python vllm/entrypoints/cli/main.py serve m -tp 2",
    ],
)
def test_every_way_to_start_vllm_serve_is_one(line: str) -> None:
    assert launch_of(shlex.split(line)) == Launch(("m", "-tp", "2"), is_serve=True)


@pytest.mark.parametrize(
    "line",
    [
        "python -m vllm.entrypoints.openai.api_server --model m -tp 2",
        "python3 -u -m vllm.entrypoints.openai.api_server --model m -tp 2",
        "python3 /usr/lib/python3/dist-packages/vllm/entrypoints/openai/api_server.py --model m -tp 2",
        "python3 -m vllm.entrypoints.launchers.api_server.entry --model m -tp 2",
        "python3 /opt/src/vllm/entrypoints/launchers/api_server/entry.py --model m -tp 2",
    ],
)
def test_the_modules_of_the_api_server_are_ones_whose_model_is_a_flag(line: str) -> None:
    assert launch_of(shlex.split(line)) == Launch(("--model", "m", "-tp", "2"), is_serve=False)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "uv run vllm serve m",
        "python /opt/conda/bin/conda run -n v vllm serve m",
        "bash -c 'vllm serve m'",
        "sudo -u v vllm serve m",
        "docker run --gpus all vllm/vllm-openai --model m",
        "grep vllm serve",
        "vim /usr/bin/vllm serve",
        "python my_server.py serve m",
        "python -c 'from multiprocessing.spawn import spawn_main' --multiprocessing-fork",
        "python -c vllm serve m",
        "python - vllm serve m",
        "python",
        "python -m",
        "python -m torch.distributed.run vllm serve m",
        "python -m vllm.entrypoints.openai.run_batch",
        "python -m vllm.entrypoints.launchers.render.entry --model m",
        "python my_vllm/entrypoints/openai/api_server.py",
        "vllm",
        "vllm bench serve",
        "vllm launch render m",
        "vllm-rs frontend --listen-fd 3 --args-json {}",
        "VLLM::EngineCore",
    ],
)
def test_launchers_programs_that_name_vllm_and_its_other_commands_are_none(line: str) -> None:
    assert launch_of(shlex.split(line)) is None


@pytest.mark.parametrize(
    ("title", "engine"),
    [
        ("VLLM::EngineCore", True),
        ("VLLM::EngineCore_DP1", True),
        ("VLLM::DPEngineCore_0", True),
        ("my-prefix::EngineCore", True),
        ("VLLM::Worker_TP1", False),
        ("VLLM::APIServer_0", False),
        ("VLLM::DPCoordinator", False),
        ("EngineCore", False),
    ],
)
def test_engines_are_known_by_the_title_that_they_give_themselves(title: str, engine: bool) -> None:  # noqa: FBT001  a row of a table
    assert is_engine([title]) is engine
    assert not is_engine([])


def test_the_words_of_a_launch_do_not_show() -> None:
    launch = launch_of(["vllm", "serve", "m", "--api-key", "S3CRET"])
    assert launch is not None
    assert "S3CRET" not in repr(launch)
