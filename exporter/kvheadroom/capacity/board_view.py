"""What a board in the terminal shows of a fleet: values as `/api/v1/status` tells them, and what they have in common."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvheadroom.capacity.binding_limit import Limit
from kvheadroom.capacity.fleet_verdict import Urgency, Verdict


@dataclass(frozen=True, slots=True)
class StaysWarm:
    """How long what nobody asks for stays in one tier; both None where nothing was evicted yet.

    Attributes:
        tier: `hbm` or `host`.
    """

    tier: str
    low_seconds: float | None
    high_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRow:
    """One engine, or a server without numbers. All text is the outside's.

    Attributes:
        engine: None of a server without numbers; so is everything after `taken_at`.
        state: of its server.
        taken_at: unix seconds; of a server without numbers, when the last ones came.
        session_tokens: the length that sessions are counted of here.
        no_forecast: why there is none.
        limit: what its requests wait for; None where it is not known.
        assumed: names of facts.
        unpredicted: why there is no prediction, and what would give it.
    """

    replica: str
    engine: str | None
    verdict: Verdict
    why: str
    state: str | None
    taken_at: float | None
    model_name: str | None = None
    usage_ratio: float | None = None
    session_tokens: int | None = None
    sessions_in_use: float | None = None
    sessions_observed: float | None = None
    sessions_predicted: float | None = None
    sessions_headroom: int | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    exhaustion_seconds: float | None = None
    no_forecast: str | None = None
    running: float | None = None
    waiting: float | None = None
    limit: Limit | None = None
    preemptions_total: float | None = None
    stays_warm: tuple[StaysWarm, ...] = ()
    assumed: tuple[str, ...] = ()
    unpredicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardView:
    """A whole board.

    Attributes:
        at: unix seconds by the clock of who made it.
        sentence: the verdict.
        rows: worst first.
        notice: that it is a replay, or None.
        faults: of the config and of what lists servers, a sentence each.
        hints: what they say that is no fault.
        is_complete: every server gives numbers, and there is one; no fault.
    """

    at: float
    sentence: str
    urgency: Urgency
    rows: tuple[BoardRow, ...]
    notice: str | None
    faults: tuple[str, ...]
    hints: tuple[str, ...]
    is_complete: bool

    @classmethod
    def of_no_answer(cls, at: float, why: str) -> "BoardView":
        """The board while nothing is known."""
        return cls(
            at=at,
            sentence="what the fleet does is not known",
            urgency=Urgency.UNKNOWN,
            rows=(),
            notice=None,
            faults=(why,),
            hints=(),
            is_complete=False,
        )


def count_verdicts(rows: Iterable[BoardRow]) -> tuple[tuple[Verdict, int], ...]:
    """How many rows have which verdict, worst first."""
    counted = Counter(row.verdict for row in rows)
    return tuple((verdict, counted[verdict]) for verdict in Verdict if counted[verdict])


@dataclass(frozen=True, slots=True)
class Note:
    """What holds for several engines.

    Attributes:
        engines: how many.
    """

    text: str
    engines: int


def notes(view: BoardView) -> tuple[Note, ...]:
    """What is assumed or not known, the most frequent first."""
    counted = Counter(text for row in view.rows for text in set(_notes_of(row)))
    return tuple(
        Note(text, number) for text, number in sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    )


def _notes_of(row: BoardRow) -> Iterator[str]:
    if row.engine is None:
        return
    for why in row.unpredicted:
        yield f"not predicted: {why}"
    if row.no_forecast is not None:
        yield f"no forecast: {row.no_forecast}"
    if row.assumed:
        yield f"assumed: {', '.join(row.assumed)}"
