"""Replicas that come and go while the daemon runs: taken in, let go, and nobody else disturbed."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvheadroom.access import open_endpoint
from kvheadroom.capacity.fleet import FleetAssessment
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.config import Config, ReplicaConfig, validate_config
from kvheadroom.discovery import watched
from kvheadroom.discovery.source import Discovery, Found
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import open_session
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.watch import Watch

CONFIG = validate_config({"replicas": [{"url": "http://127.0.0.1:1", "name": "fixed"}]}, "test")


@dataclass
class Listed:
    """A source that answers what the test hands it."""

    name: str = "listed"
    settings: object = 1
    interval_seconds: float = 0.01
    found: Found = field(default_factory=lambda: Found(replicas=()))
    asked: list[bool] = field(default_factory=list)

    async def find(self, *, anew: bool) -> Found:
        self.asked.append(anew)
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.found


def server(port: int, **settings: object) -> ReplicaConfig:
    return ReplicaConfig.model_validate({"url": f"http://127.0.0.1:{port}", **settings})


def failed(reason: FailureReason = FailureReason.BAD_ANSWER) -> SourceFailure:
    return SourceFailure("listed", reason, "listed: it is no list")


class Fleet:
    """A watch over a config and sources of the test's own."""

    def __init__(self, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch = watch
        self._monkeypatch = monkeypatch

    def prepare(self, *sources: Discovery, config: Config = CONFIG, start: bool = False) -> None:
        self._monkeypatch.setattr("kvheadroom.watch.sources_of", lambda *_: list(sources))
        endpoints = {replica.replica: Endpoint(replica.url) for replica in config.replicas}
        self.watch.prepare(config, endpoints, start=start)

    async def ask(self) -> FleetAssessment:
        await self.watch.find_replicas()
        return self.watch.board.fleet

    @property
    def names(self) -> list[str]:
        return [replica.replica for replica in self.watch.board.fleet.replicas]


def watching(test: Callable[[Fleet], object], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with open_session() as session:
            watch = Watch(session, SlowFiles())
            try:
                await test(Fleet(watch, monkeypatch))  # type: ignore[misc]
            finally:
                await watch.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  a task of the daemon's own brings it about
            await asyncio.sleep(0.01)


def test_replicas_come_and_go_and_the_others_go_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fleet: Fleet) -> None:
        source = Listed(found=Found(replicas=(server(2, labels={"team": "a"}), server(3))))
        fleet.prepare(source)
        assert fleet.names == ["fixed"]
        shown = await fleet.ask()
        assert fleet.names == ["fixed", "127.0.0.1:2", "127.0.0.1:3"]
        assert [(target.source, target.labels) for target in shown.targets] == [
            ("config", ()),
            ("listed", (("team", "a"),)),
            ("listed", ()),
        ]
        before = {s._last.replica: s for s in fleet.watch.samplers}
        source.found = Found(replicas=(server(3), server(4)))
        await fleet.ask()
        assert fleet.names == ["fixed", "127.0.0.1:3", "127.0.0.1:4"]
        after = {s._last.replica: s for s in fleet.watch.samplers}
        assert set(after) == {"fixed", "127.0.0.1:3", "127.0.0.1:4"}
        assert after["fixed"] is before["fixed"]
        assert after["127.0.0.1:3"] is before["127.0.0.1:3"]

    watching(test, monkeypatch)


def test_other_labels_are_shown_without_sampling_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fleet: Fleet) -> None:
        source = Listed(found=Found(replicas=(server(2, labels={"team": "a"}),)))
        fleet.prepare(source)
        await fleet.ask()
        before = fleet.watch.samplers
        source.found = Found(replicas=(server(2, labels={"team": "b"}),))
        shown = await fleet.ask()
        assert shown.targets[1].labels == (("team", "b"),)
        assert fleet.watch.samplers == before

    watching(test, monkeypatch)


