"""How fast a vLLM page is read, as a ratio against prometheus_client's parser in the same run: `make bench`.

Real recorded pages; the pages of 2 and 8 engines are the one-engine page with its engine series repeated, as
vLLM's front end repeats them. `known`: a page whose series stand where they stood before, as nearly all do;
`first sight`: nothing is remembered. All readers run in turn, round by round, and the median ratio is told.
"""

import re
import statistics
import time
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from kvheadroom.sources import vllm_metrics
from kvheadroom.sources.vllm_metrics import parse_page
from tests.conftest import capture

ROUNDS = 15


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


def first_sight(body: bytes) -> object:
    """Read a page as if none had been read before."""
    vllm_metrics._known_layout.cache_clear()
    return parse_page(body)


def told(ratios: list[float]) -> str:
    """The median, and how far the rounds went apart."""
    return f"{statistics.median(ratios):.0f} times (min {min(ratios):.0f}, max {max(ratios):.0f})"


def main() -> int:
    """Print one line per page."""
    print("reading one page: prometheus_client's full parse / our scanner, CPU time, median of rounds")
    for engines in (1, 2, 8):
        body = page_of(engines)
        text = body.decode()
        samples = len(re.findall(rb"^[a-z]", body, re.MULTILINE))
        known: list[float] = []
        first: list[float] = []
        ours: list[float] = []
        for _ in range(ROUNDS):
            peer = seconds(lambda text=text: list(text_string_to_metric_families(text)), 1)  # type: ignore[misc]
            first.append(peer / seconds(lambda body=body: first_sight(body), 20))  # type: ignore[misc]
            own = seconds(lambda body=body: parse_page(body), 100)  # type: ignore[misc]
            known.append(peer / own)
            ours.append(own)
        print(
            f"{engines} engine(s), {len(body):,} B, {samples:,} samples: known {told(known)}, "
            f"first sight {told(first)}; {statistics.median(ours) * 1e6:.0f} us a known page"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
