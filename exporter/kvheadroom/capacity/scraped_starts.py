"""Starts of engines that only vLLM's own metrics tell of, as they were scraped over some time."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvheadroom.capacity.calibration_samples import Excluded, Exclusion
from kvheadroom.capacity.exported_starts import Past, Window
from kvheadroom.capacity.own_start import start_of
from kvheadroom.capacity.readings import EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenEngine:
    """One engine at some instants in a row, at which its page said the same.

    Attributes:
        server: its address, as it was scraped.
        engine: of engines whose blocks the page adds up, the first: together they are one start.
        started_at: start time of the process in unix seconds; None where nobody tells it.
        snapshot: None where the page had what two processes say: a restart between two looks.
    """

    server: str
    engine: str
    started_at: float | None
    num_blocks: int | None
    seen: Window
    snapshot: EngineSnapshot | None


@dataclass(slots=True)
class ScrapedStart:
    """One start of one engine.

    Attributes:
        num_blocks: each number that was told.
        seen: where it alone was on the page; None where it never was.
        near: from the first to the last instant at which anything of it was on the page.
        awake: as it was seen last while it did not sleep; None where it always slept.
    """

    server: str
    engine: str
    started_at: float | None
    near: Window
    num_blocks: set[int] = field(default_factory=set)
    seen: Window | None = None
    awake: EngineSnapshot | None = None

    @property
    def name(self) -> str:
        """Of its engine, for people."""
        return f"{self.server} engine {self.engine}"

    def start(self, replica: str) -> str:
        """What tells it from every other start, as the daemon calls it."""
        return start_of(replica, self.engine, self.started_at, max(self.num_blocks, default=None))

    def excluded(self, past: Past) -> Excluded | None:
        """Why nothing can be learned of it, whatever it is made of; None where nothing is in the way."""
        unanswered = past.unanswered_near(self.near)
        if unanswered is not None:
            return Excluded(
                Exclusion.UNKNOWN, f"nothing is known of {past.between(unanswered)}, when it may have run too"
            )
        if self.seen is None:
            return Excluded(
                Exclusion.RESTARTING,
                "whenever it was on the page another process was too, and which of them had these blocks is not told",
            )
        if len(self.num_blocks) > 1:
            told = " and ".join(f"{blocks:,}" for blocks in sorted(self.num_blocks))
            return Excluded(
                Exclusion.RESTARTING, f"its pool had {told} blocks while the same process went on"
            )
        if self.seen[0] == self.seen[1]:
            return Excluded(Exclusion.RESTARTING, past.seen_once)
        if self.awake is None:
            return Excluded(Exclusion.ASLEEP, "it slept whenever it was seen, and had given its memory up")
        return None


def scraped_starts(seen: Iterable[SeenEngine]) -> tuple[ScrapedStart, ...]:
    """Every start once, in the order in which they were first seen."""
    found: dict[object, ScrapedStart] = {}
    for one in sorted(seen, key=lambda one: one.seen):
        key = (one.server, one.engine, one.started_at, one.num_blocks if one.started_at is None else None)
        start = found.get(key)
        if start is None:
            start = found[key] = ScrapedStart(one.server, one.engine, one.started_at, one.seen)
        start.near = start.near[0], max(start.near[1], one.seen[1])
        if one.num_blocks is not None:
            start.num_blocks.add(one.num_blocks)
        if one.snapshot is None:
            continue
        first, last = start.seen or one.seen
        start.seen = first, max(last, one.seen[1])
        if not one.snapshot.sleeping and (one.num_blocks is not None or start.awake is None):
            start.awake = one.snapshot
    # Before an engine has its pool the page of a server without a start time looks as if it were another's.
    with_pool = {(one.server, one.engine) for one in found.values() if one.num_blocks}
    return tuple(
        one
        for one in found.values()
        if one.num_blocks or one.started_at is not None or (one.server, one.engine) not in with_pool
    )
