"""What every scrape of a recording says of each engine: what really happened, whenever the daemon looked."""

import itertools
import statistics

from kvheadroom.capacity.readings import EngineSnapshot, SourceFailure
from kvheadroom.lab.backtest.events import EngineSample
from kvheadroom.lab.recordings import Recording, read_entries
from kvheadroom.sources.finished_requests import finished_requests
from kvheadroom.sources.vllm_metrics import parse_page


def all_samples(recording: Recording) -> tuple[dict[str, list[EngineSample]], list[float]]:
    """(engine -> what each scrape says of it, seconds of every scrape, also of those that failed)."""
    samples: dict[str, list[EngineSample]] = {}
    times: list[float] = []
    for entry in read_entries(recording.path):
        at = round(entry.taken_at - recording.first_at, 3)
        times.append(at)
        body = b"" if entry.failure is not None else entry.page.encode()
        page = parse_page(body)
        if isinstance(page, SourceFailure):
            continue
        finished = finished_requests(body)
        for engine in page.engines:
            samples.setdefault(engine.engine, []).append(sample_of(engine, at, finished.get(engine.engine)))
    return samples, times


def sample_of(engine: EngineSnapshot, at: float, finished_total: float | None = None) -> EngineSample:
    """What is scored of a snapshot."""
    return EngineSample(
        at=at,
        kv_usage_ratio=engine.kv_usage_ratio,
        requests_running=engine.requests_running,
        requests_waiting=engine.requests_waiting,
        preemptions_total=engine.preemptions_total,
        finished_total=finished_total,
    )


def interval_seconds(recording: Recording, times: list[float]) -> float:
    """What the header says, else what most scrapes keep."""
    told = recording.origin.get("interval_seconds")
    if isinstance(told, int | float):
        return float(told)
    steps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(steps) if steps else 1.0
