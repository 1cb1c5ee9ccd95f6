"""A fleet of vLLM servers in one light process, for `tests.bench.fleet`: one real recorded page under many addresses.

Run as a program. Target i is 127.0.(1 + i // 250).(1 + i % 250) at one port, so each is a host with connections of its
own. A counter on the page grows with each answer, as a working engine's does; nothing else is done for one.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import uvloop

from kvheadroom.sources.metric_names import NAMES, OFTEN_NAMES, SELDOM_NAMES
from tests.conftest import capture

MODEL = '{"data": [{"id": "tiny", "root": "org/tiny", "parent": null, "max_model_len": 2048}]}'
# A number that the counter is replaced by, always as long, so that the length of the answer stays.
GROWING = re.compile(rb"(?m)^(vllm:generation_tokens_total\{[^}]*\}) \S+$")


def address(target: int) -> str:
    """The host of one target."""
    return f"127.0.{1 + target // 250}.{1 + target % 250}"


def filtered(page: bytes, names: Sequence[str]) -> bytes:
    """What prometheus_client's application gives of a page for the names that kvheadroom asks for."""
    wanted = {f"vllm:{name}" for name in names} | {"process_start_time_seconds"}
    lines = []
    for line in page.decode().splitlines():
        name = line.split()[2] if line.startswith("# ") else re.split(r"[{ ]", line, maxsplit=1)[0]
        if name in wanted:
            lines.append(line)
    return ("\n".join(lines) + "\n").encode()


def response(body: bytes, status: int = 200, *, chunked: bool = False) -> bytes:
    """One whole HTTP answer."""
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: Mon, 30 Nov 2026 08:00:00 GMT\r\nserver: uvicorn\r\n"
    head += "content-type: text/plain; version=0.0.4; charset=utf-8\r\n"
    if chunked:
        return f"{head}transfer-encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Fleet:
    """What the targets answer, and what was asked of them.

    Args:
        filters: whether `/metrics/?name[]=` gives the wanted metrics alone; otherwise it is not there.
        hanging: targets that accept and never answer.
        slow: those that answer after 2 to 4 s.
    """

    def __init__(self, *, filters: bool, hanging: frozenset[str], slow: frozenset[str]) -> None:
        page = capture("gqa_heavy")
        self.hanging, self.slow = hanging, slow
        self.whole = self._split(page, chunked=False)
        # As uvicorn sends what an application gives without its length, and prometheus_client's gives none.
        self.often, self.all = (
            self._split(filtered(page, names), chunked=True) if filters else None
            for names in (OFTEN_NAMES, NAMES)
        )
        self.counter = 10_000_000
        self.scrapes: defaultdict[str, int] = defaultdict(int)
        self.arrivals: defaultdict[str, list[float]] = defaultdict(list)

    @staticmethod
    def _split(page: bytes, *, chunked: bool) -> tuple[bytes, bytes]:
        grown = GROWING.sub(rb"\1 10000000.0", page, count=1)
        before, _, after = response(grown, chunked=chunked).partition(b" 10000000.0\n")
        return before + b" ", b".0\n" + after

    def answer(self, path: str, agent: str) -> bytes:
        """The answer to one request, counted where it is a scrape."""
        if path == "/counts":
            return response(json.dumps({"scrapes": self.scrapes, "arrivals": self.arrivals}).encode())
        parts = self.whole if path == "/metrics" else None
        if path.startswith("/metrics/?"):
            parts = self.all if any(name in path for name in SELDOM_NAMES) else self.often
        if parts is not None:
            self.scrapes[agent] += 1
            self.counter += 1
            return b"%b%d%b" % (parts[0], self.counter, parts[1])
        if path == "/version":
            return response(b'{"version": "0.33.0"}')
        if path == "/v1/models":
            return response(MODEL.encode())
        return response(b"", 200 if path == "/health" else 404)


class Target(asyncio.Protocol):
    """One connection of one scraper."""

    def __init__(self, fleet: Fleet, *, timed: bool) -> None:
        self._fleet = fleet
        self._timed = timed
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        """A scraper has connected; uvloop's transport is none of asyncio's classes."""
        self._transport = transport
        self._host = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        """Part of a request; answered when it is whole."""
        self._received += data
        if not self._received.endswith(b"\r\n\r\n"):
            return
        request, self._received = self._received, b""
        path = request.split(b" ", 2)[1].decode()
        agent = (
            request.partition(b"\r\nUser-Agent: ")[2]
            .partition(b"\r\n")[0]
            .partition(b"/")[0]
            .decode()
            .lower()
        )
        only = request.partition(b"\r\nX-Only: ")[2].partition(b"\r\n")[0]
        if only:
            agent = only.decode()
        if self._timed and path.startswith("/metrics"):
            self._fleet.arrivals[self._host].append(time.monotonic())
        if self._host in self._fleet.hanging:
            return
        answer = self._fleet.answer(path, agent)
        if self._host in self._fleet.slow:
            asyncio.get_running_loop().call_later(random.uniform(2.0, 4.0), self._write, answer)
        else:
            self._transport.write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def serve(settings: dict[str, object]) -> None:
    """Serve until killed; prints the port."""
    hanging, slow = settings["hanging"], settings["slow"]
    assert isinstance(hanging, list)
    assert isinstance(slow, list)
    fleet = Fleet(
        filters=bool(settings["filters"]),
        hanging=frozenset(map(address, hanging)),
        slow=frozenset(map(address, slow)),
    )
    server = await asyncio.get_running_loop().create_server(
        lambda: Target(fleet, timed=bool(settings["timed"])), "0.0.0.0", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(sys.argv[1])))
