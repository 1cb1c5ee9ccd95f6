"""Records what a vLLM server says on `/metrics`, until a limit, a full disk or a signal ends it."""

import asyncio
import math
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvheadroom.access import open_endpoints
from kvheadroom.app import CONFIG_FILES_SECONDS
from kvheadroom.capacity.errors import OperatorError
from kvheadroom.capacity.facts import EngineFacts
from kvheadroom.capacity.readings import Scrape, SourceFailure, VllmPage
from kvheadroom.config import Config, ReplicaConfig
from kvheadroom.lab.page_changes import PageChanges, encode
from kvheadroom.lab.recording_file import NAMES_SUFFIX, RecordingFile, WriteError, size
from kvheadroom.lab.recording_header import header
from kvheadroom.replica import Replica
from kvheadroom.sources.http import open_session
from kvheadroom.sources.kept_lines import kept_lines
from kvheadroom.sources.slow_files import SlowFiles

T = TypeVar("T")

SCRAPE_SECONDS = 10.0
"""A busy server may take longer than the interval; the scrapes that are due meanwhile are left out."""
ASK_SECONDS = 10.0
"""Servers in turn at one address look like restarts at every scrape; they are asked no more often than this."""
FLUSH_SECONDS = 10.0
"""What a killed recorder loses at most."""
MAX_PENDING_CHARACTERS = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to record.

    Attributes:
        config: with the replica in it.
        max_bytes: of the file, with what it holds already.
        mask: names become words.
        progress_seconds: from one word about the progress to the next.
    """

    config: Config
    replica: ReplicaConfig
    out: Path
    interval_seconds: float
    duration_seconds: float
    max_bytes: int
    mask: bool
    progress_seconds: float


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended.

    Attributes:
        complete: False where something failed that the operator must know of.
        sentence: for the operator.
    """

    complete: bool
    sentence: str


async def record(order: Order, report: Callable[[str], None]) -> Ending:
    """Record until something ends it.

    Args:
        report: takes a line about the progress now and then.

    Raises:
        OperatorError: it cannot begin: the file, the key or a limit is not what it must be.
    """
    stop = _stop_at_signals()
    file = RecordingFile(
        order.out, server=order.replica.url, interval_seconds=order.interval_seconds, masked=order.mask
    )
    try:
        if file.size_bytes >= order.max_bytes:
            raise OperatorError(f"--max-size: {order.out} has {size(file.size_bytes)} already")
        config = order.config.model_copy(
            update={"scrape_interval": SCRAPE_SECONDS, "replicas": (order.replica,)}
        )
        endpoints = await open_endpoints(config, SlowFiles(), timeout_seconds=CONFIG_FILES_SECONDS)
        async with open_session() as session:
            replica = Replica(config, order.replica, session, endpoints[order.replica.replica])
            return await _Recorder(order, file, replica, report).run(stop)
    finally:
        file.close()


def _stop_at_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup a terminal that goes away means nothing.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
    return stop