def test_a_source_that_fails_keeps_its_last_good_list_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fleet: Fleet) -> None:
        source = Listed(found=Found(replicas=(server(2),), left_out=("x: no",)))
        fleet.prepare(source)
        (status,) = (await fleet.ask()).discoveries
        assert (status.up, status.targets, status.left_out) == (True, 1, ("x: no",))
        good_at = status.last_success_at
        source.found = Found(replicas=None, failure=failed())
        await fleet.ask()
        (status,) = (await fleet.ask()).discoveries
        assert fleet.names == ["fixed", "127.0.0.1:2"]
        assert (status.up, status.targets, status.left_out) == (False, 1, ("x: no",))
        assert status.last_success_at == good_at
        assert status.failure == failed()
        assert status.failures_total == ((FailureReason.BAD_ANSWER, 2),)
        source.found = Found(replicas=())
        (status,) = (await fleet.ask()).discoveries
        assert (status.up, status.targets, fleet.names) == (True, 0, ["fixed"])

    watching(test, monkeypatch)


def test_a_fault_of_ours_in_a_source_is_told_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(fleet: Fleet) -> None:
        good, bad = Listed(found=Found(replicas=(server(2),))), Listed("bad", ZeroDivisionError("oh"))
        fleet.prepare(bad, good)
        bad_status, good_status = (await fleet.ask()).discoveries
        assert bad_status.failure is not None
        assert bad_status.failure.reason is FailureReason.INTERNAL
        assert (bad_status.targets, good_status.targets) == (None, 1)
        assert fleet.names == ["fixed", "127.0.0.1:2"]

    watching(test, monkeypatch)
    assert "asking it failed, please report it" in caplog.text


def test_a_name_or_an_address_that_is_watched_already_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def test(fleet: Fleet) -> None:
        first = Listed("first", found=Found(replicas=(server(2, name="fixed"), server(1), server(5))))
        second = Listed("second", found=Found(replicas=(server(6, name="127.0.0.1:5"), server(5, name="x"))))
        fleet.prepare(first, second)
        await fleet.ask()
        one, two = (await fleet.ask()).discoveries
        assert fleet.names == ["fixed", "127.0.0.1:5"]
        assert fleet.watch.board.fleet.replicas[0].url == "http://127.0.0.1:1"
        assert one.targets == 1
        assert one.left_out == (
            "fixed: a server of this name is watched already (config)",
            "127.0.0.1:1: its address is watched already, as fixed",
        )
        assert two.targets == 0
        assert two.left_out == (
            "127.0.0.1:5: a server of this name is watched already (first)",
            "x: its address is watched already, as 127.0.0.1:5",
        )
        # The name is free again when its first bearer goes.
        first.found = Found(replicas=())
        await fleet.ask()
        assert fleet.names == ["fixed", "127.0.0.1:5", "x"]

    watching(test, monkeypatch)
    assert caplog.text.count("fixed: a server of this name is watched already (config)") == 1


def test_more_servers_than_are_watched_are_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MAX_REPLICAS", 4)

    async def test(fleet: Fleet) -> None:
        one, two = Listed("one", found=Found(replicas=(server(2),))), Listed("two")
        fleet.prepare(one, two)
        await fleet.ask()
        two.found = Found(replicas=(server(3), server(4), server(5)))
        _, status = (await fleet.ask()).discoveries
        assert status.failure is not None
        assert status.failure.reason is FailureReason.TOO_LARGE
        assert status.failure.detail == "two: 3 servers, and 4 in all are the most that are watched"
        assert fleet.names == ["fixed", "127.0.0.1:2"]
        two.found = Found(replicas=(server(3), server(4)))
        await fleet.ask()
        assert fleet.names == ["fixed", "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4"]

    watching(test, monkeypatch)


