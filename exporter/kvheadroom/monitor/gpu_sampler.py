"""The GPUs of this machine, tick by tick, read in a thread of their own.

A driver call can block for seconds, or for ever, and cannot be broken off. So the reading is done by a
daemon thread: the event loop goes on, and the end of the process waits for nobody.

The sampler knows no source: it is handed callables that block and one that takes the reading.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from kvheadroom.capacity.gpus import GpuFailure, GpuFailureReason, GpuReading, XidCount

log = logging.getLogger(__name__)

Answer = asyncio.Future[GpuReading]


class GpuSampler:
    """Asks for one reading per tick and publishes it, or a timeout in its place.

    Args:
        read: called in the sampler's thread, never twice at the same time.
        mend: called in the same thread after each reading was handed over; it may take long.
        interval_seconds: asked at every tick: a reload may change it.
        deadline_seconds: from asking to publishing; a reading that comes later is dropped.
        publish: called on the event loop.
    """

    def __init__(
        self,
        read: Callable[[], GpuReading],
        mend: Callable[[], None],
        interval_seconds: Callable[[], float],
        deadline_seconds: float,
        publish: Callable[[GpuReading], None],
    ) -> None:
        self._read = read
        self._mend = mend
        self._interval_seconds = interval_seconds
        self._deadline_seconds = deadline_seconds
        self._publish = publish
        self._asked: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._awaited: Answer | None = None
        # Counts do not end where the driver does not answer: an alert on one would look resolved just then.
        self._xids: tuple[XidCount, ...] = ()

    async def run(self) -> None:
        """Tick until cancelled. To be called once: the source behind `read` belongs to one thread."""
        threading.Thread(target=self._answer, name="gpus", daemon=True).start()
        next_at = time.monotonic()
        try:
            while True:
                reading = await self._ask()
                self._xids = reading.xids
                self._publish(reading)
                next_at = max(next_at + self._interval_seconds(), time.monotonic())
                await asyncio.sleep(next_at - time.monotonic())
        finally:
            self._asked.put(None)

    async def _ask(self) -> GpuReading:
        """One reading, within the deadline."""
        taken_at, started = time.time(), time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_seconds):
                if self._awaited is not None:
                    # Nothing is asked while an earlier call is stuck; its answer will be old, so it is dropped.
                    await asyncio.wait({self._awaited})
                self._awaited = asyncio.get_running_loop().create_future()
                self._asked.put(self._awaited)
                await asyncio.wait({self._awaited})
        except TimeoutError:
            detail = (
                f"no answer from the NVIDIA driver within {self._deadline_seconds:g} s; the call goes on, and "
                "nothing else is asked meanwhile. Does `nvidia-smi` answer? Persistence mode speeds it up"
            )
            return GpuReading(
                taken_at=taken_at,
                duration_seconds=time.monotonic() - started,
                failures=(GpuFailure(None, GpuFailureReason.TIMEOUT, detail),),
                xids=self._xids,
            )
        return self._awaited.result()

    def _answer(self) -> None:
        """The thread: one reading for each question, until told to end."""
        while (answer := self._asked.get()) is not None:
            taken_at, started = time.time(), time.monotonic()
            try:
                reading = self._read()
            except Exception as error:  # noqa: BLE001  whatever it is, it is counted and the thread lives on
                detail = f"a fault of kvheadroom: {error!r}"
                reading = GpuReading(
                    taken_at=taken_at,
                    duration_seconds=time.monotonic() - started,
                    failures=(GpuFailure(None, GpuFailureReason.INTERNAL, detail),),
                    xids=self._xids,
                )
            # The loop may have ended while the driver was thinking; then nobody is there to be told.
            with contextlib.suppress(RuntimeError):
                answer.get_loop().call_soon_threadsafe(answer.set_result, reading)
            try:
                self._mend()
            except Exception:
                log.exception("looking for lost GPUs failed, please report it")