class _Recorder:
    def __init__(
        self, order: Order, file: RecordingFile, replica: Replica, report: Callable[[str], None]
    ) -> None:
        self._order = order
        self._file = file
        self._replica = replica
        self._report = report
        self._changes = PageChanges()
        self._pending: list[str] = []
        self._pending_characters = 0
        self._origin: Mapping[str, Any] = {}
        self._index = 0
        self._pages = self._failures = 0
        self._written = 0, 0
        """(pages, failures) that stand in the file."""
        self._last_failure = ""
        self._process_start: float | None = None
        self._asking: asyncio.Task[Mapping[str, Any]] | None = None
        self._ask_from = 0.0
        """Monotonic seconds."""
        # Counted on from here, so that a clock that is set back puts no line out of order.
        self._started_at, self._started = time.time(), time.monotonic()
        self._flushed = self._reported = self._started

    async def run(self, stop: asyncio.Event) -> Ending:
        """Record until something ends it."""
        try:
            first = await _unless(stop, self._replica.fetch_whole_page())
            if first is None:
                return Ending(complete=False, sentence="ended before the first page; nothing was written")
            if isinstance(first, SourceFailure):
                return Ending(complete=False, sentence=f"{first.detail}; nothing was written")
            await self._begin(stop, first)
            return await self._go_on(stop)
        except WriteError as error:
            return Ending(complete=False, sentence=f"{error}; {self._written_text()}")
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def _begin(self, stop: asyncio.Event, first: tuple[Scrape, VllmPage]) -> None:
        """The header and the first page, written at once."""
        file = self._file
        if file.before is not None:
            self._index = file.before.num_pages + file.before.num_failures
            if file.before.ends_at > self._started_at:
                raise OperatorError(
                    f"--out: {file.path} holds a scrape of a later time than this machine's clock tells"
                )
            if file.dropped_bytes:
                self._report(
                    f"{file.path}: a killed recorder left {file.dropped_bytes} bytes unfinished; they are replaced"
                )
        origin = await _unless(stop, self._ask(first[1]))
        self._take_origin(origin or self._header(first[1], None))
        self._take(self._started_at, first)
        full = self._flush()
        if full is not None:
            raise OperatorError(f"{full}; not one more page of this server fits")
        self._tell(0.0)

    async def _go_on(self, stop: asyncio.Event) -> Ending:
        order = self._order
        while await self._next_tick(stop):
            taken_at = self._started_at + time.monotonic() - self._started
            answer = await _unless(stop, self._replica.fetch_whole_page())
            if answer is None:
                break
            if self._asking is not None and self._asking.done():
                self._take_origin(self._asking.result())
                self._asking = None
            self._take(taken_at, answer)
            due = time.monotonic() - self._flushed >= FLUSH_SECONDS
            if due or self._pending_characters > MAX_PENDING_CHARACTERS:
                full = self._flush()
                if full is not None:
                    return self._ended(full)
            self._tell(order.progress_seconds)
        over = "ended" if stop.is_set() else f"--duration {span(order.duration_seconds)} is over"
        return self._ended(self._flush() or over)

    async def _next_tick(self, stop: asyncio.Event) -> bool:
        """Wait for the next point of the interval's grid; False where there is none."""
        interval = self._order.interval_seconds
        next_at = (math.floor((time.monotonic() - self._started) / interval) + 1) * interval
        if next_at >= self._order.duration_seconds:
            return False
        wait_seconds = self._started + next_at - time.monotonic()
        return await _unless(stop, asyncio.sleep(wait_seconds, result=True)) is True

    def _take(self, taken_at: float, answer: tuple[Scrape, VllmPage] | SourceFailure) -> None:
        """Put one scrape into the recording."""
        entry: dict[str, Any] = {"i": self._index, "t": round(taken_at, 6)}
        self._index += 1
        if isinstance(answer, SourceFailure):
            # The detail names the server; the reason is one of a closed list.
            entry["err"] = str(answer.reason)
            self._failures += 1
            self._last_failure = str(answer.reason)
            self._process_start = None
        else:
            scrape, page = answer
            text = kept_lines(scrape.body)
            if self._file.masks is not None:
                text = self._file.masks.mask_page(text)
            entry |= {"ms": round(scrape.duration_seconds * 1000, 2), "bytes": len(scrape.body)}
            entry |= self._changes.told(text)
            self._pages += 1
            self._notice_restart(page)
        self._add(encode(entry))

    def _notice_restart(self, page: VllmPage) -> None:
        """After a restart or an outage another release or model may answer."""
        start = page.process_start_time_seconds or 0.0
        if self._pages > 1 and start != self._process_start:
            now = time.monotonic()
            if self._asking is not None or now < self._ask_from:
                # It is still to be noticed at a later page.
                return
            self._asking, self._ask_from = asyncio.create_task(self._ask(page)), now + ASK_SECONDS
        self._process_start = start

    async def _ask(self, page: VllmPage) -> Mapping[str, Any]:
        resolution = await self._replica.resolve(page)
        return self._header(page, next(iter(resolution.facts.values()), None))

    def _header(self, page: VllmPage, facts: EngineFacts | None) -> Mapping[str, Any]:
        return header(
            page,
            facts,
            server=self._order.replica.url,
            interval_seconds=self._order.interval_seconds,
            masks=self._file.masks,
        )

    def _take_origin(self, origin: Mapping[str, Any]) -> None:
        if origin != self._origin:
            self._origin = origin
            self._add(encode({"origin": origin}))

    def _add(self, line: str) -> None:
        self._pending.append(line)
        self._pending_characters += len(line)

    def _flush(self) -> str | None:
        """Write what is pending; where the file would become too large, it is told why."""
        full = self._file.append(self._pending, self._order.max_bytes) if self._pending else None
        if full is not None:
            return full
        self._pending, self._pending_characters = [], 0
        self._flushed = time.monotonic()
        self._written = self._pages, self._failures
        return None

    def _tell(self, every_seconds: float) -> None:
        now = time.monotonic()
        if now - self._reported >= every_seconds:
            self._reported = now
            left = span(max(0.0, self._order.duration_seconds - (now - self._started)))
            failed = f"{self._failures} failed" + (f" (last: {self._last_failure})" if self._failures else "")
            self._report(
                f"{_plural(self._pages, 'page')}, {failed}, {size(self._file.size_bytes)} written, {left} left"
            )

    def _written_text(self) -> str:
        pages, failures = self._written
        if not pages:
            return "nothing was written"
        failed = f" ({_plural(failures, 'scrape')} failed)" if failures else ""
        return (
            f"{_plural(pages, 'page')} written{failed}; {self._order.out} has {size(self._file.size_bytes)}"
        )

    def _ended(self, why: str) -> Ending:
        sentence = f"{why}; {self._written_text()}"
        masks = self._file.masks
        if masks is not None:
            sentence += (
                f"; {self._order.out}{NAMES_SUFFIX} tells which word is which name: keep it to yourself"
            )
            if masks.num_lines_left_out:
                sentence += f"; {_plural(masks.num_lines_left_out, 'line')} left out as no samples"
        return Ending(complete=True, sentence=sentence)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives; None if it was told to stop before."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """`1h5m`, `9m18s`, `4.5s`."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (rest, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)
