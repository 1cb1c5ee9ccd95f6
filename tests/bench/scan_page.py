"""How fast a vLLM page is read, as a ratio against prometheus_client's parser in the same run: `make bench`.

Real recorded pages; the pages of 2 and 8 engines are the one-engine page with its engine series repeated, as
vLLM's front end repeats them. Both readers run in turn, round by round, and the median ratio is told.
"""

import re
import statistics
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.sources.vllm_metrics import parse_page
from tests.conftest import capture

ROUNDS = 9


def page_of(engines: int) -> bytes:
    """A real page with its engine series once per engine."""
    lines = []
    for line in capture("gqa_heavy").decode().split("\n"):
        count = engines if 'engine="0"' in line else 1
        lines += [line.replace('engine="0"', f'engine="{engine}"') for engine in range(count)]
    return "\n".join(lines).encode()


def seconds(work: Callable[[], object], repeat: int) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    for _ in range(repeat):
        work()
    return (time.process_time() - started) / repeat


def main() -> int:
    """Print one line per page."""
    print("reading one page: prometheus_client's full parse / our scanner, CPU time, median of rounds")
    for engines in (1, 2, 8):
        body = page_of(engines)
        text = body.decode()
        samples = len(re.findall(rb"^[a-z]", body, re.MULTILINE))
        ratios, ours = [], []
        for _ in range(ROUNDS):
            peer = seconds(lambda text=text: list(text_string_to_metric_families(text)), 1)  # type: ignore[misc]
            own = seconds(lambda body=body: parse_page(body), 10)  # type: ignore[misc]
            ratios.append(peer / own)
            ours.append(own)
        print(
            f"{engines} engine(s), {len(body):,} B, {samples:,} samples: "
            f"{statistics.median(ratios):.0f} times faster (min {min(ratios):.0f}, max {max(ratios):.0f}); "
            f"{statistics.median(ours) * 1e3:.2f} ms a page"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
