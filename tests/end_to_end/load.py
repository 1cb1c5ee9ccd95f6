"""Load for a vLLM under test: closed-loop clients, all at once or one by one, exact lengths, bounded in count and time."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What every client of one load does: send a request, wait for all of its answer, send the next."""

    clients: int
    prompt_tokens: int
    output_tokens: int
    pause_seconds: float = 0.0
    join_every_seconds: float = 0.0  # a ramp: each client begins so long after the one before it
    max_requests: int = 10_000
    deadline_seconds: float = 120.0
    prompt_seed: int = (
        0  # the same seed sends the same prompts again, which vLLM then finds in its prefix cache
    )


@dataclass
class LoadReport:
    """`sent` = `finished` + `failed` + `abandoned`. Tokens are of the finished ones, as vLLM counted them."""

    sent: int = 0
    finished: int = 0
    abandoned: int = 0  # still in flight at the end and cancelled; vLLM aborts those
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    reached: bool = False  # the predicate held before the deadline and the last request
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.errors.total()


def run_until(
    predicate: Callable[[], bool],
    base_url: str,
    shape: Shape,
    *,
    model: str = "tiny",
    poll_seconds: float = 0.5,
) -> LoadReport:
    """Load the server until `predicate` holds, and no longer than `shape` allows.

    The predicate is asked every `poll_seconds`, in a thread, so it may scrape. Requests still in flight at
    the end are abandoned: tests want the moment, not the drain.
    """
    return asyncio.run(_Load(base_url, shape, model).run(predicate, poll_seconds))


def run_to_the_end(base_url: str, shape: Shape, *, model: str = "tiny") -> LoadReport:
    """Send all of `shape.max_requests` and wait for every answer, within the deadline."""
    return run_until(lambda: False, base_url, shape, model=model)


@contextmanager
def steady_load(base_url: str, shape: Shape, *, model: str = "tiny") -> Iterator[LoadReport]:
    """Load the server in the background while the block runs. The report is complete after the block."""
    load = _Load(base_url, shape, model)
    over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(load.run(over.is_set, 0.1)), name="steady load")
    thread.start()
    try:
        yield load.report
    finally:
        over.set()
        thread.join()


class _Load:
    def __init__(self, base_url: str, shape: Shape, model: str) -> None:
        self.report = LoadReport()
        self._url = f"{base_url}/v1/completions"
        self._shape = shape
        self._model = model

    async def run(self, predicate: Callable[[], bool], poll_seconds: float) -> LoadReport:
        began_at = time.monotonic()
        deadline = began_at + self._shape.deadline_seconds
        timeout = aiohttp.ClientTimeout(total=self._shape.deadline_seconds)
        # A connection for each request: one that is kept may be closed by vLLM (after 5 s) just as a starved client uses it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = [
                asyncio.create_task(
                    self._client(session, begins_after=place * self._shape.join_every_seconds)
                )
                for place in range(self._shape.clients)
            ]
            try:
                while not self.report.reached and time.monotonic() < deadline:
                    # Looked at before asking, so that what the last request brought about still counts.
                    out_of_requests = all(client.done() for client in clients)
                    self.report.reached = await asyncio.to_thread(predicate)
                    if out_of_requests:
                        break
                    await asyncio.wait(clients, timeout=poll_seconds)
            finally:
                for client in clients:
                    client.cancel()
                outcomes = await asyncio.gather(*clients, return_exceptions=True)
        self.report.seconds = time.monotonic() - began_at
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # a mistake in this file, not a failed request
                raise outcome
        return self.report

    async def _client(self, session: aiohttp.ClientSession, begins_after: float) -> None:
        await asyncio.sleep(begins_after)
        while self.report.sent < self._shape.max_requests:
            self.report.sent += 1
            try:
                await self._complete(session, number=self.report.sent)
            except asyncio.CancelledError:
                self.report.abandoned += 1
                raise
            except (aiohttp.ClientError, TimeoutError) as error:
                self.report.errors[type(error).__name__] += 1
                await asyncio.sleep(0.2)  # a server that refuses at once must not be hammered
            await asyncio.sleep(self._shape.pause_seconds)

    async def _complete(self, session: aiohttp.ClientSession, number: int) -> None:
        # No per-request seed: under load it makes vLLM's CPU build sample one request at a time.
        words = random.Random(f"{self._shape.prompt_seed}/{number}")
        request = {
            "model": self._model,
            "prompt": [words.randrange(10, 1000) for _ in range(self._shape.prompt_tokens)],
            "max_tokens": self._shape.output_tokens,
            "min_tokens": self._shape.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        async with session.post(self._url, json=request) as answer:
            if answer.status != 200:
                self.report.errors[f"status {answer.status}"] += 1
                await asyncio.sleep(0.2)
                return
            usage = (await answer.json())["usage"]
        self.report.finished += 1
        self.report.prompt_tokens += usage["prompt_tokens"]
        self.report.output_tokens += usage["completion_tokens"]