def test_shards_watch_every_server_once_and_whatever_else_changes_each_stays_in_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listed(**settings: object) -> Found:
        twice = server(2, name="second name of one server")
        return Found(replicas=(*(server(port, **settings) for port in range(2, 202)), twice))

    everyone: dict[str, str] = {}

    async def test(fleet: Fleet) -> None:
        for shard in ("0/3", "1/3", "2/3"):
            config = CONFIG.model_copy(update={"shard": shard})
            source = Listed(found=listed(labels={"team": "a"}))
            fleet.prepare(source, config=config)
            (status,) = (await fleet.ask()).discoveries
            mine = [name for name in fleet.names if name != "fixed"]
            assert status.targets == len(mine)
            assert 40 < len(mine) < 100
            # What is watched already is so in every shard, whoever watches it.
            assert status.left_out == (
                "second name of one server: its address is watched already, as 127.0.0.1:2",
            )
            assert fleet.watch.board.fleet.shard == shard
            for name in fleet.names:
                assert everyone.setdefault(name, shard) == shard
            source.found = listed(labels={"team": "b"}, gpu="CPU")
            await fleet.ask()
            assert [name for name in fleet.names if name != "fixed"] == mine
        assert len(everyone) == 201

    watching(test, monkeypatch)


def test_a_reload_keeps_a_source_that_is_as_it_was_and_the_list_of_one_that_is_not_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(fleet: Fleet) -> None:
        source = Listed(found=Found(replicas=(server(2),)))
        fleet.prepare(source)
        await fleet.ask()
        same = Listed(found=Found(replicas=()))
        fleet.prepare(same)
        await fleet.ask()
        assert (source.asked, same.asked) == ([True, True], [])
        assert fleet.names == ["fixed", "127.0.0.1:2"]
        await fleet.ask()
        assert source.asked == [True, True, False]
        other = Listed(settings=2, found=Found(replicas=None, failure=failed()))
        fleet.prepare(other)
        await fleet.ask()
        assert fleet.names == ["fixed", "127.0.0.1:2"]
        other.found = Found(replicas=(server(3),))
        await fleet.ask()
        assert fleet.names == ["fixed", "127.0.0.1:3"]
        fleet.prepare()
        assert fleet.names == ["fixed"]
        assert fleet.watch.board.fleet.discoveries == ()

    watching(test, monkeypatch)


def test_sources_are_asked_at_their_interval_beside_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(fleet: Fleet) -> None:
        source = Listed()
        fleet.prepare(source, start=True)
        await until(lambda: len(source.asked) >= 3)
        source.found = Found(replicas=(server(2),))
        await until(lambda: fleet.names == ["fixed", "127.0.0.1:2"])
        assert source.asked[:3] == [True, False, False]

    watching(test, monkeypatch)


def test_access_files_of_many_alike_are_read_once_and_a_fault_of_theirs_is_told_for_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def test(fleet: Fleet) -> None:
        readings = []
        real = open_endpoint

        async def counted(replica: ReplicaConfig, files: SlowFiles, *, timeout_seconds: float) -> Endpoint:
            readings.append(replica.replica)
            return await real(replica, files, timeout_seconds=timeout_seconds)

        monkeypatch.setattr(watched, "open_endpoint", counted)
        key = tmp_path / "key"
        many = tuple(server(port, api_key_file=str(key)) for port in range(10, 60))
        source = Listed(found=Found(replicas=many))
        fleet.prepare(source)
        (status,) = (await fleet.ask()).discoveries
        assert (status.targets, len(status.left_out), len(readings)) == (0, 50, 1)
        assert (
            f"127.0.0.1:10: its access has a fault: 127.0.0.1:10: api_key_file {key} cannot be read"
            in status.left_out[0]
        )
        key.write_text("a-secret")
        (status,) = (await fleet.ask()).discoveries
        assert (status.targets, status.left_out, len(readings)) == (50, (), 2)
        assert fleet.watch._discoveries.targets()["listed"][49].endpoint == Endpoint(
            "http://127.0.0.1:59", api_key="a-secret"
        )
        await fleet.ask()
        assert len(readings) == 2

    watching(test, monkeypatch)
