"""What `/` costs for a fleet of 500 engines, beside our own /metrics of the same fleet in the same run: `make bench`."""

import gzip
import statistics
import time
from dataclasses import replace

from kvheadroom.capacity.assessment import Assessment, Reading, assess
from kvheadroom.capacity.fleet import FleetAssessment
from kvheadroom.monitor.history import EngineHistory
from kvheadroom.outputs.prometheus import exposition
from kvheadroom.outputs.status_page import engine_id, render_engine, render_fleet
from tests.bench.fleet_server import address
from tests.outputs.fleet import NOW, replica

ENGINES = 500
ROUNDS = 9
INTERVAL_SECONDS = 5
AGE_SECONDS = 1.25


def watched_for_an_hour(page: str) -> Assessment:
    """An engine under load whose last hour was watched, so that all there is to show is shown."""
    (engine,) = replica("gqa", page).engines
    history = EngineHistory(INTERVAL_SECONDS)
    last = NOW - AGE_SECONDS
    for number in range(3600 // INTERVAL_SECONDS + 1):
        ago = 3600 - number * INTERVAL_SECONDS
        tokens = engine.snapshot.generation_tokens_total or 0.0
        snapshot = replace(
            engine.snapshot,
            kv_usage_ratio=0.25 + number % 97 / 200,
            generation_tokens_total=tokens - ago * 3.0 + 11_000,
        )
        history.add(snapshot, last - ago, 100.0)
    reading = Reading(
        facts=engine.facts,
        snapshot=snapshot,
        taken_at=last,
        past=history.window_starts(),
        recent=history.recent(),
        five_minutes=history.five_minutes(),
        last_hour=history.last_hour(),
        facts_at=last - 3600.0,
    )
    return assess(reading, (1024, 262_144), engine.prediction)


def main() -> int:
    """Print one line."""
    engines = [watched_for_an_hour(page) for page in ("gqa_heavy", "gqa_waiting_and_preempting")]
    one = replica("gqa", "gqa_heavy")
    fleet = FleetAssessment(
        tuple(
            replace(
                one,
                replica=f"{address(number)}:8000",
                url=f"http://{address(number)}:8000",
                engines=(engines[number % 2],),
            )
            for number in range(ENGINES)
        )
    )
    each: dict[str, list[float]] = {"metrics": [], "page": [], "engine": []}
    for _ in range(ROUNDS):
        began = time.process_time()
        body, _ = exposition(fleet, NOW, "")
        each["metrics"].append(time.process_time() - began)
        began = time.process_time()
        html = render_fleet(fleet, NOW, None)
        each["page"].append(time.process_time() - began)
        began = time.process_time()
        render_engine(fleet, NOW, None, engine_id(fleet.replicas[-1].replica, "0"))
        each["engine"].append(time.process_time() - began)
    assert html.count("<polyline") == ENGINES
    ratios = [page / metrics for page, metrics in zip(each["page"], each["metrics"], strict=True)]
    print(
        f"the page of {ENGINES} engines: {statistics.median(each['page']) * 1e3:.0f} ms of CPU, {statistics.median(ratios):.2f} of "
        f"/metrics ({statistics.median(each['metrics']) * 1e3:.0f} ms; min {min(ratios):.2f}, max {max(ratios):.2f}); "
        f"{len(html) / 1e6:.2f} MB of HTML against {len(body) / 1e6:.2f} MB, {len(gzip.compress(html.encode(), 1)) / 1e3:.0f} kB as it is sent; "
        f"the page of one of them {statistics.median(each['engine']) * 1e3:.0f} ms"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
