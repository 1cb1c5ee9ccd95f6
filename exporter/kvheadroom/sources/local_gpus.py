"""The GPUs of this machine, and the processes of the vLLM servers that may be on them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvheadroom.capacity.gpus import GpuReading, ServerPlace, ServerProcesses
from kvheadroom.sources.background import BackgroundCall

LOOK_SECONDS = 2.0
"""It takes tens of milliseconds on a busy machine. The driver comes before, and both come before a reading's deadline."""

Find = Callable[[tuple[ServerPlace, ...], frozenset[int]], tuple[ServerProcesses, ...]]


class LocalGpus:
    """Joins what the driver and the kernel say. To be used from one thread only.

    Args:
        read_gpus: what the driver says.
        find: which of some processes belong to some servers; it may block for ever.
        places: of the servers that may run on GPUs; asked at every reading: a reload may change them.
        look_seconds: how long a reading waits for `find`.
    """

    def __init__(
        self,
        read_gpus: Callable[[], GpuReading],
        find: Find,
        places: Callable[[], tuple[ServerPlace, ...]],
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._read_gpus = read_gpus
        self._find = find
        self._places = places
        self._look_seconds = look_seconds
        self._looked_at: tuple[float, tuple[ServerPlace, ...]] | None = None
        self._servers: tuple[ServerProcesses, ...] = ()
        self._call: BackgroundCall[tuple[ServerProcesses, ...]] | None = None

    def read(self) -> GpuReading:
        """What the driver says; the servers' processes are looked for when it has listed those of the GPUs anew."""
        reading = self._read_gpus()
        places = self._places()
        if places and reading.processes_taken_at is not None:
            at = (reading.processes_taken_at, places)
            if at != self._looked_at:
                self._looked_at = at
                pids = frozenset(process.pid for one in reading.processes for process in one.processes)
                self._servers = self._look(places, pids)
        return replace(reading, servers=self._servers)

    def _look(self, places: tuple[ServerPlace, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
        # Nothing is asked while an earlier look hangs.
        if self._call is None or not self._call.is_stuck:
            self._call = BackgroundCall(partial(_found, self._find, places, pids), "processes")
            self._call.wait(self._look_seconds)
            if self._call.answer is not None:
                return self._call.answer
        why = f"the kernel did not tell of its processes within {self._look_seconds:g} s"
        return tuple(ServerProcesses(place=place, unknown=why) for place in places)


def _found(find: Find, places: tuple[ServerPlace, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
    try:
        return find(places, pids)
    except Exception as error:  # noqa: BLE001  whatever it is, it is told and somebody waits for an answer
        why = f"a fault of kvheadroom: {error!r}"
        return tuple(ServerProcesses(place=place, unknown=why) for place in places)
