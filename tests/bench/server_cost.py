"""What a scrape costs the vLLM server: the whole page against the filtered one, on a real vLLM: `make bench`.

CPU time of the server's own process, which other work on the machine changes little. The engine is idle after some
requests, so that all series are there. What is asked for once a minute counts as often as that, at an interval of 5 s.
"""

import os
import statistics
import tempfile
from pathlib import Path

import requests

from kvheadroom.sources.vllm_pages import FILTERED_PAGE, FILTERED_PAGE_WITH_SELDOM, SELDOM_SECONDS, WHOLE_PAGE
from tests.end_to_end.conftest import TINY_GQA_FLAGS
from tests.end_to_end.tiny_model import write_model
from tests.end_to_end.vllm_environment import ensure_vllm
from tests.end_to_end.vllm_server import VllmServer

INTERVAL_SECONDS = 5
SELDOM_SHARE = INTERVAL_SECONDS / SELDOM_SECONDS
ROUNDS = 7
SCRAPES = 300


def cpu_seconds(pid: int) -> float:
    """CPU time of one process, user and system (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost(server: VllmServer, path: str, session: requests.Session) -> float:
    """Seconds of the server's CPU for one scrape."""
    before = cpu_seconds(server.pid)
    for _ in range(SCRAPES):
        session.get(server.base_url + path, timeout=30).raise_for_status()
    return (cpu_seconds(server.pid) - before) / SCRAPES


def main() -> int:
    """Print one line."""
    python = ensure_vllm(lambda line: print(line, flush=True))
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "gqa", "gqa")
        with (
            VllmServer(python, model, TINY_GQA_FLAGS, Path(folder) / "vllm.log") as server,
            requests.Session() as session,
        ):
            prompt = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8}
            for _ in range(3):
                session.post(f"{server.base_url}/v1/completions", json=prompt, timeout=120).raise_for_status()
            whole, filtered = [], []
            for _ in range(ROUNDS):
                whole.append(cost(server, WHOLE_PAGE, session))
                often, seldom = (
                    cost(server, path, session) for path in (FILTERED_PAGE, FILTERED_PAGE_WITH_SELDOM)
                )
                filtered.append(often * (1 - SELDOM_SHARE) + seldom * SELDOM_SHARE)
            sizes = [
                len(session.get(server.base_url + path, timeout=30).content)
                for path in (WHOLE_PAGE, FILTERED_PAGE)
            ]
    ratios = [full / part for full, part in zip(whole, filtered, strict=True)]
    print(
        f"the server's CPU for one scrape: whole page ({sizes[0]:,} B) {statistics.median(whole) * 1e3:.2f} ms, wanted "
        f"samples ({sizes[1]:,} B) {statistics.median(filtered) * 1e3:.2f} ms: 1/{statistics.median(ratios):.1f} "
        f"(1/{min(ratios):.1f} to 1/{max(ratios):.1f})"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
