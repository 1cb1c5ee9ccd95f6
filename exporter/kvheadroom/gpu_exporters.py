"""The DCGM-exporters of a config, asked again and again for the GPUs of other machines."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvheadroom.access import open_access
from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason
from kvheadroom.capacity.readings import FailureReason, SourceFailure
from kvheadroom.capacity.remote_gpus import ExporterStatus, RemoteGpu
from kvheadroom.config import ConfigError, DcgmExporter
from kvheadroom.sources.dcgm import NoGpusError, parse_dcgm_page
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session, fetch
from kvheadroom.sources.slow_files import SlowFiles

log = logging.getLogger(__name__)

ACCESS_SECONDS = 5.0
FETCH_SECONDS = 10.0
MAX_PAGE_BYTES = 4 * 1024**2
PROGRAM = "DCGM-exporter"


@dataclass(slots=True)
class _Exporter:
    """One exporter, and what it said last.

    Attributes:
        seen: every GPU that it ever told of since the config was loaded, as it was last.
    """

    settings: DcgmExporter
    status: ExporterStatus
    endpoint: Endpoint | None = None
    seen: dict[str, RemoteGpu] = field(default_factory=dict)
    failures: Counter[FailureReason] = field(default_factory=Counter)
    task: asyncio.Task[None] | None = None


class GpuExporters:
    """All DCGM-exporters of one config.

    Args:
        changed: called with what all said last, after each was asked.
    """

    def __init__(
        self, session: Session, files: SlowFiles, changed: Callable[[tuple[ExporterStatus, ...]], None]
    ) -> None:
        self._session = session
        self._files = files
        self._changed = changed
        self._exporters: list[_Exporter] = []

    def set_exporters(self, settings: Sequence[DcgmExporter], *, start: bool) -> None:
        """Take a config's exporters over; one that is as it was goes on, and all are asked at once.

        Args:
            start: let them run; False when they are asked by hand.
        """
        before = {one.status.source: one for one in self._exporters}
        for one in self._exporters:
            if one.task is not None:
                one.task.cancel()
        self._exporters = []
        for index, wanted in enumerate(settings):
            name = f"dcgm_exporters[{index}]"
            status = ExporterStatus(
                source=name,
                url=wanted.base_url + wanted.path.partition("?")[0],
                interval_seconds=wanted.refresh_interval,
            )
            old = before.get(name)
            exporter = old if old is not None and old.settings == wanted else _Exporter(wanted, status)
            # Those that are gone for good are forgotten.
            exporter.seen = {gpu.gpu: gpu for gpu in exporter.status.gpus}
            self._exporters.append(exporter)
            exporter.task = asyncio.create_task(self._run(exporter)) if start else None
        self._tell()

    async def ask_all(self) -> None:
        """Ask every exporter once, by hand."""
        await asyncio.gather(*(self._ask(exporter) for exporter in self._exporters))

    async def close(self) -> None:
        """End asking."""
        tasks = [one.task for one in self._exporters if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, exporter: _Exporter) -> None:
        while True:
            await self._ask(exporter)
            await asyncio.sleep(exporter.settings.refresh_interval)

    async def _ask(self, exporter: _Exporter) -> None:
        name = exporter.status.source
        try:
            answer = await self._read(exporter)
        except Exception as error:
            log.exception("%s: asking it failed, please report it", name)
            answer = SourceFailure(name, FailureReason.INTERNAL, f"a fault of kvheadroom: {error!r}")
        if isinstance(answer, SourceFailure):
            if answer != exporter.status.failure:
                log.warning("%s: %s", name, answer.detail.removeprefix(f"{name}: "))
            exporter.failures[answer.reason] += 1
            answer = replace(exporter.status, failure=answer)
        exporter.status = replace(answer, failures_total=tuple(sorted(exporter.failures.items())))
        self._tell()

    async def _read(self, exporter: _Exporter) -> ExporterStatus | SourceFailure:
        """What it says now."""
        settings, name = exporter.settings, exporter.status.source
        try:
            # At every question: tokens and certificates are renewed on disk.
            exporter.endpoint = await open_access(
                settings,
                name,
                settings.base_url,
                self._files,
                timeout_seconds=ACCESS_SECONDS,
                known=exporter.endpoint,
            )
        except ConfigError as error:
            return SourceFailure(name, FailureReason.UNAUTHORIZED, str(error))
        page = await fetch(
            self._session,
            exporter.endpoint,
            settings.path,
            source=name,
            timeout_seconds=FETCH_SECONDS,
            max_bytes=MAX_PAGE_BYTES,
            program=PROGRAM,
        )
        if isinstance(page, SourceFailure):
            return page
        try:
            gpus, failures = parse_dcgm_page(page.body, name, page.taken_at)
        except NoGpusError as error:
            return SourceFailure(name, FailureReason.BAD_ANSWER, f"GET {exporter.status.url}: {error}")
        now = tuple(_with_change(exporter.seen.get(gpu.gpu), gpu, page.taken_at) for gpu in gpus)
        gone = _gone(exporter.seen, now, failures, exporter.status.url)
        exporter.seen |= {gpu.gpu: gpu for gpu in now}
        return replace(
            exporter.status, taken_at=page.taken_at, gpus=now, failures=(*failures, *gone), failure=None
        )

    def _tell(self) -> None:
        self._changed(tuple(one.status for one in self._exporters))


def _with_change(before: RemoteGpu | None, gpu: RemoteGpu, taken_at: float) -> RemoteGpu:
    same = before is not None and before.numbers == gpu.numbers
    return replace(gpu, changed_at=before.changed_at if same and before is not None else taken_at)


def _gone(
    seen: dict[str, RemoteGpu], now: tuple[RemoteGpu, ...], failures: tuple[GpuFailure, ...], url: str
) -> list[GpuFailure]:
    """A failure for each GPU that was told of and is no more: no alert on it is to look resolved.

    A part of a GPU in MIG mode goes because somebody wants it, and so does a GPU that was divided into parts.
    """
    there = {gpu.gpu for gpu in now} | {gpu.parent for gpu in now} | {failure.gpu for failure in failures}
    return [
        GpuFailure(
            gpu.gpu,
            GpuFailureReason.LOST,
            f"{gpu.gpu}: {url} tells of it no more. It fell off the bus, or several exporters answer at this address; if it "
            "was taken out, a reload (SIGHUP) forgets it",
        )
        for gpu in seen.values()
        if gpu.gpu not in there and gpu.parent is None
    ]
