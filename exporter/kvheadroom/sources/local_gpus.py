"""The GPUs of this machine, and the processes of the vLLM servers that may be on them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvheadroom.capacity.gpus import GpuReading, ServerProcesses
from kvheadroom.sources.background import BackgroundCall

LOOK_SECONDS = 2.0
"""It takes tens of milliseconds on a busy machine. The driver comes before, and both come before a reading's deadline."""

Find = Callable[[tuple[str, ...], frozenset[int]], tuple[ServerProcesses, ...]]


class LocalGpus:
    """Joins what the driver and the kernel say. To be used from one thread only.

    Args:
        read_gpus: what the driver says.
        find: which of some processes belong to the servers at some URLs; it may block for ever.
        urls: of the servers that may run on GPUs; asked at every reading: a reload may change them.
        look_seconds: how long a reading waits for `find`.
    """

    def __init__(
        self,
        read_gpus: Callable[[], GpuReading],
        find: Find,
        urls: Callable[[], tuple[str, ...]],
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._read_gpus = read_gpus
        self._find = find
        self._urls = urls
        self._look_seconds = look_seconds
        self._looked_at: tuple[float, tuple[str, ...]] | None = None
        self._servers: tuple[ServerProcesses, ...] = ()
        self._call: BackgroundCall[tuple[ServerProcesses, ...]] | None = None

    def read(self) -> GpuReading:
        """What the driver says; the servers' processes are looked for when it has listed those of the GPUs anew."""
        reading = self._read_gpus()
        urls = self._urls()
        if urls and reading.processes_taken_at is not None:
            at = (reading.processes_taken_at, urls)
            if at != self._looked_at:
                self._looked_at = at
                pids = frozenset(process.pid for one in reading.processes for process in one.processes)
                self._servers = self._look(urls, pids)
        return replace(reading, servers=self._servers)

    def _look(self, urls: tuple[str, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
        # Nothing is asked while an earlier look hangs.
        if self._call is None or not self._call.is_stuck:
            self._call = BackgroundCall(partial(_found, self._find, urls, pids), "processes")
            self._call.wait(self._look_seconds)
            if self._call.answer is not None:
                return self._call.answer
        why = f"the kernel did not tell of its processes within {self._look_seconds:g} s"
        return tuple(ServerProcesses(url=url, unknown=why) for url in urls)


def _found(find: Find, urls: tuple[str, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
    try:
        return find(urls, pids)
    except Exception as error:  # noqa: BLE001  whatever it is, it is told and somebody waits for an answer
        why = f"a fault of kvheadroom: {error!r}"
        return tuple(ServerProcesses(url=url, unknown=why) for url in urls)
