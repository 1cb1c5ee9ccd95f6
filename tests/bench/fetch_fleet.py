"""Fetching and parsing alone, as the daemon does it and nothing beside: run by `tests.bench.fleet`.

Usage: python -m tests.bench.fetch_fleet PORT TARGETS INTERVAL_SECONDS
"""

import asyncio
import sys
import time

import uvloop

from kvheadroom.monitor.sampler import _phase
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, open_session
from kvheadroom.sources.vllm_pages import VllmPages
from tests.bench.fleet_server import address


async def scrape(session: Session, url: str, interval_seconds: float) -> None:
    """One target for ever, at the phase that the daemon asks it at."""
    endpoint, pages = Endpoint(url, headers=(("X-Only", "fetch"),)), VllmPages(session)
    turn = time.monotonic() + _phase(url) * interval_seconds
    while True:
        await asyncio.sleep(turn - time.monotonic())
        await pages.fetch(endpoint, time.monotonic() + interval_seconds)
        turn += interval_seconds


async def main(port: int, targets: int, interval_seconds: float) -> None:
    """All targets."""
    async with open_session() as session:
        urls = [f"http://{address(target)}:{port}" for target in range(targets)]
        await asyncio.gather(*(scrape(session, url, interval_seconds) for url in urls))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
