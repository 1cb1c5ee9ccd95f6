"""Looks at a server's host beside the ticks, stepped by hand."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.monitor.host_looks import HostLooks


class Host:
    """Answers by what the test puts in; a future stands for one that hangs."""

    def __init__(self) -> None:
        self.looks = 0
        self.answer: HostUse | Exception | Awaitable[HostUse | None] | None = HostUse(processes=1)

    async def read(self) -> HostUse | None:
        self.looks += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None or isinstance(self.answer, HostUse):
            return self.answer
        return await self.answer


Test = Callable[[Host, HostLooks], Awaitable[None]]


def run(test: Test) -> None:
    async def all_of_it() -> None:
        host = Host()
        looks = HostLooks(host.read)
        await test(host, looks)
        looks.close()

    asyncio.run(all_of_it())


async def seen(looks: HostLooks, now: float) -> int | None:
    use = await looks.latest(now, wait_seconds=5.0)
    return None if use is None else use.processes


def test_the_first_tick_waits_for_the_first_look_and_the_next_look_is_half_a_minute_later() -> None:
    async def test(host: Host, looks: HostLooks) -> None:
        assert await seen(looks, 1000.0) == 1
        host.answer = answer = asyncio.get_running_loop().create_future()
        assert await seen(looks, 1029.9) == 1
        assert host.looks == 1
        # No later tick waits: what the look gives is there at the next one.
        assert await seen(looks, 1030.0) == 1
        answer.set_result(HostUse(processes=2))
        assert await seen(looks, 1035.0) == 2
        assert host.looks == 2

    run(test)


def test_while_a_look_hangs_none_is_started_and_what_was_seen_grows_old() -> None:
    async def test(host: Host, looks: HostLooks) -> None:
        assert await seen(looks, 1000.0) == 1
        host.answer = asyncio.get_running_loop().create_future()
        for now in (1030.0, 1060.0, 1089.0):
            assert await seen(looks, now) == 1
        assert await seen(looks, 1090.0) is None
        assert host.looks == 2

    run(test)


def test_a_tick_does_not_wait_longer_than_it_may_for_a_host_that_hangs() -> None:
    async def test(host: Host, looks: HostLooks) -> None:
        host.answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(2.0):
            assert await looks.latest(1000.0, wait_seconds=0.01) is None

    run(test)


def test_a_server_that_has_ended_has_no_host_any_more() -> None:
    async def test(host: Host, looks: HostLooks) -> None:
        assert await seen(looks, 1000.0) == 1
        host.answer = None
        await seen(looks, 1030.0)
        assert await seen(looks, 1031.0) is None

    run(test)


def test_a_fault_of_ours_is_logged_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test(host: Host, looks: HostLooks) -> None:
        host.answer = ValueError("x")
        assert await seen(looks, 1000.0) is None
        assert "please report it" in caplog.text
        host.answer = HostUse(processes=3)
        assert await seen(looks, 1030.0) == 3

    run(test)


def test_a_clock_that_was_set_back_stops_no_look_and_shows_nothing_of_the_future() -> None:
    async def test(host: Host, looks: HostLooks) -> None:
        assert await seen(looks, 1000.0) == 1
        host.answer = asyncio.get_running_loop().create_future()
        assert await seen(looks, 500.0) is None
        assert host.looks == 2

    run(test)
