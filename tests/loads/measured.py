"""What a recording and its request log show: read from the files alone, with the daemon's own parser."""

import gzip
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvheadroom.capacity.readings import EngineSnapshot, VllmPage
from kvheadroom.lab.recordings import Recording, read_recording
from kvheadroom.sources.vllm_metrics import parse_page
from tests.loads.client import HUNG_UP
from tests.loads.scenarios import SCENARIOS, Scenario

README = Path(__file__).parents[1] / "recordings" / "README.md"
PAGES_SUFFIX, REQUESTS_SUFFIX = ".metrics.jsonl.gz", ".requests.jsonl.gz"

_ENDED = re.compile(
    r'^vllm:request_success_total\{engine="(\d+)",finished_reason="(\w+)".*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Instant:
    """One scrape."""

    offset_seconds: float
    engines: tuple[EngineSnapshot, ...]
    ended: Mapping[str, int]
    """Requests of all engines by how they ended, in vLLM's words."""

    @property
    def usage(self) -> float:
        """Of the fullest pool; 0 where no engine says it yet."""
        return max(engine.kv_usage_ratio or 0.0 for engine in self.engines)

    def total(self, field: str) -> float:
        """The sum over the engines that say it."""
        return sum(getattr(engine, field) or 0.0 for engine in self.engines)


@dataclass(frozen=True, slots=True)
class Measured:
    """One recording with its request log."""

    scenario: Scenario
    recording: Recording
    instants: tuple[Instant, ...]
    requests: tuple[Mapping[str, Any], ...]

    @property
    def max_usage(self) -> float:
        """The fullest that a scrape saw a pool."""
        return max(instant.usage for instant in self.instants)

    def most(self, field: str) -> float:
        """The largest sum over the engines that a scrape saw."""
        return max(instant.total(field) for instant in self.instants)

    def rise(self, field: str) -> float:
        """Of a counter, from the first scrape to the last."""
        return self.instants[-1].total(field) - self.instants[0].total(field)

    @property
    def ended(self) -> Mapping[str, int]:
        """Requests by how they ended, as the last page says."""
        return self.instants[-1].ended

    @property
    def hit_ratio(self) -> float | None:
        """Of the tokens looked up in the prefix cache; None where nothing was."""
        queries = self.rise("prefix_cache_queries_total")
        return self.rise("prefix_cache_hits_total") / queries if queries else None

    @property
    def tier_hit_ratio(self) -> float | None:
        """Of the same tokens, those that a tier behind the pool had; None where no tier was asked."""
        queries = self.rise("prefix_cache_queries_total")
        asked = self.rise("external_prefix_cache_queries_total")
        return self.rise("external_prefix_cache_hits_total") / queries if asked else None

    @property
    def preempting_scrapes(self) -> list[float]:
        """Offsets of the scrapes that show more preemptions than the one before."""
        counts = [(instant.offset_seconds, instant.total("preemptions_total")) for instant in self.instants]
        return [at for (_, before), (at, count) in itertools.pairwise(counts) if count > before]

    def times_over(self, usage: float) -> int:
        """How often the fullest pool went from below to above."""
        over = [instant.usage > usage for instant in self.instants]
        return sum(now and not before for before, now in itertools.pairwise(over))


def folder_of(scenario: Scenario) -> Path:
    """Where its recording is kept."""
    return README.with_name(scenario.folder)


def measure(name: str, folder: Path | None = None) -> Measured:
    """Read both files of one recording, from where it is kept or from elsewhere."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    folder = folder or folder_of(scenario)
    recording = read_recording(folder / f"{name}{PAGES_SUFFIX}")
    return Measured(
        scenario=scenario,
        recording=recording,
        instants=tuple(_instants(recording.pages())),
        requests=read_requests(folder / f"{name}{REQUESTS_SUFFIX}"),
    )


def read_requests(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines of a request log."""
    return tuple(json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())


def _instants(pages: Iterable[tuple[float, str]]) -> Iterable[Instant]:
    for offset, text in pages:
        page = parse_page(text.encode())
        if not isinstance(page, VllmPage) or page.problems:
            raise ValueError(f"at {offset:.3f} s: {page}")
        ended: dict[str, int] = {}
        for _, reason, value in _ENDED.findall(text):
            ended[reason] = ended.get(reason, 0) + int(float(value))
        yield Instant(offset, page.engines, ended)


def row(measured: Measured) -> str:
    """What the table in tests/recordings/README.md says of it."""
    hung_up = sum(request["status"] == HUNG_UP for request in measured.requests)
    requests = f"{len(measured.requests)}" + (f", {hung_up} hung up" if hung_up else "")
    hits = "-" if measured.hit_ratio is None else f"{measured.hit_ratio:.2f}"
    if measured.tier_hit_ratio is not None:
        hits += f" + {measured.tier_hit_ratio:.2f}"
    cells = (
        f"`{measured.scenario.name}`",
        measured.scenario.what,
        f"{measured.recording.duration_seconds:.0f}",
        requests,
        f"{measured.max_usage:.3f}",
        f"{measured.most('requests_running'):.0f}",
        f"{measured.most('requests_waiting'):.0f}",
        f"{measured.rise('preemptions_total'):.0f}",
        hits,
    )
    return f"| {' | '.join(cells)} |"


def put_into_readme(measured: Measured) -> None:
    """Its row takes the place of the one that tells of the recording before."""
    new = row(measured)
    begins = new[: new.index("|", 1)]
    lines = README.read_text(encoding="utf-8").splitlines()
    if not any(line.startswith(begins) for line in lines):
        raise ValueError(f"{README.name} has no row that begins with {begins}")
    README.write_text(
        "".join(f"{new if line.startswith(begins) else line}\n" for line in lines), encoding="utf-8"
    )
