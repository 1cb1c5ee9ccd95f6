"""Plans per second, and one plan against one vLLM page written by prometheus_client in the same run: `make bench`."""

import gzip
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvheadroom.capacity.cases import plan_case
from tests.bench.scan_page import seconds
from tests.conftest import capture

ROUNDS = 9
TRUTH = Path(__file__).parents[1] / "capacity" / "truth.jsonl.gz"


class VllmPage(Collector):
    """The families of a recorded vLLM page."""

    def __init__(self, text: str) -> None:
        self._families = list(text_string_to_metric_families(text))

    def collect(self) -> Iterable[Metric]:
        """The families, parsed once."""
        return self._families


def main() -> int:
    """Print what one case costs."""
    rows = [json.loads(line) for line in gzip.decompress(TRUTH.read_bytes()).splitlines()]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(VllmPage(capture("gqa_heavy").decode()))
    print(
        "planning one case / prometheus_client's generate_latest of one vLLM page, CPU time, median of rounds"
    )
    ratios, ours = [], []
    for _ in range(ROUNDS):
        peer = seconds(lambda: generate_latest(registry), 10)
        own = seconds(lambda: [plan_case(row) for row in rows], 1) / len(rows)
        ratios.append(own / peer)
        ours.append(own)
    own = statistics.median(ours)
    print(
        f"{len(rows):,} cases of all kinds: {1 / own:,.0f} a second, {own * 1e3:.2f} ms each; "
        f"{statistics.median(ratios):.2f} of a page (min {min(ratios):.2f}, max {max(ratios):.2f})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
