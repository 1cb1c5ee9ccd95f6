"""Lines that a server is asked for once a minute, taken over to the pages in between."""

from dataclasses import dataclass

from kvheadroom.capacity.readings import VllmPage
from kvheadroom.sources.metric_names import NEWEST, SELDOM_NAMES
from kvheadroom.sources.page_scanner import wanted_lines

_METRICS = frozenset(f"vllm:{NEWEST[name]}" for name in SELDOM_NAMES)
_BEGINNINGS = tuple(f"\nvllm:{name}{end}".encode() for name in sorted(SELDOM_NAMES) for end in "{ ")


@dataclass(frozen=True, slots=True)
class SeldomLines:
    """What a page told of them. All are of the same instant, so their ratios and growth agree with one another.

    Attributes:
        process_start: start time of the process; of another one nothing is taken over.
        lines: as `wanted_lines` gives them.
        metrics: as in VllmPage.
        engines: that the page told of.
    """

    process_start: float
    lines: tuple[tuple[bytes, bytes], ...]
    metrics: frozenset[str]
    engines: frozenset[str]


def seldom_lines(body: bytes, page: VllmPage) -> SeldomLines | None:
    """Those of a page that was asked for everything; None where its process cannot be told from another.

    Args:
        page: the same, read.
    """
    if page.process_start_time_seconds is None:
        return None
    lines = tuple(line for line in wanted_lines(body) if line[0].startswith(_BEGINNINGS))
    return SeldomLines(
        page.process_start_time_seconds,
        lines,
        page.metrics & _METRICS,
        frozenset(engine.engine for engine in page.engines),
    )
