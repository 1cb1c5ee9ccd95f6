"""Where a model's folder is looked for, and when that is an assumption."""

import asyncio
from pathlib import Path

import pytest

from kvheadroom.app import Replica, _is_this_machine
from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.config import validate_config
from kvheadroom.monitor.sampler import Resolution
from kvheadroom.sources.http import open_session
from tests.doubles.http_server import http_server
from tests.test_daemon import SHIPPED_MODEL, vllm_answers

PAGE = VllmPage(format="text", engines=(EngineSnapshot(engine="0"),))


def resolve(root: str) -> Resolution:
    async def run(url: str) -> Resolution:
        config = validate_config({"replicas": [{"url": url}]}, "test")
        async with open_session() as session:
            return await Replica(config, config.replicas[0], session).resolve(PAGE)

    with http_server(vllm_answers(root=root)) as (url, _):
        return asyncio.run(run(url))


def test_an_absolute_folder_named_by_a_server_of_this_machine_is_read() -> None:
    facts = resolve(str(SHIPPED_MODEL)).facts["0"]
    assert facts.model is not None
    assert "model_folder" not in dict(facts.assumed())


@pytest.mark.parametrize("root", ["tiny-llama", "../recordings/tiny-llama", "org/model"])
def test_a_relative_root_is_never_read_from_our_own_working_directory(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SHIPPED_MODEL.parent)
    facts = resolve(root).facts["0"]
    assert facts.model is None
    assert facts.missing[0].fact == "model_files"
    assert "no folder on this machine" in facts.missing[0].why


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost:8000", True),
        ("http://10.0.0.5:8000", False),
        ("http://gpu-7:8000", False),
        ("http://localhost.example.org:8000", False),
    ],
)
def test_whether_a_server_runs_on_this_machine_is_told_by_its_address(url: str, *, here: bool) -> None:
    assert _is_this_machine(url) is here


def test_a_folder_named_by_a_server_elsewhere_is_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvheadroom.app._is_this_machine", lambda _: False)
    assumed = dict(resolve(str(SHIPPED_MODEL)).facts["0"].assumed())
    assert "holds the same files as on the server's" in assumed["model_folder"]


def test_the_model_folder_is_given_by_its_path() -> None:
    assert Path(SHIPPED_MODEL).is_absolute()
