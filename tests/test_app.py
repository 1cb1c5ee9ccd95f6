"""The sources of a replica and the samplers of a config, joined as the daemon joins them."""

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.app import ConfigFile, _reload
from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.config import load_config, validate_config
from kvheadroom.monitor.sampler import Resolution
from kvheadroom.outputs.prometheus import exposition
from kvheadroom.replica import Replica, _is_this_machine
from kvheadroom.sources.endpoint import Endpoint, Proxy
from kvheadroom.sources.http import open_session
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.strict_yaml import read_small_file
from kvheadroom.watch import Watch
from tests.conftest import capture
from tests.doubles.http_server import Answer, http_server, text_answer
from tests.test_daemon import SHIPPED_MODEL, vllm_answers

PAGE = VllmPage(format="text", engines=(EngineSnapshot(engine="0"),))


def resolve(root: str) -> Resolution:
    async def run(url: str) -> Resolution:
        config = validate_config({"replicas": [{"url": url}]}, "test")
        async with open_session() as session:
            return await Replica(config, config.replicas[0], session, Endpoint(url)).resolve(PAGE)

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
    assert _is_this_machine(Endpoint(url)) is here


def test_a_socket_is_of_this_machine_and_the_loopback_behind_a_proxy_is_not() -> None:
    assert _is_this_machine(Endpoint("http://gpu-7", unix_socket="/run/vllm.sock"))
    assert not _is_this_machine(Endpoint("http://localhost:8000", proxy=Proxy(url="http://proxy:3128")))


def test_a_folder_named_by_a_server_elsewhere_is_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvheadroom.replica._is_this_machine", lambda _: False)
    assumed = dict(resolve(str(SHIPPED_MODEL)).facts["0"].assumed())
    assert "holds the same files as on the server's" in assumed["model_folder"]


def test_the_model_folder_is_given_by_its_path() -> None:
    assert Path(SHIPPED_MODEL).is_absolute()


def test_each_of_64_servers_costs_the_same_few_series_whatever_its_page_holds() -> None:
    adapters = b"".join(
        b'vllm:lora_requests_info{running_lora_adapters="adapter-%d"} 1.8e+09\n' % i for i in range(5000)
    )
    answers: dict[str, Answer] = {}
    for i in range(64):
        answers |= {f"/{i}{path}": answer for path, answer in vllm_answers().items()}
    answers["/7/metrics"] = text_answer(capture("gqa_light_steady") + adapters)

    async def run(url: str) -> str:
        config = validate_config(
            {
                "session_tokens": [1024],
                "replicas": [{"url": f"{url}/{i}", "name": f"r{i}"} for i in range(64)],
            },
            "test",
        )
        async with open_session() as session:
            watch = Watch(session, SlowFiles())
            endpoints = {replica.replica: Endpoint(replica.url) for replica in config.replicas}
            samplers = watch.prepare(config, endpoints, start=False)
            await asyncio.gather(*(sampler.tick(time.time(), wait_for_facts=30) for sampler in samplers))
            return exposition(watch.board.fleet, time.time(), "")[0].decode()

    with http_server(answers) as (url, _):
        text = asyncio.run(run(url))
    series = Counter(
        sample.labels.get("replica", "")
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )
    assert series.pop("") == 1
    assert len(series) == 64
    (each,) = set(series.values())
    # docs/metrics.md: about 48 an engine, 7 of them with a forecast, 4 for each of two lengths (max_model_len is one), about 9 a server.
    # Warm sessions: 16 an engine, 9 of them of windows, and of 4 a length 3 of windows as well.
    assert each <= 48 - 7 + 2 * 4 + 9 + (16 - 9) + 2 * (4 - 3)


@pytest.mark.parametrize("dead", ["kvheadroom.yaml", "key"])
def test_a_dead_mount_under_a_file_of_the_config_holds_only_this_reload_up(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = threading.Event()
    readings: list[str] = []

    def read(path: Path) -> str:
        readings.append(path.name)
        if path.name == dead:
            mount.wait(60)
        return read_small_file(path)

    monkeypatch.setattr("kvheadroom.access.read_small_file", read)
    monkeypatch.setattr("kvheadroom.config.read_small_file", read)
    monkeypatch.setattr("kvheadroom.app.CONFIG_FILES_SECONDS", 0.2)
    (tmp_path / "key").write_text("a-key")
    file = tmp_path / "kvheadroom.yaml"
    file.write_text(
        f"replicas: [{{url: 'http://127.0.0.1:1', name: new, api_key_file: '{tmp_path / 'key'}'}}]"
    )

    async def run() -> None:
        async with open_session() as session:
            files = SlowFiles()
            watch = Watch(session, files)
            before = validate_config({"replicas": [{"url": "http://127.0.0.1:1", "name": "old"}]}, "test")
            watch.prepare(before, {"old": Endpoint("http://127.0.0.1:1")}, start=False)
            again = ConfigFile(file, lambda: load_config(file))
            for _ in range(3):
                reload = asyncio.create_task(_reload(watch, again, files))
                await asyncio.sleep(0)
                assert not reload.done(), "the loop goes on while the file is read"
                await reload
            status = watch.board.fleet.reload
            assert status is not None
            assert f"{tmp_path / dead}: not read within 0.2 s; does its disk hang?" in str(status.fault)
            assert [replica.replica for replica in watch.board.fleet.replicas] == ["old"]
            assert readings.count(dead) == 1
            mount.set()
            await _reload(watch, again, files)
            assert watch.board.fleet.reload is not None
            assert watch.board.fleet.reload.fault is None
            assert [replica.replica for replica in watch.board.fleet.replicas] == ["new"]
            await watch.close()

    asyncio.run(run())
