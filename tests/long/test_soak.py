"""Hours in minutes: the daemon on the replay, scraped hard, must not grow. `make lab`."""

import os
import time
from pathlib import Path

import pytest

from tests.daemon import daemon

MINUTES = float(os.environ.get("KVHEADROOM_SOAK_MINUTES", "10"))


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


@pytest.mark.lab
def test_a_daemon_under_readers_keeps_its_size_and_its_files() -> None:
    with daemon("demo") as demo:
        started = time.monotonic()
        reads = 0
        first: tuple[float, int] | None = None
        while time.monotonic() - started < MINUTES * 60:
            for path in ("/metrics", "/", "/api/v1/status"):
                assert demo.get(path).status_code == 200
                reads += 1
            if first is None and time.monotonic() - started > 30:
                first = resident_mib(demo.pid), open_files(demo.pid)
            time.sleep(0.05)
        assert first is not None
        last = resident_mib(demo.pid), open_files(demo.pid)
        print(
            f"\n{MINUTES:g} min, {reads} reads: {first[0]:.1f} -> {last[0]:.1f} MiB, {first[1]} -> {last[1]} files"
        )
        assert last[0] < first[0] + 8
        assert last[1] <= first[1] + 2
