"""The memory of a server's host, looked at beside the ticks: half a minute old at most, and no tick waits for a disk that hangs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvheadroom.capacity.host_tier import HostUse

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""Between two looks. A tier is taken whole as its server starts."""
OLD_SECONDS = 90.0

ReadHost = Callable[[], Awaitable[HostUse | None]]


class HostLooks:
    """What was seen last.

    Args:
        read: one look; None where the server has ended, or its host does not answer.
    """

    def __init__(self, read: ReadHost) -> None:
        self._read = read
        self._look: asyncio.Future[HostUse | None] | None = None
        self._looked_at: float | None = None
        self._seen: HostUse | None = None
        self._seen_at = 0.0

    async def latest(self, now: float, *, wait_seconds: float) -> HostUse | None:
        """What was seen last; None where that is too old.

        Args:
            now: unix seconds.
            wait_seconds: for the first look alone.
        """
        if self._look is None and (self._looked_at is None or not 0 <= now - self._looked_at < LOOK_SECONDS):
            self._looked_at = now
            self._look = asyncio.ensure_future(self._read())
        if self._look is not None:
            await asyncio.wait({self._look}, timeout=wait_seconds if self._seen is None else 0)
            if self._look.done():
                self._learn(self._look)
                self._look = None
        return self._seen if 0 <= now - self._seen_at < OLD_SECONDS else None

    def close(self) -> None:
        """End a look under way."""
        if self._look is not None:
            self._look.cancel()

    def _learn(self, look: asyncio.Future[HostUse | None]) -> None:
        try:
            self._seen = look.result()
        except Exception:
            log.exception("the memory of a server's host could not be looked at, please report it")
            self._seen = None
        self._seen_at = self._looked_at or 0.0
